"""Arrays that orbax has written are read by one process alone."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.run.checkpoints import run_state
from jrl.run.checkpoints.arrays import read_arrays


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    state = {
        "deep": {"a/b": jnp.arange(12.0).reshape(3, 4), "x.y": jnp.ones(4, jnp.bfloat16) / 3, "": [jnp.int8(-3)]},
        "keys": jax.random.split(jax.random.key(3), 2),
        "wide": np.array([1 / 3, 1e-300]),
        "mask": jnp.array([True, False]),
        "slash/": jnp.arange(3),
    }
    run_state.save_step(root, 1, state, {})
    return root / "00000001" / "state", run_state.read_step_manifest(root, 1)["leaves"], state


@pytest.mark.parametrize("group_bytes", [1, 30, 1 << 30])
def test_arrays_are_read_as_they_were_written_in_groups_of_any_size(saved, group_bytes):
    folder, entries, state = saved
    read = dict(read_arrays(folder, entries, group_bytes))
    assert [*read] == [*entries]
    want = {"deep/a/b": state["deep"]["a/b"], "deep/x.y": state["deep"]["x.y"], "deep//0": state["deep"][""][0],
            "keys": jax.random.key_data(state["keys"]), "wide": state["wide"], "mask": state["mask"]}  # fmt: skip
    for name, array in want.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_some_arrays_are_read_without_the_others(saved):
    folder, entries, _ = saved
    assert [name for name, _ in read_arrays(folder, {"wide": entries["wide"]})] == ["wide"]
    assert list(read_arrays(folder / "is not looked at", {})) == []


def test_another_array_than_was_described_is_an_error(saved, tmp_path):
    folder, entries, _ = saved
    with pytest.raises(ValueError, match=r"leaf wide was written as float64\[2\]"):
        list(read_arrays(folder, {"wide": entries["wide"] | {"data_shape": [1, 2]}}))
    with pytest.raises(ValueError, match="gone"):
        list(read_arrays(folder, {"gone": entries["wide"]}))
    shutil.copytree(folder, tmp_path / "state")
    (database,) = (tmp_path / "state").glob("*/manifest.ocdbt")
    database.unlink()
    with pytest.raises(ValueError, match="state has 0 databases of arrays, and one was written"):
        list(read_arrays(tmp_path / "state", {"wide": entries["wide"]}))
