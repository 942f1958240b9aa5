"""Runs of a tiny mixture of experts in bfloat16 that replay the sampler's routes."""

import pytest
import short_runs

from jrl.run.replay import repeat
from jrl.run.report.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("frozen_before_the_first_step")]

TINY = [
    "Decoder.layers=2", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.dtype='bfloat16'", "Decoder.experts=@Experts()", "Experts.count=8", "Experts.per_token=2",
    "Experts.width=8", "Config.mesh=@MeshShape()", "Online.prompts=8", "Online.samples=4", "Online.steps=4",
    "Checkpoint.every=2", "Log.samples=0", "Scoring.workers=1", "Learner.minibatches=2",
    "Learner.routes='replayed'",
]  # fmt: skip
LAG, REFERENCE = "Online.lag=1", "GRPO.kl=0.01"
APART = ["Config.sampler_mesh=@sample/MeshShape()", "sample/MeshShape.data=1"]
PARTIAL = ["Online.strategy=@Partial()", "Partial.tokens=2"]
CRITIC = ["Online.objective=@PPO()", "Online.critic='policy'", "Config.adapter=@LoRA()",
          "LoRA.targets=('*', 'expert*')"]  # fmt: skip
REFILLS = ["Online.objective=@DAPO()", "DAPO.max_refills=1", LAG]


# With a lag the checkpoint holds the completions that are being drawn, and their routes.
@pytest.mark.parametrize(
    "bindings",
    [[REFERENCE], [REFERENCE, LAG], PARTIAL, REFILLS, CRITIC],
    ids=["lag 0", "lag 1", "segments", "refills", "adapters and a critic"],
)
def test_a_run_that_is_left_and_resumed_has_the_same_bits(tmp_path, bindings):
    short_runs.run(TINY, tmp_path / "whole", *bindings)
    short_runs.run(TINY, tmp_path / "left", *bindings, stop_after=3)
    short_runs.run(TINY, tmp_path / "left", *bindings)
    whole = short_runs.metrics(tmp_path / "whole")
    assert short_runs.metrics(tmp_path / "left") == whole and len(whole) >= 4
    assert all("router/mismatch" in row for row in whole if "loss" in row)
    assert "routes" not in read_rollouts(tmp_path / "whole" / "rollouts")
    with pytest.raises(ValueError, match="which the store of rollouts leaves out: its update cannot be repeated"):
        repeat(tmp_path / "whole", 4)


def test_devices_of_their_own_for_sampling_change_no_bit(tmp_path):
    short_runs.run(TINY, tmp_path / "in_turn", LAG)
    short_runs.run(TINY, tmp_path / "apart", LAG, *APART, stop_after=3)
    short_runs.run(TINY, tmp_path / "apart", LAG, *APART)
    assert short_runs.metrics(tmp_path / "apart") == short_runs.metrics(tmp_path / "in_turn")


def test_replayed_routes_bring_learner_and_sampler_together(tmp_path):
    wide = ["Decoder.layers=6", "Decoder.width=64", "Experts.count=32", "Experts.per_token=4", "Online.prompts=16",
            "Sampler.completion_length=16", "Learner.minibatches=1", "Online.steps=2"]  # fmt: skip
    found = {}
    for routes in ("computed", "replayed"):
        short_runs.run(TINY, tmp_path / routes, *wide, f"Learner.routes={routes!r}")
        found[routes] = short_runs.metrics(tmp_path / routes)
    assert all(row["router/mismatch"] > 0 for row in found["replayed"])
    for name in ("policy/sampler_difference", "mismatch/k3", "mismatch/probability"):
        assert found["replayed"][0][name] < 0.8 * found["computed"][0][name], name
