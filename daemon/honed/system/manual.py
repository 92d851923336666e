"""The man pages of honed on this machine: installed ones, or those of the sources that honed runs from."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import honed

#: What names every key where there is no page.
_INSTEAD = {"honed-job.5": "`honectl schema`", "honed.toml.5": "docs/configuration.md in honed's sources"}


@cache
def all_keys(page: str) -> str:
    """Return the hint that says where a page's keys are listed: `man honed-job` where that is installed."""
    name, _, section = page.rpartition(".")
    data_dir = Path(os.environ.get("XDG_DATA_HOME") or Path("~").expanduser() / ".local/share")
    for place in (Path("/usr/share"), Path("/usr/local/share"), data_dir):
        if any((place / "man" / f"man{section}" / f"{page}{packed}").is_file() for packed in ("", ".gz")):
            return f"`man {name}` lists all keys"
    source = Path(honed.__file__).resolve().parents[2] / "docs/man" / page
    return f"{f'`man {source}`' if source.is_file() else _INSTEAD[page]} lists all keys"
