"""Fetches a model from the hub into the cache: a program of its own, without torch. What was cut short is gone on with.

    python -m honed.fetch --root DIR REPO_ID [--revision R] [--allow-pickle] [--allow-code]     for people
    python -m honed.fetch --root DIR --request N                                                for the daemon

For people: lines of JSON on stdout, `{"bytes", "of", "files", "of_files", "file", "problem"}` on the way and, last,
`{"ok": true, "path"}` or `{"ok": false, "error": {"code", "message", "hint"}}`. For the daemon the same in the files of
layout.FetchLayout, and nothing but them: so a service manager may run it as well. Exit statuses: 0 and error.py's.

What is taken: the configuration, the tokenizer and processor, templates, and the weights as safetensors; pickled
weights only where they are allowed and no others are there; code only where it is allowed. Nothing else.

Each file grows in blobs/<hash>.part, is held against its hash, and only then gets its name and its link; so what lies
in a snapshot is whole, and what a kill leaves is gone on from. (huggingface_hub 1.33 downloads into a file with a
random name, which it deletes when it is interrupted: of a shard of 5 GB nothing stays. So only its sessions, addresses
and errors are used.) A branch means the commit that it had when the fetch began.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from honed import __version__, config, durable, snapshot
from honed import log as logs
from honed.basemodel import is_hub_id
from honed.clock import boot_time
from honed.error import (
    DiskShortError,
    EnvironmentInvalidError,
    HonedError,
    InternalError,
    InterruptedRunError,
    ModelError,
    UsageError,
    from_dict,
)
from honed.layout import Layout
from honed.memory import gib

log = logging.getLogger("honed.fetch")

T = TypeVar("T")

#: Without it huggingface_hub 1.33 asks its hub for a list of coding agents, and tells whether one of them runs here.
ENVIRONMENT = {"HF_HUB_DISABLE_TELEMETRY": "1"}
#: Seconds between tries while the hub does not answer: the first, doubled for each one after it, and the longest.
FIRST_DELAY_SEC = 1.0
MAX_DELAY_SEC = 60.0
#: Seconds in which the hub has to answer, or to send something more.
TIMEOUT_SEC = 30.0
#: Seconds between two words about progress.
PROGRESS_INTERVAL_SEC = 0.5
#: Bytes of disk that a fetch leaves free.
MIN_FREE_BYTES = 512 * 1024 * 1024
#: Bytes hashed at a time.
CHUNK_BYTES = 1024 * 1024
#: How often a file that is not what its hash says is fetched again.
MAX_DAMAGED = 2
#: Statuses that pass by themselves.
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})

#: Weights in transformers' own order: the file, or the index of its shards; and whether they are pickled.
WEIGHTS = (("model.safetensors", False), ("pytorch_model.bin", True))
#: Files beside the weights; and those of them that nothing here reads.
KINDS = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
PASSED_OVER = re.compile(
    r"adapter_.*|.*\.index\.json|(README|LICENSE|NOTICE|USE_POLICY|requirements).*|(trainer_state|.*_results)\.json",
    re.I,
)
#: The one directory that tokenizers read.
TEMPLATE_DIR = "additional_chat_templates/"


@dataclass(frozen=True)
class Request:
    """What is to be fetched, as it stands in <n>.json."""

    repo_id: str
    revision: str
    pickle: bool
    code: bool
    deadline: float  #: by `boot_time`

    @classmethod
    def read(cls, path: Path) -> Request:
        """Raises UsageError for what is no request."""
        try:
            request = cls(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path}: not a request: {error}") from error
        return request.checked()

    def checked(self) -> Request:
        if not (isinstance(self.repo_id, str) and is_hub_id(self.repo_id)):
            raise UsageError(f"{self.repo_id!r} is not a hub id", hint="a hub id looks like Qwen/Qwen3-1.7B")
        if not re.fullmatch(r"\w[\w./-]*", self.revision) or ".." in self.revision:
            raise UsageError(f"{self.revision!r} is not a revision", hint="a branch, a tag or a commit")
        return self


@dataclass(frozen=True)
class File:
    """A file of the repository."""

    name: str
    num_bytes: int
    blob: str  #: its name in blobs/: the SHA-256 of a large file, git's SHA-1 of a small one


@dataclass(frozen=True)
class Listing:
    """What a revision is made of, by name."""

    commit: str
    files: Mapping[str, File]


class TransientError(Exception):
    """What passes by itself; the message is one for people."""


#: Is told how far it is: bytes, of how many; files, of how many; the file; what keeps it waiting.
Tell = Callable[[dict[str, Any]], None]


class Fetch:
    """One model on its way into the cache."""

    def __init__(self, request: Request, cache_dir: Path, token: str | None, tell: Tell) -> None:
        self._request = request
        self._cache_dir = cache_dir
        self._token: str | bool = token or False  # False: not the one of the environment either
        self._tell = tell
        self._dir = snapshot.repository_dir(cache_dir, request.repo_id)
        self._progress: dict[str, Any] = {"bytes": 0, "of": 0, "files": 0, "of_files": 0, "file": None, "problem": None}
        self._told_at = 0.0
        self._delay_sec = FIRST_DELAY_SEC

    def run(self) -> Path:
        """Returns the snapshot's directory, all of it there. Raises HonedError."""
        with self._turn():
            listing = self._patiently(self._list)
            self._check(listing)
            files = self._choose(listing)
            path = snapshot.snapshot_dir(self._cache_dir, self._request.repo_id, listing.commit)
            self._check_disk(files)
            record = snapshot.Record(
                self._request.repo_id, listing.commit, {file.name: file.num_bytes for file in files}, self._request.code
            )
            snapshot.write(self._cache_dir, record)
            self._progress |= {"of": sum(file.num_bytes for file in files), "of_files": len(files)}
            self._progress["bytes"] = sum(self._num_bytes_here(file) for file in files)
            for file in files:
                self._say(file=file.name)
                self._get(listing.commit, file)
                _link(self._dir / "blobs" / file.blob, path / file.name)
                self._progress["files"] += 1
            if self._request.revision != listing.commit:
                ref = self._dir / "refs" / self._request.revision
                durable.make_dir(ref.parent)
                durable.write(ref, listing.commit.encode())
            self._say(file=None, at_once=True)
        return path

    # -- what there is, and what is taken -----------------------------------------------------------------------------

    def _list(self) -> Listing:
        import huggingface_hub  # noqa: PLC0415  (it belongs to the worker's packages)

        with self._translated():
            found = huggingface_hub.HfApi(token=self._token).model_info(
                self._request.repo_id, revision=self._request.revision, files_metadata=True, timeout=TIMEOUT_SEC
            )
        commit = str(found.sha)
        if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
            raise EnvironmentInvalidError(f"{self._where()}: the hub gives {commit!r} as its commit")
        files = {}
        for each in found.siblings or []:
            blob, size = (each.lfs.sha256, each.lfs.size) if each.lfs else (each.blob_id, each.size)
            files[each.rfilename] = File(each.rfilename, -1 if size is None else size, blob or "")
        return Listing(commit, files)

    def _check(self, listing: Listing) -> None:
        if "config.json" in listing.files:
            return
        if "adapter_config.json" in listing.files:
            raise ModelError(
                f"base_model: {self._where()} is an adapter (adapter_config.json, no config.json), not a base model",
                hint="name the model it was trained on as base_model:",
            )
        raise ModelError(
            f"base_model: {self._where()} has no config.json", hint="take a checkpoint in transformers' own form"
        )

    def _choose(self, listing: Listing) -> list[File]:
        """The small files first, so that what is wrong with them shows early."""
        names = [name for name in listing.files if self._is_wanted(name)]
        names += self._weights(listing)
        return [self._known(listing, name) for name in names]

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
                    f"base_model: {self._where()} has pickled weights only ({name}), which are not loaded, since "
                    "loading them runs what is in them",
                    hint="take a repository with safetensors; or the administrator sets policy.pickle",
                )
            return [name] if name in listing.files else [index, *self._shards(listing, index)]
        others = [name for name in listing.files if name.endswith((".gguf", ".h5", ".msgpack", ".onnx"))]
        raise ModelError(
            f"base_model: {self._where()} has no weights that can be trained on"
            + (f", only such as {others[0]}" if others else ""),
            hint="take the checkpoint that it was made from, with a model.safetensors or its index",
        )

    def _shards(self, listing: Listing, index: str) -> list[str]:
        file = self._known(listing, index)
        self._get(listing.commit, file)
        try:
            weight_map = json.loads((self._dir / "blobs" / file.blob).read_bytes())["weight_map"]
            shards = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"base_model: {self._where()}: {index} names no shards ({error!r})") from error
        for shard in shards:
            if not isinstance(shard, str) or "/" in shard or shard not in listing.files:
                raise ModelError(
                    f"base_model: {self._where()} lacks {shard!r}, which {index} names",
                    hint="the repository is incomplete: take another revision",
                )
        return shards

    def _known(self, listing: Listing, name: str) -> File:
        """A file with its size and hash; a mirror may leave them to the file's own address."""
        file = listing.files[name]
        if not file.blob or file.num_bytes < 0:
            file = self._patiently(lambda: self._asked(listing.commit, name))
        if not re.fullmatch(r"\w[\w-]{5,127}", file.blob):
            raise EnvironmentInvalidError(f"{self._where()}: the hub gives {file.blob!r} as the ETag of {name}")
        return file

    def _asked(self, commit: str, name: str) -> File:
        import huggingface_hub  # noqa: PLC0415

        with self._translated():
            found = huggingface_hub.get_hf_file_metadata(
                self._url(commit, name), token=self._token, timeout=TIMEOUT_SEC, retry_on_errors=False
            )
        if found.etag is None or found.size is None:
            raise EnvironmentInvalidError(f"{self._where()}: the hub gives no ETag or size of {name}")
        return File(name, found.size, found.etag)

    def _check_disk(self, files: list[File]) -> None:
        num_bytes = sum(max(0, file.num_bytes - self._num_bytes_here(file)) for file in files)
        durable.make_dir(self._cache_dir)
        free = shutil.disk_usage(self._cache_dir).free
        if num_bytes and num_bytes + MIN_FREE_BYTES > free:
            raise DiskShortError(
                f"{self._cache_dir}: {self._where()} takes {gib(num_bytes)} more, and {gib(free)} are free",
                hint="free some, or put the cache on a larger disk",
            )

    def _num_bytes_here(self, file: File) -> int:
        for path in (self._dir / "blobs" / file.blob, self._part(file)):
            with contextlib.suppress(OSError):
                return min(path.stat().st_size, file.num_bytes)
        return 0

    def _part(self, file: File) -> Path:
        return self._dir / "blobs" / f"{file.blob}.part"

    # -- one file -----------------------------------------------------------------------------------------------------

    def _get(self, commit: str, file: File) -> None:
        """Have a file whole in blobs/."""
        blob, part = self._dir / "blobs" / file.blob, self._part(file)
        if blob.exists() and blob.stat().st_size == file.num_bytes:
            return
        durable.make_dir(blob.parent)
        for _ in range(MAX_DAMAGED):
            self._patiently(lambda: self._download(commit, file))
            if _is_what_it_should_be(part, file):
                with part.open("rb") as whole:
                    os.fsync(whole.fileno())
                part.rename(blob)
                durable.sync_dir(blob.parent)
                return
            log.warning("%s: %s is not what its hash says, and is fetched again", self._where(), file.name)
            part.unlink()
            self._progress["bytes"] -= file.num_bytes
        raise EnvironmentInvalidError(
            f"{self._where()}: {file.name} is not what its hash says, {MAX_DAMAGED} times over",
            hint="something between here and the hub changes it: a proxy, a mirror, the disk",
        )

    def _download(self, commit: str, file: File) -> None:
        """Add to the part what it lacks."""
        import huggingface_hub  # noqa: PLC0415

        with self._part(file).open("ab", buffering=0) as out, self._translated():
            self._keep(out, min(out.tell(), file.num_bytes) if out.tell() <= file.num_bytes else 0)
            done = out.tell()
            if done == file.num_bytes:
                return
            headers = huggingface_hub.utils.build_hf_headers(
                token=self._token, library_name="honed", library_version=__version__
            )
            headers |= {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
            session = huggingface_hub.get_session()
            url = self._url(commit, file.name)
            with session.stream("GET", url, headers=headers, timeout=TIMEOUT_SEC, follow_redirects=True) as response:
                if response.status_code == 416:
                    self._keep(out, 0)
                    raise TransientError(f"{file.name}: the hub has nothing from byte {done} on")
                huggingface_hub.utils.hf_raise_for_status(response)
                if done and response.status_code != 206:
                    self._keep(out, 0)  # it gives the file from its beginning
                for chunk in response.iter_bytes():
                    _write(out.fileno(), chunk)
                    self._delay_sec = FIRST_DELAY_SEC
                    self._progress["bytes"] += len(chunk)
                    self._say(problem=None)
                    self._check_deadline()
                    if out.tell() > file.num_bytes:  # it may go on so until the disk is full
                        break
            got = out.tell()
            if got > file.num_bytes:  # its hash will tell; tried again for ever it would be fetched for ever
                self._progress["bytes"] -= got - file.num_bytes
            elif got < file.num_bytes:
                raise TransientError(f"{file.name}: {got} bytes came, of {file.num_bytes}")

    def _keep(self, out: Any, num_bytes: int) -> None:
        """Cut a part down to its first bytes."""
        self._progress["bytes"] -= out.tell() - num_bytes
        out.truncate(num_bytes)
        out.seek(0, os.SEEK_END)

    def _url(self, commit: str, name: str) -> str:
        import huggingface_hub  # noqa: PLC0415

        return str(huggingface_hub.hf_hub_url(self._request.repo_id, name, revision=commit))

    # -- patience -----------------------------------------------------------------------------------------------------

    def _patiently(self, step: Callable[[], T]) -> T:
        """Do it again while the hub does not answer, ever more slowly, until the deadline."""
        while True:
            self._check_deadline()
            try:
                done = step()
            except TransientError as error:
                if str(error) != self._progress["problem"]:
                    log.warning("%s: %s; tried again until the fetch's time is over", self._where(), error)
                self._say(problem=str(error), at_once=True)
                time.sleep(max(0.0, min(self._delay_sec, self._request.deadline - boot_time())))
                self._delay_sec = min(2 * self._delay_sec, MAX_DELAY_SEC)
            else:
                self._progress["problem"] = None
                return done

    def _check_deadline(self) -> None:
        if boot_time() < self._request.deadline:
            return
        problem = f": {self._progress['problem']}" if self._progress["problem"] else ""
        raise EnvironmentInvalidError(
            f"base_model: {self._where()} could not be fetched in the time that there was "
            f"(hub.fetch_timeout_sec){problem}",
            hint="can this machine reach the hub? drop the job again: what was fetched is kept",
        )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One fetch of a repository at a time."""
        directory = snapshot.record_dir(self._cache_dir, self._request.repo_id)
        durable.make_dir(directory)
        with (directory / "lock").open("ab") as lock:
            self._patiently(lambda: _lock(lock.fileno()))
            yield

    def _say(self, *, at_once: bool = False, **changes: Any) -> None:
        self._progress |= changes
        now = time.monotonic()
        if at_once or now - self._told_at >= PROGRESS_INTERVAL_SEC:
            self._told_at = now
            self._tell(dict(self._progress))

    # -- words --------------------------------------------------------------------------------------------------------

    def _where(self) -> str:
        return f"{self._request.repo_id} at {self._request.revision}"

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """What the library raises, in words for people; what passes by itself as TransientError."""
        import httpx  # noqa: PLC0415
        from huggingface_hub import errors  # noqa: PLC0415

        try:
            yield
        except errors.OfflineModeIsEnabled as error:
            raise EnvironmentInvalidError(
                f"base_model: {self._where()} cannot be fetched: HF_HUB_OFFLINE is set",
                hint="take it out of honed's environment, or set policy.hub = false",
            ) from error
        except errors.HfHubHTTPError as error:
            raise self._from_status(error) from error
        except errors.HFValidationError as error:
            raise ModelError(f"base_model: {self._where()}: {error}") from error
        except httpx.TransportError as error:
            raise TransientError(f"the hub cannot be reached ({type(error).__name__}: {error})") from error
        except OSError as error:
            raise self.from_os(error) from error
        except (httpx.HTTPError, ValueError) as error:
            raise EnvironmentInvalidError(
                f"{self._where()}: {_endpoint()} does not answer as a hub does ({type(error).__name__}: {error})",
                hint="is there a proxy before it, or a wrong HF_ENDPOINT?",
            ) from error

    def _from_status(self, error: Any) -> Exception:
        from huggingface_hub import errors  # noqa: PLC0415

        where, status = f"base_model: {self._where()}", error.response.status_code
        files = "/etc/honed/hf-token, or the credential hf-token"
        with_token = "with the token that there is" if self._token else "without a token"
        match error:
            case errors.GatedRepoError():
                return EnvironmentInvalidError(
                    f"{where} is gated, and is not given out {with_token}",
                    hint=f"accept its terms at {_endpoint()}/{self._request.repo_id}, and put a token of that account "
                    f"into {files}",
                )
            case errors.RevisionNotFoundError():
                return ModelError(f"{where}: no such revision", hint="name a branch, a tag or a commit of that model")
            case errors.RepositoryNotFoundError() | errors.DisabledRepoError():
                return ModelError(
                    f"{where}: {_endpoint()} gives out no such model {with_token}",
                    hint=f"is the name right? a private model needs a token, in {files}",
                )
            case _ if status in {401, 403}:
                return EnvironmentInvalidError(
                    f"{where}: the hub refuses it {with_token} ({status})", hint=f"put a valid token into {files}"
                )
            case errors.EntryNotFoundError():
                return ModelError(f"{where}: the hub has not the files that it lists: {error.response.url}")
            case _ if status in TRANSIENT_STATUSES:
                return TransientError(f"the hub answers {status}")
            case _:
                return EnvironmentInvalidError(f"{where}: the hub answers {status} to {error.response.url.path}")

    def from_os(self, error: OSError) -> HonedError:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return DiskShortError(
                f"{self._cache_dir}: the disk is full, {gib(self._progress['bytes'])} into {self._where()}",
                hint="free some, and drop the job again: what was fetched is kept",
            )
        return EnvironmentInvalidError(
            f"{error.filename or self._cache_dir}: {error.strerror or error}", hint="can honed write its cache?"
        )


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TransientError("another fetch of this model runs") from None


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _is_what_it_should_be(path: Path, file: File) -> bool:
    """Whether a file has its size and the hash that it is named by; a mirror's own ETag says nothing."""
    if path.stat().st_size != file.num_bytes:
        return False
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", file.blob):
        return True
    digest = hashlib.sha256()
    if len(file.blob) == 40:
        digest = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)  # git's
    with path.open("rb") as whole:
        while chunk := whole.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == file.blob


def _link(blob: Path, name: Path) -> None:
    """Put a link to a blob under a name, in place of whatever else is there."""
    durable.make_dir(name.parent)
    target = os.path.relpath(blob, name.parent)
    if name.is_symlink() and str(name.readlink()) == target:
        return
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.rename(name)
    durable.sync_dir(name.parent)


def _endpoint() -> str:
    from huggingface_hub import constants  # noqa: PLC0415

    return str(constants.ENDPOINT)


# -- the program ------------------------------------------------------------------------------------------------------


def read_token(layout: Layout, environment: Mapping[str, str]) -> str | None:
    """The hub's token, from the first file that there is. Raises EnvironmentInvalidError where it cannot be read."""
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
            raise EnvironmentInvalidError(f"{place}: {reason}", hint="chmod it so that honed can read it") from error
        if not token.isprintable() or " " in token:
            raise EnvironmentInvalidError(f"{place}: not a token", hint="one line, the token alone")
        if place.stat().st_mode & 0o004:
            log.warning("%s: everybody can read the token; chmod 0640, with honed's group", place)
        if token:
            return token
    return None


def fetch(request: Request, layout: Layout, tell: Tell) -> Path:
    """Returns the snapshot's directory. Raises HonedError for whatever keeps the model from being fetched."""
    try:
        import huggingface_hub  # noqa: F401, PLC0415
    except ImportError as error:
        raise EnvironmentInvalidError(
            f"models cannot be fetched: {error}", hint="pip install 'honed[train]', or set policy.hub = false"
        ) from error
    made = Fetch(request, layout.cache_dir, read_token(layout, os.environ), tell)
    try:
        return made.run()
    except HonedError:
        raise
    except OSError as error:
        raise made.from_os(error) from error
    except Exception as error:
        log.exception("the fetch failed in a way that nobody foresaw")
        raise InternalError(
            f"the fetch failed in a way that nobody foresaw: {type(error).__name__}: {error}"
        ) from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="honed.fetch", description="Fetch a model from the hub into honed's cache.")
    parser.add_argument("--root", type=Path, default=Path(os.environ.get("HONED_ROOT", "/")))
    parser.add_argument("--request", type=int, metavar="N", help="fetch what var/lib/honed/fetch/N.json says")
    parser.add_argument("repo_id", nargs="?", metavar="REPO_ID")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--allow-pickle", action="store_true", help="take pickled weights where there are no others")
    parser.add_argument("--allow-code", action="store_true", help="take code that comes with the model")
    options = parser.parse_args()
    if (options.request is None) == (options.repo_id is None):
        parser.error("either REPO_ID or --request N")
    logs.set_up(verbose=False)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of each request
    os.environ |= ENVIRONMENT
    layout = Layout(options.root.absolute())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.request is not None:
        return _for_the_daemon(layout, options.request)
    try:
        timeout_sec = config.load(layout).hub.fetch_timeout_sec
        deadline = boot_time() + timeout_sec
        request = Request(options.repo_id, options.revision, options.allow_pickle, options.allow_code, deadline)
        print(json.dumps({"ok": True, "path": str(fetch(request.checked(), layout, _print))}), flush=True)
    except HonedError as error:
        return _end(error)
    except KeyboardInterrupt:
        return _end(InterruptedRunError("interrupted", hint="what was fetched is kept, and the next fetch goes on"))
    return 0


def _print(progress: dict[str, Any]) -> None:
    print(json.dumps(progress), flush=True)


def _end(error: HonedError) -> int:
    print(json.dumps({"ok": False, "error": error.as_dict()}), flush=True)
    return error.exit_status


def _for_the_daemon(layout: Layout, number: int) -> int:
    """A fetch that was interrupted leaves no result: it is to be gone on with."""
    files = layout.fetch(number)
    try:
        with _alone(files.lock_path):
            request = Request.read(files.request_path)
            result: dict[str, Any] = {}
            try:
                log.debug("fetches %s at %s", request.repo_id, request.revision)
                path = fetch(request, layout, lambda progress: _write_progress(files.progress_path, progress))
                result = {"ok": True, "path": str(path)}
            except HonedError as error:
                result = {"ok": False, "error": error.as_dict()}
            durable.write_json(files.result_path, result)
            return 0 if result["ok"] else from_dict(result["error"]).exit_status
    except HonedError as error:
        log.error("fetch %d: %s", number, error.message)  # noqa: TRY400 - the sentence is the fact
        return error.exit_status
    except KeyboardInterrupt:
        log.info("fetch %d: interrupted; what was fetched is kept", number)
        return InterruptedRunError.exit_status


@contextlib.contextmanager
def _alone(lock_path: Path) -> Iterator[None]:
    """Hold a fetch's lock. Raises InterruptedRunError where it runs already."""
    with lock_path.open("a+b") as lock:
        for _ in range(20):  # the daemon may be looking whether it is free
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        else:
            raise InterruptedRunError("it runs already")
        lock.truncate(0)
        _write(lock.fileno(), str(os.getpid()).encode())
        yield


def _write_progress(path: Path, progress: dict[str, Any]) -> None:
    """Whole, but not synced: it is of no use after a crash."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(progress))
    temporary.rename(path)


if __name__ == "__main__":
    sys.exit(main())
