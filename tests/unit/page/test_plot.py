"""Plots with readable axes, in which no spike is lost."""

from __future__ import annotations

import re

import pytest

from honed.page import plot
from honed.page.plot import Series

RANGES = [
    (6.1615, 6.1619),
    (0, 0),
    (5, 5),
    (-3, -3),
    (0, 2e-4),
    (1e-5, 3e-5),
    (0, 123_456),
    (0.2, 3.4),
    (-0.5, 0.5),
    (1000, 1001),
    (0, 2.5e-6),
    (-1e9, 1e9),
    (1e300, 2e300),
    (0, 5e-324),
]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_an_axis_has_a_few_ticks_that_hold_the_data_and_read_differently(low: float, high: float) -> None:
    ticks = plot.ticks(low, high, 5)
    assert 2 <= len(ticks) <= 9
    assert ticks[0] <= low <= high <= ticks[-1] + 1e-9 * abs(high)
    labels = [plot.label(tick, ticks[1] - ticks[0]) for tick in ticks]
    assert len(set(labels)) == len(labels)


def test_whole_numbers_have_whole_ticks() -> None:
    assert plot.ticks(0, 3, 5, is_whole=True) == [0, 1, 2, 3]


def test_a_spike_of_one_step_survives_the_thinning() -> None:
    points = [(step, 1.0) for step in range(50_000)]
    points[31_417] = (31_417, 9.0)
    points[31_418] = (31_418, -9.0)
    kept = plot.thinned(points)
    assert len(kept) <= plot.MAX_POINTS
    assert {points[0], points[-1], points[31_417], points[31_418]} <= set(kept)


def test_a_plot_of_nothing_is_nothing_and_one_point_is_a_dot() -> None:
    assert plot.lines("Loss", [Series("training", [])]) == ""
    assert plot.histogram("Tokens", [0, 0], 8, x_label="tokens") == ""
    drawn = plot.lines("Loss", [Series("training", [(3, 0.5)]), Series("<b>", [])])
    assert "<circle" in drawn
    assert "<path" not in drawn


def test_the_largest_numbers_have_a_picture() -> None:
    series = Series("a", [(0, -1.7e308), (1, 1.7e308)])
    for drawn in (plot.lines("A", [series], is_served=True), plot.sparkline("a", [-1.7e308, 1.7e308])):
        assert "<path" in drawn
        assert not re.search("nan|inf", drawn)


def test_everything_lies_within_the_picture() -> None:
    drawn = plot.lines("Loss", [Series("a", [(17, 1e-9), (9_999, 3e4)]), Series("b", [(1, -5), (3, 2)])])
    for x, y in re.findall(r'cx="([\d.-]+)" cy="([\d.-]+)"', drawn):
        assert 0 <= float(x) <= plot.WIDTH
        assert 0 <= float(y) <= plot.HEIGHT
