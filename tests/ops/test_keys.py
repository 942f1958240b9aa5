"""Keys are names: they depend on what is drawn and on nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.keys import row_key, token_key


def data(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_every_part_of_the_name_changes_the_key():
    root = jax.random.key(0)
    seen = set()
    for stream, a, b, sample, position in itertools.product((0, 1), (0, 7), (0, 2**32 - 1), (0, 1), (0, 5)):
        uid = jnp.array([a, b], jnp.uint32)
        seen.add(data(token_key(row_key(root, stream, uid, sample), position)))
    seen.add(data(token_key(row_key(jax.random.key(1), 0, jnp.zeros(2, jnp.uint32), 0), 0)))
    assert len(seen) == 33


def test_no_two_positions_of_a_row_share_a_key():
    key = row_key(jax.random.key(0), 0, jnp.zeros(2, jnp.uint32), 0)
    keys = jax.vmap(token_key, in_axes=(None, 0))(key, jnp.arange(512))
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == 512


def test_the_parts_of_a_uid_are_not_exchangeable():
    root = jax.random.key(0)
    one, two = (row_key(root, 0, jnp.array(uid, jnp.uint32), 0) for uid in ((3, 4), (4, 3)))
    assert data(one) != data(two)


def test_rows_by_vmap_equal_rows_alone():
    root, uid = jax.random.key(5), jnp.array([[1, 2], [3, 4]], jnp.uint32)
    batch = jax.vmap(row_key, in_axes=(None, None, 0, 0))(root, 2, uid, jnp.array([0, 9]))
    assert data(batch[1]) == data(row_key(root, 2, uid[1], 9))
