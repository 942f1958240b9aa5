"""Conditions that all members of a population take together, and a single run as if they were not there."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrl.device.sharding import MeshShape, make_mesh
from jrl.ops.members import any_member, most_of_members, where_member


def collatz(n):
    """Returns the steps from `n` down to 1, and what it is in the end, by a loop that members take together."""
    going = lambda carry: any_member(carry[0] > 1)

    def turn(carry):
        n, steps = carry
        following = jnp.where(n % 2 == 0, n // 2, 3 * n + 1)
        return where_member(n > 1, (following, steps + 1), (n, steps))

    return jax.lax.while_loop(going, turn, (n, jnp.zeros_like(n)))


def test_a_loop_runs_as_long_as_any_member_needs_it_and_moves_only_those():
    # 6, 3, 10, 5, 16, 8, 4, 2, 1 are 8 steps; 1 is none; 8, 4, 2, 1 are 3.
    for fn in (jax.vmap(collatz), jax.jit(jax.vmap(collatz))):
        last, steps = fn(jnp.array([6, 1, 8]))
        assert last.tolist() == [1, 1, 1] and steps.tolist() == [8, 0, 3]
    assert [int(x) for x in jax.jit(collatz)(jnp.int32(6))] == [1, 8]


def test_the_condition_of_the_loop_has_no_axis_of_members():
    text = str(jax.make_jaxpr(jax.vmap(collatz))(jnp.array([6, 1, 8])))
    assert "reduce_or" in text and "while" in text
    body = lambda count: jax.lax.fori_loop(0, most_of_members(count), lambda i, x: x + 1, 0)
    assert jax.vmap(body)(jnp.array([2, 5, 3])).tolist() == [5, 5, 5]
    assert int(body(jnp.int32(2))) == 2


def test_without_members_where_member_is_not_there():
    compiled = jax.jit(lambda c, x, y: where_member(c, x, y)).lower(False, jnp.ones(4), jnp.zeros(4)).compile()
    assert "select" not in compiled.as_text()
    assert np.all(compiled(False, jnp.ones(4), jnp.zeros(4)) == 1)


def test_where_member_takes_what_is_the_same_for_all_members():
    new, old = jnp.arange(4.0), jnp.full((3, 4), -1.0)
    found = jax.vmap(lambda c, y: where_member(c, new, y))(jnp.array([True, False, True]), old)
    assert found.tolist() == [[0, 1, 2, 3], [-1] * 4, [0, 1, 2, 3]]


def test_members_may_be_sharded_inside():
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor")))
        new, old = place(jnp.ones((2, 3, 4))), place(jnp.zeros((2, 3, 4)))
        found = jax.jit(jax.vmap(where_member))(jnp.array([True, False]), new, old)
        assert np.asarray(found).sum(axis=(1, 2)).tolist() == [12, 0]
