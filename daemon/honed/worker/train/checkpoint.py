"""Checkpoints that are whole or not there.

checkpoints/.new/checkpoint-N             being written; renamed into place once all of it is durable
checkpoints/checkpoint-N/MANIFEST.json    the names, sizes and hashes of its files, and the additional state of the run
checkpoints/checkpoint-N.damaged          set aside: its manifest does not match, or it has none
checkpoints/.checkpoint-N.old             being removed; restored where a crash left nothing else of its step
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from honed.job import fence, tree
from honed.job.job import known
from honed.system import durable
from honed.worker import message
from honed.worker.train import digest
from honed.worker.train.divergence import Kept

MANIFEST = "MANIFEST.json"
#: Without this file a checkpoint cannot be resumed, whatever its manifest says.
REQUIRED = "trainer_state.json"

_NEW = ".new"
_NAME = re.compile(r"checkpoint-(\d+)")
_DAMAGED = re.compile(r"checkpoint-(\d+)\.damaged.*")
_OLD = re.compile(r"\.checkpoint-(\d+)\.old")


@message.carry
@dataclass
class Progress:
    """State that a run must keep besides the trainer's own."""

    is_evaluation_due: bool = False  #: an evaluation was cut short before this checkpoint
    is_prediction_due: bool = False  #: a round of predictions without an evaluation was cut short
    is_epoch_end_due: bool = False  #: the work after the last step of an epoch was cut short
    has_ended: bool = False  #: nothing is left to train: the last step, early stopping or the guard ended it
    predicted_step: int | None = None  #: the last step for which predictions were written
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  #: of every round of predictions, by its step
    guarded: dict[str, float] = field(default_factory=dict)  #: the guard's measurements, by step
    elapsed_sec: float = 0.0  #: seconds spent, all attempts together
    num_trained_tokens: int = 0
    data_hashes: dict[str, str] = field(default_factory=dict)  #: sha256 of every data file, as it was read
    guard_before: float | None = None  #: the guard's metric at step 0
    num_below: int = 0  #: consecutive evaluations with it below the line
    prediction_sec: float = 0.0  #: seconds that predictions have taken
    figures_before: dict[str, float] = field(default_factory=dict)  #: eval_loss and the predictions' scores at step 0
    divergence: Kept = field(default_factory=Kept)
    running_loss: float = 0.0  #: the sum of the losses since `logged_step`, which transformers forgets
    running_figures: dict[str, list[float]] = field(default_factory=dict)  #: TRL's metrics since then
    logged_step: int | None = None  #: the last step whose loss was logged
    num_seen_tokens: int = 0  #: by TRL's count, without padding
    loss_type: str | None = None  #: SFTConfig's, once it was compared with the model's
    num_ranks: int = 1  #: processes that trained together
    running_losses: list[float] = field(default_factory=list)  #: of every rank, where there are several
    is_divided: bool = False  #: every rank has written its part, as in parts.py

    @classmethod
    def read(cls, document: dict[str, Any]) -> Progress:
        """Read the progress in a manifest; unknown keys of a later version are left out."""
        return cls(**known(cls, document))


@message.carry
@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint."""

    path: Path
    step: int
    progress: Progress = field(default_factory=Progress)


@message.carry
@dataclass(frozen=True)
class SetAside:
    """A checkpoint that was not whole."""

    name: str  #: its former name
    path: Path  #: where it is now
    why: str


def _no_beat() -> None:
    pass


# --- writing ----------------------------------------------------------------------------------------------------------


def new_dir(checkpoints_dir: Path) -> Path:
    """Make an empty directory to write `checkpoint-N` into, without anything that a crash left in it."""
    path = checkpoints_dir / _NEW
    if path.exists():
        tree.clear(path)
    path.mkdir()
    return path


def place_of_new(checkpoints_dir: Path, step: int) -> Path:
    """Return where the checkpoint of a step is written."""
    return checkpoints_dir / _NEW / f"checkpoint-{step}"


def seal(path: Path, progress: Progress, *, beat: Callable[[], None] = _no_beat) -> None:
    """Make all files in `path` durable, and describe them in a manifest."""
    files = sorted(file for file in durable.below(path) if file.is_file() and file.name != MANIFEST)
    for file in files:
        # safetensors writes files of mode 0600, which excludes honed and, by the ACL's mask, the job's owner.
        file.chmod(file.stat().st_mode | (path.stat().st_mode & 0o044))
    entries = digest.take(path, [str(file.relative_to(path)) for file in files], beat=beat)
    for directory in (entry for entry in durable.below(path) if entry.is_dir()):
        durable.sync_dir(directory)
    match = _NAME.fullmatch(path.name)
    manifest = {"step": int(match[1]) if match else None, "files": entries, "progress": asdict(progress)}
    durable.write_json(path / MANIFEST, manifest | {"sha256": _fingerprint(manifest)})


def put(path: Path, checkpoints_dir: Path) -> Path:
    """Rename a sealed checkpoint into its place: the commit point. It replaces one of the same step."""
    target = checkpoints_dir / path.name
    old = checkpoints_dir / f".{path.name}.old"
    if target.exists():
        tree.remove(old)
        target.rename(old)
    path.rename(target)
    durable.sync_dir(checkpoints_dir)
    tree.remove(old)
    tree.remove(checkpoints_dir / _NEW)
    return target


def rotate(checkpoints_dir: Path, *, limit: int, keep: set[Path]) -> None:
    """Remove all but the newest `limit` whole checkpoints and those in `keep`. Called once a newer one is in place.

    Damaged ones are removed once `limit` whole ones are newer.
    """
    for leftover in checkpoints_dir.glob(".checkpoint-*.old"):
        tree.remove(leftover)
    whole = [(step, path) for step, path in _named(checkpoints_dir, _NAME) if (path / MANIFEST).is_file()]
    limit = max(limit, 1)
    for _, path in whole[:-limit]:
        if path not in keep:
            # Renamed first: a removal cut short must not look like a checkpoint that was damaged.
            tree.remove(path.rename(path.with_name(f".{path.name}.old")))
    if len(whole) >= limit:
        for step, path in _named(checkpoints_dir, _DAMAGED):
            if step < whole[-limit][0]:
                _remove(path)


def commit(
    made: Path, progress: Progress, checkpoints_dir: Path, *, limit: int, keep: set[Path], beat: Callable[[], None]
) -> Path:
    """Seal a written checkpoint, put it into its place, and remove older ones; return its place.

    This is all that happens to files after they are written. An error before the rename leaves nothing of it.
    """
    try:
        seal(made, progress, beat=beat)
        fence.require_current()
        target = put(made, checkpoints_dir)
    except BaseException:
        tree.remove(made.parent)  # where the disk is full, the room is needed
        raise
    rotate(checkpoints_dir, limit=limit, keep=keep)
    return target


def best_of_newest(checkpoints_dir: Path) -> Path | None:
    """Return the checkpoint that was the best when the newest whole one was made; None if there was none."""
    whole = [path for _, path in _named(checkpoints_dir, _NAME) if (path / MANIFEST).is_file()]
    try:
        best = json.loads((whole[-1] / REQUIRED).read_bytes())["best_model_checkpoint"] if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return checkpoints_dir / Path(best).name if isinstance(best, str) else None


# --- reading ----------------------------------------------------------------------------------------------------------


def find(checkpoints_dir: Path, *, beat: Callable[[], None] = _no_beat) -> tuple[Checkpoint | None, list[SetAside]]:
    """Return the newest whole checkpoint, and the newer ones that were damaged and have been set aside.

    A checkpoint is whole if all files have the size and the hash in its manifest. `beat` is called between reads,
    and may raise to stop that.
    """
    if not checkpoints_dir.is_dir():
        return None, []
    tree.remove(checkpoints_dir / _NEW)
    _take_back(checkpoints_dir)
    set_aside: list[SetAside] = []
    for step, path in reversed(_named(checkpoints_dir, _NAME)):
        progress, why = read(path, beat=beat)
        if progress is not None:
            return Checkpoint(path, step, progress), set_aside
        set_aside.append(SetAside(path.name, _set_aside(path), why))
    return None, set_aside


def read(path: Path, *, beat: Callable[[], None] = _no_beat) -> tuple[Progress | None, str]:
    """Return a checkpoint's progress if it is whole; else None, and the reason."""
    if path.is_symlink() or not path.is_dir():
        return None, "it is not a directory of its own"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest.pop("sha256") != _fingerprint(manifest):
            return None, f"{MANIFEST} was changed"
        entries = manifest["files"]
        if REQUIRED not in entries:
            return None, f"{MANIFEST} does not list {REQUIRED}"
        if path.name != f"checkpoint-{manifest['step']}":
            return None, f"it is of step {manifest['step']}"
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in entries):
            return None, f"{MANIFEST} refers to a file outside the checkpoint"
        progress = Progress.read(manifest["progress"])
        if (why := digest.fault(path, entries, beat=beat)) is not None:
            return None, why
    except FileNotFoundError:
        return None, f"it has no {MANIFEST}: it is incomplete"
    except OSError as error:
        return None, f"{path.name}: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, f"{MANIFEST} is not valid"
    return progress, ""


def _fingerprint(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _named(checkpoints_dir: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return all entries with such a name, even if they are no directories, by step."""
    matches = ((pattern.fullmatch(path.name), path) for path in checkpoints_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _take_back(checkpoints_dir: Path) -> None:
    """Restore the newest step's checkpoint where a crash between the two renames of `put` left only its old name."""
    newest = max((step for step, _ in _named(checkpoints_dir, _NAME)), default=-1)
    for step, old in _named(checkpoints_dir, _OLD):
        if step > newest:
            old.rename(checkpoints_dir / f"checkpoint-{step}")
        else:
            tree.remove(old)


def _set_aside(path: Path) -> Path:
    """Rename a checkpoint to an unused `.damaged` name. Raises OSError if the directory cannot be changed."""
    name = f"{path.name}.damaged"
    number = 1
    while (aside := path.with_name(name if number == 1 else f"{name}-{number}")).exists() or aside.is_symlink():
        number += 1
    return path.rename(aside)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        tree.remove(path)
