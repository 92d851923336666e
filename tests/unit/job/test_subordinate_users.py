"""Thousands of subordinate users (newuidmap) are one, and so are all whom the machine does not know: in the turns of
incoming/, in rejected/, in the journal. They submit nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from honed.job import retention
from honed.job.arrival import Arrivals
from honed.job.retention import Item
from honed.job.spool import Spool
from honed.system import access
from honed.system.error import NotPermittedError
from honed.system.holder import UNKNOWN, Holders
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.log_quota import MAX_LINES, LogQuota

FIRST, STRANGER, OWNER = 7_000_000, 8_000_000, 65534
log = logging.getLogger("honed.test")


@pytest.fixture
def holders(tmp_path: Path) -> Holders:
    path = tmp_path / "subuid"
    path.write_text(f"{OWNER}:{FIRST}:65536\n")
    return Holders(path)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(Layout(tmp_path))


def of_system(spool: Spool, holders: Holders) -> Arrivals:
    """Arrivals of an instance whose workers run as other users."""
    arrivals = Arrivals(spool)
    arrivals._has_workers_user, arrivals._holders = True, holders
    return arrivals


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to others")
def test_their_files_in_incoming_wait_in_one_line(spool: Spool, holders: Holders) -> None:
    owners = [*range(FIRST, FIRST + 5), STRANGER, STRANGER + 1, 0]
    for number, uid in enumerate(owners):
        path = spool.incoming_dir / f"{number}.json"
        path.write_text("{}")
        os.chown(path, uid, -1)
    found = {each.path.name: each.uid for each in of_system(spool, holders).dropped()}
    assert [found[f"{number}.json"] for number in range(len(owners))] == [*[OWNER] * 5, UNKNOWN, UNKNOWN, 0]
    alone = {each.path.name: each.uid for each in Arrivals(spool).dropped()}
    assert [alone[f"{number}.json"] for number in range(len(owners))] == owners, "who serves one user asks nobody"


def test_they_submit_nothing(spool: Spool, holders: Holders) -> None:
    """Each would have room for as many files as a person, on honed's disk."""
    arrivals = of_system(spool, holders)
    with pytest.raises(NotPermittedError, match="is not a user of this machine"):
        arrivals.submit("a.json", b"{}", FIRST)
    assert not list(spool.claimed_dir.iterdir())
    assert arrivals.submit("a.json", b"{}", 0).submitter == 0


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to others")
def test_their_refused_files_push_out_nobody_elses(
    spool: Spool, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_REJECTED", 3)
    monkeypatch.setattr(retention, "Holders", lambda: holders)
    monkeypatch.setattr(access, "has_workers_user", lambda _: True)
    for number, uid in enumerate([0, 0, *range(FIRST, FIRST + 6)]):
        path = spool.rejected_dir / f"{number}.json"
        path.write_text("{}")
        os.chown(path, uid, -1)
    files = list[Item]()
    for _ in retention.look_at_refused(spool, [], files):
        pass
    assert sorted((item.uid or 0) for item in files) == [0, 0, *[OWNER] * 6]


class Lines(logging.Handler):
    """Keeps what is logged; a handler of its own, since other tests may change the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_their_lines_in_the_journal_are_those_of_one(holders: Holders) -> None:
    now = [100.0]
    quota = LogQuota({}.get, lambda: now[0], is_timed=False, holder_of=holders.of)

    def say(uid: int) -> None:
        log.warning("refused for user %d", uid, extra=about(None, uid=uid))

    lines = Lines()
    lines.addFilter(quota)
    loggers = (log, logging.getLogger(LogQuota.__module__))
    for logger in loggers:
        logger.addHandler(lines)
    try:
        for number in range(MAX_LINES + 10):
            say(STRANGER + number)
            say(FIRST + number)
        assert len(lines.messages) == 2 * MAX_LINES
        now[0] += 100.0
        quota.report()
    finally:
        for logger in loggers:
            logger.removeHandler(lines)
    told = [line for line in lines.messages if "left out" in line]
    assert {line.partition(":")[0] for line in told} == {"users whom this machine does not know", f"user {OWNER}"}
