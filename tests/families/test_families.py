"""Every family against what transformers said of the same weights, in both layouts of config.json; there and back."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from families import golden
from families.published import logits, opened
from safetensors.numpy import load_file, save_file

from jrl.checkpoints.published import Published, decoder_of, export
from jrl.models.decoder import Decoder
from jrl.models.families import FAMILIES, describe, family_of
from jrl.models.families.contract import Keys, canonical, read, sort_keys
from jrl.sharding import MeshShape, make_mesh


def test_every_family_has_its_golden_file():
    assert set(golden.NAMES) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_both_layouts_say_the_same_decoder(name):
    kept = golden.kept(name)
    found = [read(FAMILIES[name], kept[layout]) for layout in ("config5", "config4")]
    assert canonical(found[0]) == canonical(found[1])
    assert family_of(kept["config5"]) is FAMILIES[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, tmp_path):
    cfg, params = opened(golden.write(tmp_path / "model", name))
    said = np.load(golden.GOLDEN / f"{name}.npz")
    found = logits(cfg, params, said["tokens"])[:, ::4]
    scale = np.abs(said["logits"]).max()
    assert scale > 0.5
    np.testing.assert_allclose(found, said["logits"], atol=2e-4, rtol=0)
    assert np.abs(found - said["logits"]).max() <= 1e-3 * scale


@pytest.mark.parametrize("name", FAMILIES)
def test_export_gives_back_every_bit(name, tmp_path):
    cfg, params = opened(golden.write(tmp_path / "model", name, dtype="float32"))
    files = export(params, cfg, tmp_path / "out", dtype="float32", most_bytes=30_000, family=FAMILIES[name])
    assert "model.safetensors.index.json" in files
    found = {}
    for file in files:
        if file.endswith(".safetensors"):
            found |= load_file(tmp_path / "out" / file)
    expected = golden.tensors(name)
    assert found.keys() == expected.keys()
    for label, tensor in expected.items():
        np.testing.assert_array_equal(found[label], tensor, err_msg=label, strict=True)
    again, weights = opened(tmp_path / "out")
    assert canonical(again) == canonical(cfg)
    jax.tree.map(np.testing.assert_array_equal, weights, params)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mesh_holds_the_same_parameters(name, tmp_path):
    folder = golden.write(tmp_path / "model", name, dtype="bfloat16", files=3)
    _, one = opened(folder)
    _, many = opened(folder, make_mesh(MeshShape(data=2, fsdp=2)))
    jax.tree.map(np.testing.assert_array_equal, many, one)
    assert len(many["layers"]["down"].sharding.device_set) == 4
    assert many["layers"]["down"].addressable_shards[0].data.shape[2] * 2 == many["layers"]["down"].shape[2]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_key_is_refused_by_name(name):
    config = golden.kept(name)["config5"]
    with pytest.raises(ValueError, match="residual_multiplier"):
        read(FAMILIES[name], config | {"residual_multiplier": 0.5})
    read(FAMILIES[name], config | {"residual_multiplier": None})


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_that_are_mapped_are_listed(name):
    family, asked = FAMILIES[name], set()
    for layout in ("config5", "config4"):
        keys = Keys(golden.kept(name)[layout])
        family.read(keys)
        asked |= keys.asked
    # What is read only where a stretched rope leaves its length out.
    assert asked == set(family.keys) | asked & {"max_position_embeddings", "original_max_position_embeddings"}
    assert not set(family.keys) & set(family.harmless)


def test_an_unknown_architecture_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        family_of({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    with pytest.raises(ValueError, match="LlamaForSequenceClassification"):
        family_of({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_attention_heads": 5}, "num_attention_heads = 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "both rope_scaling and rope_parameters"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, said):
    config = {k: v for k, v in (golden.kept("Llama")["config5"] | changes).items() if v is not None}
    config = config if "num_attention_heads" not in changes else {k: v for k, v in config.items() if k != "head_dim"}
    with pytest.raises(ValueError, match=said):
        read(FAMILIES["Llama"], config)


def test_our_own_decoder_is_exported_as_the_family_that_can_say_it():
    own = Decoder(vocab_size=64)
    assert describe(own)[0] is FAMILIES["Qwen3"]
    family, config = describe(Decoder(vocab_size=64, qk_norm=None, tied=False))
    assert family is FAMILIES["Llama"] and not config["tie_word_embeddings"]
    with pytest.raises(ValueError, match=r"no family.*Decoder.activation = 'relu'"):
        describe(Decoder(vocab_size=64, activation="relu"))


def test_a_folder_and_its_dtype(tmp_path):
    folder = golden.write(tmp_path / "model", dtype="bfloat16")
    cfg, params = opened(folder, param_dtype="bfloat16", dtype="bfloat16")
    export(params, cfg, tmp_path / "out", dtype="bfloat16", most_bytes=1 << 30)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    found, put = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    for label, tensor in put.items():
        np.testing.assert_array_equal(found[label], tensor, strict=True)
    assert decoder_of(Published(path=str(tmp_path / "out")))[0] is FAMILIES["Llama"]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_is_read_out_of_a_larger_one(prefix, tmp_path):
    plain = golden.write(tmp_path / "plain", "Gemma3")
    inner = {name: value for name, value in golden.kept("Gemma3")["config5"].items() if name != "architectures"}
    around = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner,
              "vision_config": {"hidden_size": 8}, "image_token_index": 5}  # fmt: skip
    folder = tmp_path / "around"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(around))
    rows = {name.replace("model.", prefix, 1): x for name, x in golden.tensors("Gemma3").items()}
    vision = {"vision_tower.vision_model.head.weight": np.ones((2, 2), np.float32)}
    save_file({**rows, **vision}, folder / "model.safetensors")
    cfg, params = opened(folder)
    want, weights = opened(plain)
    assert cfg == want
    jax.tree.map(np.testing.assert_array_equal, params, weights)
    export(params, cfg, tmp_path / "out", dtype="float32", most_bytes=1 << 30, family=FAMILIES["Gemma3"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(around | {"twist": 1}))
    with pytest.raises(ValueError, match="twist = 1"):
        opened(folder)
    (folder / "config.json").write_text(json.dumps(around | {"text_config": inner | {"turn": 1}}))
    with pytest.raises(ValueError, match=r"text_config has keys .* turn = 1"):
        opened(folder)


def test_keys_are_sorted_by_what_becomes_of_them():
    config = golden.kept("Llama")["config4"]
    found = sort_keys(FAMILIES["Llama"], config | {"twist": 1, "use_cache": True, "flavour": None})
    assert "hidden_size" in found.read and "use_cache" in found.ignored
    assert found.unknown == ("twist",)
    around = {"model_type": "gemma3", "text_config": {"hidden_size": 8, "turn": 1}, "vision_config": {}, "twist": 2}
    found = sort_keys(FAMILIES["Gemma3"], around)
    assert {"hidden_size", "vocab_size", "text_config"} <= set(found.read)
    assert "vision_config" in found.ignored and set(found.unknown) == {"turn", "twist"}
