"""The gradients of experts' matrices and rows by the kernels are those of a loop over experts. Interpreted on a CPU."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device.sharding import TRAIN, MeshShape, constrain, make_mesh, spec
from jrl.models import expert_gradient, expert_tiles, experts, grouped_product
from jrl.models.experts import Experts

kernel = jax.jit(functools.partial(expert_gradient.of_matrices, interpret=True), static_argnums=3)
rows_kernel = jax.jit(functools.partial(expert_gradient.of_rows, interpret=True))

# rows, inputs, outputs, rows of each expert
CASES = {
    "tiles that experts share, an expert without rows, rows of none": (300, 16, 24, [3, 0, 150, 20, 0]),
    "experts that end with a tile": (256, 16, 24, [128, 0, 128]),
    "all rows of one expert, in blocks of columns that do not divide": (300, 1100, 40, [0, 300, 0]),
    "no rows": (10, 8, 8, [0, 0, 0]),
    "the last row": (129, 8, 8, [0, 128, 0, 1]),
    "fewer rows than a tile": (5, 8, 8, [1, 2]),
}


def rows_of(case):
    rows, inputs, outputs, sizes = CASES[case]
    rng = np.random.default_rng(0)
    x, gradient = rng.normal(size=(rows, inputs)), rng.normal(size=(rows, outputs))
    return x.astype(np.float32), gradient.astype(np.float32), np.array(sizes, np.int32)


def by_hand(x, gradient, sizes):
    parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    return np.stack([x[part].astype(np.float64).T @ gradient[part].astype(np.float64) for part in parts])


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_sum_over_each_experts_rows_and_reads_no_others(case):
    x, gradient, sizes = rows_of(case)
    x[sizes.sum() :] = gradient[sizes.sum() :] = np.nan
    expected = by_hand(x, gradient, sizes)
    actual = kernel(x, gradient, sizes, jnp.float32)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * max(np.abs(expected).max(), 1))


def test_narrow_numbers_are_summed_in_float32_and_rounded_once():
    """256 + 1 + 1 is 258; rounded after every tile it stays 256."""
    x, gradient = jnp.ones((3 * expert_tiles.ROWS, 8), jnp.bfloat16), np.zeros((3 * expert_tiles.ROWS, 8))
    gradient[[0, expert_tiles.ROWS, 2 * expert_tiles.ROWS]] = [[256], [1], [1]]
    actual = kernel(x, jnp.asarray(gradient, jnp.bfloat16), np.array([len(x)], np.int32), jnp.bfloat16)
    np.testing.assert_array_equal(actual.astype(np.float32), np.full((1, 8, 8), 258))


def matrices_of(case):
    _, inputs, outputs, sizes = CASES[case]
    return np.random.default_rng(1).normal(size=(len(sizes), inputs, outputs)).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_that_of_a_row_is_through_its_experts_matrix_alone(case):
    _, gradient, sizes = rows_of(case)
    matrices = matrices_of(case)
    gradient[sizes.sum() :] = np.nan
    matrices[sizes == 0] = np.nan  # no row is of these
    expert = np.repeat(np.arange(len(sizes)), sizes)
    wide = gradient[: sizes.sum()].astype(np.float64)
    expected = np.array([matrices[e].astype(np.float64) @ row for e, row in zip(expert, wide)])
    actual = rows_kernel(gradient, matrices, sizes)
    assert actual.shape == (len(gradient), matrices.shape[1])
    np.testing.assert_allclose(actual[: sizes.sum()], expected.reshape(-1, matrices.shape[1]), rtol=0, atol=1e-5)


def test_that_of_rows_is_summed_over_blocks_in_float32_and_rounded_once(monkeypatch):
    """256 + 1 + 1 is 258; rounded after every block of 128 columns it stays 256."""
    monkeypatch.setattr(expert_tiles, "MATRIX_BYTES", 128 * 8 * 2)
    assert expert_tiles.matrix_block(8, 384, 2) == (8, 128)
    gradient, matrices = np.zeros((5, 384)), jnp.ones((1, 8, 384), jnp.bfloat16)
    gradient[3, [0, 128, 256]] = 256, 1, 1
    kernel = functools.partial(expert_gradient.of_rows, interpret=True)
    actual = jax.jit(kernel)(jnp.asarray(gradient, jnp.bfloat16), matrices, np.array([5], np.int32))
    np.testing.assert_array_equal(actual.astype(np.float32), np.where(np.arange(5) == 3, 258, 0)[:, None] + np.zeros(8))


def test_a_block_of_a_matrix_has_all_columns_or_a_part_that_divides_them_or_fewer_inputs():
    assert expert_tiles.matrix_block(2048, 192, 2) == (1024, 192)  # 384 KiB
    assert expert_tiles.matrix_block(192, 2048, 2) == (192, 2048)  # 768 KiB
    assert expert_tiles.matrix_block(2048, 2048, 2) == (1024, 1024)  # 2 MiB
    assert expert_tiles.matrix_block(2048, 1152, 2) == (1024, 384)  # 9 x 128: of 1, 3 and 9 the most below 1,024
    assert expert_tiles.matrix_block(2048, 2880, 2) == (256, 2880)  # 22.5 x 128 have no part; 2 MiB hold 364 rows
    assert expert_tiles.matrix_block(2048, 10**6, 2) == (128, 10**6)


def test_visits_by_hand():
    """Rows 0 to 2 are of expert 0, which is in tile 0; expert 1 has none; expert 2 has rows 3 to 152, of tiles 0 and 1;
    expert 3 rows 153 to 172, of tile 1; expert 4 none, and would begin in tile 1."""
    expert, tile, starts, ends, count = expert_gradient._visits(300, jnp.array([3, 0, 150, 20, 0]))
    assert expert.tolist() == [0, 1, 2, 2, 3, 4, 4, 4] and tile.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert starts.tolist() == [0, 3, 3, 153, 173] and ends.tolist() == [3, 3, 153, 173, 173] and count.tolist() == [6]


def test_it_is_the_gradient_of_the_product_on_any_device():
    case = "tiles that experts share, an expert without rows, rows of none"
    (x, gradient, sizes), matrices = rows_of(case), matrices_of(case)
    x[sizes.sum() :] = gradient[sizes.sum() :] = 0
    product = lambda multiply, x, matrices: (multiply(x, matrices, sizes) * gradient)[: sizes.sum()].sum()
    both = lambda multiply: jax.jit(jax.grad(functools.partial(product, multiply), (0, 1)))(x, matrices)
    own, reference = both(grouped_product.grouped_product), both(jax.lax.ragged_dot)
    jax.tree.map(np.testing.assert_array_equal, own, reference)  # the same operations where no TPU is
    expected = kernel(x, gradient, sizes, jnp.float32)
    np.testing.assert_allclose(own[1], expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    of_rows = rows_kernel(gradient, matrices, sizes)[: sizes.sum()]
    np.testing.assert_allclose(own[0][: sizes.sum()], of_rows, rtol=0, atol=1e-6 * np.abs(of_rows).max())


@pytest.mark.parametrize("shape", [MeshShape(fsdp=2, tensor=2), MeshShape(expert=2, tensor=2)])
def test_tpus_take_the_kernels_for_all_three_matrices_on_a_mesh(shape):
    """Lowered for TPUs, as which no device of a mesh computes another's share; the values are those of test_experts."""
    cfg = Experts(count=4, per_token=2, width=16)
    axes = {"router": ("embed", "all_experts"), "expert_gate": ("experts", "embed", "mlp"),
            "expert_up": ("experts", "embed", "mlp"), "expert_down": ("experts", "mlp", "embed")}  # fmt: skip
    sizes = {"embed": 8, "mlp": 16, "experts": 4, "all_experts": 4}
    mesh = make_mesh(shape, jax.devices()[:4])
    placed = lambda dims, names: jax.ShapeDtypeStruct(
        dims, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec(names, TRAIN))
    )
    weights = {name: placed([sizes[axis] for axis in names], names) for name, names in axes.items()}
    loss = lambda w, h: experts.mix(constrain(h, "batch", None, None), w, cfg, jax.nn.silu)[0].sum()
    with jax.set_mesh(mesh):
        # Of the rows too: jax 0.12 leaves out a kernel whose result nothing reads.
        gradient = jax.grad(loss, argnums=(0, 1))
        traced = jax.jit(gradient).trace(weights, jax.ShapeDtypeStruct((4, 64, 8), jnp.bfloat16))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert len(re.findall(r'kernel_name = "expert_gradient"', text)) == 3
    assert len(re.findall(r'kernel_name = "expert_rows_gradient"', text)) == 3
