"""The masks that JAX makes splash's kernel from are computed once for each distance, and equal JAX's own."""

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as infos

from jrl.device.row_shares import columns_of_shares
from jrl.models.attention import splash


def of_jax(shape, window, before):
    return masks.CausalMask(shape, before) if window is None else masks.LocalMask(shape, (window - 1, 0), before)


def both_infos(mask, blocks, heads, shares):
    """Returns what the kernel's forward pass and the gradient of its queries read, and that of keys and values."""
    options = dict(head_shards=1, q_seq_shards=shares)
    mask = masks.MultiHeadMask([mask] * heads)
    return [process(mask, blocks, **options)[0] for process in (infos.process_mask, infos.process_mask_dkv)]


def assert_equal(actual, expected):
    for name, x, y in zip(expected._fields, actual, expected):
        assert (x is None) == (y is None), name
        if y is not None:
            assert x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y, err_msg=name)


# Queries, keys, the block of each, the first query's column: whole rows, and chunks of a prompt behind other columns.
# The indices of 130 blocks are int16.
SHAPES = [(128, 128, 128, 128, 0), (1024, 1024, 512, 512, 0), (640, 640, 128, 128, 0), (768, 768, 256, 128, 0),
          (16, 1040, 8, 8, 1024), (512, 1536, 128, 512, 1000), (256, 384, 256, 128, 37)]  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 100, 128, 300, 5000])
@pytest.mark.parametrize("queries, keys, block_q, block_k, before", SHAPES)
def test_the_kernel_gets_what_it_gets_from_jaxs_masks(queries, keys, block_q, block_k, before, window):
    arguments = (queries, keys), window, before
    actual, expected = (both_infos(of(*arguments), (block_q, block_k), 3, 1) for of in (splash._mask, of_jax))
    for info, theirs in zip(actual, expected, strict=True):
        assert_equal(info, theirs)


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("length, shares", [(1024, 2), (600, 2), (1800, 3)])
def test_shares_of_a_row_get_what_they_get_from_jaxs_masks(length, shares, window):
    """600 tokens in two shares are 300 each, padded to 384: the columns 0 to 149, and 450 to 599, which is repeated."""
    rows = -(-length // shares // 128) * 128
    columns = np.pad(columns_of_shares(length, shares), ((0, 0), (0, rows - length // shares)), mode="edge")
    both = []
    for of in (splash._mask, of_jax):
        mask = of((shares * rows, -(-length // 128) * 128), window, 0)
        mask.q_sequence = columns.reshape(-1)
        both.append(both_infos(mask, (128, 128), 2, shares))
    for info, theirs in zip(*both, strict=True):
        assert_equal(info, theirs)


def test_blocks_of_other_sizes_that_were_read_before_do_not_matter():
    mask, theirs = splash._mask((512, 512), None, 0), masks.CausalMask((512, 512), 0)
    for rows, columns in (128, 256), (128, 128), (256, 128):
        for first, start in np.ndindex(512 // rows, 512 // columns):
            index = (slice(first * rows, (first + 1) * rows), slice(start * columns, (start + 1) * columns))
            np.testing.assert_array_equal(mask[index], theirs[index])
    np.testing.assert_array_equal(mask[:, :], theirs[:, :])


@pytest.mark.parametrize("window, distinct", [(None, 3), (128, 3), (300, 5)])
def test_a_block_is_computed_once_for_each_distance(window, distinct):
    """8 x 8 blocks of 128 are at 15 distances. Pairs of block m before the diagonal's are 128 m - 127 to 128 m + 127
    apart. Causal blocks are empty, full, or on the diagonal; in a window of 128 empty, on the diagonal, or m = 1. In
    one of 300 a key is at most 299 before: m = 1 (1 to 255) is full, m = 2 (129 to 383) and m = 3 (257 to 511) not."""
    mask = splash._mask((1024, 1024), window, 0)
    both_infos(mask, (128, 128), 2, 1)
    assert len(mask.by_distance) == 15
    assert len(mask.distinct) == distinct
