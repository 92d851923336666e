"""The worker: one process that trains one job, and the only place that imports torch.

    python -m honed.worker JOB_DIR ATTEMPT [--backend NAME]

Where does another trainer go? Into a recipe, as worker/recipe/sft.py, over the mixin in worker/train/durable.py.

It reads the job's plan.json and writes the rest of the job's directory. Nothing in this package imports transformers,
trl or peft before the backend is chosen: Unsloth must be imported before them, and patches them for good.

    run.py                  an attempt: its trial, its recipe, its result
    recipe/                 the stages of every kind of job, top to bottom
    assignment.py           the contents of plan.json
    pulse.py                signs of life, for honed and systemd
    model/load.py           model and tokenizer, through model/transformers_backend.py or model/unsloth_backend.py
    model/audit.py          the loaded model compared with the plan
    model/cast.py           weights as they will be saved
    model/dtypes.py         the dtype of every tensor in an output
    model/merge.py          an adapter merged into its base, tensor by tensor
    model/export.py         the output, completed before it is renamed into place
    rows/data.py            rows to token ids and labels
    rows/mask.py            the check before the first step
    train/trainer.py        SFTTrainer, with whole checkpoints
    train/checkpoint.py     manifests, resume, rotation
    train/callback.py       steps and evaluations as events
    train/prediction.py     predictions for held-out examples
    train/optimizer.py      AdamW that keeps what rounding to bfloat16 removes
"""
