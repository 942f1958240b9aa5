"""Steps with guards against steps without: every guard is where the benchmark looks for it, and ratios are right."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import guards


@pytest.mark.parametrize("name", guards.GUARDS)
def test_a_guard_can_be_switched_off(name, monkeypatch):
    guard = guards.GUARDS[name]
    module = importlib.import_module(guard.module)
    before = getattr(module, guard.name)
    monkeypatch.setattr(module, guard.name, before)  # put back afterwards
    guards.switch_off([name])
    assert getattr(module, guard.name) is not before


def test_without_guards_nothing_is_refused():
    off = {name: guard.instead(None) for name, guard in guards.GUARDS.items()}
    np.testing.assert_array_equal(off["finite_updates"].isfinite(jnp.array([1.0, np.nan])), [True, True])
    assert off["weights_of_a_draw"]({"w": jnp.ones(3)}) == 0
    assert off["verdicts"]("verdict", "limits", 7) == "verdict" and off["range_of_rewards"]("scores") == "scores"
    assert off["hash_of_metrics"].sha256(b"a").hexdigest() == "0" * 64


def test_the_median_of_the_runs_medians():
    runs = [
        {"guarded": True, "seconds": [1.0, 3.0, 100.0]},  # 3
        {"guarded": True, "seconds": [2.0, 2.0, 2.0]},  # 2
        {"guarded": True, "seconds": [4.0, 4.0, 4.0]},  # 4: the median of 3, 2 and 4 is 3
        {"guarded": False, "seconds": [2.0, 2.0, 9.0]},
    ]
    assert guards.compared(runs, "seconds") == {"guarded": 3.0, "unguarded": 2.0, "ratio": 1.5}
