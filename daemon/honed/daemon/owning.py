"""The spool's lock, as the daemon takes it: a short holder, such as `honectl prune`, is waited for."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from honed.daemon import signal_notes
from honed.job import lock
from honed.system.error import EnvironmentInvalidError
from honed.system.notify import Notifier

log = logging.getLogger(__name__)

#: Seconds asked of systemd at a time while honed starts.
START_EXTENSION_SEC = 60.0
#: Seconds between tries to take the lock.
RETRY_SEC = 0.1


def take(path: Path, notifier: Notifier) -> int:
    """Take the spool's lock, and return its descriptor. Raises EnvironmentInvalidError if another daemon has it, and
    SystemExit if a signal asks honed to end meanwhile."""
    words = ""
    while (fd := lock.take(path, is_daemon=True)) is None:
        holder = lock.holder(path)
        if holder.is_daemon:
            raise EnvironmentInvalidError(
                f"{path.parent}: another honed instance uses this spool ({holder.words})",
                hint="stop it, or run this one with a different --root",
            )
        if holder.words != words:
            words = holder.words
            log.info("waiting for the lock of %s, which %s has", path.parent, words)
        notifier.status(f"waiting for the spool's lock, which {words} has")
        keep_starting(notifier)
        time.sleep(RETRY_SEC)
    return fd


def keep_starting(notifier: Notifier) -> None:
    """Ask systemd for more time. Raises SystemExit if a signal asks honed to end, which may cut a start anywhere."""
    if signal_notes.is_asked_to_end():
        log.info("asked to stop before the start was complete")
        raise SystemExit(0)
    notifier.extend_start(START_EXTENSION_SEC)
