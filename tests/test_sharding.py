"""The gradient of a product with a weight is JAX's own, contracted in another order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device import sharding
from jrl.device.sharding import GATHERED, MeshShape, make_mesh, spec

SIZES = {"b": 4, "l": 3, "d": 6, "e": 5, "f": 8, "h": 4, "k": 2, "r": 3, "v": 10}

# Formula, logical axes of the weight, logical axes of the result: every kind that decoders and adapters multiply with.
PRODUCTS = [
    ("bld,dhk->blhk", ("embed", "heads", None), ("batch", None, "heads", None)),
    ("blhk,hkd->bld", ("heads", None, "embed"), ("batch", None, None)),
    ("bld,df->blf", ("embed", "mlp"), ("batch", None, "mlp")),
    ("blf,fd->bld", ("mlp", "embed"), ("batch", None, None)),
    ("bld,vd->blv", ("vocab", "embed"), ("batch", None, "vocab")),  # the head, tied or not
    ("bld,dr->blr", ("embed", "rank"), ("batch", None, None)),
    ("blhk,hkr->blr", ("heads", None, "rank"), ("batch", None, None)),
    ("blr,rhk->blhk", ("rank", "heads", None), ("batch", None, "heads", None)),
    ("ble,ed->bld", ("experts", "norm"), ("batch", None, None)),
]
CUT = {"f": "mlp", "h": "heads"}  # what activations are cut over
MESHES = [MeshShape(), MeshShape(fsdp=2, tensor=2)]


def operands(formula, dtype):
    rng = np.random.default_rng(0)
    rows, weight = formula.split("->")[0].split(",")
    return [jnp.asarray(rng.normal(size=[SIZES[letter] for letter in letters]), dtype) for letters in (rows, weight)]


def gradients(product, formula, axes, out, x, y, dtype=None):
    """Of a sum that weighs every entry of the result differently."""

    def loss(x, y):
        product_ = product(formula, x, sharding.gather(y, *axes), out, dtype)
        return (product_ * jnp.cos(jnp.arange(product_.size, dtype=product_.dtype)).reshape(product_.shape)).sum()

    return jax.grad(loss, argnums=(0, 1))(x, y)


@pytest.mark.parametrize("mesh", MESHES, ids=["one device", "four"])
@pytest.mark.parametrize("formula, axes, out", PRODUCTS, ids=[formula for formula, *_ in PRODUCTS])
def test_both_gradients_are_those_of_jax(formula, axes, out, mesh):
    with jax.enable_x64(True):
        x, y = operands(formula, jnp.float64)
        expected = gradients(sharding._plain_product, formula, axes, out, x, y)
        with jax.set_mesh(make_mesh(mesh, jax.devices()[: mesh.fsdp * mesh.tensor])):
            x = sharding.constrain(x, "batch", None, *(CUT.get(letter) for letter in formula.split(",")[0][2:]))
            y = jax.device_put(y, jax.sharding.NamedSharding(jax.sharding.get_mesh(), spec(axes, GATHERED)))
            actual = jax.jit(gradients, static_argnums=(0, 1, 2, 3))(sharding.einsum, formula, axes, out, x, y)
        for ours, jaxs in zip(actual, expected):
            np.testing.assert_allclose(ours, jaxs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("formula, axes, out", PRODUCTS, ids=[formula for formula, *_ in PRODUCTS])
def test_no_gradient_of_a_weight_is_turned_around(formula, axes, out):
    x, y = operands(formula, jnp.float32)
    of_weight = lambda product: jax.make_jaxpr(lambda x, y: gradients(product, formula, axes, out, x, y)[1])(x, y)
    text = str(of_weight(sharding.einsum))
    assert "transpose" not in text, text


def test_a_sum_asked_for_in_float32_has_its_gradient_summed_in_float32():
    formula, axes, out = PRODUCTS[4]
    x, y = operands(formula, jnp.bfloat16)
    program = jax.make_jaxpr(lambda x, y: gradients(sharding.einsum, formula, axes, out, x, y, jnp.float32)[1])(x, y)
    last = [equation for equation in program.eqns if equation.primitive.name == "dot_general"][-1]
    assert last.outvars[0].aval.dtype == jnp.float32
    assert program.out_avals[0].dtype == jnp.bfloat16
