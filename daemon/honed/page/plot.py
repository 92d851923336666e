"""Plots as SVG, drawn here: two kinds in a hundred lines, instead of a plotting library of thirty megabytes.

Their colors come from the page around them, so that they suit light, dark and print. Series differ by their dashes as
well as by their colors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from honed.page.page import plain, text

#: Pixels. The width of a phone, so that the labels keep their size there.
WIDTH, HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 8, 34
#: Styles of series, in style.css.
NUM_STYLES = 8
#: Points of a series that are drawn, at most: more than there are pixels would not be visible.
MAX_POINTS = 600
#: The same for plots.js, where one can zoom.
MAX_SERVED_POINTS = 2000
#: Pixels of a sparkline, and its values, at most.
SPARK_WIDTH, SPARK_HEIGHT, SPARK_POINTS = 96, 22, 32
#: Smallest range of an axis relative to its values: a change in the eighth digit is noise, and its labels would not
#: fit.
MIN_RANGE = 1e-3


@dataclass(frozen=True)
class Series:
    """A named series of points, ordered by x; all finite."""

    name: str
    points: Sequence[tuple[float, float]]


def lines(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    from_zero: bool = False,
    is_served: bool = False,
) -> Markup:
    """Return a figure with some series on common axes; empty if no series has a point. `is_served`: with the points for
    plots.js, more of them, which takes the place of the drawing."""
    series = [item for item in series if item.points]
    if not series:
        return Markup()
    data = _data(series, from_zero=from_zero) if is_served else Markup()
    series = [Series(item.name, thinned(item.points)) for item in series]
    xs = [x for item in series for x, _ in item.points]
    ys = [y for item in series for _, y in item.points]
    x_ticks = ticks(min(xs), max(xs), 5, is_whole=True)
    y_ticks = ticks(min([*ys, 0.0] if from_zero else ys), max(ys), 5)
    x_scale = _Scale(x_ticks[0], x_ticks[-1], _LEFT, WIDTH - _RIGHT)
    y_scale = _Scale(y_ticks[0], y_ticks[-1], HEIGHT - _BOTTOM, _TOP)
    drawn = [_series(number, item, x_scale, y_scale) for number, item in enumerate(series)]
    return _figure(title, _axes(x_ticks, y_ticks, x_scale, y_scale, x_label) + "".join(drawn), series, data)


def _data(series: Sequence[Series], *, from_zero: bool) -> Markup:
    """Return the attributes of a figure that plots.js draws."""
    values = []
    for item in series:
        points = thinned(
            item.points, max(MAX_POINTS // 2, min(MAX_SERVED_POINTS, 2 * MAX_SERVED_POINTS // len(series)))
        )
        values.append(
            {"name": plain(item.name), "x": [x for x, _ in points], "y": [float(f"{y:.6g}") for _, y in points]}
        )
    zero = Markup(" data-zero") if from_zero else ""
    return Markup(' data-plot="{}"{}').format(json.dumps(values, separators=(",", ":")), zero)


def sparkline(name: str, values: Sequence[float]) -> Markup:
    """Return a small line without axes; empty without two values."""
    if len(values) < 2:
        return Markup()
    low, high = min(values), max(values)
    x_scale, y_scale = _Scale(0, len(values) - 1, 1, SPARK_WIDTH - 1), _Scale(low, high, SPARK_HEIGHT - 2, 2)
    path = "M" + "L".join(f"{x_scale(x):.1f} {y_scale(y):.1f}" for x, y in enumerate(values))
    words = escape(f"{name} from {values[0]:.4g} to {values[-1]:.4g}")
    return Markup(
        f'<svg class="spark" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" role="img" aria-label="{words}">'
        f'<path class="series s0" d="{path}"/></svg>'
    )


def histogram(title: str, counts: Sequence[int], width: float, *, x_label: str) -> Markup:
    """Return a figure of the counts (y) per bin of that width (x); the first bin begins at 0."""
    if not any(counts):
        return Markup()
    x_ticks = ticks(0, len(counts) * width, 5, is_whole=True)
    y_ticks = ticks(0, max(counts), 4, is_whole=True)
    x_scale = _Scale(0, max(x_ticks[-1], len(counts) * width), _LEFT, WIDTH - _RIGHT)
    y_scale = _Scale(0, y_ticks[-1], HEIGHT - _BOTTOM, _TOP)
    bars = []
    for index, count in enumerate(counts):
        left, right, top = x_scale(index * width), x_scale((index + 1) * width), y_scale(count)
        bars.append(
            f'<rect class="bar" x="{left + 0.5:.1f}" y="{top:.1f}" width="{max(right - left - 1, 0.5):.1f}" '
            f'height="{HEIGHT - _BOTTOM - top:.1f}"><title>{index * width:g} to {(index + 1) * width:g}: {count}'
            "</title></rect>"
        )
    return _figure(title, _axes(x_ticks, y_ticks, x_scale, y_scale, x_label) + "".join(bars), ())


def thinned(points: Sequence[tuple[float, float]], number: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most `number` points: the first, the last, and the lowest and highest of every stretch, so that a spike
    of one step stays visible."""
    if len(points) <= number:
        return list(points)
    size = math.ceil(len(points) / (number // 2 - 1))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        kept |= {min(stretch, key=lambda n: points[n][1]), max(stretch, key=lambda n: points[n][1])}
    return [points[n] for n in sorted(kept)]


def ticks(low: float, high: float, number: int, *, is_whole: bool = False) -> list[float]:
    """Return about `number` round values from at or below `low` to at or above `high`; at least two."""
    if high <= low:
        margin = abs(low) * 0.1
        low, high = (low, low + 1) if is_whole or not margin else (low - margin, high + margin)
    if not is_whole and high - low < (size := max(abs(low), abs(high))) * MIN_RANGE:
        low, high = (low + high - size * MIN_RANGE) / 2, (low + high + size * MIN_RANGE) / 2
    rough = (high - low) / number
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if is_whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, max(last, first + 1) + 1)]


def label(value: float, step: float) -> str:
    """Return a value as short as an axis with that tick distance allows: 250, 2.5k, 6.1623, 2e-5."""
    size = abs(value)
    if size < step * 1e-6:
        return "0"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    if 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.3g}".partition("e") if size < 1e-4 else (f"{value * 1e4:.3g}", "", "-4")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, 1 - math.floor(math.log10(step) + 1e-9)) if step < size * 1e-3 else 0
    return f"{value:.{decimals}f}" if decimals else f"{value:.4g}"


@dataclass(frozen=True)
class _Scale:
    """Maps a value to its pixel."""

    low: float
    high: float
    from_pixel: float
    to_pixel: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.from_pixel + share * (self.to_pixel - self.from_pixel)


def _axes(x_ticks: Sequence[float], y_ticks: Sequence[float], x_scale: _Scale, y_scale: _Scale, x_label: str) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    step = y_ticks[1] - y_ticks[0]
    for tick in y_ticks:
        y = y_scale(tick)
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label(tick, step)}</text>',
        ]
    step = x_ticks[1] - x_ticks[0]
    for tick in x_ticks:
        x = x_scale(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        anchor = "end" if x > right - 12 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{label(tick, step)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{text(x_label)}</text>')
    return "".join(parts)


def _series(number: int, series: Series, x_scale: _Scale, y_scale: _Scale) -> str:
    positions = [(x_scale(x), y_scale(y)) for x, y in series.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in positions)
    drawn = f'<path class="series s{number % NUM_STYLES}" d="{path}"/>' if len(positions) > 1 else ""
    if len(positions) <= 40:
        drawn += "".join(
            f'<circle class="series s{number % NUM_STYLES}" cx="{px:.1f}" cy="{py:.1f}" r="2.6">'
            f"<title>{text(series.name)} at {x:g}: {y:.5g}</title></circle>"
            for (px, py), (x, y) in zip(positions, series.points, strict=True)
        )
    return drawn


def _figure(title: str, drawn: str, series: Sequence[Series], data: Markup | str = "") -> Markup:
    ends = [f"{item.name} from {item.points[0][1]:.4g} to {item.points[-1][1]:.4g}" for item in series]
    keys = "".join(
        '<span class="short"><svg class="key" viewBox="0 0 22 8" aria-hidden="true">'
        f'<line class="s{number % NUM_STYLES}" x1="0" x2="22" y1="4" y2="4"/></svg>{text(item.name)}</span>'
        for number, item in enumerate(series)
        if len(series) > 1
    )
    alternative = escape(plain("; ".join([title, *ends])))
    return Markup(
        f"<figure{data}><figcaption><b>{text(title)}</b> {keys}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{alternative}">{drawn}</svg></figure>'
    )
