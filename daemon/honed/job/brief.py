"""What the daemon keeps in memory of an ended job: what is asked of all jobs at once, at a start or in a list. The rest
is in its entry, which is read when somebody asks for it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from honed.job.job import Job, State, SweepName

#: The identity of an entry that is not known: no file has it.
UNKNOWN = 0


class Brief(NamedTuple):
    """A job in brief: each field is the property of that name of its Job, but for the last."""

    id: int
    name: str
    uid: int
    state: State
    revision: int
    priority: int
    submitted_at: float
    source: str
    outcome: str | None
    output_dir: str
    is_pinned: bool
    sweep: SweepName | None
    has_started: bool
    last_ended: int
    last_ended_at: float
    num_ends: int
    has_own_events: bool
    identity: int  #: of its entry's file as it was read or written, see `identity_of`


#: A job, or what is kept of it.
Listed = Job | Brief
_properties = attrgetter(*Brief._fields[:-1])


def brief(job: Job, identity: int) -> Brief:
    """Return a job in brief."""
    return Brief._make((*_properties(job), identity))


def as_known(listed: Listed) -> Job:
    """Return a job with what is in memory of it."""
    if isinstance(listed, Job):
        return listed
    return Job(**{field.name: getattr(listed, field.name) for field in fields(Job) if hasattr(listed, field.name)})


def identity_of(info: os.stat_result) -> int:
    """Return a number that the file of no other content of an entry has: every change of an entry makes a new file, and
    nobody can set the time of that change."""
    facts = f"{info.st_ino} {info.st_ctime_ns} {info.st_mtime_ns} {info.st_size}"
    return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=8).digest())
