"""Scoring: weighted sums, masks, names, the journal, and when a run stops."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import signal
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jrl.device.sharding import MeshShape, make_mesh
from jrl.rollout.evaluate import Evaluator, draw
from jrl.rollout.scoring import RewardOverflow, Scoring, ScoringStopped, check_sums, open_scoring
from jrl.rollout.sources import LearnedScores, add_scores
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import VERIFIERS, Verifier, as_verifier, merge, pool, process
from jrl.tasks.verifiers.calibration import Calibration
from jrl.tasks.verifiers.confidence_span import ConfidenceSpan
from jrl.tasks.verifiers.exact import Exact
from jrl.tasks.verifiers.length import Length
from jrl.tasks.verifiers.source import PartSource

PART = PartSource(
    "mine.py",
    """
import os, time
def third(completion, example): return 1 / 3
def fails(completion, example):
    if "raise" in completion: raise RuntimeError("on purpose")
    if "exit" in completion: os._exit(0)
    if "sleep" in completion and not os.path.exists(example.info["quick"]): time.sleep(100)
    return 1.0
VERIFIERS = {"third": third, "fails": fails}
""",
)


def table() -> dict[str, Verifier]:
    return merge(VERIFIERS, {"third": lambda c, e: 0.0, "fails": lambda c, e: 0.0})


def row(name: str, **fields):
    return as_verifier(name, lambda c, e: 0.0).config(**fields)


def example(answer: str = "4", **fields) -> Example:
    return Example(**{"id": "e", "messages": (Message("user", "2 + 2?"),), "answer": answer, **fields})


def score(config: Scoring, completions, examples=None, journal=None, parts=(PART,)):
    examples = examples or [example()] * len(completions)
    with open_scoring(config, table(), parts, journal) as scorer:
        return scorer.collect(scorer.submit(completions, examples, [((7, 9), n) for n in range(len(completions))]))


def test_the_reward_is_the_weighted_sum_and_the_first_verifier_gives_the_status():
    scores = score(Scoring(verifiers=(Exact(), Length(weight=0.5, low=1, high=2))), ["4", "5", "444", ""])
    # 1*1 + 0.5*1, 1*0 + 0.5*1, 0 + 0, 0 + 0
    np.testing.assert_array_equal(scores.reward, np.array([1.5, 0.5, 0.0, 0.0], np.float32))
    assert scores.verdict.tolist() == [Status.CORRECT, Status.WRONG, Status.WRONG, Status.UNPARSABLE]
    assert scores.valid.all()
    assert {name: part.tolist() for name, part in scores.components.items()} == {
        "Exact": [1, 0, 0, 0],
        "Length": [1, 1, 0, 0],
    }
    assert (scores.reward.dtype, scores.valid.dtype, scores.verdict.dtype) == (np.float32, np.bool_, np.int8)
    assert all(part.dtype == np.float32 for part in scores.components.values())
    assert scores.counts["CORRECT"] == 1 and sum(scores.counts.values()) == 4


def test_rewards_of_spans_beyond_float32_are_an_error():
    scores = dataclasses.replace(score(Scoring(verifiers=(Exact(),)), ["5", "4"]), token_reward=np.zeros((2, 3), "f4"))
    learned = LearnedScores(("judge",), (1.0,), np.zeros((2, 1), np.float32), ["", ""], np.full((2, 3), 2e38, "f4"))
    once = add_scores(scores, learned)  # 2e38 fits, twice as much does not: the largest is 3.4e38
    advice = "or lower the verifiers' weights, ProcessRewards.weight or Corrector.scale"
    with pytest.raises(RewardOverflow, match=f"^the token rewards of completion 0 are beyond float32.*{advice}$"):
        add_scores(once, learned)
    lost = add_scores(once, learned._replace(problems=["lost", "lost"]))  # what does not count may overflow
    assert not lost.valid.any()


@pytest.mark.parametrize(
    ("weight", "fits"), [(1e15, True), (1e19, True), (1.4e19, False), (3.4e38, False), (-3.4e38, False)]
)
def test_sums_of_a_batch_beyond_float32_are_an_error_that_names_the_weight(weight, fits):
    scores = score(Scoring(verifiers=(Length(low=0, high=9), Exact(weight=weight))), ["4", "4", "4", "5"])
    weights = {"Length": 1.0, "Exact": weight}
    if fits:  # three squares of 1e19 are 3e38, of 1.4e19 5.9e38
        assert check_sums(scores, weights) is scores
        return
    with pytest.raises(RewardOverflow, match=rf"most of it from Exact, whose weight is {re.escape(f'{weight:g}')}"):
        check_sums(scores, weights)
    assert check_sums(dataclasses.replace(scores, valid=np.zeros(4, bool)), weights) is not None  # padding may


def test_a_row_that_one_verifier_cannot_judge_is_masked_and_never_a_zero_reward():
    scores = score(Scoring(verifiers=(Exact(), row("fails"), row("third")), stop_above_verifier_errors=0.5), [
        "4", "raise", "exit"])  # fmt: skip
    assert scores.valid.tolist() == [True, False, False]
    assert scores.verdict.tolist() == [Status.CORRECT, Status.VERIFIER_ERROR, Status.CRASH]
    assert np.isnan(scores.components["fails"]).tolist() == [False, True, True]
    assert scores.components["third"].tolist() == [np.float32(1 / 3)] * 3
    assert "on purpose" in scores.details[1]
    assert scores.counts["VERIFIER_ERROR"] == scores.counts["CRASH"] == 1


def test_a_verifier_that_raises_on_many_rows_stops_the_run_and_is_named():
    verifiers = (Exact(), row("third"), row("fails"))
    with pytest.raises(ScoringStopped) as stopped:
        score(Scoring(verifiers=verifiers), ["4", "raise", "4", "raise"])
    for message in (
        "2 of 4 completions (50%)",
        "stop_above_verifier_errors = 0.25",
        "fails (2): RuntimeError: on purpose",
    ):
        assert message in str(stopped.value)
    scores = score(Scoring(verifiers=verifiers, stop_above_verifier_errors=0.5), ["4", "raise", "4", "raise"])
    assert scores.valid.tolist() == [True, False, True, False]
    assert scores.counts["VERIFIER_ERROR"] == 2


def test_a_verifier_that_raises_now_and_then_masks_those_rows():
    scores = score(Scoring(verifiers=(row("fails"),)), ["4", "raise", "4", "4"])
    assert scores.valid.tolist() == [True, False, True, True]


def test_what_a_crash_hides_behind_a_verifier_that_raises_is_counted_too():
    verifiers = (row("fails"), as_verifier("always", lambda c, e: 0.0).config())
    part = PartSource(
        "always.py", "def always(completion, example): raise KeyError('gone')\nVERIFIERS = {'always': always}"
    )
    with open_scoring(Scoring(verifiers=verifiers), {**table(), "always": lambda c, e: 0.0}, (PART, part)) as scorer:
        ticket = scorer.submit(["exit", "4"], [example()] * 2, [((0, 0), n) for n in range(2)])
        with pytest.raises(ScoringStopped, match=r"2 of 2 completions .*always \(2\): KeyError: 'gone'"):
            scorer.collect(ticket)


def test_the_first_problem_is_told_and_padding_has_none():
    scores = score(Scoring(verifiers=(row("fails"),), stop_above_verifier_errors=1.0), ["4", "4", "raise", "exit"])
    assert "on purpose" in scores.first_problem
    padding = [Status.CORRECT, Status.CORRECT, Status.PADDING, Status.PADDING]
    padded = dataclasses.replace(scores, verdict=np.array(padding, np.int8))
    assert padded.first_problem == ""


def test_an_overlong_completion_is_seen_by_no_verifier():
    scores = score(Scoring(verifiers=(Exact(), row("fails")), max_characters=10), ["x" * 11, "exit" + "x" * 7, "4"])
    assert scores.verdict.tolist() == [Status.FORBIDDEN, Status.FORBIDDEN, Status.CORRECT]
    assert scores.valid.tolist() == [False, False, True]


def test_an_example_that_names_its_verifiers_is_judged_by_those():
    config = Scoring(verifiers=(Exact(weight=2.0), Length(low=1, high=1)))
    examples = [example(verifiers=("Exact",)), example(verifiers=("Numeric", "Exact")), example()]
    scores = score(config, ["4", "4.0", "4"], examples)
    assert scores.reward.tolist() == [2.0, 1.0, 3.0]  # 2 * 1; 1 * 1 + 2 * 0; 2 * 1 + 1
    assert scores.verdict.tolist() == [Status.CORRECT] * 3
    assert scores.outcome.tolist() == [1.0, 1.0, 1.0]  # the first verifier's own, whatever its weight
    np.testing.assert_array_equal(scores.components["Numeric"], np.array([np.nan, 1, np.nan], np.float32))


def test_the_answer_in_a_completion_is_what_its_first_verifier_reads():
    cases = [
        ((Exact(extract="hash"), Length()), (), "so\n#### 5 \nand", "5"),
        ((Exact(extract="hash"),), (), "#### 5 #### 6", "#### 5 #### 6"),  # no single answer
        ((Length(), Exact(extract="hash")), (), "#### 5", "#### 5"),  # the first one extracts nothing
        ((Length(), Exact(extract="hash")), ("Exact",), "#### 5", "5"),
        ((Exact(extract="hash"),), ("MathEqual",), r"\boxed{5}", "5"),  # the default of one that is not configured
        ((row("third"),), (), "#### 5", "#### 5"),
        ((Calibration(),), (), "5 <confidence>9</confidence>", "5"),  # whatever the confidence
        ((ConfidenceSpan(extract="last_line", opening="So "),), (), "2 + 3\n5\nSo 9", "5"),
    ]
    for verifiers, named, completion, answer in cases:
        with open_scoring(Scoring(verifiers=verifiers), table(), (PART,)) as scorer:
            assert scorer.answer_in(completion, example(verifiers=named)) == answer
    with (
        open_scoring(Scoring(verifiers=()), table(), (PART,)) as scorer,
        pytest.raises(ValueError, match="no verifier"),
    ):
        scorer.answer_in("5", example())


def test_verifiers_that_the_data_will_ask_for_can_be_loaded_first():
    with open_scoring(Scoring(verifiers=(Exact(),)), table(), also=("Numeric", "Exact")) as scorer:
        scores = scorer.collect(scorer.submit(["4"], [example()], [((0, 0), 0)]))
    assert np.isnan(scores.components["Numeric"]).all() and scores.components["Exact"].tolist() == [1.0]
    with pytest.raises(ValueError, match=r"Unknown verifier 'Numerik' in the run's data\. Did you mean 'Numeric'"):
        open_scoring(Scoring(verifiers=(Exact(),)), table(), also=("Numerik",))


def test_scorers_that_share_their_workers_meet_new_verifiers_in_orders_of_their_own():
    config = Scoring(verifiers=(Exact(),))
    numeric, length = example(verifiers=("Numeric",)), example(verifiers=("Length",))
    with open_scoring(config, table()) as first:
        second = open_scoring(config, table(), pool=first.pool)
        for scorer, examples in ((first, [numeric, length]), (second, [length, numeric])):
            for one in examples:
                scores = scorer.collect(scorer.submit(["4.0"], [one], [((0, 0), 0)]))
                assert scores.components[one.verifiers[0]].tolist() == [1.0] == scores.reward.tolist()


def test_a_verifier_used_twice_has_two_parts():
    scores = score(Scoring(verifiers=(Length(high=2), Length(high=5, weight=0.5))), ["abc"])
    assert {name: part.tolist() for name, part in scores.components.items()} == {"Length": [0.0], "Length_2": [1.0]}
    assert scores.reward.tolist() == [0.5]


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (Scoring(), {}, "no verifier scores example 'e'"),
        (Scoring(), {"verifiers": ("Exakt",)}, r"Unknown verifier 'Exakt' in example 'e'\. Did you mean 'Exact'"),
        (Scoring(), {"verifiers": ("Regex",)}, r"no defaults.*add @Regex\(\) to Scoring.verifiers"),
    ],
)
def test_an_example_that_nothing_can_judge_is_refused(config, fields, message):
    with pytest.raises(ValueError, match=message):
        score(config, ["4"], [example(**fields)])


def test_a_verifier_outside_the_table_is_refused():
    with pytest.raises(ValueError, match=r"Unknown verifier 'other' in Scoring\.verifiers"):
        open_scoring(Scoring(verifiers=(row("other"),)), table())


@pytest.mark.parametrize("fields", [{"workers": 0}, {"cpu_seconds": 0.0}, {"stop_above": 1.5},
                                    {"stop_above_verifier_errors": -1.0}, {"max_characters": -1}])  # fmt: skip
def test_a_config_that_makes_no_sense_is_refused(fields):
    with pytest.raises(ValueError, match=f"Scoring.{next(iter(fields))}"):
        Scoring(**fields)


def test_scores_do_not_depend_on_the_number_of_workers():
    completions = [str(n % 5) for n in range(40)] + ["raise", "exit"]
    config = lambda workers: Scoring(verifiers=(Exact(), row("fails"), row("third", weight=0.3)), workers=workers)
    first, *others = [score(config(workers), completions) for workers in (1, 2, 4)]
    for other in others:
        for name in ("reward", "valid", "verdict"):
            np.testing.assert_array_equal(getattr(first, name), getattr(other, name))
        assert (first.counts, first.details) == (other.counts, other.details)


def test_a_verdict_that_met_its_deadline_is_replayed_after_a_resume(tmp_path):
    config = Scoring(verifiers=(row("fails"),), wall_seconds=0.3, stop_above_verifier_errors=0.5)
    quick = tmp_path / "quick"
    examples = [example(info={"quick": str(quick)})] * 3
    first = score(config, ["sleep", "4", "raise"], examples, tmp_path / "journal.jsonl")
    assert first.verdict.tolist() == [Status.CPU_LIMIT, Status.CORRECT, Status.VERIFIER_ERROR]
    quick.touch()  # a machine that is now fast enough
    again = score(config, ["sleep", "4", "raise"], examples, tmp_path / "journal.jsonl")
    assert again.verdict.tolist() == first.verdict.tolist()
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 2  # neither was judged again
    assert score(config, ["sleep"], examples[:1]).verdict.tolist() == [Status.CORRECT]


def test_a_deadline_in_one_evaluation_decides_no_evaluation_of_other_weights(tmp_path):
    """Held-out prompts are the same in every evaluation, and so may their completions be."""
    config, quick = Scoring(verifiers=(row("fails"),), wall_seconds=0.3, stop_above=1), tmp_path / "quick"
    visit = Visit(example(info={"quick": str(quick)}), (7, 9), (1,))
    text = np.frombuffer(b"\1sleep", np.uint8).astype(np.int32)[None]

    def evaluated(weights_fingerprint):
        rollout = SimpleNamespace(
            tokens=text, length=np.array([6]), action_mask=np.arange(6)[None] > 0, finish=np.zeros(1, np.int8),
            weights_fingerprint=np.uint32(weights_fingerprint),
        )  # fmt: skip
        mesh = make_mesh(MeshShape(), jax.devices()[:1])
        evaluator = Evaluator(lambda *_: rollout, ByteTokenizer(), mesh, None, None, None, samples=1, batch=1,
                              prompt_length=1)  # fmt: skip
        with open_scoring(config, table(), (PART,), tmp_path / "journal.jsonl") as scorer:
            return draw(evaluator, None, [visit], scorer, lambda done, total: None).verdicts.tolist()

    assert evaluated(1) == [[Status.CPU_LIMIT]]
    quick.touch()  # a machine that is now fast enough
    assert evaluated(2) == [[Status.CORRECT]]
    assert evaluated(1) == [[Status.CPU_LIMIT]]  # again, after a resume


def test_too_many_failures_of_our_own_stop_the_run(monkeypatch):
    config = Scoring(verifiers=(Exact(),), stop_above=0.4)
    with open_scoring(config, table()) as scorer:
        lost = (Verdict(Status.INFRA_ERROR, None, "no process could be had"),)
        judged = (Verdict(Status.CORRECT, 1.0),)
        ticket = scorer.submit(["4"] * 5, [example()] * 5, [((0, 0), n) for n in range(5)])
        monkeypatch.setattr(scorer.pool, "collect", lambda *_: [lost, judged, lost, judged, judged])
        scores = scorer.collect(ticket)  # 2 of 5 is not above 0.4
        assert scores.valid.tolist() == [False, True, False, True, True]
        monkeypatch.setattr(scorer.pool, "collect", lambda *_: [lost, lost, lost, judged, judged])
        with pytest.raises(ScoringStopped, match=r"3 of 5 .* no process could be had"):
            scorer.collect(ticket)


@pytest.mark.parametrize("number", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_no_fault_of_the_machine_makes_a_right_answer_wrong(number, trials, monkeypatch):
    """While completions that are all right are scored, workers are killed and stopped, and what starts them too."""
    monkeypatch.setattr(pool, "HELLO_SECONDS", 2.0)  # until what was stopped as it started is given up
    monkeypatch.setattr(process, "ANSWER_SECONDS", 2.0)
    draw, left, lost = random.Random(0), [trials(number)], 0
    naps = PartSource("naps.py", "import time\ndef naps(completion, example):\n    time.sleep(0.002)\n    return 1.0\n"
                                 "VERIFIERS = {'naps': naps}")  # fmt: skip
    config = Scoring(
        verifiers=(Exact(), as_verifier("naps", lambda c, e: 0.0).config()), wall_seconds=0.5, stop_above=1.0
    )
    with open_scoring(config, {**table(), "naps": lambda c, e: 0.0}, (naps,)) as scorer:

        def fault():
            pids = [*scorer.pool.worker_pids(), *[scorer.pool.template_pid] * (draw.random() < 0.2)]
            if chosen := [pid for pid in pids if pid is not None]:  # None: it has just been killed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(chosen), draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
                    left[0] -= 1

        def faults(ended):
            while not ended.wait(draw.uniform(0, 0.02)) and left[0] > 0:
                fault()

        while left[0] > 0:
            rows, ended = 24, threading.Event()
            ticket = scorer.submit(["4"] * rows, [example()] * rows, [((0, 0), n) for n in range(rows)])
            thread = threading.Thread(target=faults, args=(ended,))
            thread.start()
            scores = scorer.collect(ticket)
            ended.set()
            thread.join()
            assert set(scores.verdict[scores.valid].tolist()) <= {Status.CORRECT}
            np.testing.assert_array_equal(scores.reward[scores.valid], 2.0)
            assert not {Status.WRONG, Status.UNPARSABLE} & set(scores.verdict.tolist()), scores.details
            lost += int((~scores.valid).sum())
        lost += scorer.pool.counts["items_retried"]  # the machine was at fault in both cases
    assert lost


def test_a_stop_request_ends_scoring_soon_and_the_scorer_can_be_used_on(tmp_path):
    config = Scoring(verifiers=(row("fails"),), wall_seconds=100.0)
    stop, progress = threading.Event(), []
    examples = [example(info={"quick": str(tmp_path / "none")})] * 9
    with open_scoring(config, table(), (PART,), tmp_path / "journal.jsonl") as scorer:
        ticket = scorer.submit(["4"] + ["sleep"] * 7 + ["x" * 200_000], examples, [((0, 0), n) for n in range(9)])
        threading.Timer(0.5, stop.set).start()
        start = time.monotonic()
        with pytest.raises(pool.ScoringAbandoned):
            scorer.collect(ticket, stop.is_set, lambda done, total: progress.append((done, total)))
        assert time.monotonic() - start < 2.0
        assert progress[-1] == (2, 9)  # one was judged, one is too long to be asked about
        ticket = scorer.submit(["4", "4"], examples[:2], [((0, 1), n) for n in range(2)])
        assert scorer.collect(ticket, progress=lambda *now: progress.append(now)).valid.all()
        assert progress[-1] == (2, 2)
        start = time.monotonic()
    assert time.monotonic() - start < 2.0
    assert (tmp_path / "journal.jsonl").read_bytes() == b""


def test_nothing_to_score_scores_nothing():
    scores = score(Scoring(verifiers=(Exact(),)), [])
    assert scores.reward.shape == (0,) and scores.components["Exact"].shape == (0,)


def test_a_reward_beyond_float32_masks_its_row_and_a_weight_beyond_it_is_refused():
    scores = score(Scoring(verifiers=(Exact(weight=3e38), Length(weight=3e38, low=1, high=2))), ["4", "5", "444"])
    np.testing.assert_array_equal(scores.reward, np.float32([0, 3e38, 0]))
    assert scores.valid.tolist() == [False, True, True]
    assert scores.verdict.tolist() == [Status.VERIFIER_ERROR, Status.WRONG, Status.WRONG]
    assert "the weighted sum 6e+38 is beyond float32" in scores.details[0]
    for weight in (1e39, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"Exact\.weight is .*; it must be finite, in float32 too"):
            score(Scoring(verifiers=(Exact(weight=weight),)), ["4"])
