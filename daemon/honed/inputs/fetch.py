"""Fetches a model or data set from the hub into the cache: a separate program, without torch. Interrupted fetches are
resumed.

    python -m honed.inputs.fetch --root DIR REPO_ID [--revision R] [--allow-pickle] [--allow-code]     for people
    python -m honed.inputs.fetch --root DIR --dataset REPO_ID [--revision R] [--name N] [--split S]
    python -m honed.inputs.fetch --root DIR --request N                                                for the daemon

For people: lines of JSON on stdout, `{"bytes", "of", "files", "of_files", "file", "problem", "received", "paused_sec"}`
as progress and, last, `{"ok": true, "path"}` or `{"ok": false, "error": {"code", "message", "hint"}}`. For the daemon
the same goes to the files of layout.FetchLayout, and nowhere else: so any service manager can run it. Exit statuses: 0
and error.py's.

Of a model it fetches the configuration, the tokenizer and processor, templates, and the weights as safetensors; pickled
weights only if they are allowed and there are no others; code only if it is allowed. Of a data set it fetches the data
files that hubdata.py chooses, and the card; scripts never.

Each file grows in blobs/<hash>.part, is checked against its hash, and only then gets its name and its link. So files in
a snapshot are complete, and a fetch resumes after a kill. A branch means its commit at the start of the fetch. hub.py
sends the requests to the hub and reads its answers.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Unpack

from honed.inputs import hubdata
from honed.inputs.basemodel import is_hub_id
from honed.job.progress import gib
from honed.run import hub as hubs
from honed.run import snapshot
from honed.run.hub import File, Hub, Listing, TransientError
from honed.run.snapshot import FetchProgress, Missing
from honed.spec import config
from honed.system import durable, python, quote
from honed.system import layout as layouts
from honed.system import log as logs
from honed.system.backoff import Backoff
from honed.system.clock import awake_time
from honed.system.error import (
    DiskShortError,
    EnvironmentInvalidError,
    HonedError,
    InternalError,
    InterruptedRunError,
    ModelError,
    UsageError,
    said,
)
from honed.system.layout import Layout
from honed.system.pauses import LOOK_SEC, Lookout

log = logging.getLogger("honed.inputs.fetch")

T = TypeVar("T")

#: Without it huggingface_hub 1.33 requests a list of coding agents from its hub, and reports if one of them runs here.
ENVIRONMENT = {"HF_HUB_DISABLE_TELEMETRY": "1"}
#: Errors of a full disk.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
#: Seconds before a retry while the hub does not answer: the first delay, doubled every time; and the longest.
FIRST_DELAY_SEC = 1.0
MAX_DELAY_SEC = 60.0
#: Seconds between two reports of progress.
PROGRESS_INTERVAL_SEC = 0.5
#: Bytes of disk that a fetch leaves free.
MIN_FREE_BYTES = 512 * 1024 * 1024
#: Downloads of a file whose hash does not match, before the fetch fails.
MAX_DAMAGED = 2

#: Weights in transformers' own order: the file, or the index of its shards; and True if they are pickled.
WEIGHTS = (("model.safetensors", False), ("pytorch_model.bin", True))
#: Suffixes of the files beside the weights; and files with these suffixes that are not needed.
KINDS = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
PASSED_OVER = re.compile(
    r"adapter_.*|.*\.index\.json|(README|LICENSE|NOTICE|USE_POLICY|requirements).*|(trainer_state|.*_results)\.json",
    re.I,
)
#: The only directory that tokenizers read.
TEMPLATE_DIR = "additional_chat_templates/"


@dataclass(frozen=True)
class Request:
    """The content of <n>.json: the model or data set to fetch."""

    repo_id: str
    revision: str
    pickle: bool
    code: bool
    deadline: float  #: by `awake_time`
    repo_type: str = snapshot.MODEL
    name: str | None = None
    split: str | None = None

    @property
    def wanted(self) -> Missing:
        return Missing(self.repo_id, self.revision, self.repo_type, self.name, self.split)

    @classmethod
    def read(cls, path: Path) -> Request:
        """Read a request. Raises UsageError for an invalid one."""
        try:
            request = cls(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path}: not a valid request: {error}") from error
        return request.checked()

    def checked(self) -> Request:
        if not (isinstance(self.repo_id, str) and is_hub_id(self.repo_id)):
            raise UsageError(f"{self.repo_id!r} is not a hub id", hint="a hub id looks like Qwen/Qwen3-1.7B")
        if not re.fullmatch(r"\w[\w./-]*", self.revision) or ".." in self.revision:
            raise UsageError(f"{self.revision!r} is not a revision", hint="use a branch, a tag or a commit")
        if self.repo_type not in {snapshot.MODEL, snapshot.DATASET}:
            raise UsageError(f"{self.repo_type!r} is neither {snapshot.MODEL} nor {snapshot.DATASET}")
        return self


Report = Callable[[FetchProgress], None]


class Download:
    """The download of a repository's files into blobs/: progress, retries, and the deadline, which no pause brings
    nearer."""

    def __init__(self, request: Request, hub: Hub, blobs_dir: Path, report: Report) -> None:
        self._lookout = Lookout()
        self._lookout.start()
        self._request = request
        self._hub = hub
        self._blobs_dir = blobs_dir
        self._report = report
        self.progress: FetchProgress = {"bytes": 0, "of": 0, "files": 0, "of_files": 0, "file": None, "problem": None}
        self.progress["received"] = 0
        self._reported_at = 0.0
        self._backoff = Backoff(FIRST_DELAY_SEC, MAX_DELAY_SEC)

    def blob(self, file: File) -> Path:
        return self._blobs_dir / file.blob

    def begin(self, files: Sequence[File]) -> None:
        """Note which files there are, and how much of them is here."""
        self.progress |= {"of": sum(file.num_bytes for file in files), "of_files": len(files)}
        self.progress["bytes"] = sum(map(self.num_bytes_here, files))

    def num_bytes_here(self, file: File) -> int:
        for path in (self.blob(file), self._part(file)):
            with contextlib.suppress(OSError):
                return min(path.stat().st_size, file.num_bytes)
        return 0

    def _part(self, file: File) -> Path:
        return self._blobs_dir / f"{file.blob}.part"

    def get(self, commit: str, file: File) -> None:
        """Download a file completely into blobs/."""
        blob, part = self.blob(file), self._part(file)
        if blob.exists() and blob.stat().st_size == file.num_bytes:
            return
        durable.make_dir(blob.parent)
        for _ in range(MAX_DAMAGED):
            self.patiently(lambda: self._download(commit, file))
            if _is_what_it_should_be(part, file):
                with part.open("rb") as whole:
                    os.fsync(whole.fileno())
                part.rename(blob)
                durable.sync_dir(blob.parent)
                return
            log.warning("%s: %s does not match its hash and is fetched again", self._hub.where, file.name)
            part.unlink()
            self.progress["bytes"] -= file.num_bytes
        raise EnvironmentInvalidError(
            f"{self._hub.where}: {file.name} did not match its hash in {MAX_DAMAGED} attempts",
            hint="check the network path to the hub (a proxy or mirror) and the disk",
        )

    def _download(self, commit: str, file: File) -> None:
        """Download the bytes that the part lacks."""
        with self._part(file).open("ab", buffering=0) as out:
            self._keep(out, min(out.tell(), file.num_bytes) if out.tell() <= file.num_bytes else 0)
            done = out.tell()
            if done == file.num_bytes:
                return
            with self._hub.open(commit, file.name, done) as response:
                if response.status_code == 416:
                    self._keep(out, 0)
                    raise TransientError(f"{file.name}: the hub has no data from byte {done} on")
                if done and response.status_code != 206:
                    self._keep(out, 0)  # the hub sends the file from its beginning
                for chunk in response.iter_bytes():
                    durable.write_all(out.fileno(), chunk)
                    self._backoff.reset()
                    self.progress["bytes"] += len(chunk)
                    self.progress["received"] += len(chunk)
                    self.say(problem=None)
                    self._check_deadline()
                    if out.tell() > file.num_bytes:  # it might continue until the disk is full
                        break
            got = out.tell()
            if got > file.num_bytes:  # the hash check will fail; a retry here could repeat for ever
                self.progress["bytes"] -= got - file.num_bytes
            elif got < file.num_bytes:
                raise TransientError(f"{file.name}: received {got} of {file.num_bytes} bytes")

    def _keep(self, out: Any, num_bytes: int) -> None:
        self.progress["bytes"] -= out.tell() - num_bytes
        out.truncate(num_bytes)
        out.seek(0, os.SEEK_END)

    def patiently(self, step: Callable[[], T]) -> T:
        """Retry a step while the hub does not answer, or the machine is at fault, with growing delays, until the
        deadline. Raises OSError for want of room, and if a submitter can be its cause."""
        while True:
            self._check_deadline()
            try:
                done = step()
            except TransientError as error:
                self._wait(str(error))
            except OSError as error:
                if error.errno in NO_ROOM or (fault := durable.fault_at_persons(error)) is None:
                    raise
                self._wait(fault)
            else:
                self.progress["problem"] = None
                return done

    def _wait(self, problem: str) -> None:
        if problem != self.progress["problem"]:
            log.warning("%s: %s; retrying until hub.fetch_timeout_sec", self._hub.where, problem)
        self.say(problem=problem, at_once=True)
        time.sleep(max(0.0, min(self._backoff.next_sec(), self._left_sec())))

    def _left_sec(self) -> float:
        return self._request.deadline + self._lookout.paused_sec - awake_time()

    def _check_deadline(self) -> None:
        if self._left_sec() > 0:
            return
        time.sleep(2 * LOOK_SEC)  # what has just passed may be a pause that was not seen yet
        if self._left_sec() > 0:
            return
        problem = f": {self.progress['problem']}" if self.progress["problem"] else ""
        raise EnvironmentInvalidError(
            f"{self._request.wanted.key}: {self._hub.where} could not be fetched within hub.fetch_timeout_sec{problem}",
            hint="check that this machine can reach the hub, then submit the job again: files fetched so far are kept",
        )

    def say(self, *, at_once: bool = False, **changes: Unpack[FetchProgress]) -> None:
        self.progress |= changes
        self.progress["paused_sec"] = self._lookout.paused_sec
        now = time.monotonic()
        if at_once or now - self._reported_at >= PROGRESS_INTERVAL_SEC:
            self._reported_at = now
            self._report({**self.progress})


class Fetch:
    """The fetch of one model or data set into the cache."""

    def __init__(
        self, request: Request, cache_dir: Path, token: str | None, report: Report, token_path: Path = hubs.TOKEN_PATH
    ) -> None:
        self._request = request
        self._cache_dir = cache_dir
        self._wanted = request.wanted
        self._hub = Hub(self._wanted, token, token_path=token_path)
        self._dir = snapshot.repository_dir(cache_dir, request.repo_id, request.repo_type)
        self._download = Download(request, self._hub, self._dir / "blobs", report)

    def run(self) -> Path:
        """Fetch everything. Returns the snapshot's complete directory. Raises HonedError."""
        with self._turn():
            listing = self._download.patiently(self._hub.list)
            files = self._choose(listing) if self._wanted.repo_type == snapshot.MODEL else self._choose_data(listing)
            path = snapshot.snapshot_dir(self._cache_dir, self._wanted.repo_id, listing.commit, self._wanted.repo_type)
            self._check_disk(files)
            record = snapshot.Record(
                self._wanted.repo_id,
                listing.commit,
                {file.name: file.num_bytes for file in files},
                self._request.code,
                self._wanted.repo_type,
                self._wanted.part,
            )
            snapshot.write(self._cache_dir, record)
            self._download.begin(files)
            for file in files:
                self._download.say(file=file.name)
                self._download.get(listing.commit, file)
                _link(self._download.blob(file), path / file.name)
                self._download.progress["files"] += 1
            if self._request.revision != listing.commit:
                ref = self._dir / "refs" / self._request.revision
                durable.make_dir(ref.parent)
                durable.write(ref, listing.commit.encode())
            self._download.say(file=None, at_once=True)
        return path

    # -- what there is, and what is taken -----------------------------------------------------------------------------

    def _check(self, listing: Listing) -> None:
        if "config.json" in listing.files:
            return
        if "adapter_config.json" in listing.files:
            raise ModelError(
                f"base_model: {self._hub.where} is an adapter (adapter_config.json, no config.json), not a base model",
                hint="set base_model to the model it was trained on",
            )
        raise ModelError(
            f"base_model: {self._hub.where} has no config.json", hint="use a checkpoint in transformers format"
        )

    def _choose(self, listing: Listing) -> list[File]:
        """Choose a model's files, the small ones first, so that their faults show early."""
        self._check(listing)
        names = [*filter(self._is_wanted, listing.files), *self._weights(listing)]
        return [self._known(listing, name) for name in names]

    def _choose_data(self, listing: Listing) -> list[File]:
        """Choose a data set's files. The card is fetched first, since it may assign files to splits."""
        first, card = [], None
        if hubdata.CARD in listing.files:
            file = self._known(listing, hubdata.CARD)
            if file.num_bytes <= hubdata.MAX_CARD_BYTES:
                self._download.get(listing.commit, file)
                first, card = [file], (self._download.blob(file)).read_bytes()
        names = hubdata.choose(listing.files, card, self._wanted)
        return [*first, *(self._known(listing, name) for name in names)]

    def _is_wanted(self, name: str) -> bool:
        plain = name.removeprefix(TEMPLATE_DIR)
        if "/" in plain or plain.startswith(".") or not plain.isprintable():
            return False
        kind = Path(plain).suffix
        return (kind in KINDS and not PASSED_OVER.fullmatch(plain)) or (kind == ".py" and self._request.code)

    def _weights(self, listing: Listing) -> list[str]:
        for name, is_pickled in WEIGHTS:
            index = f"{name}.index.json"
            if name not in listing.files and index not in listing.files:
                continue
            if is_pickled and not self._request.pickle:
                raise ModelError(
                    f"base_model: {self._hub.where} has only pickled weights ({name}), which are not loaded, because "
                    "loading them can run arbitrary code",
                    hint="use a repository with safetensors; or ask the administrator to set policy.pickle",
                )
            return [name] if name in listing.files else [index, *self._shards(listing, index)]
        others = [name for name in listing.files if name.endswith((".gguf", ".h5", ".msgpack", ".onnx"))]
        raise ModelError(
            f"base_model: {self._hub.where} has no weights that can be trained"
            + (f", only files such as {others[0]}" if others else ""),
            hint="use the checkpoint it was converted from, with a model.safetensors or its index",
        )

    def _shards(self, listing: Listing, index: str) -> list[str]:
        file = self._known(listing, index)
        self._download.get(listing.commit, file)
        try:
            weight_map = json.loads((self._download.blob(file)).read_bytes())["weight_map"]
            shards = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"base_model: {self._hub.where}: {index} lists no shards ({type(error).__name__})"
            ) from error
        for shard in shards:
            if not isinstance(shard, str) or "/" in shard or shard not in listing.files:
                raise ModelError(
                    f"base_model: {self._hub.where} lacks {quote.name(str(shard))}, which {index} lists",
                    hint="the repository is incomplete: use another revision",
                )
        return shards

    def _known(self, listing: Listing, name: str) -> File:
        """Return a file with its size and hash; a mirror may give them only at the file's own address."""
        file = listing.files[name]
        if not file.blob or file.num_bytes < 0:
            file = self._download.patiently(lambda: self._hub.ask(listing.commit, name))
        if not re.fullmatch(r"\w[\w-]{5,127}", file.blob):
            raise EnvironmentInvalidError(f"{self._hub.where}: the hub returned {file.blob!r} as the ETag of {name}")
        return file

    def _check_disk(self, files: list[File]) -> None:
        num_bytes = sum(max(0, file.num_bytes - self._download.num_bytes_here(file)) for file in files)
        durable.make_dir(self._cache_dir)
        free = shutil.disk_usage(self._cache_dir).free
        if num_bytes and num_bytes + MIN_FREE_BYTES > free:
            raise DiskShortError(
                f"{self._cache_dir}: {self._hub.where} needs {gib(num_bytes)} more, but only {gib(free)} is free",
                hint="free disk space, or move the cache to a larger disk",
            )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Allow one fetch of a repository at a time."""
        directory = snapshot.record_dir(self._cache_dir, self._wanted.repo_id, self._wanted.repo_type)
        durable.make_dir(directory)
        with (directory / "lock").open("ab") as lock:
            self._download.patiently(lambda: _lock(lock.fileno(), self._wanted.what))
            yield

    def from_os(self, error: OSError) -> HonedError:
        if error.errno in NO_ROOM:
            return DiskShortError(
                f"{self._cache_dir}: the disk became full after {gib(self._download.progress['bytes'])} of "
                f"{self._hub.where}",
                hint="free disk space, and submit the job again: files fetched so far are kept",
            )
        return EnvironmentInvalidError(
            f"{error.filename or self._cache_dir}: {error.strerror or error}",
            hint="check that honed can write its cache",
        )


def _lock(fd: int, what: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TransientError(f"another fetch of this {what} is running") from None


def _is_what_it_should_be(path: Path, file: File) -> bool:
    """Return True if a file has its size and the hash in its name; a mirror's own ETag is not a hash, and is not
    checked."""
    if path.stat().st_size != file.num_bytes:
        return False
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", file.blob):
        return True
    digest = hashlib.sha256()
    if len(file.blob) == 40:
        digest = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)  # git's
    with path.open("rb") as whole:
        return hashlib.file_digest(whole, lambda: digest).hexdigest() == file.blob


def _link(blob: Path, name: Path) -> None:
    """Make `name` a link to a blob, replacing whatever is there."""
    durable.make_dir(name.parent)
    target = os.path.relpath(blob, name.parent)
    if name.is_symlink() and str(name.readlink()) == target:
        return
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.rename(name)
    durable.sync_dir(name.parent)


# -- the program ------------------------------------------------------------------------------------------------------


def read_token(layout: Layout, environment: Mapping[str, str]) -> str | None:
    """Return the hub's token, from the first file that exists; None without one. Raises EnvironmentInvalidError if it
    is unreadable."""
    places = [layout.token_path]
    if directory := environment.get("CREDENTIALS_DIRECTORY"):
        places.insert(0, Path(directory) / "hf-token")
    if path := environment.get("HF_TOKEN_PATH"):
        places.insert(0, Path(path))
    for place in places:
        try:
            token = place.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a token"
            raise EnvironmentInvalidError(f"{place}: {reason}", hint="make it readable for honed with chmod") from error
        if not token.isprintable() or " " in token:
            raise EnvironmentInvalidError(
                f"{place}: not a token", hint="the file must contain only the token, on one line"
            )
        if place.stat().st_mode & 0o004:
            log.warning("%s: every user can read the token; use chmod 0640, with honed's group", place)
        if token:
            return token
    return None


def fetch(request: Request, layout: Layout, report: Report) -> Path:
    """Fetch what is requested. Returns the snapshot's directory. Raises HonedError if it cannot be fetched."""
    try:
        import huggingface_hub  # noqa: F401, PLC0415
    except ImportError as error:
        raise EnvironmentInvalidError(
            f"fetching from the hub is not possible: {error}",
            hint="pip install 'honed[train]', or set policy.hub = false",
        ) from error
    made = Fetch(request, layout.cache_dir, read_token(layout, os.environ), report, layout.token_path)
    try:
        return made.run()
    except HonedError:
        raise
    except OSError as error:
        raise made.from_os(error) from error
    except Exception as error:
        log.exception("the fetch failed unexpectedly")
        raise InternalError(f"the fetch failed unexpectedly: {type(error).__name__}: {said(error)}") from error


def main() -> int:
    python.protect()
    parser = argparse.ArgumentParser(
        prog="honed.inputs.fetch", description="Fetch a model or data set from the hub into honed's cache."
    )
    parser.add_argument("--root", type=Path, default=layouts.default_root())
    parser.add_argument("--request", type=int, metavar="N", help="run the request in var/lib/honed/fetch/N.json")
    parser.add_argument("repo_id", nargs="?", metavar="REPO_ID")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--dataset", action="store_true", help="fetch a data set instead of a model")
    parser.add_argument("--name", help="configuration of the data set")
    parser.add_argument("--split", help="fetch only this split of the data set")
    parser.add_argument("--allow-pickle", action="store_true", help="fetch pickled weights if there are no others")
    parser.add_argument("--allow-code", action="store_true", help="fetch the model's own code")
    options = parser.parse_args()
    if (options.request is None) == (options.repo_id is None):
        parser.error("give either REPO_ID or --request N")
    logs.set_up(verbose=False)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    os.environ |= ENVIRONMENT
    layout = layouts.of(options.root)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.request is not None:
        return _for_the_daemon(layout, options.request)
    try:
        deadline = awake_time() + config.load(layout).hub.fetch_timeout_sec
        repo_type = snapshot.DATASET if options.dataset else snapshot.MODEL
        request = Request(
            options.repo_id,
            options.revision,
            options.allow_pickle,
            options.allow_code,
            deadline,
            repo_type,
            options.name,
            options.split,
        )
        path = fetch(request.checked(), layout, lambda progress: print(json.dumps(progress), flush=True))
        print(json.dumps({"ok": True, "path": str(path)}), flush=True)
    except HonedError as error:
        return _end(error)
    except KeyboardInterrupt:
        return _end(
            InterruptedRunError("interrupted", hint="files fetched so far are kept, and the next fetch continues")
        )
    return 0


def _end(error: HonedError) -> int:
    print(json.dumps({"ok": False, "error": error.as_dict()}), flush=True)
    return error.exit_status


def _for_the_daemon(layout: Layout, number: int) -> int:
    """Run a fetch for the daemon. An interrupted fetch leaves no result, so that it is resumed."""
    files = layout.fetch(number)
    try:
        with _alone(files.lock_path):
            request = Request.read(files.request_path)
            try:
                log.debug("fetches %s at %s", request.repo_id, request.revision)
                path = fetch(request, layout, lambda progress: _write_progress(files.progress_path, progress))
                result: dict[str, object] = {"ok": True, "path": str(path)}
                status = 0
            except HonedError as error:
                result, status = {"ok": False, "error": error.as_dict()}, error.exit_status
            durable.write_json(files.result_path, result)
            return status
    except HonedError as error:
        log.error("fetch %d: %s", number, error.message)  # noqa: TRY400 - the sentence is the fact
        return error.exit_status
    except KeyboardInterrupt:
        log.info("fetch %d: interrupted; files fetched so far are kept", number)
        return InterruptedRunError.exit_status


@contextlib.contextmanager
def _alone(lock_path: Path) -> Iterator[None]:
    """Hold a fetch's lock. Raises InterruptedRunError if the fetch runs already."""
    with os.fdopen(os.open(lock_path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "a+b") as lock:
        with contextlib.suppress(OSError):
            os.fchmod(lock.fileno(), 0o600)  # everybody who may open it can hold it
        for _ in range(20):  # the daemon may be testing the lock
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        else:
            raise InterruptedRunError("it is already running")
        lock.truncate(0)
        durable.write_all(lock.fileno(), str(os.getpid()).encode())
        yield


def _write_progress(path: Path, progress: FetchProgress) -> None:
    """Write the progress atomically, but do not sync it: it is useless after a crash."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(progress))
    temporary.rename(path)


if __name__ == "__main__":
    sys.exit(main())
