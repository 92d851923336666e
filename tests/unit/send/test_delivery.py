"""The one HTTP delivery: the verdict of a status, and the end of an exchange that lasts too long."""

from __future__ import annotations

import socket

import pytest

from honed.send.delivery import NOT_ABOUT_THE_CONTENT, Client, Verdict, deadline, verdict


def test_only_a_fault_of_the_content_refuses_it() -> None:
    refusing = {status for status in range(100, 600) if verdict(status) is Verdict.REFUSED}
    assert {400, 409, 413, 415, 422} <= refusing
    assert refusing == {*range(400, 500)} - NOT_ABOUT_THE_CONTENT
    assert {status for status in range(100, 600) if verdict(status) is Verdict.TAKEN} == {*range(200, 300)}


def test_an_exchange_that_lasts_too_long_is_a_timeout_whatever_it_broke() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError, match="no complete response in time"), deadline(ours, 0.05):
        ours.recv(1)
        raise ConnectionResetError


def test_an_exchange_can_be_interrupted_and_that_is_no_timeout() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, deadline(ours, 60) as hang_up:
        hang_up()
        assert ours.recv(1) == b""


def test_a_client_without_a_request_has_nothing_to_interrupt() -> None:
    Client().hang_up()
