"""The table of all plans by the compiler's count."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import tpu
from jrl.tools.plan.chips import parse_topology

SAMPLE = {"gib": 5.7, "decode_step_ms": 4.5, "decode_least_ms": 1.5, "bandwidth": 1 / 3, "float32_share": 0.0}
UPDATE = {"gib": 4.2, "micro_batch_ms": 136.0, "compute_ms": 109.0, "mfu": 0.39, "mfu_links_hidden": 0.48,
          "float32_share": 0.021}  # fmt: skip


def test_every_plan_is_measured_on_two_chips():
    plans = {path.stem for path in Path("configs/plan").glob("*.gin")}
    chips = {(source, parse_topology(where).chip.name) for source, where, _ in tpu.ROWS.values()}
    assert Counter(source for source, _ in chips) == dict.fromkeys(plans, 2)


def test_a_row_has_its_shares_and_one_that_does_not_fit_says_so():
    refused = {"gib": 40.0, "refused": "the compiler found no room"}
    rows = [{"row": "8b v5p", "rl.sample": SAMPLE, "rl.update": UPDATE},
            {"row": "32b v6e", "rl.sample": refused, "rl.update": UPDATE}]  # fmt: skip
    assert len(tpu.step_table([rows[1]]).splitlines()) == 2
    *_, fits, does_not = tpu.table(rows).splitlines()
    assert fits == "| 8b v5p | 4.50 | 1.50 | 33% | 136 (109) | 39% (48%) | 0.0%, 2.1% | 5.7, 4.2 |"
    assert does_not.startswith("| 32b v6e | does not fit |") and does_not.endswith("| 40.0, 4.2 |")


def test_rows_of_no_name_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tpu.main(["--out", str(tmp_path / "out.json"), "--rows", "70b"])
    assert "'70b' is in no name; there are: 0.6b v5e" in capsys.readouterr().err


def test_a_step_stands_beside_its_roofline():
    sample, update = SAMPLE | {"seconds": 5.0, "least_seconds": 2.5}, UPDATE | {"seconds": 1.1, "least_seconds": 0.5}
    *_, line = tpu.step_table([{"row": "8b v5p", "rl.sample": sample, "rl.update": update}]).splitlines()
    assert line == "| 8b v5p | 5 | 2.5 | 2.00 | 1.1 | 0.5 | 2.20 |"
