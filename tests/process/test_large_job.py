"""A job that has reported very much: what is asked of it comes in pages, and others' answers between them."""

from __future__ import annotations

import json
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from harness import Instance

from honed.job.database import timestamp
from honed.job.job import State
from honed.system.control import PAGE_BYTES
from waiting import DEADLINE_SEC, wait_for

NUM_STEPS, NUM_PREDICTIONS = 30_000, 3000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """A honed with a job that has succeeded, and many more rows of it in honed.db. Its report, which `show` names once
    it is there, has been made."""
    instance = Instance(tmp_path_factory.mktemp("large"))
    instance.start()
    instance.drop("succeed")
    job = instance.wait_state("succeed", State.SUCCEEDED)
    wait_for(instance.layout.job(job.id).report_path.exists, what="its report", account=instance.account)
    now = timestamp(time.time())
    with closing(sqlite3.connect(instance.layout.database_path)) as db, db:
        losses = ((1, 1, step, 1.0, "loss", 1 / step, now) for step in range(100, NUM_STEPS))
        db.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?)", losses)
        told = (
            (1, "0", 1.0, 100 + number // 50, number % 50, "?", "x" * 200, now) for number in range(NUM_PREDICTIONS)
        )
        db.executemany("INSERT INTO training_predictions VALUES (?, ?, ?, ?, ?, ?, ?, 'y', ?)", told)
        audits = ((1, 1, "audit", json.dumps({"when": str(number), "words": "x" * 500}), now) for number in range(1000))
        db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", audits)
    yield instance
    instance.end()


@pytest.fixture
def large(made: Instance) -> Instance:
    """It, running."""
    if made.process is None or made.process.poll() is not None:
        made.start()
    return made


@pytest.mark.parametrize(("verb", "key"), [("losses", "page"), ("predictions", "page"), ("show", "part")])
def test_an_answer_to_another_client_comes_between_two_pages(large: Instance, verb: str, key: str) -> None:
    with socket.socket(socket.AF_UNIX) as peer, peer.makefile("rb") as stream:
        peer.settimeout(DEADLINE_SEC)
        peer.connect(str(large.layout.control_path))
        peer.sendall(json.dumps({"verb": verb, "id": "succeed", "paged": 1, "parts": 1}).encode() + b"\n")
        pages: list[dict[str, Any]] = []
        while not pages or not pages[-1]["is_last"]:
            line = stream.readline()
            assert len(line) < 2 * PAGE_BYTES
            pages.append(json.loads(line))
            assert large.client.ask("status")["is_paused"] is False
    assert len(pages) > 2
    assert all(key in page for page in pages)


def test_joined_pages_are_what_the_files_hold(large: Instance) -> None:
    """honectl joins them; once honed is down, it reads the files itself."""
    asked = [("show", "--json"), ("predictions", "--json"), ("predictions", "--csv"), ("predictions", "--step", "-1")]
    before = [large.honectl(*words, "succeed", check=True).stdout for words in asked]
    losses = large.client.ask("losses", id="succeed")
    assert len(losses) > NUM_STEPS - 100
    assert losses == sorted(losses)
    (shown, predicted, *_) = map(json.loads, before[:2])
    assert (len(shown["events"]) > 1000, shown["metrics"]["loss"]) == (True, 1 / (NUM_STEPS - 1))
    assert len(predicted) >= NUM_PREDICTIONS
    assert large.client.ask("glance", id="succeed")["course"][-1] < 0.001
    large.stop()
    assert [large.honectl(*words, "succeed", check=True).stdout for words in asked] == before
