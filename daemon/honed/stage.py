"""`honectl submit --stage`: copies what a job names and its worker cannot reach to where it can, and names the copies.

    staged/<random>/     made by the dropper, read by honed and the workers through its ACL, and by nobody else
    staged/<random>/0/   a file or a directory, under its own name

staged/ itself is a drop box, as incoming/ is: those who may drop make directories there, and see nobody else's.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed import access, document, spec
from honed.access import Acl
from honed.config import Config
from honed.error import EnvironmentInvalidError, HonedError
from honed.layout import Layout
from honed.policy import Named, Policy, inputs


@dataclass(frozen=True)
class Staged:
    """A job file that names the copies, and what was copied: (key, from, to)."""

    spec_path: Path
    copies: tuple[tuple[str, Path, Path], ...]


def stage(spec_path: Path, layout: Layout, config: Config) -> Staged:
    """Copy what has to be copied. Returns the job file as it is where nothing has to.

    Raises what makes the file no job, and EnvironmentInvalidError where the drop box is not ours to use.
    """
    job_spec = spec.load(spec_path, max_bytes=config.spool.max_spec_bytes)
    policy = Policy.of(layout, config, os.getuid())
    model, adapter = (
        Path(value) if value is not None and value.startswith("/") else None
        for value in (job_spec.base_model, job_spec.adapter)
    )
    closed = [named for named in inputs(job_spec, model, adapter) if not policy.is_reachable(named)]
    if not closed:
        return Staged(spec_path, ())
    place = _make_place(layout)
    try:
        copies = tuple((named.key, named.path, _copy(named, place / str(n))) for n, named in enumerate(closed))
        data = document.parse(spec_path.read_bytes(), spec_path.suffix).data
        for key, _, copy in copies:
            _set(data, key, str(copy))
        staged_path = place / f"{spec_path.stem}.json"
        staged_path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return Staged(staged_path, copies)


def _make_place(layout: Layout) -> Path:
    place = layout.staged_dir / secrets.token_hex(8)
    try:
        place.mkdir(mode=0o700)
    except OSError as error:
        raise EnvironmentInvalidError(
            f"{layout.staged_dir}: {error.strerror}",
            hint=f"join the group {access.DROPPERS_GROUP}; where there is no such directory, install honed",
        ) from error
    readers = [who for who in map(access.person, (access.DAEMON_USER, access.WORKERS_USER)) if who is not None]
    # The daemon may remove it, too, once its job is gone.
    rights = {who.uid: 7 if who.name == access.DAEMON_USER else 5 for who in readers}
    if not access.set_acl(place, Acl(owner=7, group=0, other=0, users=rights, groups={}), inherited=True):
        place.chmod(0o755)
    return place


def _copy(named: Named, to: Path) -> Path:
    """A copy of a file or a directory, links followed, without the modes, which the place's ACL decides."""
    to.mkdir()
    try:
        for source, relative in _tree(named.path):
            target = to / named.path.name / relative if str(relative) != "." else to / named.path.name
            if source.is_dir():
                target.mkdir()
            else:
                shutil.copyfile(source, target)
    except OSError as error:
        raise _unread(named, error) from error
    return to / named.path.name


def _unread(named: Named, error: OSError) -> HonedError:
    return named.error(f"{named.key}: {error.filename or named.path}: {error.strerror}", hint="you may not read it")


def _tree(path: Path) -> Iterator[tuple[Path, Path]]:
    """A path and all below it, directories first, with where each lies in it."""
    yield path, Path()
    if path.is_dir():
        for directory, names, files in os.walk(path, followlinks=True):
            here = Path(directory)
            yield from ((here / name, (here / name).relative_to(path)) for name in [*sorted(names), *sorted(files)])


def _set(data: Any, key: str, value: str) -> None:
    """Set a dotted key: datasets.0.path."""
    *above, last = key.split(".")
    for part in above:
        data = data[int(part)] if isinstance(data, list) else data[part]
    data[last] = value
