"""Contract tests of a model, our decoder or a user's; each raises AssertionError where it fails.

Each takes a Model and its config, which has a `vocab_size`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.contract import Model, abstract, has_state, unstack_cache
from jrl.types import Array, PyTree

ROWS, LENGTH = 3, 10


def parameters_are_those_of_the_spec(model: Model, cfg: Any) -> None:
    """Fresh parameters have the names, shapes and dtypes of the spec, and all are finite."""
    params = _params(model, cfg)
    expected = jax.tree.map(lambda s: (s.shape, jnp.dtype(s.dtype)), abstract(model.spec(cfg)))
    actual = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    _check(actual == expected, f"the spec is {expected}, but fresh parameters are {actual}")
    _check(all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params)), "a fresh parameter is not finite")


def logits_are_wide(model: Model, cfg: Any) -> None:
    """Logits are [B, L, vocabulary], float32 or wider."""
    logits = _logits(model, cfg, *_batch(cfg))
    _check(logits.shape == (ROWS, LENGTH, cfg.vocab_size), f"logits are {logits.shape}")
    _check(jnp.promote_types(logits.dtype, jnp.float32) == logits.dtype, f"logits are {logits.dtype}")


def a_token_does_not_see_later_ones(model: Model, cfg: Any) -> None:
    """Other tokens after a position do not change its logits; other tokens before it do."""
    tokens, positions = _batch(cfg)
    logits = _logits(model, cfg, tokens, positions)
    later = _logits(model, cfg, np.where(positions > 4, (tokens + 1) % cfg.vocab_size, tokens), positions)
    _check_close(later[:, :5], logits[:, :5], logits, "a token depends on a later one")
    before = _logits(model, cfg, np.where(positions < 4, (tokens + 1) % cfg.vocab_size, tokens), positions)
    _check(bool(np.abs(before[:, 5:] - logits[:, 5:]).max() > 1e-4), "a token does not depend on those before it")


def packed_sequences_see_only_themselves(model: Model, cfg: Any) -> None:
    """Two sequences in one row give the logits that each gives alone."""
    tokens, positions = _batch(cfg)
    packed = np.concatenate([tokens[0, :6], tokens[1, :4]])[None]
    places = np.concatenate([positions[0, :6], positions[1, :4]])[None]
    segment = np.array([[0] * 6 + [1] * 4], np.int32)
    together, alone = _logits(model, cfg, packed, places, segment)[0], _logits(model, cfg, tokens, positions)
    _check_close(together[:6], alone[0, :6], alone, "the first of two packed sequences differs from itself alone")
    _check_close(together[6:], alone[1, :4], alone, "the second of two packed sequences differs from itself alone")


def continuations_see_their_prefix_and_themselves(model: Model, cfg: Any) -> None:
    """A prefix and two continuations in one row give the logits of the prefix with each continuation alone, as
    Learner.prefix_sharing='in_row' packs them."""
    tokens, positions = _batch(cfg)
    shared = tokens.copy()
    shared[1, :4] = shared[0, :4]
    row, places = (np.concatenate([x[0, :7], x[1, 4:7]])[None] for x in (shared, positions))
    segment = np.stack([[0] * 4 + [1] * 3 + [2] * 3, [0] * 10], axis=-1)[None].astype(np.int32)
    together, alone = _logits(model, cfg, row, places, segment)[0], _logits(model, cfg, shared, positions)
    _check_close(together[:7], alone[0, :7], alone, "a prefix and its first continuation differ from the two alone")
    message = ("a second continuation differs from itself after the prefix alone (which matters with "
               "Learner.prefix_sharing='in_row' only): read other tokens by the mask, not by positions")  # fmt: skip
    _check_close(together[7:], alone[1, 4:7], alone, message)


def prefill_and_decode_equal_one_full_forward(model: Model, cfg: Any) -> None:
    """Prefilling four tokens and decoding the rest one at a time gives the logits of one full pass, with stacked and
    with unstacked layers."""
    tokens, positions = _batch(cfg)
    expected = _logits(model, cfg, tokens, positions)
    for stacked in (True, False):
        params = _params(model, cfg)
        cache = model.init_cache(cfg, ROWS, LENGTH)
        if not stacked:
            params = model.unstack(params, cfg)
            cache = unstack_cache(cache)
        step = jax.jit(functools.partial(_step, model=model, cfg=cfg))
        decoded = []
        for start, stop in [(0, 4), *((t, t + 1) for t in range(4, LENGTH))]:
            logits, cache = step(params, tokens[:, start:stop], positions[:, start:stop], None, cache)
            decoded.append(logits)
        how = "stacked" if stacked else "unstacked"
        _check_close(
            jnp.concatenate(decoded, 1), expected, expected, f"prefill and decode differ from one pass ({how})"
        )


def a_prompt_filled_up_with_padding_is_the_prompt_alone(model: Model, cfg: Any) -> None:
    """Prompts of several lengths are padded to six columns; then each one's last token is fed again, and the tokens
    after it. This gives the logits of one full pass. The sampler begins this way."""
    tokens, positions = _batch(cfg)
    length, columns = np.array([[6], [3], [1]], np.int32), positions[:, :6]
    padded = np.where(columns < length, tokens[:, :6], (tokens[:, :6] + 1) % cfg.vocab_size)
    params, cache = _params(model, cfg), model.init_cache(cfg, ROWS, LENGTH)
    step = jax.jit(functools.partial(_step, model=model, cfg=cfg))
    later = (columns >= length - 1).astype(np.int32) if has_state(cache) else None
    _, cache = step(params, padded, columns, later, cache)
    again = length - 1 + np.arange(4, dtype=np.int32)[None]
    decoded = []
    for columns in np.split(again, 4, axis=1):
        logits, cache = step(params, np.take_along_axis(tokens, columns, 1), columns, None, cache)
        decoded.append(logits)
    full_logits = _logits(model, cfg, tokens, positions)
    expected = np.take_along_axis(full_logits, again[..., None], 1)
    message = "padding after a prompt, or repeating its last token, changes the later logits"
    _check_close(jnp.concatenate(decoded, 1), expected, full_logits, message)


def gradients_are_finite_and_reach_something(model: Model, cfg: Any) -> None:
    """The gradient of the logits with respect to the parameters is finite, and not 0."""
    tokens, positions = _batch(cfg)

    def total(params: PyTree) -> Array:
        hidden, _ = model.forward(params, tokens, positions, None, cfg)
        return jax.nn.log_softmax(model.unembed(params, hidden, cfg))[..., 0].sum()

    leaves = jax.tree.leaves(jax.jit(jax.grad(total))(_params(model, cfg)))
    _check(all(bool(jnp.isfinite(x).all()) for x in leaves), "a gradient is not finite")
    _check(any(bool(jnp.abs(x).max() > 0) for x in leaves), "no gradient reaches any parameter")


CONTRACT_TESTS: dict[str, Callable[[Model, Any], None]] = {
    fn.__name__: fn
    for fn in (
        parameters_are_those_of_the_spec,
        logits_are_wide,
        a_token_does_not_see_later_ones,
        packed_sequences_see_only_themselves,
        continuations_see_their_prefix_and_themselves,
        prefill_and_decode_equal_one_full_forward,
        a_prompt_filled_up_with_padding_is_the_prompt_alone,
        gradients_are_finite_and_reach_something,
    )
}


@functools.lru_cache(maxsize=8)
def _params(model: Model, cfg: Any) -> PyTree:
    return jax.jit(lambda key: model.init(key, cfg, lambda names: None))(jax.random.key(0))


def _batch(cfg: Any) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    return tokens, np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def _all(params: PyTree, tokens: Array, positions: Array, segment: Array | None, *, model: Model, cfg: Any) -> Array:
    hidden, _ = model.forward(params, tokens, positions, segment, cfg)
    return model.unembed(params, hidden, cfg)


def _logits(model: Model, cfg: Any, tokens: Any, positions: Any, segment: Any = None) -> np.ndarray:
    return np.asarray(_all(_params(model, cfg), tokens, positions, segment, model=model, cfg=cfg))


def _step(
    params: PyTree, tokens: Array, positions: Array, segment: Array | None, cache: PyTree, *, model: Model, cfg: Any
) -> tuple[Array, PyTree]:
    hidden, cache = model.forward(params, tokens, positions, segment, cfg, cache)
    return model.unembed(params, hidden, cfg), cache


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _check_close(actual: Any, expected: Any, logits: Any, message: str) -> None:
    """Raises AssertionError unless the difference is within 2e-6 (1e-2 in bfloat16) times the largest absolute logit,
    or times 1 if that is larger."""
    bound = (2e-6 if logits.dtype != jnp.bfloat16 else 1e-2) * max(1, np.abs(logits).max())
    worst = np.abs(np.asarray(actual) - np.asarray(expected)).max()
    _check(bool(worst <= bound), f"{message}: by {worst:.1e}; rounding allows {bound:.1e}")
