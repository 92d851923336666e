"""The meeting of ranks on several machines."""

from __future__ import annotations

import datetime
import json
import socket
import threading
from pathlib import Path

import pytest

from honed.worker import rendezvous

TIMEOUT = datetime.timedelta(seconds=30)


@pytest.fixture(autouse=True)
def _kept_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # set, and so put back


def test_ranks_meet_at_the_address_of_rank_0_and_at_no_other(tmp_path: Path) -> None:
    stores = {}

    def join(rank: int) -> None:
        stores[rank] = rendezvous.store(tmp_path, "127.0.0.2", rank=rank, world=2, timeout=TIMEOUT)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 0)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    stores[1].set("said", "by rank 1")
    assert stores[0].get("said") == b"by rank 1"
    told = json.loads((tmp_path / "address.json").read_bytes())
    assert told["host"] == "127.0.0.2"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", told["port"]), timeout=10)


def test_rank_0_that_is_reached_by_an_address_of_another_machine_listens_at_all_of_its_own(tmp_path: Path) -> None:
    with rendezvous._listen("192.0.2.1") as listening:
        socket.create_connection(("127.0.0.1", listening.getsockname()[1]), timeout=10).close()


def test_an_address_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 cannot listen at nowhere\.invalid: "):
        rendezvous.store(tmp_path, "nowhere.invalid", rank=0, world=2, timeout=TIMEOUT)
