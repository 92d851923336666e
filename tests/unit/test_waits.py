"""What a test waits for, and what it is told where that does not come."""

from __future__ import annotations

import pytest

import waiting


@pytest.fixture(autouse=True)
def none_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_failed", [])


def test_a_wait_returns_the_first_true_value_and_lets_a_time_pass_between_its_looks() -> None:
    values, pauses = [0, "", 7, 8], list[float]()
    assert waiting.wait_for(lambda: values.pop(0), what="a value", pause=pauses.append) == 7
    assert values == [8]
    assert len(pauses) == 2
    assert waiting.FIRST_PAUSE_SEC <= pauses[0] < pauses[1]


def test_a_wait_that_fails_tells_what_for_the_last_value_and_an_account() -> None:
    with pytest.raises(AssertionError, match=r"^a value: not within 0 s; the last was \[\]\nthe log$"):
        waiting.wait_for(list, 0.0, what="a value", account=lambda: "the log")


def test_after_many_failed_a_wait_has_a_fifth_of_its_time_but_a_minute_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "_failed", ["it"] * waiting.MANY)
    now = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])

    def pause(sec: float) -> None:
        now[0] += max(sec, 1.0)

    for deadline_sec, waited_sec in ((30.0, 30), (200.0, 60), (600.0, 120)):
        now[0] = 0.0
        with pytest.raises(AssertionError, match=f"not within {waited_sec} s"):
            waiting.wait_for(lambda: False, deadline_sec, what="it", pause=pause)
