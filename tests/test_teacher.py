"""A teacher that is a published folder: of another shape than the policy, and of the same tokenizer."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jrl
from jrl.config import ConfigError
from jrl.run import replay
from jrl.run.run_hash import read_step, run_fingerprint
from jrl.run.teacher import check_teacher
from jrl.tools.export import export_policy

pytestmark = pytest.mark.usefixtures("mesh_of_the_runs")

SMALL = [
    "Decoder.layers=1", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Sampler.slots=8", "Scoring.workers=1", "Log.writers=()", "Online.prompts=4",
    "Online.samples=2", "Online.steps=2", "warm/Offline.steps=1", "warm/Offline.batch_size=8",
]  # fmt: skip
TOY = "configs/algos/toy.gin"
STAGES = "Config.stages=[@warm/Offline(), @Online()]"
TAUGHT = [STAGES, "Config.teacher=@teacher/Published()", "Checkpoint.every=1", "Checkpoint.keep=9"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of a wider policy that imitated for a step, and its run."""
    run, folder = tmp_path_factory.mktemp("teacher") / "run", tmp_path_factory.mktemp("teacher") / "published"
    offline = [binding for binding in SMALL if not binding.startswith("Online.")]
    jrl.train(TOY, [*offline, "Decoder.width=24", "Config.stages=[@warm/Offline()]"], run=run)
    export_policy(run, folder)
    return folder, run


def taught(objective, folder, *more):
    teacher = f"teacher/Published.path={str(folder)!r}"
    return TOY, [*SMALL, "Decoder.width=16", *TAUGHT, f"Online.objective=@{objective}()", teacher, *more]


@pytest.mark.parametrize("name", ["GKD", "OnPolicyDistillation"])
def test_it_teaches_and_stays_as_it_was_through_a_restart(name, published, tmp_path):
    path, bindings = taught(name, published[0])
    straight = list(jrl.steps(path, bindings, run=tmp_path / "straight"))
    assert all(np.isfinite(step.metrics["loss"]) for step in straight)
    assert all(step.metrics["grad_norm"] > 0 for step in straight[1:])
    models = [read_step(tmp_path / "straight", step)[0]["state"]["models"] for step in (1, 3)]
    assert models[0]["teacher"]["params"]["embed"].shape[-1] == 24 != models[0]["policy"]["params"]["embed"].shape[-1]
    jax.tree.map(np.testing.assert_array_equal, models[0]["teacher"]["params"], models[1]["teacher"]["params"])
    for step in jrl.steps(path, bindings, run=tmp_path / "cut"):
        if step.step == 2:
            break
    jrl.train(path, bindings, run=tmp_path / "cut")
    assert replay.repeat(tmp_path / "straight", 3).different == []
    assert run_fingerprint(tmp_path / "cut") == run_fingerprint(tmp_path / "straight")


def test_what_cannot_teach_is_refused(published, tmp_path):
    folder, run = published
    path, bindings = taught("GKD", run)
    with pytest.raises(ValueError, match="is a run; `jrl export` writes its policy"):
        jrl.train(path, bindings, run=tmp_path / "a")
    config, parts = jrl.load_config(*taught("GKD", folder))
    other = SimpleNamespace(token_bytes=lambda: [b"a", b"b"])
    with pytest.raises(
        ValueError, match=r"has another tokenizer than the policy: \d+ tokens and 2, of which the first 0"
    ):
        check_teacher(config, other, parts.tables)
    path, bindings = taught("GKD", folder, "Decoder.vocab_size=272")
    with pytest.raises(ValueError, match="their distributions cannot be compared"):
        jrl.train(path, bindings, run=tmp_path / "c")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (bare / file.name).write_bytes(file.read_bytes())
    path, bindings = taught("GKD", bare)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        jrl.train(path, bindings, run=tmp_path / "d")


def test_a_teacher_without_pupils_or_beside_another_one_is_refused():
    bound = ["Config.teacher=@teacher/Published()", "teacher/Published.path='somewhere'"]
    with pytest.raises(ConfigError, match=r"No objective of the run reads Config\.teacher"):
        jrl.load_config(TOY, bound)
    with pytest.raises(ConfigError, match="which a stage trains; leave one out"):
        jrl.load_config("configs/algos/gkd.gin", bound)
