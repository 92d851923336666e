"""The socket identifies the user who asks."""

from __future__ import annotations

import base64
import errno
import json
import os
import selectors
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.job import query, refusals
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.system.client import Client
from honed.system.control import MAX_REQUEST_BYTES, Request, Server, with_file
from honed.system.error import HonedError, NotPermittedError, SpecError
from honed.system.layout import Layout
from waiting import wait_for


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, list[Request]]]:
    """A server that records its requests."""
    selector, asked, is_over = selectors.DefaultSelector(), [], threading.Event()

    def answer(request: Request) -> Any:
        asked.append(request)
        if request.verb == "forbidden":
            raise NotPermittedError("it is another user's", hint="ask them")
        if (number := request.arguments.get("errno")) is not None:
            raise OSError(number, os.strerror(number), "/var/spool/honed")
        if request.verb == "wait":
            wait_for(Path(request.arguments["until"]).exists, what="its file")
        return request.arguments

    server = Server(tmp_path / "control.sock", selector, answer)

    def serve() -> None:
        while not is_over.is_set():
            for key, events in selector.select(0.05):
                key.data(events)

    thread = threading.Thread(target=serve)
    thread.start()
    yield tmp_path / "control.sock", asked
    is_over.set()
    thread.join()
    server.close()


def test_user_and_groups_come_from_the_kernel_and_not_from_the_text(served: tuple[Path, list[Request]]) -> None:
    path, asked = served
    assert Client(path).ask("show", id="7", uid=12345) == {"id": "7", "uid": 12345}
    assert asked[0].uid == os.getuid()
    assert asked[0].gids == {os.getegid(), *os.getgroups()}


def test_what_is_not_permitted_keeps_its_code(served: tuple[Path, list[Request]]) -> None:
    with pytest.raises(Exception, match="another user's") as caught:
        Client(served[0]).ask("forbidden")
    assert caught.value.code == "not_permitted"  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_fault_of_the_machine_is_answered_degraded_and_logged_once_until_it_is_over(
    served: tuple[Path, list[Request]], caplog: pytest.LogCaptureFixture, number: int
) -> None:
    client = Client(served[0])

    def fail(verb: str) -> None:
        with pytest.raises(HonedError, match=f"/var/spool/honed: {os.strerror(number)}") as caught:
            client.ask(verb, errno=number)
        assert caught.value.code == "degraded"

    for verb in ("hold", "hold", "pin"):
        fail(verb)
    assert [record.getMessage().split()[1] for record in caplog.records] == ["hold", "pin"]
    client.ask("hold")
    fail("hold")
    assert len(caplog.records) == 3
    assert not any(record.exc_info for record in caplog.records)
    with pytest.raises(HonedError) as caught:
        client.ask("hold", errno=errno.ENOTDIR)  # no fault that an administrator could mend: a bug
    assert caught.value.code == "error"
    assert caplog.records[-1].exc_info


def test_one_who_asks_and_does_not_read_is_not_listened_to(served: tuple[Path, list[Request]]) -> None:
    path, asked = served
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(path))
        peer.settimeout(0.5)
        line = json.dumps({"verb": "echo", "id": "x" * 50_000}).encode() + b"\n"
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                peer.sendall(line)
        assert len(asked) < 50
        assert Client(path).ask("echo", id="7") == {"id": "7"}


def test_who_asks_much_at_once_is_answered_in_turn_with_the_others(
    served: tuple[Path, list[Request]], tmp_path: Path
) -> None:
    path, asked = served
    go = tmp_path / "go"  # the server answers nobody before all have asked
    first = json.dumps({"verb": "wait", "until": str(go)}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as flood, flood.makefile("rb") as answers:
        flood.connect(str(path))
        flood.sendall(first + b"\n" + b'{"verb": "flood"}\n' * 2000)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
            one.connect(str(path))
            one.sendall(b'{"verb": "one"}\n')
            go.touch()
            assert json.loads(one.makefile("rb").readline())["ok"]
        place = [request.verb for request in asked].index("one")
        assert place < 2000
        for _ in range(2001):
            assert json.loads(answers.readline())["ok"]


# --- What the askers see ----------------------------------------------------------------------------------------------


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(Layout(tmp_path))
    for number, name, uid in ((1, "capitals", 1000), (2, "capitals", 1001), (3, "secret", 1001)):
        job = Job(id=number, name=name, submitted_at=0.0, source=f"{name}.yaml", uid=uid, output_dir="/o")
        (made.state_dir(State.QUEUED) / f"{number}.json").write_bytes(job.to_json())
    yield made
    made.close()


ANNA = query.Asker(1000, is_administrator=False, reads_all=False)
CHIEF = query.Asker(1002, is_administrator=True, reads_all=True)


def test_a_name_means_ones_own_job(spool: Spool) -> None:
    assert query.find(spool, "capitals", ANNA).id == 1
    with pytest.raises(Exception, match="no job 'secret'"):
        query.find(spool, "secret", ANNA)
    with pytest.raises(Exception, match="2 jobs are named"):
        query.find(spool, "capitals", CHIEF)


def test_others_jobs_are_a_number_and_a_state(spool: Spool, tmp_path: Path) -> None:
    rows = {row["id"]: row for row in query.list_jobs(spool, Layout(tmp_path), asker=ANNA)}
    assert rows[1]["name"] == "capitals"
    assert (rows[3]["name"], rows[3]["source"], rows[3]["state"]) == ("", None, "queued")
    for verb in (query.show, query.predictions, query.losses):
        with pytest.raises(NotPermittedError):
            verb(spool, Layout(tmp_path), "3", ANNA)
    assert query.show(spool, Layout(tmp_path), "3", CHIEF)["name"] == "secret"


def test_a_list_is_that_of_when_it_was_asked_for_each_job_once(spool: Spool, tmp_path: Path) -> None:
    spool.recover()
    jobs = spool.catalog
    for number in range(10, 3 * query.ROWS_AT_ONCE):
        jobs.put(Job(id=number, name="a", submitted_at=0.0, source="a.yaml", uid=1000, output_dir="/o"))
    rows = query.rows(spool, Layout(tmp_path), query.Choice(), ANNA)
    found = [next(rows)]
    for number in (20, 150):
        jobs.put(replace(jobs.get(number) or pytest.fail(), state=State.SUCCEEDED))
    jobs.drop(160)
    jobs.put(Job(id=999, name="a", submitted_at=0.0, source="a.yaml", uid=1000, output_dir="/o"))
    numbers = [row["id"] for row in (*found, *rows) if row is not None]
    assert numbers == [each for each in (1, 2, 3, *range(10, 3 * query.ROWS_AT_ONCE)) if each != 160]


def test_a_name_that_no_job_has_is_looked_for_with_pauses(spool: Spool, tmp_path: Path) -> None:
    spool.recover()
    for number in range(10, 10 + 2 * query.LOOKED_AT_ONCE):
        spool.catalog.put(Job(id=number, name="a", submitted_at=0.0, source="a.yaml", uid=1000, output_dir="/o"))
    assert list(query.rows(spool, Layout(tmp_path), query.Choice(names=("none",)), ANNA)) == [None, None]
    some = list(query.rows(spool, Layout(tmp_path), query.Choice(names=("a",), limit=2), ANNA))
    assert [row["id"] for row in some if row is not None] == [10, 11]


def test_a_refusal_is_read_by_who_dropped_the_file(spool: Spool, tmp_path: Path) -> None:
    for number, word in ((1, "first"), (9, "second")):
        error = SpecError(word)
        text = refusals.text_of(
            "a.yaml", number, os.getuid(), error, when="now", fate="It is kept.", is_submission=False
        )
        refusals.make(spool.rejected, "a.yaml", number, os.getuid(), text)
    os.utime(spool.rejected_dir / "a.yaml.reason", (1, 1))
    us = query.Asker(os.getuid(), is_administrator=False, reads_all=False)
    found = query.refusal(spool, "a.yaml", us)
    assert found is not None
    assert "second" in found["reason"]
    assert query.refusal(spool, "a.yaml", ANNA) is None
    assert query.refusal(spool, "../../etc/passwd", us) is None


# --- What takes long to say -------------------------------------------------------------------------------------------


def test_a_request_that_is_too_long_is_refused_and_the_next_one_answered(served: tuple[Path, list[Request]]) -> None:
    path, asked = served
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer, peer.makefile("rb") as answers:
        peer.connect(str(path))
        for size in (MAX_REQUEST_BYTES, 40 * MAX_REQUEST_BYTES):
            peer.sendall(json.dumps({"verb": "long", "id": "x" * size}).encode() + b"\n" + b'{"verb": "short"}\n')
            refused = json.loads(answers.readline())
            assert f"a request may have at most {MAX_REQUEST_BYTES} bytes" in refused["error"]["message"]
            assert json.loads(answers.readline())["ok"]
    assert [request.verb for request in asked] == ["short", "short"]


def test_the_largest_job_file_goes_into_a_request(tmp_path: Path) -> None:
    size = 16 * 1024 * 1024
    request = {"verb": "submit", "name": "é" * 120 + ".json", "data": base64.b64encode(bytes(size)).decode()}
    assert len(json.dumps(request)) + 1 <= with_file(size) < size * 1.4


def test_one_who_asks_slowly_keeps_nobody_waiting(served: tuple[Path, list[Request]]) -> None:
    path, _ = served
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow, slow.makefile("rb") as answers:
        slow.connect(str(path))
        for letter in '{"verb": "slow"':
            slow.sendall(letter.encode())
            assert Client(path).ask("quick", id="7") == {"id": "7"}
        slow.sendall(b"}\n")
        assert json.loads(answers.readline())["ok"]
