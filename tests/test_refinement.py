"""Refinements: drawn after feedback, learned after the prompt alone (ILF)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.config.errors import ConfigError
from jrl.rollout.prompts import place_asked, with_rows
from jrl.rollout.strategies import rows
from jrl.rollout.strategies.contract import Shard
from jrl.rollout.strategies.refinement import STRATEGY, Refinement, asked
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.types import PromptBatch

RECIPE = "configs/algos/ilf.gin"


def test_completions_stand_after_another_prompt_by_hand():
    # Two tokens after three of a prompt, now after one; one after one, now after two; none after none, now after one.
    fields = {
        "tokens": jnp.array([[1, 2, 3, 4, 5, 9], [1, 6, 9, 9, 9, 9], [9] * 6]),
        "length": jnp.array([5, 2, 0]),
        "action_mask": jnp.array([[False] * 3 + [True, True, False], [False, True] + [False] * 4, [False] * 6]),
        "sampler_logprobs": jnp.array([[0, 0, 0, -1.0, -2, 0], [0, -3, 0, 0, 0, 0], [0] * 6]),
        "version": jnp.array([[-1, -1, -1, 4, 4, -1], [-1, 4, -1, -1, -1, -1], [-1] * 6]),
        "truncated_logprobs": None,
        "group": jnp.arange(3),
    }
    own = jnp.array([[7, 9], [7, 8], [7, 9]]), jnp.array([1, 2, 1])
    found = jax.jit(lambda fields, *rest: rows.after_prompts(fields, *rest, pad_id=9))(
        fields, jnp.array([3, 1, 0]), *own
    )
    np.testing.assert_array_equal(found["tokens"], [[7, 4, 5, 9, 9, 9], [7, 8, 6, 9, 9, 9], [7, 9, 9, 9, 9, 9]])
    np.testing.assert_array_equal(found["length"], [3, 3, 1])
    np.testing.assert_array_equal(found["action_mask"][:, :4], [[0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(found["sampler_logprobs"][:, :4], [[0, -1, -2, 0], [0, 0, -3, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(found["version"][:, :4], [[-1, 4, 4, -1], [-1, -1, 4, -1], [-1] * 4])
    assert found["truncated_logprobs"] is None and not found["action_mask"][:, 4:].any()


def test_a_full_row_and_one_after_an_empty_prompt_move_whole():
    # Three tokens after three in a row of six, now after one; two after none, now after one.
    fields = {
        "tokens": jnp.array([[1, 2, 3, 4, 5, 6], [3, 4, 9, 9, 9, 9]]),
        "length": jnp.array([6, 2]),
        "action_mask": jnp.array([[False] * 3 + [True] * 3, [True, True] + [False] * 4]),
    }
    own = jnp.array([[7], [8]]), jnp.array([1, 1])
    found = jax.jit(lambda fields, *rest: rows.after_prompts(fields, *rest, pad_id=9))(fields, jnp.array([3, 0]), *own)
    np.testing.assert_array_equal(found["tokens"], [[7, 4, 5, 6, 9, 9], [8, 3, 4, 9, 9, 9]])
    np.testing.assert_array_equal(found["length"], [4, 3])
    np.testing.assert_array_equal(found["action_mask"], [[0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]])


def test_the_refiner_draws_after_the_asked_prompt():
    calls = []

    def sample(prompts, budget=None, **how):
        calls.append((prompts.tokens, how))
        # Two samples of each prompt: tokens 3 and 4 after that of one token, 5 and 6 after that of two.
        tokens = jnp.array([[1, 3, 9, 9], [1, 4, 9, 9], [1, 2, 5, 9], [1, 2, 6, 9]])
        drawn = tokens > 2
        return {"tokens": tokens, "length": jnp.array([2, 2, 3, 3]), "action_mask": drawn & (tokens < 9),
                "finish": jnp.array([0, 1, 0, 1])}  # fmt: skip

    asks = PromptBatch(jnp.array([[1, 9], [1, 2]]), jnp.array([1, 2]), jnp.zeros((2, 2), jnp.uint32))
    own = PromptBatch(jnp.array([[7, 8], [6, 9]]), jnp.array([2, 1]), jnp.zeros((2, 2), jnp.uint32))
    shard = Shard(sample, with_rows(asks, own), None, None, samples=2, completion_length=2, pad_id=9)
    drawing = Refinement(refiner="judge")
    found = STRATEGY.drawing(drawing, None)(shard)
    np.testing.assert_array_equal(found["tokens"], [[7, 8, 3, 9], [7, 8, 4, 9], [6, 5, 9, 9], [6, 6, 9, 9]])
    np.testing.assert_array_equal(found["action_mask"].argmax(1), [2, 2, 1, 1])
    np.testing.assert_array_equal(found["length"], [3, 3, 2, 2])
    np.testing.assert_array_equal(found["finish"], [0, 1, 0, 1])
    ((tokens, how),) = calls
    np.testing.assert_array_equal(tokens, asks.tokens)
    assert how == {"samples": 2, "completion_length": 2, "role": "judge"} and STRATEGY.roles(drawing) == ("judge",)


def visit(**info):
    messages = (Message("user", "1+1="),)
    return Visit(Example("e", messages, answer="2", info=info), (0, 5), tuple(ByteTokenizer().encode_prompt(messages)))


def test_answer_and_feedback_are_in_the_prompt_that_is_drawn_from():
    config, tokenizer = Refinement(condition="{given}? {feedback}. "), ByteTokenizer()
    full = visit(given="3", feedback="It is 2")
    prompt = asked(config, full, tokenizer, 99)
    assert "3? It is 2. " in tokenizer.decode(list(prompt)) and "1+1=" in tokenizer.decode(list(prompt))
    assert (
        asked(config, full, tokenizer, len(prompt)) == prompt and asked(config, full, tokenizer, len(prompt) - 1) == ()
    )
    assert asked(config, visit(given="3"), tokenizer, 99) == ()


def test_where_nothing_is_asked_nothing_is_drawn(mesh):
    visits = [visit(), visit(given="3")]
    found = place_asked([(5, 6), ()], visits, 3, 8, 0, mesh)
    assert found.length[:3].tolist() == [2, 0, 0] and found.tokens[0, :3].tolist() == [5, 6, 0]
    prompt = list(visits[0].prompt)
    assert found.row_length[:3].tolist() == [len(prompt)] * 2 + [0]
    for row in range(2):
        assert found.row_tokens[row, : len(prompt)].tolist() == prompt


def test_an_objective_without_a_bound_on_importance_weights_is_refused():
    jrl.load_config(RECIPE)
    with pytest.raises(
        ConfigError, match=r"@Refinement\(\) samples from other prompts.*GRPO as configured has no bound"
    ):
        jrl.load_config(RECIPE, ["Online.objective=@GRPO()"])
    jrl.load_config(RECIPE, ["Online.objective=@GRPO()", "GRPO.importance=@TruncatedImportance()"])
    with pytest.raises(
        ConfigError, match=r"Refinement\.refiner names the role 'nobody', which no earlier stage trains"
    ):
        jrl.load_config(RECIPE, ["Refinement.refiner='nobody'"])
    with pytest.raises(ConfigError, match=r"Refinement\.condition is 'again'; it must contain a placeholder"):
        jrl.load_config(RECIPE, ["Refinement.condition='again'"])
