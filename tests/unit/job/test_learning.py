"""A run whose loss never fell, or ended higher, is warned about; one that learns never is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from honed.job.learning import Told, remark


def run(
    loss_at: Callable[[float], float],
    *,
    steps: int,
    epochs: float,
    noise: float = 0.0,
    spread: float = 0.0,
    seed: int = 0,
) -> list[Told]:
    """Judge a run with this loss at each share of its steps. `noise` is drawn anew for each step; `spread` is the rows'
    own: their batches come once an epoch, in another order each time."""
    rng = random.Random(seed)
    per_epoch = max(round(steps / epochs), 1)
    rows = [rng.gauss(0, spread) for _ in range(per_epoch)]
    told = []
    for step in range(1, steps + 1):
        if step % per_epoch == 1:
            rng.shuffle(rows)
        own = rows[(step - 1) % per_epoch]
        told.append(Told(step, loss_at(step / steps) + own + rng.gauss(0, noise), step * epochs / steps))
    return told


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("epochs", [0.5, 1, 1.7, 2, 3, 10])
@pytest.mark.parametrize(
    "loss_at",
    [
        lambda t: 2.3 * math.exp(-5 * t),
        lambda t: 1.3 - 0.12 * t,
        lambda t: 1.1 + 1.5 * math.exp(-60 * t),
        lambda t: 6.4 - t,
        lambda _: 0.02,
    ],
    ids=["by heart", "slowly", "at once", "far to go", "known before"],
)
def test_a_run_that_learns_is_never_told_of(loss_at: Callable[[float], float], epochs: float, seed: int) -> None:
    assert remark(run(loss_at, steps=100, epochs=epochs, noise=0.003, spread=0.15, seed=seed)) == ""


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("epochs", [2, 3, 10])
def test_a_loss_that_never_left_is_told_of_though_batches_differ(epochs: float, seed: int) -> None:
    told = run(lambda _: 2.3, steps=100, epochs=epochs, noise=0.002, spread=0.15, seed=seed)
    assert remark(told).startswith("the loss did not fall: 2.")


def test_what_is_learned_in_the_first_steps_of_many_counts() -> None:
    told = run(lambda t: 1.5 + 0.6 * (t < 0.004), steps=2000, epochs=2, noise=0.01, spread=0.15)
    assert remark(told) == ""


def test_a_loss_that_ended_higher_is_told_of() -> None:
    for epochs in (1, 3):
        told = run(lambda t: 2.0 + 5 * t, steps=60, epochs=epochs, noise=0.05)
        assert remark(told).startswith("the loss ended higher than it began: ")
    steady = run(lambda _: 2.0, steps=100, epochs=1, noise=0.005)
    assert remark(steady) == "the loss did not fall: 2 in the first steps, 1.999 in the last"


def test_what_cannot_be_judged_is_left_alone() -> None:
    flat = run(lambda _: 2.0, steps=100, epochs=3)
    assert remark([]) == ""
    assert remark(flat[:19]) == "", "too short"
    assert remark(run(lambda _: 2.0, steps=100, epochs=1, noise=0.3)) == "", "too noisy"
    harder = run(lambda t: 2 + t, steps=100, epochs=1)
    assert remark(harder, is_ordered=True) == ""
    assert remark(harder) != ""
    assert remark([Told(step, math.nan, 1.0) for step in range(1, 50)]) == ""


def test_evaluations_that_fell_say_that_it_has_learned() -> None:
    flat = run(lambda _: 2.0, steps=100, epochs=3)
    assert remark(flat, 2.1, 1.9) == ""
    assert remark(flat, 2.1, 2.1) != ""
