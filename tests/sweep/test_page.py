"""Charts and page: what is drawn where, and that nothing is fetched or obeyed."""

from __future__ import annotations

import html.parser
import xml.etree.ElementTree
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from run_folders import rewards, write_run

from jrl.tools.sweep import charts
from jrl.tools.sweep.comparison import compare
from jrl.tools.sweep.page import write_page
from jrl.tools.sweep.runs import read_run

SVG = "{http://www.w3.org/2000/svg}"


def comparison(folder, count=2, seeds=2, **given):
    found = [
        read_run(write_run(folder / f"{i}-{seed}", rows=rewards(0, i + seed, 2 * i), seed=seed,
                           settings={"X.name": f"'<b>&{i}'"}))
        for i in range(count)
        for seed in range(seeds)
    ]  # fmt: skip
    return compare(found, ["reward/mean"], **given)


def elements(svg, name):
    return xml.etree.ElementTree.fromstring(svg).findall(f".//{SVG}{name}")


def test_ticks_are_round_numbers_within_the_range():
    assert charts.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert charts.ticks(-0.07, 0.93) == [0, 0.2, 0.4, 0.6, 0.8]
    assert charts.ticks(1, 120) == [20, 40, 60, 80, 100, 120]
    assert charts.ticks(3e-5, 1e-4) == [3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 8e-5, 9e-5, 1e-4]
    assert charts.ticks(5, 5) == [5]


def test_a_range_is_never_empty_and_ignores_what_is_not_finite():
    assert charts.extent([0, 10, float("nan")]) == (-0.5, 10.5)
    low, high = charts.extent([3, 3])
    assert low < 3 < high
    assert charts.extent([])[0] < charts.extent([])[1] and charts.extent([0.0])[0] < 0


def test_ticks_that_are_close_together_have_labels_of_their_own(tmp_path):
    """Rewards near 1 had an axis with 0.9998 three times."""
    assert charts.tick_labels([0.99975, 0.9998, 0.99985]) == ["0.99975", "0.9998", "0.99985"]
    assert charts.tick_labels([0.0, 0.5, 1.0]) == ["0", "0.5", "1"]
    assert charts.tick_labels([1e9, 2e9]) == ["1e+09", "2e+09"]
    values = {0: (0.9998, 0.99985), 1: (0.99975, 0.9998)}
    runs = [read_run(write_run(tmp_path / str(seed), rows=rewards(*values[seed]), seed=seed)) for seed in values]
    (rows,) = compare(runs, ["reward/mean"]).metrics.values()
    for svg in (charts.curves("reward/mean", rows), charts.intervals("reward/mean", rows)):
        labels = [text.text for text in elements(svg, "text") if text.text.startswith("0.99")]
        assert len(labels) == len(set(labels)) > 3


def test_curves_have_a_line_and_a_band_for_each_variant(tmp_path):
    (rows,) = comparison(tmp_path).metrics.values()
    svg = charts.curves("reward/mean", rows)
    assert len(elements(svg, "polyline")) == 2 and len(elements(svg, "polygon")) == 2
    first = [float(point.split(",")[1]) for point in elements(svg, "polyline")[1].get("points").split()]
    assert first[0] > first[1] > first[2]  # rising values rise on the page
    titles = [title.text for title in elements(svg, "title")]
    assert "name='<b>&1', step 3: 2 [2, 2]" in titles


def test_one_run_has_a_line_and_no_band(tmp_path):
    (rows,) = comparison(tmp_path, seeds=1).metrics.values()
    svg = charts.curves("reward/mean", rows)
    assert len(elements(svg, "polyline")) == 2 and not elements(svg, "polygon")


def test_more_variants_than_colors_are_dashed(tmp_path):
    (rows,) = comparison(tmp_path, count=10, seeds=1).metrics.values()
    lines = elements(charts.curves("reward/mean", rows), "polyline")
    assert [line.get("stroke-dasharray") for line in lines[7:10]] == [None, "7 4", "7 4"]
    assert lines[0].get("stroke") == lines[8].get("stroke")
    assert len({(line.get("stroke"), line.get("stroke-dasharray")) for line in lines}) == 10


def test_scores_have_a_dot_for_each_run(tmp_path):
    (rows,) = comparison(tmp_path, seeds=3).metrics.values()
    svg = charts.intervals("reward/mean", rows)
    assert len(elements(svg, "circle")) == 2 * (3 + 1)


def test_a_chart_of_optimality_gaps_shows_the_gap_of_each_run(tmp_path):
    """The dots were scores, 0.9 and 0.7, on the axis of a gap of 0.2."""
    runs = [read_run(write_run(tmp_path / str(i), rows=rewards(value), seed=i)) for i, value in enumerate((0.9, 0.7))]
    found = compare(runs, ["reward/mean"], statistic="gap")
    svg = charts.intervals("reward/mean", found.metrics["reward/mean"], found.statistic)
    numbers = [circle[0].text.rpartition(" ")[2] for circle in elements(svg, "circle")]
    assert numbers == ["0.1", "0.3", "0.2"] and "reward/mean, optimality gap to 1" in svg
    assert svg in write_page(tmp_path / "out", found, "t", "c")[-1].read_text()


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.addresses, self.open = set(), [], []

    def handle_starttag(self, tag, attributes):
        self.found.add(tag)
        self.addresses += [value for name, value in attributes if name in ("href", "src")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("baseline", [None, "X.name='<b>&0'"])
def test_the_page_holds_all_of_it_fetches_nothing_and_escapes_names(tmp_path, baseline):
    shown = comparison(tmp_path, baseline=baseline)
    written = write_page(tmp_path / "out", shown, "A <title>", "jrl compare <runs>")
    assert [path.name for path in written] == ["curves-reward-mean.svg", "scores-reward-mean.svg", "report.html"]
    text = written[-1].read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert not tags.found & {"script", "link", "img", "iframe", "b"}
    assert tags.addresses == ["../0-0", "../0-1", "../1-0", "../1-1"]
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme:dark" in text
    assert text.count("<svg") == 2 and "A &lt;title&gt;" in text and "too narrow" in text
    assert ("P(higher than baseline)" in text) is (baseline is not None)
    for path in written[:2]:
        assert path.read_text() in text


def test_the_page_links_to_a_folder_of_any_name(tmp_path):
    run = read_run(write_run(tmp_path / "a#b 50%25?x", rows=rewards(1), seed=0))
    written = write_page(tmp_path / "out", compare([run], ["reward/mean"]), "t", "c")
    tags = Tags()
    tags.feed(written[-1].read_text())
    (address,) = tags.addresses
    assert (tmp_path / "out" / url2pathname(urlsplit(address).path)).resolve() == run.folder.resolve()


def test_a_metric_without_steps_has_no_curve(tmp_path):
    found = [read_run(write_run(tmp_path / str(seed), rows=rewards(1), seed=seed, evals={"after_rl": 0.5}))
             for seed in range(2)]  # fmt: skip
    written = write_page(tmp_path / "out", compare(found, ["eval/after_rl"]), "t", "c")
    assert [path.name for path in written] == ["scores-eval-after_rl.svg", "report.html"]
