"""A hub model's or data set's directory in the cache, and the check that it is complete.

    hub/models--org--name/refs/<revision>        the commit of a branch or tag (huggingface_hub's layout)
    hub/models--org--name/snapshots/<commit>/    its files, as links into blobs/
    fetched/models--org--name/<commit>.json      the files of it that honed fetches; written before the first one
    fetched/models--org--name/lock               locked by the running fetch

Data sets are stored the same way in `datasets--org--name`. Of a data set with several splits or configurations, only
the part that a job reads is fetched, recorded in <commit>.<part>.json.

A snapshot without a record was put there by huggingface_hub's own tools: whether it is complete cannot be seen, so it
is used if it passes the check, and completed if it does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from honed.system import durable

#: The hub's own names for the types of repositories.
MODEL, DATASET = "model", "dataset"
_WORDS = {MODEL: "model", DATASET: "data set"}


@dataclass(frozen=True)
class Missing:
    """A model or a data set that has to be fetched."""

    repo_id: str
    revision: str
    repo_type: str = MODEL
    name: str | None = None  #: a data set's configuration
    split: str | None = None  #: fetch only this split of a data set

    @property
    def what(self) -> str:
        return _WORDS[self.repo_type]

    @property
    def key(self) -> str:
        """The key of the job file that names such a repository."""
        return "base_model" if self.repo_type == MODEL else "datasets"

    @property
    def part(self) -> str:
        """The name of the selected part of a data set; empty for a model or a whole data set."""
        chosen = {key: value for key in ("name", "split") if (value := getattr(self, key)) is not None}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16] if chosen else ""

    def as_dict(self) -> dict[str, object]:
        """Return its facts for machine-readable output: a model's id and revision, and a data set's other fields."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return values if self.repo_type != MODEL else {"repo_id": self.repo_id, "revision": self.revision}


class FetchProgress(TypedDict, total=False):
    """The progress of a fetch; empty before it starts."""

    bytes: int
    of: int
    received: int  #: bytes that came over the network since this process was started
    files: int
    of_files: int
    file: str | None
    problem: str | None  #: that delays it
    paused_sec: float  #: that did not pass for this process: its deadline is as much later


@dataclass(frozen=True)
class Record:
    """The files that honed fetches of one commit."""

    repo_id: str
    commit: str
    files: Mapping[str, int]  #: name → bytes
    code: bool  #: True if they include code that comes with the model
    repo_type: str = MODEL
    part: str = ""  #: as in Missing


def repository_dir(cache_dir: Path, repo_id: str, repo_type: str = MODEL) -> Path:
    return cache_dir / "hub" / _folder(repo_id, repo_type)


def record_dir(cache_dir: Path, repo_id: str, repo_type: str = MODEL) -> Path:
    return cache_dir / "fetched" / _folder(repo_id, repo_type)


def snapshot_dir(cache_dir: Path, repo_id: str, commit: str, repo_type: str = MODEL) -> Path:
    return repository_dir(cache_dir, repo_id, repo_type) / "snapshots" / commit


def _folder(repo_id: str, repo_type: str) -> str:
    return f"{repo_type}s--" + repo_id.replace("/", "--")


def commit_of(cache_dir: Path, repo_id: str, revision: str, repo_type: str = MODEL) -> str:
    """Return the commit of a branch or tag in the cache, else the revision itself."""
    try:
        text = (repository_dir(cache_dir, repo_id, repo_type) / "refs" / revision).read_text(encoding="ascii")
    except (OSError, ValueError):
        return revision
    return text.strip() or revision


def find(cache_dir: Path, repo_id: str, revision: str) -> Path | None:
    """Return the snapshot's directory; None if there is none, or if files that honed fetches are missing."""
    commit = commit_of(cache_dir, repo_id, revision)
    path = snapshot_dir(cache_dir, repo_id, commit)
    record = read(cache_dir, repo_id, commit)
    return path if path.is_dir() and (record is None or has_all(path, record)) else None


def has_all(path: Path, record: Record) -> bool:
    """Tell whether every file exists with its size; a link is created only once its target is complete and verified."""
    try:
        return all((path / name).stat().st_size == size for name, size in record.files.items())
    except OSError:
        return False


def is_fetched(cache_dir: Path, repo_id: str, path: Path) -> bool:
    """Tell whether honed fetched this snapshot completely: fetching it again would change nothing."""
    record = read(cache_dir, repo_id, path.name)
    return record is not None and has_all(path, record)


def lacks_code(cache_dir: Path, repo_id: str, path: Path) -> bool:
    """Tell whether honed fetched this snapshot while code that comes with a model was not allowed."""
    record = read(cache_dir, repo_id, path.name)
    return record is not None and not record.code


def is_foreign(cache_dir: Path, repo_id: str, commit: str, repo_type: str) -> bool:
    """Tell whether honed has fetched nothing of this commit."""
    return not any(record_dir(cache_dir, repo_id, repo_type).glob(f"{commit}*.json"))


def read(cache_dir: Path, repo_id: str, commit: str, repo_type: str = MODEL, part: str = "") -> Record | None:
    """Return the record; None if there is no readable one."""
    try:
        return Record(**json.loads((record_dir(cache_dir, repo_id, repo_type) / _name(commit, part)).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def write(cache_dir: Path, record: Record) -> None:
    directory = record_dir(cache_dir, record.repo_id, record.repo_type)
    durable.make_dir(directory)
    durable.write_json(directory / _name(record.commit, record.part), asdict(record))


def _name(commit: str, part: str) -> str:
    return f"{commit}.{part}.json" if part else f"{commit}.json"
