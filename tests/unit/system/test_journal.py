"""The journal's native protocol, with a socket that receives as journald does."""

from __future__ import annotations

import ast
import fcntl
import logging
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import honed
from honed.job.job import Job
from honed.system import journal, message
from honed.system.error import BY_CODE
from honed.system.journal import Journal
from honed.system.log import JournalHandler, about


class Receiver:
    """journald's end: complete entries, also those that come as a sealed memfd."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(60)

    def receive(self) -> dict[str, str]:
        data, fds, _, _ = socket.recv_fds(self.socket, 1 << 20, 1)
        for fd in fds:
            seals = fcntl.fcntl(fd, 1034)  # F_GET_SEALS
            assert seals & 0x0F == 0x0F, "journald maps sealed memory only"
            with os.fdopen(fd, "rb") as file:
                file.seek(0)
                data = file.read()
        return decode(data)


def decode(data: bytes) -> dict[str, str]:
    """Parse an entry according to the protocol."""
    fields = {}
    while data:
        line, _, rest = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (size,) = struct.unpack_from("<Q", rest)
            value, rest = rest[8 : 8 + size], rest[8 + size :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        fields[name.decode()] = value.decode()
        data = rest
    return fields


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(tmp_path / "socket")
    yield made
    made.socket.close()


def logger_to(receiver: Receiver) -> logging.Logger:
    logger = logging.Logger("honed.test")
    logger.addHandler(JournalHandler(Journal(receiver.path)))
    return logger


def job() -> Job:
    return Job(id=7, name="capitals", submitted_at=0.0, source="a.yaml", uid=1000, output_dir="/o")


@given(st.dictionaries(st.from_regex(r"[A-Z][A-Z0-9_]{0,20}", fullmatch=True), st.text(st.characters(codec="utf-8"))))
def test_every_text_arrives_as_it_was(fields: dict[str, str]) -> None:
    assert decode(journal.encode(fields)) == fields


@pytest.mark.parametrize("name", ["_PID", "message", "A=B", "", "1X", "É", "A B"])
def test_a_field_that_journald_would_drop_in_silence_is_a_bug(name: str) -> None:
    with pytest.raises(ValueError, match="journal field"):
        journal.encode({name: "x"})


def test_an_entry_has_its_fields_its_priority_and_its_explanation(receiver: Receiver) -> None:
    logger_to(receiver).warning(
        "job %d (%s): attempt %d: %s",
        7,
        "capitals",
        1,
        "diverged",
        extra=about(job(), message.of_error("diverged"), code="diverged", step=12, loss=float("nan"), hint=None),
    )
    entry = receiver.receive()
    assert entry["MESSAGE"] == "job 7 (capitals): attempt 1: diverged"
    assert entry["PRIORITY"] == "4"
    assert entry["SYSLOG_IDENTIFIER"] == "honed"
    assert entry["MESSAGE_ID"] == message.of_error("diverged")
    assert {key: entry[key] for key in entry if key.startswith("HONED_") and key != "HONED_LOGGER"} == {
        "HONED_JOB": "7",
        "HONED_NAME": "capitals",
        "HONED_STATE": "queued",
        "HONED_CODE": "diverged",
        "HONED_STEP": "12",
        "HONED_LOSS": "nan",
    }
    assert entry["CODE_FILE"] == __file__


def test_what_begins_with_a_job_belongs_to_it_without_being_told(receiver: Receiver) -> None:
    logger_to(receiver).info("job %d (%s): waits", 7, "capitals")
    assert receiver.receive()["HONED_JOB"] == "7"
    logger_to(receiver).info("%d jobs wait", 7)
    assert "HONED_JOB" not in receiver.receive()


LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
#: What code calls a job, an arrival with a job's number, and a job that Slurm has.
JOBS = {"job", "job_id", "claim", "handed", "running", "rebuilt"}


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield each call of a logger in honed, with its place."""
    package = Path(honed.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log") | ast.Attribute(attr="log"), attr=level)):
                    if level in LEVELS:
                        yield f"{path.relative_to(package)}:{node.lineno}", node


def is_of_a_job(call: ast.Call) -> bool:
    """Tell whether an entry is about one job: by its text, or by the values that it names."""
    names = {each.id for arg in call.args for each in ast.walk(arg) if isinstance(each, ast.Name)}
    names |= {each.attr for arg in call.args for each in ast.walk(arg) if isinstance(each, ast.Attribute)}
    text = next((arg.value for arg in call.args if isinstance(arg, ast.Constant)), "")
    return bool(names & JOBS) or re.search(r"\bjob %", str(text)) is not None


def names_its_job(call: ast.Call) -> bool:
    for keyword in call.keywords:
        match keyword:
            case ast.keyword(arg="extra", value=ast.Call(args=[ast.Constant(value=None), *_] | [])):
                pass
            case ast.keyword(arg="extra"):
                return True
    text = next((arg.value for arg in call.args if isinstance(arg, ast.Constant)), "")
    return str(text).startswith("job %d")


def test_every_entry_about_a_job_is_found_by_its_number() -> None:
    calls = [(place, call) for place, call in log_calls() if is_of_a_job(call)]
    assert len(calls) > 50
    assert [place for place, call in calls if not names_its_job(call)] == []


def test_a_traceback_is_one_entry(receiver: Receiver) -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger_to(receiver).exception("a step failed")
    text = receiver.receive()["MESSAGE"]
    assert text.startswith("a step failed\nTraceback")
    assert "in test_a_traceback_is_one_entry" in text
    assert text.endswith("ValueError: …"), "which may quote anything"


def test_an_entry_larger_than_a_datagram_goes_as_a_sealed_memfd(receiver: Receiver) -> None:
    sender = Journal(receiver.path)
    sender._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender.send({"MESSAGE": "x" * 600_000, "HONED_JOB": 7})
    entry = receiver.receive()
    assert len(entry["MESSAGE"]) == 600_000
    assert entry["HONED_JOB"] == "7"


def test_what_the_journal_does_not_take_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("honed.test")
    logger.addHandler(JournalHandler(Journal(tmp_path / "nobody")))
    logger.error("two\nlines")
    assert capsys.readouterr().err == "<3>two\n<3>    lines\n"


def test_text_from_a_job_file_paints_no_terminal(receiver: Receiver) -> None:
    logger_to(receiver).info("job %d (%s)", 7, "\x1b[31mred", extra=about(7, name="\x1b]0;title\x07"))
    entry = receiver.receive()
    assert "\x1b" not in entry["MESSAGE"] + entry["HONED_NAME"]


def test_the_journal_is_used_only_where_it_reads_our_own_stderr() -> None:
    """JOURNAL_STREAM is inherited: a child whose stderr is redirected must ignore it."""
    code = "from honed.system import log; print(type(log._handler()).__name__)"
    read_fd, write_fd = os.pipe()
    info = os.fstat(write_fd)
    environment = os.environ | {"JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino}"}
    elsewhere = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert elsewhere.stdout == b"StreamHandler\n"
    assert journal.is_read_from(write_fd, environment)
    os.close(read_fd)
    os.close(write_fd)


CATALOG = Path(__file__).parents[3] / "units/honed.catalog"


def test_every_error_is_explained_and_every_id_is_its_own() -> None:
    assert set(message.BY_ERROR) == set(BY_CODE)
    ids = [*(value for name, value in vars(message).items() if name.isupper() and isinstance(value, str))]
    ids += message.BY_ERROR.values()
    assert len(set(ids)) == len(ids)
    assert all(len(bytes.fromhex(each)) == 16 for each in ids)
    _, *entries = re.split("^-- ", CATALOG.read_text(), flags=re.MULTILINE)
    assert sorted(entry[:32] for entry in entries) == sorted(ids)
    for entry in entries:
        head, text = entry[33:].split("\n\n", 1)
        assert [line.partition(": ")[0] for line in head.splitlines()] == ["Subject", "Defined-By", "Documentation"]
        assert max(map(len, text.splitlines())) <= 77, "a terminal has 80 columns, of which journalctl takes three"


def test_systemd_itself_can_read_the_catalog(tmp_path: Path) -> None:
    place = tmp_path / "usr/lib/systemd/catalog"
    place.mkdir(parents=True)
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    (place / "honed.catalog").write_text(CATALOG.read_text())
    try:
        subprocess.run(["journalctl", f"--root={tmp_path}", "--update-catalog"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs journalctl")
    done = subprocess.run(
        ["journalctl", f"--root={tmp_path}", "--list-catalog"], check=True, capture_output=True, text=True
    )
    assert len(done.stdout.splitlines()) == CATALOG.read_text().count("\n-- ")
    assert f"{message.of_error('stalled')} honed: The job made no progress and was stopped" in done.stdout


def test_where_there_is_no_journal_lines_have_their_priority_in_front() -> None:
    code = (
        "import logging; from honed.system import log\n"
        "log.set_up(verbose=False); logging.warning('a fact', extra=log.about(7))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stderr == "<4>a fact\n"
