"""Advantages: section A of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

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
        "id": "A6",
        "function": "jrl.ops.baselines:greedy_baseline",
        "inputs": ["reward", "greedy", "group", "valid", "num_groups"],
        "output": "advantages [N] float32",
        "tests": [
            "tests/ops/test_baselines.py::test_greedy_baseline_by_hand",
            "tests/ops/test_baselines.py::test_greedy_baseline_needs_no_second_sample_and_its_own_row_gets_zero",
            "tests/ops/test_baselines.py::test_gradient_of_the_greedy_baseline",
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
        "id": "A10",
        "function": "jrl.ops.baselines:length_weighted",
        "inputs": ["reward", "length", "group", "valid", "num_groups"],
        "output": "advantages [N] float32",
        "tests": [
            "tests/ops/test_baselines.py::test_length_weighted_by_hand",
            "tests/ops/test_baselines.py::test_rows_of_one_length_are_only_centered",
            "tests/ops/test_baselines.py::test_rows_without_a_verdict_or_a_token_set_no_baseline",
            "tests/ops/test_baselines.py::test_equal_rewards_and_groups_of_one_get_exactly_zero",
        ],
    },
    {
        "id": "A10",
        "function": "jrl.ops.baselines:token_optimal",
        "inputs": ["returns", "probability", "sum_squared", "action_mask", "group", "valid", "num_groups"],
        "output": "advantages [N, T] float32",
        "tests": [
            "tests/ops/test_baselines.py::test_token_optimal_by_hand",
            "tests/ops/test_baselines.py::test_token_optimal_of_equal_norms_is_centering_by_column",
            "tests/ops/test_baselines.py::test_token_optimal_compares_the_rows_that_sampled_there",
            "tests/ops/test_baselines.py::test_token_optimal_of_equal_returns_or_of_certain_tokens_is_exactly_zero",
        ],
    },
    {
        "id": "A11",
        "function": "jrl.ops.best_of_k:pass_at_k",
        "inputs": ["correct", "group", "valid", "num_groups", "k"],
        "output": "advantages [N] float32",
        "tests": [
            "tests/ops/test_best_of_k.py::test_pass_at_k_by_hand",
            "tests/ops/test_best_of_k.py::test_its_expectation_is_the_gradient_of_pass_at_k",
            "tests/ops/test_best_of_k.py::test_where_any_k_rows_hold_a_right_one_all_get_exactly_zero",
            "tests/ops/test_best_of_k.py::test_a_group_with_fewer_rows_than_k_gets_zero",
        ],
    },
    {
        "id": "A11",
        "function": "jrl.ops.best_of_k:best_minus_second",
        "inputs": ["reward", "group", "valid", "num_groups"],
        "output": "advantages [N] float32",
        "tests": [
            "tests/ops/test_best_of_k.py::test_best_minus_second_by_hand",
            "tests/ops/test_best_of_k.py::test_a_missing_reward_enters_no_statistic_and_order_does_not_matter",
        ],
    },
    {
        "id": "A11",
        "function": "jrl.ops.best_of_k:relative_to_mean",
        "inputs": ["reward", "group", "valid", "num_groups"],
        "output": "advantages [N] float32",
        "tests": [
            "tests/ops/test_best_of_k.py::test_relative_to_mean_by_hand",
            "tests/ops/test_best_of_k.py::test_relative_to_mean_does_not_change_with_the_scale",
        ],
    },
    {
        "id": "A12",
        "function": "jrl.ops.advantages:component_zscores",
        "inputs": ["components", "weights", "group", "valid", "num_groups", "epsilon"],
        "output": "advantages [N] float32, before whitening",
        "tests": [
            "tests/ops/test_advantages.py::test_component_zscores_by_hand",
            "tests/ops/test_advantages.py::test_one_component_is_grpo_and_a_missing_one_leaves_its_own_statistics_alone",
            "tests/ops/test_advantages.py::test_components_of_any_scale_weigh_alike",
        ],
    },
    {
        "id": "A13",
        "function": "jrl.ops.gae:gae",
        "inputs": ["token_reward", "values", "action_mask", "discount", "gae_lambda"],
        "output": "advantages [N, T] float32, before whitening",
        "tests": [
            "tests/ops/test_gae.py::test_gae_by_hand",
            "tests/ops/test_gae.py::test_gae_steps_over_a_tools_answer",
            "tests/ops/test_gae.py::test_gae_is_the_return_less_the_value_or_the_error_of_one_step",
            "tests/ops/test_gae.py::test_gae_takes_a_lambda_for_every_row",
        ],
    },
    {
        "id": "A14",
        "function": "jrl.ops.gae:length_adaptive_lambda",
        "inputs": ["action_mask", "alpha"],
        "output": "lambda [N] float32",
        "tests": [
            "tests/ops/test_gae.py::test_length_adaptive_lambda_by_hand",
            "tests/ops/test_gae.py::test_length_adaptive_lambda_counts_sampled_tokens_only",
        ],
    },
    {
        "id": "A14",
        "function": "jrl.ops.gae:decoupled_gae",
        "inputs": ["token_reward", "values", "action_mask", "discount", "policy_lambda", "critic_lambda"],
        "output": "(advantages before whitening, returns), [N, T] float32",
        "tests": [
            "tests/ops/test_gae.py::test_decoupled_gae_by_hand",
            "tests/ops/test_gae.py::test_decoupled_gae_leaves_out_what_was_not_sampled",
            "tests/ops/test_gae.py::test_coupled_lambdas_give_targets_of_the_policys_own_advantages",
        ],
    },
    {
        "id": "A15",
        "function": "jrl.ops.gae:ngram_starts",
        "inputs": ["action_mask", "size"],
        "output": "first token of every macro action [N, T] bool",
        "tests": [
            "tests/ops/test_gae.py::test_a_macro_never_spans_a_tools_answer",
            "tests/ops/test_gae.py::test_macros_are_as_long_as_asked_for",
        ],
    },
    {
        "id": "A15",
        "function": "jrl.ops.gae:macro_gae",
        "inputs": ["token_reward", "values", "action_mask", "macro_start", "discount", "gae_lambda"],
        "output": "(advantages before whitening, returns), [N, T] float32",
        "tests": [
            "tests/ops/test_gae.py::test_macro_gae_by_hand",
            "tests/ops/test_gae.py::test_discount_counts_macros",
            "tests/ops/test_gae.py::test_a_macro_never_spans_a_tools_answer",
            "tests/ops/test_gae.py::test_macros_of_one_token_are_gae_and_one_macro_is_the_reward_less_the_value",
        ],
    },
    {
        "id": "A16",
        "function": "jrl.ops.vtrace:vtrace",
        "inputs": [
            "token_reward",
            "values",
            "weights",
            "action_mask",
            "discount",
            "gae_lambda",
            "max_weight",
            "max_trace",
        ],
        "output": "(advantages, value targets), [N, T] float32",
        "tests": [
            "tests/ops/test_vtrace.py::test_vtrace_by_hand",
            "tests/ops/test_vtrace.py::test_the_bounds_the_discount_and_lambda_each_have_their_place",
            "tests/ops/test_vtrace.py::test_it_steps_over_a_tools_answer",
            "tests/ops/test_vtrace.py::test_a_rejected_token_ends_the_trace",
            "tests/ops/test_vtrace.py::test_on_policy_the_targets_are_gae_and_the_advantages_use_all_that_follows",
        ],
    },
    {
        "id": "A17",
        "function": "jrl.ops.tree:step_advantages",
        "inputs": ["success", "estimated", "rollouts"],
        "output": "advantages of steps [N, K] float32",
        "tests": [
            "tests/ops/test_tree.py::test_step_advantages_by_hand",
            "tests/ops/test_tree.py::test_a_difference_below_one_rollout_is_noise",
            "tests/ops/test_tree.py::test_a_step_without_an_estimate_before_or_after_it_gets_zero",
        ],
    },
    {
        "id": "A18",
        "function": "jrl.ops.tree:sibling_advantages",
        "inputs": ["value", "parent", "valid", "num_nodes"],
        "output": "advantages of nodes [M] float32",
        "tests": [
            "tests/ops/test_tree.py::test_sibling_advantages_by_hand",
            "tests/ops/test_tree.py::test_siblings_sum_to_zero_under_every_parent",
        ],
    },
    {
        "id": "A18",
        "function": "jrl.ops.tree:spread_nodes",
        "inputs": ["advantage", "node", "action_mask"],
        "output": "advantages [N, T] float32",
        "tests": [
            "tests/ops/test_tree.py::test_spread_nodes_puts_a_branch_on_its_own_tokens",
        ],
    },
    {
        "id": "A19",
        "function": "jrl.ops.stored_advantages:better_than_expected",
        "inputs": ["reward", "value", "valid"],
        "output": "advantages [N] float32",
        "tests": [
            "tests/ops/test_stored_advantages.py::test_better_than_expected_by_hand",
            "tests/ops/test_stored_advantages.py::test_rows_without_a_reward_are_dropped",
        ],
    },
    {
        "id": "A19",
        "function": "jrl.ops.stored_advantages:sampling_probabilities",
        "inputs": ["advantage"],
        "output": "probabilities [N] float32; raises ValueError where none is above 0",
        "tests": [
            "tests/ops/test_stored_advantages.py::test_sampling_probabilities_by_hand",
            "tests/ops/test_stored_advantages.py::test_nothing_better_than_expected_is_refused",
        ],
    },
    {
        "id": "A21",
        "function": "jrl.ops.turns:turn_advantages",
        "inputs": ["turn_reward", "present", "group", "valid", "discount", "num_groups"],
        "output": "advantages of turns [N, K] float32",
        "tests": [
            "tests/ops/test_turns.py::test_turn_advantages_by_hand",
            "tests/ops/test_turns.py::test_a_row_with_fewer_turns_is_absent_from_later_ones",
            "tests/ops/test_turns.py::test_groups_are_apart_and_order_does_not_matter",
        ],
    },
    {
        "id": "A21",
        "function": "jrl.ops.turns:spread_turns",
        "inputs": ["advantage", "turn", "action_mask"],
        "output": "advantages [N, T] float32",
        "tests": [
            "tests/ops/test_turns.py::test_spread_turns_puts_a_turn_on_its_sampled_tokens",
        ],
    },
    {
        "id": "A23",
        "function": "jrl.ops.advantages:whiten_by_task",
        "inputs": ["advantages", "task", "mask", "num_tasks"],
        "output": "advantages [N, T] float32",
        "tests": [
            "tests/ops/test_advantages.py::test_whiten_by_task_by_hand",
            "tests/ops/test_advantages.py::test_one_task_is_whitening_and_equal_advantages_are_exactly_zero",
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
]
