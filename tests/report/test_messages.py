from __future__ import annotations

from jrl.run.report.messages import (
    LostSignal,
    closing_message,
    evaluation_line,
    no_signal_warning,
    resume_message,
    saved_message,
    scoring_warning,
)
from jrl.run.report.text import counted, percent


def test_a_finished_run_says_that_there_is_nothing_to_do():
    assert resume_message(12, 30, has_ended=False) == "Resumed after step 12 of 30."
    assert resume_message(30, 30, has_ended=False) == "Resumed after step 30 of 30."  # what is left is its end
    assert resume_message(30, 30, has_ended=True) == "This run already has all 30 steps. Nothing to do."
    for has_ended in (False, True):
        said = resume_message(60, 30, has_ended=has_ended)
        assert said == "This run already has 60 steps; you asked for 30. Nothing to do."
    assert resume_message(1, 1, has_ended=True) == "This run already has its step. Nothing to do."
    assert saved_message(5, 30) == "Saved after step 5 of 30. Run the same command to continue."


def test_one_thing_is_counted_without_a_plural():
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert [counted(n, "micro-batch") for n in (1, 2)] == ["1 micro-batch", "2 micro-batches"]


def test_a_small_scored_share_is_warned_of_with_the_first_failure():
    assert scoring_warning(1.0, "") is None and scoring_warning(0.9, "x") is None
    assert scoring_warning(0.125, "ValueError: no number\x1b[2J") == (
        "Warning: only 12 % of completions were scored; the reward is their mean. "
        "First failure: ValueError: no number\\x1b[2J"
    )
    assert scoring_warning(0.0, "") == (
        "Warning: no completion was scored, so there is no reward. First failure: the verifier gave no detail"
    )
    assert len(scoring_warning(0.5, "x" * 5000)) < 600


def test_a_run_without_signal_names_the_likely_causes():
    text = no_signal_warning(20)
    assert text.startswith("Warning: no learning signal in 20 steps.") and "in 1 step." in no_signal_warning(1)
    for cause in ("too strict or too lenient", "too hard or too easy", "Online.samples", "Sampler.temperature"):
        assert cause in text
    unscored = no_signal_warning(20, scored=False)
    assert unscored.startswith("Warning: no learning signal in 20 steps: no completion was scored")
    assert "Scoring.cpu_seconds" in unscored and "same reward" not in unscored


def test_an_evaluation_is_one_line():
    result = {"mean": 0.5, "low": 0.412, "high": 0.588, "n": 120}
    assert evaluation_line("after RL", result) == "after RL: 50.0 % of 120 held-out prompts [41.2, 58.8]"
    unscored = {"mean": None, "low": None, "high": None, "n": 0}
    assert evaluation_line("before RL", unscored) == "before RL: no held-out completion could be scored"


def test_the_closing_message_has_the_final_reward_and_what_to_do_next():
    assert closing_message("runs/a", steps=240, seconds=185.0, final_reward=0.9341) == (
        "Done: 240 steps in 3 min 05 s, final reward 0.934. Metrics, rollouts and checkpoints are in runs/a\n"
        "Try the policy: jrl sample runs/a"
    )
    unscored = closing_message("runs/a", steps=3, seconds=1.0, final_reward=float("nan"))
    assert unscored.startswith("Done: 3 steps in 1 s. Metrics")
    judge = closing_message("runs/a", steps=3, seconds=1.0, final_reward=None, role="judge")
    assert judge.endswith("the role judge: jrl score runs/a ROWS.jsonl --role judge --out X.jsonl")
    assert "Try" not in closing_message("runs/a", steps=0, seconds=1.0, final_reward=None)  # nothing was saved


def test_the_closing_message_quotes_the_folder_in_the_command_that_it_offers():
    for skipped, command in ((0, "sample"), (1, "doctor")):
        last = closing_message("my runs/a", steps=3, seconds=1.0, final_reward=0.1, skipped=skipped).splitlines()[-1]
        assert last.endswith(f": jrl {command} 'my runs/a'")


def test_the_closing_message_of_a_run_that_ends_with_skipped_updates_does_not_offer_the_policy():
    close = lambda skipped: closing_message("runs/a", steps=3, seconds=1.0, final_reward=0.1, skipped=skipped)
    for skipped, which in ((1, "step 3"), (2, "steps 2 to 3"), (3, "steps 1 to 3")):
        _, *last = close(skipped).splitlines()
        assert last == [
            f"Updates of {which} were skipped, since the loss or the gradient was not finite.",
            "Examine the run: jrl doctor runs/a",
        ]
    assert close(0).endswith("Try the policy: jrl sample runs/a")


def test_the_closing_message_of_a_run_without_signal_warns_and_does_not_offer_the_policy():
    text = closing_message("runs/a", steps=30, seconds=1.0, final_reward=0.0, steps_without_signal=30)
    assert no_signal_warning(30) in text and "Try the policy" not in text
    for final in (None, float("nan")):
        text = closing_message("runs/a", steps=30, seconds=1.0, final_reward=final, steps_without_signal=30)
        assert no_signal_warning(30, scored=False) in text


def test_the_closing_message_of_a_run_that_lost_its_signal_says_so_and_does_not_offer_the_policy():
    lost = LostSignal(steps=9, before=0.41, after=0.0)
    text = closing_message("runs/a", steps=30, seconds=1.0, final_reward=0.0, lost=lost)
    assert "no learning signal in the last 9 steps (mean reward 0.410 when there was one, 0.000 now)" in text
    assert "learning rate" in text and text.endswith("jrl doctor runs/a") and "Try the policy" not in text


def test_only_all_is_100_percent_and_only_nothing_is_0():
    assert [percent(x) for x in (0.0, 0.001, 0.12, 0.29, 0.5, 0.999, 1.0)] == [
        "0 %", "<1 %", "12 %", "29 %", "50 %", "99 %", "100 %",
    ]  # fmt: skip
