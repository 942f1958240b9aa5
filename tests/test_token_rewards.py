"""Rewards of spans: from a verifier's verdict to the tokens that objectives see."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
from small_model import PLAIN_DECODER

import jrl
from jrl.device.placement import rows_on_mesh
from jrl.device.sharding import MeshShape, make_mesh
from jrl.rollout.collect import padded, scores_to_learn_from
from jrl.rollout.scoring import HostScores, Scoring, open_scoring
from jrl.rollout.sources import LearnedScores, add_scores
from jrl.rollout.token_rewards import span_rewards
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import VERIFIERS, Verifier, merge
from jrl.tasks.verifiers.confidence_span import ConfidenceSpan
from jrl.tasks.verifiers.judge import judge
from jrl.tasks.verifiers.length import Length
from jrl.tasks.verifiers.source import PartSource


def rows(*texts, prompt=2):
    """Returns tokens [N, T] and action mask of completions after a prompt, a stop token behind each."""
    tokenizer = ByteTokenizer()
    ids = [[*tokenizer.encode(text), tokenizer.end_id] for text in texts]
    tokens = np.zeros((len(texts), prompt + max(map(len, ids)) + 1), np.int32)
    actions = np.zeros(tokens.shape, bool)
    for row, own in enumerate(ids):
        tokens[row, prompt : prompt + len(own)], actions[row, prompt : prompt + len(own)] = own, True
    return tokens, actions, tokenizer


def test_rewards_of_spans_by_hand():
    # Sentences that end at the tokens 2 and 5 of a completion: 0.3 * 0.5 = 0.15; 0.3 * -0.3 + 0.3 * 0.8 = 0.15.
    tokens, actions, tokenizer = rows("ab.cd.", "x")
    found = span_rewards([((3, 0.15), (6, -0.09), (6, 0.24)), ()], tokens, actions, tokenizer)
    expected = np.zeros(tokens.shape)
    expected[0, 2 + 2], expected[0, 2 + 5] = 0.15, 0.15
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert found.dtype == np.float32
    # Where nothing was sampled nothing is rewarded.
    assert not span_rewards([((3, 0.15),)], tokens, np.zeros_like(actions), tokenizer).any()


def test_a_character_of_several_tokens_is_completed_by_its_last_one():
    tokens, actions, tokenizer = rows("é.")  # two bytes and one
    found = span_rewards([((1, 1.0), (2, 2.0))], tokens, actions, tokenizer)
    np.testing.assert_array_equal(found[0], [0, 0, 0, 1, 2, 0, 0])


def test_tokens_of_a_tool_carry_nothing_and_padding_rows_neither():
    tokens, actions, tokenizer = rows("abcd", "abcd")
    actions[0, 3:5] = False  # "bc" is a tool's: the completion is "ad"
    found = span_rewards([((1, 1.0), (2, 2.0))], tokens, actions, tokenizer)
    np.testing.assert_array_equal(found[0], [0, 0, 1, 0, 0, 2, 0, 0])
    assert not found[1].any()


def test_bytes_that_complete_no_character_leave_the_reward_on_the_last_token():
    tokens, actions, tokenizer = rows("aé")
    actions[0, 4:] = False  # cut inside the character, which decodes to U+FFFD
    found = span_rewards([((2, 1.0),)], tokens, actions, tokenizer)
    np.testing.assert_array_equal(found[0], [0, 0, 0, 1, 0, 0, 0])


EXAMPLE = Example(id="e", messages=(Message("user", "2 + 2?"),), answer="4")
ROW = Verifier(config=Length, score=None, rewards_spans=True)


@pytest.mark.parametrize(
    "spans, why",
    [
        (((3, 1.0), (3, 1.0)), "ends at 3"),
        (((0, 1.0),), "ends at 0"),
        (((5, 1.0),), "at most 4"),
        (((1.5, 1.0),), "ends at 1.5"),
        (((1, float("nan")),), "whose reward is nan"),
        (((1, "1"),), "whose reward is a value of type str"),
        ((1,), r"the span 1; expected \(end, reward\)"),
        (((1, 1.0),) * 1001, "1001 spans; at most 1000"),
    ],
)
def test_spans_that_cannot_be_rewarded_are_an_error_of_the_verifier(spans, why):
    row = dataclasses.replace(ROW, score=lambda config, completion, example: Verdict(Status.CORRECT, 1.0, "", spans))
    verdict = judge(row, Length(), "abcd", EXAMPLE)
    assert verdict.status is Status.VERIFIER_ERROR and verdict.spans == ()
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(verdict.detail)


def test_spans_of_a_row_that_does_not_announce_them_are_an_error():
    score = lambda config, completion, example: Verdict(Status.CORRECT, 1.0, "", ((1, 1.0),))
    verdict = judge(Verifier(config=Length, score=score), Length(), "abcd", EXAMPLE)
    assert "rewards_spans=True" in verdict.detail
    assert judge(dataclasses.replace(ROW, score=score), Length(), "abcd", EXAMPLE).spans == ((1, 1.0),)


def test_a_stop_token_alone_is_rewarded_and_a_row_without_tokens_is_not():
    tokenizer = ByteTokenizer()
    verdict = judge(VERIFIERS["ConfidenceSpan"], ConfidenceSpan(), "", dataclasses.replace(EXAMPLE, answer="4"))
    assert verdict.spans == ((0, -1.0),)
    tokens, mask = np.array([[9, tokenizer.end_id, 0]] * 2), np.array([[False, True, False], [False] * 3])
    found = span_rewards([verdict.spans] * 2, tokens, mask, tokenizer)
    np.testing.assert_array_equal(found, [[0, -1, 0], [0, 0, 0]])
    score = lambda config, completion, example: Verdict(Status.CORRECT, 1.0, "", ((0, 1.0),))
    assert "ends at 0" in judge(dataclasses.replace(ROW, score=score), Length(), "abcd", EXAMPLE).detail


PART = """
import dataclasses
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.contract import Verifier

@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits:
    '''Every digit is worth 1, and the whole nothing.'''
    weight: float = 1.0

def score(config, completion, example):
    if "!" in completion:
        return Verdict(Status.FORBIDDEN, None, "loud")
    spans = tuple((i + 1, 1.0) for i, c in enumerate(completion) if c.isdigit())
    return Verdict(Status.CORRECT if spans else Status.WRONG, 0.0, "", spans)

VERIFIERS = {"Digits": Verifier(config=Digits, score=score, rewards_spans=True)}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits:
    weight: float = 1.0


TABLE = merge(VERIFIERS, {"Digits": Verifier(config=Digits, score=lambda *_: 0.0, rewards_spans=True)})


def test_spans_are_weighted_and_those_of_a_masked_row_are_dropped():
    config = Scoring(verifiers=(Length(low=1, high=2), Digits(weight=0.5)), workers=1)
    with open_scoring(config, TABLE, (PartSource("digits.py", PART),)) as scorer:
        ticket = scorer.submit(["a1b2", "none", "1!"], [EXAMPLE] * 3, [((0, 0), n) for n in range(3)])
        scores = scorer.collect(ticket)
    assert scores.spans == [((2, 0.5), (4, 0.5)), (), ()]
    assert scores.valid.tolist() == [True, True, False]


def test_an_example_may_not_bring_rewards_of_spans_that_the_run_does_not_know_of():
    named = dataclasses.replace(EXAMPLE, verifiers=("Digits",))
    with open_scoring(Scoring(verifiers=(Length(),), workers=1), TABLE, (PartSource("digits.py", PART),)) as scorer:
        with pytest.raises(ValueError, match=r"'Digits', which rewards spans .*add @Digits\(\) to Scoring.verifiers"):
            scorer.rows_for(named)


def test_token_rewards_of_sources_are_added_and_a_masked_row_has_none():
    scores = HostScores(
        reward=np.float32([1, 1]), valid=np.array([True, False]), verdict=np.int8([0, 6]), outcome=np.float32([1, 0]),
        components={}, details=["", ""], token_reward=np.float32([[0, 1], [5, 5]]),
    )  # fmt: skip
    learned = LearnedScores(("role/a",), (1.0,), np.float32([[0], [0]]), ["", ""], np.float32([[2, 3], [4, 4]]))
    both = add_scores(scores, learned)
    np.testing.assert_array_equal(both.token_reward, [[2, 4], [9, 9]])
    alone = add_scores(dataclasses.replace(scores, token_reward=None), learned)
    np.testing.assert_array_equal(alone.token_reward, learned.token_reward)
    neither = add_scores(dataclasses.replace(scores, token_reward=None), learned._replace(token_reward=None))
    assert neither.token_reward is None
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    place = functools.partial(rows_on_mesh, mesh)
    sampler = types.SimpleNamespace(samples=1, components=("role/a", "Later"), place=place)
    with jax.set_mesh(mesh):
        found = scores_to_learn_from(padded(both, 1), [], sampler)
    np.testing.assert_array_equal(found.token_reward, [[2, 4], [0, 0], [0, 0]])
    np.testing.assert_array_equal(found.components["role/a"], [0, 0, np.nan])
    assert np.isnan(found.components["Later"]).all()


TINY = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", *PLAIN_DECODER, "Online.prompts=16", "Online.samples=2", "Checkpoint.every=2",
    "Log.samples=0", "Log.writers=()", "Scoring.workers=1",
]  # fmt: skip


@pytest.mark.usefixtures("frozen_before_the_first_step")
@pytest.mark.parametrize("objective", ["PPO", "DAPO"])
def test_a_run_rewards_tokens(tmp_path, objective):
    part = tmp_path / "digits.py"
    part.write_text(PART)
    bindings = [*TINY, f"Config.parts=['{part}']", "Scoring.verifiers=[@Regex(), @Digits()]", "Regex.pattern='.*x.*'",
                f"Online.objective=@{objective}()", "Online.steps=2"]  # fmt: skip
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
        with contextlib.closing(jrl.steps("configs/tiny.gin", bindings, run=tmp_path / "run")) as steps:
            seen = list(steps)
    for step in seen:
        digits = [sum(c.isdigit() for c in text) for _, text in step.texts]
        valid = step.rollout["valid"]
        assert step.metrics["reward/tokens"] == pytest.approx(np.mean(np.array(digits)[valid]), rel=1e-6)
