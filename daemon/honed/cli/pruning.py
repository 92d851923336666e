"""`honectl prune`: prints what would be removed, removes it, and prints what was removed."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from honed.cli import terminal
from honed.cli.instance import Instance
from honed.job import query, removal, retention, row_cache, tree
from honed.job.retention import Needs, Wish
from honed.job.row_cache import RowCache
from honed.job.shape import CachedRows, PruneAnswer, PrunedRow, RefusedRow, Removed, RemovedRow
from honed.system.error import UsageError
from honed.system.part import joined

#: Answers `prune` and `pruned`.
Ask = Callable[..., Any]
#: Seconds between looks at an unfinished removal.
POLL_SEC = 0.1
#: Jobs in one request: one takes the loop a millisecond or two.
MAX_NUMBERS = 100
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def span(text: str) -> float:
    """Return the seconds of `30d`, `12h`, `45m`, `2w`. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number and s, m, h, d or w, such as 30d")
    return float(match[1]) * _UNITS[match[2]]


def size(text: str) -> int:
    """Return the bytes of `200G`, `500M`. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number and K, M, G or T, such as 200G")
    return int(float(match[1]) * _BYTES[match[2]])


def bytes_in_words(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def prune(instance: Instance, options: argparse.Namespace) -> int:
    option = "--rejected" if options.rejected else "--rows" if options.rows else ""
    if option and (options.ids or options.checkpoints or options.state):
        raise UsageError(f"{option} cannot be combined with jobs", hint="prune jobs separately")
    if options.rejected and options.rows:
        raise UsageError("--rejected cannot be combined with --rows", hint="prune them separately")
    arguments = {
        "ids": options.ids,
        "older_than_sec": options.older_than,
        "keep": options.keep,
        "max_bytes": options.max_size,
        "states": options.state or [],
        "checkpoints": options.checkpoints,
        "rejected": options.rejected,
        "rows": options.rows,
    }
    with _asking(instance) as ask:
        plan = _planned(ask, arguments)
        if not options.json:
            _say_plan(plan, options)
        if options.dry_run:
            return _end(plan, options)
        # Only the printed jobs are removed: jobs that have become old enough since then stay.
        removed = [] if option else list(_remove(ask, plan, options))
        if option:
            ask("prune", **arguments, dry_run=False)
    return _end(plan, options, removed)


@contextlib.contextmanager
def _asking(instance: Instance) -> Iterator[Ask]:
    if instance.is_up:
        yield instance.ask
    else:
        with instance.spool(lock=True) as spool:
            yield Down(spool, instance.layout).ask


def _planned(ask: Ask, arguments: Mapping[str, object]) -> PruneAnswer:
    while True:
        plan: PruneAnswer = ask("prune", **arguments, dry_run=True)
        if plan["is_measured"]:
            return plan
        time.sleep(POLL_SEC)


def _remove(ask: Ask, plan: PruneAnswer, options: argparse.Namespace) -> Iterator[RemovedRow]:
    rows = {row["id"]: row for row in plan["jobs"]}
    numbers, waiting = list(rows), list[int]()
    for at in range(0, len(numbers), MAX_NUMBERS):
        ids = [str(number) for number in numbers[at : at + MAX_NUMBERS]]
        answer: PruneAnswer = ask("prune", ids=ids, checkpoints=options.checkpoints, dry_run=False)
        plan["kept"] += answer["kept"]
        waiting += [row["id"] for row in answer["jobs"]]
    while waiting:
        ids = [str(number) for number in waiting[:MAX_NUMBERS]]
        done: dict[str, Removed] = ask("pruned", ids=ids, checkpoints=options.checkpoints)
        for number in sorted(int(item) for item in done):
            waiting.remove(number)
            yield {**rows[number], **done[str(number)]}
        if not done:
            time.sleep(POLL_SEC)


def _say_plan(plan: PruneAnswer, options: argparse.Namespace) -> None:
    rows: Sequence[RefusedRow | CachedRows | PrunedRow] = plan.get("jobs", ())
    rows = plan["rejected"] if options.rejected else plan["rows"] if options.rows else rows
    num_items, total = len(rows), sum(row["num_bytes"] or 0 for row in rows)
    if options.dry_run:
        verb = "would be removed"
    elif num_items == 0:
        verb = "is removed"
    elif options.checkpoints:
        verb = "are being removed"
    else:
        verb = "is being removed" if num_items == 1 else "are being removed"
    amount = f", {bytes_in_words(total)} in total" if num_items else ""
    terminal.say(f"{_what(num_items, options)} {verb}{amount}")
    if options.rejected or options.rows:
        return
    if plan["jobs"]:
        terminal.table(
            ["id", "name", "state", "size"],
            [
                [row["id"], terminal.plain(row["name"], limit=40), row["state"], bytes_in_words(row["num_bytes"])]
                for row in plan["jobs"]
            ],
            right=["id", "size"],
        )
    for row in plan["kept"]:
        terminal.say(f"kept job {row['id']} ({row['name']}): {row['why']}", style="yellow")


def _what(number: int, options: argparse.Namespace) -> str:
    noun = "rejected file" if options.rejected else "job"
    if options.rows:
        return f"{number:,} sets of encoded rows" if number > 1 else "1 set of encoded rows" if number else "no row"
    if number == 0:
        return f"no {noun}'s checkpoint" if options.checkpoints else f"no {noun}"
    return f"the checkpoints of {_count(number, noun)}" if options.checkpoints else _count(number, noun)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _end(plan: PruneAnswer, options: argparse.Namespace, removed: Sequence[RemovedRow] = ()) -> int:
    """Print what was removed. Returns 1 if a named job stays, or something could not be removed."""
    if options.json:
        terminal.say_json({**plan, "removed": list(removed), "is_dry_run": options.dry_run})
    elif removed:
        total = sum(row["num_bytes"] for row in removed)
        num_files = sum(row["num_files"] for row in removed)
        verb = "was removed" if len(removed) == 1 and not options.checkpoints else "were removed"
        terminal.say(f"{_what(len(removed), options)} {verb}: {_count(num_files, 'file')}, {bytes_in_words(total)}")
        for row in removed:
            if row["problem"]:
                terminal.say(f"job {row['id']}: some of its files could not be removed: {row['problem']}", style="red")
    return int(any(row["problem"] for row in removed) or bool(options.ids and plan.get("kept")))


class Down:
    """Prunes while honed is down, in the spool itself, under its lock. honed removes the rows in honed.db when it is
    up."""

    def __init__(self, spool: Any, layout: Any) -> None:
        self._spool, self._layout = spool, layout
        self._cache = RowCache(layout, lambda: 0, working=self._working)
        self._done: dict[int, tree.Count] = {}

    def ask(self, verb: str, **arguments: Any) -> PruneAnswer | dict[str, Removed]:
        spool, layout, asker = self._spool, self._layout, query.ANYBODY
        if verb == "pruned":
            return {argument: self._done.get(int(argument), tree.Count()).as_dict() for argument in arguments["ids"]}
        wish, is_dry = Wish.of(arguments), bool(arguments["dry_run"])
        if wish.rejected:
            return joined(retention.prune_refused(spool, wish, asker, is_dry=is_dry, now=time.time()))
        if wish.rows:
            answer = retention.prune_rows(self._cache, wish, asker, is_dry=is_dry, now=time.time())
            tree.remove(row_cache.old_dir(layout))
            return answer
        named, jobs = retention.asked(wish, spool, asker), list(spool.all_jobs().values())
        final = [job for job in jobs if job.state.is_final]
        sizes = {} if wish.references else {job.id: self._size(job.id, wish) for job in final}
        chosen = retention.choose(wish, named, jobs, Needs(spool, layout), spool, asker, sizes)
        if is_dry:
            sizes |= {job.id: self._size(job.id, wish) for job in chosen.jobs if job.id not in sizes}
        else:
            for job in chosen.jobs:
                self._done[job.id] = self._prune(job, wish)
        return retention.report(chosen, sizes, is_measured=True)

    def _working(self) -> dict[int, int]:
        return {job.id: job.uid for job in self._spool.with_worker()}

    def _size(self, job_id: int, wish: Wish) -> int:
        files = self._layout.files(job_id)
        return tree.measure(files.place / "checkpoints" if wish.checkpoints else files.place).num_bytes

    def _prune(self, job: Any, wish: Wish) -> tree.Count:
        if wish.checkpoints:
            self._spool.annotate(job, are_checkpoints_pruned=True)
            removal.set_aside_checkpoints(self._layout, job.id)
            return removal.remove_checkpoints(self._layout, job.id)
        self._spool.prune(job)
        self._cache.forget([job.id])
        tree.remove(row_cache.old_dir(self._layout))
        return removal.remove_job(self._spool, self._layout, job.id)
