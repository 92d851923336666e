"""The share of a run's time that predictions may take, on a clock of the test's own."""

from __future__ import annotations

from honed.worker.train.budget import Budget
from honed.worker.train.checkpoint import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def simulate(
    share: float | None, *, step_sec: float, round_sec: float, num_steps: int = 100, progress: Progress | None = None
) -> tuple[list[int], float, float]:
    """Simulate an evaluation every 10 steps; return the steps that had predictions, their time, and the run's time."""
    clock = Clock()
    progress = progress or Progress()
    budget = Budget(share, progress, clock=clock)
    made: list[int] = []

    def predict(step: int) -> None:
        if step == 0 or budget.refusal(step, num_steps) is None:
            with budget.spend():
                clock.now += round_sec
            made.append(step)

    predict(0)
    budget.train(0)
    for step in range(1, num_steps + 1):
        clock.now += step_sec
        if step % 10 == 0:
            predict(step)
    return made, progress.prediction_sec, clock.now - 1000.0


def test_predictions_keep_within_their_share_of_a_long_run() -> None:
    made, spent_sec, run_sec = simulate(0.1, step_sec=10, round_sec=30)
    assert made[0] == 0
    assert made[-1] == 100, "those at the end are always made"
    assert 3 <= len(made) < 11
    assert spent_sec <= 0.1 * run_sec


def test_a_quick_round_is_never_left_out() -> None:
    assert len(simulate(0.1, step_sec=10, round_sec=1)[0]) == 11


def test_a_run_of_less_than_ten_minutes_is_not_thinned_out() -> None:
    assert len(simulate(0.1, step_sec=1, round_sec=10)[0]) == 11


def test_without_a_share_there_is_no_limit() -> None:
    assert len(simulate(None, step_sec=10, round_sec=300)[0]) == 11


def test_what_an_earlier_attempt_has_spent_counts() -> None:
    spent = Progress(elapsed_sec=100.0, prediction_sec=1000.0)
    assert simulate(0.1, step_sec=10, round_sec=10, progress=spent)[0] == [0, 100]
