"""The writers of the exports (spec/export.py): what is made from the output's files, and how that is compared with the
trained model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from honed.spec.export import Export
from honed.worker.assignment import Assignment
from honed.worker.model import likeness, merge
from honed.worker.model.config import load_config


class _Write(Protocol):
    def __call__(
        self, job: Assignment, export: Export, output_dir: Path, target: Path, progress: Callable[[int, int], None], /
    ) -> list[str]: ...


@dataclass(frozen=True)
class Writer:
    """How one export is made. Both raise HonedError, or whatever the libraries do; the output is kept without it."""

    write: _Write  #: from the output's files into a directory; returns the changes to the base's files
    compare: Callable[..., str]  #: with what was trained, as likeness.compare; returns a remark


def _merge(
    job: Assignment, export: Export, output_dir: Path, target: Path, progress: Callable[[int, int], None]
) -> list[str]:
    """Merge the saved adapter into the base model as it is stored: unquantized, even if training quantized it."""
    merged = merge.merge(
        job.base_model_path,
        output_dir,
        target,
        dtype=getattr(job.spec, export.key),
        config=load_config(job),
        trained=job.precision,
        trust_remote_code=job.spec.trust_remote_code,
        progress=progress,
    )
    return list(merged.changes)


WRITERS = {"merged": Writer(_merge, likeness.compare)}
