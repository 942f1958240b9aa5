"""What every row of ALGOS promises, as checks that raise AssertionError: for our rows and for a user's own.

Each takes a row and a configuration of it. They feed small arrays; no model is involved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.algos.contract import Algorithm, Groups, Tokens
from jrl.types import Finish

Array = jax.Array

NUM_GROUPS, SAMPLES, WIDTH = 3, 4, 6
ROWS = NUM_GROUPS * SAMPLES
TOLERANCE = 1e-5


def jit_changes_nothing(algorithm: Algorithm, config: Any) -> None:
    """Compiled and plain, every function of the row gives the same numbers."""
    groups, baseline = sample_groups(), jnp.float32(0.3)
    plain, compiled = _credit(algorithm, config, groups, baseline), _jit_credit(algorithm)(config, groups, baseline)
    _close(compiled, plain, "keep, shape, advantages, weights or denominator differ under jit")
    tokens = sample_tokens()
    _close(jax.jit(algorithm.token_loss)(config, tokens), algorithm.token_loss(config, tokens), "token_loss under jit")


def another_float_compiles_nothing(algorithm: Algorithm, config: Any) -> None:
    """Float fields are traced: changing one does not trace the functions again."""
    traces = []

    @jax.jit
    def run(config: Any, groups: Groups, tokens: Tokens) -> Any:
        traces.append(1)
        return _credit(algorithm, config, groups, jnp.float32(0.3)), algorithm.token_loss(config, tokens)

    run(config, sample_groups(), sample_tokens())
    run(_nudged(config), sample_groups(), sample_tokens())
    _true(len(traces) == 1, "changing a float of the configuration compiled again: decorate the class with @traced")


def zero_advantage_gives_zero_policy_gradient(algorithm: Algorithm, config: Any) -> None:
    """With advantage 0, and the policy at its reference, log-probs get no gradient."""
    tokens = sample_tokens()
    tokens = tokens.replace(advantages=jnp.zeros_like(tokens.advantages), ref_logprobs=tokens.logprobs)
    gradient = _gradient(algorithm, config, tokens)
    _true(bool(jnp.all(gradient == 0)), f"advantage 0 gives gradients up to {jnp.max(jnp.abs(gradient))}")


def masked_tokens_do_not_matter(algorithm: Algorithm, config: Any) -> None:
    """NaN under the mask reaches neither loss, metrics nor gradient; nor does any other value there."""
    tokens = sample_tokens()
    poison = lambda x: jnp.where(tokens.mask, x, jnp.nan)
    names = ("logprobs", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "entropy", "advantages", "values",
             "old_values", "returns")  # fmt: skip
    poisoned = tokens.replace(**{name: poison(getattr(tokens, name)) for name in names})
    seen = lambda tree: jax.tree.map(lambda x: jnp.where(tokens.mask, x, 0), tree)
    clean, dirty = algorithm.token_loss(config, tokens), algorithm.token_loss(config, poisoned)
    _close(seen(dirty), seen(clean), "a masked token changes the loss or a metric of another")
    _true(
        bool(jnp.all(jnp.isfinite(dirty[0]))),
        "NaN under the mask comes out of token_loss: mask its inputs, not its result",
    )
    gradient = _gradient(algorithm, config, poisoned)
    _close(gradient, _gradient(algorithm, config, tokens), "NaN under the mask reaches the gradient")
    pulled = lambda g: bool(jnp.all(jnp.where(tokens.mask, 0, g) == 0) & jnp.all(jnp.isfinite(g)))
    _true(pulled(gradient), "a masked token has a gradient")
    of_values = jax.grad(lambda v: _total(algorithm, config, poisoned.replace(values=v)))(poisoned.values)
    _true(pulled(of_values), "a masked token's value has a gradient, or NaN under the mask reaches that of others")


def metrics_speak_of_tokens_and_carry_no_gradient(algorithm: Algorithm, config: Any) -> None:
    """Every metric has the shape of the loss and is not differentiated."""
    tokens = sample_tokens()
    loss, metrics = algorithm.token_loss(config, tokens)
    for name, value in metrics.items():
        _true(value.shape == loss.shape, f"metric {name!r} has shape {value.shape}, the loss {loss.shape}")
    total = lambda lp: sum(m.sum() for m in algorithm.token_loss(config, tokens.replace(logprobs=lp))[1].values())
    if metrics:
        _true(bool(jnp.all(jax.grad(total)(tokens.logprobs) == 0)), "a metric carries a gradient")


def packing_does_not_matter(algorithm: Algorithm, config: Any) -> None:
    """Two sequences in two rows, or packed in one, have the same token losses."""
    apart = sample_tokens()
    rows, width = apart.mask.shape
    join = lambda x: x.reshape(1, rows * width)
    apart = apart.replace(segment=jnp.zeros((rows, width), jnp.int32))
    together = jax.tree.map(join, apart).replace(
        segment=jnp.repeat(jnp.arange(rows), width)[None, :], num_segments=rows
    )
    loss, packed = algorithm.token_loss(config, apart)[0], algorithm.token_loss(config, together)[0]
    _close(packed, join(loss), "packing two sequences into a row changes their losses")


def row_order_does_not_matter(algorithm: Algorithm, config: Any) -> None:
    """Shuffled rows get the same advantages, weights and fate; the baseline and the denominator stay."""
    groups, order = sample_groups(), jnp.asarray(np.random.default_rng(0).permutation(ROWS))
    by_row, fixed = _split(_credit(algorithm, config, groups, jnp.float32(0.3)))
    shuffled = jax.tree.map(lambda x: x[order], groups)
    by_row_shuffled, fixed_shuffled = _split(_credit(algorithm, config, shuffled, jnp.float32(0.3)))
    _close(by_row_shuffled, jax.tree.map(lambda x: x[order], by_row), "the order of rows changes what they get")
    _close(fixed_shuffled, fixed, "the order of rows changes the baseline, a counter or the denominator")


def pad_columns_do_not_matter(algorithm: Algorithm, config: Any) -> None:
    """Two columns of padding more change nothing."""
    groups = sample_groups()
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 2)))
    padded = groups.replace(action_mask=pad(groups.action_mask), values=pad(groups.values))
    cut = lambda x: x[:, :WIDTH] if x.ndim == 2 else x
    _close(
        jax.tree.map(cut, _credit(algorithm, config, padded, jnp.float32(0.3))),
        _credit(algorithm, config, groups, jnp.float32(0.3)),
        "columns of padding change an advantage, a weight or the denominator",
    )


def rows_without_a_verdict_or_a_token_do_not_matter(algorithm: Algorithm, config: Any) -> None:
    """A missing reward (NaN) or an empty completion stays out of the loss, and out of every other row's advantage."""
    groups = sample_groups()
    extra = Groups(
        reward=jnp.array([jnp.nan, 9.0, 9.0]),
        outcome=jnp.array([jnp.nan, 9.0, 9.0]),
        valid=jnp.array([False, True, True]),
        group=jnp.arange(3, dtype=jnp.int32),
        action_mask=jnp.array([[True] * WIDTH, [False] * WIDTH, [True] * WIDTH]),
        finish=jnp.array([Finish.STOP_TOKEN, Finish.STOP_TOKEN, Finish.FAILED], jnp.int8),
        num_groups=NUM_GROUPS,
        max_completion=WIDTH,
        values=jnp.full((3, WIDTH), 9.0),
    )
    more = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), groups, extra)
    few, many = (_credit(algorithm, config, g, jnp.float32(0.3)) for g in (groups, more))
    _true(not bool(jnp.any(many["keep"][ROWS:])), "a row without a verdict or without a token enters the loss")
    _true(bool(jnp.all(many["advantages"][ROWS:] == 0)), "a row without a verdict or without a token has an advantage")
    for name in ("keep", "advantages", "weights", "returns"):
        _close(many[name][:ROWS], few[name], f"a row without a verdict or a token changes the {name} of others")
    _close(many["baseline"], few["baseline"], "a row without a verdict or a token changes the baseline")


def advantages_lie_on_sampled_tokens(algorithm: Algorithm, config: Any) -> None:
    """Prompt, padding and tool output have advantage and return 0, and no token off the loss mask has a weight."""
    groups = sample_groups()
    credit = _credit(algorithm, config, groups, jnp.float32(0.3))
    _true(bool(jnp.all(jnp.where(groups.action_mask, 0, credit["advantages"]) == 0)), "an advantage on no action")
    _true(bool(jnp.all(jnp.where(groups.action_mask, 0, credit["returns"]) == 0)), "a return on no action")
    _true(bool(jnp.all(jnp.where(credit["loss_mask"], 0, credit["weights"]) == 0)), "a weight off the loss mask")


def an_empty_step_has_loss_zero(algorithm: Algorithm, config: Any) -> None:
    """Where every row is masked the denominator is at least 1, and loss and gradient are 0 instead of 0 / 0."""
    tokens = sample_tokens()
    nothing = jnp.zeros_like(tokens.mask)
    tokens = tokens.replace(mask=nothing)
    _true(bool(algorithm.denominator(config, nothing, 0, WIDTH) >= 1), "the denominator of an empty step is below 1")
    loss = lambda lp: _total(algorithm, config, tokens.replace(logprobs=lp))
    value, gradient = jax.value_and_grad(loss)(tokens.logprobs)
    _true(bool((value == 0) & jnp.all(gradient == 0)), f"an empty step has loss {value}")


PROMISES: dict[str, Callable[[Algorithm, Any], None]] = {
    fn.__name__: fn
    for fn in (
        jit_changes_nothing,
        another_float_compiles_nothing,
        zero_advantage_gives_zero_policy_gradient,
        masked_tokens_do_not_matter,
        metrics_speak_of_tokens_and_carry_no_gradient,
        packing_does_not_matter,
        row_order_does_not_matter,
        pad_columns_do_not_matter,
        rows_without_a_verdict_or_a_token_do_not_matter,
        advantages_lie_on_sampled_tokens,
        an_empty_step_has_loss_zero,
    )
}


def _nudged(config: Any) -> Any:
    """Returns the configuration with every float in it a little larger."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    nudge = lambda v: v * 1.01 if isinstance(v, float) else _nudged(v) if dataclasses.is_dataclass(v) else v
    return dataclasses.replace(config, **{name: nudge(value) for name, value in values.items()})


def sample_groups() -> Groups:
    """Returns three groups of four rows: mixed rewards, equal rewards, and one that holds a row without a verdict."""
    rng = np.random.default_rng(1)
    reward = np.array([1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 0], np.float32)
    start, stop = rng.integers(0, 2, ROWS), rng.integers(3, WIDTH + 1, ROWS)
    column = np.arange(WIDTH)
    return Groups(
        reward=jnp.asarray(reward),
        outcome=jnp.asarray(reward),
        valid=jnp.asarray(np.arange(ROWS) != 10),
        group=jnp.repeat(jnp.arange(NUM_GROUPS, dtype=jnp.int32), SAMPLES),
        action_mask=jnp.asarray((column >= start[:, None]) & (column < stop[:, None])),
        finish=jnp.where(jnp.asarray(stop) == WIDTH, Finish.LENGTH, Finish.STOP_TOKEN).astype(jnp.int8),
        num_groups=NUM_GROUPS,
        max_completion=WIDTH,
        values=jnp.asarray(rng.uniform(0, 1, (ROWS, WIDTH)), jnp.float32),
    )


def sample_tokens() -> Tokens:
    """Returns two rows of six tokens, some masked, with ratios on both sides of usual clips."""
    rng = np.random.default_rng(2)
    draw = lambda low, high: jnp.asarray(rng.uniform(low, high, (2, WIDTH)), jnp.float32)
    new = draw(-3, -0.5)
    return Tokens(
        logprobs=new,
        old_logprobs=new + draw(-0.4, 0.4),
        behaviour_logprobs=new + draw(-0.6, 0.6),
        ref_logprobs=new + draw(-0.5, 0.5),
        entropy=draw(0, 2),
        advantages=draw(-1, 1),
        mask=jnp.array([[False, True, True, True, True, False], [False, False, True, True, False, True]]),
        segment=jnp.array([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]], jnp.int32),
        num_segments=2,
        values=draw(-1, 1),
        old_values=draw(-1, 1),
        returns=draw(-1, 1),
    )


def _credit(algorithm: Algorithm, config: Any, groups: Groups, baseline: Array) -> dict[str, Any]:
    reward = algorithm.shape(config, groups)
    advantages, following, counters = algorithm.advantages(config, groups, reward, baseline)
    nothing = jnp.zeros(groups.action_mask.shape)
    keep = algorithm.keep(config, groups)
    loss_mask = groups.action_mask & keep[:, None]
    return {
        "keep": keep,
        "advantages": advantages,
        "returns": nothing if algorithm.returns is None else algorithm.returns(config, groups, reward),
        "loss_mask": loss_mask,
        "weights": algorithm.weights(config, loss_mask, groups.max_completion),
        "baseline": following,
        "counters": counters,
        "denominator": algorithm.denominator(config, loss_mask, groups.reward.shape[0], groups.max_completion),
    }


def _jit_credit(algorithm: Algorithm) -> Callable[[Any, Groups, Array], dict[str, Any]]:
    return jax.jit(lambda config, groups, baseline: _credit(algorithm, config, groups, baseline))


def _split(credit: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    fixed = ("baseline", "counters", "denominator")
    return {k: v for k, v in credit.items() if k not in fixed}, {k: credit[k] for k in fixed}


def _total(algorithm: Algorithm, config: Any, tokens: Tokens) -> Array:
    loss, _ = algorithm.token_loss(config, tokens)
    weights = algorithm.weights(config, tokens.mask, WIDTH)
    denominator = algorithm.denominator(config, tokens.mask, tokens.mask.shape[0], WIDTH)
    return jnp.sum(jnp.where(tokens.mask, weights * loss, 0)) / denominator


def _gradient(algorithm: Algorithm, config: Any, tokens: Tokens) -> Array:
    return jax.grad(lambda lp: _total(algorithm, config, tokens.replace(logprobs=lp)))(tokens.logprobs)


def _close(got: Any, expected: Any, message: str) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        same = a.shape == b.shape and np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        _true(same, f"{message}\n  got      {a}\n  expected {b}")


def _true(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def default_config(algorithm: Algorithm) -> Any:
    """Returns the configuration with every default. Raises TypeError naming the fields that have none."""
    missing = [
        field.name
        for field in dataclasses.fields(algorithm.config)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        name = algorithm.config.__name__
        raise TypeError(f"{name} has fields without a default, {', '.join(missing)}: give the checks an instance of it")
    return algorithm.config()
