"""All errors of honed, as one tree.

    HonedError
    ├── UsageError                         the command line was wrong
    ├── SpecError             spec_invalid
    ├── DatasetError          dataset_invalid
    ├── ModelError            model_invalid
    ├── PrecisionError        precision_mismatch
    ├── MaskError             mask_invalid
    ├── LossError             loss_mismatch
    ├── MemoryShortError      memory_insufficient
    ├── DiskShortError        disk_insufficient
    ├── BackendError          backend_unavailable
    ├── TimeLimitError        time_limit
    ├── OutOfMemoryError      out_of_memory        transient
    ├── DivergedError         diverged
    ├── StalledError          stalled              transient
    ├── RegressedError        regressed
    ├── InterruptedRunError   interrupted          transient
    ├── KilledError           killed               transient
    ├── EnvironmentInvalidError environment_invalid
    ├── ClusterRefusedError   cluster_refused
    ├── DegradedError         degraded
    ├── NotPermittedError     not_permitted
    └── InternalError         error

The code is stable and public; so is the exit status with which a worker ends. An error has a message for people (what
and where) and a hint (what to do). Logs and notices contain both; quotes from a job's files appear only in its evidence
(see quote.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, NotRequired, TypedDict

from honed.system import quote
from honed.system.printable import printable

#: Maximum number of characters of a message. It may quote another person's text, of any length.
MAX_CHARS = 16_000


def plain(text: str, *, max_chars: int = MAX_CHARS) -> str:
    """Replace characters that control a terminal or could fake a log entry, and truncate the text."""
    return printable(text if len(text) <= max_chars else text[: max_chars - 1] + "…", keep="\n")


#: Edits of a job file: dotted key → its new value, null to remove the key. A mapping is merged into the existing one.
Fix = dict[str, Any]


class ErrorRecord(TypedDict):
    """The form of an error in result files, entries and `--json`."""

    code: str
    message: str
    hint: str
    evidence: NotRequired[str]
    fix: NotRequired[Fix]


class HonedError(Exception):
    """An error with a message of one sentence; `hint` says what to do.

    `evidence` is the message with its quotes, if it has any: for those who may read the job, and never for a log. If
    editing the job file helps, `fix` has the edits.
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 70  #: EX_SOFTWARE
    is_transient: ClassVar[bool] = False  #: worth another attempt from the last checkpoint

    def __init__(
        self, message: str, *, hint: str = "", fix: Mapping[str, Any] | None = None, evidence: str = ""
    ) -> None:
        super().__init__(message)
        self.said = message  #: with its quotes marked: for an error that is derived from this one
        self.message = plain(quote.hide(message))
        whole = plain(evidence or quote.show(message))
        self.evidence = whole if whole != self.message else ""
        self.hint = plain(quote.hide(hint))
        self.fix: Fix = dict(fix or {})
        self.key: str = ""  #: the dotted key of the job file that is at fault; see problem.locate
        self.line: int | None = None
        self.is_refusal = False  #: a check's verdict on a job file, not a failure

    def __str__(self) -> str:
        return self.message

    @property
    def told(self) -> str:
        """The message for those who may read the job."""
        return self.evidence or self.message

    def surround(self, before: str = "", after: str = "") -> None:
        """Put text around the message, such as its position."""
        self.said, self.message = (f"{before}{text}{after}" for text in (self.said, self.message))
        self.evidence = self.evidence and f"{before}{self.evidence}{after}"

    def without(self, before: str) -> None:
        """Remove text from the beginning of the message, such as its position."""
        self.said, self.message, self.evidence = (
            text.removeprefix(before) for text in (self.said, self.message, self.evidence)
        )

    def as_dict(self) -> ErrorRecord:
        """Return the record; `evidence` and `fix` only if they are not empty."""
        record: ErrorRecord = {"code": self.code, "message": self.message, "hint": self.hint}
        if self.evidence:
            record["evidence"] = self.evidence
        if self.fix:
            record["fix"] = self.fix
        return record


class UsageError(HonedError):
    """A command was called with invalid arguments."""

    code = "usage"
    exit_status = 2


class SpecError(HonedError):
    """An invalid job file; each problem names its key and line."""

    code = "spec_invalid"
    exit_status = 78  #: EX_CONFIG


class QuotingError(HonedError):
    """An error that quotes names and values of files; line breaks in them are replaced."""

    def __init__(
        self, message: str, *, hint: str = "", fix: Mapping[str, Any] | None = None, evidence: str = ""
    ) -> None:
        message, hint, evidence = (text.replace("\n", "⏎") for text in (message, hint, evidence))
        super().__init__(message, hint=hint, fix=fix, evidence=evidence)


class DatasetError(QuotingError):
    """A data set that is missing, does not parse, or has no row to train on."""

    code = "dataset_invalid"
    exit_status = 65  #: EX_DATAERR


def unreadable(kind: type[HonedError], where: object, error: OSError) -> HonedError:
    """Return the error for a file that honed may not read."""
    return kind(f"{where}: {error.strerror or error}", hint="check that the job's submitter can read it")


class ModelError(QuotingError):
    """A base model directory that is incomplete or cannot be read."""

    code = "model_invalid"
    exit_status = 66  #: EX_NOINPUT


class PrecisionError(HonedError):
    """The loaded model does not match the plan, and this cannot be fixed."""

    code = "precision_mismatch"
    exit_status = 80


class MaskError(HonedError):
    """The trained tokens are not the assistant's turns; the message shows them decoded."""

    code = "mask_invalid"
    exit_status = 81


class LossError(HonedError):
    """The trained loss differs from the loss computed from the model's own logits."""

    code = "loss_mismatch"
    exit_status = 89


class MemoryShortError(HonedError):
    """The job can never fit in the device's memory."""

    code = "memory_insufficient"
    exit_status = 82


class DiskShortError(HonedError):
    """Not enough disk space for checkpoints or output."""

    code = "disk_insufficient"
    exit_status = 73  #: EX_CANTCREAT
    needed_bytes: int = 0  #: bytes that must be free for the job to continue, if known


class TimeLimitError(HonedError):
    """The job's own time_limit_sec is over; its checkpoint is kept."""

    code = "time_limit"
    exit_status = 88


class BackendError(HonedError):
    """The chosen backend cannot train this model here; the daemon falls back if the job allows it."""

    code = "backend_unavailable"
    exit_status = 69  #: EX_UNAVAILABLE


class OutOfMemoryError(HonedError):
    """The device's or the machine's memory ran out during the run."""

    code = "out_of_memory"
    exit_status = 83
    is_transient = True


class DivergedError(HonedError):
    """Losses, gradients or weights are not finite any more, or the gradient exploded."""

    code = "diverged"
    exit_status = 84


class StalledError(HonedError):
    """No progress for too long."""

    code = "stalled"
    exit_status = 85
    is_transient = True


class RegressedError(HonedError):
    """The model ended worse than it began, by the job's own guard."""

    code = "regressed"
    exit_status = 86


class InterruptedRunError(HonedError):
    """Stopped on request, with a checkpoint."""

    code = "interrupted"
    exit_status = 75  #: EX_TEMPFAIL
    is_transient = True


class KilledError(HonedError):
    """The worker died without a result file: by a signal or an exit."""

    code = "killed"
    exit_status = 87
    is_transient = True


class EnvironmentInvalidError(HonedError):
    """This machine or its installation cannot run the job: versions, permissions, a missing package."""

    code = "environment_invalid"
    exit_status = 72  #: EX_OSFILE


class ClusterRefusedError(HonedError):
    """The cluster will never take such a job; the message has its words."""

    code = "cluster_refused"
    exit_status = 79


class DegradedError(HonedError):
    """A fault of the machine, such as a full disk, keeps honed from answering a request."""

    code = "degraded"
    exit_status = 74  #: EX_IOERR


class NotPermittedError(HonedError):
    """The requested object belongs to another user."""

    code = "not_permitted"
    exit_status = 77  #: EX_NOPERM


class InternalError(HonedError):
    """An unexpected exception: a bug in honed or a library."""

    code = "error"
    exit_status = 70  #: EX_SOFTWARE


BY_CODE: dict[str, type[HonedError]] = {
    error.code: error
    for error in (
        UsageError,
        SpecError,
        DatasetError,
        ModelError,
        PrecisionError,
        MaskError,
        LossError,
        MemoryShortError,
        DiskShortError,
        BackendError,
        TimeLimitError,
        OutOfMemoryError,
        DivergedError,
        StalledError,
        RegressedError,
        InterruptedRunError,
        KilledError,
        EnvironmentInvalidError,
        ClusterRefusedError,
        NotPermittedError,
        InternalError,
    )
}


def from_dict(data: Mapping[str, Any]) -> HonedError:
    """Rebuild an error that another process stored with `as_dict`; an unknown code becomes an internal error."""
    kind = BY_CODE.get(data.get("code", ""), InternalError)
    fix = data.get("fix")
    return kind(
        data.get("message", ""),
        hint=data.get("hint", ""),
        fix=fix if isinstance(fix, dict) else None,
        evidence=data.get("evidence", ""),
    )


def said(error: BaseException, *, is_brief: bool = False) -> str:
    """Return an exception's message, or its first line, as part of a sentence. Messages of the operating system are
    public; a library's message may quote its input, and is marked.
    """
    if isinstance(error, HonedError):
        return error.said
    text, is_of_the_system = str(error), isinstance(error, OSError) and error.errno is not None
    text = text.partition("\n")[0] if is_brief else text
    if is_of_the_system or isinstance(error, ImportError | MemoryError | json.JSONDecodeError):
        return text
    # torch's own exception classes concern the device; messages about tensors are RuntimeErrors.
    is_harmless = not text or quote.is_marked(text) or type(error).__module__ in {"sqlite3", "torch"}
    return text if is_harmless else quote.mark(text)
