"""What is printed of the figures: medians, shares, ratios, and which rows count."""

from __future__ import annotations

import json

from benchmarks import environments, plots, table

ROW = {
    "roofline_seconds": 0.5,
    "systems": {
        "jrl": {"seconds": [1.0, 9.0, 2.0], "disturbed": 1, "tokens": 4096, "peak_bytes": 2**30},
        "tunix": {"seconds": [4.0], "disturbed": 0, "tokens": 4096, "peak_bytes": 3 * 2**30},
        "trl": {"missing": "trl cannot be installed: no such version"},
    },
}


def test_a_line_has_median_rate_share_and_ratio():
    jrl, tunix, trl = table.learning_lines("update", ROW).splitlines()
    assert jrl.split() == ["update", "jrl", "2.000", "2048", "25%", "1.00", "3", "(1)"]
    assert tunix.split() == ["update", "tunix", "4.000", "1024", "12%", "2.00x", "3.00", "1", "(0)"]
    assert trl.endswith("trl cannot be installed: no such version")


def test_a_system_that_did_other_work_has_no_ratio():
    row = {**ROW["systems"]["tunix"], "agrees": False}
    _, tunix, _ = table.learning_lines("update", {**ROW, "systems": {**ROW["systems"], "tunix": row}}).splitlines()
    assert tunix.split() == ["update", "tunix", "4.000", "1024", "12%", "other", "3.00", "1", "(0)"]


def test_a_row_that_was_always_disturbed_has_no_figure():
    line = table.sampling_lines(
        "32 rows", {"roofline_seconds": 1.0, "systems": {"jrl": {"seconds": [], "disturbed": 15}}}
    )
    assert line.endswith("disturbed 15 times, nothing measured")


def test_systems_agree_to_a_thousandth_of_each_figure():
    jrl = {"loss": -0.2, "gradient_norm": 2.0, "logprobs": -3000.0}
    assert table.agrees(jrl, {**jrl, "gradient_norm": 2.0019})
    assert not table.agrees(jrl, {**jrl, "gradient_norm": 2.0021})
    assert not table.agrees(jrl, {**jrl, "loss": 0.2})
    table_text = table.equal_work({"jrl": jrl, "tunix": {**jrl, "logprobs": -3004.0}})
    assert table_text.splitlines()[2].endswith("differs: its rows do not count")


def test_an_environment_is_used_as_long_as_its_versions_are_those_asked_for(tmp_path):
    versions = tmp_path / "peer.txt"
    versions.write_text("jax==1\n")
    stamp = tmp_path / "peer" / environments.STAMP
    stamp.parent.mkdir()
    stamp.write_text(environments.fingerprint(versions))
    assert environments.python_of("peer", tmp_path, versions) == str(tmp_path / "peer" / "bin" / "python")
    before = environments.fingerprint(versions)
    versions.write_text("jax==2\n")
    assert environments.fingerprint(versions) != before


def test_every_peer_has_pinned_versions():
    for name in environments.PEERS:
        lines = (environments.VERSIONS / f"{name}.txt").read_text().split()
        assert lines and all(line.count("==") == 1 for line in lines)


def test_a_sweep_becomes_a_plot(tmp_path):
    points = [{"value": n, "seconds": [n / 4], "roofline_seconds": n / 8} for n in (2, 4)]
    rows = json.loads(json.dumps({"sweep, layers": {"points": points}, "update": ROW}))
    written = plots.draw(rows, tmp_path / "plots")
    assert written in ([], [tmp_path / "plots" / "layers.svg"])  # none without matplotlib, which is an extra
    assert all("</svg>" in path.read_text() for path in written)
