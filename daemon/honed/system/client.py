"""honectl's side of the control socket; control.py has the protocol and the daemon's side.

A shell imports it at each TAB, so it imports little.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from honed.system.error import EnvironmentInvalidError, HonedError, NotPermittedError, UsageError
from honed.system.part import join

#: Seconds that honectl waits for a reply.
TIMEOUT_SEC = 30.0


class Client:
    """honectl's side. Raises EnvironmentInvalidError if no daemon answers, and the daemon's own errors."""

    def __init__(self, path: Path, *, timeout_sec: float = TIMEOUT_SEC) -> None:
        self._path = path
        self._timeout_sec = timeout_sec

    @property
    def is_up(self) -> bool:
        with contextlib.suppress(OSError), self.connect():
            return True
        return False

    def connect(self) -> socket.socket:
        """Connect. Raises OSError."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A socket with a timeout of Python's does not wait for room in a full backlog; one with the kernel's does.
            timeout_us = max(1, int(self._timeout_sec * 1e6))  # 0 would be for ever
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", *divmod(timeout_us, 1_000_000)))
            with address_of(self._path) as address:
                peer.connect(address)
            peer.settimeout(self._timeout_sec)
        except OSError:
            peer.close()
            raise
        return peer

    def ask(self, verb: str, **arguments: Any) -> Any:
        """Return the daemon's answer; of a long one, all pages joined."""
        whole: dict[str, Any] = {}
        try:
            with self.connect() as peer, peer.makefile("rwb") as stream:
                stream.write(json.dumps({"verb": verb, "paged": 1, "parts": 1, **arguments}).encode() + b"\n")
                stream.flush()
                while True:
                    answer = self._parse(stream.readline(), verb)
                    if not answer.get("ok"):
                        raise _remote(answer.get("error") or {})
                    if "result" in answer:
                        return answer["result"]
                    is_list = "page" in answer
                    join(whole, {"page": answer["page"]} if is_list else answer["part"])
                    if answer["is_last"]:
                        return whole["page"] if is_list else whole
        except (TimeoutError, BlockingIOError) as error:  # the second if the daemon's backlog is full
            raise EnvironmentInvalidError(
                f"honed is running, but did not respond at {self._path} within {self._timeout_sec:g} s",
                hint="it is busy or hung: see journalctl -u honed; the request may still be executed",
            ) from error
        except OSError as error:
            raise EnvironmentInvalidError(
                f"honed does not respond at {self._path}: {error.strerror or error}",
                hint="start it: systemctl start honed, or honed --root DIR",
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EnvironmentInvalidError(
                f"honed's response at {self._path} is invalid, or of another version than honectl",
                hint="see honed's journal, and honed --version",
            ) from error

    def _parse(self, line: bytes, verb: str) -> dict[str, Any]:
        if not line:
            raise EnvironmentInvalidError("honed closed the connection", hint="see honed's journal")
        if not line.endswith(b"\n"):
            raise EnvironmentInvalidError(
                f"honed's response to {verb!r} ended after {len(line)} bytes",
                hint="try again; if it happens again, see honed's journal",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def _remote(data: Mapping[str, Any]) -> HonedError:
    kind = {item.code: item for item in (UsageError, NotPermittedError)}.get(data.get("code", ""), HonedError)
    error = kind(
        data.get("message", ""), hint=data.get("hint", ""), fix=data.get("fix"), evidence=data.get("evidence", "")
    )
    error.code = data.get("code", "error")  # type: ignore[misc]
    return error


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """Provide an address for a socket whose path may be longer than the kernel's limit of 107 bytes."""
    if len(os.fsencode(path)) <= 107:  # sun_path
        yield str(path)
        return
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
