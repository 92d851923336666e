"""The outcome of an attempt, from two sources: the worker's result file and its process's exit.

An error that the worker reports is believed, and so is a success: the worker writes its result last, once its output is
durable, and however its process ends after that, the work is done. A worker that died without a result (by a signal or
an exit) is `killed`, and retried.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field, replace
from typing import Any

from honed.job import event
from honed.run.runner import Exit
from honed.system import durable, error, untrusted
from honed.system.layout import JobFiles
from honed.system.personpath import PersonPath

SUCCEEDED = "succeeded"
#: Bytes of a result. Ours have some kilobytes, with a long error some hundred; JSON of 16 MiB can take ten seconds.
MAX_RESULT_BYTES = 1024 * 1024
#: Maximum number of characters of a remark.
MAX_REMARK = 400


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt; `code` is `succeeded` or the code of an error."""

    code: str
    error: error.HonedError | None = None
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    phase: str = ""  #: the phase that the worker was in, as it reported
    needed_bytes: int = 0  #: free space that it needs to resume
    remark: str = ""  #: a caveat about a success

    @property
    def is_success(self) -> bool:
        return self.code == SUCCEEDED

    @property
    def is_worth_another_backend(self) -> bool:
        """True if a new process with another backend may succeed: this backend failed, or could not run as planned and
        noticed before the first step was trained.
        """
        is_before_training = not self.step
        is_other = self.code in {error.PrecisionError.code, error.LossError.code}
        return self.code == error.BackendError.code or (is_other and is_before_training)


def judge(result_path: PersonPath, ended: Exit, *, is_readable: bool = True) -> Outcome:
    """Combine the worker's result with its exit.

    Raises OSError if a fault of the machine prevents reading the result. With `is_readable` false, only the exit
    counts.
    """
    result = _read(result_path) if is_readable else None
    if not isinstance(result, dict):
        return _of(_died(ended, left=result or "no result"), Outcome(SUCCEEDED))
    known = Outcome(
        SUCCEEDED,
        step=step if isinstance(step := result.get("step"), int) and 0 <= step < 2**62 else None,
        metrics=_mapping(result.get("metrics")),
        artifacts={key: str(value) for key, value in _mapping(result.get("artifacts")).items() if value},
        remark=error.plain(str(result.get("remark") or "")).replace("\n", " ")[:MAX_REMARK],
        phase=str(result.get("phase") or "")[:32],
        needed_bytes=number if type(number := result.get("needed_bytes")) is int and 0 < number < 2**62 else 0,
    )
    if result.get("outcome") == SUCCEEDED:
        # Doing the work again would be a second success; a library may crash while Python ends.
        # A result of a worker that never began is an earlier start's.
        if ended.status == 0 or (ended.ran and _has_output(result_path, known.artifacts)):
            return replace(known, remark="; ".join(filter(None, [known.remark, _late_end(ended)]))[:MAX_REMARK])
        return _of(_died(ended), known)
    reported = result.get("error")
    if not isinstance(reported, dict):
        reported = error.InternalError("the worker failed without an error message").as_dict()
    return _of(error.from_dict({key: value if key == "fix" else str(value) for key, value in reported.items()}), known)


def _late_end(ended: Exit) -> str:
    """Return the remark on how a worker ended after its result; empty if it exited with 0, or nobody saw it end."""
    if ended.signal is not None:
        return f"its worker was killed by {_signal_name(ended.signal)} after it had finished"
    if ended.status is None and ended.service_result is not None:
        return f"its worker's end was recorded as {ended.service_result} after it had finished"
    return f"its worker exited with status {ended.status} after it had finished" if ended.status else ""


def _has_output(result_path: PersonPath, artifacts: dict[str, str]) -> bool:
    """Return False if the output should be in the job's own directory, and is not. Other places are the submitter's,
    where the daemon does not look."""
    output_dir = JobFiles(result_path.parent.parent.parent).output_dir
    return artifacts.get("output_dir") != str(output_dir) or untrusted.exists(output_dir)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _of(problem: error.HonedError, outcome: Outcome) -> Outcome:
    return replace(outcome, code=problem.code, error=problem)


def _read(path: PersonPath) -> dict[str, Any] | str | None:
    """Return the worker's result; None if it left none, and what it left instead if that is not one."""
    try:
        result = event.encodable(json.loads(untrusted.read_plain(path, max_bytes=MAX_RESULT_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as problem:
        if durable.machine_fault(problem):
            raise
        why = problem.strerror if isinstance(problem, OSError) else "not JSON"
        return f"a {path.name} that cannot be read: {why}"
    return result if isinstance(result, dict) else f"a {path.name} that is not an object"


#: The hint for a SIGKILL by the kernel; unlike a MemoryError or a CUDA error, the process cannot catch it.
_OUT_OF_MEMORY_HINT = (
    "the machine, or the unit with its MemoryMax=, ran out of memory: use a smaller batch or fewer data loaders, run "
    "it at another time, or add memory; see `journalctl -k` for the kernel's report"
)


def _died(ended: Exit, *, left: str = "no result") -> error.HonedError:
    match ended:
        case Exit(service_result="watchdog"):
            return error.StalledError(
                "systemd's watchdog ended the worker because it made no progress",
                hint="its log contains the stacks of all threads: honectl logs",
            )
        case Exit(service_result="oom-kill") | Exit(was_out_of_memory=True):
            return error.OutOfMemoryError(
                "the kernel's out-of-memory killer ended the worker", hint=_OUT_OF_MEMORY_HINT
            )
        case Exit(problem=error.HonedError() as problem):
            return problem
        case Exit(ran=False):
            status = f" (exit status {ended.status})" if ended.status is not None else ""
            return error.EnvironmentInvalidError(
                f"its unit could not start the worker{status}",
                hint="journalctl -u honed-job@ID -u honed-view@ID shows the failing line of the unit; see also "
                "honectl doctor",
            )
        case Exit(service_result="timeout"):
            return error.KilledError(
                "systemd killed the worker: it did not start, or did not stop, in time",
                hint="see jobs.stop_timeout_sec, and TimeoutStartSec= and TimeoutStopSec= of honed-job@.service",
            )
        case Exit(signal=int(number)):
            hint = (
                "SIGKILL is often sent by the kernel's out-of-memory killer: see `journalctl -k`"
                if number == signal.SIGKILL
                else ""
            )
            return error.KilledError(f"the worker was killed by {_signal_name(number)}", hint=hint)
        case Exit(status=0):
            return error.KilledError(
                f"the worker exited with status 0 but left {left}", hint="see its log: honectl logs"
            )
        case Exit(status=int(status)):
            return error.KilledError(
                f"the worker exited with status {status} and left {left}", hint="see its log: honectl logs"
            )
        case _:
            return error.KilledError(
                "the worker disappeared without an exit status",
                hint="the machine went down, or the worker's shim was killed",
            )
