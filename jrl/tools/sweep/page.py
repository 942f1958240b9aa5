"""Writes a comparison as files: charts, and one self-contained HTML page."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from jrl import paths
from jrl.tools.sweep import charts
from jrl.tools.sweep.comparison import STATISTIC_NAMES, Comparison, VariantResult, cells, header, number
from jrl.tools.sweep.runs import LAST_SHARE

PAGE = "report.html"

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2024;--soft:#667078;--rule:#e2e5e8}
@media (prefers-color-scheme:dark){:root{--paper:#16191c;--ink:#e6e9ec;--soft:#98a2ab;--rule:#31363b}}
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;
padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2.5rem}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .9rem .25rem 0;text-align:left;vertical-align:top}
th{color:var(--soft);font-weight:500}tr{border-bottom:1px solid var(--rule)}td.n{font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}p.soft,li{color:var(--soft)}a{color:inherit}svg{max-width:100%;height:auto;display:block}
pre{white-space:pre-wrap;overflow-wrap:anywhere;color:var(--soft)}
"""


def write_page(folder: Path, comparison: Comparison, title: str, command: str) -> list[Path]:
    """Writes FOLDER/report.html, and the curves and scores of every metric as SVG. Returns their paths.

    Args:
      title: of the page. command: the command shown below the title.
    """
    paths.make_dir(folder)
    written, sections = [], []
    for metric, rows in comparison.metrics.items():
        scores = charts.intervals(metric, rows, comparison.statistic)
        charts_by_kind = {"curves": charts.curves(metric, rows), "scores": scores}
        if not any(len(row.curve.steps) for row in rows):
            del charts_by_kind["curves"]
        for kind, svg in charts_by_kind.items():
            written.append(folder / f"{kind}-{re.sub('[^A-Za-z0-9_.]+', '-', metric)}.svg")
            paths.write_bytes_atomic(written[-1], svg.encode())
        sections.append(_section(metric, rows, comparison, list(charts_by_kind.values())))
    written.append(folder / PAGE)
    notes = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<pre>{escape(command)}</pre>",
        f'<p class="soft">{escape(explanation(comparison))}</p>',
        *sections,
        *([f"<h2>Notes</h2><ul>{notes}</ul>"] if notes else []),
        _runs(folder, comparison),
    ]
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )
    paths.write_bytes_atomic(written[-1], html.encode())
    return written


def explanation(comparison: Comparison) -> str:
    """Returns an explanation of the numbers in a comparison."""
    sentences = [
        f"A run's score is the mean of a metric over the last {'tenth' if LAST_SHARE == 10 else LAST_SHARE} of its "
        "steps, or an evaluation's mean.",
        f"A variant's value is the {STATISTIC_NAMES[comparison.statistic]} over its runs, which differ only in "
        "Run.seed, with a 95 % interval of the bootstrap over runs.",
    ]
    if comparison.tasks:
        sentences.append(f"Runs are resampled within each value of {', '.join(comparison.tasks)}.")
    if comparison.baseline is not None:
        sentences.append(
            f"P(higher than baseline) is the chance that a run scores higher than a run of {comparison.baseline}; 0.5 "
            "is no difference, and an interval that leaves out 0.5 shows one."
        )
    sentences.append("Bands are 95 % intervals of the mean over runs.")
    return " ".join(sentences)


def _section(metric: str, rows: Sequence[VariantResult], comparison: Comparison, drawn: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header(comparison))
    lines = "".join(
        "<tr>" + "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells(row, comparison.baseline)) + "</tr>"
        for row in rows
    )
    return f'<h2>{escape(metric)}</h2><div class="wide"><table><tr>{head}</tr>{lines}</table></div>' + "".join(
        f"<figure>{svg}</figure>" for svg in drawn
    )


def _runs(folder: Path, comparison: Comparison) -> str:
    metrics = list(comparison.metrics)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in ("run", "variant", "seed", *metrics))
    lines = []
    by_metric = [comparison.metrics[metric] for metric in metrics]
    for rows in zip(*by_metric):
        scores = [[value for task in row.scores for value in task] for row in rows]
        for i, run in enumerate(rows[0].variant.runs):
            name = escape(run.name)
            if run.address is None:  # browsers cannot open a gs:// address
                name = f'<a href="{escape(quote(os.path.relpath(run.folder, folder)))}">{name}</a>'
            values = "".join(f'<td class="n">{number(values_of[i])}</td>' for values_of in scores)
            lines.append(
                f"<tr><td>{name}</td><td>{escape(rows[0].variant.label)}</td><td>{escape(run.seed)}</td>{values}</tr>"
            )
    return f'<h2>Runs</h2><div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
