"""Contract tests of every row of STRATEGIES, ours or a user's; each raises AssertionError where it fails.

Each takes a row and a configuration of it. They sample with a decoder of one layer and random weights, which every role
has; which tests a row takes follows from it: `contract_tests_of`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.device.sharding import MeshShape, make_mesh
from jrl.models.decoder import MODEL
from jrl.models.shape import Decoder
from jrl.rollout.prompts import with_rows
from jrl.rollout.sampler import BehaviorPolicy, Sampler, StopRules, sample
from jrl.rollout.strategies.contract import Drawing, Setting, Strategy
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.types import PromptBatch, Rollout

PROMPTS, PROMPT_WIDTH, LONGEST, VERSION = 4, 8, 24, 3
COUNTS = (4, 8, 16, 2, 1, 3, 6, 12, 32)  # completions of a prompt that are tried, until the strategy takes them
TOKENIZER = ByteTokenizer()
CFG = Decoder(vocab_size=TOKENIZER.vocab_size, layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16)


def it_is_part_of_the_compile_key(row: Strategy, config: Any) -> None:
    """What draws on the device is hashable, and equal for equal configurations: it is compiled in."""
    first, second = (_drawing(row, config) for _ in range(2))
    _check(first == second and hash(first) == hash(second), "two drawings of one configuration differ, so that every "
           "run compiles anew: make it a NamedTuple of what it needs")  # fmt: skip
    _check(tuple(first.roles) == tuple(row.roles(config)), f"the drawing has the roles {first.roles}, and the row says "
           f"{row.roles(config)}")  # fmt: skip


def rows_are_whole(row: Strategy, config: Any) -> None:
    """Rows have the fields, shapes and dtypes of plain sampling; those of a prompt are adjacent, and numbered. Actions
    are within the row's length, and padding follows."""
    samples, out = _drawn(row, config)
    plain, columns = _plain(samples), np.arange(PROMPT_WIDTH + LONGEST)
    present = lambda rollout: {name: x for name, x in vars(rollout).items() if x is not None}
    kinds = lambda rollout: {name: (np.shape(x), np.asarray(x).dtype) for name, x in present(rollout).items()}
    ours, theirs = kinds(out), kinds(plain)
    pairs = {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}
    differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    _check(not differ, f"rows differ from those of plain sampling in shape or dtype: {differ}")
    _check(np.array_equal(out.group, plain.group), "rows of a prompt are not adjacent")
    _check(np.array_equal(out.sample, plain.sample), "rows of a prompt are not numbered 0, 1, 2, ..")
    after = columns >= np.asarray(out.length)[:, None]
    _check(not (out.action_mask & after).any(), "there is an action after the end of a row")
    _check(bool((out.tokens[after] == TOKENIZER.pad_id).all()), "what follows a row is not padding")
    turns = sorted(set(out.turn[out.action_mask].tolist()))
    _check(set(turns) <= set(range(row.attempts)), f"actions have the turns {turns}, and a row has {row.attempts} "
           "attempts (Strategy.attempts)")  # fmt: skip
    _check(np.array_equal(out.version, np.where(out.action_mask, VERSION, -1)), "actions do not have the version of "
           "the weights that drew them, or other tokens have one")  # fmt: skip


def rows_begin_with_their_prompt(row: Strategy, config: Any) -> None:
    """Every row begins with its prompt, of which nothing is an action."""
    samples, out = _drawn(row, config)
    given = np.arange(PROMPT_WIDTH + LONGEST) < np.repeat(_prompts().length, samples)[:, None]
    prompts = np.pad(np.repeat(_prompts().tokens, samples, axis=0), ((0, 0), (0, LONGEST)))
    _check(not (out.action_mask & given).any(), "a token of the prompt is an action")
    _check(np.array_equal(np.where(given, out.tokens, 0), np.where(given, prompts, 0)), "a row does not begin "
           "with its prompt")  # fmt: skip


def rows_of_a_prompt_begin_alike(row: Strategy, config: Any) -> None:
    """The rows of a prompt have the same tokens before their first actions, since the row does not say otherwise: with
    Learner.prefix_sharing they are learned behind one of them."""
    samples, out = _drawn(row, config)
    has_actions, first = out.action_mask.any(1), out.action_mask.argmax(1)
    before = np.where(np.arange(PROMPT_WIDTH + LONGEST) < first[:, None], out.tokens, -1).reshape(PROMPTS, samples, -1)
    for rows, drawn in zip(before, has_actions.reshape(PROMPTS, samples)):
        _check(len(np.unique(rows[drawn], axis=0)) <= 1, "rows of a prompt differ before their first actions; say "
               "Strategy(..., shares_prompt=False)")  # fmt: skip


def a_prompt_does_not_see_the_others(row: Strategy, config: Any) -> None:
    """Other prompts in the batch do not change a prompt's rows: they are the same on every mesh."""
    samples, out = _drawn(row, config)
    _, reversed_ = _drawn(row, config, batch="reversed")
    _, among_others = _drawn(row, config, batch="other prompts after the first")
    back = np.arange(PROMPTS * samples).reshape(PROMPTS, samples)[::-1].ravel()
    _check(np.array_equal(reversed_.tokens[back], out.tokens), "the rows of a prompt depend on where it stands in the "
           "batch; draw by its uid: jrl.ops.keys.row_key")  # fmt: skip
    _check(np.array_equal(among_others.tokens[:samples], out.tokens[:samples]), "the rows of a prompt depend on the "
           "other prompts of the batch")  # fmt: skip


def draws_follow_the_key(row: Strategy, config: Any) -> None:
    """Another key draws other rows."""
    (_, out), (_, other) = (_drawn(row, config, key=key) for key in (0, 1))
    _check(not np.array_equal(out.tokens, other.tokens), "another key draws the same rows")


def logprobs_are_the_policys(row: Strategy, config: Any) -> None:
    """The log-prob of every action is that of a forward pass over its row."""
    _, out = _drawn(row, config)
    positions = np.broadcast_to(np.arange(out.tokens.shape[1], dtype=np.int32), out.tokens.shape)

    @jax.jit
    def plain(params: Any) -> jax.Array:
        hidden, _ = MODEL.forward(params, jnp.asarray(out.tokens), positions, None, CFG)
        return jax.nn.log_softmax(MODEL.unembed(params, hidden, CFG))

    expected = np.take_along_axis(np.asarray(plain(_params()))[:, :-1], np.asarray(out.tokens)[:, 1:, None], 2)[..., 0]
    difference = np.where(out.action_mask[:, 1:], out.sampler_logprobs[:, 1:] - expected, 0)
    _check(float(np.abs(difference).max()) < 1e-4, "the log-prob of an action is not the policy's in that row")


def host_tokens_fit(row: Strategy, config: Any) -> None:
    """`prefix` and `asked` return tokens of the tokenizer that fit into the room, the same ones for the same visit."""
    example = Example("one", (Message("user", "1+2="),), answer="1+2 is 3", info={"solution": "1+2 is 3"})
    visit = Visit(example, (7, 11), tuple(TOKENIZER.encode("1+2=")), 0)
    functions = {"prefix": row.prefix} | ({} if row.asked is None else {"asked": row.asked})
    for name, function in functions.items():
        for room in (0, 1, 4, 32):
            first, second = (function(config, visit, TOKENIZER, room) for _ in range(2))
            _check(isinstance(first, tuple), f"{name} returns a {type(first).__name__}; it must be a tuple of ids")
            _check(first == second, f"{name} returns other tokens for the same visit")
            _check(len(first) <= room, f"{name} returns {len(first)} tokens where {room} fit")
            _check(all(0 <= token < TOKENIZER.vocab_size for token in first), f"{name} returns an id beyond the "
                   "vocabulary")  # fmt: skip


def contract_tests_of(row: Strategy, config: Any) -> dict[str, Callable[[Strategy, Any], None]]:
    """Returns the contract tests that a strategy takes, by name: of rows, where it draws them itself."""
    tests = [host_tokens_fit]
    if row.drawing is not None:
        tests += [it_is_part_of_the_compile_key, rows_are_whole, a_prompt_does_not_see_the_others, draws_follow_the_key]
        tests += [rows_begin_with_their_prompt] * (row.asked is None)
        tests += [rows_of_a_prompt_begin_alike] * row.shares_prompt
        tests += [logprobs_are_the_policys] * (row.asked is None and not row.roles(config))
    return {test.__name__: test for test in tests}


def _drawing(row: Strategy, config: Any) -> Drawing:
    drawing = row.drawing(config, TOKENIZER)
    _check(hasattr(drawing, "roles"), "what draws on the device has no attribute `roles`, the roles that it draws with "
           "besides the policy: make it a NamedTuple with roles = ()")  # fmt: skip
    return drawing


def _drawn(row: Strategy, config: Any, key: int = 0, batch: str = "plain") -> tuple[int, Rollout]:
    """Returns how many completions of a prompt were drawn, and the rows. batch: as `_batch` takes it."""
    samples = _samples(row, config)
    return samples, _sampled(_drawing(row, config), samples, key, batch, row.asked is not None)


def _plain(samples: int) -> Rollout:
    return _sampled(None, samples)


@functools.lru_cache(maxsize=8)
def _sampled(drawing: Drawing | None, samples: int, key: int = 0, batch: str = "plain", asked: bool = False) -> Rollout:
    """Returns `samples` rows of every prompt. asked: the sampler gets the prompts of rows too, here the same ones."""
    by_role = {role: _params() for role in ("policy", *(() if drawing is None else drawing.roles))}
    params = by_role if len(by_role) > 1 else _params()
    prompts = _batch(batch)
    prompts = with_rows(prompts, prompts) if asked else prompts
    out = sample(
        BehaviorPolicy(MODEL, CFG, params, version=VERSION),
        prompts,
        jax.random.key(key),
        stream=0,
        config=Sampler(completion_length=LONGEST),
        samples=samples,
        stop=StopRules(TOKENIZER.end_ids, TOKENIZER.pad_id),
        mesh=make_mesh(MeshShape(), jax.devices()[:1]),
        drawing=drawing,
    )
    return jax.tree.map(np.asarray, out)


def _samples(row: Strategy, config: Any) -> int:
    """Returns a number of completions that the strategy takes. Raises AssertionError if it takes none that is tried."""
    roles = frozenset(("policy", *row.roles(config)))
    for samples in COUNTS:
        try:
            row.check(config, Setting(samples, LONGEST, (), roles))
        except ValueError as error:
            refusal = error
        else:
            return samples
    raise AssertionError(f"it takes none of {COUNTS} completions of a prompt, of {LONGEST} tokens: {refusal}")


@functools.cache
def _params() -> Any:
    return jax.tree.map(np.asarray, jax.jit(lambda key: MODEL.init(key, CFG))(jax.random.key(0)))


def _batch(batch: str) -> PromptBatch:
    """Returns prompts: "plain", "reversed", or "other prompts after the first"."""
    if batch == "reversed":
        return jax.tree.map(lambda x: x[::-1], _prompts())
    if batch == "plain":
        return _prompts()
    return jax.tree.map(lambda x, other: np.concatenate([x[:1], other[1:]]), _prompts(), _prompts(seed=1))


@functools.cache
def _prompts(seed: int = 0) -> PromptBatch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(97, 123, (PROMPTS, PROMPT_WIDTH)).astype(np.int32)  # letters
    return PromptBatch(tokens=tokens, length=np.array([3, 5, 8, 4], np.int32),
                       uid=rng.integers(0, 2**32, (PROMPTS, 2), dtype=np.uint32))  # fmt: skip


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
