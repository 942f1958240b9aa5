"""What `jrl eval` measures beside accuracy: calibration, diversity, distance, proxy rewards, and reward models."""

from __future__ import annotations

import json

import numpy as np
import pytest

import jrl
from jrl import cli
from jrl.commands import start
from jrl.rollout.evaluate import Samples, report
from jrl.run.trained import open_trained
from jrl.tasks.example import Example, Message
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers.calibration import Calibration
from jrl.tools import evaluation, measures, reward_quality
from jrl.tools.score import embeddings

C, W, U = Status.CORRECT, Status.WRONG, Status.UNPARSABLE
SHORT = ["warm/Offline.steps=2", "judge/Offline.steps=2", "Online.steps=2", "Online.prompts=4", "Online.samples=2",
         "warm/Offline.batch_size=8", "judge/Offline.batch_size=8", "Decoder.width=16", "Decoder.heads=2",
         "Decoder.head_dim=8", "Decoder.mlp_width=32", "Checkpoint.every=1", "Checkpoint.keep=9",
         "Data.held_out_every=3", "Config.eval=@Eval()", "Eval.prompts=4", "Eval.samples=2",
         "Eval.batch=4"]  # fmt: skip


def samples(verdicts, texts):
    """Samples of prompts "p0", "p1" ..."""
    verdicts = np.array(verdicts, np.int8)
    example = Example(id="p", messages=(Message("user", "1 or 2?"),), answer="1")
    visits = [type("Visit", (), {"prompt": (1, 2), "example": example})] * len(verdicts)
    return Samples(visits, texts, texts, [[3]] * len(texts), verdicts, np.zeros(verdicts.shape), 0.0, "0")


def test_all_of_k_stands_beside_pass_at_k():
    # 3 of 4 right: pass^2 = C(3, 2) / C(4, 2) = 3 / 6, pass@2 = 1
    found = report(np.array([[C, C, C, W]], np.int8), list("1112"), ["a"])
    assert [found["all_of_k"][k]["mean"] for k in ("1", "2", "4")] == pytest.approx([0.75, 0.5, 0.0])
    assert "pass^2" in evaluation.table({**found, "step": 1, "protocol": {"task": "Addition"}})


def test_the_profile_is_over_prompts():
    found = measures.profile(samples([[C, C], [C, W], [W, W]], [""] * 6))
    assert found["thresholds"][0] == 0 and found["shares"][0] == pytest.approx(2 / 3)  # above 0: 1 and 0.5
    assert found["shares"][50] == pytest.approx(1 / 3) and found["shares"][100] == 0  # above 0.5: 1 alone


def test_calibration_of_what_samples_say():
    said = lambda text, answer=1: f"{answer} <confidence>{text}</confidence>"
    # confidences 0.9 of a right one and 0.6 of a wrong one (M12's own numbers); the third says nothing. Another
    # verifier, which reads the confidence as a part of the answer, finds all of them wrong.
    found = measures.calibration([Calibration()], samples([[W], [W], [U]], [said(9), said(6, 2), "1"]))
    assert found["stated"] == 2 and found["brier"]["mean"] == pytest.approx(0.185)
    assert found["ece"]["mean"] == pytest.approx(0.35) and found["auroc"]["mean"] == 1.0
    assert found["brier"]["low"] == pytest.approx(0.01) and found["brier"]["high"] == pytest.approx(0.36)
    # A confidence without an answer is of neither a right nor a wrong one: it does not count.
    alone = measures.calibration([Calibration()], samples([[W], [W], [U]], [said(9), said(6, 2), said(8, "")]))
    assert alone == found
    assert measures.calibration([], samples([[C]], ["1"])) is None


def test_diversity_of_a_prompts_samples():
    # a b | a b: 2 of 4 words and 1 of 2 pairs differ, and each is the other; c d | e f: all differ
    found = measures.diversity(samples([[C, C], [W, W]], ["a b", "a b", "c d", "e f"]))
    assert found["distinct"]["1"]["mean"] == pytest.approx(0.75) and found["distinct"]["2"]["mean"] == 0.75
    assert (found["distinct"]["1"]["low"], found["distinct"]["1"]["high"]) == (0.5, 1.0)
    assert found["distinct"]["3"]["mean"] is None  # no text has three words
    assert found["self_bleu"]["mean"] == pytest.approx(0.5)
    alone = measures.diversity(samples([[C, C]], ["a b", "a c"]))["distinct"]["1"]
    assert (alone["mean"], alone["low"], alone["n"]) == (0.75, None, 1)  # of one prompt there is no interval
    assert found["across_prompts"]["1"] == 1.0 and found["across_prompts"]["3"] is None


def test_improvement_is_over_samples_of_the_same_prompt():
    one = {"rewards": {"p": [1.0, 0.0], "q": [1.0, 1.0], "r": [None, None]}}
    other = {"rewards": {"p": [0.0, 0.0], "q": [1.0, None], "r": [1.0, 1.0]}}
    # p: 1 > 0 twice, 0 = 0 twice: 0.75; q: both tie: 0.5; r has no reward
    assert measures.improvement(one, other)["mean"] == pytest.approx(0.625)
    assert measures.improvement(other, one)["mean"] == pytest.approx(0.375)


def test_an_improvement_on_every_prompt_has_an_interval_with_a_width():
    better = {"rewards": {prompt: [1.0] for prompt in "abcd"}}
    found = measures.improvement(better, {"rewards": {prompt: [0.0] for prompt in "abcd"}})
    # Wilson, 4 of 4, z = 1.96: the lower end is n / (n + z^2) = 4 / 7.8415 = 0.5101
    assert found == pytest.approx({"mean": 1, "low": 0.5101, "high": 1, "n": 4}, abs=1e-4)


def test_over_optimization_of_checkpoints_by_hand():
    at = lambda kl, proxy, gold: {"kl_k3": {"mean": kl}, "proxy": {"mean": proxy}, "mean": gold}
    five = [at(0, 0.1, 0.5), at(1, 0.15, 0.55), at(4, 0.2, 0.6), at(16, 0.3, 0.55), at(25, 0.4, 0.5)]
    found = measures.over_optimized(five)
    # Proxy rises four times, gold twice.
    assert (found["peak"], found["peak_distance"], found["mismatch"]) == (0.6, 2.0, 0.5)
    assert "sqrt(KL) 2.000" in evaluation.over_optimization_lines(found, five)[1]
    for lacking in ({"mean": 0.6}, {"mean": 0.6, "kl_k3": {"mean": 1.0}}):
        four = [*five[:4], lacking]
        assert measures.over_optimized(four) is None  # a peak among few checkpoints is where they happen to be
        (_, line) = evaluation.over_optimization_lines(None, four)
        assert "4 checkpoints with a KL and a proxy reward; a curve takes at least 5" in line
    assert evaluation.over_optimization_lines(None, [five[0], {"mean": 0.6}]) == []


def example(prompt, answer, rejected, **info):
    return Example(prompt + answer, (Message("user", prompt),), answer=answer, info={"rejected": rejected, **info})


def test_reward_quality_by_hand():
    # M13's numbers: 0.7 against 0.6, 0.65 and 0.8 is 2 of 3 pairs and not the best of many; q's 1 against 0 is both.
    scores = {("p", "a"): 0.7, ("p", "b"): 0.6, ("p", "c"): 0.65, ("p", "d"): 0.8, ("q", "a"): 1.0, ("q", "b"): 0.0}
    rows = [example("p", "a", wrong) for wrong in "bcd"] + [example("q", "a", "b")]
    compared = reward_quality.preference_pairs([*rows, Example("x", (Message("user", "p"),), answer="a")])
    reward = lambda asked: np.array([scores[prompt[0].content, text] for prompt, text in asked])
    found = reward_quality.measured(reward, compared)
    assert found["pairs"]["mean"] == pytest.approx(3 / 4) and found["best_of_many"]["mean"] == 0.5
    assert found["left_out"] == {"no_rejected": 1} and "instructions" not in found
    assert len(compared.asked) == len(scores)  # each answer once


def test_a_reward_that_ranks_all_pairs_right_has_an_interval_with_a_width():
    rows = [example(prompt, "a", wrong) for prompt in "pqrs" for wrong in "bc"]
    reward = lambda asked: np.array(
        [np.nan if prompt[0].content == "s" else float(text == "a") for prompt, text in asked]
    )
    found = reward_quality.measured(reward, reward_quality.preference_pairs(rows))
    # Wilson, 3 of 3 problems (s has no reward), z = 1.96: the lower end is 3 / (3 + 3.8415) = 0.4385
    for name in ("pairs", "best_of_many"):
        assert found[name] == pytest.approx({"mean": 1, "low": 0.4385, "high": 1, "n": 3}, abs=1e-4)


def test_prompts_that_look_alike_are_asked_crosswise():
    rows = [example("p", "a", "b", contrast=1), example("q", "c", "d", contrast=1)]
    scores = {("p", "a"): 2.0, ("q", "a"): 3.0, ("q", "c"): 2.0, ("p", "c"): 0.0}
    reward = lambda asked: np.array([scores.get((prompt[0].content, text), 0.0) for prompt, text in asked])
    found = reward_quality.measured(reward, reward_quality.preference_pairs(rows))
    # 2 + 2 > 0 + 3; `a` is higher under q, `c` under its own
    assert found["instructions"]["mean"] == 1.0 and found["responses"]["mean"] == 0.5
    with pytest.raises(ValueError, match="contrast '1' is of 1 rows"):
        reward_quality.preference_pairs(rows[:1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A policy after imitation (step 2), its reward model (4), and two steps of RL."""
    folder = tmp_path_factory.mktemp("measures") / "run"
    jrl.train("configs/rlhf-tiny.gin", SHORT, run=folder)
    return folder


@pytest.fixture
def command(capsys, monkeypatch):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)

    def call(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_checkpoints_against_a_reference_and_a_proxy(run, command, tmp_path):
    out = tmp_path / "out.json"
    options = ["--reference", run, "--reference-step", 2, "--proxy", run, "--diversity", "--out", out]
    code, text, err = command("eval", run, "--steps", "2,6", *options)
    assert code == 0, err
    before, after = json.loads(out.read_text())
    assert before["kl"]["mean"] == before["kl_k3"]["mean"] == 0.0 and after["kl_k3"]["mean"] > 0
    assert before["source"] == f"{run} 2" and before["proxy"]["n"] == 4 and before["proxy"]["low"] is not None
    assert 0 <= before["embedding_distance"]["mean"] <= 2 and len(before["profile"]["shares"]) == 101
    for name in ("KL by k3", "proxy reward", "embedding distance", "distinct-1", "self-BLEU", "P(sample higher)",
                 "over-optimization: 2 checkpoints"):  # fmt: skip
        assert name in text
    code, _, err = command("eval", run, "--reference", run, "Eval.temperature=0.5")
    assert code == 2 and "Eval.temperature is 0.5" in err


def test_pairs_are_judged_by_a_reward_head_and_by_what_a_policy_implies(run, command, tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "rejected": str(a + b + d), "contrast": f"{a}"}
            for a, b in ((1, 2), (1, 3), (2, 2), (2, 4)) for d in (1,)]  # fmt: skip
    file, out = tmp_path / "pairs.jsonl", tmp_path / "out.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text, err = command("eval", run, "--role", "reward", "--pairs", file, "--out", out)
    assert code == 0, err
    found = json.loads(out.read_text())
    assert found["reward"] == "head" and found["n_pairs"] == found["pairs"]["n"] == 4
    assert 0 <= found["pairs"]["mean"] <= 1 and found["instructions"]["n"] == 2
    assert text.splitlines()[1].split()[:3] == ["source", "step", "reward"] and "best of many" in text
    code, _, err = command("eval", run, "--pairs", file)
    assert code == 2 and "no reward head" in err
    # What a policy implies against itself is a tie everywhere: half of the pairs, none of the best of many.
    code, _, err = command("eval", run, "--pairs", file, "--reference", run, "--out", out)
    found = json.loads(out.read_text())
    assert code == 0 and found["reward"] == "implicit"
    assert (found["pairs"]["mean"], found["best_of_many"]["mean"]) == (0.5, 0.0)
    code, _, err = command("eval", run, "--pairs", file, "--role", "reward", "--reference", run)
    assert code == 2 and "every source has a reward of its own; leave it out" in err
    code, _, err = command("eval", run, "--pairs", file, "--reference-step", 2)
    assert code == 2 and "--reference-step is a saved step of --reference, which is not given" in err


def test_an_embedding_is_the_state_at_the_last_token_alone_or_packed(run):
    trained = open_trained(run)
    rows = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [4, 5]]
    together = embeddings(trained, rows)
    assert together.shape == (4, trained.policy.cfg.width)
    np.testing.assert_allclose(together, np.concatenate([embeddings(trained, [row]) for row in rows]), atol=1e-5)
    np.testing.assert_allclose(together[1], together[3], atol=1e-6)
    assert np.abs(together[0] - together[2]).max() > 1e-3


def test_rows_without_a_pair_are_refused(run, command, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    code, _, err = command("eval", run, "--role", "reward", "--pairs", file)
    assert code == 2 and "none of 1 rows" in err


def test_rows_of_pairs_that_are_bad_may_be_dropped(run, command, tmp_path):
    rows = [{"prompt": "1+2=", "chosen": "3", "rejected": rejected} for rejected in ("4", "5", "3", "")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = ("eval", run, "--role", "reward", "--pairs", file, "--layout", "preference")
    code, _, err = command(*pairs)
    assert code == 2 and "line 3: " in err and "Dataset.on_bad_row = 'drop'" in err
    dropping = (*pairs, "Dataset.on_bad_row='drop'", "Dataset.max_dropped=0.5")
    code, out, _ = command(*dropping)
    assert code == 0 and out.startswith("2 pairs of 1 problems") and "left out: 1 equal_sides, 1 empty" in out
    code, _, err = command(*dropping, "Jsonl.on_bad_row='drop'")
    assert code == 2 and "unused binding: Jsonl.on_bad_row" in err


def test_a_run_does_not_keep_what_only_comparisons_of_policies_read(run):
    found = json.loads((run / "summary.json").read_text())["eval"]
    assert set(found) >= {"before_rl", "after_rl"}
    for result in found.values():
        assert "all_of_k" in result and not {"by_prompt", "rewards", "completions"} & set(result)
