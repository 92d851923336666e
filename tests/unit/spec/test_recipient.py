"""The recipients that a job may name: the border between a job file and the network."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from honed.send import notification
from honed.send.notice_sender import Messenger, compose
from honed.send.notification import Notice
from honed.spec import recipient
from honed.spec.config import NotifyConfig
from honed.spec.spec import NotifySpec
from honed.system.error import EnvironmentInvalidError, SpecError
from honed.system.layout import Layout

ALLOWED = ["https://ntfy.example.org/honed", "http://127.0.0.1:8080", "https://chat.example.org/hooks/"]


@pytest.mark.parametrize(
    "address",
    [
        "https://ntfy.example.org/honed",
        "https://ntfy.example.org/honed/anna?x=1",
        "https://NTFY.example.org:443/honed",
        "http://127.0.0.1:8080/",
        "http://127.0.0.1:8080",
        "https://chat.example.org/hooks/a/b",
    ],
)
def test_an_allowed_address_and_what_lies_below_it_may_be_called(address: str) -> None:
    assert recipient.is_below(address, ALLOWED)


@pytest.mark.parametrize(
    "address",
    [
        "https://ntfy.example.org/honed-evil",
        "https://ntfy.example.org/",
        "http://ntfy.example.org/honed",
        "https://ntfy.example.org:8443/honed",
        "https://ntfy.example.org.evil.org/honed",
        "https://evil.org/https://ntfy.example.org/honed",
        "https://ntfy.example.org@evil.org/honed",
        "https://ntfy.example.org/honed/../admin",
        "https://ntfy.example.org/honed/%2e%2e/admin",
        "https://ntfy.example.org/honed/..%2fadmin",
        "https://ntfy.example.org/honed\\..\\admin",
        "https://ntfy.example.org/honed/..;/admin",
        "https://ntfy.example.org/honed/%252e%252e/admin",
        "https://ntfy.example.org/honed/ admin",
        "https://ntfy.example.org:0/honed",
        "http://127.0.0.1:8081/",
        "http://127.0.0.1:80800/",
        "http://127.0.0.1:8080@169.254.169.254/",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1",
        "file:///etc/shadow",
        "https://chat.example.org/hooksx",
        "https://ntfy.example.org/honed\r\nHost: evil",
        "",
    ],
)
def test_nothing_else_may(address: str) -> None:
    assert not recipient.is_below(address, ALLOWED)


def test_a_key_in_an_allowed_address_is_part_of_it() -> None:
    allowed = ["https://chat.example.org/hook?key=1"]
    assert recipient.is_below(allowed[0], allowed)
    assert not recipient.is_below("https://chat.example.org/hook?key=2", allowed)
    assert not recipient.is_below("https://chat.example.org/hook", allowed)


MAILING = NotifyConfig(smtp_host="mx", mail_from="honed@example.org", allowed_mail_domains=["Example.org"])


@pytest.mark.parametrize("address", ["anna@example.org", "anna+gpu@EXAMPLE.ORG"])
def test_mail_goes_to_allowed_domains(address: str) -> None:
    assert recipient.why_not_mail(address, MAILING) is None


@pytest.mark.parametrize(
    "address",
    [
        "anna@sub.example.org",
        "anna@evil.org",
        "anna@evil.org,b@example.org",
        "a@b@example.org",
        "@example.org",
        "anna@example.org\nBcc: x@evil.org",
        "-oQ/tmp@example.org",
        '"a b"@example.org',
        "anna@example.org>",
    ],
)
def test_and_nowhere_else(address: str) -> None:
    assert recipient.why_not_mail(address, MAILING) is not None


def test_by_default_no_job_has_anybody_told() -> None:
    for notify in (NotifySpec(webhook="https://example.org/x"), NotifySpec(webhook="team"), NotifySpec(mail="a@b.org")):
        with pytest.raises(SpecError, match=r"^notify\.(webhook|mail): ") as caught:
            recipient.check(notify, NotifyConfig())
        assert "ask the administrator to allow it" in caught.value.hint


def test_a_named_webhook_has_its_address_in_a_file_that_no_error_shows(tmp_path: Path) -> None:
    path = tmp_path / "team"
    path.write_text("https://hooks.example.org/s3cret\nt0ken\n")
    config = NotifyConfig(webhook_files={"team": str(path)})
    recipient.check(NotifySpec(webhook="team"), config)
    assert recipient.target("team", config) == ("https://hooks.example.org/s3cret", "t0ken")
    path.write_text("s3cret, and no address\n")
    with pytest.raises(EnvironmentInvalidError) as caught:
        recipient.target("team", config)
    assert "s3cret" not in caught.value.message + caught.value.hint


def test_nothing_in_a_jobs_name_makes_a_header_a_mention_or_a_second_mail() -> None:
    name = "x\r\nBcc: all@evil.org\r\n\r\n<!channel> <b>\x1b[2J"
    text = f"honed on h: job 7 ({notification.plain(name)}) failed"
    notice = Notice("k" * 32, {"mail": "anna@example.org"}, False, {"text": text, "metrics": {}}, 0.0)
    sent = compose(notice, "anna@example.org", "honed@example.org").as_bytes()
    head, _, body = sent.partition(b"\r\n\r\n")
    assert not [line for line in head.splitlines() if line.lower().startswith(b"bcc")]
    assert b"<!channel>" not in body
    assert b"\x1b" not in sent


def test_a_figures_name_that_is_no_text_keeps_no_mail_back() -> None:
    told = {"text": "honed on h: job 7 (a) failed", "metrics": {"eval_\ud800\nx": 1.5}}
    sent = compose(
        Notice("k" * 32, {"mail": "anna@example.org"}, False, told, 0.0), "anna@example.org", "h@example.org"
    )
    assert b"eval_" in sent.as_bytes()
    assert b": 1.5" in sent.as_bytes()


def test_a_notice_whose_receiver_is_down_is_not_read_at_each_look(tmp_path: Path) -> None:
    class Counting(Messenger):
        num_read = 0

        def _read(self, path: Path) -> Notice | None:
            self.num_read += 1
            return super()._read(path)

    layout = Layout(tmp_path)
    notification.refused_dir(layout).mkdir(parents=True)
    for number in range(20):
        notice = Notice(f"{number:032x}", {"webhook": "http://127.0.0.1:1/"}, True, {"text": "x"}, time.time())
        (notification.notices_dir(layout) / f"{notice.key}.json").write_text(json.dumps(asdict(notice)))
    messenger = Counting(layout)
    messenger.reload(NotifyConfig(retry_delay_sec=600, max_retry_delay_sec=600))
    for _ in range(10):
        messenger._look()
    assert messenger.num_read <= 20 + 2  # and again for the one that is tried
