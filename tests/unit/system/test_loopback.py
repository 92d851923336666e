from __future__ import annotations

import os
import socket

import pytest

from honed.system import loopback


@pytest.mark.parametrize(
    ("family", "listens", "connects"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", "::ffff:127.0.0.1"),
    ],
)
def test_the_user_of_a_client_is_known_as_long_as_it_is_connected(
    family: socket.AddressFamily, listens: str, connects: str
) -> None:
    with socket.socket(family) as listening:
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listening.bind((listens, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listening.listen()
        client = socket.socket(socket.AF_INET6 if ":" in connects else socket.AF_INET)
        client.connect((connects, listening.getsockname()[1]))
        taken, peer = listening.accept()
        with taken:
            ours = taken.getsockname()[:2]
            assert loopback.user_of(peer[:2], ours) == os.getuid()
            assert loopback.is_of(peer[:2], ours, {os.getuid()})
            assert not loopback.is_of(peer[:2], ours, {os.getuid() + 1})
            assert not loopback.is_of((peer[0], 1), ours, {os.getuid()})
            assert loopback.in_words(peer[:2], ours) == f"a process of uid {os.getuid()}"
            assert loopback.in_words((peer[0], 1), ours) == "no process that this machine's kernel lists"
            client.close()
            # What is left of it in the kernel belongs to nobody; it is listed as root's.
            assert loopback.user_of(peer[:2], ours) is None
