"""rejected/: the files that were refused, each with its reason.

    NAME.reason    why the file NAME was refused; for its submitter to read; never replaced
    <number>.yaml  the file itself, unchanged, under its number as an arrival (.yml .json .toml, or no suffix)

Only honed makes names here, and none that a person chose is a person's file: what somebody drops can never be taken for
a reason, nor stand in the way of one.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from honed.spec import problem
from honed.system import access, untrusted
from honed.system.error import HonedError
from honed.system.layout import SPEC_SUFFIXES
from honed.system.personpath import PersonPath

SUFFIX = ".reason"
MAX_NAME_BYTES = 255
#: Bytes of a reason that are read: it quotes a job file, of which honed takes 16 MiB at most.
MAX_BYTES = 2**20
#: How a reason begins. Those of honed 0.1 do not name the user whose file was taken from incoming/, and say nothing of
#: what became of the file, which then lies under its own name.
_HEAD = re.compile(
    r"(?P<file>.*) was refused at (?P<when>\S+)\.\n"
    r"(?:Submitted as (?P<submission>[0-9]+) by the user (?P<submitter>[0-9]+)"
    r"|Taken from incoming/ as (?P<arrival>[0-9]+)(?:, a file of the user (?P<owner>[0-9]+))?)\.\n"
    r"(?:(?P<fate>.+)\n)?\n(?P<code>\w+):\n"
)
_KEPT = re.compile(r"The file is kept as rejected/([0-9]+(?:-[0-9]+)?(?:\.[a-z]+)?)\.")


@dataclass(frozen=True)
class Reason:
    """A file of honed's that says why another was refused."""

    path: PersonPath
    file: str  #: the name that the refused file had, as `shown`
    number: int  #: of the arrival
    uid: int | None  #: who submitted it; None if that is not known
    code: str  #: of the error
    is_submission: bool  #: came over the control socket
    kept_path: PersonPath | None  #: where the file is; None if it was not kept
    text: str
    refused_at: float  #: seconds since the epoch


def shown(name: str) -> str:
    """Return a file's name so that it is safe in a line of text."""
    return name if name.isprintable() else repr(name)


def place_for(directory: PersonPath, name: str, number: int) -> PersonPath:
    """Return a free path for the refused file of this name: honed 0.1 has kept files under people's names there."""
    suffix = Path(name).suffix if Path(name).suffix in SPEC_SUFFIXES else ""
    names = (f"{number}{'-' if again else ''}{again or ''}{suffix}" for again in itertools.count())
    return next(path for item in names if not untrusted.exists(path := directory / item))


def text_of(name: str, number: int, uid: int, error: HonedError, *, when: str, fate: str, is_submission: bool) -> str:
    """Return the text of a reason. `fate` says what became of the file."""
    by = f"Submitted as {number} by the user {uid}."
    lines = [f"{shown(name)} was refused at {when}."]
    lines += [by if is_submission else f"Taken from incoming/ as {number}, a file of the user {uid}.", fate]
    lines += ["", f"{error.code}:"]
    lines += [f"  {line}" for line in error.shown.splitlines()]
    if error.hint:
        first, *rest = error.hint.split("\n")
        lines += ["", f"What to do: {first}", *(f"  {line}" for line in rest)]
    if error.fix:
        lines += ["", "Change in the file:", *(f"  {item}" for item in problem.fix_lines(error.fix))]
    again = "submit it again: honectl submit FILE" if is_submission else "drop the job file into incoming/ again"
    return "\n".join([*lines, "", f"Then {again}.", ""])


def parse(text: str, path: PersonPath, refused_at: float) -> Reason | None:
    """Return what a reason says; None if the text is not one."""
    head = _HEAD.match(text)
    if head is None:
        return None
    uid = head["submitter"] or head["owner"]
    kept = path.name.removesuffix(SUFFIX)
    if head["fate"] is not None:
        kept = match[1] if (match := _KEPT.fullmatch(head["fate"])) else ""
    return Reason(
        path=path,
        file=head["file"],
        number=int(head["submission"] or head["arrival"]),
        uid=None if uid is None else int(uid),
        code=head["code"],
        is_submission=head["submission"] is not None,
        kept_path=path.with_name(kept) if kept else None,
        text=text,
        refused_at=refused_at,
    )


def read(path: PersonPath) -> Reason | None:
    """Return the reason in a file of rejected/; None if it is gone, is not ours to read, or is not one that honed made.

    Raises OSError if it cannot be read for another cause.
    """
    try:
        fd = untrusted.open_plain(path, owners={untrusted.info(path.parent).st_uid, os.geteuid()})
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.EACCES, errno.ELOOP, errno.EINVAL, errno.EXDEV}:
            return None
        raise
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        text = file.read(MAX_BYTES).decode("utf-8", errors="replace")
    reason = parse(text, path, info.st_mtime)
    if reason is not None and reason.uid is None and reason.kept_path is not None:
        with contextlib.suppress(FileNotFoundError):
            return replace(reason, uid=untrusted.info(reason.kept_path).st_uid)
    return reason


def listed(directory: PersonPath) -> list[PersonPath]:
    """Return the paths of the reasons in rejected/, the newest first. They may not be honed's: see `read`."""
    names = (name for name in untrusted.names_in(directory, limit=None) if name.endswith(SUFFIX))
    times = [(info.st_mtime, name) for name, info in untrusted.infos(directory, names)]
    return [directory / name for _, name in sorted(times, reverse=True)]


def places(directory: PersonPath, name: str, number: int) -> Iterator[PersonPath]:
    """Yield where the reason of an arrival may be, in order: the first is that of the file's own name. No file can be
    dropped whose reason would be at the last one, since a name that ends in `~` is of an unfinished file."""
    stem, suffix = Path(name).stem, Path(name).suffix
    short = os.fsdecode(os.fsencode(stem)[:180]).encode(errors="replace").decode()
    for item in (name, f"{short}.{number}{suffix[:16]}", f"{number}~"):
        if len(os.fsencode(item)) + len(SUFFIX) + len("..tmp") <= MAX_NAME_BYTES:
            yield directory / f"{item}{SUFFIX}"


def find(directory: PersonPath, name: str, number: int) -> Reason | None:
    """Return the reason of an arrival. Raises OSError if it cannot be read."""
    for path in places(directory, name, number):
        if (reason := read(path)) is not None and reason.number == number:
            return reason
    return None


def make(directory: PersonPath, name: str, number: int, uid: int, text: str) -> PersonPath:
    """Write the reason of an arrival under the first name that is free, durably; return its path. It quotes the job
    file, so only the user who submitted that may read it. Raises OSError."""
    for path in places(directory, name, number):
        if untrusted.exists(path):
            continue
        temporary = untrusted.write_beside(path, text.encode(errors="replace"), mode=0o600)
        try:
            if uid != os.geteuid():
                let_read(temporary, uid)
            untrusted.rename_to_free(temporary, path)
        except FileExistsError:
            untrusted.remove(temporary)
            continue
        except BaseException:
            untrusted.remove(temporary)
            raise
        untrusted.sync_dir(directory)
        return path
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory / f"{number}~{SUFFIX}"))


def let_read(path: PersonPath, uid: int) -> None:
    """Let one more user read a file of ours."""
    fd = untrusted.open_plain(path)
    try:
        access.let_read(fd, uid)
    finally:
        os.close(fd)


def why_not_kept(path: PersonPath) -> str:
    """Return what a dropped file is that is not kept; empty for a regular file. Raises OSError."""
    mode = untrusted.info(path).st_mode
    if stat.S_ISREG(mode):
        return ""
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe"}
    return kinds.get(stat.S_IFMT(mode), "a device or a socket")
