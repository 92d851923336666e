"""Records: dataclasses that are kept as JSON, and whose fields are checked as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Record = TypeVar("Record")


_adapters: dict[type, TypeAdapter[Any]] = {}


def _adapter(of: type) -> TypeAdapter[Any]:
    # Commands that read no record begin without pydantic.
    from pydantic import TypeAdapter  # noqa: PLC0415

    if of not in _adapters:
        _adapters[of] = TypeAdapter(of)
    return _adapters[of]


def read(of: type[Record], data: object) -> Record:
    """Return a record of a dataclass; keys of later versions are left out. Raises ValueError, without any value, for
    one that lacks a field or has a value of another type."""
    from pydantic import ValidationError  # noqa: PLC0415

    try:
        made: Record = _adapter(of).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where or of.__name__}: {first['msg']}") from None
    return made


def as_dict(record: Any) -> dict[str, Any]:
    """Return a record as JSON has it."""
    written: dict[str, Any] = _adapter(type(record)).dump_python(record, mode="json")
    return written
