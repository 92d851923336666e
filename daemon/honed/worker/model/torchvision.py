"""Repair of a torchvision that was built for another torch, enough for transformers to import it.

Every process of the environment imports this module at its start: imports made here would slow down all of them.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

#: Operators that torchvision describes to torch on import, even if its compiled half has not defined them.
_DESCRIBED = ("nms", "qnms")

_LIBRARY: Any = None  #: kept here, as a library of operators ends with its object


def mend() -> None:
    """Have missing operators of torchvision's compiled half defined when torchvision is imported.

    The registries have no torchvision for a torch without CUDA. Beside such a torch, `import torchvision` ends in
    `operator torchvision::nms does not exist`, and with it the import of nearly any model. Processors use neither of
    the two operators. Nothing is imported here: Unsloth must be imported before torch.
    """
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Import hook that finds torchvision in its usual place, and has its missing operators defined before it runs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None or spec.origin is None:
            return spec
        execute, origin = spec.loader.exec_module, spec.origin

        def execute_mended(module: ModuleType) -> None:
            _define_missing(origin)
            execute(module)

        spec.loader.exec_module = execute_mended  # type: ignore[method-assign]
        return spec


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
