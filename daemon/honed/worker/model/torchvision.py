"""A torchvision that was built for another torch: mended enough for transformers to import it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

#: Operators that torchvision describes to torch on import, whether its compiled half has defined them or not.
_DESCRIBED = ("nms", "qnms")

_LIBRARY: Any = None  #: a library of operators ends with the object that stands for it


def mend() -> None:
    """From now on, define what torchvision's compiled half would, where it does not load, once torchvision is imported.

    The registries have no torchvision for a torch without CUDA. Beside one, `import torchvision` ends in `operator
    torchvision::nms does not exist`, and with it the import of nearly any model. Processors use none of the two.
    Nothing is imported here: Unsloth wants to be before torch.
    """
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torchvision where it is, and has its operators looked after before it runs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is None or found.loader is None or found.origin is None:
            return found
        execute, directory = found.loader.exec_module, Path(found.origin).parent

        def execute_mended(module: ModuleType) -> None:
            _define_missing(directory)
            execute(module)

        found.loader.exec_module = execute_mended  # type: ignore[method-assign]
        return found


def _define_missing(directory: Path) -> None:
    global _LIBRARY  # noqa: PLW0603 - see there
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        for compiled in directory.glob("_C*.so"):
            torch.ops.load_library(str(compiled))
    except OSError:
        _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
        for name in _DESCRIBED:
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
