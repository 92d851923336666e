"""A torchvision that was built for another torch: mended enough for transformers to import it.

Each process of the environment imports this module as it starts: what it imports itself costs them all.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
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


class _Finder:
    """Finds torchvision where it is, and has its operators looked after before it runs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        from importlib.machinery import PathFinder

        found = PathFinder.find_spec(fullname, path, target)
        if found is None or found.loader is None or found.origin is None:
            return found
        execute, origin = found.loader.exec_module, found.origin

        def execute_mended(module: ModuleType) -> None:
            _define_missing(origin)
            execute(module)

        found.loader.exec_module = execute_mended  # type: ignore[method-assign]
        return found


def _define_missing(origin: str) -> None:
    global _LIBRARY  # noqa: PLW0603 - see there
    from pathlib import Path

    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        for compiled in Path(origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(compiled))
    except OSError:
        _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
        for name in _DESCRIBED:
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
