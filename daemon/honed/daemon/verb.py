"""A verb of the control socket, declared where it is answered: `@verb("pin", right=Right.OWNER)` above a method.

A service is an object with such methods; `table` has the verbs of several. honectl answers some verbs itself while
honed is down: from the same services, as far as they need the files alone (cli/offline.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Right(Enum):
    """The users who may use a verb."""

    ANYBODY = auto()  #: every user; the verb itself checks or leaves out the rest
    OWNER = auto()  #: the owner of the job or arrival that is named, and administrators
    ADMINISTRATOR = auto()  #: root, honed's own user, and the members of policy.admin_group


@dataclass(frozen=True)
class Declaration:
    """What is declared of a method. It takes a request and its asker and, if `right` is OWNER, the job or arrival."""

    names: tuple[str, ...]
    right: Right = Right.ANYBODY
    wakes: bool = False  #: the loop has something to do afterwards
    takes_arrival: bool = False  #: the owner's item may also be an arrival whose model is being fetched


@dataclass(frozen=True)
class Verb:
    """A verb and the method that answers it."""

    declaration: Declaration
    answer: Callable[..., Any]

    @property
    def right(self) -> Right:
        return self.declaration.right


def verb(
    *names: str, right: Right = Right.ANYBODY, wakes: bool = False, takes_arrival: bool = False
) -> Callable[[Method], Method]:
    """Declare the verbs that a method answers."""

    def declare(method: Method) -> Method:
        method.__dict__["declaration"] = Declaration(names, right, wakes, takes_arrival)
        return method

    return declare


def declared(service: type) -> Iterator[tuple[str, Declaration]]:
    """Yield the name of each method of a service that answers verbs, and its declaration."""
    for name, method in vars(service).items():
        if isinstance(declaration := getattr(method, "declaration", None), Declaration):
            yield name, declaration


def table(*services: object) -> dict[str, Verb]:
    """Return the verbs of these services by name."""
    return {
        name: Verb(declaration, getattr(service, method))
        for service in services
        for method, declaration in declared(type(service))
        for name in declaration.names
    }
