"""A honed whose file operations fail with an error, while jobs arrive, are edited, run, end and are pruned.

The errors are those of a machine: a full or broken disk, a server that is gone, no more descriptors or memory. Once
they are over, nothing may be left of them: see `violations`.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import errno
import itertools
import json
import random
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crash.errnohoned import ORDER
from honed.job import refusals
from honed.job.damaged import UNREADABLE
from honed.job.job import Job, State
from honed.system.error import HonedError
from process.harness import Instance
from waiting import DEADLINE_SEC, wait_for
from zoo import plain

HERE = Path(__file__).parent
ERRNOS = (
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.ENOLCK, errno.EREMOTEIO),
    *(errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.EUCLEAN, errno.EBADMSG, errno.ENOBUFS, errno.ENOKEY, errno.ESHUTDOWN, errno.EPROTO, errno.ENOLINK),
)


def names() -> list[str]:
    return [errno.errorcode[number] for number in ERRNOS]


#: With these a file may be refused: its owner can have closed it to honed.
OWNERS = {errno.EACCES, errno.EPERM}
CONFIG = """
[spool]
settle_sec = 0
rescan_interval_sec = 0.2
[jobs]
poll_interval_sec = 0.02
retry_delay_sec = 0
"""
#: Operations that fail in one round: a few, so that all else is done by the usual way, or as many as there are; in a
#: short run as many as let each error have its round.
MOST, MOST_OF_FEW, FEW = (3, 10, 30, 1000), (10,), 1000
#: Seconds after the errors within which all must have come right.
PEACE_SEC = DEADLINE_SEC


class Scene(Instance):
    """One instance through rounds, each with one error."""

    command = (sys.executable, str(HERE / "errnohoned.py"))

    def __init__(self, root: Path, *, seed: int, most: Sequence[int]) -> None:
        super().__init__(root)
        self.configure(CONFIG)
        self.order_path, self.record_path = root / "order", root / "injected"
        self.order_path.write_bytes(ORDER.pack(0, 0, 0, 0))
        self.environment |= {
            "HONED_TEST_ORDER": str(self.order_path),
            "HONED_TEST_INJECTED": str(self.record_path),
        }
        self.seed, self._most = seed, most
        self.chance = random.Random(seed)
        self.num_rounds = 0
        self._maybe: set[str] = set()  #: submitted, and answered with an error
        self._wanted: dict[
            str, int | None
        ] = {}  #: of each dropped file, the number of its job; None before that is known
        self._pruned: set[int] = set()

    # -- the errors ---------------------------------------------------------------------------------------------------

    def fail(self, number: int, *, only: int = 0) -> None:
        """From now on operations fail with this error; 0 ends that. `only`: of the kinds of operations on kinds of
        paths the one that fails, in the order in which they come, from 1."""
        with self.order_path.open("r+b") as file:
            seed = self.seed * 1000 + self.num_rounds
            file.write(ORDER.pack(number, self.chance.choice(self._most), seed, only))

    @property
    def injected(self) -> list[dict[str, Any]]:
        """What has failed so far."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in self.record_path.read_text().splitlines()]
        return []

    # -- a round ------------------------------------------------------------------------------------------------------

    def round(self, number: int) -> list[str]:
        """Have jobs arrive, be edited, start, end and be removed while operations fail with this error. Returns what is
        wrong once it is over."""
        self.num_rounds += 1
        before = len(self.injected)
        tag = f"r{self.num_rounds}"
        self.fail(number)
        found = []
        try:
            self._drop(f"{tag}-a", name="make-2")
            self._drop(f"{tag}-b.hold", name="make-3")
            self._submit(f"{tag}-c.json", name="make-1")
            self._prune()
            held = self._number(f"{tag}-b.hold.json")
            if held is not None:
                self._edit(held)
                self._ask("release", id=str(held))
            for file in (f"{tag}-a.json", f"{tag}-b.hold.json"):
                self._end(file)
        except AssertionError as error:
            found.append(f"while it fails: {error}")
        self.fail(0)
        found += self.peace(number)
        if found:
            failed = self.injected[before:]
            found += [
                f"  {errno.errorcode[each['errno']]} {each['function']} {each['kind']} {each['callers']}"
                for each in failed
            ]
        return found

    def start_with(self, number: int, only: int) -> tuple[list[str], bool]:
        """Start honed, killed beside a running, a queued and a held job and a new file, while one operation fails.
        Returns what is wrong then or later, and whether there was such an operation."""
        self.num_rounds += 1
        before, tag = len(self.injected), f"s{self.num_rounds}"
        self._drop(f"{tag}-run", name=f"until-{self.num_rounds}")
        self._number(f"{tag}-run.json")
        self.wait_state(f"until-{self.num_rounds}", State.RUNNING)
        self._drop(f"{tag}-b.hold", name="make-1")
        self._drop(f"{tag}-c", name="make-1")
        for file in (f"{tag}-b.hold.json", f"{tag}-c.json"):
            self._number(file)
        self.kill(signal.SIGKILL)
        self.go(f"until-{self.num_rounds}")
        self._drop(f"{tag}-d", name="make-1")
        num_read = len(self.log)
        self.fail(number, only=only)
        self.start()
        self.fail(0)
        found, status = [], self.process and self.process.poll()
        if status is not None:
            words = self.log[num_read:]
            if status != (77 if number in OWNERS else 73) or not re.search(r"^<2>.*: ", words, re.M):
                found.append(f"honed ended with {status}: {words[-2000:]}")
            self.start()
        if number in UNREADABLE:
            self._put_back()
        found += self.peace(number)
        failed = self.injected[before:]
        if found:
            found += [
                f"  {errno.errorcode[number]} {each['function']} {each['kind']} {each['callers']}" for each in failed
            ]
        return found, bool(failed)

    def _put_back(self) -> None:
        """Put back, as a person does, the entries that could not be read, and start honed with them."""
        aside = list(self.spool.corrupt.dir.glob("*.json"))
        if not aside:
            return
        self.kill(signal.SIGKILL)  # the running job goes on
        for path in aside:
            number, state, _ = path.name.split(".")
            path.rename(self.spool.entries.path(int(number), State(state)))
        self.start()

    def _text(self, **keys: Any) -> str:
        return json.dumps(plain.spec(self.model, self.dataset, priority=0, **keys))

    def _drop(self, file: str, **keys: Any) -> None:
        path = self.incoming_dir / f".{file}.tmp"
        path.write_text(self._text(**keys))
        path.rename(self.incoming_dir / f"{file}.json")
        self._wanted[f"{file}.json"] = None

    def _ask(self, verb: str, **arguments: Any) -> Any:
        """Ask, and take an error for an answer."""
        with contextlib.suppress(HonedError):
            return self.client.ask(verb, **arguments)
        return None

    def _submit(self, file: str, **keys: Any) -> None:
        data = base64.b64encode(self._text(**keys).encode()).decode()
        if self._ask("submit", name=file, data=data, hold=False) is None:
            self._maybe.add(file)
        self._wanted[file] = None

    def _number(self, file: str) -> int | None:
        """Wait until a file is a job or refused. Returns the job's number."""

        def known() -> tuple[int | None] | None:
            assert self.process is not None
            if self.process.poll() is not None or (self.spool.rejected_dir / f"{file}.reason").exists():
                return (None,)
            found = next((job.id for job in self.spool.all_jobs().values() if job.source == file), None)
            return None if found is None else (found,)

        return wait_for(known, PEACE_SEC, what=f"{file} taken")[0]

    def _edit(self, number: int) -> None:
        """Have the held job get another priority."""
        path = self.layout.job(number).dir / "spec.json"
        text = json.loads(path.read_bytes()) | {"priority": 7}
        if self._ask("edit", id=str(number), data=base64.b64encode(json.dumps(text).encode()).decode()) is None:
            return

        def settled() -> bool:
            answer = self._ask("edited", id=str(number))
            return (answer is not None and answer["state"] != "checking") or not self.is_up

        wait_for(settled, PEACE_SEC, what=f"the edit of job {number} settled")

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def _end(self, file: str) -> None:
        """Wait until a file's job has ended."""
        number = self._number(file)
        if number is None:
            return

        def ended() -> bool:
            job = self.spool.all_jobs().get(number)
            if job is not None and not job.state.is_final and ".hold." in file:
                self._ask("release", id=str(number))  # an answer of before may have been an error
            return not self.is_up or job is None or job.state.is_final

        wait_for(ended, PEACE_SEC, what=f"the end of {file}")

    def _prune(self) -> None:
        """Remove a job of an earlier round."""
        old = [job.id for job in self.spool.jobs(State.SUCCEEDED)]
        if old:
            number = self.chance.choice(old)
            self._pruned.add(number)
            self._ask("prune", ids=[str(number)], dry_run=False)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def peace(self, number: int = 0, *, is_fresh: bool = False) -> list[str]:
        """Wait, without errors, until all has come right. Returns what has not."""
        found: list[str] = []

        def is_right() -> bool:
            nonlocal found
            if not self.is_up:
                found = [f"honed ended: {self.process and self.process.poll()}"]
                return True
            with contextlib.suppress(HonedError):
                for job in list(self.spool.jobs(State.HELD)):
                    self.client.ask("release", id=str(job.id))
            found = self.violations(number, is_fresh=is_fresh)
            return not found

        with contextlib.suppress(AssertionError):
            wait_for(is_right, PEACE_SEC, what="peace")
        return found

    def violations(self, number: int = 0, *, is_fresh: bool = False) -> list[str]:
        """What is not as it must be once the errors are over, and all is done. An empty directory of claimed/ may be
        left, and a hidden file that could neither be renamed nor removed, until honed starts again (`is_fresh`),
        and in corrupt/ what was to be said of an entry that was readable after all."""
        spool = self.spool
        jobs = list(spool.all_jobs().values())
        names = [(state.value, path.name) for state in State for path in sorted(spool.state_dir(state).iterdir())]
        places = collections.Counter(name for _, name in names)
        found = [f"{count} entries named {name}" for name, count in places.items() if count > 1]
        found += [
            f"not an entry: {state}/{name}" for state, name in names if name not in {f"{job.id}.json" for job in jobs}
        ]
        found += [f"hidden: {path}" for path in spool.dir.rglob(".*") if is_fresh or not path.name.endswith(".tmp")]
        for place in (spool.incoming_dir, *(spool.dir / name for name in ("claimed", "edits", "corrupt", "sweeps"))):
            left = [path for path in place.rglob("*") if place != spool.claimed_dir or not path.is_dir()]
            left = [path for path in left if not path.name.startswith(".")]
            left = [path for path in left if place.name != "corrupt" or path.suffix == ".json"]
            found += [f"left: {path.relative_to(spool.dir)}" for path in left]
        known = {str(job.id) for job in jobs}
        have = {path.name for path in self.layout.jobs_dir.iterdir()}
        found += [f"of no job: jobs/{name}" for name in have - known]
        found += [f"without a directory: job {name}" for name in known - have]
        found += [words for job in jobs for words in self._faults_of(job)]
        fates = collections.Counter(job.source for job in jobs)
        refused = {path.name.removesuffix(refusals.SUFFIX) for path in spool.rejected_dir.glob("*.reason")}
        pruned = {path.name.partition(".")[0] for path in (spool.dir / "pruned").glob("*.json")}
        for file, known_as in self._wanted.items():
            if known_as is None and fates[file] == 1:
                self._wanted[file] = next(job.id for job in jobs if job.source == file)
            if known_as is not None and str(known_as) in pruned | known:
                continue
            if file in refused and number in OWNERS and "honed cannot read it" in self.rejected()[file]:
                continue
            least = 0 if file in self._maybe else 1
            if not least <= fates[file] <= 1 or file in refused:
                found.append(f"{file}: {fates[file]} jobs{', refused' if file in refused else ''}")
        return found

    def _faults_of(self, job: Job) -> list[str]:
        if job.state is not State.SUCCEEDED:
            return [f"job {job.id} ({job.source}) is {job.state}: {job.error}"]
        files = self.layout.job(job.id)
        found = []
        results = [path for path in files.dir.glob("attempts/*/result.json") if b'"succeeded"' in path.read_bytes()]
        if len(results) != 1 or not files.plan_path.is_file():
            found.append(f"job {job.id}: {len(results)} of its attempts succeeded, {len(job.attempts)} known")
        if len(job.attempts) != 1:
            found.append(f"job {job.id}: {[attempt.outcome for attempt in job.attempts]}")
        spec = json.loads(files.spec_path.read_bytes())
        plan = json.loads(files.plan_path.read_bytes())["spec"]
        priorities = (spec["priority"], plan["priority"], job.priority)
        if len({*priorities}) != 1 or job.is_being_edited or len(job.edited_at) != job.priority // 7:
            found.append(f"job {job.id}: priorities of its file, plan, entry: {priorities}, edited {job.edited_at}")
        return found

    def restart(self) -> list[str]:
        """End honed and start it again. Returns what is wrong then."""
        self.kill(signal.SIGTERM)
        status = self.process and self.process.poll()
        self.start()
        return ([] if status == 0 else [f"honed ends with {status}"]) + self.peace(is_fresh=True)


def torture(
    root: Path, *, seed: int, num_injections: int, max_rounds: int = 10_000
) -> tuple[dict[str, int], list[str]]:
    """Have so many operations fail, a round for each error again and again. Returns how many failed with each error,
    and what went wrong, with what had failed in that round."""
    scene = Scene(root, seed=seed, most=MOST_OF_FEW if num_injections < FEW else MOST)
    broken: list[str] = []
    try:
        scene.start()
        order = list(ERRNOS)
        scene.chance.shuffle(order)
        while len(scene.injected) < num_injections and scene.num_rounds < max_rounds and len(broken) < 200:
            number = order[scene.num_rounds % len(order)]
            if found := scene.round(number):
                broken += [f"round {scene.num_rounds} ({errno.errorcode[number]}):", *found]
                print("\n".join(broken[-1 - len(found) :]), flush=True)
                if not scene.is_up:
                    scene.start()
        broken += scene.restart()
    finally:
        scene.end()
    counts = collections.Counter(errno.errorcode[each["errno"]] for each in scene.injected)
    return dict(counts), broken


def starts(root: Path, *, seed: int, stride: int) -> tuple[int, list[str]]:
    """Start honed again and again, each time with another operation of the start that fails: every `stride`-th kind.
    Returns how many have failed, and what went wrong."""
    scene, broken = Scene(root, seed=seed, most=(1,)), list[str]()
    try:
        scene.start()
        for only in itertools.count(1 + seed % stride, stride):
            number = ERRNOS[(only // stride * 7 + seed) % len(ERRNOS)]
            found, has_failed = scene.start_with(number, only)
            if found:
                broken += [f"start with operation {only} failing ({errno.errorcode[number]}):", *found]
                print("\n".join(broken[-1 - len(found) :]), flush=True)
                if not scene.is_up:
                    scene.start()
            if not has_failed:
                break
    finally:
        scene.end()
    return len(scene.injected), broken
