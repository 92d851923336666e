"""Users' rights to read and write paths, compared with the kernel's own answer."""

from __future__ import annotations

import grp
import itertools
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.system import access
from honed.system.access import ENTER, READ, WRITE, Acl, Person

#: A user and a group that own nothing on this machine.
STRANGER = Person(54321, frozenset({54321, 54322}), "stranger")


def may_really(path: Path, who: Person, wanted: int) -> bool:
    """Ask the kernel, in a child process that becomes that user."""
    code = (
        f"import os; os.setgroups({sorted(who.gids)}); os.setgid({min(who.gids)}); os.setuid({who.uid})\n"
        f"print(os.access({str(path)!r}, {wanted}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"True\n"


def supports_acls(path: Path) -> bool:
    return access.set_acl(path, Acl(7, 5, 5, {STRANGER.uid: 5}, {}))


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that everybody can enter; pytest's own are closed."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path.resolve()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def test_an_acl_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    acl = Acl(owner=6, group=4, other=0, users={1000: 4, 7: 6}, groups={42: 4})
    if not access.set_acl(path, acl):
        pytest.skip("no ACLs on this file system")
    found = access.acl_of(path)
    assert found is not None
    assert (found.owner, found.group, found.other, found.users, found.groups) == (6, 4, 0, {7: 6, 1000: 4}, {42: 4})
    assert found.mask == 6
    assert stat.S_IMODE(path.stat().st_mode) == 0o660  # the mask stands where the group's bits were


@needs_root
@pytest.mark.parametrize(("is_shared", "everybody"), [(False, 0), (True, READ | ENTER)])
def test_a_job_directory_is_its_workers_group_and_its_submitters(
    open_dir: Path, is_shared: bool, everybody: int
) -> None:
    access.open_job_dir(open_dir, STRANGER.uid, is_shared=is_shared, administrators=42)
    before = access.acl_of(open_dir)
    if before is None:
        pytest.skip("no ACLs on this file system")
    assert (before.group, before.users) == (READ | ENTER, {STRANGER.uid: READ | ENTER}), "nobody else writes yet"
    access.give_job_dir(open_dir)
    found = access.acl_of(open_dir)
    assert found is not None
    everything = READ | WRITE | ENTER
    submitter = everything if access.is_person(STRANGER.uid) else READ | ENTER
    assert (found.owner, found.group, found.mask, found.other) == (everything, everything, everything, everybody)
    assert (found.users, found.groups) == ({STRANGER.uid: submitter}, {42: READ | ENTER})
    below = open_dir / "below"
    below.mkdir()
    inherited = access.acl_of(below)
    assert inherited is not None
    assert (inherited.group, inherited.users, inherited.groups) == (found.group, found.users, found.groups)


def test_what_a_worker_makes_at_the_moment_it_may_write_can_be_removed_by_honed(
    open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that inherited the ACL of before was closed to honed, and stayed when its job was pruned."""
    access.open_job_dir(open_dir, STRANGER.uid, is_shared=False)
    if access.acl_of(open_dir) is None:
        pytest.skip("no ACLs on this file system")
    setxattr, groups = os.setxattr, []

    def set_and_look(path: Path, name: str, value: bytes) -> None:
        setxattr(path, name, value)
        mine, acl = open_dir / f"made-{len(groups)}", access.acl_of(open_dir)
        mine.mkdir()
        inherited = access.acl_of(mine)
        assert acl is not None
        assert inherited is not None
        groups.append((acl.group, inherited.group))

    monkeypatch.setattr(os, "setxattr", set_and_look)
    access.give_job_dir(open_dir)
    everything = READ | WRITE | ENTER
    assert groups[-1] == (everything, everything)
    assert all(inherited == everything for may_write, inherited in groups if may_write & WRITE)


@needs_root
@pytest.mark.parametrize("wanted", [READ, WRITE, READ | ENTER])
def test_modes_and_acls_are_weighed_as_the_kernel_does(open_dir: Path, wanted: int) -> None:
    cases = []
    for n, (owner, group, mode) in enumerate(
        itertools.product((0, STRANGER.uid), (0, 54322), (0o640, 0o604, 0o660, 0o707))
    ):
        path = open_dir / f"mode-{n}"
        path.touch()
        os.chown(path, owner, group)
        path.chmod(mode)
        cases.append(path)
    acls = [
        Acl(6, 0, 0, {STRANGER.uid: 7}, {}),
        Acl(6, 7, 7, {STRANGER.uid: 0}, {}),
        Acl(6, 0, 7, {}, {54322: 4}),
        Acl(6, 0, 7, {1000: 7}, {}),
        Acl(6, 0, 0, {STRANGER.uid: 7}, {}, mask=4),
        Acl(6, 4, 0, {}, {54321: 2, 54322: 5}),
    ]
    for n, acl in enumerate(acls if supports_acls(open_dir) else []):
        path = open_dir / f"acl-{n}"
        path.touch()
        access.set_acl(path, acl)
        cases.append(path)
    ours = {path.name: access.may(path, STRANGER, wanted) for path in cases}
    theirs = {path.name: may_really(path, STRANGER, wanted) for path in cases[:4] + cases[-len(acls) :]}
    assert {name: ours[name] for name in theirs} == theirs


def test_the_first_thing_in_the_way_is_named(open_dir: Path) -> None:
    home = open_dir / "anna"
    (home / "data").mkdir(parents=True)
    (home / "data/rows.jsonl").touch()
    home.chmod(0o700)
    found = access.obstacle(home / "data/rows.jsonl", STRANGER)
    assert found is not None
    assert str(found).startswith(f"{home} (mode 0700, ")
    assert str(found).endswith("cannot be entered by the user stranger")
    home.chmod(0o711)
    assert access.obstacle(home / "data/rows.jsonl", STRANGER) is None
    assert access.obstacle(home / "data/missing", STRANGER) is None
    (home / "data/rows.jsonl").chmod(0o600)
    assert "cannot be read" in str(access.obstacle(home / "data/rows.jsonl", STRANGER))


def test_a_link_is_followed_through_every_directory_on_its_way(open_dir: Path) -> None:
    closed, through = open_dir / "closed", open_dir / "open"
    for directory in (closed, through):
        directory.mkdir(mode=0o755)
    (closed / "rows.jsonl").touch()
    (through / "rows.jsonl").symlink_to("../closed/rows.jsonl")
    closed.chmod(0o700)
    found = access.obstacle(through / "rows.jsonl", STRANGER)
    assert found is not None
    assert found.path == closed
    (through / "loop").symlink_to("loop")
    assert access.obstacle(through / "loop", STRANGER) is None  # opening it raises the error


def test_a_number_that_no_user_has_is_somebody_without_groups() -> None:
    assert access.person(54321) == Person(54321, frozenset(), "user 54321")
    assert access.person("no-such-user-here") is None


def test_an_instance_elsewhere_has_no_workers_user_of_its_own(tmp_path: Path) -> None:
    assert not access.has_workers_user(tmp_path)
    assert access.worker_of(tmp_path, 1000, tmp_path) is None


@needs_root
def test_who_can_write_a_file_besides_its_owner_is_told(open_dir: Path) -> None:
    """The users and groups are real: `daemon` and `bin` each have a group of which they are the only member."""
    daemon, bin_ = access.person("daemon"), access.person("bin")
    assert daemon is not None
    assert bin_ is not None
    alone = min(set(range(60000, 60100)) - {each.gr_gid for each in grp.getgrall()})
    cases: dict[str, tuple[int, int, Acl | None, str]] = {
        "0644": (0o644, bin_.uid, None, ""),
        "its owner's own group": (0o664, daemon.uid, None, ""),
        "a group without other members": (0o664, alone, None, ""),
        "another's group": (0o664, bin_.uid, None, "the group bin"),
        "everybody": (0o646, daemon.uid, None, "everybody"),
        "a named user": (0, daemon.uid, Acl(6, 4, 4, {bin_.uid: 6}, {}), "the user bin"),
        "a named user who may read": (0, daemon.uid, Acl(6, 4, 4, {bin_.uid: 4}, {}), ""),
        "root and the owner": (0, daemon.uid, Acl(6, 4, 4, {0: 6, daemon.uid: 6}, {}), ""),
        "a masked user": (0, daemon.uid, Acl(6, 4, 4, {bin_.uid: 6}, {}, mask=4), ""),
        "a named group": (0, daemon.uid, Acl(6, 4, 4, {}, {bin_.uid: 6}), "the group bin"),
        "others, by an ACL": (0, daemon.uid, Acl(6, 4, 6, {bin_.uid: 4}, {}), "everybody"),
    }
    told = {}
    for name, (mode, gid, acl, _) in cases.items():
        path = open_dir / name
        path.touch()
        os.chown(path, daemon.uid, gid)
        path.chmod(mode)
        if acl is not None and not access.set_acl(path, acl):
            continue
        with path.open() as file:
            told[name] = access.other_writers(file.fileno())
    assert told == {name: wanted for name, (*_, wanted) in cases.items() if name in told}
    assert len(told) >= 5


@needs_root
def test_who_can_put_something_else_in_a_paths_place(tmp_path: Path) -> None:
    """The owner of a directory above the path can, whoever can write to one, and in a sticky one the entry's owner.
    Links are followed, and the result is empty where nobody else can replace the path."""

    def make(name: str, uid: int = 0, mode: int = 0o755) -> Path:
        path = tmp_path / name
        path.mkdir()
        os.chown(path, uid, 0)
        path.chmod(mode)
        return path

    def is_kept(path: Path) -> bool:
        return access.replacer(path) == ""

    hers = make("hers", STRANGER.uid)
    assert is_kept(hers), "its name is not hers"
    make("hers/roots")
    assert access.replacer(hers / "roots") == f"the user {STRANGER.uid}, the owner of {hers}"
    assert access.replacer(hers / "missing" / "more").startswith("the user")
    assert is_kept(tmp_path / "missing" / "more")
    everybodys = make("everybodys", mode=0o777)
    assert access.replacer(everybodys / "missing") == f"everybody, with write permission for {everybodys}"
    sticky = make("sticky", mode=0o1777)
    make("sticky/hers", STRANGER.uid)
    make("sticky/roots")
    assert is_kept(sticky)
    assert is_kept(sticky / "roots" / "below")
    assert [is_kept(sticky / name) for name in ("hers", "missing")] == [False, False]
    (tmp_path / "link").symlink_to(hers / "roots")
    (tmp_path / "good").symlink_to(sticky / "roots")
    (sticky / "link").symlink_to(tmp_path)
    assert [is_kept(tmp_path / "link"), is_kept(tmp_path / "good"), is_kept(sticky / "link")] == [False, True, False]
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="symbolic links"):
        access.replacer(tmp_path / "round")
    if supports_acls(listed := make("listed")):
        assert is_kept(listed / "x"), "who may enter and no more"
        access.set_acl(listed, Acl(7, 5, 5, {STRANGER.uid: 7}, {}))
        assert access.replacer(listed / "x") == f"the user {STRANGER.uid}, with write permission for {listed}"
    os.chown(grouped := make("grouped", mode=0o775), 0, 54322)
    assert is_kept(grouped / "x"), "a group without members"
    os.chown(grouped, 0, grp.getgrnam("nogroup").gr_gid)
    assert "the group nogroup" in access.replacer(grouped / "x")
