"""Errors and warnings with the texts that they quote from a job's files, as users who may read the job see them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from honed.system.error import HonedError

E = TypeVar("E", bound=HonedError)


@contextmanager
def refused(kind: type[E], words: str) -> Iterator[pytest.ExceptionInfo[E]]:
    """Like `pytest.raises(kind, match=words)`, for the message with its quotes."""
    with pytest.raises(kind) as caught:
        yield caught
    assert re.search(words, caught.value.shown), caught.value.shown
