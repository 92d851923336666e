"""Imports of a worker, and their speed: most of the time before the first step goes into modules."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from honed.job.needs import IMPORT_ALL_VARIABLE, Needs
from honed.worker import deferred
from honed.worker.assignment import Assignment

#: Modules that a run imports on its way, beside those of `run` and of its backend.
ON_THE_WAY = (
    "honed.worker.train.watched",
    "honed.worker.rows.data",
    "honed.worker.train.losscheck",
    "honed.worker.train.usage",
    "honed.worker.train.trainer",
    "honed.worker.train.callback",
    "honed.worker.model.export",
)


def prepare(job: Assignment) -> None:
    """Have the libraries import only what the job needs. This lasts: call it only in a worker's own process."""
    if IMPORT_ALL_VARIABLE not in os.environ:
        narrow(hidden(job), defers=is_plain(job) and "WORLD_SIZE" not in os.environ)


def narrow(hidden: Sequence[str], *, defers: bool) -> None:
    """Hide packages, and with `defers` load what few jobs use once something uses it."""
    for name in hidden:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # import takes None as a missing package
    if defers:
        deferred.defer(deferred.ALL)
        sys.meta_path.insert(0, _Finder())


def hidden(job: Assignment) -> list[str]:
    """Return the packages that a job does not use, and that its libraries would import."""
    return list(of(job).hidden)


def of(job: Assignment) -> Needs:
    """Return what a job needs of its libraries."""
    return Needs.of(job.plan, job.backend)


def asks_device(job: Assignment) -> bool:
    """Tell whether the imports of TRL and peft ask the device for its properties."""
    return of(job).asks_device or IMPORT_ALL_VARIABLE in os.environ


def can_be_ahead(job: Assignment) -> bool:
    """Tell whether a job's imports may be made before a device is its own."""
    return of(job).can_be_ahead and IMPORT_ALL_VARIABLE not in os.environ


def is_plain(job: Assignment) -> bool:
    """Tell whether all code of the run is known."""
    return of(job).is_plain


def ahead(needs: Needs) -> None:
    """Import what a run with such needs will import on its way, if that asks no device; nothing is lost by it."""
    from honed.worker.model import load, torchvision

    torchvision.mend()
    with quick():
        load.choose("transformers").import_libraries()
        for name in ON_THE_WAY:
            importlib.import_module(name)
        _import_model(needs.model_type)


def _import_model(model_type: str) -> None:
    """Import the modules of a kind of model, if transformers has it."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if isinstance(name, str):
        with contextlib.suppress(AttributeError, ImportError):  # the job will tell
            getattr(transformers, name)


class _Finder:
    """Import hook that adapts modules of libraries once they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _ADAPTED:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_adapted(module: ModuleType) -> None:
                execute(module)
                _ADAPTED[fullname](module)

            spec.loader.exec_module = execute_adapted  # type: ignore[method-assign]
        return spec


def _adapt_transformers(module: Any) -> None:
    """Have transformers read its 2000 files once instead of twice, and import no distributed tensors.

    A worker without other ranks is one process: what transformers does without torch.distributed is all it needs.
    """
    scan, found = module.create_import_structure_from_path, {}

    def scanned(path: Any) -> Any:
        place = os.path.dirname(path) if os.path.isfile(path) else str(path)  # noqa: PTH120, PTH113 - called so often
        if place not in found:
            found[place] = scan(path)
        return found[place]

    module.create_import_structure_from_path = scanned
    module.is_torch_distributed_available = lambda: False


def _adapt_accelerate(module: Any) -> None:
    module.is_torch_distributed_available = lambda: False


_ADAPTED: dict[str, Callable[[Any], None]] = {
    "transformers.utils.import_utils": _adapt_transformers,
    "accelerate.utils.imports": _adapt_accelerate,
}


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Disable garbage collection while thousands of modules are imported, and exempt them from it afterwards.

    The list of installed packages is read once: transformers and TRL read it each for itself.
    """
    was_enabled, num_before = gc.isenabled(), len(sys.modules)
    read = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = functools.cache(read)
    gc.disable()
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = read
        if len(sys.modules) > num_before:
            gc.freeze()
        if was_enabled:
            gc.enable()
