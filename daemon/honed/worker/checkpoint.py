"""Checkpoints that are whole or not there.

checkpoints/checkpoint-N/MANIFEST.json    written last, after everything else in the directory is durable: the names,
                                          sizes and hashes of its files, and what the run needs besides
checkpoints/checkpoint-N.damaged          set aside: no manifest, or one that does not hold
checkpoints/.checkpoint-N.old             on its way out
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from honed import durable

MANIFEST = "MANIFEST.json"
#: Bytes; larger files are held to their size alone, so that saving and resuming stay quick.
MAX_HASHED_BYTES = 64 * 1024 * 1024

_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass
class Progress:
    """What a run must remember besides the trainer's own state."""

    is_evaluation_due: bool = False  #: it was cut short before this checkpoint
    predicted_step: int | None = None  #: the last step for which predictions were written
    elapsed_sec: float = 0.0  #: seconds spent, all attempts together
    num_trained_tokens: int = 0
    data_hashes: dict[str, str] = field(default_factory=dict)  #: sha256 of each data file, as it was read
    guard_before: float | None = None  #: the guard's metric at step 0
    num_below: int = 0  #: evaluations in a row with it below the line
    prediction_sec: float = 0.0  #: seconds that predictions have taken
    figures_before: dict[str, float] = field(default_factory=dict)  #: eval_loss and the predictions' scores at step 0
    divergence: dict[str, Any] = field(default_factory=dict)  #: the last steps' losses and gradients, see divergence.py


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint."""

    path: Path
    step: int
    progress: Progress = field(default_factory=Progress)


def seal(path: Path, progress: Progress) -> None:
    """Make all that lies in `path` durable, then say so in its manifest: the commit point of a checkpoint."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST)
    for file in files:
        # safetensors writes files of mode 0600, which shuts out honed and, by the ACL's mask, who dropped the job.
        file.chmod(file.stat().st_mode | (path.stat().st_mode & 0o044))
        _sync(file)
    for directory in [*(entry for entry in path.rglob("*") if entry.is_dir()), path]:
        durable.sync_dir(directory)
    durable.sync_dir(path.parent)
    entries = {str(file.relative_to(path)): _entry(file) for file in files}
    durable.write_json(path / MANIFEST, {"files": entries, "progress": asdict(progress)})


def unseal(path: Path) -> None:
    """Take back the word that `path` is whole, before it is written anew."""
    with contextlib.suppress(FileNotFoundError):
        (path / MANIFEST).unlink()
        durable.sync_dir(path)


def find(checkpoints_dir: Path) -> tuple[Checkpoint | None, list[Path]]:
    """The newest whole checkpoint, and those newer ones that were not and have been set aside."""
    set_aside: list[Path] = []
    for step, path in reversed(_steps(checkpoints_dir)):
        progress = _read(path)
        if progress is not None:
            return Checkpoint(path, step, progress), set_aside
        damaged = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        path.rename(damaged)
        set_aside.append(damaged)
    return None, set_aside


def rotate(checkpoints_dir: Path, *, limit: int, keep: set[Path]) -> None:
    """Remove all but the newest `limit` whole checkpoints and those to `keep`. Called once a newer one is sealed."""
    for leftover in checkpoints_dir.glob(".checkpoint-*.old"):
        shutil.rmtree(leftover, ignore_errors=True)
    whole = [path for _, path in _steps(checkpoints_dir) if (path / MANIFEST).is_file()]
    for path in whole[: -max(limit, 1)]:
        if path not in keep:
            # Renamed first: a removal cut short must not look like a checkpoint that was damaged.
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.old")), ignore_errors=True)


def _steps(checkpoints_dir: Path) -> list[tuple[int, Path]]:
    if not checkpoints_dir.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in checkpoints_dir.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def _read(path: Path) -> Progress | None:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if all(_entry(path / name) == entry for name, entry in manifest["files"].items()):
            return Progress(**manifest["progress"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _entry(file: Path) -> dict[str, int | str | None]:
    size = file.stat().st_size
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if size <= MAX_HASHED_BYTES else None
    return {"size": size, "sha256": digest}


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
