"""The functions of an objective (jrl.algos.contract.Objective)."""

from __future__ import annotations

from jrl.algos.parts.part import Part

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
        "output": "Needs: a reference, a teacher, a value head, a reward head, the entropy's gradient",
        "tests": ["tests/contracts/test_algos.py::test_the_entropy_gradient_is_asked_for_where_there_is_a_bonus"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.check_stored",
        "inputs": ["config", "value"],
        "output": "None; raises ValueError for stored rows that give nothing to learn from",
        "tests": [
            "tests/algos/test_stored_advantage_rows.py::"
            "test_data_without_an_answer_that_is_better_than_expected_are_refused"
        ],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.draw",
        "inputs": ["config"],
        "output": "(value [n, K]) -> chances [n] of examples of stored rows, or None: in turn",
        "tests": [
            "tests/algos/test_stored_advantage_rows.py::test_rows_are_drawn_in_proportion_to_their_advantage",
        ],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.corrects_staleness",
        "inputs": ["config"],
        "output": "whether Online.lag may be above 1",
        "tests": ["tests/contracts/test_algos.py::test_importance_weights_with_a_cap_let_the_lag_be_any"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.init_state",
        "inputs": ["config"],
        "output": "state: a tree of arrays, part of the checkpoint",
        "tests": [
            "tests/algos/test_reinforce.py::test_the_first_batch_is_compared_with_its_own_mean",
            "tests/contracts/test_algos.py::test_defaults_pass_the_contract_test",
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
        "function": "jrl.algos.contract:Objective.keep_tokens",
        "inputs": ["config", "groups"],
        "output": "tokens [N, T] bool that may enter the loss where their row does",
        "tests": ["tests/algos/test_say_self.py::test_tokens_before_the_confidence_do_not_learn"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.shape",
        "inputs": ["config", "groups"],
        "output": "reward [N] float32, which advantages are computed from",
        "tests": ["tests/algos/test_dapo.py::test_the_reward_falls_over_the_last_tokens_before_the_limit"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.shape_with_state",
        "inputs": ["config", "groups", "reward", "state"],
        "output": "reward [N] float32, after a change that depends on the state",
        "tests": ["tests/algos/test_ppo_max.py::test_rewards_are_divided_by_their_running_deviation"],
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
        "function": "jrl.algos.contract:Objective.pairs",
        "inputs": ["config", "groups", "reward"],
        "output": "Pairs: label, unit and weight [N] of the sampled rows that are compared",
        "tests": ["tests/algos/test_online_dpo.py::test_the_best_sample_is_preferred_to_the_worst"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.select",
        "inputs": ["config", "groups", "advantages"],
        "output": "selected [N, T] bool, tokens that token_loss treats differently",
        "tests": ["tests/algos/test_kl_cov.py::test_the_tokens_of_largest_covariance_are_selected"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.positive",
        "inputs": ["config", "groups"],
        "output": "rows [N] bool, whose tokens token_loss averages separately",
        "tests": ["tests/algos/test_vapo.py::test_right_answers_are_those_of_a_positive_outcome"],
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
        "function": "jrl.algos.contract:Objective.value_loss",
        "inputs": ["config", "tokens", "state"],
        "output": "(loss [..., L] float32, metrics {name: [..., L]})",
        "tests": ["tests/algos/test_ppo.py::test_a_critic_of_its_own_learns_by_the_value_loss_alone"],
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
        "function": "jrl.algos.contract:Objective.sequence_baseline",
        "inputs": ["config", "sequences"],
        "output": "[] float32, a number of the whole optimizer step that sequence_loss reads",
        "tests": ["tests/algos/test_kto.py::test_the_baseline_is_the_mean_gain_of_mismatched_answers"],
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
        "tests": ["tests/contracts/test_algos.py::test_defaults_pass_the_contract_test"],
    },
    {
        "id": "row",
        "function": "jrl.algos.contract:Objective.stop",
        "inputs": ["config", "metrics"],
        "output": "why a run with these metrics of a step must not go on; on the host",
        "tests": [
            "tests/algos/test_icepop.py::test_a_run_stops_where_more_than_half_of_the_tokens_are_rejected",
            "tests/test_nonfinite_run.py::test_a_run_that_its_objective_stops_has_the_checkpoint_before_and_goes_on_without_the_limit",
        ],
    },
]
