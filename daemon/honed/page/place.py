"""The places of honed-web's connections. Each kind of client has its own, so that no flood of one takes another's.

    accept ─┬─ unix socket: the kernel names the user ──────────────► ROOT, ADMINISTRATOR or USER
            └─ TCP ──► ARRIVING ── the head of its request ─┬─ with the token ─────► TOKEN
                                                            └─ without ────────────► UNKNOWN
    no place, or it gives its place up before its first request ── 503 ──► LEAVING

If a kind has no free place, a connection that waits for a request gives way to the new one: the oldest, and first one
of the user with the most. A connection that is being answered keeps its place; if all are, the new one is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from honed.system.error import EnvironmentInvalidError

#: Unknown clients' requests that wait for a turn as long as it takes; one behind them waits only TURN_SEC. So a new
#: client has an answer or a 503 within two seconds, whatever others ask for.
PATIENT_ONES, TURN_SEC = 8, 1.0


class Kind(Enum):
    """The kinds of clients. The value is the kind in a message."""

    ROOT = "root"  #: over the unix socket, as are the next two; also the user as whom honed-web runs
    ADMINISTRATOR = "administrators"
    USER = "this user over the unix socket"
    TOKEN = "clients with the token"
    UNKNOWN = "clients without a token"
    ARRIVING = "new connections"  #: over TCP, until the head of its first request has been read
    LEAVING = "refused connections"  #: it has its 503 and a moment to read it


@dataclass(frozen=True)
class Share:
    """The places of one kind, and how many of them one user can have."""

    num_places: int
    num_per_user: int
    turn_sec: float | None = None  #: seconds for which a request behind PATIENT_ONES waits; None for any time

    @property
    def num_streams(self) -> int:
        """Event streams at a time. They are long-lived, so they get only a part of the places."""
        return self.num_places * 2 // 3

    @property
    def num_streams_per_user(self) -> int:
        return self.num_per_user * 2 // 3


#: A proxy is one user with many clients. In all, far fewer than the 1024 descriptors that a process may have.
SHARES = {
    Kind.ROOT: Share(24, 24),
    Kind.ADMINISTRATOR: Share(36, 24),
    Kind.USER: Share(72, 48),
    Kind.TOKEN: Share(48, 48),
    Kind.UNKNOWN: Share(48, 48, TURN_SEC),
    Kind.ARRIVING: Share(64, 64),
    Kind.LEAVING: Share(64, 64),
}


class Holder(Protocol):
    """A connection, as far as its place is concerned."""

    uid: int | None  #: its holder; None over TCP
    kind: Kind | None  #: the kind of its place; None without one. Only Places sets it.
    is_streaming: bool

    @property
    def is_of_owner(self) -> bool:
        """True over TCP if the client is a process of the user as whom honed-web runs, or of root."""

    @property
    def origin(self) -> str:
        """A phrase for the client over TCP."""

    @property
    def is_waiting(self) -> bool:
        """True if it waits for a request, and everything has been sent."""

    def give_way(self, kind: Kind) -> None:
        """End, since another connection has its place, of this kind, now."""


class Places:
    """The places, and the connections that have them."""

    def __init__(self) -> None:
        #: The connections of every kind, in the order in which they began to wait.
        self._held: dict[Kind, dict[Holder, None]] = {kind: {} for kind in Kind}
        self.num_refused = 0  #: responses 503 for want of a place

    def enter(self, kind: Kind, holder: Holder) -> bool:
        """Give a connection a place of this kind instead of the one that it has. Returns False if there is none; then
        it keeps its own."""
        if holder.kind is kind:
            return True
        held, share = self._held[kind], SHARES[kind]
        theirs = [item for item in held if item.uid == holder.uid]
        gives_way = None
        if len(theirs) >= share.num_per_user or len(held) >= share.num_places:
            waiting = [their for their in (theirs if len(theirs) >= share.num_per_user else held) if their.is_waiting]
            num_of = Counter(item.uid for item in held)
            gives_way = max(waiting, key=lambda item: num_of[item.uid], default=None)
            if gives_way is None:
                return False
            self.leave(gives_way)
        self.leave(holder)
        held[holder] = None
        holder.kind = kind
        if gives_way is not None:
            gives_way.give_way(kind)
        return True

    def rest(self, holder: Holder) -> None:
        """Count a connection as the newest of its kind: it has had its answer and waits for the next request."""
        if holder.kind is not None:
            self._held[holder.kind][holder] = self._held[holder.kind].pop(holder)

    def leave(self, holder: Holder) -> None:
        """Take a connection's place from it, if it has one."""
        if holder.kind is not None:
            del self._held[holder.kind][holder]
            holder.kind = None

    def streams(self, holder: Holder) -> int | None:
        """Return the number of event streams with which there is no room for another; None if it can."""
        if holder.kind is None:
            return None
        share = SHARES[holder.kind]
        uids = [item.uid for item in self._held[holder.kind] if item.is_streaming]
        if (theirs := uids.count(holder.uid)) >= share.num_streams_per_user:
            return theirs
        return len(uids) if len(uids) >= share.num_streams else None


def no_place(kind: Kind) -> EnvironmentInvalidError:
    return EnvironmentInvalidError(
        f"honed-web has no free place for {kind.value}",
        hint="close unused connections, or try again in a few seconds",
    )


class Turns:
    """Turns at some work, first come, first served."""

    def __init__(self, num_at_once: int, *, turn_sec: float | None) -> None:
        self._free = asyncio.Semaphore(num_at_once)
        self._num_waiting = 0
        self._turn_sec = turn_sec

    @contextlib.asynccontextmanager
    async def one(self, *, is_patient: bool = False) -> AsyncIterator[None]:
        """Wait for a turn and hold it. Raises EnvironmentInvalidError if too many others wait for one."""
        is_patient = is_patient or self._num_waiting < PATIENT_ONES
        self._num_waiting += 1
        try:
            async with asyncio.timeout(None if is_patient else self._turn_sec):
                await self._free.acquire()
        except TimeoutError:
            raise EnvironmentInvalidError("too many requests are waiting", hint="try again in a few seconds") from None
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._free.release()


def turns(num_at_once: int) -> dict[Kind, Turns]:
    """Return turns at some work that clients of one kind never take from another's."""
    return {kind: Turns(num_at_once, turn_sec=share.turn_sec) for kind, share in SHARES.items()}
