"""Every way in which honed says no, as one tree.

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
    └── InternalError         error

The code is stable and public; so is the exit status with which a worker ends. An error is a sentence for a person
(what and where), and a hint (what to do). Logs and notices have both; what the sentence quotes of a job's files, its
evidence alone has (see quote.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from honed.system import quote

#: Characters of a message. What it quotes is another person's text, of any length.
MAX_CHARS = 16_000


def plain(text: str, *, max_chars: int = MAX_CHARS) -> str:
    """A text that no terminal acts on, no log takes for two entries and no reader drowns in: it may quote anything."""
    cut = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return (
        cut if cut.isprintable() else "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in cut)
    )


class HonedError(Exception):
    """What went wrong, in one sentence; `hint` says what to do.

    `evidence` is the sentence with what it quotes, where it quotes anything: for those who may read the job, and for no
    log. Where an edit of the job file is the remedy, `fix` has it as data: dotted key → its new value, null to take the
    key out. A mapping is laid over the one that is there.
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 70  #: EX_SOFTWARE
    is_transient: ClassVar[bool] = False  #: worth another attempt from the last checkpoint

    def __init__(
        self, message: str, *, hint: str = "", fix: Mapping[str, Any] | None = None, evidence: str = ""
    ) -> None:
        super().__init__(message)
        self.said = message  #: its quotes marked: for an error that is made of this one
        self.message = plain(quote.hide(message))
        whole = plain(evidence or quote.show(message))
        self.evidence = whole if whole != self.message else ""
        self.hint = plain(quote.hide(hint))
        self.fix = dict(fix or {})
        self.key: str = ""  #: of a job file, dotted, where one is at fault; see problem.locate
        self.line: int | None = None
        self.is_refusal = False  #: said of a job file by a check, which is an answer, not a failure

    def __str__(self) -> str:
        return self.message

    @property
    def told(self) -> str:
        """The sentence for those who may read the job."""
        return self.evidence or self.message

    def surround(self, before: str = "", after: str = "") -> None:
        """Put words around the sentence, such as its place."""
        self.said, self.message = (f"{before}{text}{after}" for text in (self.said, self.message))
        self.evidence = self.evidence and f"{before}{self.evidence}{after}"

    def as_dict(self) -> dict[str, Any]:
        """As it stands in result files, entries and `--json`; `evidence` and `fix` only where there are any."""
        more = {"evidence": self.evidence, "fix": self.fix}
        return {"code": self.code, "message": self.message, "hint": self.hint} | {k: v for k, v in more.items() if v}


class UsageError(HonedError):
    """A command was called with words that it does not take."""

    code = "usage"
    exit_status = 2


class SpecError(HonedError):
    """A job file that is not a job; each problem names its key and line."""

    code = "spec_invalid"
    exit_status = 78  #: EX_CONFIG


class QuotingError(HonedError):
    """One that quotes names and values of files: a line break among them does not begin a line of ours."""

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
    """The refusal of a file that the system does not let honed read."""
    return kind(f"{where}: {error.strerror or error}", hint="can the job's submitter read it?")


class ModelError(QuotingError):
    """A base model directory that is incomplete or cannot be read."""

    code = "model_invalid"
    exit_status = 66  #: EX_NOINPUT


class PrecisionError(HonedError):
    """What was loaded is not what was planned, and cannot be mended."""

    code = "precision_mismatch"
    exit_status = 80


class MaskError(HonedError):
    """The trained tokens are not the assistant's turns; the message shows them decoded."""

    code = "mask_invalid"
    exit_status = 81


class LossError(HonedError):
    """The loss that would be trained is not the one that the model's own logits have."""

    code = "loss_mismatch"
    exit_status = 89


class MemoryShortError(HonedError):
    """The job can never fit in the device's memory."""

    code = "memory_insufficient"
    exit_status = 82


class DiskShortError(HonedError):
    """No room for checkpoints or output."""

    code = "disk_insufficient"
    exit_status = 73  #: EX_CANTCREAT
    needed_bytes: int = 0  #: where it is known how much must be free for the job to go on


class TimeLimitError(HonedError):
    """The job's own time_limit_sec is over; its checkpoint is kept."""

    code = "time_limit"
    exit_status = 88


class BackendError(HonedError):
    """The chosen backend cannot train this model here; the daemon falls back where the job allows it."""

    code = "backend_unavailable"
    exit_status = 69  #: EX_UNAVAILABLE


class OutOfMemoryError(HonedError):
    """The device's or the machine's memory ran out during the run."""

    code = "out_of_memory"
    exit_status = 83
    is_transient = True


class DivergedError(HonedError):
    """Losses, gradients or weights are no numbers any more, or the gradient exploded."""

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
    """The worker died without a word: a signal, or an exit without its result file."""

    code = "killed"
    exit_status = 87
    is_transient = True


class EnvironmentInvalidError(HonedError):
    """This machine or its installation cannot run the job: versions, permissions, a missing package."""

    code = "environment_invalid"
    exit_status = 72  #: EX_OSFILE


class NotPermittedError(HonedError):
    """What was asked for is somebody else's."""

    code = "not_permitted"
    exit_status = 77  #: EX_NOPERM


class InternalError(HonedError):
    """An exception that nobody foresaw: a bug of ours or of a library."""

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
        NotPermittedError,
        InternalError,
    )
}


def from_dict(data: Mapping[str, Any]) -> HonedError:
    """The error that another process wrote down with `as_dict`; an unknown code is an internal error."""
    kind = BY_CODE.get(data.get("code", ""), InternalError)
    fix = data.get("fix")
    return kind(
        data.get("message", ""),
        hint=data.get("hint", ""),
        fix=fix if isinstance(fix, dict) else None,
        evidence=data.get("evidence", ""),
    )


def said(error: BaseException, *, is_brief: bool = False) -> str:
    """An exception's words, or the first line of them, as a part of a sentence. Those of the system are for everybody;
    a library's may quote whatever it was given, and are marked."""
    if isinstance(error, HonedError):
        return error.said
    text, is_of_the_system = str(error), isinstance(error, OSError) and error.errno is not None
    text = text.partition("\n")[0] if is_brief else text
    if is_of_the_system or isinstance(error, ImportError | MemoryError | json.JSONDecodeError):
        return text
    # Classes of torch's own are of the device; what it says of tensors is a RuntimeError.
    is_harmless = not text or quote.is_marked(text) or type(error).__module__ in {"sqlite3", "torch"}
    return text if is_harmless else quote.mark(text)
