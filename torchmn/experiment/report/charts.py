"""Coordinates of line charts, which templates/charts.html draws and templates/style.css colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_POINTS = 800
COLOURS = 6
"""Number of colours in templates/style.css."""


@dataclass(frozen=True)
class Curve:
    """A named line; `number` selects its colour."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    number: int = 0


@dataclass(frozen=True)
class DrawnCurve:
    """A curve in the coordinates of its chart."""

    name: str
    number: int
    points: list[tuple[float, float]]


@dataclass
class Chart:
    """Curves over steps or epochs; ticks are coordinates with texts. Without finite values there are no curves."""

    x_name: str
    y_name: str
    width: int = 640
    height: int = 260
    left: int = 56
    right: int = 12
    top: int = 12
    bottom: int = 34
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    curves: list[DrawnCurve] = field(default_factory=list)


def line_chart(curves: Sequence[Curve], x_name: str, y_name: str) -> Chart:
    """Returns the chart of some curves; points that are not finite are omitted."""
    chart = Chart(x_name, y_name)
    kept = [Curve(c.name, *_thinned(c), c.number % COLOURS) for c in curves]
    kept = [curve for curve in kept if curve.xs]
    if not kept:
        return chart
    xs, ys = [x for c in kept for x in c.xs], [y for c in kept for y in c.ys]
    x_low, x_high = min(xs), max(xs)
    y_ticks = ticks(min(ys), max(ys))
    y_low, y_high = min(min(ys), y_ticks[0]), max(max(ys), y_ticks[-1])

    def x_at(x: float) -> float:
        return chart.left + (x - x_low) / max(x_high - x_low, 1e-12) * (chart.width - chart.left - chart.right)

    def y_at(y: float) -> float:
        fraction = (y - y_low) / max(y_high - y_low, 1e-12)
        return chart.height - chart.bottom - fraction * (chart.height - chart.top - chart.bottom)

    chart.x_ticks = [(x_at(x), f"{x:g}") for x in ticks(x_low, x_high, whole=True) if x_low <= x <= x_high]
    chart.y_ticks = [(y_at(y), f"{y:g}") for y in y_ticks]
    chart.curves = [
        DrawnCurve(c.name, c.number, [(x_at(x), y_at(y)) for x, y in zip(c.xs, c.ys, strict=True)]) for c in kept
    ]
    return chart


def _thinned(curve: Curve) -> tuple[list[float], list[float]]:
    """Returns at most MOST_POINTS finite points; if there are more, means of neighbours."""
    pairs = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    size = -(-len(pairs) // MOST_POINTS)
    groups = [pairs[start : start + size] for start in range(0, len(pairs), max(size, 1))]
    return [g[-1][0] for g in groups], [sum(y for _, y in g) / len(g) for g in groups]


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Returns about `count` round numbers that cover `low` to `high`; integers if `whole`."""
    span = high - low
    if span <= 0:
        return [low]
    rough = max(span / count, 1.0) if whole else span / count
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
