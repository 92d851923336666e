"""The fence of a worker on another machine: a start whose end is recorded puts nothing into place any more.

A node that a cluster has given up may go on. Its start is settled, by exit.json, before another one begins; the worker
looks for that before every rename of a checkpoint or an output.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from honed.system.error import InterruptedRunError

#: START:PATH of exit.json, in the environment of a worker that may outlive its start.
VARIABLE = "HONED_FENCE"


def require_current() -> None:
    """Raise InterruptedRunError if this worker's start was settled by others."""
    start, _, path = os.environ.get(VARIABLE, "").partition(":")
    if not path:
        return
    try:
        settled = json.loads(Path(path).read_bytes())["start"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return
    if isinstance(settled, int) and settled >= int(start):
        raise InterruptedRunError("the end of this start is recorded, and another may have begun: nothing is written")
