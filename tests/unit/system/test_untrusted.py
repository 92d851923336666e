"""No file that a worker puts in place of its own misleads honed or blocks it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.job import event
from honed.run.outcome import judge
from honed.run.runner import Exit, has_ended, read_exit_record
from honed.system import untrusted
from honed.system.layout import Layout
from honed.system.personpath import PersonPath


def _link(path: Path) -> None:
    secret = path.parents[3] / "secret"
    secret.write_text('{"event": "step", "time": 1, "start": 1, "outcome": "succeeded"}\n')
    path.symlink_to(secret)


def _linked_directory(path: Path) -> None:
    elsewhere = path.parents[3] / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / path.name).write_text('{"event": "step", "time": 1, "start": 1, "outcome": "succeeded"}\n')
    path.parent.rmdir()
    path.parent.symlink_to(elsewhere)


def _without_end(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


PLANTED: dict[str, Callable[[Path], None]] = {
    "a link": _link,
    "a directory that is a link": _linked_directory,
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def _plain(path: PersonPath) -> Path:
    plain = Path(str(path))
    plain.parent.mkdir(parents=True, exist_ok=True)
    return plain


def plant(what: str, path: PersonPath) -> None:
    (PLANTED | {"a file without end": _without_end})[what](_plain(path))


@pytest.mark.parametrize("what", PLANTED)
def test_events_are_read_from_a_plain_file_alone(tmp_path: Path, what: str) -> None:
    path = Layout(tmp_path).files(7).attempt(1).events_path
    plant(what, path)
    with pytest.raises(OSError, match=str(path)):
        event.read(path, 0)


@pytest.mark.parametrize("what", PLANTED | {"a file without end": _without_end})
def test_a_result_and_an_exit_are_read_from_a_plain_file_alone(tmp_path: Path, what: str) -> None:
    attempt = Layout(tmp_path).files(7).attempt(1)
    plant(what, attempt.result_path)
    outcome = judge(attempt.result_path, Exit(0, None))
    assert outcome.code == "killed"
    assert outcome.error is not None
    assert "left a result.json that cannot be read" in outcome.error.message
    attempt = Layout(tmp_path / "other").files(7).attempt(1)
    plant(what, attempt.exit_path)
    assert read_exit_record(attempt, 1) is None


def test_without_descriptors_nobody_takes_a_worker_for_one_that_left_no_record(tmp_path: Path) -> None:
    attempt = Layout(tmp_path).files(7).attempt(1)
    untrusted.make_dirs(attempt.dir)
    untrusted.write_plain(attempt.exit_path, b'{"start": 1}')
    assert has_ended(attempt, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            untrusted.make_dirs(attempt.dir)  # and not that it exists, which would fail its job
        with pytest.raises(OSError, match="Too many open files"):
            read_exit_record(attempt, 1)
        is_over = has_ended(attempt, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not is_over


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    path = PersonPath(tmp_path) / "attempts/1/result.json"
    _plain(path).write_text("{}")
    assert json.loads(untrusted.read_plain(path)) == {}


@pytest.mark.parametrize("what", ["a link", "a pipe"])
def test_what_lies_in_the_way_of_a_file_that_is_written_whole_is_put_away(tmp_path: Path, what: str) -> None:
    """The worker can write to its job's directory: the temporary file of start.json could be anything."""
    path = Layout(tmp_path).files(7).start_path
    plant(what, path.with_name(f".{path.name}.tmp"))
    untrusted.write_plain(path, b'{"number": 1}')
    assert json.loads(untrusted.read_plain(path)) == {"number": 1}


def test_a_file_that_somebody_holds_open_beside_it_is_not_written_to(tmp_path: Path) -> None:
    path = PersonPath(tmp_path) / "start.json"
    with (tmp_path / ".start.json.tmp").open("w+") as held:
        untrusted.write_plain(path, b'{"number": 1}')
        held.write("theirs")
        held.flush()
        assert json.loads(untrusted.read_plain(path)) == {"number": 1}


@pytest.mark.parametrize("what", ["a link", "a pipe"])
def test_what_is_planted_in_place_of_a_file_is_replaced(tmp_path: Path, what: str) -> None:
    attempt = Layout(tmp_path).files(7).attempt(1)
    plant(what, attempt.exit_path)
    place = Path(str(attempt.dir))
    (place / ".exit.json.tmp").symlink_to(tmp_path / "elsewhere")
    untrusted.write_plain(attempt.exit_path, b'{"start": 2}')
    assert read_exit_record(attempt, 2) == {"start": 2}
    assert [path.name for path in place.iterdir()] == ["exit.json"]
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_in_the_way_of_a_temporary_file_prevents_nothing(tmp_path: Path) -> None:
    path = PersonPath(tmp_path) / "start.json"
    (tmp_path / ".start.json.tmp").mkdir()
    untrusted.write_plain(path, b"1")
    assert untrusted.read_plain(path) == b"1"
    assert sorted(untrusted.names_in(PersonPath(tmp_path))) == [".start.json.tmp", "start.json"]


@pytest.mark.parametrize("what", ["a directory", "a directory that is a link"])
def test_nothing_is_written_through_a_directory_that_is_planted(tmp_path: Path, what: str) -> None:
    attempt = Layout(tmp_path).files(7).attempt(1)
    plant(what, attempt.exit_path)
    with pytest.raises(OSError, match=r"exit\.json|attempts/1"):
        untrusted.write_plain(attempt.exit_path, b'{"start": 2}')
    assert not [path for path in tmp_path.rglob("exit.json") if path.is_file() and b"2" in path.read_bytes()]


def test_nothing_behind_a_link_is_listed_renamed_or_removed(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/a").write_text("a")
    (tmp_path / "job").mkdir()
    (tmp_path / "job/link").symlink_to(tmp_path / "theirs")
    link = PersonPath(tmp_path / "job") / "link"
    for act in (
        lambda: untrusted.names_in(link),
        lambda: untrusted.remove(link / "a"),
        lambda: untrusted.rename(link / "a", link / "b"),
        lambda: untrusted.make_dir(link / "c"),
        lambda: untrusted.info(link / "a"),
    ):
        with pytest.raises(NotADirectoryError):
            act()
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["a"]
    assert (untrusted.exists(link), untrusted.exists(link / "a"), untrusted.is_dir(link)) == (True, False, False)
    untrusted.remove(link)
    assert not os.path.lexists(tmp_path / "job/link")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to a user")
def test_a_file_of_another_user_does_not_count_where_the_owner_does(tmp_path: Path) -> None:
    path = tmp_path / "entry.json"
    path.write_text("{}")
    os.chown(path, 4321, -1)
    with pytest.raises(OSError, match="a file of the user 4321"):
        untrusted.read_plain(PersonPath(tmp_path) / path.name, owners={0})
    assert untrusted.read_plain(PersonPath(tmp_path) / path.name, owners={0, 4321}) == b"{}"
    assert untrusted.read_plain(PersonPath.own(path), owners={0}) == b"{}", "its own program asks for no owner"


# -- mounts ------------------------------------------------------------------------------------------------------------

#: Mounts a file system of a program that never answers, as FUSE lets everybody, and a file over another.
MOUNTS = """
import ctypes, os, sys
from pathlib import Path
from typing import Any
from honed.system import untrusted
from honed.system.personpath import PersonPath

root = Path(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
if libc.mount(b"hangs", os.fsencode(root / "job/hangs"), b"fuse", 0, options):
    sys.exit(77)
if libc.mount(os.fsencode(root / "secret"), os.fsencode(root / "job/file"), None, 4096, None):
    sys.exit(77)

def fault(act):
    try:
        act()
    except OSError as error:
        return error.strerror

job = PersonPath(root / "job")
for path in (job / "hangs", job / "file"):
    assert untrusted.exists(path)
    assert not untrusted.is_dir(path)
    for act in (untrusted.info, untrusted.read_plain, untrusted.names_in):
        assert fault(lambda: act(path)) == "another file system is mounted there", (path, act)
assert [name for name, _ in untrusted.infos(job, ["hangs", "file", "gone", "plain"])] == ["plain"]
for act in (untrusted.info, untrusted.read_plain, untrusted.names_in, untrusted.remove, untrusted.make_dir):
    assert fault(lambda: act(job / "hangs/more")) == "another file system is mounted there", act
for act in (  # the kernel says EBUSY, as of a fault of the machine
    lambda: untrusted.write_plain(job / "file", b""),
    lambda: untrusted.remove(job / "file"),
    lambda: untrusted.rename(job / "file", job / "other"),
):
    assert fault(act) == "another file system is mounted there"
assert untrusted.read_plain(PersonPath.own(root / "job/file")) == b"secret"
assert libc.mount(os.fsencode(root / "secret"), os.fsencode(root / "job/.late.tmp"), None, 4096, None) == 0
untrusted.write_plain(job / "late", b"late")  # by another name: no mount beside a file keeps it from being replaced
assert untrusted.read_plain(job / "late") == b"late"
assert libc.mount(b"jobs", os.fsencode(root / "job"), b"tmpfs", 0, None) == 0  # by an administrator
untrusted.write_plain(job / "a", b"a")
assert untrusted.read_plain(job / "a") == b"a"
print("held")
"""


def test_what_a_person_has_mounted_is_neither_entered_nor_asked(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "job/hangs").mkdir(parents=True)
    for name in ("file", "plain", ".late.tmp"):
        (tmp_path / "job" / name).touch()
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", MOUNTS, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    if done.returncode == 77 or "unshare failed" in done.stderr or "/dev/fuse" in done.stderr:
        pytest.skip("cannot mount here")
    assert done.stdout == "held\n", done.stderr


# -- the type ----------------------------------------------------------------------------------------------------------


def test_no_function_of_python_opens_it(tmp_path: Path) -> None:
    path = PersonPath(tmp_path) / "a"
    (tmp_path / "a").touch()
    acts: tuple[Any, ...] = (open, os.stat, os.open, Path, os.listdir, os.unlink)
    for act in acts:
        with pytest.raises(TypeError):
            act(path)


@pytest.mark.parametrize("names", ["..", "a/../b", "/etc", "", ".", "a//b"])
def test_a_name_leads_only_down(names: str) -> None:
    with pytest.raises(ValueError, match="not a name below"):
        PersonPath(Path("/x")) / names


def test_its_root_is_not_a_persons() -> None:
    path = PersonPath(Path("/x")) / "a/b.yaml"
    assert (str(path), path.name, path.stem, path.suffix) == ("/x/a/b.yaml", "b.yaml", "b", ".yaml")
    assert str(path.parent.parent) == "/x"
    with pytest.raises(ValueError, match="not a person's"):
        _ = path.parent.parent.parent
    assert path.with_name("c") == PersonPath.of(Path("/x/a/c"), 2)
