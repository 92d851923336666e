"""Rights of a user by honed.toml: share and limits ([users]), and the classes of their jobs ([classes])."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from honed.spec.config import ClassConfig, Config, UserConfig
from honed.system import access
from honed.system.access import Person
from honed.system.error import SpecError

#: Queued jobs of a user, at most, where no table says otherwise.
MAX_QUEUED = 10_000


class Entitlements:
    """Share and limits of every user, looked up once for every configuration."""

    def __init__(self, config: Callable[[], Config]) -> None:
        self._config = config
        self._of: Config | None = None
        self._found: dict[int, UserConfig] = {}

    def of(self, uid: int) -> UserConfig:
        """Return a user's share and limits, from all tables that apply."""
        if (config := self._config()) is not self._of:
            self._of, self._found = config, {}
        if uid not in self._found:
            self._found[uid] = _entitlement(config, _person(uid))
        return self._found[uid]

    def weight(self, uid: int | None) -> float:
        """Return a user's weight: their share of devices and turns in relation to others. None is honed itself."""
        return 1.0 if uid is None else self.of(uid).weight or 1.0

    def max_queued(self, uid: int) -> int:
        """Return the maximum number of a user's queued jobs."""
        return self.of(uid).max_queued or MAX_QUEUED


def _entitlement(config: Config, person: Person) -> UserConfig:
    own = [user for name, user in config.users.items() if name in _names(person)]
    groups = [user for name, user in config.users.items() if name.startswith("@") and _is_member(person, name)]
    others = [user for name, user in config.users.items() if name == "*"]
    granted: dict[str, Any] = {}
    for key in UserConfig.model_fields:
        for among in (own, groups, others):
            if values := [value for table in among if (value := getattr(table, key)) is not None]:
                granted[key] = max(values)
                break
    return UserConfig(**granted)


def class_of(config: Config, name: str | None) -> ClassConfig:
    """Return a class; the default class for None and for one that the configuration no longer has."""
    default = next((klass for klass in config.classes.values() if klass.default), ClassConfig())
    return default if name is None else config.classes.get(name, default)


def require_class(config: Config, name: str | None, uid: int) -> None:
    """Raise SpecError if there is no such class, or the user may not use it."""
    if name is None:
        return
    allowed = [klass for klass in config.classes if _may_use(config.classes[klass], uid)]
    if name in allowed:
        return
    known = f"your classes are {', '.join(sorted(allowed))}" if allowed else "there are none for you"
    problem = "is not for your jobs" if name in config.classes else "is not a class of this machine"
    hint = f"{'write one of those, or ' if allowed else ''}remove class; classes are in honed.toml, as [classes.{name}]"
    raise SpecError(f"class: {name} {problem}; {known}", hint=hint, fix={"class": None})


def _may_use(given: ClassConfig, uid: int) -> bool:
    person = _person(uid)
    return given.users is None or any(
        _is_member(person, name) if name.startswith("@") else name in _names(person) for name in given.users
    )


def _person(uid: int) -> Person:
    return access.person(uid) or Person(uid, frozenset(), str(uid))


def _names(person: Person) -> Iterable[str]:
    return (person.name, str(person.uid))


def _is_member(person: Person, name: str) -> bool:
    return access.group_id(name.removeprefix("@")) in person.gids
