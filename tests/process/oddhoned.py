"""fakehoned in which each opening of a worker's result raises an unforeseen error."""

from __future__ import annotations

import sys

import fakehoned


def be_odd(name: str, arguments: tuple[object, ...]) -> None:
    if name == "open" and str(arguments[0]).endswith("result.json"):
        raise LookupError("odd")


if __name__ == "__main__":
    sys.addaudithook(be_odd)
    sys.exit(fakehoned.main())
