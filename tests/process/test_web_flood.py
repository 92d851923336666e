"""honed-web under load: every kind of client floods it in turn, and all others still have their answers."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import DEADLINE_SEC, Instance
from test_report import HOSTILE
from test_web import SHARED, TOKEN, Web, drain, request_head, tell_much

from honed.page.place import SHARES, Kind
from honed.page.server import BACKLOG
from waiting import wait_for

#: Puts the sockets with these numbers where systemd puts them, and becomes honed-web.
ACTIVATED = """
import os, sys
numbers = [int(word) for word in sys.argv[1].split(",")]
for place, number in enumerate(numbers):
    os.dup2(number, 3 + place)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(numbers)))
os.execv(sys.executable, [sys.executable, "-m", "honed.page.server", *sys.argv[2:]])
"""
#: Connects as another user, and hands the connections over.
CONNECTED = """
import os, socket, sys
number, address, uid, gid, count = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), *map(int, sys.argv[3:])
os.setgroups([])
os.setgid(gid)
os.setuid(uid)
back = socket.socket(fileno=number)
for _ in range(count):
    made = socket.socket(socket.AF_UNIX)
    made.connect(address)
    socket.send_fds(back, [b"."], [made.fileno()])
"""
#: More than all connections that honed-web once had for everybody.
MANY = 160
#: The first of ten users of any machine, and root's group.
FIRST_UID, ROOT_GID = 1, 0
#: Kinds that only the kernel can tell apart.
USERS = (Kind.USER, Kind.ADMINISTRATOR)
KINDS = (Kind.UNKNOWN, Kind.TOKEN, Kind.USER, Kind.ADMINISTRATOR, Kind.ROOT)
#: Too long for the kernel's buffers, several times over.
LONG = "/api/jobs/1/predictions?limit=500"


class Activated(Web):
    """honed-web with the sockets of its unit: one over TCP, and a unix socket that every user reaches."""

    def __init__(self, instance: Instance, *arguments: str) -> None:
        tcp, self.unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
        self.unix.bind("")  # the kernel gives it a name, which has no directory
        self.unix.listen(1024)
        numbers = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (tcp, self.unix)]
        words = [sys.executable, "-c", ACTIVATED, ",".join(map(str, numbers)), "--root", str(instance.root)]
        self.log_path = instance.root / "web.log"
        with self.log_path.open("wb") as file:
            self.process = subprocess.Popen(
                [*words, *arguments], stdout=file, stderr=file, env=instance.environment, pass_fds=numbers
            )
        (self.host, self.port), self.address_of_unix = tcp.getsockname(), self.unix.getsockname()
        for each in (tcp, self.unix):
            each.close()
        for number in numbers:
            os.close(number)

    def connect(self, kind: Kind, count: int = 1, *, uid: int = FIRST_UID) -> list[socket.socket]:
        """Connect as a client of this kind; one with the token has yet to show it."""
        if kind in USERS:
            return self._connect_as(uid, ROOT_GID if kind is Kind.ADMINISTRATOR else uid, count)
        made = []
        for _ in range(count):
            each = socket.socket(socket.AF_UNIX if kind is Kind.ROOT else socket.AF_INET)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            # A socket with Python's timeout does not wait for a place in a unix socket's backlog.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(DEADLINE_SEC), 0))
            each.connect(self.address_of_unix if kind is Kind.ROOT else (self.host, self.port))
            made.append(_patient(each))
        return made

    def _connect_as(self, uid: int, gid: int, count: int) -> list[socket.socket]:
        ours, theirs = socket.socketpair()
        words = [str(theirs.fileno()), self.address_of_unix.hex(), str(uid), str(gid), str(count)]
        made: list[socket.socket] = []
        with ours, theirs, subprocess.Popen([sys.executable, "-c", CONNECTED, *words], pass_fds=[theirs.fileno()]):
            ours.settimeout(DEADLINE_SEC)
            while len(made) < count:
                _, numbers, _, _ = socket.recv_fds(ours, 1, 1)
                made += (_patient(socket.socket(fileno=number)) for number in numbers)
        return made

    def ask_as(self, kind: Kind, path: str = "/api/jobs", *, uid: int = FIRST_UID) -> Response:
        """Return the response to a new connection, which is closed."""
        (connection,) = self.connect(kind, uid=uid)
        with connection:
            connection.sendall(head(kind, path))
            return read(connection)


class Response(http.client.HTTPResponse):
    """One that has been read."""

    told: Any  #: its body


def _patient(connection: socket.socket) -> socket.socket:
    connection.settimeout(DEADLINE_SEC)
    return connection


def head(kind: Kind, path: str) -> bytes:
    told = f"Authorization: Bearer {TOKEN}\r\n" if kind is Kind.TOKEN else ""
    return request_head(path).removesuffix(b"\r\n") + f"{told}\r\n".encode()


def read(connection: socket.socket) -> Response:
    response = Response(connection)
    response.begin()
    response.told = json.loads(response.read())
    return response


def is_refusal(response: Response) -> bool:
    """Tell whether this is a 503 for want of a place."""
    if (response.status, response.getheader("Retry-After")) != (503, "5"):
        return False
    return "no free place" in response.told["error"]["message"]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Instance:
    """An instance whose job has long predictions, and a token; honed is down."""
    instance = Instance(tmp_path_factory.mktemp("long"))
    (instance.root / "token").write_text(f"{TOKEN}\n")
    instance.configure(f'{SHARED}[web]\ntoken_file = "{instance.root}/token"\n')
    drain(instance)
    tell_much(instance, answer=HOSTILE + "x" * 50_000)
    return instance


@pytest.fixture
def web(long: Instance) -> Iterator[Activated]:
    # Long enough that nothing here ends because of its time.
    made = Activated(long, "--patience-sec", "3600")
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def need_users(*kinds: Kind) -> None:
    if os.getuid() != 0 and set(kinds) & set(USERS):
        pytest.skip("only root can connect as other users")


def halt(web: Activated) -> None:
    """Stop honed-web where it is, until SIGCONT."""
    web.process.send_signal(signal.SIGSTOP)
    status = Path(f"/proc/{web.process.pid}/stat")
    wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", what="its halt")


@pytest.mark.parametrize("kind", KINDS)
def test_clients_that_read_no_answer_take_only_the_places_of_their_kind(web: Activated, kind: Kind) -> None:
    need_users(kind)
    crowd = []
    for uid in range(FIRST_UID, FIRST_UID + 4):
        crowd += web.connect(kind, MANY // 4, uid=uid)
    for each in crowd:
        with contextlib.suppress(OSError):  # refused
            each.sendall(head(kind, LONG) * 20)
    statuses = [each.recv(12).decode() for each in crowd]  # the beginning; each answer stays unfinished
    stranger = FIRST_UID + 9
    for other in KINDS:
        if other is not kind and (os.getuid() == 0 or other not in USERS):
            assert web.ask_as(other, uid=stranger).status == 200, other
            assert "honed" in web.ask_as(other, "/healthz", uid=stranger).told, other
    assert statuses.count("HTTP/1.1 503") >= MANY - SHARES[kind].num_places
    assert is_refusal(web.ask_as(kind, uid=stranger))
    for each in crowd:
        each.close()
    wait_for(lambda: web.ask_as(kind, uid=stranger).status == 200, what="room")
    assert "Traceback" not in web.log


def test_connections_that_never_finish_a_request_give_way_to_those_that_do(web: Activated) -> None:
    assert web.ask_as(Kind.UNKNOWN).status == 200
    crowd: list[socket.socket] = []
    for _ in range(8):
        more = web.connect(Kind.UNKNOWN, MANY // 4)
        for each in more[::2]:
            each.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        crowd += more
        for kind in (Kind.ROOT, Kind.TOKEN, Kind.UNKNOWN):
            assert web.ask_as(kind).status == 200, kind
            assert "honed" in web.ask_as(kind, "/healthz").told, kind
    assert all(is_refusal(read(each)) for each in crowd[: len(crowd) - SHARES[Kind.ARRIVING].num_places])
    newest = crowd[-1]
    newest.sendall(head(Kind.UNKNOWN, "/api/jobs"))
    assert read(newest).status == 200  # it was slow, and nobody needed its place
    for each in crowd:
        each.close()


def test_a_request_that_comes_with_its_connection_is_read_whatever_comes_behind_it(web: Activated) -> None:
    assert web.ask_as(Kind.UNKNOWN).status == 200
    halt(web)
    (first,) = web.connect(Kind.UNKNOWN)
    first.sendall(head(Kind.UNKNOWN, "/api/jobs"))
    crowd = web.connect(Kind.UNKNOWN, MANY)  # they wait in the kernel
    web.process.send_signal(signal.SIGCONT)
    assert read(first).status == 200
    assert is_refusal(read(crowd[0]))
    for each in (first, *crowd):
        each.close()


def test_idle_connections_that_have_had_an_answer_give_way_in_their_kind(web: Activated) -> None:
    idle = []
    for _ in range(MANY):
        idle += web.connect(Kind.UNKNOWN)
        idle[-1].sendall(head(Kind.UNKNOWN, "/api/jobs"))
        assert read(idle[-1]).status == 200
    assert web.ask_as(Kind.ROOT).status == web.ask_as(Kind.TOKEN).status == 200
    assert idle[0].recv(1) == b""
    for each in idle:
        each.close()


def test_a_users_connections_and_streams_leave_some_to_every_other_user(web: Activated) -> None:
    need_users(Kind.USER)
    share = SHARES[Kind.USER]
    theirs = web.connect(Kind.USER, share.num_per_user + 4)
    assert all(is_refusal(read(each)) for each in theirs[:4])
    answers = []
    for each in theirs[4:]:
        each.sendall(head(Kind.USER, "/api/events"))
        answers.append(each.recv(12))
    assert answers.count(b"HTTP/1.1 200") == share.num_streams_per_user
    assert answers.count(b"HTTP/1.1 503") == share.num_per_user - share.num_streams_per_user
    others = [(kind, web.connect(kind, uid=FIRST_UID + 1)[0]) for kind in (*USERS, Kind.ROOT, Kind.UNKNOWN)]
    for kind, each in others:
        each.sendall(head(kind, "/api/events"))
        assert each.recv(12) == b"HTTP/1.1 200", kind
        each.close()
    assert web.ask_as(Kind.USER, uid=FIRST_UID + 1).status == 200
    for each in theirs:
        each.close()


#: Connects as another user as fast as it can, and asks; of the connections, it keeps a few hundred.
HAMMER = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
address, held = bytes.fromhex(sys.argv[1]), []
print(flush=True)
while os.getppid() == int(sys.argv[2]):
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(1)
    try:
        made.connect(address)
        made.sendall(b"GET / HTTP/1.1\\r\\nHost: localhost\\r\\nX: " + b"a" * 15000)
        held.append(made)
    except OSError:
        made.close()
    if len(held) > 300:
        held.pop(0).close()
"""


def test_who_connects_as_fast_as_it_can_leaves_room_for_root_and_for_others(web: Activated) -> None:
    need_users(Kind.USER)
    assert web.ask_as(Kind.ROOT).status == 200
    words = [sys.executable, "-c", HAMMER, web.address_of_unix.hex(), str(os.getpid()), str(FIRST_UID)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as hammer:
        try:
            assert hammer.stdout is not None
            hammer.stdout.readline()
            for _ in range(6):
                assert web.ask_as(Kind.ROOT).status == 200
                assert web.ask_as(Kind.ADMINISTRATOR, uid=FIRST_UID + 1).status == 200
            assert hammer.poll() is None
        finally:
            hammer.kill()


#: Connects as another user, one after the other, and waits for the answer to the last.
CROWD = """
import os, socket, sys
address, uid, count = bytes.fromhex(sys.argv[1]), *map(int, sys.argv[2:])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
held = []
for _ in range(count):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect(address)
    del held[:-200]
print(held[-1].recv(12).decode())
"""


def test_a_crowd_leaves_room_for_root_while_honed_web_is_busy(web: Activated) -> None:
    need_users(Kind.USER)
    assert web.ask_as(Kind.ROOT).status == 200
    halt(web)
    words = [sys.executable, "-c", CROWD, web.address_of_unix.hex(), str(FIRST_UID), str(2 * BACKLOG)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_SEC, check=True)
    assert ended.stdout == "HTTP/1.1 503\n"
    with socket.socket(socket.AF_UNIX) as root:
        root.setblocking(False)  # it does not wait for room
        root.connect(web.address_of_unix)
        web.process.send_signal(signal.SIGCONT)
        _patient(root).sendall(head(Kind.ROOT, "/api/jobs"))
        assert read(root).status == 200
