"""Value learning: section V of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "V1",
        "function": "jrl.ops.values:clipped_value_loss",
        "inputs": ["values", "old_values", "returns", "mask", "clip"],
        "output": "(loss [...] float32, where the clip binds [...] bool)",
        "tests": [
            "tests/ops/test_values.py::test_the_clipped_loss_by_hand",
            "tests/ops/test_values.py::test_a_value_that_has_moved_too_far_has_no_gradient",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "V2",
        "function": "jrl.ops.two_hot:bins_of",
        "inputs": ["count", "limit"],
        "output": "bins [count] float32",
        "tests": [
            "tests/algos/test_dreamer_ppo.py::test_a_head_of_bins_begins_at_0_and_is_read_before_every_token",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
        ],
    },
    {
        "id": "V2",
        "function": "jrl.ops.two_hot:symlog",
        "inputs": ["x"],
        "output": "x [...] float32",
        "tests": [
            "tests/ops/test_two_hot.py::test_symlog_and_symexp_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "V2",
        "function": "jrl.ops.two_hot:symexp",
        "inputs": ["x"],
        "output": "x [...] float32",
        "tests": [
            "tests/ops/test_two_hot.py::test_symlog_and_symexp_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "V2",
        "function": "jrl.ops.two_hot:two_hot",
        "inputs": ["x", "bins"],
        "output": "weights [..., K] float32",
        "tests": [
            "tests/ops/test_two_hot.py::test_two_hot_by_hand",
            "tests/ops/test_two_hot.py::test_the_weights_sum_to_1_and_average_to_their_value_on_uneven_bins",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "V2",
        "function": "jrl.ops.two_hot:two_hot_loss",
        "inputs": ["logits", "returns", "mask", "bins"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_two_hot.py::test_the_loss_by_hand",
            "tests/ops/test_two_hot.py::test_masked_tokens_have_no_loss_and_no_gradient",
            "tests/ops/test_two_hot.py::test_bfloat16_is_widened",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "V2",
        "function": "jrl.ops.two_hot:two_hot_value",
        "inputs": ["logits", "bins"],
        "output": "value [...] float32",
        "tests": [
            "tests/ops/test_two_hot.py::test_a_head_that_is_sure_reads_its_bin_and_the_read_out_inverts_the_target",
            "tests/ops/test_two_hot.py::test_bfloat16_is_widened",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "V2",
        "function": "jrl.ops.two_hot:out_of_range",
        "inputs": ["returns", "mask", "bins"],
        "output": "clipped [...] bool",
        "tests": [
            "tests/ops/test_two_hot.py::test_targets_out_of_range_are_told",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
    {
        "id": "V3",
        "function": "jrl.learning.critic:begin_critic",
        "inputs": ["source", "shares", "zeros", "outputs"],
        "output": "ModelState of the critic",
        "tests": [
            "tests/algos/test_dreamer_ppo.py::test_a_critic_takes_a_head_that_fits_and_stands_on_frozen_weights",
            "tests/test_critic_run.py::test_a_critic_begins_with_the_reward_model_and_its_head",
        ],
    },
    {
        "id": "V3",
        "function": "jrl.learning.step:learn_from_sampled",
        "inputs": [
            "p",
            "state",
            "minibatches",
            "rollout",
            "scores",
            "arrays",
            "role",
            "epochs",
            "warms_up",
            "pretraining",
        ],
        "output": "state, metrics, what was learned from",
        "tests": [
            "tests/test_step_parts.py::test_old_log_probs_are_given_up_where_there_is_one_update",
            "tests/test_critic_run.py::test_the_policy_keeps_its_bits_while_the_critic_warms_up",
            "tests/test_critic_run.py::test_the_value_loss_falls_while_the_policy_stands_still",
        ],
    },
    {
        "id": "V4",
        "function": "jrl.ops.values:explained_variance",
        "inputs": ["values", "returns", "mask"],
        "output": "explained variance [] float32",
        "tests": [
            "tests/ops/test_values.py::test_explained_variance_by_hand",
            "tests/ops/test_plain_loops.py::test_it_equals_a_plain_loop",
            "tests/ops/test_plain_loops.py::test_bfloat16_is_widened",
        ],
    },
]
