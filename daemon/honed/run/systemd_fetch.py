"""Fetches as units, honed-fetch@N.service: they have network access, which honed lacks, and outlive the daemon."""

from __future__ import annotations

import contextlib
import logging
import signal

from honed.run.fetcher import is_locked
from honed.system.dbus import NO_SUCH_UNIT, BusError, Systemd
from honed.system.layout import Layout

log = logging.getLogger(__name__)


class UnitFetchRunner:
    """Fetches as units. A unit's request is in its file; its state comes from systemd, else from its lock."""

    def __init__(self, layout: Layout, systemd: Systemd) -> None:
        self._layout = layout
        self._systemd = systemd

    def start(self, number: int) -> None:
        self._systemd.start_unit(_unit_name(number))

    def is_running(self, number: int) -> bool:
        if is_locked(self._layout.fetch(number)):
            return True
        with contextlib.suppress(BusError):
            state = self._systemd.unit_state(_unit_name(number))
            return state is not None and not state.is_over
        return False

    def stop(self, number: int, *, at_once: bool = False) -> None:
        try:
            if at_once:
                self._systemd.kill_unit(_unit_name(number), "all", signal.SIGKILL)
            else:
                self._systemd.stop_unit(_unit_name(number))
        except BusError as error:
            if error.name != NO_SUCH_UNIT:  # its deadline ends it anyway
                log.warning("%s cannot be stopped: %s", _unit_name(number), error)

    def close(self) -> None:
        """Do nothing: the units outlive the daemon."""


def _unit_name(number: int) -> str:
    return f"honed-fetch@{number}.service"
