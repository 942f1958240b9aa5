from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jrl.run.checkpoints import Checkpoint, run_state
from jrl.run.checkpoints.fingerprint import fingerprint, rows_digest, run_sections, tree_digest


def state_of(seed: int, **policy) -> dict[str, Any]:
    """The fields of a TrainState as a checkpoint names them; `policy` replaces some of that model's."""
    model = {
        "params": {"w": jax.random.normal(jax.random.key(seed), (4, 4))},
        "opt_state": (jnp.zeros((4, 4)), None),
        "version": jnp.int32(2),
    }
    return {
        "step": jnp.int32(3),
        "models": {"policy": {**model, **policy}},
        "objective": {"baseline": jnp.float32(jnp.nan)},
        "key": jax.random.key(seed),
        "skipped": jnp.int32(0),
    }


def test_each_section_answers_for_its_own_part():
    rows = [{"step": 1, "reward": 0.5, "time/step": 1.0}]
    sections = run_sections(state_of(0), {"position": 8}, rows)
    base = fingerprint(3, sections)
    assert list(base) == ["step", "total", "params", "opt_state", "keys", "data", "metrics"]
    changed = {
        "params": run_sections(state_of(0, params={"w": jnp.ones((4, 4))}), {"position": 8}, rows),
        "opt_state": run_sections({**state_of(0), "skipped": jnp.int32(1)}, {"position": 8}, rows),
        "keys": run_sections({**state_of(0), "key": jax.random.key(9)}, {"position": 8}, rows),
        "data": run_sections(state_of(0), {"position": 9}, rows),
        "metrics": run_sections(state_of(0), {"position": 8}, [{"step": 1, "reward": 0.25, "time/step": 1.0}]),
    }
    for name, other in changed.items():
        differing = {key for key, value in fingerprint(3, other).items() if value != base[key]}
        assert differing == {name, "total"}
    assert fingerprint(4, sections)["total"] != base["total"]


def test_clock_and_machine_are_no_part_of_the_contents():
    rows = [{"step": 1, "reward": 0.5, "time/step": 1.0, "host/pss": 3}, {"step": 2, "reward": 0.5}]
    same = [{"step": 1, "reward": 0.5, "time/step": 9.0}, {"step": 2, "reward": 0.5}, {"step": 3, "reward": 1.0}]
    assert rows_digest(rows, 2) == rows_digest(same, 2)
    assert rows_digest(rows, 2) != rows_digest(same, 3)


def test_one_bit_the_dtype_the_shape_and_the_name_all_count():
    base = tree_digest({"w": jnp.zeros((2, 2))})
    others = [
        {"w": jnp.zeros((2, 2)).at[0, 0].set(-0.0)},
        {"w": jnp.zeros((4,))},
        {"w": jnp.zeros((2, 2), jnp.int32)},
        {"v": jnp.zeros((2, 2))},
        {"w": jnp.zeros((2, 2)), "v": None},
    ]
    assert len({base, *(tree_digest(other) for other in others)}) == 6


def test_the_hash_does_not_depend_on_devices_or_on_the_trip_through_disk(tmp_path):
    value = np.arange(16, dtype=np.float32).reshape(8, 2)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Explicit,))
    spread = {"w": jax.device_put(value, NamedSharding(mesh, PartitionSpec("data"))), "k": jax.random.key(1)}
    run_state.save_step(tmp_path, 1, spread, {})
    _, restored, _ = run_state.restore_step(
        tmp_path, {"w": jax.ShapeDtypeStruct((8, 2), jnp.float32), "k": jax.eval_shape(lambda: jax.random.key(0))}
    )
    assert tree_digest(spread) == tree_digest(restored) == tree_digest({"w": value, "k": jax.random.key(1)})


def test_checkpoint_settings_are_checked():
    assert Checkpoint(every=1, keep=1).keep == 1
    for bad in ({"every": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match=f"Checkpoint.{next(iter(bad))} is 0"):
            Checkpoint(**bad)
