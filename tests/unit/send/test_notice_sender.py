"""honed-send's notices while the machine fails: each is sent once, and none is lost."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from honed.send import notification
from honed.send.notice_sender import Messenger
from honed.send.notification import Notice
from honed.spec.config import NotifyConfig
from honed.system.layout import Layout
from process.listener import Listener, Quiet
from waiting import wait_for


class Posted(Quiet):
    """A notice that came."""

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        receiver: Receiver = self.server.owner  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers["Content-Length"]))
        receiver.keys.append(str(self.headers["Idempotency-Key"]))
        self.send_response(receiver.status)
        self.send_header("Content-Length", "0")
        self.end_headers()


class Receiver(Listener):
    """A webhook that answers each notice with `status`, and keeps their keys."""

    request_class = Posted

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.status = 200
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}/"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.down()


class Post:
    """The queue of an instance, and what delivers it, one look after another at times of its own."""

    def __init__(self, layout: Layout, url: str) -> None:
        self.dir, self.refused = notification.notices_dir(layout), notification.refused_dir(layout)
        self.refused.mkdir(parents=True)
        self.layout, self._url, self._now = layout, url, 0.0
        self.messenger = Messenger(layout, clock=lambda: self._now)
        self.config = NotifyConfig(retry_delay_sec=1, max_retry_delay_sec=1)
        self.messenger.reload(self.config)

    def put(self, number: int) -> Path:
        path = self.dir / f"{number:032x}.json"
        notice = Notice(path.stem, {"webhook": self._url}, True, {"text": "x"}, time.time())
        path.write_text(json.dumps(asdict(notice)))
        os.utime(path, (number, number))
        return path

    def look(self, *, after_sec: float = 0.0) -> None:
        """Have the notices delivered that are due."""
        self._now += after_sec
        self.messenger._look()
        for line in self.messenger._lines.values():
            if line.thread is not None:
                line.thread.join(30)
                assert not line.thread.is_alive()


@pytest.fixture
def post(tmp_path: Path, receiver: Receiver) -> Post:
    return Post(Layout(tmp_path), receiver.url)


class Fault:
    """An error of a function of os for the paths that end in a suffix."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str, suffix: str, number: int) -> None:
        self.is_on = True
        real = getattr(os, function)

        def fail(path: object, *arguments: object, **keys: object) -> object:
            if self.is_on and str(path).endswith(suffix):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *arguments, **keys)

        monkeypatch.setattr(os, function, fail)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.EACCES, errno.ESTALE], ids=errno.errorcode.get)
def test_a_notice_that_was_taken_and_cannot_be_removed_is_not_sent_again(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    first, second = post.put(1), post.put(2)
    fault = Fault(monkeypatch, "unlink", ".json", number)
    for _ in range(5):
        post.look(after_sec=10)
    assert receiver.keys == [first.stem, second.stem]
    assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 1
    fault.is_on = False
    post.look(after_sec=10)
    assert notification.waiting(post.layout) == []
    assert receiver.keys == [first.stem, second.stem]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE], ids=errno.errorcode.get)
def test_a_notice_that_was_refused_and_cannot_be_set_aside_is_not_sent_again(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path, receiver.status = post.put(1), 422
    fault = Fault(monkeypatch, "open", ".tmp", number)
    for _ in range(5):
        post.look(after_sec=10)
    assert receiver.keys == [path.stem]
    assert path.exists()
    fault.is_on = False
    post.look(after_sec=10)
    assert not path.exists()
    assert json.loads((post.refused / path.name).read_bytes())["answer"].startswith("422")


def test_after_a_fault_the_next_try_comes_after_a_delay(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.put(1)
    Fault(monkeypatch, "unlink", ".json", errno.EROFS)
    post.look()
    (line,) = post.messenger._lines.values()
    tried = line.thread
    post.look()
    assert line.thread is tried
    post.look(after_sec=10)
    assert line.thread is not tried
    assert len(receiver.keys) == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_notice_that_the_machine_does_not_return_is_sent_later(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path, other, real, is_on = post.put(1), post.put(2), Path.read_bytes, [True]

    def fail(asked: Path) -> bytes:
        if is_on and asked == path:
            raise OSError(number, os.strerror(number), str(asked))
        return real(asked)

    monkeypatch.setattr(Path, "read_bytes", fail)
    for _ in range(3):
        post.look(after_sec=10)
    assert receiver.keys == [other.stem]
    is_on.clear()
    post.look(after_sec=10)
    assert receiver.keys == [other.stem, path.stem]
    assert list(post.refused.iterdir()) == []


DAMAGED = {
    "empty": b"",
    "zeros": bytes(64),
    "cut": b'{"key": "a", "to": {"web',
    "a list": b"[]",
    "a receiver that is none": b'{"key": "a", "to": "x", "is_own": true, "payload": {}, "created_at": 0}',
    "a receiver of another kind": b'{"key": "a", "to": {"mail": 7}, "is_own": true, "payload": {}, "created_at": 0}',
    "a date that is none": b'{"key": "a", "to": {"mail": "a"}, "is_own": true, "payload": {}, "created_at": "x"}',
    "a content that is none": b'{"key": "a", "to": {"mail": "a"}, "is_own": true, "payload": 7, "created_at": 0}',
    "nested too deeply": b"[" * 100_000,
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_notice_is_set_aside_and_holds_up_no_other(post: Post, receiver: Receiver, data: bytes) -> None:
    path, other = post.put(1), post.put(2)
    path.write_bytes(data)
    post.look()
    post.look(after_sec=10)
    assert receiver.keys == [other.stem]
    assert [each.name for each in post.refused.iterdir()] == [f"{path.name}.damaged"]


@pytest.mark.parametrize("data", [b"[]", b"7", b'{"notice": null}', b'{"notice": []}', b"", bytes(9), b"[" * 100_000])
def test_a_damaged_refusal_keeps_no_reload_from_the_others(post: Post, receiver: Receiver, data: bytes) -> None:
    path, receiver.status = post.put(1), 422
    post.look()
    (post.refused / "0.json").write_bytes(data)
    receiver.status = 200
    post.messenger.reload(post.config)
    post.look(after_sec=10)
    wait_for(lambda: receiver.keys == [path.stem] * 2, what="the notice sent again")
