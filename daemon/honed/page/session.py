"""The session of an instance's owner: a link with a token, which a browser exchanges for a cookie.

run/honed/web.json          the address of the honed-web that serves the instance, and the token of its links; mode
                            0600, locked while that honed-web runs
run/honed/web-open.html     a page that leads to the link, mode 0600: a browser is given this page's address, since
                            every user of the machine can read a command line

Only `--root` and `--user` instances have sessions. Every honed-web has a new token; the cookie is derived from it,
so it ends with honed-web, too. Both count only from a process of the instance's owner, or of root.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from honed.system.layout import Layout

#: Bytes of the file, at most.
MAX_BYTES = 4096
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


def _address_path(layout: Layout) -> Path:
    return layout.runtime_dir / "web.json"


def opening_path(layout: Layout) -> Path:
    """Return the path of the page that leads a browser to the link."""
    return layout.runtime_dir / "web-open.html"


@dataclass(frozen=True, repr=False)  # a token is never logged
class Link:
    """The address of a running honed-web, `http://127.0.0.1:8470/`, and its token."""

    address: str
    token: str

    def __str__(self) -> str:
        return f"{self.address}login?token={self.token}"


@dataclass(frozen=True, repr=False)
class Session:
    """The owner's session with one honed-web, which holds the lock until it ends."""

    link: Link
    fd: int

    def opens(self, token: str) -> bool:
        """Return True for the token of the link."""
        return equal(token, self.link.token)

    @property
    def cookie(self) -> str:
        """The cookie's value."""
        return hmac.new(self.link.token.encode(), b"honed-web session", hashlib.sha256).hexdigest()

    def has(self, header: str, port: int) -> bool:
        """Return True if a Cookie header has the cookie."""
        pairs = (part.strip().partition("=") for part in header.split(";"))
        return any(name == cookie_name(port) and equal(value, self.cookie) for name, _, value in pairs)

    def end(self) -> None:
        """Make the link invalid: nobody finds the address in the file any more."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, 0)
        os.close(self.fd)


def cookie_name(port: int) -> str:
    """Return the cookie's name; browsers keep the cookies of all ports together."""
    return f"honed-{port}"


def set_cookie(session: Session, port: int) -> str:
    """Return the Set-Cookie header of a login; the browser forgets the cookie when it closes."""
    return f"{cookie_name(port)}={session.cookie}; Path=/; HttpOnly; SameSite=Strict"


def begin(layout: Layout, address: str) -> Session | None:
    """Return the session of the honed-web at this address. None if another one serves the instance, if the instance is
    the system's or another user's, or if it has no directory for the file."""
    if layout.is_of_system:
        return None
    try:
        if layout.runtime_dir.stat().st_uid != os.getuid():
            return None
        fd = os.open(_address_path(layout), os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
    except OSError:
        return None
    try:
        _check(fd)
        _lock(fd)
        link = Link(address, secrets.token_urlsafe(32))
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(asdict(link)).encode(), 0)
    except OSError:  # BlockingIOError as well
        os.close(fd)
        return None
    return Session(link, fd)


def _lock(fd: int) -> None:
    """Lock the file, or raise BlockingIOError; `find` has a lock for a moment."""
    for pause_sec in (0.02, 0.1, None):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if pause_sec is None:
                raise
            time.sleep(pause_sec)
        else:
            return


def find(layout: Layout) -> Link | None:
    """Return the link of the honed-web that serves the instance; None if none does, or only another user's."""
    try:
        fd = os.open(_address_path(layout), os.O_RDONLY | _OPEN)
    except OSError:
        return None
    try:
        _check(fd)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None  # nobody has locked it
        record = json.loads(os.pread(fd, MAX_BYTES, 0))
        return Link(str(record["address"]), str(record["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(fd)


def _check(fd: int) -> None:
    """Raise OSError unless the file is a regular one of our own: others could write an address of theirs."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
        raise PermissionError


def equal(shown: str, token: str) -> bool:
    """Compare in a time that reveals nothing of either, not even its length."""
    digests = (hashlib.sha256(item.encode(errors="replace")).digest() for item in (shown, token))
    return hmac.compare_digest(*digests)
