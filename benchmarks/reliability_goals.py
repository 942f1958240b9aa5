"""The release-blocking goals (P0) of reliability: what is promised, which tests try it, and what is not promised.

The ids are those of docs/reliability.md, which is made from this table: R exactness, K checkpoints, N numbers,
V verifiers, H hosts, W sampler and learner, C configuration, D data, E surroundings, S security.
"""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """A promise and the tests that try it, as pytest names them. Without tests `limits` says why."""

    promise: str
    tests: tuple[str, ...] = ()  # always
    more: tuple[str, ...] = ()  # with the full number of trials only
    limits: str = ""  # what is not promised, or not shown

    def nodes(self, size: str) -> list[str]:
        """Returns the tests of a size of the trials, each once."""
        return list(dict.fromkeys([*self.tests, *(self.more if size == "full" else ())]))


def _in(file: str, *names: str) -> tuple[str, ...]:
    """Returns tests of one file; without names, all of it."""
    return tuple(f"tests/{file}::{name}" for name in names) or (f"tests/{file}",)


HOSTS = "Tried with processes of one machine, never on several hosts."
PROGRAMS = "jrl runs no programs that a model wrote. It has no sandbox for them, and does not promise one."
GOALS: dict[str, Goal] = {
    "R1": Goal(
        "killed at any point and started again, a run ends with the same bits and the same metrics",
        _in("test_loop.py", "test_a_run_that_is_left_and_resumed_has_the_same_metrics_as_one_that_is_not")
        + _in("trials/test_kill.py", "test_a_killed_run_resumes_to_the_same_bits[save-2-0.15-0]"),
        _in("trials/test_kill_often.py") + _in("trials/test_kill.py") + _in("trials/test_kill_stages.py"),
        "On the same hardware and versions.",
    ),
    "R2": Goal(
        "asked to stop, a run saves, exits with a code of its own, and goes on where it was",
        _in("test_cli.py", "test_one_signal_asks_to_stop")
        + _in("test_cli.py", "test_an_interrupt_after_a_stop_request_leaves_at_once_whatever_the_main_thread_does")
        + _in("test_cli.py", "test_a_run_that_is_asked_to_stop_saves_and_the_same_command_goes_on")
        + _in("test_loop.py", "test_a_stop_in_an_evaluation_is_heard_between_its_batches")
        + _in("test_scoring.py", "test_a_stop_request_ends_scoring_soon_and_the_scorer_can_be_used_on")
        + _in("test_signals.py"),
        _in("trials/test_kill.py", "test_a_run_that_is_asked_to_stop_saves_and_resumes_to_the_same_bits")
        + _in(
            "trials/test_exits.py",
            "test_a_run_that_is_asked_to_stop_anywhere_exits_with_its_code_and_ends_with_the_same_bits",
        ),
        "A compilation is not interrupted: a stop request during one is heard at its end.",
    ),
    "R3": Goal(
        "the same configuration and seed give the same bits, whatever the number of workers and their order",
        _in("test_loop.py", "test_the_number_of_scoring_workers_changes_nothing")
        + _in("verifiers/test_pool.py", "test_verdicts_depend_neither_on_the_number_of_workers_nor_on_the_order")
        + _in("test_sampler.py", "test_any_row_and_order_gives_the_same_bits_at_one_batch_shape")
        + _in("test_sampler.py", "test_other_neighbors_do_not_change_a_bit"),
        _in("test_sampler_trials.py", "test_2000_sequences_are_the_same_tokens_in_every_layout"),
        "On the same hardware and versions.",
    ),
    "R4": Goal(
        "a resumed run visits the prompts that the uninterrupted one does, each once an epoch",
        _in("data/test_stream.py", "test_random_kills_resume_exactly_and_every_epoch_is_whole"),
    ),
    "R5": Goal(
        "a run is not continued on other data, tokenizer, model, settings or verifier code",
        _in("test_loop.py", "test_another_identity_is_refused_with_the_field_that_differs")
        + _in("test_cli.py", "test_another_seed_in_the_same_folder_is_another_run")
        + _in("test_continue.py", "test_a_comment_in_a_verifier_is_refused_and_can_be_accepted")
        + _in(
            "test_job.py",
            "test_any_change_of_a_setting_is_refused_by_its_name_or_is_one_of_those_that_may_change",
            "test_any_change_of_data_or_plugin_is_refused",
        )
        + _in("test_job.py", "test_data_may_be_moved_but_not_renamed_or_changed")
        + _in("test_job.py", "test_a_refusal_names_only_what_makes_another_run"),
    ),
    "R6": Goal(
        "a state saved on one mesh is the same bits on another, and the same tokens are drawn and learned from",
        _in("checkpoints/test_run_state.py", "test_a_state_moves_between_device_counts")
        + _in("checkpoints/test_run_state.py", "test_a_state_moves_between_all_meshes")
        + _in("test_sampler.py", "test_eight_devices_draw_the_same"),
        _in("test_learner.py", "test_loss_and_gradient_do_not_depend_on_layout"),
        "Later steps agree to rounding, not to the bit: sums over devices have another order.",
    ),
    "R8": Goal(
        "a run with nothing to do says so with an exit code of its own; one whose checkpoints are gone, with another",
        _in("test_finished_run.py") + _in("test_loop.py", "test_more_steps_go_on_where_fewer_ended"),
        _in("trials/test_exits.py", "test_every_end_has_its_exit_code_whatever_the_steps_epochs_and_saves"),
    ),
    "R9": Goal(
        "from any saved step the later steps come out the same again",
        _in("trials/test_same_steps.py", "test_the_steps_after_a_saved_one_come_out_the_same"),
        _in(
            "trials/test_same_steps.py", "test_the_steps_after_any_saved_one_come_out_the_same_in_every_kind_of_run"
        ),
        "On the same hardware and versions.",
    ),
    "K1": Goal(
        "no damage to a checkpoint is restored silently: it is named, and the newest intact one is used",
        _in("checkpoints/test_run_state.py", "test_a_damaged_newest_step_is_named_and_the_one_before_is_used")
        + _in("checkpoints/test_run_state.py", "test_files_of_another_step_and_other_names_are_damage")
        + _in("checkpoints/test_run_state.py", "test_no_intact_step_is_a_refusal_that_lists_them"),
        limits="The digests find damage. They are no signature: whoever can write the folder can forge a step.",
    ),
    "K2": Goal(
        "death at any file operation of a save leaves the old step or the new one",
        _in("checkpoints/test_run_state.py", "test_death_at_any_file_operation_leaves_the_old_or_the_new_step")
        + _in("checkpoints/test_run_state.py", "test_a_save_killed_on_the_way_leaves_a_good_step"),
        _in("checkpoints/test_run_state.py", "test_saves_killed_at_many_points_leave_a_good_step"),
    ),
    "K3": Goal(
        "a full disk is reported by the save that meets it, and the step before stays",
        _in("checkpoints/test_run_state.py", "test_a_full_disk_is_reported_and_the_earlier_step_stays")
        + _in("checkpoints/test_run_state.py", "test_an_error_at_any_file_operation_is_reported_at_once[ENOSPC]"),
        _in(
            "checkpoints/test_run_state.py",
            "test_a_disk_that_is_full_at_any_byte_is_reported_and_the_earlier_step_stays",
        ),
    ),
    "K4": Goal(
        "retention never removes the only step that can be restored, and nothing before the new one is verified",
        _in("checkpoints/test_run_state.py", "test_retention_never_removes_the_only_step_that_can_be_restored")
        + _in("checkpoints/test_run_state.py", "test_nothing_is_pruned_when_the_new_step_fails")
        + _in("test_nonfinite_run.py", "test_the_last_save_that_a_sound_step_learned_from_is_never_pruned"),
    ),
    "K5": Goal(
        "a run folder has one trainer; a dead one holds nothing",
        _in("checkpoints/test_lock.py") + _in("test_cli.py", "test_a_folder_that_is_held_is_refused"),
        limits="On file systems whose locks hold (flock). The folder of a stopped process stays its own.",
    ),
    "K6": Goal(
        "what is saved is the state of the step, though the next step reuses its buffers",
        _in("checkpoints/test_run_state.py", "test_a_saved_state_is_not_touched_by_the_steps_after_it"),
        limits="A save ends before the next step begins: there is no background writer.",
    ),
    "K7": Goal(
        "an error of a save is raised by that save, and named with the last good checkpoint",
        _in("checkpoints/test_run_state.py", "test_an_error_at_any_file_operation_is_reported_at_once[ENOSPC]")
        + _in("test_cli.py", "test_a_failed_save_names_the_last_checkpoint_once"),
        _in("checkpoints/test_run_state.py", "test_an_error_at_any_file_operation_is_reported_at_once"),
        "A save ends before the next step begins: there is no background writer.",
    ),
    "K8": Goal(
        "loading a folder of somebody else's runs nothing, reads nothing outside it, and takes bounded memory",
        _in("test_foreign_files.py") + _in("checkpoints/test_published.py"),
    ),
    "N1": Goal(
        "a step with a value that is not finite changes no bit of the state, and is counted with its cause",
        _in("test_nonfinite.py")
        + _in("test_learner.py", "test_a_non_finite_update_keeps_every_bit_and_is_counted")
        + _in("test_learner.py", "test_a_value_that_is_not_finite_anywhere_keeps_every_bit"),
    ),
    "N2": Goal(
        "five such steps in a row stop the run, with a good checkpoint and a bundle that replays the fault",
        _in("test_nonfinite_run.py"),
    ),
    "N4": Goal(
        "degenerate groups give finite results: equal rewards, one sample, all masked, nothing to score",
        _in("ops/test_degenerate_groups.py")
        + _in("test_learner.py", "test_a_batch_without_a_token_to_learn_from_is_skipped"),
    ),
    "N5": Goal(
        "what is no finite number within the declared range is an error of the verifier's, never a reward of 0",
        _in("verifiers/test_judge.py")
        + _in("verifiers/test_confinement.py", "test_the_trainer_takes_no_verdict_that_no_judge_gives")
        + _in("test_scoring.py", "test_a_row_that_one_verifier_cannot_judge_is_masked_and_never_a_zero_reward"),
    ),
    "N6": Goal(
        "faults planted in formulas are noticed by the formulas' tests",
        _in("benchmarks/test_mutants.py"),
        limits="These tests try the tool. The faults themselves: `python -m benchmarks.mutants --out F.json` for "
        "formulas and `python -m benchmarks.named_mutants --out F.json` for what is around them. docs/log.md has both.",
    ),
    "V1": Goal(
        "a verifier that hangs is ended at its deadline, and nothing of it stays",
        _in("verifiers/test_pool.py", "test_every_hostile_verifier_gets_its_one_verdict_and_disturbs_no_other")
        + _in("verifiers/test_pool.py", "test_a_stop_request_kills_what_is_judged_and_leaves_other_batches_alone"),
        _in("verifiers/test_pool.py", "test_hangs_each_end_in_time"),
    ),
    "V2": Goal(
        "a worker's death gives its item one verdict and disturbs no other",
        _in("verifiers/test_pool.py", "test_a_killed_worker_is_replaced_and_the_item_it_had_not_begun_is_tried_again")
        + _in("verifiers/test_pool.py", "test_a_killed_template_is_replaced_with_its_workers"),
        _in("verifiers/test_pool.py", "test_a_thousand_deaths_leave_the_pool_as_it_was"),
    ),
    "V3": Goal(
        "a verdict does not depend on other items",
        _in("verifiers/test_pool.py", "test_verdicts_depend_neither_on_the_number_of_workers_nor_on_the_order")
        + _in("verifiers/test_confinement.py", "test_a_worker_that_is_not_what_it_was_scores_nothing_more")
        + _in("contracts/test_verifiers.py"),
        _in("verifiers/test_pool.py", "test_verdicts_depend_on_no_other_item_in_twenty_orders"),
        "A verifier of your own that evaluates text which knows how workers are watched can evade that; "
        "`single_use=True` gives every completion a worker of its own.",
    ),
    "V4": Goal(
        "a failure of ours masks a row and is never scored as wrong; too many stop the run",
        _in("verifiers/test_pool.py", "test_a_template_that_cannot_come_back_is_our_failure_and_no_wrong_answer")
        + _in("test_scoring.py", "test_too_many_failures_of_our_own_stop_the_run")
        + _in("test_scoring.py", "test_a_row_that_one_verifier_cannot_judge_is_masked_and_never_a_zero_reward")
        + _in("test_scoring.py", "test_no_fault_of_the_machine_makes_a_right_answer_wrong[20]"),
        _in("test_scoring.py", "test_no_fault_of_the_machine_makes_a_right_answer_wrong[500]"),
    ),
    "V5": Goal(
        "verdicts are the same on a machine that does much else",
        _in("trials/test_verdicts_under_load.py"),
    ),
    "V7": Goal(
        "the trainer never forks: workers come from a process without JAX, threads and secrets",
        _in("verifiers/test_pool.py", "test_workers_hold_no_secret_and_no_jax") + _in("verifiers/test_launch.py"),
    ),
    "V8": Goal(
        "no verifier uses a network",
        _in("verifiers/test_system_calls.py")
        + _in("verifiers/test_pool.py", "test_every_hostile_verifier_gets_its_one_verdict_and_disturbs_no_other"),
        limits="On Linux, where the filter denies sockets.",
    ),
    "H1": Goal(
        "hosts that differ in configuration, code or data do not start",
        _in("test_processes.py", "test_a_difference_names_process_field_and_both_values")
        + _in("test_processes.py", "test_any_fact_that_one_process_has_otherwise_stops_all_by_its_name")
        + _in("test_processes.py", "test_a_field_that_one_process_does_not_have_is_a_difference")
        + _in("test_processes.py", "test_the_source_digest_sees_a_changed_line_and_a_moved_file"),
        _in("trials/test_kill_pods.py", "test_processes_that_disagree_are_refused"),
        HOSTS,
    ),
    "H2": Goal(
        "a host that dies ends the others, and the run resumes",
        _in("test_processes.py", "test_a_service_that_does_not_answer_means_that_process_0_is_lost")
        + _in("test_processes.py", "test_who_waits_for_a_process_that_has_failed_raises_its_message_and_code")
        + _in("test_processes.py", "test_the_exit_code_of_all_processes"),
        _in("trials/test_kill_pods.py", "test_the_others_end_and_the_run_goes_on_to_the_same_bits")
        + _in("trials/test_kill_pods.py", "test_after_a_kill_another_number_of_processes_goes_on"),
        HOSTS,
    ),
    "H3": Goal(
        "a host that hangs is found and named",
        _in("test_processes.py", "test_a_step_is_late_by_the_median_of_the_steps_before")
        + _in("test_processes.py", "test_a_step_of_any_length_is_late_after_three_medians_and_half_a_minute")
        + _in("test_processes.py", "test_no_process_that_is_slow_is_lost_and_each_that_ends_is"),
        _in("trials/test_kill_pods.py", "test_a_stopped_process_is_found_and_the_run_goes_on"),
        HOSTS,
    ),
    "H4": Goal(
        "a slow host is not ended",
        _in("test_processes.py", "test_a_process_whose_beat_stands_still_is_lost_and_one_that_is_slow_is_not")
        + _in("test_processes.py", "test_no_process_that_is_slow_is_lost_and_each_that_ends_is")
        + _in("test_processes.py", "test_a_step_that_takes_long_is_told_once_and_ends_no_process"),
        limits=HOSTS,
    ),
    "H5": Goal("hosts whose weights drift apart are found", _in("test_replicas.py"), limits=HOSTS),
    "H6": Goal(
        "uneven data neither hangs nor is dropped",
        _in("test_processes.py", "test_the_shares_of_all_processes_are_all_rows_once")
        + _in("test_processes.py", "test_any_number_of_rows_is_shared_out_once_among_any_number_of_processes"),
        limits=HOSTS,
    ),
    "H8": Goal(
        "all hosts save and stop at the same step",
        _in("test_pods.py", "test_two_processes_exchange_arrays_and_save_what_one_reads")
        + _in("test_processes.py", "test_every_decision_is_the_same_in_all_processes_whoever_asked_for_it"),
        _in("trials/test_kill_pods.py", "test_a_notice_to_one_process_is_one_save_of_all"),
        HOSTS,
    ),
    "H9": Goal(
        "what needs an accelerator is refused without one, by name, and never runs on the processor instead",
        _in("models/test_ragged.py", "test_a_run_that_asks_for_it_does_not_start_on_a_cpu")
        + _in("models/test_splash.py", "test_a_run_that_asks_for_it_does_not_start_on_a_cpu")
        + _in("models/test_cudnn.py", "test_a_run_that_asks_for_it_does_not_start_on_a_cpu")
        + _in("test_host.py", "test_a_device_without_such_memory_is_refused_by_the_field_that_asks")
        + _in("trials/test_missing_accelerator.py"),
        limits="A run takes the platform that JAX chooses. Where it must be another, say so with JAX_PLATFORMS.",
    ),
    "W1": Goal(
        "update t learns from samples of the version that it declares",
        _in("test_loop.py", "test_update_t_learns_from_the_version_that_the_lag_declares")
        + _in("test_online.py", "test_update_t_learns_from_the_version_that_the_lag_declares_whatever_the_lag")
        + _in(
            "test_sampler_devices.py",
            "test_weights_that_arrive_otherwise_than_they_were_sent_are_noticed_by_the_draw",
        ),
        limits="Without devices of its own the sampler reads the learner's arrays: there is no copy to be forgotten.",
    ),
    "W2": Goal(
        "the sampler's log-probs are the learner's",
        _in("test_sampler.py", "test_logprobs_are_those_of_a_plain_forward")
        + _in("test_sampler.py", "test_truncated_logprobs_are_those_of_the_kept_support")
        + _in("test_sampler.py", "test_prompts_of_length_one_and_of_full_width"),
        _in("test_sampler_trials.py", "test_2000_random_cases_agree_with_the_learner_and_a_plain_forward"),
    ),
    "W3": Goal(
        "planted disagreements of sampler and learner are caught",
        _in("test_sampler_trials.py", "test_planted_disagreements_are_caught"),
    ),
    "C1": Goal(
        "an unknown key is refused, and the one that was meant is named",
        _in("config/test_reader_errors.py", "test_one_edit_typos_are_refused_and_the_meant_name_is_suggested")
        + _in(
            "config/test_real_tree.py", "test_one_edit_typos_of_real_keys_are_refused_and_the_meant_name_is_suggested"
        ),
    ),
    "C2": Goal(
        "a wrong type, range or combination is refused before a device is touched",
        _in("config/test_reader_errors.py")
        + _in("config/test_real_tree.py", "test_values_of_another_type_are_refused_by_their_field")
        + _in("test_cli.py", "test_a_typo_is_refused_by_name_before_a_device_is_touched_or_anything_slow_is_imported")
        + _in("test_loop.py", "test_an_illegal_combination_fails_before_anything_runs"),
    ),
    "C3": Goal(
        "every field of the configuration is read",
        _in("config/test_no_dead_fields.py"),
        limits="By looking at the source. Whether each field changes something is not tried.",
    ),
    "C4": Goal(
        "text of a configuration runs nothing and reaches nothing outside",
        _in("config/test_reader_errors.py", "test_text_that_tries_to_run_or_reach_something_is_refused")
        + _in("verifiers/test_source_gate.py"),
    ),
    "C5": Goal(
        "a configuration that is written out reads back equal",
        _in("config/test_reader_round_trip.py")
        + _in("config/test_real_tree.py", "test_every_row_can_be_chosen_and_reads_back_equal"),
    ),
    "D1": Goal(
        "a damaged data file loads with exact counts or is refused by file and line",
        _in("envs/test_jsonl.py") + _in("envs/test_parquet.py"),
    ),
    "D2": Goal(
        "every prompt is used, or dropped and counted by its cause; lengths are those of the final tokens",
        _in("data/test_stream.py", "test_five_thousand_random_prompts_are_used_or_counted_and_nothing_else")
        + _in("data/test_stream.py", "test_length_is_that_of_the_final_ids")
        + _in("data/test_stream.py", "test_dropped_prompts_are_counted_by_cause_and_the_counts_resume"),
    ),
    "D3": Goal(
        "token ids beyond the model's vocabulary are refused before a step",
        _in("tokenizers/test_published.py", "test_a_vocabulary_larger_than_the_embedding_is_refused")
        + _in(
            "tokenizers/test_published.py",
            "test_an_embedding_with_fewer_rows_than_ids_is_refused_whatever_their_numbers",
        )
        + _in("tokenizers/test_published.py", "test_bad_files_are_refused_with_the_reason")
        + _in("tokenizers/test_pieces.py", "test_a_changed_model_file_is_refused_at_load"),
    ),
    "D4": Goal(
        "text of a data set never becomes a control token",
        _in("tokenizers/test_rewriting_templates.py", "test_no_rewriting_makes_a_control_token_of_a_text")
        + _in("tokenizers/test_published.py", "test_no_message_forges_structure"),
        _in("tokenizers/test_rewriting_templates.py", "test_no_rewriting_makes_a_control_token_of_400_texts")
        + _in("tokenizers/test_published.py", "test_hundreds_of_hostile_texts_forge_nothing_in_any_family"),
    ),
    "D5": Goal(
        "a chat template runs in a sandbox in a process that can be killed",
        _in("tokenizers/test_template.py"),
    ),
    "E1": Goal(
        "memory is estimated before a run starts, and what does not fit is refused with what would help",
        _in("plan/test_start.py"),
    ),
    "E2": Goal("running out of device memory stops the run cleanly", limits="Needs an accelerator."),
    "E3": Goal(
        "the trainer's memory does not grow with what it has scored and read",
        _in("envs/test_jsonl.py", "test_memory_does_not_grow_with_the_file")
        + _in("envs/test_gzipped.py", "test_memory_does_not_grow_with_the_text"),
        _in("verifiers/test_pool.py", "test_two_hundred_thousand_items_leave_memory_and_descriptors_flat"),
        "There is no watchdog over the host's memory. tensorstore 0.1.80 to 0.1.86 keeps some hundred bytes for every "
        "array of every save: about 30 KB a save of configs/tiny.gin.",
    ),
    "E4": Goal(
        "a tracker that fails costs its rows and no step",
        _in("report/test_metrics.py", "test_a_failing_sink_is_named_once_and_left_alone")
        + _in("report/test_metrics.py", "test_no_order_of_failures_costs_a_row_of_the_table")
        + _in("report/test_sinks.py"),
        _in("trials/test_trackers.py"),
        "A tracker's client is called between steps: one that blocks is waited for.",
    ),
    "E5": Goal(
        "remote storage that fails during a save leaves the step before or the new one",
        _in("test_bucket_run.py", "test_a_process_that_dies_after_any_request_leaves_the_step_before_or_the_new_one")
        + _in("test_bucket_run.py", "test_failing_delayed_and_lost_answers_change_nothing")
        + _in(
            "test_bucket_run.py",
            "test_processes_that_die_while_requests_fail_leave_a_whole_step_that_is_no_older",
        )
        + _in("test_bucket_run.py", "test_a_commit_whose_answer_was_lost_is_gone_on_from"),
        _in("trials/test_kill_bucket.py"),
        "Tried against a stand-in for Google Cloud Storage, never against the service.",
    ),
    "E6": Goal(
        "a folder that was copied from a run that died resumes on another machine",
        _in("trials/test_same_steps.py", "test_a_copy_of_any_moment_goes_on_elsewhere_to_the_same_bits[on policy]"),
        _in("trials/test_same_steps.py", "test_a_copy_of_any_moment_goes_on_elsewhere_to_the_same_bits")
        + _in("trials/test_same_steps.py", "test_a_copied_folder_goes_on_elsewhere_to_the_same_bits"),
    ),
    "E7": Goal(
        "secrets of the environment and of configurations appear in no file, message or worker",
        _in("trials/test_secrets.py")
        + _in("verifiers/test_pool.py", "test_workers_hold_no_secret_and_no_jax")
        + _in("judges/test_open_judge.py", "test_files_hold_no_key")
        + _in("judges/test_client.py", "test_a_rejected_request_is_not_tried_again_and_the_key_is_shown_nowhere")
        + _in("judges/test_client.py", "test_an_address_that_holds_a_secret_is_refused_without_showing_it"),
    ),
    "S1": Goal(
        "hostile completions earn nothing, end in time, and reach nothing",
        _in("verifiers/test_gym_score.py", "test_the_reference_answer_is_right_and_junk_is_not")
        + _in("verifiers/test_gym_score.py", "test_no_junk_has_full_marks")
        + _in("verifiers/test_expressions.py", "test_hostile_text_is_judged_without_an_exception_and_none_is_accepted")
        + _in("verifiers/test_confinement.py")
        + _in("verifiers/test_pool.py", "test_every_hostile_verifier_gets_its_one_verdict_and_disturbs_no_other"),
        _in("verifiers/test_gym_score.py", "test_no_junk_has_full_marks_on_fifteen_tasks"),
    ),
    "S2": Goal(
        "right answers in their usual notations are accepted",
        _in("verifiers/test_math_equal.py", "test_what_means_the_same_is_correct_both_ways_round")
        + _in("verifiers/test_math_policy.py"),
        _in("verifiers/test_math_pairs.py"),
    ),
    "S3": Goal("no program that a model wrote sees the expected output", limits=PROGRAMS),
    "S4": Goal("no program that a model wrote forges its verdict", limits=PROGRAMS),
    "S5": Goal(
        "a layer of the workers' confinement that a machine does not have is named when the run starts",
        _in("verifiers/test_confinement.py", "test_a_layer_that_is_missing_is_named")
        + _in("verifiers/test_confinement.py", "test_what_a_kernel_refuses_is_a_layer_less_and_named")
        + _in("verifiers/test_confinement.py", "test_workers_without_a_layer_are_warned_of_once"),
        limits=PROGRAMS,
    ),
    "S6": Goal(
        "MathEqual accepts what is equal by the stated policy and nothing else",
        _in("verifiers/test_math_equal.py") + _in("verifiers/test_math_policy.py"),
        _in("verifiers/test_math_pairs.py"),
    ),
    "S7": Goal(
        "no text makes MathEqual slow, large or raise",
        _in("verifiers/test_expressions.py"),
        limits="998,788 strings by `python -m benchmarks.math_answers` on 2026-11-25: p99 6.2 ms, 44.5 MB, none wrong.",
    ),
    "S8": Goal(
        "no pattern that is applied to model text is slower than linear on texts made to slow it down",
        _in("trials/test_pump_strings.py"),
        limits="The pattern of `Regex` is yours; its text is bounded by `max_characters`, its worker by a deadline.",
    ),
    "S9": Goal(
        "no code comes from text: no eval, exec, pickle or shell in the source",
        _in("verifiers/test_source_gate.py"),
    ),
    "S10": Goal(
        "no port is opened, and a run's folder is its owner's",
        _in("test_finished_run.py", "test_a_run_is_for_its_owner_only")
        + _in("verifiers/test_source_gate.py", "test_no_text_becomes_code_and_no_port_is_opened"),
        limits="By looking at the source. Several hosts talk over ports of JAX.",
    ),
    "S11": Goal(
        "no text of a model or a file is obeyed by a terminal or a table",
        _in("report/test_display.py", "test_no_text_of_a_model_commands_a_terminal")
        + _in("tools/test_browse_rollouts.py", "test_the_command_shows_rows_without_obeying_them")
        + _in("test_cli.py", "test_nothing_a_model_says_reaches_the_terminal_raw")
        + _in("test_job.py", "test_error_text_keeps_its_lines_and_nothing_that_a_terminal_obeys"),
    ),
}  # fmt: skip
# The trials that a goal asks for, where it names a number.
ASKED = {
    "R1": 100, "R2": 60, "R3": 20, "R4": 500, "R5": 52, "R6": 42, "R8": 200, "R9": 30, "K1": 1_000, "K3": 40,
    "K4": 10_000, "K5": 60, "K6": 200, "K7": 8, "K8": 250, "N1": 200, "N2": 20, "N4": 10_000, "N5": 300, "V1": 1_000,
    "V2": 1_000, "V3": 4_000, "V4": 500, "V5": 5_000, "H1": 60, "H2": 50, "H3": 40, "H4": 20, "H5": 60, "H6": 60,
    "H8": 40, "H9": 10, "W1": 300, "W2": 2_000, "W3": 25, "C1": 1_000, "C2": 400, "C4": 60, "C5": 50, "D1": 400,
    "D2": 5_000, "D3": 300, "D4": 2_400, "D5": 120, "E1": 40, "E4": 30, "E5": 60, "E6": 20, "E7": 40, "S1": 7_000,
    "S2": 2_000, "S5": 14, "S6": 2_000, "S7": 1_000_000, "S8": 100, "S11": 300,
}  # fmt: skip
