"""What benchmarks/recipes.py says of a run: an interval by hand, and scores that are dealt out anew."""

from __future__ import annotations

import functools
import json
import re
import sys
import types

import jax
import numpy as np
import pytest
from recipe_runs import small
from small_model import PARTS

import jrl
from benchmarks import recipes
from jrl.device.placement import rows_on_mesh
from jrl.device.sharding import MeshShape, make_mesh
from jrl.rollout.collect import Collected
from jrl.rollout.scoring import HostScores
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import StoredRows
from jrl.tasks.example import Example, Message
from jrl.tasks.verdict import Status


def test_the_interval_is_of_prompts_sampled_early_and_late():
    # Twelve prompts in both, better by 0.5 and 0.25 in turns: mean 0.375, deviation 0.13056; t of 11
    # degrees of freedom, 2.20099, * that / sqrt(12).
    early = {str(i): [0.0, 0.5] for i in range(12)} | {"only early": [9.0]}
    late = {str(i): [0.75 if i % 2 else 0.5] for i in range(12)} | {"only late": [9.0]}
    found = recipes.improvement([early] * 5 + [{}] * 3 + [late] * 5)
    np.testing.assert_allclose(found, [0.25, 0.625, 2.20099 * 0.13056 / np.sqrt(12)], rtol=1e-4)


def test_of_few_prompts_it_is_of_their_completions():
    # Four early of mean 0.25 and variance 1/4, eight late of mean 1 and variance 0: t of 3 degrees of freedom.
    early, late = {"a": [0.0, 0.0, 0.0, 1.0]}, {"a": [1.0] * 8}
    found = recipes.improvement([early, *[{}] * 4, {}, *[{}] * 4, late])
    np.testing.assert_allclose(found, [0.25, 1, 3.182446 * np.sqrt(0.25 / 4)], rtol=1e-6)


def test_welch_by_hand():
    # Variances 1/2 and 2 of two and four values: 1/4 + 1/2; degrees of freedom (3/4)^2 / ((1/4)^2 / 1 + (1/2)^2 / 3),
    # 3.857, whose t is between those of 3 and 4, 3.182 and 2.776.
    found = recipes.welch_width([0.0, 1.0], [0.0, 0.0, np.sqrt(6), np.sqrt(6)])
    np.testing.assert_allclose(found, 2.81747 * np.sqrt(0.75), rtol=1e-4)
    assert recipes.welch_width([1.0, 1.0], [2.0, 2.0]) == 0


def test_a_name_of_no_recipe_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recipes", "--out", str(tmp_path / "out.json"), "--only", "grpoo"])
    with pytest.raises(SystemExit):
        recipes.main()
    assert "invalid choice: 'grpoo'" in capsys.readouterr().err


def test_nothing_compares_where_no_prompt_comes_again():
    with pytest.raises(ValueError, match="no prompt of the last 5 sampling calls was sampled before"):
        recipes.improvement([{"a": [0.0, 1.0]}] * 5 + [{"b": [1.0, 1.0]}] * 5)


def test_a_run_that_differs_in_a_digit_did_not_come_out_the_same():
    run = {"seed": 0, "first": 0.25, "last": 0.41, "half_width": 0.07, "seconds": 9.0, "warm": False}
    assert recipes.same([run | {"seconds": 3.0, "warm": True}], [run])
    assert not recipes.same([run | {"last": 0.4101}], [run])
    assert recipes.is_warm([run | {"warm": True}]) and not recipes.is_warm([run | {"warm": True}, run])


def test_a_prompt_that_came_later_and_was_chosen_is_compared_with_its_first_calls():
    # Call 7 is the first with "b": of its completions 0 and 1 there, a mean of 0.5 and a variance of 1/2.
    calls = [{"a": [0.0]}] * 6 + [{"b": [0.0, 1.0]}] + [{"b": [0.0, 0.0]}] * 2 + [{"b": [1.0, 1.0]}] * 5
    np.testing.assert_allclose(recipes.improvement(calls), [0.5, 1, 12.706205 * np.sqrt(0.5 / 2)], rtol=1e-6)


def test_a_share_of_pairs_has_the_interval_of_its_pairs():
    # 5 steps of 8 pairs each: 0.6 (24 of 40) and 0.9, shrunk to 25/42 and 37/42; sqrt(0.24093 + 0.10488) / sqrt(40).
    row = lambda value, **more: {"phase": "pairs", "pairs/accuracy": value, "policy/logprob": -value, **more}
    rows = [row(value) for value in (0.5, 0.5, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9)]
    found = recipes.stored_improvement([{"phase": "warm"}, *rows], 8)
    np.testing.assert_allclose(found, [0.6, 0.9, 1.96 * np.sqrt(0.34581 / 40)], rtol=1e-4)
    # What is no share has that of its steps: variances 0.01 and 0, t of 4 degrees of freedom.
    alone = [{"phase": "pairs", "policy/logprob": row["pairs/accuracy"]} for row in rows]
    np.testing.assert_allclose(recipes.stored_improvement(alone, 8)[2], 2.776445 * np.sqrt(0.01 / 5), rtol=1e-6)
    assert recipes.measure_of(rows) not in recipes.IMITATED and recipes.measure_of(alone) in recipes.IMITATED


def test_of_rows_with_advantages_only_what_grows_likelier_than_the_others_counts():
    # Advantages 1 and 0.5 with log-probs -2 and -4, then -1 and -3: all rows grow likelier alike, and the mean product
    # rises from -2 to -1.25, but the covariance stays: -2 + 0.75 * 3 = 0.25 and -1.25 + 0.75 * 2 = 0.25.
    step = lambda product, logprob: {"phase": "rows", "policy/logprob": 0.0, "advantage/logprob": product,
                                     "advantage/mean": 0.75, "advantage/mean_logprob": logprob}  # fmt: skip
    rows = [step(-2.0, -3.0)] * 5 + [step(-1.25, -2.0)] * 5
    np.testing.assert_allclose(recipes.stored_improvement(rows, 8), [0.25, 0.25, 0], atol=1e-12)
    # Of rows with rewards the same: 1 and 0.5.
    step = lambda product, logprob: {"phase": "rows", "policy/logprob": logprob, "stored/reward_logprob": product,
                                     "stored/reward": 0.75}  # fmt: skip
    rows = [step(-2.0, -3.0)] * 5 + [step(-1.25, -2.0)] * 5
    np.testing.assert_allclose(recipes.stored_improvement(rows, 8), [0.25, 0.25, 0], atol=1e-12)


def batch(mesh):
    """Two prompts of two completions each, the last without a verdict, and a row of padding."""
    verdict = np.array([Status.CORRECT, Status.WRONG, Status.WRONG, Status.CRASH, Status.PADDING], np.int8)
    reward, row = np.array([1.0, 0.0, 0.25, 0.0, 7.0], np.float32), np.arange(5, dtype=np.float32)
    scores = HostScores(
        reward=reward, valid=verdict <= Status.UNPARSABLE, verdict=verdict, outcome=reward / 2, components={"row": row},
        details=list("abcde"), token_reward=None, source_metrics={},
    )  # fmt: skip
    visits = [Visit(Example(text, (Message("user", text),)), (0, 0), (1,)) for text in ("p", "q")]
    sampler = types.SimpleNamespace(components=("row",), samples=2, place=functools.partial(rows_on_mesh, mesh))
    return Collected(None, None, {}, scores, visits, [""] * 5, {}, 2), sampler


def test_outcomes_are_read_by_prompt_without_those_that_do_not_count(mesh):
    assert recipes.outcomes_of(batch(mesh)[0]) == {"p": [0.5, 0], "q": [0.125]}
    assert recipes.outcomes_of(batch(mesh)[0], "reward") == {"p": [1, 0], "q": [0.25]}


@pytest.mark.parametrize("control", [None, 0])
def test_every_sampling_call_of_a_run_is_observed(control, tmp_path):
    path, bindings = small("dr_po")  # its completions begin with a part of an answer, which a control deals out too
    calls, rewards = {}, {}
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])), recipes.observed(calls, control, rewards):
        jrl.train(path, bindings, parts=[PARTS], run=tmp_path)
    (outcomes,), (earned,) = calls.values(), rewards.values()
    assert [sum(map(len, found.values())) for found in outcomes] == [32, 32]  # 4 prompts, 8 samples, 2 steps
    assert [sum(map(len, found.values())) for found in earned] == [32, 32]


def test_a_recipe_learns_by_scores_where_its_reward_models_reward_it():
    found = {name for name in ("dpo", "grpo", "reward_ensemble", "sequence_reward_model", "tldr_ppo", "vpl")
             if recipes.learns_by_scores(jrl.load_config(recipes.recipes()[name])[0])}  # fmt: skip
    assert found == {"reward_ensemble", "tldr_ppo"}


def test_permuted_scores_stay_together_and_padding_stays_where_it_is(mesh):
    given, sampler = batch(mesh)
    draws, orders = np.random.default_rng(0), set()
    for _ in range(20):
        found = recipes.permuted(given, sampler, draws)
        order = found.host_scores.components["row"].astype(int)
        assert sorted(order[:4]) == [0, 1, 2, 3] and order[4] == 4
        for name in ("reward", "valid", "verdict", "outcome"):
            dealt = getattr(given.host_scores, name)[order]
            np.testing.assert_array_equal(getattr(found.host_scores, name), dealt)
            np.testing.assert_array_equal(jax.device_get(getattr(found.scores, name)), dealt)
        orders.add(tuple(order))
    assert len(orders) > 5
    assert given.host_scores.components["row"].tolist() == [0, 1, 2, 3, 4]


def stored(label, unit, value):
    """Rows of a prompt of two tokens, 10 + i, and a completion of one, 20 + i; weighed alike."""
    count = len(label)
    tokens = np.stack([np.full(count, 1), 10 + np.arange(count), 20 + np.arange(count)], axis=1).astype(np.int32)
    return StoredRows(
        tokens, np.full(count, 3, np.int32), np.broadcast_to(np.arange(3) == 2, (count, 3)), np.float32(label),
        np.ones(count, np.float32), np.int32(unit), np.float32(value),
    )  # fmt: skip


def test_answers_of_a_comparison_change_labels_and_values_together():
    rows, seen = stored([1, 0, 1, 0], [0, 0, 1, 1], [5, 4, 3, 2]), set()
    for seed in range(20):
        dealt = recipes.dealt(rows, np.random.default_rng(seed))
        np.testing.assert_array_equal(dealt.tokens, rows.tokens)
        both = list(zip(dealt.label.tolist(), dealt.value.tolist()))
        assert set(both[:2]) == {(1, 5), (0, 4)} and set(both[2:]) == {(1, 3), (0, 2)}
        seen.add(tuple(both))
    assert len(seen) == 4


def test_rated_answers_are_dealt_the_ratings_of_others_and_demonstrations_their_completions():
    ratings = np.arange(6).reshape(3, 2)
    rated, shown = stored([1, 1, 1], [0, 1, 2], ratings), stored([1, 1, 1], [0, 1, 2], [0, 0, 0])
    draws = np.random.default_rng(0)
    found = [recipes.dealt(rated, draws) for _ in range(20)]
    assert {tuple(row) for rows in found for row in rows.value.tolist()} == set(map(tuple, ratings.tolist()))
    assert len({rows.value.tobytes() for rows in found}) > 3
    assert all(rows.tokens.tolist() == rated.tokens.tolist() for rows in found)
    found = [recipes.dealt(shown, draws) for _ in range(20)]
    assert all(rows.tokens[:, :2].tolist() == shown.tokens[:, :2].tolist() for rows in found)
    assert {tuple(sorted(rows.tokens[:, 2].tolist())) for rows in found} == {(20, 21, 22)}
    assert len({rows.tokens.tobytes() for rows in found}) > 3


def test_what_was_measured_is_of_recipes_that_are_there():
    results = json.loads((recipes.ROOT / "docs" / "recipes.json").read_text(encoding="utf-8"))
    assert set(results["recipes"]) <= set(recipes.recipes())
    runs = [run for entry in results["recipes"].values() for kind in ("runs", "controls") for run in entry[kind]]
    assert all(run.keys() == runs[0].keys() for run in runs)
    controls = [run for entry in results["recipes"].values() for run in entry["controls"]]
    assert sum(map(recipes.learned, controls)) <= max(1, 0.1 * len(controls))  # 1 in 40 by chance


@pytest.mark.parametrize("gain, said", [(0.2, True), (0.1, False), (-0.2, False)])
def test_a_run_has_learned_where_its_interval_is_above_0(gain, said):
    assert recipes.learned({"first": 0.5, "last": 0.5 + gain, "half_width": 0.15}) is said


def test_the_header_of_a_recipe_says_what_was_measured():
    results = json.loads((recipes.ROOT / "docs" / "recipes.json").read_text(encoding="utf-8"))["recipes"]
    claimed = re.compile(r"rises by ([\d.]+)(?: to ([\d.]+))? in \d+ steps, of three seeds \(docs/recipes\.md\)")
    one_line = lambda path: path.read_text(encoding="utf-8").replace("\n# ", " ")
    headers = {name: one_line(path) for name, path in recipes.recipes().items()}
    checked = {name: found for name, header in headers.items() if (found := claimed.search(header))}
    assert len(checked) > 60
    for name, found in checked.items():
        rises = [run["last"] - run["first"] for run in results[name]["runs"]]
        assert found.groups() in {(f"{min(rises):.2f}", f"{max(rises):.2f}"), (f"{max(rises):.2f}", None)}, name
    means = re.compile(
        r"from about (-?[\d.]+)(?: in the first five steps)? to about (-?[\d.]+) in "
        r"(?:the last five(?: of \d+)?|\d+ steps), mean of three seeds \(docs/recipes\.md\)"
    )
    checked = {name: found for name, header in headers.items() if (found := means.search(header))}
    assert len(checked) > 30
    for name, found in checked.items():
        for claim, place in zip(found.groups(), ("first", "last")):
            mean = np.mean([run[place] for run in results[name]["runs"]])
            assert abs(float(claim) - mean) <= 0.51 * 10 ** -len(claim.partition(".")[2]), (name, place, mean)
