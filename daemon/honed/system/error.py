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
import os
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


#: Every class of error that has a code of its own, in the order of this module.
BY_CODE: dict[str, type[HonedError]] = {}


class HonedError(Exception):
    """An error with a message of one sentence; `hint` says what to do.

    `evidence` is the message with its quotes, if it has any: for those who may read the job, and never for a log. If
    editing the job file helps, `fix` has the edits.
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = os.EX_SOFTWARE
    is_transient: ClassVar[bool] = False  #: worth another attempt from the last checkpoint
    message_id: ClassVar[str]  #: of its entries in the journal; see message.py

    def __init_subclass__(
        cls, *, code: str = "", exit_status: int = 0, is_transient: bool = False, message_id: str = ""
    ) -> None:
        """Register what the class is declared with; a class without a code has that of the class above it."""
        super().__init_subclass__()
        if code:
            cls.code, cls.exit_status, cls.is_transient, cls.message_id = code, exit_status, is_transient, message_id
            BY_CODE[code] = cls

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
    def shown(self) -> str:
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


class UsageError(HonedError, code="usage", exit_status=2, message_id="5b58aff6b6e44d97b47234122bdfbaa4"):
    """A command was called with invalid arguments."""


class SpecError(
    HonedError, code="spec_invalid", exit_status=os.EX_CONFIG, message_id="d0af395785874ddeb04faeec6a2c0aa4"
):
    """An invalid job file; each problem names its key and line."""


class QuotingError(HonedError):
    """An error that quotes names and values of files; line breaks in them are replaced."""

    def __init__(
        self, message: str, *, hint: str = "", fix: Mapping[str, Any] | None = None, evidence: str = ""
    ) -> None:
        message, hint, evidence = (text.replace("\n", "⏎") for text in (message, hint, evidence))
        super().__init__(message, hint=hint, fix=fix, evidence=evidence)


class DatasetError(
    QuotingError, code="dataset_invalid", exit_status=os.EX_DATAERR, message_id="24a60176db434f8399cf5898d64c4c56"
):
    """A data set that is missing, does not parse, or has no row to train on."""


def unreadable(kind: type[HonedError], where: object, error: OSError) -> HonedError:
    """Return the error for a file that honed may not read."""
    return kind(f"{where}: {error.strerror or error}", hint="check that the job's submitter can read it")


class ModelError(
    QuotingError, code="model_invalid", exit_status=os.EX_NOINPUT, message_id="6f804e657f364761b0ea25709a1be694"
):
    """A base model directory that is incomplete or cannot be read."""


class PrecisionError(
    HonedError, code="precision_mismatch", exit_status=80, message_id="14bfde8a94304347b84fee2b67d6f82b"
):
    """The loaded model does not match the plan, and this cannot be fixed."""


class MaskError(HonedError, code="mask_invalid", exit_status=81, message_id="31b10404f6e24275ac8ced0d98706bc7"):
    """The trained tokens are not the assistant's turns; the message shows them decoded."""


class LossError(HonedError, code="loss_mismatch", exit_status=89, message_id="1b5151d11ddc4a15a9574499c463171d"):
    """The trained loss differs from the loss computed from the model's own logits."""


class MemoryShortError(
    HonedError, code="memory_insufficient", exit_status=82, message_id="3ee3fcd3adeb413ba19cc1fac94984a8"
):
    """The job can never fit in the device's memory."""


class DiskShortError(
    HonedError, code="disk_insufficient", exit_status=os.EX_CANTCREAT, message_id="443438c1d40743ee93a5fcb2d9494bb9"
):
    """Not enough disk space for checkpoints or output."""

    needed_bytes: int = 0  #: bytes that must be free for the job to continue, if known


class TimeLimitError(HonedError, code="time_limit", exit_status=88, message_id="3fe1ca692ba0430db5f01a6f1028f8a7"):
    """The job's own time_limit_sec is over; its checkpoint is kept."""


class BackendError(
    HonedError, code="backend_unavailable", exit_status=os.EX_UNAVAILABLE, message_id="f71ddfa85a88494a9de6b17249e16eca"
):
    """The chosen backend cannot train this model here; the daemon falls back if the job allows it."""


class OutOfMemoryError(
    HonedError, code="out_of_memory", exit_status=83, is_transient=True, message_id="af187078ace14253aee6769740b0157f"
):
    """The device's or the machine's memory ran out during the run."""


class DivergedError(HonedError, code="diverged", exit_status=84, message_id="270981e1204e405b9f9fe28c8a1caa34"):
    """Losses, gradients or weights are not finite any more, or the gradient exploded."""


class StalledError(
    HonedError, code="stalled", exit_status=85, is_transient=True, message_id="e0af951fba68482fae9e801ddbfe3e71"
):
    """No progress for too long."""


class RegressedError(HonedError, code="regressed", exit_status=86, message_id="6423d527204f43bf92fc51381083f032"):
    """The model ended worse than it began, by the job's own guard."""


class InterruptedRunError(
    HonedError,
    code="interrupted",
    exit_status=os.EX_TEMPFAIL,
    is_transient=True,
    message_id="39f45bc572bd488b9b73533540ba5818",
):
    """Stopped on request, with a checkpoint."""


class KilledError(
    HonedError, code="killed", exit_status=87, is_transient=True, message_id="d28b1d4f69084e50921f2e91dce8e281"
):
    """The worker died without a result file: by a signal or an exit."""


class EnvironmentInvalidError(
    HonedError, code="environment_invalid", exit_status=os.EX_OSFILE, message_id="21b351d0277d47d79d2fcab1eea24aac"
):
    """This machine or its installation cannot run the job: versions, permissions, a missing package."""


class ClusterRefusedError(
    HonedError, code="cluster_refused", exit_status=79, message_id="22f086c1f2894aefa7e5e54fdcf17360"
):
    """The cluster will never take such a job; the message has its words."""


class DegradedError(
    HonedError, code="degraded", exit_status=os.EX_IOERR, message_id="985ff6aefff045e6b320ba7558626cfa"
):
    """A fault of the machine, such as a full disk, keeps honed from answering a request."""


class NotPermittedError(
    HonedError, code="not_permitted", exit_status=os.EX_NOPERM, message_id="dbad8421069948a49b43daaa4f2aac6d"
):
    """The requested object belongs to another user."""


class InternalError(
    HonedError, code="error", exit_status=os.EX_SOFTWARE, message_id="1309030d35e449caa2442b3c1f6c8c59"
):
    """An unexpected exception: a bug in honed or a library."""


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
