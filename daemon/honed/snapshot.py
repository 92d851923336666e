"""Where a model of the hub lies in the cache, and whether all of it is there.

    hub/models--org--name/refs/<revision>        the commit that a branch or tag means here (huggingface_hub's layout)
    hub/models--org--name/snapshots/<commit>/    its files, as links into blobs/
    fetched/models--org--name/<commit>.json      which files of it honed fetches; written before the first is there
    fetched/models--org--name/lock               locked by the fetch that runs

A snapshot without a record was put there by somebody else, with huggingface_hub's own tools: nobody can tell from
outside whether it is whole, so it is used as far as it passes the check, and completed where it does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from honed import durable


@dataclass(frozen=True)
class Missing:
    """A model that has to be fetched."""

    repo_id: str
    revision: str


@dataclass(frozen=True)
class Record:
    """What honed fetches of one commit."""

    repo_id: str
    commit: str
    files: Mapping[str, int]  #: name → bytes
    code: bool  #: whether code that comes with it is among them


def repository_dir(cache_dir: Path, repo_id: str) -> Path:
    return cache_dir / "hub" / _folder(repo_id)


def record_dir(cache_dir: Path, repo_id: str) -> Path:
    return cache_dir / "fetched" / _folder(repo_id)


def snapshot_dir(cache_dir: Path, repo_id: str, commit: str) -> Path:
    return repository_dir(cache_dir, repo_id) / "snapshots" / commit


def _folder(repo_id: str) -> str:
    return "models--" + repo_id.replace("/", "--")


def commit_of(cache_dir: Path, repo_id: str, revision: str) -> str:
    """The commit that a branch or tag means in the cache, else the revision itself."""
    try:
        text = (repository_dir(cache_dir, repo_id) / "refs" / revision).read_text(encoding="ascii")
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


def read(cache_dir: Path, repo_id: str, commit: str) -> Record | None:
    """None where there is no record that can be read."""
    try:
        return Record(**json.loads((record_dir(cache_dir, repo_id) / f"{commit}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def write(cache_dir: Path, record: Record) -> None:
    directory = record_dir(cache_dir, record.repo_id)
    durable.make_dir(directory)
    durable.write_json(directory / f"{record.commit}.json", asdict(record))
