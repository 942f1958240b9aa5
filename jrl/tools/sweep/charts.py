"""Charts as SVG text, complete in themselves and readable on a light and on a dark page. Our own, so that a page needs
nothing from outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from jrl.tools.sweep.comparison import Curve, Row, number

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 40, 48  # margins of the plot
LINE = 20  # of text, and of a row of the legend
CHARACTER = 7.0  # the width of one, about
HOVERED_POINTS = 60  # of a curve, that show their numbers under the pointer
# Eight colors, told apart by people with the common kinds of color blindness, on white and on near-black. Further
# variants repeat them dashed, then dotted.
LIGHT = ("#1f6fb4", "#c8560a", "#1a8754", "#8250c4", "#c2337a", "#0f8b8d", "#8a5a2b", "#5f6b76")
DARK = ("#6cb0f0", "#f59d56", "#58c98b", "#b794f0", "#f083b5", "#4fc7c9", "#cfa177", "#a9b4bf")
DASHES = ("none", "7 4", "2 3")


def _style() -> str:
    color = lambda colors: "".join(f".c{i}{{--c:{value}}}" for i, value in enumerate(colors))
    return (
        "<style>svg.jrl{--ink:#1c2024;--soft:#667078;--rule:#e2e5e8;background:transparent;"
        "font:13px system-ui,sans-serif}svg.jrl text{fill:var(--ink)}svg.jrl .soft{fill:var(--soft)}"
        "svg.jrl .rule{stroke:var(--rule);stroke-width:1}svg.jrl .axis{stroke:var(--soft);stroke-width:1}"
        "svg.jrl .line{stroke:var(--c);stroke-width:2;fill:none;stroke-linejoin:round}"
        "svg.jrl .band{fill:var(--c);opacity:.16}svg.jrl .dot{fill:var(--c)}svg.jrl .hover{fill:transparent}"
        "svg.jrl .run{fill:var(--c);opacity:.45}"
        + color(LIGHT)
        + "@media (prefers-color-scheme:dark){svg.jrl{--ink:#e6e9ec;--soft:#98a2ab;--rule:#31363b}"
        + color(DARK)
        + "}</style>"
    )


class Scale(NamedTuple):
    """Numbers to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`, all multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [
        round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, math.floor(high / step + 1e-9) + 1)
    ]


def extent(values: Sequence[float], share: float = 0.05) -> tuple[float, float]:
    """Returns the range of the finite values with a margin; never empty."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    margin = (high - low) * share or abs(high) * share or 1.0
    return low - margin, high + margin


def curves(metric: str, rows: Sequence[Row]) -> str:
    """Returns a metric over the steps: a line for each variant, the mean over its runs, in the band of its interval."""
    shown = [(i, row) for i, row in enumerate(rows) if len(row.curve.steps)]
    every = np.concatenate([np.concatenate([c.mean, c.low, c.high]) for _, row in shown for c in (row.curve,)] or [[]])
    steps = np.concatenate([row.curve.steps for _, row in shown] or [[]])
    legend_rows, legend_height = _legend(rows)
    y = Scale(*extent(every), HEIGHT - BOTTOM, TOP)
    first, last = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
    x = Scale(first, last if last > first else first + 1, LEFT, WIDTH - RIGHT)
    parts = [_text(LEFT, 20, metric, "start", weight=600)]
    for tick in ticks(y.low, y.high):
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(_text(LEFT - 8, y(tick) + 4, number(tick), "end", "soft"))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    for tick in (tick for tick in ticks(x.low, x.high) if tick == round(tick)):
        parts.append(_text(x(tick), HEIGHT - BOTTOM + 18, f"{tick:.0f}", "middle", "soft"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "step", "middle", "soft"))
    for i, row in shown:
        parts.append(_band(row.curve, i, x, y))
    for i, row in shown:
        parts.append(_curve(row.curve, i, row.variant.label, x, y))
    return _svg(f"{metric} over the steps", HEIGHT + legend_height, [*parts, *legend_rows])


def intervals(metric: str, rows: Sequence[Row]) -> str:
    """Returns what every variant scored: a small dot a run, the statistic and its interval, a line a variant."""
    labels = [row.variant.label for row in rows]
    left = min(max(map(len, labels), default=0) * CHARACTER + 24, WIDTH / 2)
    scores = [value for row in rows for task in row.scores for value in task]
    ends = [end for row in rows for end in row.value[:3]]
    x = Scale(*extent([*scores, *ends]), left, WIDTH - RIGHT)
    bottom = TOP + 28 * len(rows)
    parts = [_text(16, 20, metric, "start", weight=600)]
    for tick in ticks(x.low, x.high):
        parts.append(f'<line class="rule" x1="{x(tick)}" x2="{x(tick)}" y1="{TOP - 8}" y2="{bottom}"/>')
        parts.append(_text(x(tick), bottom + 18, number(tick), "middle", "soft"))
    for i, row in enumerate(rows):
        y = TOP + 28 * i + 10
        parts.append(f'<g class="c{i % len(LIGHT)}">')
        parts.append(_text(left - 12, y + 4, _cut(row.variant.label, left - 24), "end"))
        parts += [
            f'<circle class="run" cx="{x(value)}" cy="{y}" r="3"><title>{escape(run.folder.name)}: {number(value)}'
            "</title></circle>"
            for run, value in zip(row.variant.runs, (value for task in row.scores for value in task))
            if math.isfinite(value)
        ]
        mean, low, high, _ = row.value
        if math.isfinite(low):
            parts.append(f'<line class="line" x1="{x(low)}" x2="{x(high)}" y1="{y}" y2="{y}"/>')
        if math.isfinite(mean):
            parts.append(
                f'<circle class="dot" cx="{x(mean)}" cy="{y}" r="5"><title>{escape(row.variant.label)}: {number(mean)}'
                "</title></circle>"
            )
        parts.append("</g>")
    return _svg(f"{metric} of every variant", bottom + 32, parts)


def _band(curve: Curve, place: int, x: Scale, y: Scale) -> str:
    finite = np.isfinite(curve.low) & np.isfinite(curve.high)
    if not finite.any():
        return ""
    steps, low, high = curve.steps[finite], curve.low[finite], curve.high[finite]
    there = [f"{x(step)},{y(value)}" for step, value in zip(steps, high)]
    back = [f"{x(step)},{y(value)}" for step, value in zip(steps[::-1], low[::-1])]
    return f'<polygon class="band c{place % len(LIGHT)}" points="{" ".join([*there, *back])}"/>'


def _curve(curve: Curve, place: int, label: str, x: Scale, y: Scale) -> str:
    points = [(x(step), y(value)) for step, value in zip(curve.steps, curve.mean)]
    drawn = f'<polyline class="line" {_dash(place)} points="{" ".join(f"{a},{b}" for a, b in points)}"/>'
    if len(points) == 1:
        drawn += f'<circle class="dot" cx="{points[0][0]}" cy="{points[0][1]}" r="3"/>'
    every = max(1, math.ceil(len(points) / HOVERED_POINTS))
    hovered = "".join(
        f'<circle class="hover" cx="{a}" cy="{b}" r="6"><title>{escape(label)}, step {step:.0f}: {number(mean)}'
        f"{f' [{number(low)}, {number(high)}]' if math.isfinite(low) else ''}</title></circle>"
        for (a, b), step, mean, low, high in list(zip(points, *curve))[::every]
    )
    return f'<g class="c{place % len(LIGHT)}">{drawn}{hovered}</g>'


def _legend(rows: Sequence[Row]) -> tuple[list[str], int]:
    """The legend below the plot, as many variants in a row as fit, and its height."""
    width = min(max(len(row.variant.label) for row in rows) * CHARACTER + 48, WIDTH - LEFT - RIGHT)
    columns = max(1, int((WIDTH - LEFT - RIGHT) // width))
    parts = []
    for i, row in enumerate(rows):
        x, y = LEFT + (i % columns) * width, HEIGHT + 10 + (i // columns) * LINE
        parts.append(
            f'<g class="c{i % len(LIGHT)}"><line class="line" {_dash(i)} x1="{x}" x2="{x + 22}" y1="{y - 4}" '
            f'y2="{y - 4}"/>{_text(x + 28, y, _cut(row.variant.label, width - 40))}</g>'
        )
    return parts, 14 + LINE * math.ceil(len(rows) / columns)


def _dash(place: int) -> str:
    return f'stroke-dasharray="{DASHES[place // len(LIGHT) % len(DASHES)]}"'


def _cut(text: str, width: float) -> str:
    most = max(4, int(width / CHARACTER))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "", weight: int = 400) -> str:
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}"{bold}>{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="jrl" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
        f"<title>{escape(title)}</title>{_style()}{''.join(parts)}</svg>"
    )
