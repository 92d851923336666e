"""Directories in which the trackers of `report_to` write: below the job's directory, and never over a network."""

from __future__ import annotations

import os
from collections.abc import Collection, MutableMapping

from honed.worker.assignment import Assignment


def prepare(job: Assignment, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that transformers' callbacks and the trackers read, before any of them is imported."""
    asked = set(job.spec.report_to)
    directory = job.layout.dir
    if "wandb" in asked:
        environment.pop("WANDB_API_KEY", None)
        environment.update(
            {
                "WANDB_MODE": "offline",
                "WANDB_DIR": str(directory),  # it makes a directory wandb/ there
                **{
                    f"WANDB_{name}_DIR": str(directory / "wandb" / name.lower()) for name in ("CACHE", "CONFIG", "DATA")
                },
                "WANDB_CONSOLE": "off",  # worker.log has it
                "WANDB_DISABLE_CODE": "true",
                "WANDB_DISABLE_GIT": "true",
                "WANDB_ERROR_REPORTING": "false",
                "WANDB_LOG_MODEL": "false",
                "WANDB_SILENT": "true",
                "WANDB_WATCH": "false",
            }
        )
    if "tensorboard" in asked:
        environment["TENSORBOARD_LOGGING_DIR"] = str(directory / "tensorboard" / str(job.attempt.dir.name))
    if "mlflow" in asked:
        _forget(environment, "MLFLOW_", but=("MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS"))
        environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{directory}/mlflow.db"
        # It asks a server of its makers what to report, and keeps an id for that in the home directory.
        environment["MLFLOW_DISABLE_TELEMETRY"] = "true"
        environment["HF_MLFLOW_LOG_ARTIFACTS"] = "false"
    if "trackio" in asked:
        _forget(environment, "TRACKIO_")
        environment["TRACKIO_DIR"] = str(directory / "trackio")


def _forget(environment: MutableMapping[str, str], prefix: str, *, but: Collection[str] = ()) -> None:
    """Remove a tracker's variables in honed's own environment: servers, Spaces, buckets, webhooks, runs to resume."""
    for name in [name for name in environment if name.startswith(prefix) and name not in but]:
        del environment[name]
