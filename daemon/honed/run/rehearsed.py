"""Kept answers of rehearsals (check/rehearsal.py), so that the next job of the same kind needs none.

    <cache>/rehearsed/<uid>/<key>.json      {"outcome", "error", "why"}

Each user has a directory, which honed alone writes: what one user's check answered decides about that user's jobs only.
The key is a hash of all that decides the answer. Losing the files costs a rehearsal each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from honed.system.error import HonedError, from_dict

#: Answers kept of one user; the oldest are removed.
MAX_KEPT = 256
#: The stage of a check in which it runs, after all others.
STAGE = "a step on a small model"
#: Bytes of an answer's file, at most.
MAX_BYTES = 64 * 1024
KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Rehearsed:
    """An answer: `refused` has an error, `unknown` a reason, as `passed` has where rows with images were not tried."""

    outcome: Literal["passed", "refused", "unknown"]
    error: HonedError | None = None
    why: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rehearsed:
        """Parse an answer. Raises ValueError, KeyError or TypeError if it is none."""
        outcome, error = data["outcome"], data.get("error")
        if outcome not in ("passed", "refused", "unknown") or (outcome == "refused") != isinstance(error, dict):
            raise ValueError("not an answer")
        return cls(outcome, from_dict(error) if isinstance(error, dict) else None, str(data.get("why") or "")[:1000])

    def as_dict(self) -> dict[str, Any]:
        return {"outcome": self.outcome, "error": self.error.as_dict() if self.error else None, "why": self.why}


@dataclass(frozen=True)
class Kept:
    """An answer that is to be kept, under its key."""

    key: str
    answer: Rehearsed

    def as_dict(self) -> dict[str, Any]:
        return {"key": self.key, **self.answer.as_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Kept:
        """Parse an answer of the check, which is not trusted. Raises ValueError, KeyError or TypeError."""
        if not KEY.fullmatch(data["key"]):
            raise ValueError("not a key")
        return cls(data["key"], Rehearsed.from_dict(data))


def directory(cache_dir: Path, uid: int) -> Path:
    return cache_dir / "rehearsed" / str(uid)


def read(directory: Path, key: str) -> Rehearsed | None:
    """Return the kept answer; None if there is none that can be read."""
    try:
        with (directory / f"{key}.json").open("rb") as file:
            return Rehearsed.from_dict(json.loads(file.read(MAX_BYTES)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write(directory: Path, kept: Kept) -> None:
    """Keep an answer, as far as that is possible: it is only a saving."""
    content = json.dumps(kept.answer.as_dict()).encode()
    if len(content) > MAX_BYTES:
        return
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        new = directory / f".{kept.key}.{os.getpid()}"
        new.write_bytes(content)
        # The check reads it as the job's submitter, whom honed's umask leaves out.
        for path, mode in ((directory.parent, 0o755), (directory, 0o755), (new, 0o644)):
            path.chmod(mode)
        new.replace(directory / f"{kept.key}.json")
        _prune(directory)


def _prune(directory: Path) -> None:
    names = (path for path in directory.iterdir() if KEY.fullmatch(path.stem) and path.suffix == ".json")
    files = sorted(names, key=lambda name: name.lstat().st_mtime)
    for file in files[:-MAX_KEPT]:
        file.unlink(missing_ok=True)
