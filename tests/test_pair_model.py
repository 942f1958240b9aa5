"""A pair model: what it says of two completions, what is refused, and runs that learn from it."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params
from recipe_runs import DECODER as SMALL_DECODER
from small_model import MODEL as BIGRAM_MODEL
from small_model import Bigram
from test_corrector import completions

import jrl
from jrl.config import ConfigError
from jrl.learning.learner import Weights
from jrl.learning.pair_model import first_preferred
from jrl.models import decoder
from jrl.models.shape import Decoder
from jrl.rollout.pair_model import WINS, PairModel, component_names, pair_model_source
from jrl.rollout.scoring import HostScores
from jrl.rollout.sources import add_scores
from jrl.run.report.rollouts import read_rollouts
from jrl.tasks.data.comparisons import Comparisons
from jrl.tasks.tokenizers.bytes import ByteTokenizer

TINY = str(pathlib.Path(__file__).parents[1] / "configs" / "tiny.gin")
TOKENIZER = ByteTokenizer()
ASKED = Comparisons(ask="{first}<{second}?")


def judged(texts, answers, *, longest=20, weight=0.5):
    """Returns the scores of completions of the prompt "q", two of each, by the answers to questions, and these."""
    questions = []

    def prefer(state, ids):
        questions.extend(TOKENIZER.decode(list(row)).strip() for row in ids)
        return [np.float32([answers[text] for text in questions])]

    source = pair_model_source(PairModel(weight=weight), ASKED, prefer, TOKENIZER, 2, longest)
    return source.collect(source.submit(completions(*texts))), questions


def test_every_two_completions_of_a_prompt_are_compared_in_both_orders():
    answers = {"qab<cd?": 0.9, "qcd<ab?": 0.3, "qx<y?": 0.5, "qy<x?": 0.5}
    found, asked = judged(["ab", "cd", "x", "y"], answers)
    assert asked == list(answers) and not any(found.problems)
    assert found.names == component_names(2) == (WINS, "pair_model/over_0", "pair_model/over_1")
    assert found.weights == (0.5, 0.0, 0.0)
    # ab wins (0.9 + 1 - 0.3) / 2 = 0.8 of its comparisons, cd 0.2.
    np.testing.assert_allclose(found.values[:, 0], [0.8, 0.2, 0.5, 0.5], 1e-6)
    over = np.float32([[np.nan, 0.9], [0.3, np.nan], [np.nan, 0.5], [0.5, np.nan]])
    np.testing.assert_array_equal(found.values[:, 1:], over)
    # That a completion is not compared with itself does not mask its row.
    column = np.ones(4, np.float32)
    scores = HostScores(column, column > 0, np.zeros(4, np.int8), column, {}, [""] * 4, 0)
    added = add_scores(scores, found)
    assert added.valid.all()
    np.testing.assert_allclose(added.reward, [1.4, 1.1, 1.25, 1.25], 1e-6)


def test_a_question_that_several_pairs_put_is_answered_once():
    found, asked = judged(["a", "a", "a", "a"], {"qa<a?": 0.7})
    assert asked == ["qa<a?"]
    np.testing.assert_allclose(found.values[:, 0], [0.5] * 4)  # (0.7 + 1 - 0.7) / 2
    np.testing.assert_array_equal(found.values[:, 1:], np.float32([[np.nan, 0.7], [0.7, np.nan]] * 2))


def test_a_completion_whose_comparisons_do_not_fit_has_no_reward():
    found, asked = judged(["abcdef", "b", "x", "y"], {"qx<y?": 1.0, "qy<x?": 0.0}, longest=9)
    assert asked == ["qx<y?", "qy<x?"]
    why = "a comparison of it has 14 tokens, and 9 are read"
    assert found.problems == [why, why, "", ""]
    np.testing.assert_array_equal(found.values[:, 0], [np.nan, np.nan, 1, 0])
    broken, _ = judged(["a", "b", "x", "y"], {"qa<b?": np.nan, "qb<a?": 0.5, "qx<y?": 1.0, "qy<x?": 0.0})
    assert broken.problems == ["its comparisons are not numbers"] * 2 + [""] * 2


@pytest.mark.parametrize("model, cfg", [(BIGRAM_MODEL, Bigram(vocab_size=16)), (decoder.MODEL, None)])
def test_the_verdict_is_read_at_the_last_token_of_a_question(model, cfg):
    cfg = cfg or Decoder(vocab_size=16, layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16)
    weights = Weights(drawn_params(model.spec(cfg)), {})
    tokens, length = jnp.int32([[3, 5, 7, 9], [4, 6, 1, 1]]), jnp.int32([4, 2])
    columns = jnp.broadcast_to(jnp.arange(4), (2, 4))
    logits = model.unembed(weights.params, model.forward(weights.params, tokens, columns, None, cfg)[0], cfg)
    last = jax.nn.softmax(logits[jnp.arange(2), length - 1])
    read = jax.jit(lambda tokens, verdicts: first_preferred(weights, tokens, length, verdicts, model=model, cfg=cfg))
    found = read(tokens, jnp.int32([2, 8]))
    np.testing.assert_allclose(found, last[:, 2] / (last[:, 2] + last[:, 8]), 1e-6)
    np.testing.assert_allclose(read(tokens, jnp.int32([8, 2])), 1 - found, 1e-6)
    np.testing.assert_array_equal(read(tokens.at[1, 2:].set(11), jnp.int32([2, 8])), found)  # padding
    assert found.dtype == jnp.float32


COMPARED = [
    "Config.stages=[@pairs/Offline(), @Online()]", "pairs/Offline.source=@Comparisons()",
    "Comparisons.ask='{first}<{second}?'", "pairs/Offline.objective=@SFT()", "pairs/Offline.trains='pair_model'",
    "pairs/Offline.steps=1", "pairs/Offline.batch_size=8", "Online.objective=@OSP()", "Online.pair_model=@PairModel()",
    "Online.completion_length=4", "Sampler.completion_length=40", "OSP.preference='pair_model'",
    "OSP.pairing='tournament'", "Online.steps=2", "Online.prompts=4", "Online.samples=4", "Scoring.workers=1",
    "Sampler.slots=8", "PairModel.batch=12", "PairModel.weight=0.0",
]  # fmt: skip
ITSELF = [
    *(binding for binding in COMPARED if not binding.startswith(("pairs/", "OSP."))), "Config.stages=[@Online()]",
    "PairModel.role='policy'", "PairModel.comparisons=@Comparisons()", "Online.objective=@NashMD()",
    "NashMD.preference='pair_model'",
]  # fmt: skip


def last_of(bindings):
    """Returns bindings without those that later ones replace."""
    return [*{binding.partition("=")[0]: binding for binding in bindings}.values()]


WITHOUT = [binding for binding in COMPARED if not binding.startswith("PairModel.")]


@pytest.mark.parametrize(
    "bindings, why",
    [
        (["pairs/Offline.trains='other'"], r"PairModel\.role is 'pair_model', which no earlier stage trains"),
        (["PairModel.role='policy'"], "'policy', which no earlier stage trains on comparisons"),
        (["PairModel.role='teacher'"], r"PairModel\.role is 'teacher'.*Available: pair_model, policy, reference"),
        (["OSP.preference='reward'"], r"PairModel\.weight is 0, and OSP does not read preferences"),
        (["OSP.preference='judge'"], r"OSP\.preference|preference"),
        (["Sampler.completion_length=4", "Data.prompt_length=4"], "there is no room for two of 4 tokens"),
        (["PairModel.batch=0"], r"PairModel\.batch must be at least 1"),
        (["PairModel.weight=1e39"], r"PairModel\.weight expects a float of at most 3\.4e\+38"),
        (["Online.strategy=@SelfCorrection()"], "SelfCorrection"),
        (["Config.teacher=@Published()", "Published.path='x'"], r"set PairModel\.role = 'teacher'"),
    ],
)
def test_a_pair_model_that_could_not_work_is_refused(bindings, why):
    with pytest.raises(ConfigError, match=why):
        jrl.load_config(TINY, last_of([*COMPARED, *bindings]))


def test_a_stage_without_one_is_refused_where_its_preferences_are_asked_for():
    with pytest.raises(ConfigError, match=r"OSP\.preference = 'pair_model', and the stage has none"):
        jrl.load_config(TINY, last_of([*WITHOUT, "Online.pair_model=None"]))
    with pytest.raises(ConfigError, match=r"the completions of a prompt, and Online\.samples = 1 gives it one"):
        plain = [binding for binding in ITSELF if not binding.startswith(("NashMD.", "PairModel.weight"))]
        jrl.load_config(TINY, last_of([*plain, "Online.objective=@Reinforce()", "Online.samples=1"]))


def test_a_published_pair_model_is_the_teacher():
    more = ["Config.teacher=@Published()", "Published.path='x'", "PairModel.role='teacher'"]
    config, _ = jrl.load_config(TINY, last_of([*ITSELF, *more]))
    assert config.stages[0].pair_model.role == "teacher"


def rows_of(folder, bindings):
    """Trains for a few steps and returns what was sampled and the metrics. A bigram could not compare two answers."""
    jrl.train(TINY, last_of([*bindings, *SMALL_DECODER]), run=folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return read_rollouts(folder / "rollouts"), [json.loads(line) for line in lines]


@pytest.mark.parametrize("bindings", [COMPARED, ITSELF])
def test_a_run_learns_from_a_pair_model_or_from_its_own_word(bindings, tmp_path):
    rows, metrics = rows_of(tmp_path / "run", bindings)
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in metrics[-2:])
    over = np.stack([rows[f"component.pair_model%2Fover_{s}"] for s in range(4)], axis=-1).reshape(-1, 4, 4)
    itself = np.eye(4, dtype=bool)
    assert np.isnan(over[:, itself]).all() and np.isfinite(over[:, ~itself]).all()
    assert ((over > 0) & (over < 1))[:, ~itself].all() and over[:, ~itself].std() > 0
    both = np.where(itself, 0, (over + 1 - over.swapaxes(1, 2)) / 2)
    wins = np.asarray(rows["component.pair_model%2Fwins"]).reshape(-1, 4)
    np.testing.assert_allclose(wins, both.sum(-1) / 3, 1e-5)
