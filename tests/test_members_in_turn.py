"""Programs over members that a device computes for one member after the other."""

import jax
import jax.numpy as jnp
import pytest

from jrl.run.member_programs import in_turn, together


@pytest.mark.parametrize("call", [in_turn, together])
def test_members_have_results_of_their_own_and_what_they_share_has_no_axis(call):
    traced = []

    def one(own, same):
        traced.append(own[0].shape)
        return [own[0] @ same[0], own[0].sum()], [same[0]]

    # Members [1, 2] and [3, 4] times [[1, 0], [1, 1]]: [1 + 2, 2] and [3 + 4, 4]. Sums: 3 and 7.
    own, same = [jnp.array([[1.0, 2.0], [3.0, 4.0]])], [jnp.array([[1.0, 0.0], [1.0, 1.0]])]
    (products, sums), (shared,) = jax.jit(lambda own, same: call(one, own, same))(own, same)
    assert products.tolist() == [[3, 2], [7, 4]] and sums.tolist() == [3, 7]
    assert shared.tolist() == [[1, 0], [1, 1]]
    assert traced == [(2,)]


def test_in_turn_takes_the_memory_of_one_member():
    one = lambda own, same: ([jnp.sort(own[0][:, None] * own[0][None, :], axis=0)[0]], [])
    own = [jnp.ones((8, 256))]
    taken = lambda call: jax.jit(lambda own: call(one, own, [])).lower(own).compile().memory_analysis()
    # A member's square has 256 * 256 * 4 bytes = 262,144.
    assert taken(together).temp_size_in_bytes >= 8 * 262_144
    assert taken(in_turn).temp_size_in_bytes < 3 * 262_144
