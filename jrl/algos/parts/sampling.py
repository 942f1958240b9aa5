"""Sampling strategies: section S of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "S1",
        "function": "jrl.ops.truncate:support",
        "inputs": ["logits", "top_k", "top_p", "min_p"],
        "output": "mask [..., V] bool",
        "tests": [
            "tests/ops/test_truncate.py::test_hand_numbers",
            "tests/ops/test_truncate.py::test_top_p_is_of_probabilities_whatever_the_logits_scale_and_1_keeps_all",
            "tests/ops/test_truncate.py::test_support_equals_sorting",
        ],
    },
    {
        "id": "S2",
        "function": "jrl.ops.keys:row_key",
        "inputs": ["key", "stream", "uid", "sample"],
        "output": "key of a sequence",
        "tests": ["tests/ops/test_keys.py::test_every_part_of_the_name_changes_the_key"],
    },
    {
        "id": "S3",
        "function": "jrl.ops.statistics:best_of_n",
        "inputs": ["rewards", "scored"],
        "output": "index [P] int64, -1: none",
        "tests": ["tests/ops/test_statistics.py::test_best_of_n_by_hand"],
    },
    {
        "id": "S3",
        "function": "jrl.ops.statistics:best_of_n_kl",
        "inputs": ["n"],
        "output": "nats",
        "tests": ["tests/ops/test_statistics.py::test_the_kl_of_the_best_of_n_by_hand"],
    },
    {
        "id": "S4",
        "function": "jrl.ops.statistics:majority",
        "inputs": ["answers", "weights"],
        "output": "answer, or None",
        "tests": [
            "tests/ops/test_statistics.py::test_majority_by_hand",
            "tests/ops/test_statistics.py::test_majority_tie_goes_to_the_first_seen_and_nobody_gives_none",
        ],
    },
    {
        "id": "S5",
        "function": "jrl.rollout.segments:next_segment",
        "inputs": [
            "params",
            "rollout",
            "uid",
            "key",
            "stream",
            "version",
            "sampling_params",
            "tokens",
            "options",
        ],
        "output": "Rollout",
        "tests": [
            "tests/test_strategies.py::test_segments_of_the_same_weights_are_what_one_call_draws",
            "tests/test_strategies.py::test_segments_are_of_the_versions_of_their_steps",
            "tests/test_strategies.py::test_a_run_in_segments_is_left_and_resumed",
        ],
    },
    {
        "id": "S6",
        "function": "jrl.rollout.strategies.reset:prefix",
        "inputs": ["config", "visit", "tokenizer", "room"],
        "output": "tokens that begin the completion",
        "tests": [
            "tests/test_strategies.py::test_a_reset_keeps_a_part_of_the_answer",
            "tests/test_strategies.py::test_answers_without_two_tokens_and_visits_by_chance_are_not_reset",
            "tests/test_strategies.py::test_what_waits_in_the_queue_begins_alike_after_a_resume",
        ],
    },
    {
        "id": "S7",
        "function": "jrl.rollout.strategies.roll_in:taken_of_guide",
        "inputs": ["words", "chance", "place", "probability"],
        "output": "tokens [B] int32",
        "tests": [
            "tests/test_strategies.py::test_what_is_taken_of_a_guide_by_hand",
            "tests/test_strategies.py::test_a_guide_begins_and_the_policy_goes_on",
        ],
    },
    {
        "id": "S7",
        "function": "jrl.rollout.strategies.roll_out:rolled_in",
        "inputs": ["words", "place", "chance", "probability"],
        "output": "(tokens [B] int32, the guide ends it [B] bool)",
        "tests": [
            "tests/test_strategies.py::test_what_is_kept_of_a_roll_in_by_hand",
            "tests/test_strategies.py::test_the_policy_draws_a_token_and_the_guide_goes_on",
        ],
    },
    {
        "id": "S8",
        "function": "jrl.ops.branching:most_uncertain",
        "inputs": ["entropy", "eligible", "count"],
        "output": "mask [N, T] bool",
        "tests": ["tests/ops/test_branching.py::test_the_most_uncertain_tokens_by_hand"],
    },
    {
        "id": "S8",
        "function": "jrl.ops.branching:branch_column",
        "inputs": ["candidates", "noise"],
        "output": "column [N] int32, -1: none",
        "tests": [
            "tests/ops/test_branching.py::test_the_column_is_the_candidate_with_the_most_noise",
            "tests/ops/test_branching.py::test_the_draw_is_fair",
            "tests/test_strategies.py::test_branches_go_on_from_within_the_first_rows",
        ],
    },
    {
        "id": "S12",
        "function": "jrl.ops.staleness:token_staleness",
        "inputs": ["version", "token_version", "action_mask"],
        "output": "versions [...] int32",
        "tests": [
            "tests/ops/test_staleness.py::test_staleness_by_hand",
            "tests/test_loop.py::test_update_t_learns_from_the_version_that_the_lag_declares",
        ],
    },
    {
        "id": "S12",
        "function": "jrl.ops.staleness:row_staleness",
        "inputs": ["version", "token_version", "action_mask"],
        "output": "versions [...] int32",
        "tests": ["tests/ops/test_staleness.py::test_staleness_by_hand"],
    },
    {
        "id": "S12",
        "function": "jrl.ops.staleness:rows_to_start",
        "inputs": ["version", "accepted", "running", "lag", "batch", "most_running"],
        "output": "rows, 0 or less: none",
        "tests": [
            "tests/ops/test_staleness.py::test_rows_to_start_by_hand",
            "tests/ops/test_staleness.py::test_a_queue_of_lag_draws_fills_the_bound_and_no_row_exceeds_it",
        ],
    },
    {
        "id": "S14",
        "function": "jrl.ops.mixture:mixed_logits",
        "inputs": ["logits", "reference_logits", "weight"],
        "output": "logits [..., V]",
        "tests": [
            "tests/ops/test_mixture_logprobs.py::test_the_mixture_by_hand",
            "tests/ops/test_mixture_logprobs.py::test_at_the_ends_it_is_one_of_the_two",
            "tests/test_strategies.py::test_opponents_are_drawn_from_the_mixture",
        ],
    },
    {
        "id": "S17",
        "function": "jrl.rollout.strategies.rows:second_turn",
        "inputs": ["first", "second"],
        "output": "fields of a Rollout, turns 0 and 1",
        "tests": [
            "tests/test_strategies.py::test_turns_by_hand",
            "tests/test_strategies.py::test_a_second_attempt_follows_the_first_and_the_instruction",
            "tests/test_strategies.py::test_each_attempt_is_scored",
        ],
    },
]
