"""honectl, whose preview renders rows in a process with its imports done: warmpreview.py preview FILE…"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import warm
from honed.cli import honectl


class Preview(warm.Popen):
    """A preview's process, with the imports that its rows need."""

    kind = os.environ.get("HONED_TEST_PREVIEW", "worker")


def run(command: list[str], *, env: dict[str, str], **_keys: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a preview's process, and take what it has written."""
    done = warm.run(command, env=env, popen=Preview)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.encode(), done.stderr.encode())


if __name__ == "__main__":
    subprocess.run = run  # type: ignore[assignment]
    sys.exit(honectl.main())
