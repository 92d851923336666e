"""The worker: one process that trains one job, and the only place that imports torch.

    python -m honed.worker JOB_DIR ATTEMPT [--backend NAME]

It reads the job's plan.json and writes the rest of the job's directory. Nothing in this package imports transformers,
trl or peft before the backend is chosen: Unsloth has to come before them, and patches them for good.

    run.py          the story, top to bottom          assignment.py   what plan.json asks for
    load.py         model and tokenizer               transformers_backend.py, unsloth_backend.py
    audit.py        loaded against planned            data.py         rows to token ids and labels
    mask.py         the check before the first step   trainer.py      SFTTrainer, with whole checkpoints
    checkpoint.py   manifests, resume, rotation       callback.py     steps and evaluations as events
    prediction.py   what the model writes             export.py       the output, made whole
    merge.py        an adapter into its base model, tensor by tensor: a job of its own, or part of the export
    optimizer.py    AdamW that keeps what rounding to bfloat16 takes      cast.py   weights as they will be saved
    pulse.py        what systemd is told, where the worker is a unit's
"""
