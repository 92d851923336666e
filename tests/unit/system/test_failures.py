"""Items of a step that fail: none of them keeps another from its turn, and nothing fails in silence for ever."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3

import pytest

from honed.system import durable
from honed.system.failures import Failures


def fail(failures: Failures, what: str, error: Exception) -> None:
    with failures.alone(what):
        raise error


@pytest.fixture
def failures() -> Failures:
    return Failures(logging.getLogger("test"))


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/var/x")


def test_one_that_fails_holds_up_no_other(failures: Failures) -> None:
    done = []
    for number in range(4):
        with failures.alone(f"job {number}"):
            if number % 2:
                raise LookupError("ours")
            done.append(number)
    assert done == [0, 2]
    assert (failures.num_unforeseen, failures.fault) == (2, "")


def test_the_first_fault_of_the_machine_is_told_until_the_next_pass(failures: Failures) -> None:
    fail(failures, "a", LookupError("ours"))
    fail(failures, "b", full())
    fail(failures, "c", OSError(errno.EIO, "bad"))
    assert failures.fault == "/var/x: No space left on device"
    failures.begin()
    assert (failures.num_unforeseen, failures.fault) == (0, "")


def test_a_fault_of_the_machine_is_logged_with_its_traceback_the_third_time_in_a_row(
    failures: Failures, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        fail(failures, "job 1", full())
    assert not caplog.records
    for _ in range(3):
        fail(failures, "job 1", full())
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert "job 1" in record.message
    assert "3 times in a row" in record.message


def test_an_error_of_ours_is_logged_at_once_and_the_third_time_and_then_no_more(
    failures: Failures, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        fail(failures, "job 1", LookupError("ours"))
    assert len(caplog.records) == 2
    assert all(each.exc_info for each in caplog.records)


def test_a_success_between_ends_the_row_and_other_steps_and_items_do_not(
    failures: Failures, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(6):
        failures.step = "follow"
        fail(failures, "job 1", full())
        if number % 2:
            with failures.alone("job 1"):
                pass
    assert not caplog.records
    for _ in range(3):
        failures.step = "follow"
        fail(failures, "job 1", full())
        failures.step = "settle"
        with failures.alone("job 1"):
            pass
    assert len(caplog.records) == 1


def test_what_is_remembered_of_items_does_not_grow_for_ever(failures: Failures) -> None:
    for number in range(5000):
        fail(failures, f"job {number}", full())
    assert len(failures._last) <= 1000


@pytest.mark.parametrize(
    "number",
    [
        *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
        *(errno.ENXIO, errno.EINVAL, errno.EFBIG),
    ],
)
def test_what_a_submitter_can_cause_is_no_fault_of_the_machine(number: int) -> None:
    assert durable.machine_fault(OSError(number, os.strerror(number))) is None


@pytest.mark.parametrize(
    "number",
    [
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBUSY, errno.ENOLCK, errno.ECONNREFUSED, errno.ETIMEDOUT),
    ],
)
def test_every_other_error_is_one(number: int) -> None:
    assert durable.machine_fault(OSError(number, os.strerror(number))) == os.strerror(number)


def test_neither_an_error_without_a_number_nor_one_of_ours_is_one() -> None:
    assert durable.machine_fault(OSError("odd")) is None
    assert durable.machine_fault(LookupError("odd")) is None
    assert durable.machine_fault(sqlite3.OperationalError("no such table")) is None
    assert durable.machine_fault(MemoryError()) == "Cannot allocate memory"


class OfLibraryError(OSError):
    """As PyAV's, whose number tells of the file."""

    __module__ = "av.error"


@pytest.mark.parametrize(
    ("cause", "is_machines"),
    [
        (OSError(errno.EIO, "bad"), True),
        (OSError(errno.EMFILE, "bad"), True),
        (OSError(errno.EACCES, "bad"), False),
        (OSError(errno.ENOENT, "bad"), False),
        (OfLibraryError(errno.EIO, "bad"), False),
        (MemoryError(), False),
    ],
)
def test_the_fault_behind_an_error_is_found_unless_a_submitter_can_cause_it(
    cause: Exception, is_machines: bool
) -> None:
    middle, last = ValueError("middle"), RuntimeError("last")
    last.__cause__, middle.__cause__ = middle, cause
    assert durable.cause_at_persons(last) is (cause if is_machines else None)
    assert durable.cause_at_persons(ValueError("without a cause")) is None
