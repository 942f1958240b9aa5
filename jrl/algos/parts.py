"""The parts of docs/algorithms.md and the functions of an objective, as data: what `jrl list parts --json` prints.

`inputs` are the function's parameters in order. `tests` are where its numbers are checked by hand.
"""

from __future__ import annotations

from typing import TypedDict


class Part(TypedDict):
    id: str
    function: str
    inputs: list[str]
    output: str
    tests: list[str]


PARTS: list[Part] = [
    {
        "id": "A1",
        "function": "jrl.ops.advantages:discounted_returns",
        "inputs": ["token_reward", "action_mask", "discount"],
        "output": "returns [N, T] float32",
        "tests": [
            "tests/ops/test_advantages.py::test_returns_skip_tokens_the_policy_did_not_sample",
            "tests/ops/test_advantages.py::test_returns_accumulate_within_a_row_only",
        ],
    },
    {
        "id": "A2",
        "function": "jrl.ops.advantages:moving_baseline",
        "inputs": ["reward", "valid", "baseline", "decay"],
        "output": "(advantages [N] float32, baseline [] float32)",
        "tests": ["tests/ops/test_advantages.py::test_moving_baseline_by_hand"],
    },
    {
        "id": "A3",
        "function": "jrl.ops.advantages:group_zscore",
        "inputs": ["reward", "group", "valid", "num_groups", "epsilon"],
        "output": "advantages [N] float32",
        "tests": [
            "tests/ops/test_advantages.py::test_group_advantages_by_hand",
            "tests/ops/test_advantages.py::test_a_group_of_equal_rewards_gets_exactly_zero",
        ],
    },
    {
        "id": "A4",
        "function": "jrl.ops.advantages:group_centered",
        "inputs": ["reward", "group", "valid", "num_groups"],
        "output": "advantages [N] float32",
        "tests": ["tests/ops/test_advantages.py::test_group_advantages_by_hand"],
    },
    {
        "id": "A5",
        "function": "jrl.ops.advantages:leave_one_out",
        "inputs": ["reward", "group", "valid", "num_groups"],
        "output": "advantages [N] float32",
        "tests": [
            "tests/ops/test_advantages.py::test_group_advantages_by_hand",
            "tests/ops/test_advantages.py::test_leave_one_out_equals_the_difference_to_the_others",
        ],
    },
    {
        "id": "A7",
        "function": "jrl.ops.advantages:whitened_returns",
        "inputs": ["token_reward", "action_mask", "valid", "discount"],
        "output": "advantages [N, T] float32",
        "tests": ["tests/ops/test_advantages.py::test_whitened_returns_by_hand"],
    },
    {
        "id": "A8",
        "function": "jrl.ops.advantages:whitened_centered",
        "inputs": ["reward", "group", "valid", "action_mask", "num_groups"],
        "output": "advantages [N, T] float32",
        "tests": ["tests/ops/test_advantages.py::test_whitened_centered_by_hand"],
    },
    {
        "id": "A9",
        "function": "jrl.ops.advantages:group_mean_batch_std",
        "inputs": ["reward", "group", "valid", "num_groups", "epsilon"],
        "output": "advantages [N] float32",
        "tests": ["tests/ops/test_advantages.py::test_group_mean_batch_std_by_hand"],
    },
    {
        "id": "A13",
        "function": "jrl.ops.advantages:gae",
        "inputs": ["token_reward", "values", "action_mask", "discount", "gae_lambda"],
        "output": "advantages [N, T] float32, before whitening",
        "tests": [
            "tests/ops/test_advantages.py::test_gae_by_hand",
            "tests/ops/test_advantages.py::test_gae_steps_over_a_tools_answer",
            "tests/ops/test_advantages.py::test_gae_is_the_return_less_the_value_or_the_error_of_one_step",
        ],
    },
    {
        "id": "A23",
        "function": "jrl.ops.advantages:clip_advantages",
        "inputs": ["advantages", "limit"],
        "output": "advantages [...] float32",
        "tests": ["tests/ops/test_advantages.py::test_clip_by_hand"],
    },
    {
        "id": "A23",
        "function": "jrl.ops.reduce:whiten",
        "inputs": ["x", "mask"],
        "output": "advantages [...] float32",
        "tests": ["tests/ops/test_reduce.py::test_whiten_by_hand"],
    },
    {
        "id": "L1",
        "function": "jrl.ops.surrogate:policy_gradient",
        "inputs": ["logprobs", "advantages", "mask"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_surrogate.py::test_policy_gradient_by_hand"],
    },
    {
        "id": "L2",
        "function": "jrl.ops.surrogate:clipped",
        "inputs": ["logprobs", "old_logprobs", "advantages", "mask", "clip_low", "clip_high"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_surrogate.py::test_clipped_by_hand",
            "tests/ops/test_surrogate.py::test_clipped_equals_the_minimum_of_the_paper",
        ],
    },
    {
        "id": "L3",
        "function": "jrl.ops.surrogate:dual_clipped",
        "inputs": ["logprobs", "old_logprobs", "advantages", "mask", "clip_low", "clip_high", "dual_clip"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_surrogate.py::test_dual_clip_by_hand"],
    },
    {
        "id": "L4",
        "function": "jrl.ops.surrogate:capped",
        "inputs": ["logprobs", "old_logprobs", "advantages", "mask", "clip_low", "clip_high", "delta"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_surrogate.py::test_delta_by_hand"],
    },
    {
        "id": "L8",
        "function": "jrl.ops.surrogate:cispo",
        "inputs": ["logprobs", "old_logprobs", "advantages", "mask", "max_weight"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_surrogate.py::test_cispo_by_hand"],
    },
    {
        "id": "L9",
        "function": "jrl.ops.importance:token_weights",
        "inputs": ["old_logprobs", "behaviour_logprobs", "mask", "cap"],
        "output": "weights [..., L] float32",
        "tests": ["tests/ops/test_importance.py::test_token_weights_by_hand"],
    },
    {
        "id": "L9",
        "function": "jrl.ops.importance:sequence_weights",
        "inputs": ["old_logprobs", "behaviour_logprobs", "mask", "segment", "num_segments", "cap"],
        "output": "weights [..., L] float32",
        "tests": ["tests/ops/test_importance.py::test_sequence_weights_by_hand"],
    },
    {
        "id": "L9",
        "function": "jrl.ops.importance:geometric_weights",
        "inputs": ["old_logprobs", "behaviour_logprobs", "mask", "segment", "num_segments", "cap"],
        "output": "weights [..., L] float32",
        "tests": ["tests/ops/test_importance.py::test_geometric_weights_by_hand"],
    },
    {
        "id": "L10",
        "function": "jrl.ops.importance:accepted",
        "inputs": ["old_logprobs", "behaviour_logprobs", "mask", "low", "high"],
        "output": "mask [..., L] bool",
        "tests": ["tests/ops/test_importance.py::test_rejection_by_hand"],
    },
    {
        "id": "K1",
        "function": "jrl.ops.kl:k1",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "estimate [...] float32",
        "tests": ["tests/ops/test_kl.py::test_estimators_by_hand"],
    },
    {
        "id": "K1",
        "function": "jrl.ops.kl:k2",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "estimate [...] float32",
        "tests": ["tests/ops/test_kl.py::test_estimators_by_hand"],
    },
    {
        "id": "K1",
        "function": "jrl.ops.kl:k3",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "estimate [...] float32",
        "tests": ["tests/ops/test_kl.py::test_estimators_by_hand"],
    },
    {
        "id": "K2",
        "function": "jrl.ops.kl:k2",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_kl.py::test_gradient_coefficients_by_hand",
            "tests/ops/test_kl.py::test_expected_gradients_are_the_ones_of_the_table",
        ],
    },
    {
        "id": "K2",
        "function": "jrl.ops.kl:k3",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_kl.py::test_gradient_coefficients_by_hand",
            "tests/ops/test_kl.py::test_expected_gradients_are_the_ones_of_the_table",
        ],
    },
    {
        "id": "K3",
        "function": "jrl.ops.kl:corrected_k3",
        "inputs": ["logprobs", "old_logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_kl.py::test_corrected_k3_by_hand"],
    },
    {
        "id": "K3",
        "function": "jrl.ops.kl:straight_through_k3",
        "inputs": ["logprobs", "ref_logprobs", "mask"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_kl.py::test_straight_through_k3_by_hand"],
    },
    {
        "id": "K5",
        "function": "jrl.ops.entropy:entropy_bonus",
        "inputs": ["entropy", "mask", "coefficient"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_entropy.py::test_bonus_by_hand"],
    },
    {
        "id": "G1",
        "function": "jrl.ops.reduce:token_mean",
        "inputs": ["loss", "mask"],
        "output": "loss [] float32",
        "tests": ["tests/ops/test_reduce.py::test_aggregations_by_hand"],
    },
    {
        "id": "G2",
        "function": "jrl.ops.reduce:sequence_mean_token_mean",
        "inputs": ["loss", "mask"],
        "output": "loss [] float32",
        "tests": ["tests/ops/test_reduce.py::test_aggregations_by_hand"],
    },
    {
        "id": "G3",
        "function": "jrl.ops.reduce:sequence_mean_token_sum",
        "inputs": ["loss", "mask"],
        "output": "loss [] float32",
        "tests": ["tests/ops/test_reduce.py::test_aggregations_by_hand"],
    },
    {
        "id": "G4",
        "function": "jrl.ops.reduce:constant_mean",
        "inputs": ["loss", "mask", "rows", "max_completion"],
        "output": "loss [] float32",
        "tests": ["tests/ops/test_reduce.py::test_aggregations_by_hand"],
    },
    {
        "id": "V1",
        "function": "jrl.ops.values:clipped_value_loss",
        "inputs": ["values", "old_values", "returns", "mask", "clip"],
        "output": "(loss [...] float32, where the clip binds [...] bool)",
        "tests": [
            "tests/ops/test_values.py::test_the_clipped_loss_by_hand",
            "tests/ops/test_values.py::test_a_value_that_has_moved_too_far_has_no_gradient",
        ],
    },
    {
        "id": "V4",
        "function": "jrl.ops.values:explained_variance",
        "inputs": ["values", "returns", "mask"],
        "output": "explained variance [] float32",
        "tests": ["tests/ops/test_values.py::test_explained_variance_by_hand"],
    },
    {
        "id": "F1",
        "function": "jrl.ops.filters:has_signal",
        "inputs": ["outcome", "group", "valid", "num_groups"],
        "output": "keep [N] bool",
        "tests": ["tests/ops/test_filters.py::test_only_groups_of_mixed_outcomes_are_kept"],
    },
    {
        "id": "F3",
        "function": "jrl.ops.filters:not_truncated",
        "inputs": ["finish"],
        "output": "keep [N] bool",
        "tests": [
            "tests/ops/test_filters.py::test_only_rows_cut_at_the_length_limit_are_filtered",
            "tests/ops/test_filters.py::test_a_truncated_row_stays_in_its_groups_statistics",
        ],
    },
    {
        "id": "R7",
        "function": "jrl.ops.shaping:soft_overlong",
        "inputs": ["length", "max_completion", "buffer", "penalty"],
        "output": "reward [N] float32, to be added",
        "tests": ["tests/ops/test_shaping.py::test_soft_overlong_by_hand"],
    },
    {
        "id": "R17",
        "function": "jrl.ops.shaping:kl_in_reward",
        "inputs": ["reward", "old_logprobs", "ref_logprobs", "action_mask", "beta"],
        "output": "token_reward [N, T] float32",
        "tests": ["tests/ops/test_shaping.py::test_kl_in_the_reward_by_hand"],
    },
    {
        "id": "P1",
        "function": "jrl.algos.bradley_terry:sequence_loss",
        "inputs": ["config", "sequences", "state"],
        "output": "(loss [..., S] float32, metrics {name: [..., S]})",
        "tests": [
            "tests/algos/test_bradley_terry.py::test_the_loss_of_a_pair_by_hand",
            "tests/algos/test_bradley_terry.py::test_the_gradient_is_that_of_small_differences",
        ],
    },
]

# What a row of ALGOS may define (jrl.algos.contract.Objective): each has a default, but for the loss. A row for sampled
# completions has `advantages` and `token_loss`; one for stored rows has `token_loss`, `sequence_loss` or both.
OBJECTIVE_FUNCTIONS: list[Part] = [
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.check",
        "inputs": ["config", "facts"],
        "output": "None; raises ValueError for an illegal combination",
        "tests": ["tests/contracts/test_algos.py::test_defaults_and_all_options_pass_the_check"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.needs",
        "inputs": ["config"],
        "output": "Needs: a reference, a value head, a reward head, the entropy's gradient",
        "tests": ["tests/contracts/test_algos.py::test_the_entropy_gradient_is_asked_for_where_there_is_a_bonus"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.init_state",
        "inputs": ["config"],
        "output": "state: a tree of arrays, part of the checkpoint",
        "tests": [
            "tests/algos/test_reinforce.py::test_the_first_batch_is_compared_with_its_own_mean",
            "tests/contracts/test_algos.py::test_defaults_keep_the_promise",
        ],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.keep",
        "inputs": ["config", "groups"],
        "output": "keep [N] bool, rows that enter the loss",
        "tests": ["tests/algos/test_dapo.py::test_overlong_rows_leave_the_loss_and_stay_in_the_statistics"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.refill",
        "inputs": ["config"],
        "output": "most rounds of fresh prompts for groups without signal, or None",
        "tests": ["tests/algos/test_dapo.py::test_the_rounds_of_refill_are_the_configured_ones"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.shape",
        "inputs": ["config", "groups"],
        "output": "reward [N] float32, what advantages are taken of",
        "tests": ["tests/algos/test_dapo.py::test_the_reward_falls_over_the_last_tokens_before_the_limit"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.advantages",
        "inputs": ["config", "groups", "reward", "state"],
        "output": "(advantages [N, T] float32, next state, counters {name: []})",
        "tests": ["tests/contracts/test_algos.py::test_it_learns_a_word_of_two_letters"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.returns",
        "inputs": ["config", "groups", "reward"],
        "output": "returns [N, T] float32, targets of the value head",
        "tests": ["tests/algos/test_ppo.py::test_with_trace_and_discount_one_the_return_is_the_reward_on_every_token"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.token_loss",
        "inputs": ["config", "tokens", "state"],
        "output": "(loss [..., L] float32, metrics {name: [..., L]})",
        "tests": [
            "tests/contracts/test_algos.py::test_it_learns_a_word_of_two_letters",
            "tests/contracts/test_algos.py::test_it_learns_to_say_a_stored_word",
        ],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.weights",
        "inputs": ["config", "loss_mask", "max_completion"],
        "output": "weights [N, T] float32, of a token's loss in the sum",
        "tests": ["tests/algos/test_grpo.py::test_sequences_weigh_alike"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.denominator",
        "inputs": ["config", "loss_mask", "rows", "max_completion"],
        "output": "denominator [] float32, at least 1",
        "tests": ["tests/algos/test_dr_grpo.py::test_the_denominator_is_the_configured_constant"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.sequence_loss",
        "inputs": ["config", "sequences", "state"],
        "output": "(loss [..., S] float32, metrics {name: [..., S]})",
        "tests": ["tests/contracts/test_algos.py::test_it_learns_which_of_two_is_preferred"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.sequence_denominator",
        "inputs": ["config", "mask", "unit"],
        "output": "denominator [] float32, at least 1: comparisons of the step",
        "tests": ["tests/algos/test_bradley_terry.py::test_the_step_is_a_mean_over_pairs"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.next_state",
        "inputs": ["config", "state", "metrics"],
        "output": "state after the updates of a step, from the means of their metrics",
        "tests": ["tests/contracts/test_algos.py::test_defaults_keep_the_promise"],
    },
]
