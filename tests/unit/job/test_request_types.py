"""Requests whose arguments are of a wrong type: an error of the request, and none of honed's."""

from __future__ import annotations

from typing import Any

import pytest

from honed.job.query import Choice
from honed.job.retention import Wish
from honed.system.error import UsageError

WRONG: list[Any] = [7, True, "running", {"running": 1}, 0.5]


@pytest.mark.parametrize("key", ["states", "names"])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_states_and_names_of_a_list_are_lists(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match="must be lists"):
        Choice.of({key: value})


@pytest.mark.parametrize("value", [7, True, "running", 0.5, [7], [["failed"]], [None]], ids=repr)
def test_states_of_a_prune_are_states(value: Any) -> None:
    with pytest.raises(UsageError, match="prune: "):
        Wish.of({"states": value})
