"""A role that rewrites completions: what its corrections say of the tokens, and what is refused."""

from __future__ import annotations

import pathlib
import types

import numpy as np
import pytest

import jrl
from jrl.config import ConfigError
from jrl.rollout.corrector import KEPT, Corrector, corrector_source
from jrl.rollout.sources import Completions
from jrl.tasks.data.corrections import Corrections
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers.bytes import ByteTokenizer

RECIPE = str(pathlib.Path(__file__).parents[1] / "configs" / "algos" / "sequence_reward_model.gin")
TOKENIZER = ByteTokenizer()
WIDTH = 8


def completions(*texts, begun=0):
    """Returns completions of the prompt "q", two of each visit, an end token behind each; the first `begun` tokens of
    each are not the policy's own; a row of padding is at the end."""
    host = {"tokens": np.zeros((len(texts) + 1, WIDTH), np.int32), "length": np.zeros(len(texts) + 1, np.int32)}
    host["action_mask"] = np.zeros(host["tokens"].shape, bool)
    for row, text in enumerate(texts):
        ids = [ord("q"), *TOKENIZER.encode(text), TOKENIZER.end_id]
        host["tokens"][row, : len(ids)], host["length"][row] = ids, len(ids)
        host["action_mask"][row, 1 + begun : len(ids)] = True
    visit = Visit(Example("e", (Message("user", "q"),), answer="a"), (0, 0), (ord("q"),))
    return Completions([visit] * (len(texts) // 2), texts, 2, host, lambda: [], None)


def scores(batch, answers, *, scale=0.5, longest=9):
    """Returns the scores of a batch whose prompts are rewritten into `answers`, and the prompts that were."""
    asked = []

    def draw(state, visits):
        asked.extend(TOKENIZER.decode(list(visit.prompt)).replace("\n", "") for visit in visits)
        ids = [[9, *TOKENIZER.encode(answers[text]), TOKENIZER.end_id] for text in asked]
        tokens = np.array([row + [0] * (WIDTH - len(row)) for row in ids])
        mask = np.array([[0 < i < len(row) for i in range(WIDTH)] for row in ids])
        return types.SimpleNamespace(tokens=tokens, action_mask=mask)

    source = corrector_source(Corrector(scale=scale), Corrections(ask="{response}>"), draw, TOKENIZER, longest)
    return source.collect(source.submit(batch)), asked


def test_sampled_tokens_are_rewarded_where_the_correction_keeps_them():
    found, asked = scores(completions("abc", "xy", "abc", "abc"), {"qabc>": "adc", "qxy>": "xy"})
    assert asked == ["qabc>", "qxy>", "qabc>", "qabc>"]
    # Column 0 is the prompt. [a, b, c, end] and [a, d, c, end]: b is changed; of [x, y, end] all is kept.
    expected = [[0, 0.5, -0.5, 0.5, 0.5, 0, 0, 0], [0, 0.5, 0.5, 0.5, 0, 0, 0, 0]]
    np.testing.assert_array_equal(found.token_reward, [*expected, expected[0], expected[0]])
    np.testing.assert_array_equal(found.values[:, 0], [0.75, 1, 0.75, 0.75])
    assert (
        found.values.shape == (4, 1) and found.names == (KEPT,) and found.weights == (0.0,) and not any(found.problems)
    )


def test_what_began_a_completion_is_rewritten_with_it_and_not_rewarded():
    found, _ = scores(completions("abc", "abc", begun=2), {"qabc>": "adc"})
    np.testing.assert_array_equal(found.token_reward[0], [0, 0, 0, 0.5, 0.5, 0, 0, 0])
    assert found.values[0, 0] == 1


def test_a_completion_that_does_not_fit_or_has_an_empty_correction_has_no_reward():
    found, asked = scores(completions("abcdef", "abc"), {"qabc>": ""})
    assert asked == ["qabc>"]
    assert found.problems == ["it and its prompt have 12 tokens, and 9 are rewritten", "its correction is empty"]
    assert not found.token_reward.any() and np.isnan(found.values).all()


def test_a_row_without_a_sampled_token_says_so():
    found, _ = scores(completions("abc", "abc", begun=4), {"qabc>": "adc"})  # the end too was given
    assert found.problems == ["it has no sampled token"] * 2 and not found.token_reward.any()


@pytest.mark.parametrize(
    "binding, why",
    [
        ("Online.objective = @GRPO()", "GRPO reads only the reward of a completion"),
        ("corrections/Offline.trains = 'other'", "'corrector', which no earlier stage trains on corrections"),
        ("Online.completion_length = 12", "there is room for one of 12 tokens"),
        ("Online.strategy = @SelfCorrection()", r"@SelfCorrection\(\) draws two in a row"),
        ("Corrector.scale = 0.0", r"Corrector\.scale = 0\.0 must be above 0"),
    ],
)
def test_a_corrector_that_could_not_work_is_refused(binding, why):
    with pytest.raises(ConfigError, match=why):
        jrl.load_config(RECIPE, [binding])
