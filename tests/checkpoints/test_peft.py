"""PEFT's folders: what they say of published matrices is what is read and written, in every family."""

from __future__ import annotations

import functools
import itertools
import json

import jax
import numpy as np
import pytest
from families import golden
from families.published import one_device
from safetensors.numpy import load_file, save_file

from jrl.device.sharding import MeshShape, make_mesh
from jrl.models.adapters.lora import LoRA, adapted, merge
from jrl.models.adapters.matrices import ADAPTABLE
from jrl.models.contract import Adapted, abstract, axes
from jrl.models.decoder import MODEL
from jrl.models.families.contract import Pick
from jrl.models.leaves import layers_of
from jrl.models.pretrained import peft
from jrl.models.pretrained.adapters import fold, modules_of, transposed, unfold
from jrl.models.pretrained.published import Published, decoder_of, load, plans, published_tensors

CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "bias": "none", "use_rslora": False,
          "use_dora": False, "target_modules": "all-linear", "lora_dropout": 0.05}  # fmt: skip


@functools.cache
def base(name, tmp):
    folder = golden.write(tmp / name, name)
    family, cfg = decoder_of(Published(path=str(folder)))
    return folder, family, cfg


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


def matrices(family, cfg):
    """Returns published name -> (shape, whether it is [in, out]) of every matrix that may have an adapter."""
    tensor_plans = plans(family, cfg)
    return {name: (plan.shape, transposed(plan.slots[0].place)) for name, plan in tensor_plans.items()
            if plan.slots[0].path[-1] in ADAPTABLE}  # fmt: skip


def write(folder, family, cfg, dora=False, **config):
    """Writes an adapter of rank 3 to every matrix; returns published name -> (A, B, m)."""
    rng, written, tensors = np.random.default_rng(0), {}, {}
    for name, (shape, flipped) in matrices(family, cfg).items():
        out, into = shape[::-1] if flipped else shape
        a, b = (rng.normal(size=size).astype(np.float32) for size in ((3, into), (out, 3)))
        m = rng.uniform(1, 2, out).astype(np.float32)
        written[name] = a, b, m
        module = f"base_model.model.{name.removesuffix('.weight')}."
        tensors |= {f"{module}lora_A.weight": a, f"{module}lora_B.weight": b}
        tensors |= {f"{module}lora_magnitude_vector": m} if dora else {}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"use_dora": dora} | config))
    return written


def somehow(spec):
    """Returns parameters of a spec, of small numbers."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: (0.2 * rng.normal(size=leaf.shape)).astype(leaf.dtype), abstract(spec))


def published(params, cfg, family):
    return dict(published_tensors(params, cfg, family, "float32"))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", golden.NAMES)
def test_an_adapter_is_merged_as_it_says_of_published_matrices(name, dora, tmp, tmp_path):
    folder, family, cfg = base(name, tmp)
    written = write(tmp_path / "adapter", family, cfg, dora)
    params = load(Published(path=str(folder), adapter=str(tmp_path / "adapter")), one_device())
    actual = published(params, cfg, family)
    for label, weight in golden.tensors(name).items():
        if label in written:
            a, b, m = written[label]
            flipped = transposed(plans(family, cfg)[label].slots[0].place)
            weight = (weight.T if flipped else weight) + 6 / 3 * b @ a
            weight = weight * (m / np.linalg.norm(weight, axis=1))[:, None] if dora else weight
            weight = weight.T if flipped else weight
            np.testing.assert_allclose(actual[label], weight, rtol=1e-5, atol=1e-6)
        elif label in actual:
            np.testing.assert_array_equal(actual[label], weight)
    assert len(written) >= 2 * cfg.layers


@pytest.mark.parametrize("name, kind", list(zip(golden.NAMES, itertools.cycle(["lora", "dora"]))))
def test_an_adapter_that_is_written_says_of_published_matrices_what_was_trained(name, kind, tmp, tmp_path):
    folder, family, cfg = base(name, tmp)
    targets = ("q", "o", "*p") if layers_of(cfg, "up") else ("q", "o")  # experts have no adapters
    config = LoRA(rank=2, alpha=3.0, kind=kind, scaling="alpha/sqrt(rank)", targets=targets)
    names = axes(adapted(MODEL, config).spec(cfg))
    with jax.set_mesh(one_device()):
        adapters = somehow(adapted(MODEL, config).spec(cfg).adapters)
        params = Adapted(load(Published(path=str(folder)), one_device()), adapters)
        merged = jax.jit(functools.partial(merge, config=config, names=names, dtype="float32"))(params)
    modules = dict(modules_of(params, config, plans(family, cfg)))
    to = tmp_path / "adapter"
    flipped = name == "GPT2"
    peft.write(to, modules, base="there", rslora=True, transposed=flipped, dtype="float32")
    again = load(Published(path=str(folder), adapter=str(to)), one_device())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), again, merged)
    adapter_config = json.loads((to / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["fan_in_fan_out"], adapter_config["use_rslora"]) == (2, flipped, True)
    assert adapter_config["rank_pattern"] == {} and len(adapter_config["target_modules"]) == len(
        targets
    )  # fused or not: up, not gate


def test_fused_leaves_share_one_adapter_of_their_ranks_together(tmp, tmp_path):
    _, family, cfg = base("Phi3", tmp)
    config = LoRA(rank=2, alpha=2.0)
    modules = dict(modules_of(somehow(adapted(MODEL, config).spec(cfg)), config, plans(family, cfg)))
    assert {name.split(".")[-1]: len(module.a) for name, module in modules.items()} == {
        "qkv_proj": 6, "o_proj": 2, "gate_up_proj": 4, "down_proj": 2}  # fmt: skip
    peft.write(tmp_path / "adapter", modules, base="there", rslora=False, transposed=False, dtype="bfloat16")
    adapter_config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    # The scale stays 1: alpha is the rank.
    assert (adapter_config["r"], adapter_config["lora_alpha"]) == (2, 2)
    assert (
        adapter_config["rank_pattern"]
        == adapter_config["alpha_pattern"]
        == {"self_attn.qkv_proj": 6, "mlp.gate_up_proj": 4}
    )
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {str(x.dtype) for x in tensors.values()} == {"bfloat16"}


def test_a_published_dimension_unfolds_and_folds_by_hand():
    # Rows are (head, which of q k v, entry) as in GPT-NeoX; the leaf is k: [2 heads, 2 entries].
    rows = np.arange(12.0)[:, None]
    dims = (0, Pick(1, 3), 1)
    leaf = unfold(rows, dims, (2, 2))
    np.testing.assert_array_equal(leaf[..., 0], [[2, 3], [8, 9]])
    np.testing.assert_array_equal(fold(leaf, dims, (2, 2))[:, 0], [0, 0, 2, 3, 0, 0, 0, 0, 8, 9, 0, 0])
    np.testing.assert_array_equal(unfold(np.arange(6)[:, None], (1, 0), (2, 3))[..., 0], [[0, 2, 4], [1, 3, 5]])


@pytest.mark.parametrize("dora", [False, True])
def test_a_mesh_reads_the_same(dora, tmp, tmp_path):
    folder, family, cfg = base("Llama", tmp)
    write(tmp_path / "adapter", family, cfg, dora)
    published_config = Published(path=str(folder), adapter=str(tmp_path / "adapter"), param_dtype="bfloat16")
    one, many = (
        load(published_config, mesh) for mesh in (one_device(), make_mesh(MeshShape(data=2, fsdp=2, tensor=2)))
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many)):
        assert a.dtype == b.dtype == "bfloat16"
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7)


def test_ranks_and_alphas_of_their_own(tmp, tmp_path):
    _, family, cfg = base("Llama", tmp)
    write(tmp_path / "a", family, cfg, alpha_pattern={"o_proj": 1, r"layers\.1\.mlp\.up_proj": 30}, use_rslora=True)
    actual = peft.read(tmp_path / "a")
    layer = "model.layers.{}.{}"
    assert actual[layer.format(0, "self_attn.o_proj")].scale == pytest.approx(1 / 3**0.5)
    assert actual[layer.format(1, "mlp.up_proj")].scale == pytest.approx(30 / 3**0.5)
    assert actual[layer.format(0, "mlp.up_proj")].scale == pytest.approx(6 / 3**0.5)


# What is refused


def refused(tmp, tmp_path, *parts, change=None, **config):
    folder, family, cfg = base("Llama", tmp)
    adapter = tmp_path / "adapter"
    write(adapter, family, cfg, **config)
    if change is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError) as caught:
        load(Published(path=str(folder), adapter=str(adapter)), one_device())
    for part in (str(adapter), *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("name, value", [
    ("peft_type", "IA3"), ("task_type", "SEQ_CLS"), ("bias", "all"), ("init_lora_weights", "pissa"),
    ("modules_to_save", ["lm_head"]), ("layer_replication", [[0, 2]]), ("lora_bias", True), ("a_new_option", 0.5),
    ("target_parameters", ["experts.gate_up_proj"]), ("trainable_token_indices", [3]),
])  # fmt: skip
def test_what_changes_the_computation_is_refused_by_name(name, value, tmp, tmp_path):
    refused(tmp, tmp_path, name, **{name: value})


def test_an_adapter_to_another_model_is_refused(tmp, tmp_path):
    label = "base_model.model.model.layers.1.mlp.up_proj.lora_{}.weight"

    def other(tensors):
        for part in "AB":
            tensors[label.format(part).replace("up_proj", "w1")] = tensors.pop(label.format(part))

    refused(tmp, tmp_path, "belongs to another model", "model.layers.1.mlp.w1", change=other)


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"), "model.layers.1.mlp.up_proj has"),
    (lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((3, 4), np.float32)}),
     "lora_embedding_A"),
    (lambda t: t.update({"base_model.model.model.layers.1.mlp.up_proj.lora_A.weight": np.zeros((3, 31), np.float32)}),
     "has 31 inputs and 48 outputs, expected 32 and 48"),
    (lambda t: t.update({"base_model.model.model.layers.1.mlp.up_proj.lora_A.weight": np.zeros((3, 32), np.int8)}),
     "not floating point"),
])  # fmt: skip
def test_tensors_that_are_no_adapter_are_refused(change, message, tmp, tmp_path):
    refused(tmp, tmp_path, message, change=change)


def test_a_pickled_adapter_is_refused(tmp, tmp_path):
    folder, family, cfg = base("Llama", tmp)
    write(tmp_path / "a", family, cfg)
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(ValueError, match="a pickle can run any code"):
        peft.read(tmp_path / "a")
    with pytest.raises(ValueError, match="is not an adapter"):
        peft.read(folder)
