"""Optimizers: section O of docs/algorithms.md."""

from __future__ import annotations

from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    {
        "id": "O1",
        "function": "jrl.learning.optimizers.adamw:direction",
        "inputs": ["config", "leaves"],
        "output": "optax transformation",
        "tests": [
            "tests/test_optimizer.py::test_updates_of_adamw_are_those_of_optax",
            "tests/test_optimizer.py::test_weight_decay_leaves_norms_and_biases_alone_unless_asked",
        ],
    },
    {
        "id": "O1",
        "function": "jrl.learning.optimizers.muon:direction",
        "inputs": ["config", "leaves"],
        "output": "optax transformation",
        "tests": [
            "tests/test_optimizer.py::test_muon_on_stacks_is_optax_muon_on_every_matrix",
            "tests/test_optimizer.py::test_muon_of_a_diagonal_matrix_by_hand",
        ],
    },
    {
        "id": "O1",
        "function": "jrl.learning.optimizers.adafactor:direction",
        "inputs": ["config", "leaves"],
        "output": "optax transformation",
        "tests": [
            "tests/test_optimizer.py::test_adafactor_on_stacks_is_optax_on_every_matrix",
            "tests/test_optimizer.py::test_adafactors_first_direction_by_hand",
        ],
    },
    {
        "id": "O2",
        "function": "jrl.learning.optimizer:clip",
        "inputs": ["config"],
        "output": "optax transformation",
        "tests": ["tests/test_optimizer.py::test_clipping_is_by_the_global_norm_of_all_arrays"],
    },
    {
        "id": "O3",
        "function": "jrl.learning.optimizers.schedules:share_of_peak",
        "inputs": ["schedule", "count"],
        "output": "share of the peak []",
        "tests": [
            "tests/test_optimizer.py::test_a_schedule_is_a_share_of_the_peak",
            "tests/test_optimizer.py::test_step_five_of_ten_of_a_warmup_is_half_the_peak",
        ],
    },
    {
        "id": "O4",
        "function": "jrl.compatibility:check_master_weights",
        "inputs": ["config"],
        "output": "None; raises ValueError where trained weights are bfloat16",
        "tests": [
            "tests/test_optimizer.py::test_a_small_update_is_lost_in_bfloat16_weights_and_not_in_float32",
            "tests/test_lora_run.py::test_frozen_weights_may_be_bfloat16_and_trained_ones_may_not",
        ],
    },
    {
        "id": "O5",
        "function": "jrl.learning.optimizers.groups:peak_rate",
        "inputs": ["config", "leaf"],
        "output": "learning rate [] float",
        "tests": ["tests/test_optimizer.py::test_a_group_has_its_learning_rate_and_the_first_that_matches_counts"],
    },
    {
        "id": "O5",
        "function": "jrl.experiment:optimizers",
        "inputs": ["stage"],
        "output": "{role: optimizer}",
        "tests": ["tests/test_optimizer.py::test_a_critic_of_its_own_has_its_own_learning_rate"],
    },
    {
        "id": "O6",
        "function": "jrl.learning.step:updates",
        "inputs": ["p", "state", "learned", "arrays"],
        "output": "state, metrics of every update",
        "tests": [
            "tests/test_step_parts.py::test_every_epoch_updates_by_every_minibatch_in_order",
            "tests/test_learner.py::test_minibatches_share_out_every_sequence_once",
        ],
    },
    {
        "id": "O6",
        "function": "jrl.learning.step:limit_after",
        "inputs": ["kl_limit", "metrics"],
        "output": "KL limit of the next update",
        "tests": [
            "tests/test_step_parts.py::test_an_update_after_the_kl_limit_is_told_so_and_the_next_step_begins_anew",
            "tests/test_learner.py::test_an_update_above_the_kl_limit_is_left_out_and_those_after_it_are_not_computed",
            "tests/test_learner.py::test_a_non_finite_update_is_skipped_under_a_kl_limit_too",
        ],
    },
    {
        "id": "O7",
        "function": "jrl.learning.optimizer:step",
        "inputs": ["row", "config", "gradient", "state", "params", "leaves", "sound"],
        "output": "parameters, state, updates",
        "tests": ["tests/test_optimizer.py::test_an_unsound_step_keeps_every_bit_of_weights_and_state"],
    },
    {
        "id": "O8",
        "function": "jrl.learning.optimizer:step",
        "inputs": ["row", "config", "gradient", "state", "params", "leaves", "sound"],
        "output": "parameters, state, updates",
        "tests": [
            "tests/test_learner.py::test_a_batch_without_a_token_to_learn_from_is_skipped",
            "tests/test_optimizer.py::test_a_sound_step_moves_what_is_trained_and_its_moments_by_hand",
            "tests/test_optimizer.py::test_an_unsound_step_keeps_every_bit_of_weights_and_state",
        ],
    },
    {
        "id": "O9",
        "function": "jrl.run.train_state:begin_stage",
        "inputs": [
            "state",
            "trains",
            "optimizer",
            "objective",
            "config",
            "model",
            "cfg",
            "num_previous",
            "critic",
            "critic_optimizer",
        ],
        "output": "state with fresh moments",
        "tests": [
            "tests/test_stages.py::test_a_stage_leaves_its_roles_to_the_next_ones",
            "tests/test_train_state.py::test_a_stage_keeps_heads_that_fit_and_draws_the_others_again",
            "tests/test_train_state.py::test_a_stage_begins_with_fresh_moments_at_version_0",
            "tests/test_train_state.py::test_a_stage_copies_the_model_that_it_trains_to_the_roles_that_it_needs",
            "tests/test_train_state.py::test_copies_stand_on_the_frozen_weights_that_the_trained_model_stands_on",
            "tests/test_train_state.py::test_a_critic_has_the_value_head_and_moments_of_its_own",
        ],
    },
    {
        "id": "O9",
        "function": "jrl.run.train_state:continue_stage",
        "inputs": ["state", "trains", "begin_fn"],
        "output": "state with the moments of the stage before",
        "tests": [
            "tests/test_recipe_runs.py::test_the_optimizer_of_a_longer_window_continues_that_of_the_shorter_one",
            "tests/test_train_state.py::test_a_stage_may_continue_the_optimizer_of_the_stage_before",
        ],
    },
]
