"""What a job may read and write on this machine: what the configuration allows, and what its worker can reach.

    allowed_paths ── inside? ──► honed's own places ── the dropper's? ──► modes, ACLs, homes ── the workers' user?

Looked at before a file is opened: the check runs with honed's rights, and what a job names is another person's word.
Links are followed first, so that what counts is where a path really lies.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from honed import access
from honed.access import READ, WRITE, Person
from honed.config import Config
from honed.error import DatasetError, HonedError, ModelError, SpecError
from honed.layout import Layout
from honed.spec import JobSpec, MediaDirSpec

#: Entries of a directory that are looked at.
MAX_ENTRIES = 2000


@dataclass(frozen=True)
class Named:
    """A path that a job names, and by which key."""

    key: str
    path: Path
    error: type[HonedError] = SpecError


@dataclass(frozen=True)
class Policy:
    """Of one instance, for one dropper. `workers` is None where they are honed's own user, who reads what we read."""

    layout: Layout
    allowed: tuple[Path, ...] | None  #: None: everything
    dropper: Person | None
    workers: Person | None

    @classmethod
    def of(cls, layout: Layout, config: Config, uid: int | None) -> Policy:
        named = config.policy.allowed_paths
        allowed = None if named is None else tuple(Path(path).resolve() for path in named)
        return cls(
            layout, allowed, access.person(os.getuid() if uid is None else uid), access.workers_user(layout.root)
        )

    # -- reading ------------------------------------------------------------------------------------------------------

    def check_read(self, named: Named) -> None:
        """Raises the error of the path's kind: it is not to be read, or the workers cannot. What is missing passes."""
        for path in itertools.chain([named.path], _entries(named.path)):
            self._check_allowed(named, path)
            self._check_own_places(named, path)
            if self.workers is not None:
                self._check_reach(named, path, self.workers)

    def _check_allowed(self, named: Named, path: Path) -> None:
        real = _real(path)
        if self.allowed is None or _is_below(real, *self.allowed, *self._always_allowed()):
            return
        raise named.error(
            f"{named.key}: {_shown(path, real)} lies outside of what jobs may read here",
            hint=f"policy.allowed_paths has: {_listed(self.allowed)}; honectl submit --stage copies it in",
        )

    def _always_allowed(self) -> tuple[Path, ...]:
        layout = self.layout
        return tuple(path.resolve() for path in (layout.cache_dir, layout.staged_dir, layout.jobs_dir))

    def _check_own_places(self, named: Named, path: Path) -> None:
        """Of honed's own files, those that the dropper may read by their own modes and ACLs: what their jobs made."""
        real = _real(path)
        if self.workers is None or self.dropper is None or _is_below(real, self.layout.staged_dir.resolve()):
            return
        ours = (self.layout.spool_dir, self.layout.state_dir, self.layout.config_path.parent, self.layout.runtime_dir)
        if _is_below(real, *(place.resolve() for place in ours)) and access.obstacle(real, self.dropper) is not None:
            raise named.error(
                f"{named.key}: {_shown(path, real)} is honed's or another user's", hint="job:NAME is what a job makes"
            )

    def _check_reach(self, named: Named, path: Path, workers: Person) -> None:
        home = access.home_above(path)
        if home is not None and not (self.allowed and _is_below(_real(path), *self.allowed)):
            raise named.error(
                f"{named.key}: {path} lies below {home}, which is closed to honed's services",
                hint="honectl submit --stage copies it in; or put it elsewhere, such as below /srv",
            )
        if (found := access.obstacle(path, workers)) is not None:
            raise named.error(
                f"{named.key}: {path}: {found}",
                hint=f"setfacl -m u:{workers.name}:{'rx' if found.path.is_dir() else 'r'} {found.path}; "
                "or honectl submit --stage, which copies it in",
            )

    def is_reachable(self, named: Named) -> bool:
        try:
            self.check_read(named)
        except HonedError:
            return False
        return True

    # -- writing ------------------------------------------------------------------------------------------------------

    def check_write(self, path: Path) -> None:
        """Of an output directory, there or not. Raises SpecError where it is not allowed, or cannot be made."""
        places = self.allowed
        if places is None and self.workers is not None:
            places = ()  # the workers' sandbox is read-only but for what it is opened to
        if places is not None and not _is_below(path, *places):
            raise SpecError(
                f"output_dir: {path} lies outside of what jobs may write here",
                hint="leave output_dir out: a job has a directory of its own; or the administrator adds it to "
                f"policy.allowed_paths, which has: {_listed(places)}",
            )
        # The output is made whole beside the directory and renamed, so its parent has to let us write, too.
        for place in (nearest_existing(path.parent), nearest_existing(path)):
            self._check_writable(place)

    def _check_writable(self, place: Path) -> None:
        if self.workers is None:
            if os.access(place, os.W_OK | os.X_OK):
                return
            why, who = f"{place} cannot be written by user {os.geteuid()}", "honed's user"
        else:
            found = access.obstacle(place, self.workers, READ | WRITE)
            if found is None:
                return
            why, who = str(found), f"the user {self.workers.name}"
        raise SpecError(f"output_dir: {why}", hint=f"let {who} write it, or leave output_dir out")


def inputs(job_spec: JobSpec, model: Path | None, adapter: Path | None) -> Iterator[Named]:
    """Every path that a job reads; `model` and `adapter` as they were resolved, where they are there yet."""
    if model is not None:
        yield Named("base_model", model, ModelError)
    if adapter is not None:
        yield Named("adapter", adapter, ModelError)
    if job_spec.chat_template is not None:
        yield Named("chat_template", Path(job_spec.chat_template))
    for key, datasets in (("datasets", job_spec.datasets), ("eval_datasets", job_spec.eval_datasets)):
        for number, each in enumerate(datasets):
            yield Named(f"{key}.{number}.path", Path(each.path), DatasetError)
            match each.media_dir:
                case MediaDirSpec() as places:
                    for kind, place in places:
                        if place is not None:
                            yield Named(f"{key}.{number}.media_dir.{kind}", Path(place), DatasetError)
                case str() as place:
                    yield Named(f"{key}.{number}.media_dir", Path(place), DatasetError)


def nearest_existing(path: Path) -> Path:
    """The path, or the first above it that is there."""
    while not _exists(path) and path != path.parent:
        path = path.parent
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def _entries(path: Path) -> Iterator[Path]:
    """What lies right in a directory: one of its files may be a link to elsewhere, or closed."""
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, MAX_ENTRIES))
    except OSError:
        return
    yield from (path / name for name in names if not name.startswith("."))


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_below(path: Path, *places: Path) -> bool:
    return any(path.is_relative_to(place) for place in places)


def _shown(path: Path, real: Path) -> str:
    return str(path) if real == path else f"{path} (really {real})"


def _listed(places: tuple[Path, ...]) -> str:
    return ", ".join(map(str, places)) or "nothing"
