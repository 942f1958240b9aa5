"""The numbers of an evaluation, from verdicts alone."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from documented import write_part

import jrl
from jrl import cli
from jrl.config import to_json
from jrl.device.sharding import MeshShape, make_mesh
from jrl.experiment import Eval
from jrl.resolve import load_config
from jrl.rollout.evaluate import Evaluator, Samples, draw, numbers, report, summary
from jrl.rollout.scoring import Scoring, open_scoring
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Example, Message
from jrl.tasks.stopping import StopRequested
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers.bytes import Bytes, ByteTokenizer
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import VERIFIERS, MathEqual
from jrl.tools import evaluation
from jrl.tools.evaluate_sources import OpenOptions, Source, check_evaluation_given, evaluate_sources, sources_of
from jrl.tools.evaluation import (
    check_evaluated,
    held_out_visits,
    percent_cell,
    reevaluate,
    table,
    trained_prompts_warning,
    win_rates,
)

C, W, U, E = Status.CORRECT, Status.WRONG, Status.UNPARSABLE, Status.INFRA_ERROR


def test_mean_counts_correct_among_scorable_and_parsed_counts_what_could_be_read():
    # Three prompts: right, wrong, not readable; a fourth could not be judged at all and does not count.
    actual = report(np.array([[C], [W], [U], [E]], np.int8), ["7", "8", "", "9"], ["a"] * 4)
    assert actual["mean"] == pytest.approx(1 / 3) and actual["n"] == 3
    assert actual["parsed"] == pytest.approx(2 / 3)
    assert actual["unscorable"] == 1
    assert actual["low"] < 1 / 3 < actual["high"]


def test_tasks_are_reported_apart():
    actual = report(np.array([[C], [C], [W], [C]], np.int8), [""] * 4, ["a", "a", "b", "b"])
    assert actual["tasks"]["a"]["mean"] == 1.0 and actual["tasks"]["b"]["mean"] == 0.5
    assert numbers(actual)["eval_task/b"] == 0.5


def test_pass_at_k_is_unbiased():
    # One prompt, 1 of 4 right: pass@1 = 1/4; pass@2 = 1 - C(3,2)/C(4,2) = 1 - 3/6; pass@4 = 1.
    actual = report(np.array([[C, W, W, W]], np.int8), ["1", "2", "3", "4"], ["a"])
    assert [actual["pass_at_k"][k]["mean"] for k in ("1", "2", "4")] == pytest.approx([0.25, 0.5, 1.0])


def test_correct_answers_vote_as_one_however_they_are_worded():
    # 2 right in different words, 1 wrong, 1 unreadable, which does not vote: right wins 2 to 1.
    actual = report(np.array([[C, C, W, U]], np.int8), ["1/2", "0.5", "3", "?"], ["a"])
    assert actual["majority_at_k"]["4"]["mean"] == 1.0


def test_wrong_completions_with_one_answer_vote_for_it_together():
    texts = ["2 and 2 is \\boxed{4}.", "I say \\boxed{5}.", "It is \\boxed{ 5 }, then.", "\\boxed{5}"]
    rows = [np.frombuffer(b"\1" + text.encode(), np.uint8).astype(np.int32) for text in texts]
    length = np.array([len(row) for row in rows])
    rollout = SimpleNamespace(
        tokens=np.stack([np.pad(row, (0, 40 - len(row))) for row in rows]), length=length, finish=np.zeros(4, np.int8),
        action_mask=(np.arange(40) > 0) & (np.arange(40) < length[:, None]), weights_fingerprint=np.uint32(1),
    )  # fmt: skip
    evaluator = Evaluator(lambda *_: rollout, ByteTokenizer(), make_mesh(MeshShape(), jax.devices()[:1]), None, None,
                          None, samples=4, batch=1, prompt_length=1)  # fmt: skip
    visit = Visit(Example(id="e", messages=(Message("user", "2 + 2?"),), answer="4"), (7, 9), (1,))
    with open_scoring(Scoring(verifiers=(MathEqual(),)), VERIFIERS) as scorer:
        found = summary(draw(evaluator, None, [visit], scorer, lambda done, total: None))
    # 5 has three votes of four. Of two samples, it has both votes in 3 of 6 pairs; with 4, which comes first, it ties.
    assert [found["majority_at_k"][k]["mean"] for k in ("1", "2", "4")] == [0.25, 0.5, 0.0]
    assert found["distinct"]["mean"] == 2.0 and found["mean"] == 0.25


def test_different_answers_of_a_prompt_are_counted():
    # Both right ones are one answer, the unreadable one is none: {right, 3} and {4, 5, 6}.
    actual = report(np.array([[C, C, W, U], [W, W, W, W]], np.int8), "1/2 0.5 3 ? 4 5 6 4".split(), ["a"] * 2)
    assert actual["distinct"]["mean"] == 2.5 and actual["distinct"]["n"] == 2
    assert "different answers of a prompt's 4 samples: 2.50 [2.00, 3.00]" in table(
        {**actual, "step": 1, "protocol": {"task": "Addition"}}
    )
    # A lost sample may be right, so that prompt has no number.
    lost = report(np.array([[C, E], [W, W]], np.int8), "1 1.0 2 3".split(), ["a"] * 2)["distinct"]
    assert (lost["mean"], lost["n"]) == (2.0, 1)
    assert report(np.array([[C, E]], np.int8), ["1", "1.0"], ["a"])["distinct"]["mean"] is None
    assert "distinct" not in report(np.array([[C], [W]], np.int8), ["1", "2"], ["a"] * 2)


def test_an_evaluation_in_which_nothing_could_be_scored_has_no_mean():
    actual = report(np.array([[E], [E]], np.int8), ["", ""], ["a", "a"])
    assert actual["mean"] is None and actual["unscorable"] == 2


def test_the_best_of_k_is_the_mean_over_all_k_of_the_samples():
    # Of 2, sorted: (r_2 + 2 r_3 + 3 r_4) / 6 = (0.1 + 2 * 0.2 + 3 * 0.5) / 6 = 1/3 and (-1 + 2 * 0 + 3 * 3) / 6 = 4/3.
    # Of 4: 0.5 and 3. The third prompt lacks a reward.
    rewards = np.array([[0.2, 0.5, 0.1, 0.0], [-2.0, -1.0, 3.0, 0.0], [9.0, 9.0, 9.0, np.nan]])
    actual = report(np.array([[C, W, W, W]] * 3, np.int8), [""] * 12, ["a"] * 3, rewards)["best_of_k"]
    assert {k: value["mean"] for k, value in actual.items()} == {"2": pytest.approx(5 / 6), "4": pytest.approx(1.75)}
    assert actual["4"]["n"] == 2 and actual["4"]["kl"] == pytest.approx(0.636294, abs=1e-6)
    assert "best_of_k" not in report(np.array([[C, W]], np.int8), [""] * 2, ["a"])


def test_the_best_of_k_of_rewards_0_and_1_is_pass_at_k():
    """The best of the first k samples stood beside pass@k, which is over all k of them, as another number."""
    correct = np.array([[0, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]])
    actual = report(np.where(correct, C, W).astype(np.int8), [""] * 12, ["a"] * 3, correct.astype(np.float64))
    for k in ("2", "4"):
        assert actual["best_of_k"][k]["mean"] == pytest.approx(actual["pass_at_k"][k]["mean"], abs=1e-12)
    # 1 - C(3, 2) / C(4, 2) = 1/2, and 1
    assert actual["best_of_k"]["2"]["mean"] == pytest.approx(0.5)


def test_a_mixture_of_a_users_environment_is_opened(tmp_path):
    part = write_part("An environment", tmp_path)
    bindings = [f"Config.parts=['{part}']", "Config.task=@Mixture()", "Mixture.tasks=[@Reversal()]", "Reversal.size=20",
                "Config.eval=@Eval()", "Eval.prompts=512",
                "Data.held_out_every=2"]  # fmt: skip
    config, parts = jrl.load_config("configs/tiny.gin", bindings)
    tokenizer = TOKENIZERS["Bytes"].build(Bytes(), ())
    trained = SimpleNamespace(policy=SimpleNamespace(config=config, parts=parts, tokenizer=tokenizer))
    # It has been opened where its prompts are counted.
    with pytest.raises(ValueError, match=r"512 held-out prompts requested.* among 20 examples"):
        held_out_visits(trained)


def test_workers_of_an_evaluation_read_no_run_that_is_evaluated(tmp_path, monkeypatch):
    config, parts = jrl.load_config("configs/tiny.gin", ["Config.eval=@Eval()", "Eval.prompts=8",
                                                         "Data.held_out_every=2"])  # fmt: skip
    tokenizer = TOKENIZERS["Bytes"].build(Bytes(), ())
    trained = SimpleNamespace(policy=SimpleNamespace(config=config, parts=parts, tokenizer=tokenizer))

    class Seen(Exception):
        pass

    def opened(*args, private):
        raise Seen(private)

    monkeypatch.setattr(evaluation, "open_scoring", opened)
    with pytest.raises(Seen) as seen:
        reevaluate(trained, [], lambda done, total: None, private=[tmp_path])
    assert seen.value.args == ([tmp_path],)


def test_prompts_are_read_once_for_all_steps_of_a_run(monkeypatch):
    config, _ = load_config("configs/tiny.gin", ["Config.eval=@Eval()", "Data.held_out_every=2"])
    read, warned = [], []
    held_out = lambda trained, stop: read.append(trained.step) or [trained.step]
    monkeypatch.setattr(evaluation, "held_out_visits", held_out)
    monkeypatch.setattr(evaluation, "trained_prompts_warning", lambda address, config: f"about {address}")
    monkeypatch.setattr(evaluation, "reevaluate", lambda trained, visits, *others: {"step": trained.step, "of": visits})
    policy = SimpleNamespace(config=config, program_cache=SimpleNamespace(close=lambda: None))
    sources = [
        Source(f"{address} {step}", Path(address), lambda step=step: SimpleNamespace(step=step, policy=policy))
        for address, step in (("a", 1), ("a", 2), ("b", 3), ("a", 4))
    ]
    announce = lambda done, total: None
    results, last, visits = evaluate_sources(sources, evaluation.ACCURACY_ONLY, announce, warned.append)
    assert [result["of"] for result in results] == [[1], [1], [3], [4]] and read == [1, 3, 4]
    assert (last.step, visits, warned) == (4, [4], ["about a", "about b", "about a"])


def test_a_warning_begins_a_line_of_the_terminal(monkeypatch, capsys):
    def evaluated(sources, asked, announce, warn, stop):
        announce(8, 8)
        warn("Warning: of the second run")
        raise StopRequested("the end")

    monkeypatch.setattr("jrl.tools.evaluate_sources.sources_of", lambda *args: [])
    monkeypatch.setattr("jrl.tools.evaluate_sources.check_evaluation_given", lambda *args: None)
    monkeypatch.setattr("jrl.tools.evaluate_sources.evaluate_sources", evaluated)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    cli.main(["eval", "runs/one"])
    assert "8/8 prompts\r\x1b[KWarning: of the second run\n" in capsys.readouterr().err


def test_policies_are_compared_prompt_by_prompt():
    # Of the prompts that both were judged on a wins one, ties one and loses two: (1 + 0.5) / 4.
    a = {"source": "a", "by_prompt": {"p": 1.0, "q": 0.5, "r": 0.0, "s": 0.2, "t": None, "u": 1.0}}
    b = {"source": "long/b", "by_prompt": {"s": 0.9, "r": 1.0, "q": 0.5, "p": 0.0, "t": 1.0}}
    empty, head, *rows = win_rates([a, b])
    assert empty == "" and head.split() == ["wins", "over", "a", "long/b"]
    assert rows[0].startswith("a ") and rows[0].split()[1] == "37.5" and rows[1].split()[1] == "62.5"
    assert win_rates([a, {"source": "c", "by_prompt": {"p": None}}])[2].split() == ["a", "-"]
    one, other = ({"source": name, "by_prompt": {"p": value}} for name, value in (("d", 1.0), ("e", 0.0)))
    assert win_rates([one, other])[2].split() == ["d", "100.0", "[20.7,", "100.0]"]  # Wilson's of 1 of 1


def test_the_same_rewards_in_another_order_are_a_tie():
    # In float32 (0.1 + 1.1) + 1.1 is 2.3000002 and (1.1 + 1.1) + 0.1 is 2.3: one of them won.
    example = Example(id="p", messages=(Message("user", "1 or 2?"),), answer="1")

    def evaluated(name, *rewards):
        row, verdicts = np.array([rewards], np.float32), np.full((1, 3), C, np.int8)
        samples = Samples([SimpleNamespace(example=example)], ["1"] * 3, ["1"] * 3, [[3]] * 3, verdicts, row, 0.0, "0")
        return {**summary(samples), "source": name}

    one, other = evaluated("a", 0.1, 1.1, 1.1), evaluated("b", 1.1, 1.1, 0.1)
    assert one["by_prompt"] == other["by_prompt"]
    assert win_rates([one, other])[2].split()[:2] == ["a", "50.0"]


def test_cells_of_one_prompt_have_no_interval():
    one, none = {"mean": 0.25, "low": None, "high": None, "n": 1}, {"mean": None, "low": None, "high": None, "n": 0}
    assert (percent_cell(one), percent_cell(none), percent_cell(None)) == ("25.0", "-", "-")
    assert percent_cell({"mean": 0.25, "low": 0.125, "high": 1.0, "n": 2}) == "25.0 [12.5, 100.0]"
    given = {"step": 1, "samples": 2, "parsed": 1.0, "unscorable": 0, "protocol": {"task": "Words"}}
    k = {"pass_at_k": {"2": one}, "all_of_k": {}, "majority_at_k": {}, "best_of_k": {"2": one | {"kl": 0.193}}}
    lines = table({**given, **k, **one | {"low": 0.05, "high": 0.7}, "distinct": one}).splitlines()
    assert lines[1].split() == ["mean", "95", "%", "interval", "prompts"]
    assert lines[2].split() == ["avg@2", "25.0", "%", "[5.0,", "70.0]", "1"]
    assert lines[3].split() == ["pass@2", "25.0", "%", "none", "1"]
    assert lines[4] == "mean reward of the best of 2: 0.25, at most 0.19 nats from the policy"
    assert lines[5] == "different answers of a prompt's 2 samples: 0.25"


def test_an_evaluation_on_prompts_that_a_run_may_have_trained_on_is_warned_of(tmp_path):
    config, _ = load_config("configs/tiny.gin", ["Data.held_out_every=5"])
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    assert trained_prompts_warning(tmp_path, config) is None
    of_data = lambda every: dataclasses.replace(config, data=dataclasses.replace(config.data, held_out_every=every))
    assert "has trained with Data.held_out_every = 5" in trained_prompts_warning(tmp_path, of_data(3))
    assert trained_prompts_warning(tmp_path, of_data(10)) is None  # every second of those that it held out
    scored = dataclasses.replace(of_data(3), task=dataclasses.replace(config.task, verifiers=("exact",)))
    assert trained_prompts_warning(tmp_path, scored) is not None
    other = dataclasses.replace(of_data(3), task=dataclasses.replace(config.task, digits=3))
    assert trained_prompts_warning(tmp_path, other) is None and trained_prompts_warning(tmp_path / "x", config) is None


def test_a_run_without_an_evaluation_is_named():
    config, _ = load_config("configs/tiny.gin")
    whole = (
        r"^the configuration of runs/two has no evaluation; give it one: jrl eval .* Data\.held_out_every=10, or, for"
    )
    with pytest.raises(ValueError, match=whole):
        check_evaluated(config, "the configuration of runs/two")
    splits = dataclasses.replace(config, data=dataclasses.replace(config.data, held_out_every=5))
    with pytest.raises(ValueError, match=r"Eval\.prompts=100, or, for a published model"):
        check_evaluated(splits, "the configuration of runs/two")


def test_a_run_or_a_step_that_is_not_there_is_refused_before_any_source_is_evaluated(tmp_path):
    run, model, options = tmp_path / "run", tmp_path / "model", OpenOptions((), None, None, None)
    (run / "checkpoints" / "3").mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    model.mkdir()
    (model / "config.json").write_text("{}")
    for steps in ([None], [3]):
        assert len(sources_of([run, model, Path("gs://bucket/run")], steps, options, None, "policy")) == 3
    nowhere, advice = tmp_path / "nowhere", "give the --run folder of jrl train, or the folder of a published model$"
    with pytest.raises(ValueError, match=f"nowhere does not exist; {advice}"):
        sources_of([run, nowhere], [None], options, None, "policy")
    nowhere.mkdir()
    with pytest.raises(ValueError, match=f"holds neither manifest.json nor config.json; {advice}"):
        sources_of([run, nowhere], [None], options, None, "policy")
    with pytest.raises(ValueError, match=f"is no run; choose one of the 1 in it, such as .*{run.name}$"):
        sources_of([tmp_path], [None], options, None, "policy")  # such as that of a sweep
    (run / "config.gin").touch()
    (run / "checkpoints" / "3" / "manifest.json").write_text("{}")
    for inside in (run / "checkpoints", run / "checkpoints" / "3"):
        with pytest.raises(ValueError, match=f"is inside a run: give {run}, and the step as an option"):
            sources_of([inside], [None], options, None, "policy")
    with pytest.raises(ValueError, match="run has no checkpoint of step 0; there are 3"):
        sources_of([run], [3, 0], options, None, "policy")


def test_a_published_model_without_an_evaluation_is_refused_before_any_source_is_evaluated(tmp_path):
    run, model = tmp_path / "run", tmp_path / "model"
    for folder, name in ((run, "config.gin"), (model, "config.json")):
        folder.mkdir()
        (folder / name).write_text("{}")
    options = OpenOptions((), None, None, None)
    with pytest.raises(ValueError, match=rf"model {model} has no evaluation.* --config {run / 'config.gin'} asks it"):
        check_evaluation_given([run, model], options)
    check_evaluation_given([run], options)
    check_evaluation_given([run, model], options._replace(bindings=("Config.eval = @Eval()",)))
    check_evaluation_given([run, model], options._replace(config=tmp_path / "mine.gin"))


@pytest.mark.parametrize("temperature", [0.0, 1e-31, float("nan")])
def test_a_temperature_that_logits_cannot_be_divided_by_is_refused(temperature):
    with pytest.raises(ValueError, match=r"Eval\.temperature must be at least 1e-30, or None"):
        Eval(temperature=temperature)
