"""Paths that lead to another person's files by the time they are opened: each input, each way to swap, each moment.

    swaps.py prepare      as root: what mallory will swap
    swaps.py turn         as mallory: swaps when it is told to
    swaps.py root         as mallory, who starts it: changes its root to each path that it is told
    swaps.py watch        as root: tells each opening of a file of berta's
    swaps.py check|work UID EVERY RACES CASE…
                          in the unit under test: looks at each case again and again, and has it swapped EVERY moments
                          later each time; or RACES times, while it is swapped to and fro by time

A moment lies before each opening of a file and around each check: whatever the order of checks and openings, the swap
comes between any two of them. Results are lines of JSON, with times of the machine's monotonic clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PLACE = Path("/srv/swaps")
#: The directories of mallory's inputs, of berta's, and of the paths that lead to the one or the other.
OWN, THEIRS, WORK = PLACE / "own", PLACE / "theirs", PLACE / "work"
ASK, ANSWER, HOLDER = PLACE / "ask", PLACE / "answer", PLACE / "holder"
#: The jobs whose outputs a chain continues from: number → owner.
CHAIN = PLACE / "chain.json"
JOBS = Path("/var/lib/honed/jobs")
#: Each input that a job names by a path, and the name of the file or directory.
INPUTS = {
    "base_model": "model",
    "adapter": "adapter",
    "chat_template": "template.jinja",
    "training_chat_template": "template.jinja",
    "datasets": "rows.jsonl",
    "media": "picture.png",
    "chain": "output",
}
SWAPS = ("link", "renamed", "proc", "root", "hard-link", "dots")
CASES = [(name, swap) for name in INPUTS for swap in SWAPS]
#: Python's audit events for opening or listing something.
OPENINGS = {"open", "os.listdir", "os.scandir", "os.getxattr"}


def own_of(name: str) -> tuple[Path, Path]:
    """Return the directories with mallory's input and with berta's."""
    if name == "chain":
        mine, theirs = (JOBS / str(number) for number in json.loads(CHAIN.read_text()))
        return mine / "own", theirs / "own"
    return OWN / name, THEIRS / name


def work_of(name: str, swap: str) -> Path:
    """Return the directory in which a case is swapped; for a chain it is the job's own."""
    return own_of("chain")[0].with_name("work") / swap if name == "chain" else WORK / f"{name}.{swap}"


def path_of(name: str, swap: str) -> Path:
    """Return the path that the job names."""
    place, leaf = work_of(name, swap), INPUTS[name]
    match swap:
        case "proc":
            return Path(f"/proc/{HOLDER.read_text().split()[0]}/cwd") / leaf
        case "root":
            return Path(f"/proc/{HOLDER.read_text().split()[1]}/root") / leaf
        case "dots":
            return place / "sub" / ".." / leaf
        case "renamed":
            return place / "dir" / leaf
        case _:
            return place / leaf


# -- the attacker ------------------------------------------------------------------------------------------------------


def prepare_case(name: str, swap: str) -> None:
    """Prepare, as root, the files that mallory swaps, among them hard links that she could not make herself."""
    place, leaf = work_of(name, swap), INPUTS[name]
    place.mkdir(parents=True)
    for whose, source in zip(("own", "theirs"), own_of(name), strict=True):
        for target in (place / f"{whose}.linked",) if swap == "hard-link" else ():
            target.mkdir()
            if (source / leaf).is_dir():
                shutil.copytree(source / leaf, target / leaf, copy_function=os.link)
            else:
                os.link(source / leaf, target / leaf)
        for target in (place / f"{whose}.dir",) if swap == "renamed" else ():
            if whose == "own":
                shutil.copytree(source, target, symlinks=True)
            else:
                target.symlink_to(source)


def turn(name: str, swap: str, whose: str) -> None:
    """Point the case's path to mallory's own input or to berta's; runs as mallory."""
    place, leaf = work_of(name, swap), INPUTS[name]
    source = own_of(name)[whose == "theirs"]
    match swap:
        case "link":
            _lead(place / leaf, source / leaf)
        case "dots":
            _lead(place / "sub", source / "sub")
        case "proc":
            with contextlib.suppress(PermissionError):  # in a directory of berta's job, which mallory cannot enter
                os.chdir(source)
        case "root":
            assert _rooted[0].stdin is not None
            assert _rooted[0].stdout is not None
            _rooted[0].stdin.write(f"{source}\n")
            _rooted[0].stdin.flush()
            assert _rooted[0].stdout.readline()
        case "renamed":
            _rename_here(place, "dir", whose)
        case "hard-link":
            _rename_linked(place, leaf, whose)


def _lead(link: Path, target: Path) -> None:
    link.with_name(".new").unlink(missing_ok=True)
    link.with_name(".new").symlink_to(target)
    link.with_name(".new").rename(link)


def _rename_here(place: Path, name: str, whose: str) -> None:
    """Rename `own.dir` or `theirs.dir` to the name, after moving the other one back to its own name."""
    if os.path.lexists(place / f"{whose}.{name}"):
        for other in ("own", "theirs"):
            if other != whose and not os.path.lexists(place / f"{other}.{name}"):
                (place / name).rename(place / f"{other}.{name}")
        (place / f"{whose}.{name}").rename(place / name)


def _rename_linked(place: Path, leaf: str, whose: str) -> None:
    if os.path.lexists(place / f"{whose}.linked" / leaf):
        for other in ("own", "theirs"):
            if other != whose and not os.path.lexists(place / f"{other}.linked" / leaf):
                (place / leaf).rename(place / f"{other}.linked" / leaf)
        (place / f"{whose}.linked" / leaf).rename(place / leaf)


def serve() -> None:
    """Execute the requests of the unit under test: lines of `turn NAME SWAP WHOSE`, `race NAME SWAP SEED` or `halt`."""
    command = [sys.executable, __file__, "root"]
    _rooted.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    HOLDER.write_text(f"{os.getpid()} {_rooted[0].pid}")
    for swap in SWAPS:
        parts = [{"type": "image", "image": str(path_of("media", swap))}, {"type": "text", "text": "Which color?"}]
        row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]}
        (work_of("media", swap) / "rows.jsonl").write_text(json.dumps(row) + "\n")
    racing: tuple[threading.Event, threading.Thread] | None = None
    # Opened for both: it never ends.
    with os.fdopen(os.open(ASK, os.O_RDWR)) as asked, os.fdopen(os.open(ANSWER, os.O_RDWR), "w") as answers:
        print("ready", flush=True)
        for line in asked:
            verb, *words = line.split()
            num_turns = 0
            if verb == "turn":
                turn(*words)
            elif verb == "race":
                racing = _race(words[0], words[1], random.Random(words[2]))
            elif racing is not None:
                racing[0].set()
                racing[1].join()
                num_turns = _turns.pop(0)
            answers.write(f"{num_turns}\n")
            answers.flush()


_turns: list[int] = []
#: The process that changes its root.
_rooted: list[subprocess.Popen[str]] = []
_CLONE_NEWUSER = 0x10000000


def change_root() -> None:
    """Change the root to each path read from stdin; in a user namespace of their own, any user may do so."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    top = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    for line in sys.stdin:
        os.fchdir(top)
        os.chroot(".")
        with contextlib.suppress(PermissionError):  # as above
            os.chroot(line.rstrip("\n"))
        print("there", flush=True)


def _race(name: str, swap: str, chance: random.Random) -> tuple[threading.Event, threading.Thread]:
    over = threading.Event()

    def swap_by_time() -> None:
        number = 0
        while not over.wait(chance.choice((0, 0.0002, 0.001, 0.005, 0.02)) * chance.random()):
            number += 1
            turn(name, swap, "theirs" if number % 2 else "own")
        _turns.append(number)

    thread = threading.Thread(target=swap_by_time)
    thread.start()
    return over, thread


# -- the witness -------------------------------------------------------------------------------------------------------

_IN_OPEN = 0x20


def watch() -> None:
    """Report each opening of one of berta's files, by whatever path and program: its time and its first name."""
    libc = ctypes.CDLL(None, use_errno=True)
    notify = libc.inotify_init1(0)
    watched = {}
    for top in (THEIRS, own_of("chain")[1]):
        for path in sorted(top.rglob("*")):
            if path.is_file() and not path.is_symlink():
                number = libc.inotify_add_watch(notify, os.fsencode(path), _IN_OPEN)
                assert number > 0, os.strerror(ctypes.get_errno())
                watched[number] = path
    print(json.dumps({"watched": len(watched)}), flush=True)
    while select.select([notify], [], []):
        data, at = os.read(notify, 65536), 0
        now = time.monotonic()
        while at < len(data):
            number, _, _, length = struct.unpack_from("iIII", data, at)
            at += 16 + length
            print(json.dumps({"opened": str(watched[number]), "at": now}), flush=True)


# -- the unit under test -----------------------------------------------------------------------------------------------


class Moments:
    """A counter of the moments of one look, which calls a function at one of them."""

    def __init__(self) -> None:
        self.number, self._at, self._then, self._is_busy = 0, 0, lambda: None, False
        sys.addaudithook(self._hear)

    def begin(self, at: int, then: Callable[[], None]) -> None:
        self.number, self._at, self._then = 0, at, then

    def pass_one(self, *_: object) -> None:
        if self._is_busy:
            return
        self.number += 1
        if self.number == self._at:
            self._is_busy = True
            self._then()
            self._is_busy = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPENINGS and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.fsdecode(arguments[0])
            if path.startswith((str(PLACE), str(JOBS), "/proc/")) and not path.startswith((str(ASK), str(ANSWER))):
                self.pass_one()

    def around(self, module: Any, name: str) -> None:
        """Count a moment before and after each call of a function."""
        function = getattr(module, name)

        def called(*words: Any, **keys: Any) -> Any:
            self.pass_one()
            try:
                return function(*words, **keys)
            finally:
                self.pass_one()

        setattr(module, name, called)


def job_of(name: str, swap: str, path: Path) -> dict[str, Any]:
    """Return a job that names the path as that input."""
    spec: dict[str, Any] = {
        "base_model": "/srv/swaps/own/base_model/model",
        "datasets": [{"path": "/srv/swaps/own/datasets/rows.jsonl"}],
    }
    if name == "datasets":
        return {**spec, "datasets": [{"path": str(path)}], "lora": {"r": 4}}
    if name == "media":
        rows = work_of(name, swap) / "rows.jsonl"
        return {**spec, "base_model": "/srv/swaps/own/seeing", "datasets": [{"path": str(rows)}], "lora": {"r": 4}}
    if name == "chain":
        return {**spec, "adapter": str(path)}
    return {**spec, name: str(path), **({} if name == "adapter" else {"lora": {"r": 4}})}


class Subject:
    """honed's code that checks the paths a job names and opens them, as a check's unit or a job's unit runs it."""

    def __init__(self, kind: str, uid: int) -> None:
        from honed.check import policy, preflight
        from honed.spec.config import Config
        from honed.system import access, device
        from honed.system.layout import Layout

        self.moments = Moments()
        self._uid, self._layout, self._config, self._device = uid, Layout(Path("/")), Config(), device.cpu()
        self._preflight, self._policy = preflight, policy
        self.look = self._check if kind == "check" else self._work
        for module, names in {access: ("obstacle", "may"), policy: ("_real",), os: ("access",)}.items():
            for name in names:
                self.moments.around(module, name)

    def _check(self, name: str, swap: str, path: Path) -> str:
        from honed.check.checklist import Asked
        from honed.system.error import HonedError

        try:
            asked = Asked(self._layout, self._config, self._device, uid=self._uid, progress=self.moments.pass_one)
            self._preflight.check(Path("spec.json"), asked, json.dumps(job_of(name, swap, path)).encode())
        except HonedError as error:
            return f"{error.code}: {error.shown}"
        return "in order"

    def _work(self, name: str, swap: str, path: Path) -> str:
        """Do with each input what the worker does: check the path against the grant, then open it as libraries do."""
        from honed.spec import jobfile
        from honed.system.error import HonedError

        job_spec = jobfile.of(
            jobfile.read(Path("spec.json"), json.dumps(job_of(name, swap, path)).encode(), max_bytes=2**18)
        )
        model, adapter = Path(job_spec.base_model), None if job_spec.adapter is None else Path(job_spec.adapter)
        inputs = list(self._policy.inputs(job_spec, model, adapter))
        # The grant from when the job was accepted and all paths were valid.
        rights = self._policy.Policy.of(self._layout, self._config, self._uid)
        grant = rights.grant([*inputs, *([self._policy.Named("media", path)] if name == "media" else [])])
        try:
            for each in inputs:
                self._policy.check_granted(grant, each)
            self.moments.pass_one()
            for each in [*inputs, *([self._policy.Named("media", path)] if name == "media" else [])]:
                _read_all(each.path)
        except (HonedError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return "in order"


def _read_all(path: Path) -> None:
    """Read by path, as transformers, datasets and PIL open what they are given."""
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.is_file() or not each.exists():
            each.read_bytes()


@contextlib.contextmanager
def attacker() -> Iterator[Callable[..., int]]:
    with ASK.open("w") as ask, ANSWER.open() as answers:

        def tell(*words: object) -> int:
            ask.write(" ".join(map(str, words)) + "\n")
            ask.flush()
            return int(answers.readline())

        yield tell


def look_at_each_moment(subject: Subject, tell: Callable[..., int], name: str, swap: str, every: int) -> None:
    at = 0
    while True:
        at += 1 if at < 1 else every
        tell("turn", name, swap, "own")
        path = path_of(name, swap)
        subject.moments.begin(at, lambda: (tell("turn", name, swap, "theirs"), None)[1])
        began = time.monotonic()
        outcome = subject.look(name, swap, path)
        is_over = subject.moments.number < at
        say(name, swap, began, outcome, at=None if is_over else at, num_moments=subject.moments.number)
        if is_over:
            return


def look_in_a_race(subject: Subject, tell: Callable[..., int], name: str, swap: str, seed: int) -> None:
    tell("turn", name, swap, "own")
    path = path_of(name, swap)
    subject.moments.begin(0, lambda: None)
    num_turns, number = 0, 0
    while not num_turns:  # on a busy machine a look may be over before the first swap: then it was no race
        tell("race", name, swap, f"{seed}.{number}")
        number += 1
        began = time.monotonic()
        outcome = subject.look(name, swap, path)
        num_turns = tell("halt")
    say(name, swap, began, outcome, num_turns=num_turns)


def say(name: str, swap: str, began: float, outcome: str, **more: object) -> None:
    told = {"input": name, "swap": swap, "began": began, "ended": time.monotonic(), "outcome": outcome, **more}
    print(json.dumps(told), flush=True)


def main() -> None:
    verb, *words = sys.argv[1:]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    match verb:
        case "turn":
            serve()
        case "root":
            change_root()
        case "watch":
            watch()
        case "prepare":
            for name, swap in CASES:
                prepare_case(name, swap)
        case _:
            uid, every, num_races = map(int, words[:3])
            cases = [case for case in CASES if not words[3:] or "/".join(case) in words[3:] or case[1] in words[3:]]
            with attacker() as tell:
                subject = Subject(verb, uid)
                for number in range(num_races):
                    look_in_a_race(subject, tell, *cases[number % len(cases)], seed=number)
                for case in cases if not num_races else ():
                    look_at_each_moment(subject, tell, *case, every=every)
            print(json.dumps({"over": True}), flush=True)


if __name__ == "__main__":
    main()
