"""Sweeps on the disk: a claimed job file becomes the job files of its jobs, exactly once.

    sweeps/.<id>.new/           being written
    sweeps/<id>/<n>.<uid>/      a job file on its way to claimed/<n>.<uid>/, as if the user had submitted it

The rename of `.<id>.new` to `<id>` is the commit: before it nothing has happened, and the sweep is checked again after
a crash; from it on, every file is moved into claimed/ by a rename of its own, then the sweep's own file is
removed, and then the empty directory. `recover` goes on from any point: what is in sweeps/<id>/ is not in claimed/ yet.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from honed.job.arrival import HOLD_SUFFIX, PLACE, Claim, Numbers
from honed.job.damaged import passed_over
from honed.job.spool import Spool, names_in
from honed.system import durable
from honed.system.personpath import PersonPath

#: Characters of the group's name in the name of a job, and bytes of a file's title in that of a job's file.
MAX_NAME_CHARS, MAX_TITLE_BYTES = 80, 180


class Sweeps:
    """The sweeps of one spool; used only by the spool's owner."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._numbers = Numbers(spool)
        self._dir = spool.dir / "sweeps"

    def spread(self, claim: Claim, uid: int, members: Sequence[Mapping[str, Any]]) -> list[Claim]:
        """Turn a sweep into the arrivals of its jobs, for this user. `members`: `document`, `values` and perhaps
        `halving` of each.

        Raises OSError if the machine prevents it; called again, it goes on from where it was.
        """
        place = self._dir / str(claim.id)
        if not place.is_dir():
            self._write(claim, uid, members, place)
        return self._finish(place)

    def recover(self) -> None:
        """Finish what a crash interrupted. Call it before the recovery of the arrivals."""
        for name in names_in(self._dir) if self._dir.is_dir() else ():
            with passed_over(self._dir / name):
                if name.isdecimal():
                    self._finish(self._dir / name)
                elif name.endswith(".new"):
                    _remove(self._dir / name)

    def _write(self, claim: Claim, uid: int, members: Sequence[Mapping[str, Any]], place: Path) -> None:
        durable.make_dir(self._dir, mode=0o700)
        new = self._dir / f".{claim.id}.new"
        _remove(new)
        new.mkdir(mode=0o700)
        first = self._numbers.reserve(len(members))
        title = os.fsencode(claim.title)[:MAX_TITLE_BYTES].decode(errors="ignore")
        works = []
        for index, member in enumerate(members):
            child = new / f"{first + index}.{uid}"
            child.mkdir(mode=0o700)
            document = member["document"]
            name = str(document.get("name") or claim.title)
            group = {"id": claim.id, "name": name, "file": claim.name, "values": member["values"]}
            group |= {"halving": halving} if (halving := member.get("halving")) else {}
            ours = {**document, "name": f"{name[:MAX_NAME_CHARS].rstrip()}-{index + 1}", "group": group}
            path = child / f"{title}-{index + 1}{HOLD_SUFFIX if claim.is_held else ''}.json"
            works.append(durable.writing(path, durable.as_json(ours), mode=0o600))
        for done in durable.finish_all(works):
            if isinstance(done, Exception):
                raise done
        durable.sync_dir(new)
        new.rename(place)
        durable.sync_dir(self._dir)

    def _finish(self, place: Path) -> list[Claim]:
        claims = []
        for name in sorted(names_in(place), key=lambda name: int(name.partition(".")[0])):
            number, uid = map(int, name.split("."))
            target = self._spool.claimed_dir / name
            if target.exists() or self._spool.entries.get(number) is not None:  # a power cut can leave both names
                durable.remove_flat(place / name)
                continue
            (place / name).rename(target)
            claims += [Claim(number, PersonPath(target, (item,)), uid, time.time()) for item in names_in(target)]
        durable.sync_dir(self._spool.claimed_dir)
        durable.sync_dir(place)
        self._drop(int(place.name))
        place.rmdir()
        durable.sync_dir(self._dir)
        return claims

    def _drop(self, number: int) -> None:
        """Remove a sweep's own claim, and the copy that was checked."""
        for name in names_in(self._spool.claimed_dir):
            if (match := PLACE.fullmatch(name)) and int(match[1]) == number:
                own = self._spool.claimed_dir / name
                for path in own.iterdir():
                    path.unlink()
                durable.sync_dir(own)
                own.rmdir()
        durable.sync_dir(self._spool.claimed_dir)
        with contextlib.suppress(OSError):
            durable.remove_flat(self._spool.files(number).place)


def _remove(new: Path) -> None:
    for child in new.iterdir() if new.is_dir() else ():
        durable.remove_flat(child)
    durable.remove_flat(new)
