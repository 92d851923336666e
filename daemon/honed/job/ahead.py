"""What the daemon and a worker ahead of its turn agree on: the pass for its gate, and how it knows of the gate."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

from honed.system import durable, untrusted
from honed.system.layout import JobFiles

#: In such a worker's environment: the number of its start.
STAGED_VARIABLE = "HONED_STAGED"
#: Key of the device of an attempt that ended before it had one.
NO_DEVICE_KEY = "none"
#: Bytes of gate.json that are read.
MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Pass:
    """The content of gate.json: this start of this attempt may use the device that the environment names."""

    number: int
    start: int
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, job: JobFiles) -> None:
        """Write gate.json atomically. Raises OSError."""
        untrusted.write_plain(job.gate_path, durable.as_json(self.__dict__), mode=0o640)

    @classmethod
    def from_json(cls, data: bytes) -> Pass:
        """Parse gate.json. Raises ValueError if it is not one."""
        raw = json.loads(data)
        try:
            environment = {str(name): str(value) for name, value in raw["environment"].items()}
            return cls(int(raw["number"]), int(raw["start"]), environment)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a pass: {error!r}") from error


def has_passed(job: JobFiles, number: int, start: int) -> bool:
    """Return True if this start of such a worker was let through its gate, by this user: the job's could write a pass
    of its own, or put a pipe in its place."""
    try:
        given = Pass.from_json(untrusted.read_plain(job.gate_path, max_bytes=MAX_BYTES, owners={os.geteuid()}))
    except (OSError, ValueError, RecursionError):
        return False
    return (given.number, given.start) == (number, start)
