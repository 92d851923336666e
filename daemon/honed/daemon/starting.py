"""The `honed` command: it notes signals before it imports the rest of honed, which takes a good part of a second."""

from __future__ import annotations

from collections.abc import Sequence

from honed.daemon import signal_notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `honed` command."""
    signal_notes.listen()
    from honed.daemon import loop  # noqa: PLC0415 - not before the signals are noted

    return loop.main(arguments)
