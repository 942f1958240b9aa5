"""Steps with guards against steps without: every guard is where the benchmark looks for it, and ratios are right."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import guards


@pytest.mark.parametrize("name", guards.GUARDS)
def test_a_guard_can_be_switched_off(name):
    guard = guards.GUARDS[name]
    module = importlib.import_module(guard.module)
    before = getattr(module, guard.name)
    with guards.without([name]):
        assert getattr(module, guard.name) is not before
    assert getattr(module, guard.name) is before


def test_without_guards_nothing_is_refused():
    off = {name: guard.instead(None) for name, guard in guards.GUARDS.items()}
    np.testing.assert_array_equal(off["finite_updates"].isfinite(jnp.array([1.0, np.nan])), [True, True])
    assert off["weights_of_a_draw"]({"w": jnp.ones(3)}) == 0
    assert off["verdicts"]("verdict", "limits", 7) == "verdict" and off["range_of_rewards"]("scores") == "scores"
    assert off["hash_of_metrics"].sha256(b"a").hexdigest() == "0" * 64


def test_the_ratio_of_medians_over_all_pairs():
    pairs = [
        {"guarded": {"seconds": [1.0, 3.0, 100.0]}, "unguarded": {"seconds": [2.0, 2.0, 9.0]}},
        {"guarded": {"seconds": [3.0, 3.0]}, "unguarded": {"seconds": [2.0, 1.0]}},
    ]
    found = guards.compared(pairs, "seconds")  # the medians of five: 3 and 2
    assert (found["guarded"], found["unguarded"], found["ratio"]) == (3.0, 2.0, 1.5)
    same = [{kind: {"seconds": [0.1 * i for i in range(1, 40)]} for kind in guards.KINDS}]
    assert guards.compared(same, "seconds")["interval"] == [1.0, 1.0]  # drawn in pairs, equal steps stay equal
