"""What errors and warnings say to those who may read the job: with what they quote of its files."""

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
    """As `pytest.raises(kind, match=words)`, of the sentence with its quotes."""
    with pytest.raises(kind) as caught:
        yield caught
    assert re.search(words, caught.value.told), caught.value.told
