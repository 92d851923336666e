"""What a training can write in its output beside what it trained: an entry here is all that anything but the worker
knows of an export, and worker/model/writer.py has its writer. Its key is declared in spec.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Export:
    """A directory in the output."""

    name: str  #: of the directory, and of its artifact
    key: str  #: of the job file: the precision in which it is written, or "none"
    title: str
    adapter_reason: str  #: why it needs an adapter; empty if it does not
    bits_per_parameter: int
    is_base_model: bool  #: other jobs can train it


EXPORTS = (
    Export(
        "merged",
        "save_merged",
        "merged checkpoint",
        "there is no adapter to merge: full fine-tuning writes a complete checkpoint anyway",
        bits_per_parameter=16,
        is_base_model=True,
    ),
)
#: The values of a job file that asks for none.
NONE = dict.fromkeys((item.key for item in EXPORTS), "none")


def asked(spec: object) -> list[Export]:
    """Return the exports that a job asks for, by its spec or the spec in its plan."""
    values: Mapping[str, Any] = spec if isinstance(spec, Mapping) else vars(spec)
    return [item for item in EXPORTS if values.get(item.key, "none") != "none"]
