"""A small hub on loopback that speaks what huggingface_hub asks for, and misbehaves on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from listener import keep_port

#: Bytes sent at a time.
CHUNK_BYTES = 1024


@dataclass
class Repository:
    """One model or data set, and how it is served; for data sets the key is `datasets/org/name`."""

    files: dict[str, bytes]
    commits: dict[str, str] = field(default_factory=lambda: {"main": "1" * 40})  #: revision → commit
    gated: bool = False
    license: str | None = None
    token: str | None = None  #: needed to download it
    sizes: dict[str, int] = field(default_factory=dict)  #: what the listing claims instead
    drops: dict[str, list[int]] = field(default_factory=dict)  #: file → bytes after which a connection is cut, in turn
    delay_sec: float = 0.0  #: after each chunk of a file
    held_at: int | None = None  #: bytes of a large file after which the rest waits until this is None
    has_ranges: bool = True
    is_mirror: bool = False  #: the listing has no hashes
    has_cdn: bool = False  #: large files come from another host, at secret addresses without a token


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".parquet"))


def blob(name: str, data: bytes) -> str:
    """Return the hub's name for a file: the SHA-256 of a large one, git's SHA-1 of a small one."""
    if is_large(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def read(directory: Path) -> dict[str, bytes]:
    """Return the files of a directory, as a repository has them."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class Hub:
    """The server; it keeps its port when it is stopped and started again."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []  #: path, Range, Authorization
        self.statuses: list[int] = []  #: answered before anything else, in turn
        self.port = 0
        self._kept: socket.socket | None = None
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        hub = self

        class Asked(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._kept = self._kept or keep_port(self.port)
        self.port = self._kept.getsockname()[1]
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Asked)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def num_gets(self, name: str) -> int:
        return sum(path.endswith(f"/{name}") for path, _, _ in self.requests)

    def answer(self, asked: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(asked.path).path).strip("/")
        headers = asked.headers
        self.requests.append((path, headers.get("Range", ""), headers.get("Authorization", "")))
        with contextlib.suppress(ConnectionError):
            if self.statuses:
                _refuse(asked, self.statuses.pop(0), "")
            elif path.startswith(("api/models/", "api/datasets/")):
                repo_id, _, revision = path.removeprefix("api/").removeprefix("models/").partition("/revision/")
                self._list(asked, repo_id, revision or "main")
            else:
                repo_id, _, rest = path.removeprefix("cdn/").partition("/resolve/")
                revision, _, name = rest.partition("/")
                self._give(asked, repo_id, revision, name, is_cdn=path.startswith("cdn/"))

    def _known(
        self, asked: BaseHTTPRequestHandler, repo_id: str, revision: str, *, is_open: bool = False
    ) -> tuple[Repository, str] | None:
        repository = self.repositories.get(repo_id)
        is_let_in = repository is not None and (
            repository.token is None or asked.headers.get("Authorization") == f"Bearer {repository.token}"
        )
        if repository is None or not (is_let_in or repository.gated):
            _refuse(asked, 401, "RepoNotFound")  # as the hub does: private ones and missing ones look the same
            return None
        if not is_let_in and not is_open:  # the file list of a gated repository is public
            _refuse(asked, 401 if not asked.headers.get("Authorization") else 403, "GatedRepo")
            return None
        commit = repository.commits.get(revision, revision if revision in repository.commits.values() else None)
        if commit is None:
            _refuse(asked, 404, "RevisionNotFound")
            return None
        return repository, commit

    def _list(self, asked: BaseHTTPRequestHandler, repo_id: str, revision: str) -> None:
        if (known := self._known(asked, repo_id, revision, is_open=True)) is None:
            return
        repository, commit = known
        siblings: list[dict[str, Any]] = []
        for name, data in repository.files.items():
            size = repository.sizes.get(name, len(data))
            entry: dict[str, Any] = {"rfilename": name}
            if not repository.is_mirror:
                entry |= {"size": size, "blobId": "0" * 40 if is_large(name) else blob(name, data)}
                if is_large(name):
                    entry["lfs"] = {"size": size, "sha256": blob(name, data), "pointerSize": 134}
            siblings.append(entry)
        name = repo_id.removeprefix("datasets/")
        body = {
            "_id": "0",
            "id": name,
            "sha": commit,
            "siblings": siblings,
            "private": False,
            "gated": "auto" if repository.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [f"license:{repository.license}"] if repository.license else [],
        }
        data = json.dumps(body).encode()
        asked.send_response(200)
        asked.send_header("Content-Type", "application/json")
        asked.send_header("Content-Length", str(len(data)))
        asked.end_headers()
        asked.wfile.write(data)

    def _give(
        self, asked: BaseHTTPRequestHandler, repo_id: str, revision: str, name: str, *, is_cdn: bool = False
    ) -> None:
        if (known := self._known(asked, repo_id, revision, is_open=is_cdn)) is None:
            return
        repository, commit = known
        if name not in repository.files:
            _refuse(asked, 404, "EntryNotFound")
            return
        if repository.has_cdn and is_large(name) and not is_cdn:
            asked.send_response(302)
            asked.send_header("Location", f"http://localhost:{self.port}/cdn{asked.path}")
            asked.send_header("Content-Length", "0")
            asked.end_headers()
            return
        data, begin = repository.files[name], 0
        if (wanted := asked.headers.get("Range")) and repository.has_ranges:
            begin = int(wanted.removeprefix("bytes=").split("-")[0])
        asked.send_response(206 if begin else 200)
        asked.send_header("ETag", f'"{blob(name, data)}"')
        asked.send_header("X-Repo-Commit", commit)
        asked.send_header("Content-Length", str(len(data) - begin))
        if begin:
            asked.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        asked.end_headers()
        if asked.command == "HEAD":
            return
        cut = drops.pop(0) if (drops := repository.drops.get(name)) else None
        for start in range(begin, len(data), CHUNK_BYTES):
            if cut is not None and start - begin >= cut:
                asked.wfile.flush()
                asked.close_connection = True
                asked.connection.close()
                return
            while repository.held_at is not None and is_large(name) and start - begin >= repository.held_at:
                time.sleep(0.02)
            asked.wfile.write(data[start : start + CHUNK_BYTES])
            asked.wfile.flush()
            time.sleep(repository.delay_sec)


def _refuse(asked: BaseHTTPRequestHandler, status: int, code: str) -> None:
    asked.send_response(status)
    if code:
        asked.send_header("X-Error-Code", code)
    asked.send_header("Content-Length", "0")
    asked.end_headers()


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()
