"""What a run of every kind of job does, one file of its name a kind, read top to bottom: sft, evaluate, merge.

    base.py       the run, as every recipe sees it: its stages, its gate, and its result so far
    start.py      the checkpoint of an earlier attempt, the libraries and the rows
    build.py      the model, audited, and the trainer around it
    train.py      the baseline, and the training
    output.py     from a trained model to the job's output

Nothing here imports the training stack before its backend is chosen.
"""
