"""honed uses a mail server over TLS or not at all: STARTTLS and TLS, with certificates made by openssl."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from certificates import Authority
from harness import Instance
from postbox import PostOffice

from honed.send import notice_sender, notification
from honed.send.notification import Notice
from honed.spec.config import NotifyConfig
from waiting import wait_for

SECURITIES = ("starttls", "tls")
#: The verbs that may be sent before the connection is encrypted.
PRELUDE = {"starttls": ["EHLO", "STARTTLS"], "tls": []}


@contextlib.contextmanager
def opened(office: PostOffice) -> Iterator[PostOffice]:
    try:
        yield office
    finally:
        office.down()


def set_up(instance: Instance, office: PostOffice, *, security: str, host: str = "localhost") -> None:
    password = instance.root / "smtp-password"
    password.write_text("s3cret\n")
    instance.configure(
        f'[notify]\nallowed_mail_domains = ["example.org"]\nmail_from = "honed@example.org"\nsmtp_host = "{host}"\n'
        f'smtp_port = {office.port}\nsmtp_security = "{security}"\nsmtp_user = "me"\n'
        f'smtp_password_file = "{password}"\nretry_delay_sec = 0.05\nmax_retry_delay_sec = 0.2\n'
    )


def drop(instance: Instance) -> None:
    instance.drop("a", name="succeed.a", notify={"mail": "anna@example.org"})


@pytest.mark.parametrize("security", SECURITIES)
def test_mail_and_password_go_to_a_server_that_is_trusted_and_in_private(
    instance: Instance, authority: Authority, security: str
) -> None:
    instance.environment["SSL_CERT_FILE"] = str(authority.ca)
    with opened(PostOffice(security=security, tls=authority.server_side)) as office:
        set_up(instance, office, security=security)
        drop(instance)
        assert instance.drain() == 0
    assert [mail["To"] for mail in office.mails.values()] == ["anna@example.org"]
    assert [base64.b64decode(login) for login in office.logins] == [b"\0me\0s3cret"]
    assert office.in_clear == PRELUDE[security]


@pytest.mark.parametrize("security", SECURITIES)
@pytest.mark.parametrize(
    ("host", "is_trusted", "why"),
    [("localhost", False, "unable to get local issuer certificate"), ("127.0.0.1", True, "IP address mismatch")],
    ids=["another authority", "another name"],
)
def test_a_server_that_may_be_another_is_told_nothing_and_the_mail_waits_until_it_is_known(
    instance: Instance, authority: Authority, security: str, host: str, is_trusted: bool, why: str
) -> None:
    if is_trusted:
        instance.environment["SSL_CERT_FILE"] = str(authority.ca)
    with opened(PostOffice(security=security, tls=authority.server_side)) as office:
        set_up(instance, office, security=security, host=host)
        drop(instance)
        instance.start()
        said = wait_for(lambda: [line for line in instance.log.splitlines() if "retrying" in line], what="the word")
        assert f"{host} has a certificate that is not trusted: {why}" in said[0]
        assert set(office.in_clear) == set(PRELUDE[security])
        assert not office.mails
        assert not office.logins
        assert len(notification.waiting(instance.layout)) == 1
        instance.stop()
        set_up(instance, office, security=security)
        instance.environment["SSL_CERT_FILE"] = str(authority.ca)
        assert instance.drain() == 0
        assert list(office.num_times.values()) == [1]
        assert notification.waiting(instance.layout) == []


def test_nothing_is_sent_in_the_clear_where_a_server_or_somebody_on_the_way_offers_no_starttls(
    instance: Instance,
) -> None:
    with opened(PostOffice()) as office:
        set_up(instance, office, security="starttls")
        drop(instance)
        instance.start()
        wait_for(lambda: "STARTTLS extension not supported by server" in instance.log, what="the word")
        instance.stop()
        assert set(office.in_clear) <= {"EHLO", "QUIT", "RSET"}
        assert len(notification.waiting(instance.layout)) == 1


@contextlib.contextmanager
def dripping() -> Iterator[int]:
    """The port of a server whose greeting grows by a byte every 50 ms, and never ends."""
    is_over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while not is_over.wait(0.05):
                connection.sendall(b"2")

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=[listener], daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        is_over.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def tell(port: int, *, timeout_sec: float) -> str:
    payload = {"text": "job 1 (a) succeeded", "outcome": "succeeded"}
    notice = Notice("key", {"mail": "anna@example.org"}, is_own=False, payload=payload, created_at=0.0)
    config = NotifyConfig(
        mail_from="honed@example.org",
        smtp_host="127.0.0.1",
        smtp_port=port,
        smtp_security="none",
        timeout_sec=timeout_sec,
    )
    return notice_sender.mail(notice, "anna@example.org", config)[1]


def test_a_server_whose_greeting_drips_in_for_ever_is_given_up() -> None:
    with dripping() as port, pytest.raises(TimeoutError, match="no complete response in time"):
        tell(port, timeout_sec=0.5)


def test_a_server_whose_farewell_drips_in_for_ever_has_taken_the_mail() -> None:
    with opened(PostOffice()) as office:
        office.drips_farewell = True
        assert tell(office.port, timeout_sec=5) == "taken"
        office.drips_farewell = False
    assert list(office.num_times.values()) == [1]
