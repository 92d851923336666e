"""The options that honed's programs share."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from honed import __version__
from honed.system import layout


def add_root(parser: ArgumentParser, *, metavar: str | None = None) -> None:
    parser.add_argument(
        "--root",
        type=Path,
        metavar=metavar,
        default=layout.default_root(),
        help="root directory of the instance (default: $HONED_ROOT or /)",
    )


def add_verbose(parser: ArgumentParser) -> None:
    parser.add_argument("--verbose", action="store_true", help="log debug messages")


def add_version(parser: ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"{parser.prog} {__version__}")
