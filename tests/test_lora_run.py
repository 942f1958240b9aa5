"""Whole runs that train adapters: resume, what moves, export merged and apart, PEFT's folders in and out."""

from __future__ import annotations

import contextlib
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jrl
from jrl.config import ConfigError
from jrl.models.adapters.quantized import quantize
from jrl.models.contract import Adapted
from jrl.resolve import load_config
from jrl.run import run_hash
from jrl.run.trained import open_trained
from jrl.tools.export import export_adapter, export_policy
from jrl.tools.score import score

pytestmark = pytest.mark.usefixtures("frozen_before_the_first_step", "mesh_of_the_runs")

TINY = [
    "Decoder.layers=2", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Decoder.qk_norm=None", "Online.prompts=8", "Online.samples=4", "Online.steps=4",
    "Checkpoint.every=2", "Log.samples=0", "Log.writers=()", "Scoring.workers=1", "Config.adapter=@LoRA()",
    "LoRA.rank=4", "LoRA.alpha=8.0",
]  # fmt: skip
ROWS = [[1, 2, 3, 40], [9], [5, 6] * 20]


def run(folder, *bindings, config="configs/tiny.gin", stop_after=None, over=TINY, begin_from=None):
    """Trains, or trains until a step is done and leaves as a notebook would; returns the steps seen."""
    seen = []
    named = {binding.partition("=")[0]: binding for binding in [*over, *bindings]}
    with contextlib.closing(jrl.steps(str(config), list(named.values()), run=folder, begin_from=begin_from)) as steps:
        for step in steps:
            seen.append(step)
            if step.step == stop_after:
                break
    return seen


def models(folder, step):
    """Returns the saved models by role."""
    return run_hash.read_step(folder, step)[0]["state"]["models"]


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "lora"
    run(folder, "Checkpoint.every=1", "Checkpoint.keep=9", "GRPO.kl=0.1")
    return folder


HARD = ["Online.lag=1", "Online.objective=@DAPO()", "DAPO.max_refills=1", "LoRA.kind='dora'",
        "LoRA.sampling='merged'", "Decoder.param_dtype='bfloat16'", "Decoder.dtype='bfloat16'",
        "Sampler.layers='scanned'", "Learner.layers='scanned'"]  # fmt: skip


@pytest.mark.parametrize("bindings", [["GRPO.kl=0.01"], HARD], ids=["plain", "hard"])
def test_a_run_that_is_left_and_resumed_holds_the_same_bits(tmp_path, bindings):
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    wide = ["Decoder.width=2048", "Checkpoint.every=1"]  # a base with arrays that checkpoints have in common
    run(straight, *bindings, *wide)
    run(cut, *bindings, *wide, stop_after=3)
    run(cut, *bindings, *wide)
    assert run_hash.run_fingerprint(cut, 4) == run_hash.run_fingerprint(straight, 4)
    for folder in (straight, cut):
        common = [path for path in (folder / "checkpoints/00000004/unchanged").rglob("*") if path.is_file()]
        assert common and all(path.stat().st_nlink > 1 for path in common)


def test_the_base_keeps_its_bits_and_the_optimizer_holds_adapters_only(trained_run):
    first, last = (models(trained_run, step)["policy"] for step in (1, 4))
    jax.tree.map(np.testing.assert_array_equal, first["frozen"], last["frozen"])
    assert not np.array_equal(first["params"]["q"]["b"], last["params"]["q"]["b"])
    sizes = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    # Two moments of every adapter, and two counts of steps (Adam's and the schedule's).
    assert 0 <= sizes(last["opt_state"]) - 2 * sizes(last["params"]) <= 2
    assert last["params"].keys() == {"q", "k", "v", "o", "gate", "up", "down"}


def test_the_first_completions_are_those_of_the_base(trained_run, tmp_path):
    plain = [binding for binding in TINY if "LoRA" not in binding]
    expected = run(tmp_path / "plain", "Online.steps=1", over=plain)[0].rollout
    actual = run(tmp_path / "lora", "Online.steps=1")[0].rollout
    np.testing.assert_array_equal(actual["tokens"], expected["tokens"])


def test_the_reference_is_the_base_without_a_copy(trained_run):
    saved = models(trained_run, 2)
    assert "frozen" not in saved["reference"]
    reference, policy = saved["reference"]["params"], saved["policy"]["params"]
    assert reference.keys() == policy.keys()  # adapters, as they were: B is 0
    assert all((leaf["b"] == 0).all() for leaf in reference.values())
    assert any((leaf["b"] != 0).any() for leaf in policy.values())


def test_an_exported_run_scores_as_the_run(trained_run, tmp_path):
    trained = open_trained(trained_run)
    assert isinstance(trained.params, Adapted)
    expected = score(trained, ROWS)
    assert export_policy(trained_run, tmp_path / "out")[0] == 4
    for a, b in zip(score(open_trained(tmp_path / "out"), ROWS), expected):
        np.testing.assert_allclose(a, b, atol=1e-5)
    base = trained.params.base
    exported = open_trained(tmp_path / "out").params
    np.testing.assert_array_equal(exported["embed"], base["embed"])
    assert np.abs(exported["layers"]["q"] - base["layers"]["q"]).max() > 1e-4


def test_an_adapter_to_random_weights_is_not_written_apart(trained_run, tmp_path):
    with pytest.raises(ValueError, match="were drawn at random"):
        export_adapter(trained_run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A published folder to train adapters to."""
    folder = tmp_path_factory.mktemp("published")
    plain = [binding for binding in TINY if "LoRA" not in binding]
    run(folder / "run", "Online.steps=1", "Decoder.tied=False", over=plain)
    export_policy(folder / "run", folder / "model")
    return folder / "model"


def published_run(published, folder, *bindings, steps=2, adapted=True, begin_from=None):
    gin = folder.parent / f"{folder.name}.gin"
    start, rest = open("configs/tiny.gin").read().split("Decoder:\n")
    gin.write_text(
        f"{start}Config.model = @Published()\nPublished.path = '{published}'\n{rest.split(chr(10) * 2, 1)[1]}"
    )
    left_out = ("Decoder",) if adapted else ("Decoder", "Config.adapter", "LoRA")
    over = [binding for binding in TINY if not binding.startswith(left_out)]
    run(folder, f"Online.steps={steps}", *bindings, config=gin, over=over, begin_from=begin_from)
    return folder


KINDS = {
    "lora": [],
    "rslora": ["LoRA.scaling='alpha/sqrt(rank)'", "LoRA.targets=('q', 'o', 'down')", "LoRA.alpha=3.5"],
    "dora": ["LoRA.kind='dora'", "LoRA.rank=2"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_written_apart_and_read_into_its_base_scores_as_the_run(kind, published, tmp_path):
    folder = published_run(published, tmp_path / "run", *KINDS[kind], "AdamW.learning_rate=0.1")
    expected = score(open_trained(folder), ROWS)
    step, files = export_adapter(folder, tmp_path / "adapter")
    assert step == 2 and files == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(published)
    assert (config["use_rslora"], config["use_dora"]) == (kind == "rslora", kind == "dora")
    assert config["r"] == (2 if kind == "dora" else 4) and config["lora_alpha"] == (3.5 if kind == "rslora" else 8)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj."
    assert tensors[f"{name}lora_A.weight"].shape == (config["r"], 16)
    assert tensors[f"{name}lora_B.weight"].shape == (16, config["r"])
    assert (f"{name}lora_magnitude_vector" in tensors) == (kind == "dora")
    actual = score(open_trained(published, [f"Published.adapter='{tmp_path / 'adapter'}'"]), ROWS)
    bare = score(open_trained(published), ROWS)
    for a, b in zip(actual, expected):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert max(np.abs(a - b).max() for a, b in zip(bare, expected)) > 1e-3


def test_a_base_in_four_bits_is_kept_resumed_and_exported(published, tmp_path):
    bits = ["LoRA.base='nf4'", "LoRA.targets=('q', 'o')", "AdamW.learning_rate=0.1", "Checkpoint.every=1"]
    with pytest.raises(
        ConfigError, match=r"without Published\.remat = 'layer' the backward pass would store all of them"
    ):
        published_run(published, tmp_path / "straight", *bits)
    bits += ["Published.remat='layer'", "Sampler.layers='scanned'", "Learner.layers='scanned'"]
    straight = published_run(published, tmp_path / "straight", *bits)
    published_run(published, tmp_path / "cut", *bits, steps=1)
    cut = published_run(published, tmp_path / "cut", *bits)
    assert run_hash.run_fingerprint(cut, 2) == run_hash.run_fingerprint(straight, 2)
    began, base = open_trained(published).params["layers"]["up"], models(cut, 2)["policy"]["frozen"]
    expected = quantize(began, "up", "nf4", ("layers", "embed", "mlp"))
    jax.tree.map(np.testing.assert_array_equal, base["layers"]["up"], expected)
    assert base["layers"]["up"]["nf4"].nbytes * 8 == began.nbytes
    expected = score(open_trained(cut), ROWS)
    export_policy(cut, tmp_path / "out")
    for a, b in zip(score(open_trained(tmp_path / "out"), ROWS), expected):
        np.testing.assert_allclose(a, b, atol=2e-5)
    export_adapter(cut, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"].shape == (4, 16)


def test_a_run_may_begin_from_an_adapter_and_needs_it_no_more(published, tmp_path):
    first = published_run(published, tmp_path / "first", "AdamW.learning_rate=0.1")
    adapter = tmp_path / "adapter"
    export_adapter(first, adapter)
    again = published_run(published, tmp_path / "again", f"Published.adapter='{adapter}'", steps=1)
    expected = score(open_trained(published, [f"Published.adapter='{adapter}'"]), ROWS)
    base = open_trained(again).params.base
    merged = open_trained(published, [f"Published.adapter='{adapter}'"]).params
    jax.tree.map(np.testing.assert_array_equal, base, merged)
    assert expected
    with pytest.raises(ValueError, match=r"have the adapter .* in them"):
        export_adapter(again, tmp_path / "third")
    for path in adapter.iterdir():
        path.unlink()
    published_run(published, tmp_path / "again", f"Published.adapter='{adapter}'", steps=2)


def test_an_adapter_over_weights_that_another_run_trained_is_not_said_to_be_one_of_the_published(published, tmp_path):
    """base_model_name_or_path would name a folder that does not hold its base."""
    full = published_run(published, tmp_path / "full", steps=1, adapted=False)
    over_full = published_run(published, tmp_path / "over_full", steps=1, begin_from=full)
    with pytest.raises(ValueError, match=r"the frozen weights of .* are those that .*full trained"):
        export_adapter(over_full, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    first = published_run(published, tmp_path / "first", steps=1)
    second = published_run(published, tmp_path / "second", steps=1, begin_from=first)
    export_adapter(second, tmp_path / "out")  # whose adapters it continued
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(published)
    first.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"with which it began, and whose config\.json is not there"):
        export_adapter(second, tmp_path / "third")


def test_frozen_weights_may_be_bfloat16_and_trained_ones_may_not():
    load_config("configs/tiny.gin", [*TINY, "Decoder.param_dtype='bfloat16'"])
    plain = [binding for binding in TINY if "LoRA" not in binding]
    with pytest.raises(ConfigError, match=r"cannot be trained.*Config\.adapter = @LoRA"):
        load_config("configs/tiny.gin", [*plain, "Decoder.param_dtype='bfloat16'"])
