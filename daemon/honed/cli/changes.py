"""Verbs that change jobs and the queue."""

from __future__ import annotations

import argparse
import sys

from honed.cli import members, terminal
from honed.cli.instance import Instance
from honed.job.change import CHANGES
from honed.job.job import STOPPED_EARLY, State
from honed.job.shape import ChangedRow
from honed.system.error import HonedError, UsageError


def change(instance: Instance, options: argparse.Namespace) -> int:
    arguments = {"from_start": options.from_start} if options.verb == "requeue" else {}
    changed: list[ChangedRow | dict[str, object]] = []
    status = 0
    options.ids = [number for reference in options.ids for number in _each(instance, options.verb, reference)]
    for reference in options.ids:
        try:
            job: ChangedRow = instance.ask(options.verb, id=reference, **arguments)
        except HonedError as error:
            if len(options.ids) == 1:
                raise
            # A job that refuses the change does not stop the others, and the answer covers them all.
            status = status or terminal.status_of(error)
            changed.append({"id": reference, "error": error.as_dict()})
            if not options.json:
                terminal.complain(error, prefix="honectl: ")
        else:
            changed.append(job)
            if not options.json:
                terminal.say(f"job {job['id']} ({job['name']}): {_became(options.verb, job)}")
    if options.json:
        terminal.say_json(changed)
    return status


def _each(instance: Instance, verb: str, reference: str) -> list[str]:
    """Return the jobs of a sweep that a verb applies to, if the reference names a sweep and no job; else itself."""
    if not (jobs := members.of(instance, reference)):
        return [reference]
    ids = [str(job["id"]) for job in jobs if job["state"] in CHANGES[verb].states]
    if verb == "requeue" and (early := [str(job["id"]) for job in jobs if job["outcome"] == STOPPED_EARLY]):
        stay = (
            "1 job that it stopped early stays" if len(early) == 1 else f"{len(early)} jobs that it stopped early stay"
        )
        ids = [item for item in ids if item not in early]
        if not ids:
            raise UsageError(
                f"sweep {reference}: no job failed or was cancelled but the {len(early)} that it stopped early",
                hint=f"honectl requeue {' '.join(early)}",
            )
        note = f"sweep {reference}: {stay} as {'it is' if len(early) == 1 else 'they are'}; name one to continue it"
        print(terminal.plain(note), file=sys.stderr)
    if not ids:
        raise UsageError(f"sweep {reference}: none of its {len(jobs)} jobs is {' or '.join(CHANGES[verb].states)}")
    return ids


def _became(verb: str, job: ChangedRow) -> str:
    if verb in {"pin", "unpin"}:
        return "pinned: neither prune nor retention removes it" if job["is_pinned"] else "not pinned"
    more = f", from {where}" if (where := job.get("goes_on_from")) else ""
    return "stop requested" if job["state"] == State.RUNNING else job["state"] + more


def pause(instance: Instance, options: argparse.Namespace) -> int:
    instance.ask(options.verb)
    terminal.say("queue paused; running jobs continue" if options.verb == "pause" else "queue resumed")
    return 0
