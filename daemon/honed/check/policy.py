"""Files that a job may read and write: limited by the configuration, its submitter's rights, and its worker's rights.

    allowed_paths ── inside? ──► honed's own places ── the dropper's? ──► modes, ACLs ── the dropper? the workers' user?

The checks run before a file is opened: they have honed's rights, and the paths in a job file come from somebody else.
Links are followed first, since a path's real place counts.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from honed.job.plan_file import Grant
from honed.spec import variant
from honed.spec.config import Config
from honed.spec.spec import JobSpec, MediaDirSpec
from honed.system import access, quote
from honed.system.access import READ, WRITE, Person
from honed.system.error import DatasetError, HonedError, ModelError, SpecError
from honed.system.layout import Layout

_NOT_THEIRS, _JOB_NAME = "belongs to honed or to another user", "write job:NAME for the output of a job"
#: Entries of a directory that are checked; symbolic links are checked beyond that, however many.
MAX_ENTRIES = 2000
#: The only directory within a model's that is read, too.
TEMPLATE_DIR = "additional_chat_templates"


@dataclass(frozen=True)
class Named:
    """A path that a job names, and the key that names it."""

    key: str
    path: Path
    error: type[HonedError] = SpecError


@dataclass(frozen=True)
class Policy:
    """The policy of one instance, for one dropper. `workers` is None if workers run as honed's own user, who reads the
    same files as honed."""

    layout: Layout
    allowed: tuple[Path, ...] | None  #: None: everything
    dropper: Person | None
    workers: Person | None

    @classmethod
    def of(cls, layout: Layout, config: Config, uid: int | None) -> Policy:
        named = config.policy.allowed_paths
        allowed = None if named is None else tuple(Path(path).resolve() for path in named)
        uid = os.getuid() if uid is None else uid
        return cls(layout, allowed, access.person(uid), access.worker_of(layout.root, uid, layout.jobs_dir))

    # -- reading ------------------------------------------------------------------------------------------------------

    def check_read(self, named: Named) -> None:
        """Raise the path's error type if it must not be read, or the workers cannot read it. A missing path passes."""
        for path in itertools.chain([named.path], _entries(named.path)):
            self._check_allowed(named, path)
            self._check_own_place(named, path, _real(path))
            if self.workers is not None:
                self._check_home(named, path)
                self._check_dropper(named, path)
                self._check_reach(named, path, self.workers)
                # The checking process, honed's or the submitter's own, opens the file, too.
                self._check_reach(named, path, access.person(os.geteuid()) or self.workers)

    def _check_allowed(self, named: Named, path: Path) -> None:
        real = _real(path)
        if self.allowed is None or _is_below(real, *self.allowed, *self._always_allowed()):
            return
        raise named.error(
            f"{named.key}: {_shown(path, real)} is outside the directories that jobs may read",
            hint=f"allowed by policy.allowed_paths: {_listed(self.allowed)}; honectl submit --stage copies it into "
            "the spool",
        )

    def _always_allowed(self) -> tuple[Path, ...]:
        layout = self.layout
        return tuple(path.resolve() for path in (layout.cache_dir, layout.staged_dir, layout.jobs_dir))

    def _check_own_place(self, named: Named, path: Path, real: Path) -> None:
        """Check files in honed's own places: the dropper may read those that modes and ACLs allow, such as their jobs'
        outputs."""
        if self.workers is None or self.dropper is None:
            return
        if _is_below(real, *self._own_places()) and access.obstacle(real, self.dropper) is not None:
            raise named.error(f"{named.key}: {_shown(path, real)} {_NOT_THEIRS}", hint=_JOB_NAME)

    def _own_places(self) -> tuple[Path, ...]:
        layout = self.layout
        ours = (layout.spool_dir, layout.state_dir, layout.config_path.parent, layout.runtime_dir)
        return tuple(place.resolve() for place in ours)

    def _check_dropper(self, named: Named, path: Path) -> None:
        """Refuse files that the submitter cannot read without honed: neither honed's rights nor the workers' are
        lent."""
        if self.dropper is None or _is_below(_real(path), self._shared()):
            return
        if (obstacle := access.obstacle(path, self.dropper)) is not None:
            raise named.error(
                f"{named.key}: {path}: {obstacle}, the submitter of the job",
                hint="ask its owner to run: setfacl "
                f"-m u:{self.dropper.name}:{'rx' if obstacle.path.is_dir() else 'r'} "
                f"{shlex.quote(str(obstacle.path))}",
            )

    def _shared(self) -> Path:
        """Return the cache of models and data sets, which every user may read."""
        return self.layout.cache_dir.resolve()

    def _check_home(self, named: Named, path: Path) -> None:
        """Refuse homes, which the services' sandbox hides: the modes of files in there cannot be seen."""
        home = access.home_above(path)
        if home is not None and not (self.allowed and _is_below(_real(path), *self.allowed)):
            raise named.error(
                f"{named.key}: {path} is below {home}, which honed's services cannot access",
                hint="honectl submit --stage copies it into the spool; or move it elsewhere, such as below /srv",
            )

    def _check_reach(self, named: Named, path: Path, workers: Person) -> None:
        if (obstacle := access.obstacle(path, workers)) is not None:
            raise named.error(
                f"{named.key}: {path}: {obstacle}",
                hint=f"setfacl -m u:{workers.name}:{'rx' if obstacle.path.is_dir() else 'r'} "
                f"{shlex.quote(str(obstacle.path))}; or honectl submit --stage, which copies it into the spool",
            )

    def is_reachable(self, named: Named) -> bool:
        try:
            self.check_read(named)
        except HonedError:
            return False
        return True

    def grant(self, inputs: Iterable[Named]) -> Grant:
        """Return the grant for the worker of a checked job. Raises the path's error type if a path by now leads to
        another user's file: the grant has the places that are resolved here."""
        closed = () if self.workers is None else self._own_places()
        allowed = None if self.allowed is None else (*self.allowed, *self._always_allowed())
        places = []
        for named in inputs:
            real = _real(named.path)
            self._check_own_place(named, named.path, real)
            places.append(self._whole(real))
        return Grant(closed, allowed, tuple(dict.fromkeys(places)))

    def _whole(self, real: Path) -> Path:
        """Return the whole copy, or job directory, around a path: rows name images that lie beside it."""
        for place in (self.layout.staged_dir.resolve(), self.layout.jobs_dir.resolve()):
            if real.is_relative_to(place) and real != place:
                return place / real.relative_to(place).parts[0]
        return real

    # -- writing ------------------------------------------------------------------------------------------------------

    def check_write(self, path: Path) -> None:
        """Check an output directory, existing or not. Raises SpecError if it is not allowed, or cannot be made."""
        places = self.allowed
        if places is None and self.workers is not None:
            places = ()  # the workers' sandbox is read-only, apart from the places opened to it
        if places is not None and not _is_below(path, *places):
            raise SpecError(
                f"output_dir: {path} is outside the directories that jobs may write",
                hint="remove output_dir, since each job has its own directory; or ask the administrator to add it to "
                f"policy.allowed_paths: {_listed(places)}",
                fix={"output_dir": None},
            )
        # The output is written beside the directory and then renamed, so its parent has to be writable, too.
        for place in (nearest_existing(path.parent), nearest_existing(path)):
            self._check_writable(place)

    def _check_writable(self, place: Path) -> None:
        if self.workers is None:
            if os.access(place, os.W_OK | os.X_OK):
                return
            why, who = f"{place} cannot be written by user {os.geteuid()}", "honed's user"
        else:
            obstacle = access.obstacle(place, self.workers, READ | WRITE)
            if obstacle is None:
                return
            why, who = str(obstacle), f"the user {self.workers.name}"
        raise SpecError(
            f"output_dir: {why}", hint=f"give {who} write permission, or remove output_dir", fix={"output_dir": None}
        )


def check_granted(grant: Grant, named: Named, *own: Path) -> None:
    """Raise the path's error type if the worker must not read it; `own` are the job's own directories.

    A link that was in order when the job was planned may lead elsewhere by the time the worker starts. The preflight
    checks a data set's first rows, the worker checks the others. The worker's user can read the outputs of all jobs; a
    job must not.
    """
    real = _real(named.path)
    if os.path.lexists(named.path) and not os.access(named.path, os.R_OK):
        raise named.error(
            f"{named.key}: {_shown(named.path, real)} cannot be read by the user {access.user_name(os.geteuid())}, "
            "although it could when the job was accepted",
            hint="restore the permissions or the symbolic link; then honectl requeue",
        )
    if _is_below(real, *grant.inputs, *own):
        return
    if _is_below(real, *grant.closed):
        raise named.error(f"{named.key}: {_shown(named.path, real)} {_NOT_THEIRS}", hint=_JOB_NAME)
    if grant.allowed is not None and not _is_below(real, *grant.allowed):
        raise named.error(
            f"{named.key}: {_shown(named.path, real)} is outside the directories that jobs may read",
            hint=f"allowed by policy.allowed_paths: {_listed(grant.allowed)}",
        )


def inputs(job_spec: JobSpec, model: Path | None, adapter: Path | None) -> Iterator[Named]:
    """Yield every path that a job reads; `model` and `adapter` are resolved paths, or None if not there yet."""
    if model is not None:
        yield Named("base_model", model, ModelError)
    if adapter is not None:
        yield Named("adapter", adapter, ModelError)
    if job_spec.chat_template is not None:
        yield Named("chat_template", Path(job_spec.chat_template))
    if (rows_template := job_spec.training_chat_template) not in (None, variant.ASKED):
        yield Named("training_chat_template", Path(rows_template))
    for key, item in job_spec.each_dataset():
        if not item.is_missing:
            yield Named(f"{key}.path", item.place, DatasetError)
        match item.media_dir:
            case MediaDirSpec() as places:
                for kind, place in places:
                    if place is not None:
                        yield Named(f"{key}.media_dir.{kind}", Path(place), DatasetError)
            case str() as place:
                yield Named(f"{key}.media_dir", Path(place), DatasetError)


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest ancestor that exists."""
    while not _exists(path) and path != path.parent:
        path = path.parent
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def _entries(path: Path) -> Iterator[Path]:
    """Yield a directory's direct entries: one of its files may be a link to elsewhere, or unreadable."""
    try:
        with os.scandir(path) as entries:
            names = sorted(
                entry.name for number, entry in enumerate(entries) if number < MAX_ENTRIES or entry.is_symlink()
            )
    except OSError:
        return
    for name in names:
        if not name.startswith("."):
            yield path / name
        if name == TEMPLATE_DIR:
            yield from _entries(path / name)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_below(path: Path, *places: Path) -> bool:
    return any(path.is_relative_to(place) for place in places)


def _shown(path: Path, real: Path) -> str:
    shown = quote.place(str(path))
    return shown if real == path else f"{shown} (really {quote.place(str(real))})"


def _listed(places: tuple[Path, ...]) -> str:
    return ", ".join(map(str, places)) or "nothing"
