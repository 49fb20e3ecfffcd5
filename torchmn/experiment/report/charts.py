"""Coordinates of line charts, which templates/charts.html draws and templates/style.css colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

COLOURS = 6
"""Number of colours in templates/style.css."""
EXTENT = 1000
"""Width and height of the coordinates of curves, which are integers; a browser stretches them to the plot."""
LEAST_POINTS, LEAST_READINGS = 50, 10
POINTS, READINGS = 3000, 500
"""Of all curves of a report; each curve gets an equal share, so that the report stays small."""


@dataclass(frozen=True)
class Curve:
    """A named line; `number` selects its colour."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    number: int = 0


@dataclass(frozen=True)
class Lines:
    """Curves that share a chart. `percent`: the values are fractions, shown in percent."""

    title: str
    x_name: str
    curves: Sequence[Curve]
    percent: bool = False


@dataclass(frozen=True)
class DrawnCurve:
    """A curve in the coordinates of its chart."""

    name: str
    number: int
    points: list[tuple[int, int]]


@dataclass(frozen=True)
class Reading:
    """The values at one x, shown while the pointer is over a strip of the plot.

    Attributes:
        left: of the strip, in percent of the plot.
        width: of the strip, in percent of the plot.
        place: of x, in percent of the strip.
        title: the value of x with its name.
        values: number of the curve, name and text for each curve that has a point there.
    """

    left: float
    width: float
    place: float
    title: str
    values: list[tuple[int, str, str]]


@dataclass
class Chart:
    """Curves over steps or epochs; ticks are positions in percent with texts. Without finite values: no curves."""

    title: str
    x_name: str
    names: list[str]
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    curves: list[DrawnCurve] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)


def line_charts(charts: Sequence[Lines]) -> list[Chart]:
    """Returns a chart for each of `charts`, with fewer points and readings per curve if there are many curves."""
    curves = max(sum(len(lines.curves) for lines in charts), 1)
    return [
        line_chart(lines, max(POINTS // curves, LEAST_POINTS), max(READINGS // curves, LEAST_READINGS))
        for lines in charts
    ]


def line_chart(lines: Lines, most_points: int = 300, most_readings: int = 40) -> Chart:
    """Returns a chart; points that are not finite are omitted.

    Args:
        lines: its curves.
        most_points: largest number of points of a curve; if there are more, means of neighbours are drawn.
        most_readings: largest number of readings.
    """
    chart = Chart(lines.title, lines.x_name, [curve.name for curve in lines.curves])
    finite = [Curve(c.name, *_finite(c), c.number % COLOURS) for c in lines.curves]
    kept = [curve for curve in finite if curve.xs]
    if not kept:
        return chart
    thinned = [Curve(c.name, *_thinned(c, most_points), c.number) for c in kept]
    xs, ys = [x for c in kept for x in c.xs], [y for c in thinned for y in c.ys]
    x_at = _scale(min(xs), max(xs))
    y_values = ticks(min(ys), max(ys))
    y_at = _scale(min(*ys, y_values[0]), max(*ys, y_values[-1]))
    write = "{:.2%}".format if lines.percent else "{:.5g}".format
    chart.x_ticks = [(100 * x_at(x), f"{x:g}") for x in ticks(min(xs), max(xs), whole=True) if min(xs) <= x <= max(xs)]
    chart.y_ticks = [(100 - 100 * y_at(y), f"{100 * y:g}%" if lines.percent else f"{y:g}") for y in y_values]
    chart.curves = [
        DrawnCurve(
            c.name,
            c.number,
            [(round(EXTENT * x_at(x)), round(EXTENT - EXTENT * y_at(y))) for x, y in zip(c.xs, c.ys, strict=True)],
        )
        for c in thinned
    ]
    chart.readings = list(_readings(kept, lines.x_name, x_at, write, most_readings))
    return chart


def _scale(low: float, high: float) -> Callable[[float], float]:
    """Returns a function that maps `low` to 0 and `high` to 1; to 0.5 if they are the same."""
    if high <= low:
        return lambda _: 0.5
    return lambda value: (value - low) / (high - low)


def _finite(curve: Curve) -> tuple[list[float], list[float]]:
    pairs = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _thinned(curve: Curve, most: int) -> tuple[list[float], list[float]]:
    """Returns at most `most` points: means of neighbours."""
    size = max(-(-len(curve.xs) // most), 1)
    starts = range(0, len(curve.xs), size)
    groups = [(curve.xs[start : start + size], curve.ys[start : start + size]) for start in starts]
    return [xs[-1] for xs, _ in groups], [sum(ys) / len(ys) for _, ys in groups]


def _readings(
    curves: Sequence[Curve], x_name: str, x_at: Callable[[float], float], write: Callable[[float], str], most: int
) -> Iterator[Reading]:
    values: dict[float, list[tuple[int, str, str]]] = {}
    for curve in curves:
        for x, y in zip(curve.xs, curve.ys, strict=True):
            values.setdefault(x, []).append((curve.number, curve.name, write(y)))
    xs = sorted(values)
    step = max((len(xs) - 1) / max(most - 1, 1), 1.0)
    chosen = [xs[round(place * step)] for place in range(int((len(xs) - 1) / step + 1e-9) + 1)]
    places = [100 * x_at(x) for x in chosen]
    gaps = [after - before for before, after in pairwise(places)]
    for number, (x, place) in enumerate(zip(chosen, places, strict=True)):
        half = min([*gaps[max(number - 1, 0) : number + 1], 100.0]) / 2
        left, right = max(place - half, 0.0), min(place + half, 100.0)
        yield Reading(left, right - left, 100 * (place - left) / (right - left), f"{x_name} {x:g}", values[x])


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
