"""The plots of the sweeps: an SVG file each, beside the figures."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path


def draw(rows: dict, folder: Path) -> list[Path]:
    """Writes FOLDER/AXIS.svg for every sweep in `rows`: seconds of a step, and the least that the hardware allows.

    Needs matplotlib, which the extra `notebook` has; without it nothing is drawn, and that is said.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plots: matplotlib is not installed (pip install jrl-jax[notebook])", file=sys.stderr)
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, row in rows.items():
        points = [point for point in row.get("points", ()) if point["seconds"]]
        if not points:
            continue
        axis = name.removeprefix("sweep, ")
        values = [point["value"] for point in points]
        figure = Figure(figsize=(5, 3.5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(values, [statistics.median(point["seconds"]) for point in points], "o-", label="step")
        axes.plot(values, [point["roofline_seconds"] for point in points], "--", label="limit of the hardware")
        axes.set(xlabel=axis, ylabel="seconds", xlim=(0, None), ylim=(0, None))
        axes.legend()
        written.append(folder / f"{axis.replace(' ', '_')}.svg")
        figure.savefig(written[-1])
    return written
