"""The part of a wandb server that `wandb sync` 0.31 uses; it keeps what it receives, and misbehaves on demand."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Request(BaseHTTPRequestHandler):
    """GraphQL for runs and files, the stream of a run's metrics, and uploads."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: WandbServer = self.server.owner  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with server.lock:
            server.keys.add(self.headers.get("Authorization") or "")
            server.num_requests += 1
        if server.status != 200:
            self._answer(server.status, {"errors": [{"message": "no such key"}]})
        elif self.path == "/graphql":
            self._answer(200, {"data": self._data(server, json.loads(body))})
        elif self.path.endswith("/file_stream"):
            with server.lock:
                for name, lines in (json.loads(body).get("files") or {}).items():
                    server.streams.setdefault(name, []).extend(map(json.loads, lines["content"]))
            self._answer(200, {})
        else:
            self._answer(200, {})

    do_PUT = do_GET = do_POST  # noqa: N815 - http.server's names

    def _data(self, server: WandbServer, query: dict[str, Any]) -> dict[str, Any]:
        asked = query["variables"]
        match query.get("operationName"):
            case "UpsertBucket":
                with server.lock:
                    server.runs.setdefault(asked["name"], asked["displayName"])
                project = {"id": "p", "name": asked["project"], "entity": {"id": "e", "name": "lab"}}
                bucket = {
                    "id": "r",
                    "name": asked["name"],
                    "displayName": asked["displayName"],
                    "project": project,
                    "description": "",
                    "config": None,
                    "sweepName": None,
                    "historyLineCount": 0,
                }
                return {"upsertBucket": {"bucket": bucket, "inserted": True}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{server.url}/upload/{name}"} for name in asked["files"]]
                return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
            case _:
                return {}

    def _answer(self, status: int, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing on stderr."""


class WandbServer:
    """The server. `status` answers every request while it is not 200."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.status = 200
        self.num_requests = 0
        self.keys: set[str] = set()
        self.runs: dict[str, str] = {}  #: id -> name
        self.streams: dict[str, list[dict[str, Any]]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
        self._server.owner = self  # type: ignore[attr-defined]
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def running() -> Iterator[WandbServer]:
    server = WandbServer()
    try:
        yield server
    finally:
        server.end()
