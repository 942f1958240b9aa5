"""Charts as standalone SVG, readable on light and dark pages.

Colors are attributes, which every SVG renderer reads. A style sheet overrides them on a dark page in a browser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from jrl.tools.sweep.comparison import STATISTIC_NAMES, STATISTICS, Curve, VariantResult, number

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 40, 48  # margins of the plot
LINE = 20  # height of a line of text and of a legend row
CHARACTER = 7.6  # approximate width of a character
HOVERED_POINTS = 60  # most points of a curve that show their numbers on hover
# Eight colors that people with the common kinds of color blindness can distinguish, on white and on near-black. Further
# variants repeat them dashed, then dotted.
LIGHT = ("#1f6fb4", "#c8560a", "#1a8754", "#8250c4", "#c2337a", "#0f8b8d", "#8a5a2b", "#5f6b76")
DARK = ("#6cb0f0", "#f59d56", "#58c98b", "#b794f0", "#f083b5", "#4fc7c9", "#cfa177", "#a9b4bf")
DASHES = ("", "7 4", "2 3")
INK, SOFT, RULE = ("#1c2024", "#e6e9ec"), ("#667078", "#98a2ab"), ("#e2e5e8", "#31363b")  # light, dark


class Scale(NamedTuple):
    """Maps numbers from low..high to pixels from start..end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def ticks(low: float, high: float) -> list[float]:
    """Returns at most 9 round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of 10."""
    if not high > low:
        return [low]
    raw = (high - low) / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [
        round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, math.floor(high / step + 1e-9) + 1)
    ]


def tick_labels(numbers: Sequence[float]) -> list[str]:
    """Returns the texts of ticks, with as many digits as tell them apart."""
    short = [number(tick) for tick in numbers]
    return short if len(set(short)) == len(short) else [f"{tick:.12g}" for tick in numbers]


def extent(values: Sequence[float]) -> tuple[float, float]:
    """Returns the range of the finite values with a margin of 5 %. It is never empty."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def curves(metric: str, rows: Sequence[VariantResult], *, over: str = "step") -> str:
    """Returns a chart of a metric over steps: for each variant the mean over its runs and a band of its interval.

    Args:
      over: the label of the horizontal axis, if it is not steps.
    """
    shown = [(i, row) for i, row in enumerate(rows) if len(row.curve.steps)]
    values = np.concatenate([np.concatenate([c.mean, c.low, c.high]) for _, row in shown for c in (row.curve,)] or [[]])
    steps = np.concatenate([row.curve.steps for _, row in shown] or [[]])
    legend_rows, legend_height = _legend(rows)
    y = Scale(*extent(values), HEIGHT - BOTTOM, TOP)
    first, last = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
    x = Scale(first, last if last > first else first + 1, LEFT, WIDTH - RIGHT)
    parts = [_text(LEFT, 20, metric, weight=600)]
    parts.append(_text(WIDTH - RIGHT, 20, "mean over runs, 95 % band", "end", SOFT))
    y_ticks = ticks(y.low, y.high)
    for tick, label in zip(y_ticks, tick_labels(y_ticks)):
        parts.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick)))
        parts.append(_text(LEFT - 8, y(tick) + 4, label, "end", SOFT))
    parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, SOFT))
    for tick in (tick for tick in ticks(x.low, x.high) if tick == round(tick)):
        parts.append(_text(x(tick), HEIGHT - BOTTOM + 18, f"{tick:.0f}", "middle", SOFT))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, over, "middle", SOFT))
    for i, row in shown:
        parts.append(_band(row.curve, i, x, y))
    for i, row in shown:
        parts.append(_curve(row.curve, i, f"{row.variant.label}, {over}", x, y))
    return _svg(f"{metric} over the {over}s", HEIGHT + legend_height, [*parts, *legend_rows])


def intervals(metric: str, rows: Sequence[VariantResult], statistic: str = "mean") -> str:
    """Returns a chart of a statistic, one row per variant: a small dot for each run, all runs and their interval.

    Args:
      statistic: of STATISTICS, which the rows have.
    """
    labels = [row.variant.label for row in rows]
    left = min(max(map(len, labels), default=0) * CHARACTER + 24, WIDTH / 2)
    of_runs = [[float(STATISTICS[statistic]([score])) for task in row.scores for score in task] for row in rows]
    ends = [end for row in rows for end in row.value[:3]]
    x = Scale(*extent([*(value for values in of_runs for value in values), *ends]), left, WIDTH - RIGHT)
    bottom = TOP + 28 * len(rows)
    title = metric if statistic == "mean" else f"{metric}, {STATISTIC_NAMES[statistic]}"
    parts = [_text(12, 20, title, weight=600)]
    parts.append(_text(WIDTH - RIGHT, 20, "runs, their value and its 95 % interval", "end", SOFT))
    x_ticks = ticks(x.low, x.high)
    for tick, label in zip(x_ticks, tick_labels(x_ticks)):
        parts.append(_line(x(tick), TOP - 8, x(tick), bottom))
        parts.append(_text(x(tick), bottom + 18, label, "middle", SOFT))
    for i, row in enumerate(rows):
        y = TOP + 28 * i + 10
        parts.append(_text(left - 12, y + 4, _truncate(row.variant.label, left - 24), "end"))
        parts += [
            _dot(x(value), y, 3, i, f"{run.name}: {number(value)}", opacity=0.45)
            for run, value in zip(row.variant.runs, of_runs[i])
            if math.isfinite(value)
        ]
        mean, low, high, _ = row.value
        if math.isfinite(low):
            parts.append(f'<line {_stroke(i)} x1="{x(low)}" x2="{x(high)}" y1="{y}" y2="{y}"/>')
        if math.isfinite(mean):
            parts.append(_dot(x(mean), y, 5, i, f"{row.variant.label}: {number(mean)}"))
    return _svg(f"{metric} of every variant", bottom + 32, parts)


def _band(curve: Curve, place: int, x: Scale, y: Scale) -> str:
    finite = np.isfinite(curve.low) & np.isfinite(curve.high)
    if not finite.any():
        return ""
    steps, low, high = curve.steps[finite], curve.low[finite], curve.high[finite]
    upper = [f"{x(step)},{y(value)}" for step, value in zip(steps, high)]
    lower = [f"{x(step)},{y(value)}" for step, value in zip(steps[::-1], low[::-1])]
    return f'<polygon {_fill(place)} opacity="0.16" points="{" ".join([*upper, *lower])}"/>'


def _curve(curve: Curve, place: int, label: str, x: Scale, y: Scale) -> str:
    points = [(x(step), y(value)) for step, value in zip(curve.steps, curve.mean)]
    svg = f'<polyline {_stroke(place)} fill="none" points="{" ".join(f"{a},{b}" for a, b in points)}"/>'
    if len(points) == 1:
        svg += _dot(*points[0], 3, place)
    stride = max(1, math.ceil(len(points) / HOVERED_POINTS))
    for (a, b), step, mean, low, high in list(zip(points, *curve))[::stride]:
        band = f" [{number(low)}, {number(high)}]" if math.isfinite(low) else ""
        svg += _dot(a, b, 6, place, f"{label} {step:.0f}: {number(mean)}{band}", opacity=0)
    return svg


def _legend(rows: Sequence[VariantResult]) -> tuple[list[str], int]:
    """Returns the legend below the plot, with as many variants in a row as fit, and its height."""
    width = min(max(len(row.variant.label) for row in rows) * CHARACTER + 48, WIDTH - LEFT - RIGHT)
    columns = max(1, int((WIDTH - LEFT - RIGHT) // width))
    parts = []
    for i, row in enumerate(rows):
        x, y = LEFT + (i % columns) * width, HEIGHT + 10 + (i // columns) * LINE
        parts.append(f'<line {_stroke(i)} x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(_text(x + 28, y, _truncate(row.variant.label, width - 40)))
    return parts, 14 + LINE * math.ceil(len(rows) / columns)


def _stroke(place: int) -> str:
    color = place % len(LIGHT)
    dash = DASHES[place // len(LIGHT) % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'class="jrl-s{color}" stroke="{LIGHT[color]}" stroke-width="2" stroke-linejoin="round"{dashed}'


def _fill(place: int) -> str:
    color = place % len(LIGHT)
    return f'class="jrl-f{color}" fill="{LIGHT[color]}"'


def _dot(x: float, y: float, radius: float, place: int, title: str = "", opacity: float = 1) -> str:
    faded = "" if opacity == 1 else f' opacity="{opacity}"'
    return f'<circle {_fill(place)}{faded} cx="{x}" cy="{y}" r="{radius}"><title>{escape(title)}</title></circle>'


def _line(x1: float, y1: float, x2: float, y2: float, color: tuple[str, str] = RULE) -> str:
    name = "soft" if color is SOFT else "rule"
    return f'<line class="jrl-{name}-line" stroke="{color[0]}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _truncate(text: str, width: float) -> str:
    most = max(4, int(width / CHARACTER))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _text(
    x: float, y: float, text: str, anchor: str = "start", color: tuple[str, str] = INK, weight: int = 400
) -> str:  # fmt: skip
    name, bold = "soft" if color is SOFT else "ink", f' font-weight="{weight}"' if weight != 400 else ""
    return (
        f'<text class="jrl-{name}" fill="{color[0]}" x="{x}" y="{y}" text-anchor="{anchor}"{bold}>{escape(text)}</text>'
    )


def _dark() -> str:
    """Returns the style sheet for a dark page."""
    colors = [f".jrl-s{i}{{stroke:{color}}}.jrl-f{i}{{fill:{color}}}" for i, color in enumerate(DARK)]
    plain = f".jrl-ink{{fill:{INK[1]}}}.jrl-soft{{fill:{SOFT[1]}}}.jrl-soft-line{{stroke:{SOFT[1]}}}"
    return f"@media (prefers-color-scheme:dark){{{''.join(colors)}{plain}.jrl-rule-line{{stroke:{RULE[1]}}}}}"


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" font-size="13" '
        f'font-family="system-ui, sans-serif"><title>{escape(title)}</title><style>{_dark()}</style>'
        f"{''.join(parts)}</svg>"
    )
