"""`honectl submit --stage`: copies the files that the worker cannot reach, and names the copies in the job file.

    staged/<random>/     made by the dropper, read by honed and the workers through its ACL, and by nobody else
    staged/<random>/0/   a file or a directory, under its own name; next to it the images that its rows name

staged/ itself is a drop box, as incoming/ is: users who may drop jobs make directories there, and cannot see those of
others. honed removes a job's copies once it has succeeded; a failed or cancelled job may be requeued with them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from honed.check.policy import Named, Policy, inputs
from honed.inputs import dataset
from honed.inputs.attachment import RowError
from honed.inputs.media import Media
from honed.inputs.row import fields
from honed.job import tree
from honed.spec import document, jobfile
from honed.spec.config import Config
from honed.spec.media import KINDS, Kind
from honed.spec.problem import mended
from honed.spec.spec import DatasetSpec, JobSpec
from honed.system import access
from honed.system.access import Acl
from honed.system.error import DatasetError, EnvironmentInvalidError, HonedError
from honed.system.layout import Layout


@dataclass(frozen=True)
class Staged:
    """The job file that names the copies, and the copies: (key, from, to)."""

    spec_path: Path
    copies: tuple[tuple[str, Path, Path], ...]


def stage(spec_path: Path, layout: Layout, config: Config) -> Staged:
    """Copy the files that the worker cannot reach. Returns the original job file if there are none.

    Raises the error of an invalid job file, and EnvironmentInvalidError if we may not use the drop box.
    """
    job_spec = jobfile.load(spec_path, max_bytes=config.spool.max_spec_bytes)
    policy = Policy.of(layout, config, os.getuid())
    model, adapter = (
        Path(value) if value is not None and value.startswith("/") else None
        for value in (job_spec.base_model, job_spec.adapter)
    )
    closed = [
        (named, media_paths)
        for named, media_paths in _with_what_rows_name(job_spec, inputs(job_spec, model, adapter), policy)
        if not all(policy.is_reachable(replace(named, path=path)) for path in (named.path, *media_paths))
    ]
    if not closed:
        return Staged(spec_path, ())
    directory = _make_directory(layout)
    try:
        copies = tuple(
            (named.key, named.path, _copy(named, media_paths, directory / str(n)))
            for n, (named, media_paths) in enumerate(closed)
        )
        data = document.parse(spec_path.read_bytes(), spec_path.suffix).data
        data = mended(data, {key: str(copy) for key, _, copy in copies})
        staged_path = directory / f"{spec_path.stem}.json"
        staged_path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except BaseException:
        tree.remove(directory)
        raise
    return Staged(staged_path, copies)


def _make_directory(layout: Layout) -> Path:
    directory = layout.staged_dir / secrets.token_hex(8)
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise EnvironmentInvalidError(
            f"{layout.staged_dir}: {error.strerror}",
            hint=f"join the group {access.DROPPERS_GROUP}; if the directory does not exist, install honed",
        ) from error
    daemon = access.person(access.DAEMON_USER)
    worker = access.worker_of(layout.root, os.getuid(), layout.staged_dir)
    # The daemon may also remove it once its job is gone.
    rights = {item.uid: allowed for item, allowed in ((worker, 5), (daemon, 7)) if item is not None}
    if not access.set_acl(directory, Acl(owner=7, group=0, other=0, users=rights, groups={}), inherited=True):
        directory.chmod(0o755)
    return directory


def _with_what_rows_name(
    job_spec: JobSpec, named_by_spec: Iterable[Named], policy: Policy
) -> Iterator[tuple[Named, list[Path]]]:
    """Yield every path that a job names, with the images, videos and sounds next to it that a data set's rows name."""
    datasets = {f"{key}.path": item for key, item in job_spec.each_dataset()}
    for named in named_by_spec:
        named = replace(named, path=Path(os.path.normpath(named.path)))  # noqa: PLW2901
        dataset_spec = datasets.get(named.key)
        yield named, [] if dataset_spec is None else _named_by_rows(named, dataset_spec, policy)


def _named_by_rows(named: Named, dataset_spec: DatasetSpec, policy: Policy) -> list[Path]:
    """Return the files that rows name relative to their data file. Raises DatasetError for an unreachable file whose
    copy would not be found under its name.

    Unusable rows and missing files are left to the check.
    """
    nowhere = dict.fromkeys(KINDS, Path())  # so that relative paths stay relative
    seen: dict[Path, None] = {}
    try:
        for file, number, media in _media(dataset.files(named.path, split=dataset_spec.split), dataset_spec, nowhere):
            starts = dataset_spec.media_dirs(file.parent)[media.kind]
            for path in media.paths:
                path_of_media = Path(os.path.normpath(starts / path))
                is_beside = starts == file.parent and not path.is_absolute()
                if is_beside and path_of_media.exists():
                    seen[path_of_media] = None
                elif not (is_beside or path_of_media.is_relative_to(starts)) and not policy.is_reachable(
                    replace(named, path=path_of_media)
                ):
                    raise DatasetError(
                        f"{named.key}: {file.name}, row {number}: {path} is not accessible to honed, and an absolute "
                        "path would not find its copy",
                        hint="use a path relative to the data file, so that --stage copies it, too; or move it below "
                        "/srv",
                    )
    except OSError as error:
        raise _unread(named, error) from error
    return list(seen)


def _media(
    files: list[Path], dataset_spec: DatasetSpec, directories: Mapping[Kind, Path]
) -> Iterator[tuple[Path, int, Media]]:
    form: str = "" if dataset_spec.format == "auto" else dataset_spec.format
    for file in files:
        for number, (row, _) in enumerate(dataset.read_any(file), start=1):
            if not isinstance(row, dict):
                continue
            with contextlib.suppress(RowError, DatasetError):
                form = form or dataset.recognise(row, dataset_spec.columns, form=dataset_spec.row_form)
                made = fields(row, form, dataset_spec.columns, has_chat_template=True, directories=directories)
                yield from ((file, number, media) for media in made.get("media", ()))


def _copy(named: Named, media_paths: list[Path], to: Path) -> Path:
    """Copy a file or a directory, and the files next to it that its rows name, with the same relative paths. Returns
    the copy's path. Links are followed; modes are not copied, since the directory's ACL decides."""
    base = Path(os.path.commonpath([named.path.parent, *(path.parent for path in media_paths)]))
    to.mkdir()
    try:
        for whole in (named.path, *media_paths):
            for source, relative in _tree(whole):
                target = to / whole.relative_to(base) / relative
                if source.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                elif not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)
    except OSError as error:
        raise _unread(named, error) from error
    return to / named.path.relative_to(base)


def _unread(named: Named, error: OSError) -> HonedError:
    is_closed = error.errno in {errno.EACCES, errno.EPERM}
    hint = "you may not read it" if is_closed else "nothing was submitted, and the copies were removed"
    return named.error(f"{named.key}: {error.filename or named.path}: {error.strerror}", hint=hint)


def _tree(path: Path) -> Iterator[tuple[Path, Path]]:
    yield path, Path()
    if path.is_dir():
        for directory, names, files in os.walk(path, followlinks=True):
            here = Path(directory)
            yield from ((here / name, (here / name).relative_to(path)) for name in [*sorted(names), *sorted(files)])
