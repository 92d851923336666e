"""Notices of a job's end: from the entry's move through honed-send to a real webhook and a real mail server, whatever
is down, slow or killed meanwhile."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import postbox
import pytest
from harness import Instance
from listener import drip
from postbox import PostOffice, Webhook

from honed.job.job import State
from honed.job.spool import Spool
from honed.send import notification
from honed.send.notification import Notices
from honed.spec import config
from waiting import wait_for

#: Seconds of patience with a receiver that drips: the others are here, but a busy machine can be slow to run them.
SHORT_SEC = 5


@pytest.fixture
def receivers() -> Iterator[tuple[Webhook, PostOffice]]:
    with postbox.open_both() as both:
        yield both


def allow(instance: Instance, hook: Webhook, office: PostOffice, *more: str) -> None:
    lines = [
        f'allowed_webhooks = ["{hook.url}"]',
        'allowed_mail_domains = ["example.org"]',
        'smtp_host = "127.0.0.1"',
        f"smtp_port = {office.port}",
        'smtp_security = "none"',
        'mail_from = "honed@example.org"',
        "retry_delay_sec = 0.05",
        "max_retry_delay_sec = 0.2",
        *more,
    ]
    instance.configure("\n".join(["[notify]", *lines, ""]))


@pytest.fixture
def allowed(instance: Instance, receivers: tuple[Webhook, PostOffice]) -> tuple[Webhook, PostOffice]:
    """The receivers that the administrator allows jobs to name."""
    allow(instance, *receivers)
    return receivers


def files(instance: Instance) -> list[Path]:
    return notification.waiting(instance.layout)


def refused(instance: Instance) -> list[Path]:
    return list(notification.refused_dir(instance.layout).glob("*.json"))


def test_every_end_is_told_to_whom_the_job_names(instance: Instance, allowed: tuple[Webhook, PostOffice]) -> None:
    hook, office = allowed
    notify = {"webhook": f"{hook.url}/anna", "mail": "anna@example.org"}
    instance.drop("a", name="succeed.a", notify=notify)
    instance.drop("b", name="explain.b", notify=notify)
    instance.drop("c.hold", name="succeed.c", notify={**notify, "states": ["succeeded"]})
    instance.drop("d", name="succeed.d")
    assert instance.drain() == 0
    told = {notice["job_id"]: notice for notice in hook.notices.values()}
    a, b = (job.id for name in ("succeed.a", "explain.b") if (job := instance.job(name)))
    assert {(number, notice["state"]) for number, notice in told.items()} == {(a, "succeeded"), (b, "failed")}
    assert told[b]["error"] == {"code": "mask_invalid", "message": "trained on the prompt", "hint": "see preview"}
    assert (
        f"job {b} (explain.b) failed: mask_invalid\ntrained on the prompt\nWhat to do: see preview" in told[b]["text"]
    )
    assert told[a]["metrics"]["train_loss"] == 0.5
    assert told[a]["report"] == str(instance.layout.job(a).report_path)
    assert hook.paths == ["/hooks/anna"] * 2
    assert sorted(mail["To"] for mail in office.mails.values()) == ["anna@example.org"] * 2
    assert any(f"job {b} (explain.b) failed: mask_invalid" in str(mail["Subject"]) for mail in office.mails.values())
    assert set((hook.num_times + office.num_times).values()) == {1}
    assert not files(instance)
    assert not list((instance.layout.spool_dir / "ended").iterdir())


def test_a_success_that_learned_nothing_says_so_wherever_its_end_is_told(
    instance: Instance, allowed: tuple[Webhook, PostOffice]
) -> None:
    hook, _office = allowed
    instance.drop("a", name="unlearned", notify={"webhook": hook.url})
    assert instance.drain() == 0
    said = "the loss did not fall: 2.3 in the first steps, 2.3 …"
    assert f"job 1 (unlearned): attempt 1: succeeded, but {said}; now succeeded" in instance.log
    instance.start()
    [notice] = wait_for(lambda: list(hook.notices.values()), what="the notice")
    assert f"job 1 (unlearned) succeeded, but {said}" in notice["text"].splitlines()[0]
    assert notice["remark"] == said
    assert instance.show("1")["remark"] == said
    for verb in (("show", "1"), ("list",)):
        shown = instance.honectl(*verb, check=True).stdout
        assert "but the loss did not fall" in " ".join(shown.split())
        assert verb != ("list",) or max(map(len, shown.splitlines())) < 200
    page = instance.layout.job(1).report_path
    wait_for(page.exists, what="the report")
    assert f"succeeded, but {said}" in page.read_text(encoding="utf-8")


def test_a_job_file_has_nobody_told_whom_the_administrator_has_not_allowed(
    instance: Instance, allowed: tuple[Webhook, PostOffice]
) -> None:
    hook, _office = allowed
    instance.drop("a", name="succeed.a", notify={"webhook": f"http://127.0.0.1:{hook.port}/admin"})
    instance.drop("b", name="succeed.b", notify={"mail": "x@evil.org"})
    instance.drop("c", name="succeed.c", notify={"webhook": "nobody"})
    assert instance.drain() == 0
    said = instance.rejected()
    assert "notify.webhook: jobs may not call this URL" in said["a.json"]
    assert "notify.mail: mail to evil.org is not allowed" in said["b.json"]
    assert "notify.webhook: there is no webhook named 'nobody'" in said["c.json"]
    assert not hook.notices


def test_what_is_allowed_no_longer_is_not_called_any_more(
    instance: Instance, allowed: tuple[Webhook, PostOffice]
) -> None:
    hook, office = allowed
    instance.drop("a.hold", name="succeed.a", notify={"webhook": hook.url})
    instance.drop("b.hold", name="succeed.b", notify={"mail": "a@example.org"})
    assert instance.drain() == 0
    instance.configure('[notify]\nadmin_mail = ["root@localhost"]\nadmin_states = []\n')
    instance.start()
    for number in ("1", "2"):
        instance.client.ask("release", id=number)
    wait_for(lambda: len(refused(instance)) == 2, what="refused")
    assert not hook.notices
    assert not office.mails


def test_a_receiver_that_is_down_slow_or_broken_gets_it_in_the_end_and_holds_up_no_other(
    instance: Instance, receivers: tuple[Webhook, PostOffice]
) -> None:
    hook, office = receivers
    allow(instance, hook, office, f"timeout_sec = {SHORT_SEC}")
    office.down()
    hook.replies = [500, drip, 429, 302, 401, postbox.keep_and_hang_up]
    instance.start()
    notify = {"webhook": hook.url, "mail": "anna@example.org"}
    instance.drop("a", name="succeed.a", notify=notify)
    wait_for(lambda: hook.notices, what="the webhook, though the mail server is down")
    assert len(hook.num_times) == 1  # once more, under the same key
    assert max(hook.num_times.values()) == 2
    assert "/elsewhere" not in hook.paths
    assert not office.mails
    instance.kill(signal.SIGKILL)
    office.rcpt_answers = ["450 later"]
    office.num_hang_ups = 1
    office.up()
    instance.start()
    wait_for(lambda: not files(instance), what="the mail")
    assert len(office.mails) == 1
    assert list(office.num_times.values()) == [2]
    assert not refused(instance)


def test_a_proxys_login_page_is_no_delivery(instance: Instance, allowed: tuple[Webhook, PostOffice]) -> None:
    hook, _office = allowed
    hook.replies = [postbox.show_a_login_page, postbox.show_a_login_page]
    instance.drop("a", name="succeed.a", notify={"webhook": hook.url})
    assert instance.drain() == 0
    assert hook.replies == []
    assert list(hook.num_times.values()) == [1]
    assert "was not delivered; retrying: the response is an HTML page: 200 OK" in instance.log
    assert not refused(instance)


def test_what_a_receiver_will_never_take_is_set_aside_and_said(
    instance: Instance, allowed: tuple[Webhook, PostOffice]
) -> None:
    hook, office = allowed
    hook.replies = [400]
    office.rcpt_answers = ["550 no such mailbox"]
    instance.drop("a", name="succeed.a", notify={"webhook": hook.url, "mail": "nobody@example.org"})
    assert instance.drain() == 0
    assert len(refused(instance)) == 2
    assert not files(instance)
    assert "was rejected and moved to" in instance.log
    assert "550 no such mailbox" in instance.log


def test_kills_of_honed_lose_no_end_and_tell_none_under_two_keys(
    instance: Instance, allowed: tuple[Webhook, PostOffice]
) -> None:
    hook, _office = allowed
    for number in range(6):
        instance.drop(f"{number}", name=f"succeed-{number + 1}", notify={"webhook": hook.url})
    for turn in range(4):
        instance.start()
        wait_for(lambda turn=turn: len(list(instance.spool.jobs(State.SUCCEEDED))) > turn, what="an end")  # type: ignore[misc]
        instance.kill(signal.SIGKILL)
    assert instance.drain() == 0
    numbers = sorted(instance.spool.all_jobs())
    assert len(numbers) == 6
    assert sorted(notice["job_id"] for notice in hook.notices.values()) == numbers


def test_an_end_that_was_marked_and_never_told_is_told_at_the_next_start(
    instance: Instance, allowed: tuple[Webhook, PostOffice]
) -> None:
    """A kill can leave this state between the mark and the move, and between the move and the notice."""
    hook, _office = allowed
    for number in (1, 2):
        instance.drop(f"{number}.hold", name=f"succeed.{number}", notify={"webhook": hook.url})
    assert instance.drain() == 0
    spool = instance.spool
    first = spool.job(1)
    assert first is not None
    spool.move(first, State.CANCELLED, outcome="cancelled")
    (spool.ended_dir / "2").write_text("2\n")
    assert instance.drain() == 0
    assert [(notice["job_id"], notice["state"]) for notice in hook.notices.values()] == [(1, "cancelled")]
    assert not list(spool.ended_dir.iterdir())


def test_the_administrator_is_told_of_everybodys_failures_by_a_webhook_whose_address_is_a_secret(
    instance: Instance, receivers: tuple[Webhook, PostOffice]
) -> None:
    hook, office = receivers
    secret = instance.root / "team"
    secret.write_text(f"{hook.url}/s3cret\nt0ken\n")
    instance.configure(
        f'[notify]\nadmin_webhook = "team"\nadmin_mail = ["root@localhost"]\nmail_from = "honed@localhost"\n'
        f'smtp_host = "127.0.0.1"\nsmtp_port = {office.port}\nsmtp_security = "none"\nsmtp_user = "me"\n'
        f'smtp_password_file = "{secret}"\n[notify.webhook_files]\nteam = "{secret}"\n'
    )
    instance.drop("a", name="explain.a")
    instance.drop("b", name="succeed.b")
    assert instance.drain() == 0
    assert [notice["job_id"] for notice in hook.notices.values()] == [1]
    assert hook.headers[0]["Authorization"] == "Bearer t0ken"
    assert hook.paths == ["/hooks/s3cret"]
    assert len(office.mails) == len(office.logins) == 1
    assert "s3cret" not in instance.log


def test_notices_wait_in_the_order_in_which_they_were_made_whatever_the_clock_says(instance: Instance) -> None:
    instance.configure('[notify]\nadmin_webhook = "http://127.0.0.1:1/"\n')
    spool, dates = Spool(instance.layout), [1.8e9 - 86_400 * number for number in range(20)]
    notices = Notices(instance.layout, config.load(instance.layout).notify, spool, now=lambda: dates[0])
    for number in range(20):
        notices.tell_of_machine(f"fault {number}")
        notices.tend()
        dates.pop(0)
    spool.close()
    told = [json.loads(path.read_bytes())["payload"]["text"].split()[-1] for path in files(instance)]
    assert told == [str(number) for number in range(20)]


def test_the_administrator_is_told_when_honed_cannot_work_and_when_it_can_again(
    instance: Instance, receivers: tuple[Webhook, PostOffice]
) -> None:
    """Both notices arrive although the first one could not be written to the full disk at once."""
    hook, _ = receivers
    instance.configure(f'[notify]\nadmin_webhook = "{hook.url}"\nretry_delay_sec = 0.05\n')
    spool = Spool(instance.layout)
    notices = Notices(instance.layout, config.load(instance.layout).notify, spool)
    instance.layout.outbox_dir.parent.mkdir(parents=True, exist_ok=True)
    instance.layout.outbox_dir.write_text("in the way")
    notices.tell_of_machine("/var/lib/honed: No space left on device")
    with pytest.raises(OSError, match="outbox"):
        notices.tend()
    instance.layout.outbox_dir.unlink()
    notices.tell_of_machine("")
    notices.tend()
    notices.tend()
    spool.close()
    instance.start()
    wait_for(lambda: len(hook.notices) == 2, what="both")
    assert {notice["event"] for notice in hook.notices.values()} == {"degraded", "recovered"}
    assert any("No space left on device" in notice["text"] for notice in hook.notices.values())
