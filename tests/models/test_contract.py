"""ParamSpec.trained = False, held by the learner for a model whose forward pass does not itself stop the gradient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.learning import learner
from jrl.learning.optimizer import begin
from jrl.learning.optimizers.adamw import OPTIMIZER as ADAMW
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.contract import describe
from jrl.models.contract import ParamSpec, init
from jrl.models.decoder import MODEL
from jrl.types import ModelState, PackedBatch, Recomputed, TrainBatch, TrainState


@dataclasses.dataclass(frozen=True)
class Toy:
    trained: bool  # whether `scale` is


def spec(cfg):
    scale = ParamSpec((4,), jnp.dtype("float32"), (None,), None, cfg.trained)
    return {"embed": ParamSpec((6, 4), jnp.dtype("float32"), (None, None), 1.0), "scale": scale}


def forward(params, tokens, positions, segment, cfg, cache=None):
    return params["embed"][tokens] * params["scale"][None, None], cache


def routed(params, tokens, positions, segment, cfg):
    return forward(params, tokens, positions, segment, cfg)[0], None


TOY = MODEL._replace(spec=spec, forward=forward, routed=routed, unembed=lambda params, h, cfg: h @ params["embed"].T)


def updated(cfg):
    """Returns (gradient, norm, parameters before and after) of one step over a row of six tokens."""
    row = lambda values, dtype: jnp.asarray(values, dtype)[None, None]
    mask, logprobs = row([0, 1, 1, 1, 1, 1], bool), row([-2.0] * 6, jnp.float32)
    packed = PackedBatch(
        tokens=row([1, 2, 0, 3, 5, 2], jnp.int32), positions=row(range(6), jnp.int32), segment=row([0] * 6, jnp.int32),
        shared_prefix=None, prefix_row=None, action_mask=mask, behaviour_logprobs=logprobs, sampler_logprobs=logprobs,
        sequence=row([0], jnp.int32), temperature=jnp.float32(1), num_real=jnp.int32(1),
    )  # fmt: skip
    batch = TrainBatch(
        packed=packed, recomputed=Recomputed(), loss_mask=mask, loss_weights=mask.astype(jnp.float32),
        advantages=row([0, 1, -1, 2, 0.5, 1], jnp.float32), returns=None, targets=None, denominator=jnp.float32(5),
    )  # fmt: skip
    params, zero = init(jax.random.key(0), spec(cfg)), jnp.int32(0)
    adamw = jax.tree.map(jnp.float32, AdamW(learning_rate=0.1, weight_decay=0.1))
    hyper = jax.tree.map(jnp.float32, ALGOS["GRPO"].config())
    static = dict(objective=ALGOS["GRPO"], model=TOY, cfg=cfg, chunk=6)
    trainable = learner.Weights(params, {})
    policy = ModelState(
        params, None, {}, begin(ADAMW, adamw, trainable, learner.Weights(*describe(spec(cfg), ()))), zero
    )
    state = TrainState(step=zero, models={"policy": policy}, objective=(), key=jax.random.key(0), skipped=zero)
    gradient = jax.jit(lambda weights: learner.loss_sums(weights, batch, hyper, (), **static).gradient)(trainable)
    after, metrics = jax.jit(
        lambda state: learner.update(state, batch, hyper, adamw, role="policy", optimizer_row=ADAMW, **static)
    )(state)
    return gradient.params, float(metrics["grad_norm"]), params, after.models["policy"].params


def test_what_is_not_trained_has_no_gradient_and_does_not_move():
    moving, _, before, after = updated(Toy(trained=True))
    assert (np.asarray(moving["scale"]) != 0).all() and (before["scale"] != after["scale"]).all()
    gradient, norm, before, after = updated(Toy(trained=False))
    np.testing.assert_array_equal(gradient["scale"], 0)
    np.testing.assert_array_equal(gradient["embed"], moving["embed"])
    # Its gradient is in no norm, so that it does not share in clipping either.
    assert norm == pytest.approx(float(np.linalg.norm(np.asarray(gradient["embed"]) / 5)), rel=1e-6)
    np.testing.assert_array_equal(after["scale"], before["scale"])  # nor does weight decay move it
    assert (before["embed"] != after["embed"]).any()
