"""Where the lines of a chart go; templates/charts.html draws them, and the page's style colours them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_POINTS = 800
COLOURS = 6
"""As many as the page's style has."""


@dataclass(frozen=True)
class Curve:
    """Points of one colour; `number` chooses it among COLOURS."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    number: int = 0


@dataclass(frozen=True)
class Drawn:
    """A curve in the coordinates of its chart."""

    name: str
    number: int
    points: list[tuple[float, float]]


@dataclass
class Chart:
    """Curves over steps or epochs; without any, there is no finite number to draw. Ticks: their places and texts."""

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
    curves: list[Drawn] = field(default_factory=list)


def line_chart(curves: Sequence[Curve], x_name: str, y_name: str) -> Chart:
    """A chart of curves; points that are not finite are left out."""
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
        share = (y - y_low) / max(y_high - y_low, 1e-12)
        return chart.height - chart.bottom - share * (chart.height - chart.top - chart.bottom)

    chart.x_ticks = [(x_at(x), f"{x:g}") for x in ticks(x_low, x_high, whole=True) if x_low <= x <= x_high]
    chart.y_ticks = [(y_at(y), f"{y:g}") for y in y_ticks]
    chart.curves = [
        Drawn(c.name, c.number, [(x_at(x), y_at(y)) for x, y in zip(c.xs, c.ys, strict=True)]) for c in kept
    ]
    return chart


def _thinned(curve: Curve) -> tuple[list[float], list[float]]:
    """At most MOST_POINTS of the points: means of neighbours where there are more."""
    pairs = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    size = -(-len(pairs) // MOST_POINTS)
    groups = [pairs[start : start + size] for start in range(0, len(pairs), max(size, 1))]
    return [g[-1][0] for g in groups], [sum(y for _, y in g) / len(g) for g in groups]


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers between two others, both ends covered; `whole` ones for what can be counted."""
    span = high - low
    if span <= 0:
        return [low]
    rough = max(span / count, 1.0) if whole else span / count
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
