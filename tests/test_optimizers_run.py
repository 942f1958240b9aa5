"""Whole runs under each optimizer: resume, frozen groups, the moving average as a role, refusals."""

from __future__ import annotations

import contextlib
import functools
import json

import jax
import numpy as np
import optax
import pytest
import short_runs
from documented import write_part
from small_model import PLAIN_DECODER

import jrl
from jrl.config import ConfigError
from jrl.learning.optimizers.contract import Optimizer
from jrl.learning.optimizers.settings import OptimizerSettings
from jrl.resolve import load_config
from jrl.run import run_hash
from jrl.run.trained import open_trained
from jrl.types import traced

pytestmark = pytest.mark.usefixtures("frozen_before_the_first_step", "mesh_of_the_runs")

TINY = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=8", "Online.samples=4", "Online.steps=3", "Checkpoint.every=1",
    "Checkpoint.keep=9", "Log.samples=0", "Log.writers=()", "Scoring.workers=1",
    *PLAIN_DECODER,
]  # fmt: skip


run = functools.partial(short_runs.run, TINY)


def models(folder, step):
    """Returns the saved models by role."""
    return run_hash.read_step(folder, step)[0]["state"]["models"]


OPTIONS = {
    "Muon": ["Online.optimizer=@Muon()", "Muon.schedule=@CosineDecay()", "CosineDecay.decay_steps=3",
             "Muon.learning_rate=0.01", "Muon.average=0.9", "MeshShape.fsdp=2",
             "Muon.groups=[@still/ParameterGroup(), @slow/ParameterGroup()]", "still/ParameterGroup.names='layers/v'",
             "still/ParameterGroup.frozen=True", "slow/ParameterGroup.names='embed'",
             "slow/ParameterGroup.learning_rate=1e-3"],
    "Adafactor": ["Online.optimizer=@Adafactor()", "Adafactor.momentum=0.9", "Adafactor.learning_rate=0.01",
                  "Adafactor.schedule=@WarmupStableDecay()", "WarmupStableDecay.stable_steps=1",
                  "WarmupStableDecay.decay_steps=2", "Config.adapter=@LoRA()", "LoRA.rank=2",
                  "Adafactor.average=0.5"],
}  # fmt: skip


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Returns name -> bindings of a run under each optimizer; Lion is that of a parts file."""
    part = write_part("An optimizer", tmp_path_factory.mktemp("documented"))
    lion = [f"Config.parts=['{part}']", "Online.optimizer=@Lion()", "Lion.learning_rate=0.01", "Lion.weight_decay=0.1",
            "MeshShape.fsdp=2", "Lion.average=0.9"]  # fmt: skip
    return {**OPTIONS, "Lion": lion}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, options):
    """Returns name -> (folder, steps) of a run under each optimizer, made once."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("runs") / name
            made[name] = folder, run(folder, *options[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", [*OPTIONS, "Lion"])
def test_a_run_that_is_left_and_resumed_holds_the_same_bits(name, whole, options, tmp_path):
    run(tmp_path / "cut", *options[name], stop_after=2)
    run(tmp_path / "cut", *options[name])
    assert run_hash.run_fingerprint(tmp_path / "cut", 3) == run_hash.run_fingerprint(whole(name)[0], 3)


FACTOR = [1.0]


@traced
class OfANotebook(OptimizerSettings):
    pass


def test_a_run_with_parts_given_as_objects_reads_the_variables_of_the_moment(tmp_path):
    row = Optimizer(OfANotebook, lambda config, leaves: optax.scale(FACTOR[0]))
    settings = ["Online.optimizer=@OfANotebook()", "OfANotebook.learning_rate=0.01", "OfANotebook.clip_norm=None",
                "Online.steps=1"]  # fmt: skip
    moved = []
    for FACTOR[0] in (1.0, 0.0):
        folder = tmp_path / str(FACTOR[0])
        bindings = [*TINY, *settings]
        named = {binding.partition("=")[0]: binding for binding in bindings}
        jrl.train("configs/tiny.gin", list(named.values()), parts=[{"OPTIMIZERS": {"OfANotebook": row}}], run=folder)
        moved.append(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["update/norm"])
    assert moved[0] > 0 and moved[1] == 0
    with pytest.raises(ConfigError, match=r"unknown optimizer 'OfANotebook'.* given as objects, which are not saved"):
        open_trained(folder)


def test_an_optimizer_of_a_parts_file_moves_every_weight_by_its_rate_and_has_one_moment(whole):
    # One step of Lion adds rate * (sign - decay * weight); with the sign alone, |change + rate * decay * w| = rate.
    first, last = (models(whole("Lion")[0], step)["policy"] for step in (1, 2))
    before, after = (model["params"]["embed"] for model in (first, last))
    moved = np.abs(after - before + 0.01 * 0.1 * before)
    np.testing.assert_allclose(moved[moved > 1e-6], 0.01, rtol=1e-3)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(last["opt_state"])]
    assert sum("'q'" in path for path in paths) == 1


def test_a_frozen_group_stays_and_has_no_momentum_and_all_else_moves(whole):
    first, last = (models(whole("Muon")[0], step)["policy"] for step in (1, 3))
    same = {
        name for name, leaf in last["params"]["layers"].items() if np.array_equal(leaf, first["params"]["layers"][name])
    }
    assert same == {"v"} and not np.array_equal(first["params"]["embed"], last["params"]["embed"])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(last["opt_state"])]
    assert not [path for path in paths if "'v'" in path]
    # A matrix has one array of momentum, a norm has Adam's two.
    assert [sum(f"'{name}'" in path for path in paths) for name in ("q", "mlp_norm", "embed")] == [1, 2, 2]


def test_the_average_is_a_role_that_is_saved_and_opened(whole):
    folder, _ = whole("Muon")
    before, after = (models(folder, step) for step in (1, 2))
    expected = 0.9 * before["average"]["params"]["embed"] + 0.1 * after["policy"]["params"]["embed"]
    np.testing.assert_allclose(after["average"]["params"]["embed"], expected, atol=1e-7)
    averaged = open_trained(folder, step=3, role="average").params
    np.testing.assert_array_equal(averaged["embed"], models(folder, 3)["average"]["params"]["embed"])
    assert not np.array_equal(averaged["embed"], models(folder, 3)["policy"]["params"]["embed"])


def test_the_average_of_adapters_stands_on_the_policys_frozen_weights(whole):
    saved = models(whole("Adafactor")[0], 3)
    assert "frozen" not in saved["average"] and saved["average"]["params"].keys() == saved["policy"]["params"].keys()


def test_what_cannot_train_is_refused_before_a_folder_is_written(tmp_path):
    groups = ["AdamW.groups=[@ParameterGroup()]", "ParameterGroup.names='layer/q'", "ParameterGroup.frozen=True"]
    with pytest.raises(ValueError, match="'layer/q' matches no array; there are embed, final_norm, layers/"):
        run(tmp_path / "run", *groups)
    assert not (tmp_path / "run" / "manifest.json").exists()
    with pytest.raises(ConfigError, match=r"expects one of @AdamW\(\), @Muon\(\), @Adafactor\(\), got @GRPO"):
        load_config("configs/tiny.gin", ["Online.optimizer=@GRPO()"])
    with pytest.raises(ConfigError, match="'average'"):
        load_config("configs/rlhf-tiny.gin", ["Offline.trains='average'"])
    with pytest.raises(ValueError, match="Muon orthogonalizes the matrices of stacked layers"):
        with contextlib.closing(
            jrl.steps("configs/own/linen.gin", ["Online.optimizer=@Muon()"], run=tmp_path / "own")
        ) as s:
            next(iter(s))
