"""The places of honed-web's connections, and the turns of their requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from honed.job.job import Job, State
from honed.page.app import MAX_READERS, Rules, Web
from honed.page.job_page import Pages
from honed.page.place import PATIENT_ONES, SHARES, TURN_SEC, Kind, Places, Turns
from honed.page.source import Source
from honed.spec.config import PolicyConfig
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import Layout
from unit.page.test_server import Clock


class Holder:
    """A connection that only notes that it gave way."""

    def __init__(self, uid: int | None = None, *, is_waiting: bool = True, is_streaming: bool = False) -> None:
        self.uid = uid
        self.kind: Kind | None = None
        self.is_waiting = is_waiting
        self.is_streaming = is_streaming
        self.is_of_owner = False
        self.origin = ""
        self.has_given_way = False

    def give_way(self, kind: Kind) -> None:
        assert kind is not Kind.LEAVING
        self.has_given_way = True


def fill(places: Places, kind: Kind, *, uids: tuple[int | None, ...] = (None,), **state: bool) -> list[Holder]:
    """Let connections of these users enter in turn, until every place of the kind is taken."""
    holders = [Holder(uids[number % len(uids)], **state) for number in range(SHARES[kind].num_places)]
    assert all(places.enter(kind, each) for each in holders)
    return holders


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_that_is_full_leaves_all_other_kinds_their_places(kind: Kind) -> None:
    places = Places()
    uids = (1, 2) if SHARES[kind].num_per_user < SHARES[kind].num_places else (None,)
    held = fill(places, kind, uids=uids, is_waiting=False)
    assert not places.enter(kind, Holder(3))
    for other in set(Kind) - {kind}:
        assert places.enter(other, Holder(3)), other
    assert not any(each.has_given_way for each in held)
    places.leave(held[0])
    assert places.enter(kind, Holder(3))


def test_the_connection_that_has_waited_longest_gives_way_and_no_busy_one() -> None:
    places = Places()
    held = fill(places, Kind.UNKNOWN)
    held[0].is_waiting = False  # it is being answered
    places.rest(held[1])  # it has just been
    for number in range(2, 5):
        assert places.enter(Kind.UNKNOWN, Holder())
        assert [index for index, each in enumerate(held) if each.has_given_way] == [*range(2, number + 1)]
        assert held[number].kind is None


def test_a_user_at_the_limit_displaces_only_their_own_connections() -> None:
    places = Places()
    other = Holder(2)
    assert places.enter(Kind.USER, other)
    theirs = [Holder(1, is_waiting=number == 7) for number in range(SHARES[Kind.USER].num_per_user)]
    assert all(places.enter(Kind.USER, each) for each in theirs)
    assert places.enter(Kind.USER, Holder(1, is_waiting=False))
    assert [each for each in theirs if each.has_given_way] == [theirs[7]]
    assert not places.enter(Kind.USER, Holder(1))
    assert not other.has_given_way
    assert places.enter(Kind.USER, Holder(3))


def test_where_all_users_have_taken_every_place_the_one_with_the_most_gives_one_up() -> None:
    places = Places()
    first = Holder(1)
    assert places.enter(Kind.USER, first)
    many = [Holder(2) for _ in range(SHARES[Kind.USER].num_per_user)]
    others = [Holder(uid) for uid in range(3, 3 + SHARES[Kind.USER].num_places - len(many) - 1)]
    assert all(places.enter(Kind.USER, each) for each in (*many, *others))
    assert places.enter(Kind.USER, Holder(99))
    assert [each for each in (first, *many, *others) if each.has_given_way] == [many[0]]


def test_streams_leave_places_for_requests_of_every_user() -> None:
    places = Places()
    share = SHARES[Kind.USER]
    theirs = [Holder(1, is_waiting=False, is_streaming=True) for _ in range(share.num_streams_per_user)]
    new = Holder(1)
    assert all(places.enter(Kind.USER, each) and places.streams(each) is None for each in theirs[:-1])
    assert places.enter(Kind.USER, theirs[-1])
    assert places.enter(Kind.USER, new)
    assert places.streams(new) == share.num_streams_per_user < share.num_per_user
    other = Holder(2)
    assert places.enter(Kind.USER, other)
    assert places.streams(other) is None
    theirs[0].is_streaming = False
    assert places.streams(new) is None


def test_a_connection_lost_before_its_request_is_looked_at_takes_no_place(tmp_path: Path) -> None:
    served, lost = web(tmp_path), Holder()
    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "GET", "path": "/live.js", "headers": headers, "query_string": b""}
    statuses = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    asyncio.run(served.app({**scope, "state": {"peer": None, "holder": lost}}, receive, send))
    assert statuses == [200, None]
    assert lost.kind is None
    fill(served.places, Kind.UNKNOWN, is_waiting=False)


# -- turns ------------------------------------------------------------------------------------------------------------


def test_a_request_behind_many_waits_only_for_a_moment_and_those_before_it_are_served() -> None:
    async def run() -> None:
        turns = Turns(1, turn_sec=0.01)
        served: list[int] = []
        is_done = asyncio.Event()

        async def work(number: int) -> None:
            async with turns.one(is_patient=number > PATIENT_ONES):
                await is_done.wait()
                served.append(number)

        tasks = [asyncio.create_task(work(number)) for number in range(PATIENT_ONES + 2)]
        await asyncio.sleep(0)
        with pytest.raises(EnvironmentInvalidError, match="too many requests are waiting"):
            async with turns.one():
                pass
        is_done.set()
        await asyncio.gather(*tasks)
        assert served == [*range(PATIENT_ONES + 2)]
        async with turns.one():
            pass

    asyncio.run(run())


def web(tmp_path: Path) -> Web:
    return Web(Source(Layout(tmp_path)), Rules(PolicyConfig(), None, frozenset({"localhost"}), needs_token=False))


def test_slow_reads_of_one_kind_delay_no_other_kind(tmp_path: Path) -> None:
    async def run() -> None:
        served = web(tmp_path)
        is_done = threading.Event()
        slow = [asyncio.create_task(served.read(Kind.UNKNOWN, is_done.wait)) for _ in range(100)]
        await asyncio.sleep(0)
        try:
            for kind in set(Kind) - {Kind.UNKNOWN}:
                assert await served.read(kind, lambda: "read") == "read"
        finally:
            is_done.set()
            await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("kind", [Kind.UNKNOWN, Kind.TOKEN, Kind.USER, Kind.ADMINISTRATOR, Kind.ROOT])
def test_only_unknown_clients_are_refused_instead_of_waiting_for_long(tmp_path: Path, kind: Kind) -> None:
    clock = Clock()

    async def run() -> None:
        served = web(tmp_path)
        is_done = threading.Event()
        reads = [asyncio.create_task(served.read(kind, is_done.wait)) for _ in range(MAX_READERS + PATIENT_ONES + 9)]
        await clock.pass_sec(0)
        await clock.pass_sec(TURN_SEC + 0.01)
        num_refused = sum(each.done() for each in reads)
        is_done.set()
        await asyncio.gather(*reads, return_exceptions=True)
        assert num_refused == (9 if kind is Kind.UNKNOWN else 0)

    clock.run_until_complete(run())


def test_a_page_waits_for_one_page_of_each_other_kind_at_most(tmp_path: Path) -> None:
    made: list[int] = []

    class Slow(Pages):
        async def _make(self, jobs: Sequence[Job], num_all: int) -> bytes:  # noqa: ARG002
            made.extend(job.id for job in jobs)
            await asyncio.sleep(0)
            return b""

    async def run() -> None:
        pages = Slow(Layout(tmp_path))
        crowd = [asyncio.create_task(pages.page([job(number)], Kind.UNKNOWN)) for number in range(1, PATIENT_ONES)]
        await asyncio.sleep(0)
        await asyncio.gather(*crowd, pages.page([job(99)], Kind.ROOT))

    asyncio.run(run())
    assert made.index(99) <= 2
    assert len(made) == PATIENT_ONES


def job(number: int) -> Job:
    return Job(number, "", 0, "", 0, "", state=State.SUCCEEDED)


# -- what users read of it --------------------------------------------------------------------------------------------


def test_the_page_on_honed_web_tells_the_limits() -> None:
    text = (Path(__file__).parents[3] / "docs/web.md").read_text()
    table = text.partition("| client | connections |")[2].partition("\n\n")[0]
    rows = [[int(cell) for cell in row.split("|") if cell.strip().isdecimal()] for row in table.splitlines()[2:]]
    kinds = (Kind.ROOT, Kind.ADMINISTRATOR, Kind.USER, Kind.TOKEN, Kind.UNKNOWN, Kind.ARRIVING)
    for kind, row in zip(kinds, rows, strict=True):
        share = SHARES[kind]
        over_unix = [share.num_places, share.num_per_user, share.num_streams, share.num_streams_per_user]
        assert row == {4: over_unix, 2: [share.num_places, share.num_streams], 1: [share.num_places]}[len(row)], kind
