"""The content hashes of a run folder: what moves them and what does not."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.run import run_hash
from jrl.run.checkpoints import run_state
from jrl.types import ModelState, TrainState

HOST = {
    "done": 3,
    "data": {"train": {"position": 24}},
    "evals": {},
    "time": {"seconds": {"rl": 1.0}},
    "metrics_offset": 9,
}


def state(seed=0):
    weights = jnp.asarray(np.random.default_rng(seed).normal(size=(4, 6)), jnp.float32)
    return TrainState(
        step=jnp.int32(3),
        models={"policy": model({"w": weights}, opt_state=({"mu": weights * 2}, ()))},
        objective={"baseline": jnp.float32(jnp.nan)},
        key=jax.random.key(7),
        skipped=jnp.int32(0),
    )


def model(params, frozen=None, heads=None, opt_state=None):
    return ModelState(params=params, frozen=frozen, heads=heads or {}, opt_state=opt_state, version=jnp.int32(3))


def with_models(**models):
    """Returns the state with other models beside or in place of its own."""
    return state().replace(models={**state().models, **models})


def saved(folder, tree=None, host=HOST, rows=({"step": 3, "loss": 0.5, "time/step_seconds": 1.0},)):
    """Writes what a run folder holds after step 3, and returns its fingerprint."""
    run_state.save_step(folder / "checkpoints", 3, {"state": state()} if tree is None else tree, host)
    (folder / "manifest.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_hash.run_fingerprint(folder)


@pytest.fixture
def folder(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("run")


def test_the_clock_and_the_length_of_its_columns_move_nothing(folder):
    later = {**HOST, "time": {"seconds": {"rl": 99.5}}, "metrics_offset": 10}
    rows = [{"step": 3, "loss": 0.5, "time/step_seconds": 7.0, "host/peak_bytes": 5}]
    assert saved(folder()) == saved(folder(), host=later, rows=rows)


def test_which_saved_step_is_the_best_moves_nothing(folder):
    """It depends on Checkpoint.every, which a resume may change."""
    assert saved(folder(), host={**HOST, "best": [2, 0.5]}) == saved(folder())


def test_rows_after_the_step_are_no_part_of_it(folder):
    rows = [{"step": 3, "loss": 0.5}, {"step": 4, "loss": 0.25}]
    assert saved(folder(), rows=rows) == saved(folder())


POLICY = state().models["policy"]


def test_a_model_under_another_role_moves_weights_and_counters(folder):
    before, after = saved(folder()), saved(folder(), tree={"state": with_models(reference=model(POLICY.params))})
    assert {name for name in before if before[name] != after[name]} == {"params", "opt_state", "total"}


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("params", dict(tree={"state": with_models(policy=POLICY.replace(params={"w": jnp.zeros((4, 6))}))})),
        ("params", dict(tree={"state": with_models(policy=POLICY.replace(frozen={"w": jnp.zeros((4, 6))}))})),
        ("params", dict(tree={"state": with_models(policy=POLICY.replace(heads={"value": jnp.zeros((1, 6, 1))}))})),
        ("opt_state", dict(tree={"state": with_models(policy=POLICY.replace(opt_state=None))})),
        ("opt_state", dict(tree={"state": with_models(policy=POLICY.replace(version=jnp.int32(4)))})),
        ("opt_state", dict(tree={"state": state().replace(objective={"baseline": jnp.float32(0)})})),
        ("keys", dict(tree={"state": state().replace(key=jax.random.key(8))})),
        ("data", dict(host={**HOST, "data": {"train": {"position": 32}}})),
        ("data", dict(tree={"state": state(), "waiting": {"tokens": jnp.zeros((2, 3), jnp.int32)}})),
        ("metrics", dict(rows=[{"step": 3, "loss": 0.25}])),
    ],
)
def test_each_content_moves_its_own_hash_and_the_total_only(folder, section, change):
    before, after = saved(folder()), saved(folder(), **change)
    assert {name for name in before if before[name] != after[name]} == {section, "total"}


def test_the_sharding_of_the_saved_arrays_does_not_matter(folder):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    cut = jax.device_put(POLICY.params, jax.NamedSharding(mesh, jax.P("data")))
    assert saved(folder(), tree={"state": with_models(policy=POLICY.replace(params=cut))}) == saved(folder())


def test_a_folder_that_is_no_run_and_a_step_that_is_not_saved_are_named(folder):
    empty = folder()
    with pytest.raises(ValueError, match="is not a run folder"):
        run_hash.run_fingerprint(empty)
    (empty / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="saved nothing yet"):
        run_hash.run_fingerprint(empty)
    (empty / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="a run that has ended, and its checkpoints were removed"):
        run_hash.run_fingerprint(empty)
    full = folder()
    saved(full)
    with pytest.raises(ValueError, match="no checkpoint of step 2; there are 3"):
        run_hash.run_fingerprint(full, 2)


def test_a_damaged_step_is_refused_and_not_hashed(folder):
    run = folder()
    saved(run)
    (run / "checkpoints" / "00000003" / "host.json").write_text("{}")
    with pytest.raises(run_state.DamagedStep):
        run_hash.run_fingerprint(run)
