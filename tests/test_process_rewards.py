"""A role that judges steps: where steps end, what their tokens earn, what is masked, and what is refused."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from test_corrector import completions

import jrl
from jrl.config import ConfigError
from jrl.rollout.process_rewards import WORST_STEP, ProcessRewards, place_scores, process_source, step_ends
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.types import PackedBatch

RECIPE = str(pathlib.Path(__file__).parents[1] / "configs" / "algos" / "process_rewards.gin")
TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("o\n7\n", ([1, 3], [1, 4])),
        ("o\n7", ([1, 2], [1, 3])),
        ("\n\n7", ([2], [3])),  # blank text is no step
        ("o\n\n7\n", ([1, 4], [1, 5])),
        ("o7", ([1], [2])),
        ("o\n  ", ([1], [4])),
        ("", ([], [])),
    ],
)
def test_steps_end_with_their_separators_and_the_last_one_with_the_completion(text, ends):
    ids = [*TOKENIZER.encode(text), TOKENIZER.end_id]
    assert step_ends(ids, "\n", TOKENIZER.token_bytes(), TOKENIZER.leads) == ends


def test_a_separator_of_two_characters():
    ids = TOKENIZER.encode("a;;b;c;;")
    assert step_ends(ids, ";;", TOKENIZER.token_bytes(), TOKENIZER.leads) == ([2, 7], [2, 7])


def packed_of(batch, width=8):
    """Returns the rows of a batch in packed rows of two sequences, the second before the first, and a last one of
    padding."""
    rows = batch.host["tokens"].shape[0]
    pairs = -(-rows // 2)
    sequence = np.full((1, pairs, 2), rows, np.int32)
    segment, positions = np.full((1, pairs, 2 * width), 2, np.int32), np.zeros((1, pairs, 2 * width), np.int32)
    for row in range(rows):
        r, place = row // 2, 1 - row % 2
        sequence[0, r, place] = row
        columns = slice(place * width, (place + 1) * width)
        segment[0, r, columns], positions[0, r, columns] = place, np.arange(width)
    none = dict.fromkeys(PackedBatch.__dataclass_fields__)
    return PackedBatch(**{**none, "sequence": sequence, "segment": segment, "positions": positions})


def rewards(config, batch, logits):
    """Returns the scores of a batch whose tokens have the logits [N, T]."""
    packed = packed_of(batch)

    def scores(state, given):
        rows = np.take_along_axis(given.sequence, np.minimum(given.segment, 1), axis=-1)
        return jnp.asarray(np.asarray(logits)[np.minimum(rows, len(logits) - 1), given.positions])

    source = process_source(config, scores, TOKENIZER)
    assert source.rewards_tokens and source.names == (WORST_STEP,)
    return source.collect(source.submit(batch._replace(packed=lambda: [packed])))


def logit(p):
    return float(np.log(p / (1 - p)))


def test_the_tokens_that_end_steps_earn_differences_by_hand():
    # Scores 0.9 and 0.6 at line breaks and 0.8 at the last text, prior 0.5: 0.4, -0.3 and 0.2, in all 0.8 - 0.5.
    # The first column is the prompt; the last step is rewarded on the end token.
    batch = completions("a\nb\nc", "a")
    logits = np.full((3, 8), 9.0)
    logits[0, [2, 4, 5]] = [logit(0.9), logit(0.6), logit(0.8)]
    logits[1, 1] = logit(0.7)
    found = rewards(ProcessRewards(), batch, logits)
    expected = [[0, 0, 0.4, 0, -0.3, 0, 0.2, 0], [0, 0, 0.2, 0, 0, 0, 0, 0]]
    np.testing.assert_allclose(found.token_reward, expected, atol=1e-6)
    np.testing.assert_allclose(found.values[:, 0], [0.6, 0.7], rtol=1e-6)
    assert found.weights == (0.0,) and not any(found.problems)
    found = rewards(ProcessRewards(form="values", weight=0.5), batch, logits)
    np.testing.assert_allclose(found.token_reward[0], [0, 0, 0.45, 0, 0.3, 0, 0.4, 0], atol=1e-6)


def test_a_completion_without_a_step_is_one_and_a_score_that_is_no_number_is_missing():
    batch = completions("", "a")
    logits = np.full((3, 8), np.nan)
    logits[0, 1] = logit(0.7)  # the end token, all that there is
    found = rewards(ProcessRewards(), batch, logits)
    np.testing.assert_allclose(found.token_reward[0], [0, 0.2, 0, 0, 0, 0, 0, 0], atol=1e-6)
    assert found.problems[0] == "" and found.problems[1].startswith("the scores of its steps are")
    np.testing.assert_array_equal(found.token_reward[1], 0)
    assert np.isnan(found.values[1, 0])


def test_tokens_that_the_policy_did_not_sample_end_no_step():
    found = rewards(ProcessRewards(), completions("a\nb", "a\nb", begun=2), np.full((3, 8), logit(0.9)))
    np.testing.assert_allclose(found.token_reward[0], [0, 0, 0, 0, 0.4, 0, 0, 0], atol=1e-6)


def test_scores_of_packed_tokens_come_to_their_rows():
    batch = completions("a", "b", "c", "d")
    packed = packed_of(batch)
    values = np.arange(1 * 3 * 16, dtype=float).reshape(1, 3, 16)
    found = np.full((4, 8), np.nan)
    place_scores(found, packed.sequence, packed.segment, packed.positions, values)
    np.testing.assert_array_equal(found[:, 0], [8, 0, 24, 16])
    assert np.isfinite(found).all()  # padding, the fifth row, is left out


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (["ProcessRewards.role='reward'"], r"ProcessRewards\.role"),
        (["Online.objective=@GRPO()"], r"Online\.process rewards tokens, and GRPO reads"),
        (
            ["Online.process=None", "Online.shaping=@Shaping()", "Shaping.potential=@Potential()"],
            r"Shaping\.potential uses token rewards, and nothing gives any",
        ),
        (
            ["Online.objective=@SequenceRLOO()", "Online.shaping=@Shaping()", "Shaping.potential=@Potential()"],
            r"nothing would be learned from them\. Leave Shaping\.potential out, or use ReinforcePlusPlus",
        ),
        (["ProcessRewards.weight=0.0"], r"ProcessRewards\.weight = 0\.0 must not be 0"),
        (["ProcessRewards.separator=''"], r"ProcessRewards\.separator is empty"),
        (["ProcessRewards.prior=2.0"], r"ProcessRewards\.prior = 2\.0 must lie in \[0, 1\]"),
    ],
)
def test_what_judges_nothing_is_refused(bindings, message, tmp_path):
    bindings = [*bindings, "Online.critic=None", "Online.critic_optimizer=None", "Online.critic_warmup=0"]
    with pytest.raises((ConfigError, ValueError), match=message):
        jrl.train(RECIPE, bindings, run=tmp_path / "run")
