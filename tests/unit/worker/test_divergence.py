"""A diverging run is stopped within a few steps; a noisy one never."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from honed.spec.spec import DivergenceSpec
from honed.worker.train.divergence import MAX_SKIPPED, Divergence


def watch(kept: dict[str, Any] | None = None, suspect: str = "", **spec: Any) -> Divergence:
    return Divergence(DivergenceSpec(**spec), {} if kept is None else kept, suspect, vocab_size=150_000)


def healthy(seed: int, num_steps: int) -> list[tuple[float, float]]:
    """Return losses and gradient norms of tiny batches: a warm-up with large norms, a falling loss, heavy tails in
    both."""
    chance = random.Random(seed)
    return [
        (
            (0.3 + 3.0 * math.exp(-step / 200)) * chance.lognormvariate(0.0, 0.6),
            (1.0 + 30.0 * math.exp(-step / 5)) * chance.lognormvariate(0.0, 0.8),
        )
        for step in range(num_steps)
    ]


def test_ten_thousand_noisy_steps_do_not_trip_it() -> None:
    for seed in range(20):
        look = watch()
        for step, (loss, norm) in enumerate(healthy(seed, 500)):
            assert look.look(step, loss, norm, was_skipped=False) is None


def test_data_that_changes_does_not_trip_it() -> None:
    """The rows are unshuffled: the second half is new to a model that has memorized the first."""
    look = watch()
    figures = [(3.0, 2.0)] * 10 + [(0.01, 0.02)] * 200 + [(4.5, 5.0)] * 50
    for step, (loss, norm) in enumerate(figures):
        assert look.look(step, loss, norm, was_skipped=False) is None


def test_new_rows_after_those_that_an_earlier_training_had_learned_by_heart_do_not_trip_it() -> None:
    look = watch()
    for step, (loss, norm) in enumerate([(0.001, 0.0005)] * 60 + [(4.6, 120.0)] * 50):
        assert look.look(step, loss, norm, was_skipped=False) is None


@pytest.mark.parametrize("at", [25, 300])
def test_an_explosion_is_seen_within_a_few_steps(at: int) -> None:
    look = watch()
    for step, (loss, norm) in enumerate(healthy(1, at)):
        assert look.look(step, loss, norm, was_skipped=False) is None
    ends = [look.look(at + n, 11.0 + n / 2, 400.0 * (n + 1), was_skipped=False) for n in range(5)]
    assert ends[:4] == [None] * 4
    assert look.is_suspicious
    assert ends[4] is not None
    assert "gradient's norm is 2000" in ends[4].message
    assert f"until step {at - 1}" in ends[4].message


def test_a_run_that_is_lost_slowly_is_seen_once_it_knows_less_than_nothing() -> None:
    look = watch(grad_norm_factor=None)
    ended = None
    for step in range(400):
        ended = look.look(step, 3.0 * 1.01**step, 2.0 * 1.01**step, was_skipped=False)
        if ended is not None:
            break
    assert ended is not None
    assert "a random guess has 11.92" in ended.message
    assert 3.0 * 1.01**step < 2 * math.log(150_000)


def test_a_loss_or_a_gradient_that_is_no_number_ends_it_at_the_second_in_a_row() -> None:
    for bad in ((math.nan, 1.0), (math.inf, None), (1.0, math.nan), (1.0, math.inf)):
        look = watch()
        assert look.look(1, 1.0, 1.0, was_skipped=False) is None
        assert look.look(2, *bad, was_skipped=False) is None
        assert look.look(3, 1.0, 1.0, was_skipped=False) is None  # only once: it went on
        assert not look.is_suspicious
        assert look.look(4, *bad, was_skipped=False) is None
        assert look.look(5, *bad, was_skipped=False) is not None


def test_steps_that_the_scaler_skips_do_not_count_unless_all_are() -> None:
    look = watch()
    for step in range(300):  # every third: the scale is being found
        assert look.look(step, 1.0, math.inf if step % 3 == 0 else 1.0, was_skipped=step % 3 == 0) is None
    for step in range(MAX_SKIPPED - 1):
        assert look.look(step, 1.0, math.nan, was_skipped=True) is None
    assert "every gradient overflows" in str(look.look(400, 1.0, math.inf, was_skipped=True))


def test_it_can_be_turned_off_and_tuned() -> None:
    explosion = [(1.0, 1.0)] * 30 + [(9.0, 500.0)] * 50
    off = watch(grad_norm_factor=None)
    assert not any(off.look(step, *each, was_skipped=False) for step, each in enumerate(explosion))
    quick = watch(num_steps=1)
    assert next(n for n, each in enumerate(explosion) if quick.look(n, *each, was_skipped=False)) == 30


def test_a_resumed_run_remembers_what_was_usual() -> None:
    kept: dict[str, Any] = {}
    first = watch(kept)
    for step, (loss, norm) in enumerate(healthy(2, 60)):
        first.look(step, loss, norm, was_skipped=False)
    second = watch(json.loads(json.dumps(kept)))
    assert [second.look(60 + n, 30.0, 900.0, was_skipped=False) is None for n in range(5)] == [True] * 4 + [False]


def test_the_precision_is_named_where_it_is_a_suspect() -> None:
    look = watch(suspect="float16 may be the cause: its largest number is 65504")
    look.look(1, math.nan, None, was_skipped=False)
    problem = look.look(2, math.nan, None, was_skipped=False)
    assert problem is not None
    assert "float16 may be the cause" in problem.message
    assert problem.hint.startswith("use dtype: bfloat16")
