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
_WHEN = "when the worker told it, ISO 8601 in UTC"

VIEWS = (
    View(
        "jobs_v1",
        "One row a job.",
        {
            "id": _JOB,
            "name": "the job's name",
            "state": "queued, held, running, succeeded, failed or cancelled",
            "outcome": "how it ended: succeeded, or the code of what ended it; NULL before",
            "priority": "higher runs first",
            "submitted_at": "when it was accepted, ISO 8601 in UTC",
            "step": "the last step that was told of; NULL before the first",
            "num_steps": "steps in all",
            "epoch": "passes over the training data so far",
            "loss": "loss of that step",
            "eta_sec": "seconds that are left",
        },
        """SELECT id, name, state, outcome, priority, submitted_at, json_extract(progress, '$.step'),
                  json_extract(progress, '$.num_steps'), json_extract(progress, '$.epoch'),
                  json_extract(progress, '$.loss'), json_extract(progress, '$.eta_sec') FROM jobs""",
    ),
    View(
        "metrics_v1",
        "One row a figure of a step. A step that was taken again, after a resume, stands once, as it was told last.",
        {
            "job_id": _JOB,
            "job_name": "the job's name",
            "attempt": "the attempt that told it",
            "step": "optimizer step; 0 is before the first",
            "epoch": "passes over the training data",
            "name": "loss, learning_rate, grad_norm, eval_loss, …",
            "value": "the figure",
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
        "One row an example and step: what the model wrote, beside the truth.",
        {
            "job_id": _JOB,
            "job_name": "the job's name",
            "user_id": "the numeric user who dropped the job",
            "step": "optimizer step; 0 is before the first",
            "epoch": "passes over the training data",
            "sample_index": "the example: the same number is the same example, through all of a job",
            "prompt": "what was asked",
            "ground_truth": "what should be said",
            "prediction": "what the model wrote",
            "is_exact": "1 where that is the truth, but for space around it and a `<think>` before it; else 0",
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

<!-- Made by `python -m honed.cli.reference --write docs/`; change daemon/honed/job/views.py instead. -->

`/var/lib/honed/honed.db` is SQLite, in WAL mode: open it read-only, as often as you like, while honed writes.

```sh
sqlite3 -readonly /var/lib/honed/honed.db \\
    "SELECT step, value FROM metrics_v1 WHERE job_name = 'capitals' AND name = 'eval_loss' ORDER BY step"
```

The views below are for other tools: their names and columns stay. A later version may add views, and columns at the
end. The database is derived from the spool and the jobs' directories: delete it, and honed makes it again, within
seconds where it runs. So nothing of one's own belongs into it.
"""
_TABLES = """\
## Tables

The tables below the views may grow columns. Of two of them the names and columns stay as well:

- `metrics (job_id, attempt, step, epoch, name, value, created_at)`: all figures as told, repeated steps included
- `training_predictions (job_id, user_id, epoch, step, sample_index, prompt, ground_truth, prediction, created_at)`
"""


def page() -> str:
    """Return the text of docs/database.md."""
    parts = [_INTRODUCTION]
    for view in VIEWS:
        rows = [f"| `{name}` | {words} |" for name, words in view.columns.items()]
        parts.append("\n".join([f"## {view.name}\n", f"{view.row}\n", "| Column | Is |", "|---|---|", *rows]) + "\n")
    return "\n".join([*parts, _TABLES])
