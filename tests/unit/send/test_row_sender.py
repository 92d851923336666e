"""honed-send's rows while the machine fails: it goes on, and sends nothing again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.job.event import Event, Reading
from honed.send import outbox
from honed.send.endpoint import Endpoint
from honed.send.lifetime import Lifetime
from honed.send.outbox import Outbox
from honed.send.refused_rows import RefusedRows
from honed.send.row_sender import RowSender
from honed.spec.config import ReportingConfig
from honed.system.notify import Notifier
from process.listener import Listener, Quiet
from zoo.jobs import JOB


class Posted(Quiet):
    """Rows that came."""

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        api: Api = self.server.owner  # type: ignore[attr-defined]
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        steps = [row["step"] for row in told["predictions"]]
        is_bad = api.bad_step in steps
        api.steps += [] if is_bad else steps
        self.send_response(422 if is_bad else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()


class Api(Listener):
    """A metrics API that keeps the steps of the rows it gets, and refuses that of `bad_step`."""

    request_class = Posted

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.bad_step = -1
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}/"


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    yield made
    made.down()


def deliver_all(path: Path, url: str) -> None:
    """Deliver what there is, as a honed-send does whose honed has ended."""
    config = ReportingConfig(metrics_api_url=url, flush_sec=60, retry_delay_sec=0.01)
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    with os.fdopen(read_fd) as ended:
        lifetime = Lifetime(Notifier(), flush_sec=lambda: 60.0, stdin=ended)
        endpoint = Endpoint(lambda: config, ping=lambda: None)
        refused = RefusedRows(path, lambda: config)
        RowSender(
            path, lambda: config, endpoint, refused, lifetime, Notifier(), obey_reload=lambda: False
        ).deliver_all()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("file", ["cursor.json", "trouble.json", "refused"])
def test_what_cannot_be_written_for_the_moment_ends_nothing_and_no_row_is_sent_again(
    tmp_path: Path, api: Api, monkeypatch: pytest.MonkeyPatch, file: str, number: int
) -> None:
    outbox.make_dirs(tmp_path)
    box = Outbox(tmp_path, max_bytes=1 << 20)
    for step in range(3):
        rows = [{"sample_index": 0, "prediction": "x"}]
        box.put(JOB, Reading([Event("predictions", float(step), {"step": step, "rows": rows})], 0, 0))
    api.bad_step = 1
    real, num_failed = os.open, 0

    def fail(path: object, *arguments: object, **keys: object) -> int:
        nonlocal num_failed
        if f"sender/{file}" in str(path).replace("/.", "/") and str(path).endswith(".tmp") and num_failed < 2:
            num_failed += 1
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **keys)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", fail)
    deliver_all(tmp_path, api.url)
    assert num_failed == 2
    assert sorted(api.steps) == [0, 2]
    assert len(list(outbox.refused_dir(tmp_path).glob("*.json"))) == 1
    assert outbox.num_waiting_bytes(tmp_path) == 0
    assert outbox.read_trouble(tmp_path) is None, "nor is it told of once it is over"
