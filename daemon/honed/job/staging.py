"""Directories of the copies that `submit --stage` makes; stage.py creates them, honed removes them."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from honed.spec import problem
from honed.system import untrusted
from honed.system.layout import Layout
from honed.system.personpath import PersonPath

#: Pattern of their names.
_PLACE = re.compile(r"[0-9a-f]{16}")


def places(job_spec: Mapping[str, Any], layout: Layout, uid: int) -> list[Path]:
    """Return the directories of copies named in a job that its submitter owns: a spec may name anybody's."""
    paths = []
    names = {place.name for _, text in problem.texts(job_spec) if (place := place_of(Path(text), layout)) is not None}
    with contextlib.suppress(OSError):
        for name, info in untrusted.infos(PersonPath(layout.staged_dir), sorted(names)):
            if stat.S_ISDIR(info.st_mode) and info.st_uid == uid:
                paths.append(layout.staged_dir / name)
    return paths


def place_of(path: Path, layout: Layout) -> Path | None:
    """Return the directory of one job's copies that contains this path; None if none does."""
    if not path.is_relative_to(layout.staged_dir) or ".." in path.parts or path == layout.staged_dir:
        return None
    name = path.relative_to(layout.staged_dir).parts[0]
    return layout.staged_dir / name if _PLACE.fullmatch(name) else None
