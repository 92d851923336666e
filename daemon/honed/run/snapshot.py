"""A hub model's or data set's place in the cache, and whether all of it is there.

    hub/models--org--name/refs/<revision>        the commit that a branch or tag means here (huggingface_hub's layout)
    hub/models--org--name/snapshots/<commit>/    its files, as links into blobs/
    fetched/models--org--name/<commit>.json      which files of it honed fetches; written before the first is there
    fetched/models--org--name/lock               locked by the fetch that runs

Data sets lie in `datasets--org--name`, in the same way. Of one with several splits or configurations only what a job
reads is fetched, and <commit>.<part>.json is the record of that.

A snapshot without a record was put there by somebody else, with huggingface_hub's own tools: nobody can tell from
outside whether it is whole, so it is used as far as it passes the check, and completed where it does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from honed.system import durable

#: The hub's own words for what a repository is.
MODEL, DATASET = "model", "dataset"
_WORDS = {MODEL: "model", DATASET: "data set"}


@dataclass(frozen=True)
class Missing:
    """A model or a data set that has to be fetched."""

    repo_id: str
    revision: str
    repo_type: str = MODEL
    name: str | None = None  #: of a data set's configuration
    split: str | None = None  #: that alone, of a data set

    @property
    def what(self) -> str:
        return _WORDS[self.repo_type]

    @property
    def key(self) -> str:
        """The key of the job file that names such a thing."""
        return "base_model" if self.repo_type == MODEL else "datasets"

    @property
    def part(self) -> str:
        """A name for the part of a repository that is meant; empty for what a model is, and for a whole data set."""
        chosen = {key: value for key in ("name", "split") if (value := getattr(self, key)) is not None}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16] if chosen else ""

    def as_dict(self) -> dict[str, Any]:
        """For people's programs: of a model its id and revision, of a data set what else is said of it."""
        said = {key: value for key, value in asdict(self).items() if value is not None}
        return said if self.repo_type != MODEL else {"repo_id": self.repo_id, "revision": self.revision}


@dataclass(frozen=True)
class Record:
    """What honed fetches of one commit."""

    repo_id: str
    commit: str
    files: Mapping[str, int]  #: name → bytes
    code: bool  #: whether code that comes with it is among them
    repo_type: str = MODEL
    part: str = ""  #: as Missing has it


def repository_dir(cache_dir: Path, repo_id: str, repo_type: str = MODEL) -> Path:
    return cache_dir / "hub" / _folder(repo_id, repo_type)


def record_dir(cache_dir: Path, repo_id: str, repo_type: str = MODEL) -> Path:
    return cache_dir / "fetched" / _folder(repo_id, repo_type)


def snapshot_dir(cache_dir: Path, repo_id: str, commit: str, repo_type: str = MODEL) -> Path:
    return repository_dir(cache_dir, repo_id, repo_type) / "snapshots" / commit


def _folder(repo_id: str, repo_type: str) -> str:
    return f"{repo_type}s--" + repo_id.replace("/", "--")


def commit_of(cache_dir: Path, repo_id: str, revision: str, repo_type: str = MODEL) -> str:
    """The commit that a branch or tag means in the cache, else the revision itself."""
    try:
        text = (repository_dir(cache_dir, repo_id, repo_type) / "refs" / revision).read_text(encoding="ascii")
    except (OSError, ValueError):
        return revision
    return text.strip() or revision


def find(cache_dir: Path, repo_id: str, revision: str) -> Path | None:
    """The snapshot's directory; None where there is none, or one of which files that honed fetches are not there."""
    commit = commit_of(cache_dir, repo_id, revision)
    path = snapshot_dir(cache_dir, repo_id, commit)
    record = read(cache_dir, repo_id, commit)
    return path if path.is_dir() and (record is None or has_all(path, record)) else None


def has_all(path: Path, record: Record) -> bool:
    """Whether every file is there with its size; a link is made when what it leads to is whole and was verified."""
    try:
        return all((path / name).stat().st_size == size for name, size in record.files.items())
    except OSError:
        return False


def is_fetched(cache_dir: Path, repo_id: str, path: Path) -> bool:
    """Whether honed fetched this snapshot, and all that it fetched is there: to fetch it again would change nothing."""
    record = read(cache_dir, repo_id, path.name)
    return record is not None and has_all(path, record)


def lacks_code(cache_dir: Path, repo_id: str, path: Path) -> bool:
    """Whether honed fetched this snapshot when code that comes with a model was not allowed."""
    record = read(cache_dir, repo_id, path.name)
    return record is not None and not record.code


def is_foreign(cache_dir: Path, repo_id: str, commit: str, repo_type: str) -> bool:
    """Whether honed has fetched nothing of this commit."""
    return not any(record_dir(cache_dir, repo_id, repo_type).glob(f"{commit}*.json"))


def read(cache_dir: Path, repo_id: str, commit: str, repo_type: str = MODEL, part: str = "") -> Record | None:
    """None where there is no record that can be read."""
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
