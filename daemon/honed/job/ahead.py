"""What the daemon and a staged worker agree on: the pass that opens its gate, and how it knows that it has one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from honed.system import durable
from honed.system.layout import JobLayout

#: In a staged worker's environment: the number of its start.
STAGED_VARIABLE = "HONED_STAGED"


@dataclass(frozen=True)
class Pass:
    """The content of gate.json: this start of this attempt may use the device that the environment names."""

    number: int
    start: int
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, job: JobLayout) -> None:
        """Write gate.json atomically. Raises OSError."""
        durable.write_json(job.gate_path, self.__dict__, mode=0o640)

    @classmethod
    def from_json(cls, data: bytes) -> Pass:
        """Parse gate.json. Raises ValueError if it is not one."""
        raw = json.loads(data)
        try:
            environment = {str(name): str(value) for name, value in raw["environment"].items()}
            return cls(int(raw["number"]), int(raw["start"]), environment)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a pass: {error!r}") from error


def has_passed(job: JobLayout, number: int, start: int) -> bool:
    """Return True if this start of a staged worker was let through its gate."""
    try:
        found = Pass.from_json(job.gate_path.read_bytes())
    except (OSError, ValueError):
        return False
    return (found.number, found.start) == (number, start)
