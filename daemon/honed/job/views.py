"""Views of honed.db for other tools: their names and columns are stable, even if the tables below them change.

If a view's columns must change, a new view gets the next number and the old one stays. docs/database.md is generated
from here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class View:
    """One view: the meaning of a row, its columns with descriptions, and its query."""

    name: str
    row: str
    columns: dict[str, str]
    query: str

    @property
    def sql(self) -> str:
        return f"CREATE VIEW IF NOT EXISTS {self.name} ({', '.join(self.columns)}) AS {' '.join(self.query.split())};"


_JOB = "the job's number"
_WHEN = "when the worker reported it, ISO 8601 in UTC"

VIEWS = (
    View(
        "jobs_v1",
        "One row per job.",
        {
            "id": _JOB,
            "name": "the job's name",
            "state": "queued, held, running, succeeded, failed or cancelled",
            "outcome": "succeeded, cancelled, stopped_early (by its sweep), or the error's code; NULL until it ends",
            "priority": "jobs with higher priority run first",
            "submitted_at": "when it was accepted, ISO 8601 in UTC",
            "step": "the last reported step; NULL before the first",
            "num_steps": "total steps",
            "epoch": "passes over the training data so far",
            "loss": "loss at that step",
            "eta_sec": "estimated seconds left",
        },
        """SELECT id, name, state, outcome, priority, submitted_at, json_extract(progress, '$.step'),
                  json_extract(progress, '$.num_steps'), json_extract(progress, '$.epoch'),
                  json_extract(progress, '$.loss'), json_extract(progress, '$.eta_sec') FROM jobs""",
    ),
    View(
        "metrics_v1",
        "One row per metric and step. A step that was repeated after a resume appears once, with its last value.",
        {
            "job_id": _JOB,
            "job_name": "the job's name",
            "attempt": "the attempt that reported it",
            "step": "optimizer step; 0 is before the first step",
            "epoch": "passes over the training data",
            "name": "loss, learning_rate, grad_norm, mean_token_accuracy, eval_loss, …",
            "value": "the value",
            "created_at": _WHEN,
        },
        """SELECT metrics.job_id, jobs.name, metrics.attempt, metrics.step, metrics.epoch, metrics.name, metrics.value,
                  metrics.created_at
           FROM metrics LEFT JOIN jobs ON jobs.id = metrics.job_id
           WHERE NOT EXISTS (SELECT 1 FROM metrics AS later
                             WHERE later.job_id = metrics.job_id AND later.name = metrics.name
                               AND later.step = metrics.step
                               AND (later.attempt, later.rowid) > (metrics.attempt, metrics.rowid))""",
    ),
    View(
        "predictions_v1",
        "One row per example and step: the model's output and the reference.",
        {
            "job_id": _JOB,
            "job_name": "the job's name",
            "user_id": "the numeric user who submitted the job",
            "step": "optimizer step; 0 is before the first step",
            "epoch": "passes over the training data",
            "sample_index": "the number of the example; it stays the same throughout a job",
            "prompt": "the prompt",
            "ground_truth": "the reference answer",
            "prediction": "the model's output",
            "is_exact": "1 if it equals the reference, ignoring space around it and a `<think>` before it; else 0",
            "created_at": _WHEN,
        },
        """SELECT job_id, jobs.name, user_id, step, epoch, sample_index, prompt, ground_truth, prediction,
                  COALESCE(trim(CASE WHEN ltrim(prediction, char(32, 9, 10, 13)) GLOB '<think>*'
                                          AND instr(ground_truth, '</think>') = 0
                                     THEN CASE instr(prediction, '</think>') WHEN 0 THEN ''
                                          ELSE substr(prediction, instr(prediction, '</think>') + 8) END
                                     ELSE prediction END, char(32, 9, 10, 13))
                           = trim(ground_truth, char(32, 9, 10, 13)), 0),
                  created_at
           FROM training_predictions LEFT JOIN jobs ON jobs.id = job_id""",
    ),
)
SQL = "\n".join(view.sql for view in VIEWS)

_INTRODUCTION = """\
# The database

<!-- Made by `python scripts/reference.py --write docs/`; change daemon/honed/job/views.py instead. -->

`/var/lib/honed/honed.db` is SQLite, in WAL mode: it can be opened read-only while honed writes.

```sh
sqlite3 -readonly /var/lib/honed/honed.db \\
    "SELECT step, value FROM metrics_v1 WHERE job_name = 'capitals' AND name = 'eval_loss' ORDER BY step"
```

The views below are for other tools: their names and columns are stable. A later version may add views, and columns at
the end. The database is derived from the spool and the jobs' directories: if it is deleted, honed rebuilds it, within
seconds while it runs. Beside many thousands of jobs, metrics and predictions of the older ones follow within minutes.
So do not store your own data in it.

Its size is bounded: of one job it has at most 500,000 rows of metrics, 64 MiB of predictions, and 64 MiB of
other events. Beyond that, half of the rows of the older steps go, so that the others lie evenly; the first, the last
and the lowest of each stretch stay, and evaluations, unless these alone are too many. Of the predictions those between
the baseline and the newest steps go. Of one event, at most 1,000 metrics are taken, with names of at most 256
characters. What is left out is counted in an event of the kind `thinned` and named in the job's report, and
`attempts/*/events.jsonl` keeps everything.
"""
_TABLES = """\
## Tables

The tables below the views may gain columns. The names and columns of two of them are stable as well:

- `metrics (job_id, attempt, step, epoch, name, value, created_at)`: all metrics as reported, including repeated steps
- `training_predictions (job_id, user_id, epoch, step, sample_index, prompt, ground_truth, prediction, created_at)`
"""


def page() -> str:
    """Return the text of docs/database.md."""
    parts = [_INTRODUCTION]
    for view in VIEWS:
        rows = [f"| `{name}` | {words} |" for name, words in view.columns.items()]
        parts.append("\n".join([f"## {view.name}\n", f"{view.row}\n", "| Column | Is |", "|---|---|", *rows]) + "\n")
    return "\n".join([*parts, _TABLES])
