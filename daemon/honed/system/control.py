"""The control socket, which honectl uses. Requests and replies are JSON objects, one per line; none can block the loop.

    {"verb": "hold", "id": "7"}   →   {"ok": true, "result": …}   or   {"ok": false, "error": {code, message, hint, …}}
    {"verb": "submit", "name": "a.yaml", "data": "<base64>", "hold": false}   →   {"id": 8, "name": "a.yaml"}

    {"verb": "list", "paged": 1}       →   {"ok": true, "page": […], "is_last": false}, …, and one with "is_last": true

    {"verb": "show", "paged": 1, "parts": 1, …}   →   {"ok": true, "part": {…}, "is_last": false}, …, likewise: part.py

A request is limited to 64 KiB plus the largest job file in base64; a longer one is read to its end and rejected. A list
or an object of any length comes in pages, each built in a few milliseconds while the client reads, between the loop's
other tasks; it is one line for a client that does not ask for pages. In a turn of the loop, all connections of one
holder have a limited time.

A fault of the machine, such as a full disk, is answered with the code `degraded`, and logged once per verb.

The client's user is known from the socket (SO_PEERCRED), never from the text. place.py has the limits on connections.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed.system import durable, message, place, quote
from honed.system.door import Door
from honed.system.error import DegradedError, HonedError, InternalError, UsageError, said
from honed.system.holder import UNKNOWN, Holders
from honed.system.log import about
from honed.system.part import Part
from honed.system.ration import Rations

log = logging.getLogger(__name__)

#: Bytes of a request besides its job file; also the bytes read at a time.
MAX_REQUEST_BYTES = 64 * 1024
#: Connections that are accepted at a time.
MAX_ACCEPTED = 64
#: Descriptors that connections leave to the rest of honed.
NUM_RESERVED = 128
#: Seconds without a lack of descriptors, after which the next one is logged again.
SHED_SEC = 60.0
#: Bytes of a part of a request that are a sign of life: a client that sends one at a time is silent.
MIN_RECEIVED = 4096
#: From Linux' asm-generic/socket.h; Python 3.11 does not define it.
SO_PEERGROUPS = 59
MAX_GROUPS = 256  # socket.getsockopt returns 1024 bytes at most
DEGRADED_HINT = "fix the disk or file system (honectl doctor names the fault), then try again"


@dataclass(frozen=True)
class Request:
    """One request, and the user who sent it."""

    verb: str
    arguments: dict[str, Any]
    uid: int
    gids: frozenset[int] = frozenset()  #: all groups of the client's process

    @property
    def reference(self) -> str:
        """The name or number of the item that the request is about."""
        return str(self.arguments.get("id", ""))


@dataclass(frozen=True)
class Rows:
    """A reply that is a list of any length. None among the rows is none: what makes them has looked for long enough."""

    rows: Iterator[object]


@dataclass(frozen=True)
class Parts:
    """A reply that is an object of any length. Parts of one key follow one another."""

    parts: Iterator[Part]


#: The protocol of pages, and that of parts, as a client asks for it: an older one knows pages alone.
PAGED = PARTS = 1
#: Bytes of a page, and seconds in which it is built; and seconds of one holder's answers in a turn of the loop.
PAGE_BYTES, PAGE_SEC, HOLDER_SEC = 64 * 1024, 0.02, 0.1


class _List:
    """A list as JSON, row by row."""

    def __init__(self) -> None:
        self._comma = b""

    begin, end = b"[", b"]"

    def add(self, row: object) -> bytes:
        text, self._comma = self._comma + json.dumps(row).encode(), b", "
        return text


class _Object:
    """An object as JSON, part by part."""

    def __init__(self) -> None:
        self._key = ""
        self._last = self._comma = b""  # the last byte of the value so far, and what comes before more of it

    begin = b"{"

    @property
    def end(self) -> bytes:
        return self._last + b"}"

    def add(self, part: Mapping[str, object]) -> bytes:
        text = b""
        for key, value in part.items():
            added = json.dumps(value).encode()
            is_empty = added in (b"[]", b"{}")
            if key != self._key or not self._last:
                text += self._last + (b", " if self._last else b"") + json.dumps(key).encode() + b": " + added[:-1]
                self._key, self._last, self._comma = key, added[-1:], b"" if is_empty else b", "
            elif not is_empty:
                text, self._comma = text + self._comma + added[1:-1], b", "
        return text


def _pages(answer: Rows | Parts, *, is_paged: bool) -> Iterator[bytes]:
    """Yield the reply's pages, each a line; or the pieces of one line, some of them empty."""
    kind, items = (_List, answer.rows) if isinstance(answer, Rows) else (_Object, answer.parts)
    key = "result" if not is_paged else "page" if isinstance(answer, Rows) else "part"
    made: Any = kind()
    begin = f'{{"ok": true, "{key}": '.encode()
    page, began = begin + made.begin, time.monotonic()
    for item in items:
        if item is not None:
            page += made.add(item)
        if len(page) >= PAGE_BYTES or time.monotonic() - began >= PAGE_SEC:
            if is_paged:
                page, made = page + made.end + b', "is_last": false}\n', kind()
            yield page
            page, began = begin + made.begin if is_paged else b"", time.monotonic()
    yield page + made.end + (b', "is_last": true}\n' if is_paged else b"}\n")


@dataclass
class _Connection:
    socket: socket.socket
    uid: int
    gids: frozenset[int]
    holder: int = UNKNOWN
    since: float = field(default_factory=time.monotonic)  #: of its last request, or of what it last took of an answer
    received: bytearray = field(default_factory=bytearray)
    is_cut: bool = False  #: the line being received is too long, and its beginning was discarded
    to_send: bytes = field(default=b"")
    more: Iterator[bytes] | None = None  #: the rest of a long reply
    is_paged: bool = False  #: the last answer to it has pages

    @property
    def is_silent(self) -> bool:
        return not self.to_send and self.more is None and b"\n" not in self.received


class Server:
    """Accepts connections, reads whole lines, and passes each to `answer`. `selector` is the loop's, which begins a
    turn; `serve` answers between the steps of the turn, too."""

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        answer: Callable[[Request], Any],
        *,
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        self.max_request_bytes = max_request_bytes
        self._loop = selector
        self._selector = selectors.EpollSelector()  # of the connections: it can be watched itself
        self._answer = answer
        self._connections: dict[int, _Connection] = {}
        self._holders = Holders()
        self._rations = Rations(HOLDER_SEC)
        self._faults: dict[str, str] = {}  # of the machine, by the verb that met it last
        self._door_fault = ""
        self._shed_until = 0.0
        self._door = Door(path)
        self._selector.register(self._door.socket, selectors.EVENT_READ, self._accept)
        selector.register(self._selector, selectors.EVENT_READ, self._begin)

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)
        self._loop.unregister(self._selector)
        self._selector.close()
        self._door.close()

    def _begin(self, _events: int) -> None:
        self._rations.begin()
        self.serve()

    def serve(self) -> None:
        """Accept, read and answer what can be at once, one request of every connection."""
        for key, events in self._selector.select(0):
            key.data(events)

    def tend(self) -> None:
        """Listen again where the socket's file was removed."""
        fault = ""
        try:
            if not self._door.is_there:
                self._accept(selectors.EVENT_READ)
                with self._door.renew() as before:
                    self._selector.unregister(before)
                self._selector.register(self._door.socket, selectors.EVENT_READ, self._accept)
                log.warning("the control socket was removed; honed listens again at %s", self._door.path)
        except OSError as error:
            fault = f"{error.filename or self._door.path}: {error.strerror}"
            if fault != self._door_fault:
                log.error("the control socket was removed: %s; restart honed to have it again", fault)  # noqa: TRY400
        self._door_fault = fault

    def _accept(self, _events: int) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                if (peer := self._door.accept()) is None:
                    return
            except OSError as error:
                self._shed(error)
                return
            try:
                self._admit(peer)
            except OSError:  # it has gone
                peer.close()

    def _shed(self, error: OSError) -> None:
        """Get a descriptor for the next client by ending the longest silence; without one, turn the client away."""
        if (now := time.monotonic()) >= self._shed_until:
            log.error("control: connections end early: %s", error.strerror, extra=about(message=message.DEGRADED))
        self._shed_until = now + SHED_SEC
        if (silent := place.longest_silent(self._connections.values())) is not None:
            self._close(silent)
        else:
            self._door.turn_away()

    def _admit(self, peer: socket.socket) -> None:
        """Give a client a place, or answer that there is none. Raises OSError if it has gone."""
        peer.setblocking(False)
        uid, gids = credentials(peer)
        new = _Connection(peer, uid, gids, self._holders.of(uid))
        held = self._connections.values()
        try:
            old = place.gives_way(held, new.holder, new.since)
            if old is None and peer.fileno() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - NUM_RESERVED:
                old = place.longest_silent(held)
        except HonedError as error:
            with contextlib.closing(peer):
                peer.send(_line({"ok": False, "error": error.as_dict()}))
            return
        if old is not None:
            self._close(old)
        self._connections[peer.fileno()] = new
        self._selector.register(peer, selectors.EVENT_READ, lambda events: self._serve(new, events))

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._receive(connection)
            if self._rations.is_left(connection.holder):
                with self._rations.spend(connection.holder):
                    self._answer_next(connection)
                    self._go_on(connection)
            if connection.to_send:
                sent = connection.socket.send(connection.to_send)
                connection.to_send = connection.to_send[sent:]
                connection.since = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        if connection.socket.fileno() >= 0:
            # Read from a client only once it has received its last reply; with another request queued, wait to write:
            # mostly possible at once.
            has_more = connection.to_send or connection.more is not None or b"\n" in connection.received
            wanted = selectors.EVENT_WRITE if has_more else selectors.EVENT_READ
            self._selector.modify(connection.socket, wanted, lambda events: self._serve(connection, events))

    def _receive(self, connection: _Connection) -> None:
        data = connection.socket.recv(MAX_REQUEST_BYTES)
        connection.received += data
        if len(data) >= MIN_RECEIVED or b"\n" in data:
            connection.since = time.monotonic()
        if not data:
            self._close(connection)
        elif len(connection.received) > self.max_request_bytes and b"\n" not in data:
            connection.received.clear()
            connection.is_cut = True

    def _answer_next(self, connection: _Connection) -> None:
        """Answer one request at a time: a thousand requests sent at once block it no longer than one."""
        is_idle = not connection.to_send and connection.more is None
        if b"\n" in connection.received and is_idle and connection.socket.fileno() >= 0:
            line, connection.received = connection.received.split(b"\n", 1)
            is_long, connection.is_cut = connection.is_cut or len(line) > self.max_request_bytes, False
            answer = self._refuse_long() if is_long else self._respond(line, connection)
            if isinstance(answer, Rows | Parts):
                connection.more = _pages(answer, is_paged=connection.is_paged)
            else:
                connection.to_send = answer

    def _go_on(self, connection: _Connection) -> None:
        """Prepare the next piece of a long reply once the previous one is sent."""
        if connection.to_send or connection.more is None:
            return
        try:
            connection.to_send = next(connection.more)
        except StopIteration:
            connection.more = None
        except Exception as error:
            log.exception("control: a response was interrupted")
            if not connection.is_paged:
                self._close(connection)  # the client sees an incomplete line
                return
            connection.more, connection.to_send = None, _failed(error)

    def _refuse_long(self) -> bytes:
        error = UsageError(
            f"a request may have at most {self.max_request_bytes} bytes",
            hint="a job file refers to data; it does not contain data: spool.max_spec_bytes",
        )
        return _line({"ok": False, "error": error.as_dict()})

    def _respond(self, line: bytearray, asking: _Connection) -> bytes | Rows | Parts:
        try:
            result = self._result(line, asking)
            return result if isinstance(result, Rows | Parts) else _line({"ok": True, "result": result})
        except HonedError as error:
            return _line({"ok": False, "error": error.as_dict()})
        except Exception as error:
            log.exception("control: request failed")
            return _failed(error)

    def _result(self, line: bytearray, asking: _Connection) -> Any:
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or not isinstance(request.get("verb"), str):
                raise UsageError("a request must be an object with a verb")
            if (paged := request.pop("paged", None)) not in (None, PAGED):
                raise UsageError(
                    f"honed does not know the protocol {paged!r}: honectl is of another version",
                    hint="restart honed, or use the honectl that was installed with it",
                )
            takes_parts = request.pop("parts", None) == PARTS
            answer = self._ask(Request(request.pop("verb"), request, asking.uid, asking.gids))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"not a valid request: {error}") from error
        asking.is_paged = paged is not None and (takes_parts or not isinstance(answer, Parts))
        return answer

    def _ask(self, request: Request) -> Any:
        """Answer a request. Raises DegradedError for a fault of the machine, which is logged once, until the verb
        succeeds or meets another one."""
        try:
            answer = self._answer(request)
        except Exception as error:
            if (fault := durable.machine_fault(error)) is None:
                raise
            if self._faults.get(request.verb) != fault:
                self._faults[request.verb] = fault
                log.error("control: %s failed: %s", request.verb, fault, extra=about(message=message.DEGRADED))  # noqa: TRY400
            raise DegradedError(fault, hint=DEGRADED_HINT) from error
        self._faults.pop(request.verb, None)
        return answer

    def _close(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        if fd >= 0:
            self._selector.unregister(connection.socket)
            self._connections.pop(fd, None)
            connection.socket.close()


def _line(answer: Mapping[str, object]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _failed(error: Exception) -> bytes:
    if (fault := durable.machine_fault(error)) is not None:
        return _line({"ok": False, "error": DegradedError(fault, hint=DEGRADED_HINT).as_dict()})
    # Hide quoted text: it may be about a job that the client's user must not read.
    words = quote.hide(f"{type(error).__name__}: {said(error)}")
    failed = InternalError(words, hint="honed's journal has the traceback")
    return _line({"ok": False, "error": failed.as_dict()})


def with_file(num_bytes: int) -> int:
    """Return the bytes of a request that contains a file of this size."""
    return MAX_REQUEST_BYTES + 4 * -(-num_bytes // 3)


def credentials(peer: socket.socket) -> tuple[int, frozenset[int]]:
    """Return the user and the groups of the connected process, as of when it connected."""
    _, uid, gid = struct.unpack("3I", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3I")))
    try:
        groups = peer.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_GROUPS * 4)
    except OSError:  # more groups than that, or a kernel before 4.13: the primary group has to do
        groups = b""
    return uid, frozenset({gid, *(number for (number,) in struct.iter_unpack("I", groups))})
