"""What ranks send one another, as JSON: what a peer sends is read as data, and never unpickled.

Lists and plain values are themselves; each other value is an object of one key, its kind:

    {"tuple": [...]}  {"set": [...]}  {"dict": [[key, value], ...]}  {"path": "/..."}  {"bytes": base64}
    {"numbers": base64}                numpy's uint32, as in its random state
    {"tensor": base64}                 torch's uint8, as in its random states
    {"error": {...}}                   code, said, hint, fix, evidence; {"lost": said} for LostRankError
    {"os_error": [errno, said, file]}  {"failure": said} for any other exception
    {"Question": [...]}                the fields of a dataclass that a module has named with `carry`
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from honed.system.error import (
    BY_CODE,
    DiskShortError,
    EnvironmentInvalidError,
    HonedError,
    InternalError,
    KilledError,
)

#: Bytes of one rank's message, far above the questions of a round of predictions, the largest of them.
MAX_BYTES = 1 << 28

C = TypeVar("C")

_CARRIED: dict[str, type[Any]] = {}


class LostRankError(KilledError):
    """Another rank is gone, or has failed with an error of its own."""


def carry(kind: type[C]) -> type[C]:
    """Let ranks send a dataclass. Its fields are not checked: a receiver must bear any value in them."""
    _CARRIED[kind.__name__] = kind
    return kind


def dump(value: object) -> bytes:
    """Return a value as a message. Raises InternalError for one of another type."""
    data = json.dumps(_plain(value), separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise InternalError(f"a message of {len(data)} bytes to the other ranks is longer than {MAX_BYTES}")
    return data


def load(message: bytes, sender: str) -> Any:
    """Return the value of a message. Raises EnvironmentInvalidError for one that is no rank's of honed."""
    try:
        return _value(json.loads(message))
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise refusal(sender, f"it cannot be read as JSON of a known form ({type(error).__name__})") from None


def check_length(num_bytes: int, sender: str) -> None:
    """Raise EnvironmentInvalidError for the length of a message that no rank of honed sends."""
    if not 0 < num_bytes <= MAX_BYTES:
        raise refusal(sender, f"its length would be {num_bytes} bytes, of at most {MAX_BYTES}")


def check_alike(other: object, own: object, sender: str) -> None:
    """Raise EnvironmentInvalidError for a value of another type than this rank's own, unless one of them is None."""
    is_error = isinstance(other, Exception) and isinstance(own, Exception)
    if other is not None and own is not None and type(other) is not type(own) and not is_error:
        raise refusal(sender, f"it is a {type(other).__name__} in the place of a {type(own).__name__}")


def refusal(sender: str, why: str) -> HonedError:
    """Return the error of a message that is not one of honed's."""
    return EnvironmentInvalidError(
        f"{sender} sent a message that is none of honed's: {why}",
        hint="check that all nodes run the same version of honed, and who else reaches the ports of the job's nodes",
    )


def error_record(error: HonedError) -> dict[str, Any]:
    """Return an error as plain data, with its quotes marked."""
    needed_bytes = error.needed_bytes if isinstance(error, DiskShortError) else 0
    return {
        "code": error.code,
        "said": error.said,
        "hint": error.hint,
        "fix": error.fix,
        "evidence": error.evidence,
        "needed_bytes": needed_bytes,
    }


def error_of(record: Mapping[str, Any]) -> HonedError:
    """Rebuild an error from its record."""
    kind = BY_CODE.get(str(record["code"]), InternalError)
    text, hint, evidence = (str(record[name]) for name in ("said", "hint", "evidence"))
    error = kind(text, hint=hint, fix=record["fix"], evidence=evidence)
    if isinstance(error, DiskShortError):
        error.needed_bytes = int(record["needed_bytes"])
    return error


def _plain(value: object) -> object:
    import numpy as np
    import torch

    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_plain(item) for item in value]
        case tuple():
            return {"tuple": [_plain(item) for item in value]}
        case set() | frozenset():
            return {"set": sorted(_plain(item) for item in value)}  # type: ignore[type-var]
        case dict():
            return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
        case Path():
            return {"path": str(value)}
        case bytes():
            return {"bytes": _text(value)}
        case np.generic():
            return _plain(value.item())
        case np.ndarray() if value.dtype == np.uint32 and value.ndim == 1:
            return {"numbers": _text(value.tobytes())}
        case torch.Tensor() if value.dtype == torch.uint8 and value.dim() == 1:
            return {"tensor": _text(value.cpu().numpy().tobytes())}
        case LostRankError():
            return {"lost": value.said}
        case HonedError():
            return {"error": error_record(value)}
        case OSError() if value.errno is not None:
            file = None if value.filename is None else str(value.filename)
            return {"os_error": [value.errno, value.strerror, file]}
        case Exception():
            return {"failure": str(value)}
        case _ if is_dataclass(value) and _CARRIED.get(type(value).__name__) is type(value):
            return {type(value).__name__: [_plain(getattr(value, field.name)) for field in fields(value)]}
    raise InternalError(f"a {type(value).__name__} cannot be sent to the other ranks")


def _value(data: Any) -> Any:
    if isinstance(data, list):
        return [_value(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, inside),) = data.items()
    if kind in _CARRIED:
        if not isinstance(inside, list):
            raise TypeError(kind)
        return _CARRIED[kind](*map(_value, inside))
    return _KINDS[kind](inside)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _numbers(text: str) -> Any:
    import numpy as np

    return np.frombuffer(bytearray(_bytes(text)), dtype=np.uint32)


def _tensor(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda inside: tuple(map(_value, inside)),
    "set": lambda inside: frozenset(map(_value, inside)),
    "dict": lambda inside: {_value(key): _value(item) for key, item in inside},
    "path": Path,
    "bytes": _bytes,
    "numbers": _numbers,
    "tensor": _tensor,
    "lost": lambda said: LostRankError(str(said)),
    "error": error_of,
    "os_error": lambda inside: OSError(int(inside[0]), str(inside[1]), *inside[2:]),
    "failure": lambda said: RuntimeError(str(said)),
}
