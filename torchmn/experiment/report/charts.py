"""Curves and bars as SVG, coloured by the page's style so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34
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


def line_chart(curves: Sequence[Curve], x_name: str, y_name: str) -> str:
    """An SVG of curves over steps or epochs, with a legend; points that are not finite are left out."""
    kept = [Curve(c.name, *_thinned(c), c.number % COLOURS) for c in curves]
    kept = [curve for curve in kept if curve.xs]
    if not kept:
        return f"<p>{escape(y_name)}: no finite number to draw</p>"
    xs, ys = [x for c in kept for x in c.xs], [y for c in kept for y in c.ys]
    x_low, x_high = min(xs), max(xs)
    x_ticks = [tick for tick in ticks(x_low, x_high, whole=True) if x_low <= tick <= x_high]
    y_ticks = ticks(min(ys), max(ys))
    y_low, y_high = min(min(ys), y_ticks[0]), max(max(ys), y_ticks[-1])

    def x_at(x: float) -> float:
        return LEFT + (x - x_low) / max(x_high - x_low, 1e-12) * (WIDTH - LEFT - RIGHT)

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / max(y_high - y_low, 1e-12) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_name)} over {escape(x_name)}">']
    for tick in y_ticks:
        y = y_at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        parts.append(f'<text class="tick" x="{x_at(tick):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{escape(x_name)}</text>')
    for curve in kept:
        points = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in zip(curve.xs, curve.ys, strict=True))
        parts.append(f'<polyline class="curve c{curve.number}" points="{points}"/>')
        if len(curve.xs) <= 60:
            parts += [
                f'<circle class="dot c{curve.number}" cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3"/>'
                for x, y in zip(curve.xs, curve.ys, strict=True)
            ]
    parts.append("</svg>")
    names = "".join(f'<span class="key c{curve.number}">{escape(curve.name)}</span>' for curve in kept)
    return f"<figure>{''.join(parts)}<figcaption>{names}</figcaption></figure>"


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


def bars(rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], unit: str) -> str:
    """Horizontal bars of stacked parts, one for each row, with the numbers beside."""
    largest = max((sum(values) for _, values in rows), default=0.0) or 1.0
    lines = []
    for label, values in rows:
        pieces = "".join(
            f'<i class="piece c{number}" style="width:{100 * value / largest:.2f}%" '
            f'title="{escape(names[number])}: {value:.2f} {unit}"></i>'
            for number, value in enumerate(values)
        )
        text = ", ".join(f"{value:.2f}" for value in values)
        lines.append(f"<tr><th>{escape(label)}</th><td class='bar'>{pieces}</td><td class='num'>{text}</td></tr>")
    keys = "".join(f'<span class="key c{number}">{escape(name)}</span>' for number, name in enumerate(names))
    return f'<table class="bars">{"".join(lines)}</table><p class="keys">{keys} <small>({unit})</small></p>'
