"""A run whose rows are divided over devices draws the same tokens, and goes on on another mesh."""

import numpy as np
import pytest
import short_runs

from jrl.run.report.rollouts import read_rollouts
from jrl.run.trained import open_trained
from jrl.tools.score import score

TINY = [
    "Config.mesh=@MeshShape()", "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1",
    "Decoder.head_dim=8", "Decoder.mlp_width=32", "Online.prompts=8", "Online.samples=4", "Online.steps=4",
    "Checkpoint.every=2", "Scoring.workers=1", "GRPO.kl=0.01", "Learner.minibatches=2",
]  # fmt: skip
WHOLE = ["MeshShape.data=2"]  # as many shards of rows: a minibatch is a share of each
DIVIDED = ["MeshShape.fsdp=2", "MeshShape.sequence=2"]


@pytest.mark.slow
def test_rows_in_shares_learn_what_whole_rows_do(tmp_path):
    short_runs.run(TINY, tmp_path / "whole", *WHOLE)
    short_runs.run(TINY, tmp_path / "divided", *DIVIDED)
    short_runs.assert_same(tmp_path / "divided", tmp_path / "whole")
    short_runs.run(TINY, tmp_path / "both", *DIVIDED, stop_after=2)
    short_runs.run(TINY, tmp_path / "both", *WHOLE)
    short_runs.assert_same(tmp_path / "both", tmp_path / "whole")
    short_runs.run(TINY, tmp_path / "back", *WHOLE, stop_after=2)
    short_runs.run(TINY, tmp_path / "back", *DIVIDED)
    short_runs.assert_same(tmp_path / "back", tmp_path / "whole")
    drawn = read_rollouts(tmp_path / "whole" / "rollouts")
    rows = [row[:length].tolist() for row, length in zip(drawn["tokens"][:6], drawn["length"][:6])]
    one, other = (score(open_trained(tmp_path / "divided", bindings), rows)
                  for bindings in ([], ["MeshShape.fsdp=1", "MeshShape.sequence=1"]))  # fmt: skip
    for row, same in zip(one, other, strict=True):
        np.testing.assert_allclose(row, same, rtol=0, atol=2e-5)
