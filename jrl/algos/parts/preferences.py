"""Preference, supervised and reward-model losses: section P of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

# Each of these objectives is a case of every one of them.
PAIR_TESTS = [
    "tests/algos/test_pair_objectives.py::test_by_hand",
    "tests/algos/test_pair_objectives.py::test_neither_order_nor_a_masked_pair_is_seen",
    "tests/algos/test_pair_objectives.py::test_the_gradient_is_that_of_small_differences",
]
GAIN_TESTS = [*PAIR_TESTS, "tests/algos/test_pair_objectives.py::test_gains_count_times_beta"]

PARTS: list[Part] = [
    {
        "id": "P1",
        "function": "jrl.algos.bradley_terry:sequence_loss",
        "inputs": ["config", "sequences", "state"],
        "output": "(loss [..., S] float32, metrics {name: [..., S]})",
        "tests": [
            "tests/algos/test_bradley_terry.py::test_the_loss_of_a_pair_by_hand",
            "tests/algos/test_bradley_terry.py::test_the_gradient_is_that_of_small_differences",
            "tests/algos/test_bradley_terry.py::test_a_pair_with_an_empty_answer_is_left_out",
        ],
    },
    {
        "id": "P2",
        "function": "jrl.ops.pair_losses:noisy_preference",
        "inputs": ["margin", "strength", "flip_below", "soft_below", "noise"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_pair_losses.py::test_by_hand",
            "tests/algos/test_noisy_bradley_terry.py::test_by_hand",
            "tests/algos/test_noisy_bradley_terry.py::test_masked_pairs_are_not_seen_and_strengths_have_no_gradient",
        ],
    },
    {
        "id": "P3",
        "function": "jrl.ops.reward_regression:attribute_error",
        "inputs": ["score", "rating", "rated"],
        "output": "loss [...] float32",
        "tests": [
            "tests/algos/test_reward_regression.py::test_attribute_error_by_hand",
            "tests/algos/test_reward_regression.py::test_attributes_that_are_not_rated_have_no_gradient",
        ],
    },
    {
        "id": "P4",
        "function": "jrl.ops.reward_regression:step_cross_entropy",
        "inputs": ["score", "label"],
        "output": "loss [...] float32",
        "tests": [
            "tests/algos/test_reward_regression.py::test_step_cross_entropy_by_hand",
            "tests/algos/test_reward_regression.py::test_a_step_is_judged_at_its_end_alone",
        ],
    },
    {
        "id": "P4",
        "function": "jrl.ops.reward_regression:rollout_label",
        "inputs": ["correct", "scored", "soft"],
        "output": "label [...] float32",
        "tests": ["tests/algos/test_reward_regression.py::test_labels_of_completions"],
    },
    {
        "id": "P4",
        "function": "jrl.ops.reward_regression:through_first_wrong",
        "inputs": ["label", "steps"],
        "output": "learned [..., K] bool",
        "tests": ["tests/algos/test_reward_regression.py::test_steps_after_the_first_wrong_one_are_left_out"],
    },
    {
        "id": "P5",
        "function": "jrl.algos.dpo:sequence_loss",
        "inputs": ["config", "sequences", "state"],
        "output": "loss [..., S] float32",
        "tests": [
            "tests/algos/test_dpo.py::test_the_running_example_by_hand",
            "tests/algos/test_dpo.py::test_a_masked_pair_is_not_seen_whatever_it_holds",
        ],
    },
    {
        "id": "P6",
        "function": "jrl.algos.conservative_dpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": [
            *PAIR_TESTS,
            "tests/algos/test_pair_objectives.py::test_a_label_between_is_the_strength_of_a_preference",
        ],
    },
    {
        "id": "P7",
        "function": "jrl.algos.robust_dpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": PAIR_TESTS,
    },
    {
        "id": "P8",
        "function": "jrl.algos.ipo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": [
            *PAIR_TESTS,
            "tests/algos/test_pair_objectives.py::test_ipo_of_means_takes_log_ratios_by_their_answers_length",
        ],
    },
    {
        "id": "P9",
        "function": "jrl.algos.hinge_dpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": PAIR_TESTS,
    },
    {
        "id": "P10",
        "function": "jrl.algos.kto:sequence_loss",
        "inputs": ["config", "sequences", "state"],
        "output": "loss [..., S] float32",
        "tests": [
            "tests/algos/test_kto.py::test_by_hand",
            "tests/algos/test_kto.py::test_the_gradient_raises_the_good_and_lowers_the_bad",
        ],
    },
    {
        "id": "P10",
        "function": "jrl.algos.kto:sequence_baseline",
        "inputs": ["config", "sequences"],
        "output": "baseline [] float32",
        "tests": ["tests/algos/test_kto.py::test_the_baseline_is_the_mean_gain_of_mismatched_answers"],
    },
    {
        "id": "P11",
        "function": "jrl.algos.orpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": PAIR_TESTS,
    },
    {
        "id": "P12",
        "function": "jrl.algos.simpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": PAIR_TESTS,
    },
    {
        "id": "P13",
        "function": "jrl.algos.length_normalized_dpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": PAIR_TESTS,
    },
    {
        "id": "P14",
        "function": "jrl.algos.f_dpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": [
            *PAIR_TESTS,
            "tests/algos/test_pair_objectives.py::test_the_reverse_kl_of_fdpo_and_certain_labels_of_conservative_dpo_are_dpo",
        ],
    },
    {
        "id": "P15",
        "function": "jrl.algos.exo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": GAIN_TESTS,
    },
    {
        "id": "P15",
        "function": "jrl.algos.nca:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": GAIN_TESTS,
    },
    {
        "id": "P15",
        "function": "jrl.algos.sppo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": PAIR_TESTS,
    },
    {
        "id": "P15",
        "function": "jrl.algos.apo_zero:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": GAIN_TESTS,
    },
    {
        "id": "P15",
        "function": "jrl.algos.apo_down:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": GAIN_TESTS,
    },
    {
        "id": "P15",
        "function": "jrl.algos.bco:sequence_loss",
        "inputs": ["config", "sequences", "state"],
        "output": "loss [..., S] float32",
        "tests": [
            *GAIN_TESTS,
            "tests/algos/test_pair_objectives.py::test_the_shift_of_bco_follows_the_mean_and_begins_at_zero",
        ],
    },
    {
        "id": "P18",
        "function": "jrl.ops.win_rate:win_probability",
        "inputs": ["reward", "group", "players", "opponents", "num_groups"],
        "output": "probability [N] float32",
        "tests": [
            "tests/algos/test_nash_md.py::test_the_win_rate_by_hand",
            "tests/algos/test_nash_md.py::test_the_gradient_is_that_of_the_published_loss",
        ],
    },
    {
        "id": "P19",
        "function": "jrl.ops.pair_losses:inpo",
        "inputs": ["margin", "ref_margin", "previous_margin", "eta", "tau"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_pair_losses.py::test_by_hand",
            "tests/algos/test_sampled_pairs.py::test_by_hand",
            "tests/algos/test_sampled_pairs.py::test_the_gradient_is_that_of_small_differences",
            "tests/algos/test_sampled_pairs.py::test_inpo_with_tau_at_eta_is_ipo_and_with_none_it_looks_at_the_last_policy_alone",
        ],
    },
    {
        "id": "P21",
        "function": "jrl.algos.vpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": GAIN_TESTS,
    },
    {
        "id": "P22",
        "function": "jrl.ops.pair_losses:step_apo",
        "inputs": ["margin", "value", "other_value", "scale"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_pair_losses.py::test_by_hand",
            "tests/algos/test_lists.py::test_step_apo_by_hand",
        ],
    },
    {
        "id": "P23",
        "function": "jrl.ops.listwise:pro",
        "inputs": ["mean_logprob", "reward", "mask"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_pair_losses.py::test_pro_by_hand_whatever_the_order_and_what_is_masked",
            "tests/algos/test_lists.py::test_pro_by_hand",
            "tests/algos/test_lists.py::test_the_gradient_is_that_of_small_differences_and_none_where_masked",
        ],
    },
    {
        "id": "P23",
        "function": "jrl.ops.listwise:rrhf",
        "inputs": ["mean_logprob", "reward", "mask"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_pair_losses.py::test_rrhf_by_hand",
            "tests/algos/test_lists.py::test_rrhf_by_hand",
            "tests/algos/test_lists.py::test_the_gradient_is_that_of_small_differences_and_none_where_masked",
        ],
    },
    {
        "id": "P26",
        "function": "jrl.algos.cpl:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": PAIR_TESTS,
    },
    {
        "id": "P29",
        "function": "jrl.ops.pair_losses:soft_preference",
        "inputs": ["margin", "preference"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_pair_losses.py::test_by_hand",
            "tests/algos/test_pair_objectives.py::test_a_label_between_is_the_strength_of_a_preference",
            "tests/algos/test_sampled_pairs.py::test_the_labels_of_osp_are_how_strongly_the_rewards_prefer",
        ],
    },
    {
        "id": "P30",
        "function": "jrl.algos.wpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": PAIR_TESTS,
    },
    {
        "id": "P30",
        "function": "jrl.algos.rpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": PAIR_TESTS,
    },
    {
        "id": "P31",
        "function": "jrl.ops.soft_q:expectile",
        "inputs": ["error", "tau"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_pair_losses.py::test_by_hand"],
    },
    {
        "id": "P31",
        "function": "jrl.ops.soft_q:q_error",
        "inputs": ["q", "reward", "next_value", "discount"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_pair_losses.py::test_by_hand",
            "tests/ops/test_pair_losses.py::test_weights_and_shifts_carry_no_gradient",
        ],
    },
    {
        "id": "P31",
        "function": "jrl.ops.soft_q:conservative_q",
        "inputs": ["logits", "action"],
        "output": "loss [...] float32",
        "tests": [
            "tests/ops/test_pair_losses.py::test_conservative_q_is_the_surprise_of_the_action",
            "tests/ops/test_pair_losses.py::test_values_and_ranks_are_computed_wide",
        ],
    },
    {
        "id": "P32",
        "function": "jrl.ops.soft_q:inverse_soft_q",
        "inputs": ["logprob", "value", "next_value", "discount", "weight"],
        "output": "loss [...] float32",
        "tests": ["tests/ops/test_pair_losses.py::test_by_hand"],
    },
    {
        "id": "P33",
        "function": "jrl.algos.sft:token_loss",
        "inputs": ["config", "tokens", "state"],
        "output": "loss [..., L] float32",
        "tests": [
            "tests/algos/test_sft.py::test_the_loss_is_the_mean_surprise_of_the_tokens",
            "tests/algos/test_sft.py::test_nothing_under_the_mask_gets_through",
        ],
    },
    {
        "id": "P34",
        "function": "jrl.algos.dft:token_loss",
        "inputs": ["config", "tokens", "state"],
        "output": "loss [..., L] float32",
        "tests": [
            "tests/algos/test_dft.py::test_a_token_counts_by_its_probability_without_a_gradient_through_it",
            "tests/algos/test_dft.py::test_nothing_under_the_mask_gets_through",
        ],
    },
    {
        "id": "P37",
        "function": "jrl.ops.divergence:reverse_kl",
        "inputs": ["policy", "teacher"],
        "output": "divergence [...] float32",
        "tests": [
            "tests/ops/test_divergence.py::test_by_hand",
            "tests/ops/test_divergence.py::test_the_direction_of_each",
        ],
    },
    {
        "id": "P37",
        "function": "jrl.ops.divergence:forward_kl",
        "inputs": ["policy", "teacher"],
        "output": "divergence [...] float32",
        "tests": [
            "tests/ops/test_divergence.py::test_by_hand",
            "tests/ops/test_divergence.py::test_the_direction_of_each",
        ],
    },
    {
        "id": "P37",
        "function": "jrl.ops.divergence:jensen_shannon",
        "inputs": ["policy", "teacher", "share"],
        "output": "divergence [...] float32",
        "tests": [
            "tests/ops/test_divergence.py::test_by_hand",
            "tests/ops/test_divergence.py::test_the_direction_of_each",
        ],
    },
    {
        "id": "P37",
        "function": "jrl.ops.divergence:teacher_advantage",
        "inputs": ["old_logprobs", "teacher_logprobs", "action_mask"],
        "output": "advantages [N, T] float32",
        "tests": [
            "tests/ops/test_divergence.py::test_a_sampled_token_is_rewarded_by_what_the_teacher_gives_it_more",
            "tests/ops/test_divergence.py::test_the_policy_gradient_with_that_advantage_is_the_gradient_of_the_reverse_kl",
        ],
    },
    {
        "id": "P16",
        "function": "jrl.algos.online_ipo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": [
            "tests/algos/test_sampled_pairs.py::test_by_hand",
            "tests/algos/test_sampled_pairs.py::test_the_gradient_is_that_of_small_differences",
        ],
    },
    {
        "id": "P17",
        "function": "jrl.algos.online_simpo:loss",
        "inputs": ["config", "pair"],
        "output": "loss [..., S] float32",
        "tests": [
            "tests/algos/test_sampled_pairs.py::test_by_hand",
            "tests/algos/test_sampled_pairs.py::test_the_gradient_is_that_of_small_differences",
        ],
    },
    {
        "id": "P20",
        "function": "jrl.ops.pair_losses:xpo",
        "inputs": ["margin", "ref_sample_logprob", "alpha"],
        "output": "loss [...] float32",
        "tests": [
            "tests/algos/test_sampled_pairs.py::test_by_hand",
            "tests/algos/test_sampled_pairs.py::test_the_gradient_is_that_of_small_differences",
            "tests/algos/test_sampled_pairs.py::test_the_bonus_of_xpo_is_of_the_references_answer_whichever_is_preferred",
        ],
    },
    {
        "id": "P24",
        "function": "jrl.tasks.data.conditioned:rows",
        "inputs": ["config", "visits", "tokenizer", "width"],
        "output": "(StoredRows of pairs whose prompt asks for a score, {cause: visits left out})",
        "tests": [
            "tests/data/test_conditioned.py::test_either_answer_is_right_for_its_own_score",
            "tests/data/test_conditioned.py::test_pairs_are_left_out_whole_and_counted_by_cause",
        ],
    },
]
