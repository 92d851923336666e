"""Packages that few jobs use, loaded at their first use: torch's compiler, distributed tensors and symbolic shapes.

transformers, TRL, peft, accelerate and torch's optimizers import torch._dynamo only to mark functions for it, and
DTensor only to ask whether a tensor is one; torch asks sympy and symbolic shapes of every size of a meta tensor whether
it is a number. Loading them takes a fifth of the CPU time that a worker needs to start.

A deferred package is the module that it will be, without its content: it has stand-ins for the names that are used
before there is anything to compile, to distribute or to reason about. They give the same answers, and pass everything
on once the package is loaded. Any other name of it, and any of its modules but those in `apart`, loads it in place.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

#: Seconds to wait for another thread that loads a package. Loading takes a second.
DEADLOCK_SEC = 120.0
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Package:
    """A package whose code runs when it is used."""

    name: str
    apart: frozenset[str] = frozenset()  #: modules of it that do not need it
    before: tuple[str, ...] = ()  #: packages whose modules import it, and that it imports: it must be loaded first
    stand_ins: dict[str, Any] = field(default_factory=dict)
    loaded: Callable[[ModuleType], None] = lambda _module: None

    def is_needed_by(self, name: str) -> bool:
        """Tell whether it has to be loaded before the module of that name is imported."""
        inner = any(name == other or name.startswith(f"{other}.") for other in self.before)
        return inner or (name.startswith(f"{self.name}.") and name not in self.apart)


class Deferred(ModuleType):
    """A module that is loaded, in place, at the first use of a name that it has no stand-in for."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            package = self.__dict__.get(_PACKAGE)
            if package is not None and f"{self.__name__}.{name}" in package.apart:
                return importlib.import_module(f"{self.__name__}.{name}")
            load(self)
        return ModuleType.__getattribute__(self, name)


def load(module: ModuleType) -> None:
    """Run a module's code, unless that has begun: code that it runs itself sees what is there so far.

    Other threads wait. A failure leaves the module deferred.
    """
    # A thread that waits here may keep what the other needs to import: after a time it goes on with what is there.
    is_ours = _LOCK.acquire(timeout=DEADLOCK_SEC)
    try:
        if (package := module.__dict__.pop(_PACKAGE, None)) is not None:
            _run(module, package)
    finally:
        if is_ours:
            _LOCK.release()


def _run(module: ModuleType, package: Package) -> None:
    held = {name: module.__dict__.pop(name) for name in package.stand_ins if name in module.__dict__}
    try:
        module.__dict__[_EXECUTE](module)
    except BaseException:
        module.__dict__.update({**held, _PACKAGE: package})
        raise
    del module.__dict__[_EXECUTE]
    object.__setattr__(module, "__class__", ModuleType)
    package.loaded(module)


def defer(packages: Sequence[Package]) -> None:
    """Defer the packages, except those that are imported already."""
    packages = [package for package in packages if package.name not in sys.modules]
    if packages:
        sys.meta_path.insert(0, _Finder({package.name: package for package in packages}))


_PACKAGE, _EXECUTE = "_honed_package", "_honed_execute"


class _Imported(Loader):
    """Loader of a module that was imported while its finder was asked for it: a second one would lack its modules."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder:
    """Import hook that finds the packages in their usual places, and loads them before what needs them."""

    def __init__(self, packages: dict[str, Package]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for each in self._packages.values():
            if each.is_needed_by(fullname) and (module := sys.modules.get(each.name)) is not None:
                load(module)
        if (there := sys.modules.get(fullname)) is not None:  # what was loaded has imported it
            again = ModuleSpec(fullname, _Imported(there), is_package=hasattr(there, "__path__"))
            there.__spec__ = again  # importlib takes the spec of a module that is there, not the one that it is given
            return again
        if (package := self._packages.get(fullname)) is None:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_set_up, package, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _set_up(package: Package, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    module.__dict__.update({**package.stand_ins, _PACKAGE: package, _EXECUTE: execute})
    module.__class__ = Deferred


# -- classes -----------------------------------------------------------------------------------------------------------


class _Pending(type):
    """The type of a stand-in for a class: nothing is an instance of it before its module is loaded."""

    _place: str
    _name: str

    def __instancecheck__(cls, instance: object) -> bool:
        return (real := cls._real(sys.modules.get(cls._place))) is not None and isinstance(instance, real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        real = cls._real(sys.modules.get(cls._place))
        return subclass is cls or (real is not None and issubclass(subclass, real))

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return getattr(cls._real(importlib.import_module(cls._place)), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        real: Any = cls._real(importlib.import_module(cls._place))
        return real(*args, **kwargs)

    def _real(cls, module: ModuleType | None) -> type | None:
        return None if module is None else module.__dict__.get(cls._name)


def _pending(place: str, name: str) -> type:
    """Return a stand-in for the class that the module `place` defines."""
    return _Pending(name, (), {"__module__": place, "_place": place, "_name": name})


# -- symbolic shapes ---------------------------------------------------------------------------------------------------


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(type(item) is int for item in value)
    return type(value) is int or type(value) is bool


def _of_plain(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in for a function that gives `answer` for ints, bools and shapes, and reasons on symbolic ones."""

    def decide(*values: Any) -> Any:
        if all(map(_is_plain, values)):
            return answer(*values)
        module = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        load(module)
        return getattr(module, name)(*values)

    return decide


#: Answers for values of Python's.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "expect_true": lambda value: value,
    "guard_or_false": lambda value: value,
    "guard_or_true": lambda value: value,
    "guard_size_oblivious": lambda value: value,
    "statically_known_true": lambda value: value,
    "guarding_hint_or_throw": lambda value: value,
    "has_guarding_hint": lambda _value: True,
    "is_nested_int": lambda _value: False,
    "sym_and": lambda *values: functools.reduce(operator.and_, values),
    "sym_or": lambda *values: functools.reduce(operator.or_, values),
    "sym_eq": lambda one, other: list(one) == list(other) if isinstance(one, tuple | list) else one == other,
}
SYMBOLS = Package(name="sympy", stand_ins={"Basic": _pending("sympy.core.basic", "Basic")})
SYMBOLIC_SHAPES = Package(
    name="torch.fx.experimental.symbolic_shapes",
    stand_ins={name: _of_plain(name, answer) for name, answer in _ANSWERS.items()},
)


# -- torch's compiler --------------------------------------------------------------------------------------------------

_IN_GRAPH: list[Any] = []  #: functions that the compiler, once loaded, is to be told of


def _compiler() -> Any:
    module = sys.modules["torch._dynamo"]
    load(module)
    return module


def _is_compiler_loaded() -> bool:
    return not isinstance(sys.modules["torch._dynamo"], Deferred)


def _disable(fn: Any = None, recursive: bool = True, **keys: Any) -> Any:
    """Mark a function as one that the compiler leaves alone: there is nothing to do before there is a compiler."""
    if fn is None:
        return functools.partial(_disable, recursive=recursive, **keys)
    if not isinstance(fn, FunctionType) or _is_compiler_loaded():
        return _compiler().disable(fn, recursive, **keys)
    marked: Any = None

    @functools.wraps(fn)
    def plain(*args: Any, **kwargs: Any) -> Any:
        nonlocal marked
        if marked is None and not _is_compiler_loaded():
            return fn(*args, **kwargs)
        marked = marked or _compiler().disable(fn, recursive, **keys)
        return marked(*args, **kwargs)

    return plain


def _allow_in_graph(fn: Any) -> Any:
    if not isinstance(fn, FunctionType | type) or _is_compiler_loaded():
        return _compiler().allow_in_graph(fn)
    _IN_GRAPH.append(fn)
    return fn


def _assume_constant_result(fn: Any) -> Any:
    fn._dynamo_marked_constant = True  # all that torch's own does
    return fn


def _graph_break(_msg: str = "") -> None:
    """Do nothing, as outside of a compiled function."""


def _tell_compiler(module: ModuleType) -> None:
    while _IN_GRAPH:
        module.allow_in_graph(_IN_GRAPH.pop())


COMPILER = Package(
    name="torch._dynamo",
    apart=frozenset({"torch._dynamo._trace_wrapped_higher_order_op", "torch._dynamo.config"}),
    before=("torch._inductor",),
    stand_ins={
        "disable": _disable,
        "allow_in_graph": _allow_in_graph,
        "assume_constant_result": _assume_constant_result,
        "graph_break": _graph_break,
        "eval_frame": SimpleNamespace(OptimizedModule=_pending("torch._dynamo.eval_frame", "OptimizedModule")),
    },
    loaded=_tell_compiler,
)
DISTRIBUTED_TENSORS = Package(
    name="torch.distributed.tensor", stand_ins={"DTensor": _pending("torch.distributed.tensor._api", "DTensor")}
)
ALL = (COMPILER, DISTRIBUTED_TENSORS, SYMBOLS, SYMBOLIC_SHAPES)
