"""A checkpoint's roles are opened with the heads that the stages before it gave them."""

import jax
import pytest

from jrl.resolve import load_config
from jrl.run.policy import open_policy, root_key
from jrl.run.programs import abstract
from jrl.run.trained import role_heads
from jrl.tasks.tokenizers.bytes import ByteTokenizer

STAGES = ["Config.stages=[@one/Online(), @Online()]", "Online.steps=1", "one/Online.objective=@DreamerPPO()",
          "Online.objective=@PPO()", "AdamW.average=0.9"]  # fmt: skip
CRITICS = ["one/Online.critic='policy'", "Online.critic='critic'"]


@pytest.mark.parametrize(
    ("bindings", "role", "outputs"),
    [
        ((), "average", (256, 1)),  # DreamerPPO's head has 256 bins; PPO's head is a new one, of numbers
        (CRITICS, "critic", (256, 1)),
        # The head of the policy stays that of the first stage: the second has a critic, which has the bins.
        (
            ("one/Online.objective=@PPO()", "Online.objective=@DreamerPPO()", "Online.critic='policy'",
             "one/Online.critic=None"),
            "average", (1, 1),
        ),
    ],
    ids=["average", "critic", "average of a policy whose head no longer learns"],
)  # fmt: skip
def test_a_value_head_has_the_outputs_of_the_last_stage_that_trained_it(bindings, role, outputs):
    overrides = {binding.split("=")[0]: binding for binding in (*STAGES, *bindings)}
    config, parts = load_config("configs/tiny.gin", list(overrides.values()))
    policy = open_policy(config, parts, ByteTokenizer())
    key = abstract(root_key(policy), policy.mesh)
    for stage, count in enumerate(outputs):
        trained = policy.programs.inside(stage, config, key).models[role].heads
        opened = role_heads(policy, role, stage)
        assert jax.tree.map(lambda x: x.shape, opened) == jax.tree.map(lambda x: x.shape, trained)
        assert opened["value"].shape[-1] == count


def test_an_average_that_a_later_stage_does_not_make_is_not_there():
    config, parts = load_config("configs/tiny.gin", [*STAGES[:-1], "one/AdamW.average=0.9"])
    policy = open_policy(config, parts, ByteTokenizer())
    assert "value" in role_heads(policy, "average", 0)
    with pytest.raises(ValueError, match=r"'average' ends with stage 'rl', .* of stage 'rl_2'; choose an earlier"):
        role_heads(policy, "average", 1)
