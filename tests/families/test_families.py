"""Every family against what transformers said of the same weights, in both layouts of config.json; there and back."""

from __future__ import annotations

import itertools
import json

import jax
import numpy as np
import pytest
from families import golden
from families.published import logits, one_device, opened
from safetensors.numpy import load_file, save_file

from jrl.device.sharding import MeshShape, make_mesh
from jrl.models.attention.linear import Linear
from jrl.models.contract import num_params
from jrl.models.families import FAMILIES, classifiers, describe, family_of
from jrl.models.families.contract import Keys, canonical, read, sort_keys
from jrl.models.heads import REWARD
from jrl.models.leaves import spec
from jrl.models.pretrained.published import (
    Published,
    classifier_of,
    companions_of,
    decoder_of,
    export,
    load_classifier,
)
from jrl.models.rope import ProportionalRope
from jrl.models.shape import Decoder, check_length, for_length
from jrl.resolve import load_config
from jrl.tools.inspect_model import shape


def test_every_family_has_its_golden_file():
    assert set(golden.NAMES) == {*FAMILIES, *golden.FORMS}


@pytest.mark.parametrize("name", golden.NAMES)
def test_both_layouts_say_the_same_decoder(name):
    files = golden.golden_files(name)
    actual = [read(golden.family(name), files[layout]) for layout in ("config5", "config4")]
    assert canonical(actual[0]) == canonical(actual[1])
    assert family_of(files["config5"]) is golden.family(name)


@pytest.mark.parametrize("name", golden.NAMES)
def test_logits_are_those_of_transformers(name, tmp_path):
    cfg, params = opened(golden.write(tmp_path / "model", name))
    reference = np.load(golden.GOLDEN / f"{name}.npz")
    actual = logits(cfg, params, reference["tokens"])[:, ::4]
    scale = np.abs(reference["logits"]).max()
    assert scale > 0.5
    np.testing.assert_allclose(actual, reference["logits"], atol=2e-4, rtol=0)
    assert np.abs(actual - reference["logits"]).max() <= 1e-3 * scale


@pytest.mark.parametrize("name", golden.NAMES)
def test_export_gives_back_every_bit(name, tmp_path):
    cfg, params = opened(golden.write(tmp_path / "model", name, dtype="float32"))
    files = export(params, cfg, tmp_path / "out", dtype="float32", max_bytes=30_000, family=golden.family(name))
    assert "model.safetensors.index.json" in files
    actual = {}
    for file in files:
        if file.endswith(".safetensors"):
            actual |= load_file(tmp_path / "out" / file)
    expected = golden.tensors(name)
    assert actual.keys() == expected.keys()
    for label, tensor in expected.items():
        np.testing.assert_array_equal(actual[label], tensor, err_msg=label, strict=True)
    again, weights = opened(tmp_path / "out")
    assert canonical(again) == canonical(cfg)
    jax.tree.map(np.testing.assert_array_equal, weights, params)


def test_export_copies_the_template_for_tools(tmp_path):
    cfg, params = opened(golden.write(tmp_path / "model", "Llama"))
    template = tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    more = companions_of(tmp_path / "model")
    export(params, cfg, tmp_path / "out", dtype="float32", max_bytes=1 << 30, companions=more)
    assert companions_of(tmp_path / "out")["additional_chat_templates/tool_use.jinja"] == b"{{ tools }}"


@pytest.mark.parametrize("name", golden.NAMES)
def test_a_classifier_gives_back_every_bit_and_has_no_head_of_tokens(name, tmp_path):
    cfg, params = opened(golden.write(tmp_path / "model", name))
    head = np.random.default_rng(0).normal(size=(1, cfg.width, 3)).astype(np.float32)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    given = dict(dtype="float32", max_bytes=1 << 30, family=golden.family(name), ids=ids, head=head)
    export(params, cfg, tmp_path / "out", **given)
    published = Published(path=str(tmp_path / "out"))
    assert classifier_of(published)[2:] == (("LABEL_0", "LABEL_1", "LABEL_2"), 0, True)
    weights = load_classifier(published, one_device())
    np.testing.assert_array_equal(weights.pop(REWARD), head, strict=True)
    jax.tree.map(np.testing.assert_array_equal, weights, {k: x for k, x in params.items() if k != "head"})
    stored = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(stored["score.weight"], head[0].T)
    assert not [label for label in stored if "lm_head" in label or "embed_out" in label]


@pytest.mark.parametrize(
    ("ends", "pad", "written"), [(2, 2, None), ([2, 0], 0, None), ([2, 3], 0, 0), (None, None, None)]
)
def test_a_classifier_whose_padding_ends_texts_reads_its_labels_at_the_last_token(ends, pad, written, tmp_path):
    cfg, params = opened(golden.write(tmp_path / "model", "Llama"))
    ids = {"bos_token_id": 1, "eos_token_id": ends, "pad_token_id": pad}
    head = np.ones((1, cfg.width, 1), np.float32)
    export(params, cfg, tmp_path / "out", dtype="float32", max_bytes=1 << 30, ids=ids, head=head)
    assert classifier_of(Published(path=str(tmp_path / "out"))).pad_id == written


@pytest.mark.parametrize("name", golden.NAMES)
def test_a_mesh_holds_the_same_parameters(name, tmp_path):
    folder = golden.write(tmp_path / "model", name, dtype="bfloat16", files=3)
    _, one = opened(folder)
    _, many = opened(folder, make_mesh(MeshShape(data=2, fsdp=2)))
    jax.tree.map(np.testing.assert_array_equal, many, one)
    down = many["layers"]["down"] if "down" in many["layers"] else many["layers"]["expert_down"]
    assert len(down.sharding.device_set) == 4
    assert down.addressable_shards[0].data.shape[-1] * 2 == down.shape[-1]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.regrouped])
def test_experts_of_a_layer_in_one_tensor_are_the_same_parameters_as_apart(name, tmp_path):
    """As transformers 5 holds them: [experts, 2 x width, D] for gate and up, [experts, D, width] for down."""
    folder = golden.write(tmp_path / "published", name)
    actual = load_file(folder / "model.safetensors")
    layers = sorted({label.split(".experts.")[0] for label in actual if ".experts." in label})
    gate, up, down = ("w1", "w3", "w2") if name == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    count = opened(folder)[0].experts.count
    for layer in layers:
        if f"{layer}.experts.gate_up_proj" in actual:  # published joined
            both, last = (actual.pop(f"{layer}.experts.{part}_proj") for part in ("gate_up", "down"))
            half = both.shape[1] // 2
            for i in range(count):
                parts = {gate: both[i, :half], up: both[i, half:], down: last[i]}
                actual.update({f"{layer}.experts.{i}.{part}.weight": x.copy() for part, x in parts.items()})
            continue
        take = lambda part, layer=layer: np.stack(
            [actual.pop(f"{layer}.experts.{i}.{part}.weight") for i in range(count)]
        )
        place = layer.replace(".block_sparse_moe", ".mlp")
        actual[f"{place}.gate.weight"] = actual.pop(f"{layer}.gate.weight")
        actual[f"{place}.experts.gate_up_proj"] = np.concatenate([take(gate), take(up)], axis=1)
        actual[f"{place}.experts.down_proj"] = take(down)
    if name == "Qwen3.5Moe":
        guess = {"mtp.layers.0.mlp.experts.0.gate_proj.weight": np.ones((2, 2), np.float32)}  # apart beside joined
        save_file(load_file(folder / "model.safetensors") | guess, folder / "model.safetensors")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text((folder / "config.json").read_text())
    save_file(actual, tmp_path / "other" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, opened(tmp_path / "other")[1], opened(folder)[1])


def test_the_published_shape_of_30b_has_its_parameters():
    # A layer: q and o 2048 x 4096 each, k and v 2048 x 512 each, router 2048 x 128, 128 experts of 3 x 2048 x 768 each,
    # norms 2 x 2048 + 2 x 128: 623,120,640. 48 of them, embedding and head of 151936 x 2048, a norm of 2048.
    config = dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1,
        head_dim=128, hidden_act="silu", hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960,
        max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128,
        num_attention_heads=32, num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, rms_norm_eps=1e-6,
        output_router_logits=False, rope_scaling=None, rope_theta=1e6, router_aux_loss_coef=0.001, sliding_window=None,
        tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
    )  # fmt: skip
    cfg = read(FAMILIES["Qwen3Moe"], config)
    assert num_params(spec(cfg)) == 30_532_122_624
    planned, _ = load_config("configs/plan/30b_moe.gin")
    assert canonical(planned.model) == canonical(cfg)


GEMMA4_26B = dict(
    architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", vocab_size=262144, hidden_size=2816,
    intermediate_size=2112, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
    global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True, hidden_size_per_layer_input=0,
    sliding_window=1024, enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    final_logit_softcapping=30.0,
)  # fmt: skip
QWEN35_35B = dict(
    architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", vocab_size=248320, hidden_size=2048,
    num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_value_heads=32,
    linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8, tie_word_embeddings=False,
)  # fmt: skip


def test_the_published_shapes_with_an_mlp_beside_experts_have_their_parameters():
    # 25 windowed layers: q and o 2816 x 4096, k and v 2816 x 2048, norms 2 x 256. 5 full ones: q and o 2816 x 8192,
    # k 2816 x 1024, norms 2 x 512. Each: an MLP of 3 x 2816 x 2112, 128 experts of 3 x 2816 x 704, a router of
    # 2816 x 128 with 2816 and 128 beside it, 7 norms, a number. Published: 25.2 billion, of which 3.8 are active.
    windowed, full = 2 * 2816 * 4096 + 2 * 2816 * 2048 + 512, 2 * 2816 * 8192 + 2816 * 1024 + 1024
    each = 3 * 2816 * 2112 + 128 * 3 * 2816 * 704 + 2816 * 128 + 2816 + 128 + 7 * 2816 + 1
    total = 25 * windowed + 5 * full + 30 * each + 262144 * 2816 + 2816
    assert num_params(spec(read(FAMILIES["Gemma4"], GEMMA4_26B))) == total == 25_233_141_790
    # 10 layers that attend: q, its gate and o 2048 x 4096 each, k and v 2048 x 512 each, norms 2 x 256. 30 linear ones:
    # q and k 2048 x 2048, v, its gate and o 2048 x 4096, two of 2048 x 32, taps 4 x 8192, 32 + 32 + 128. Each: 256 + 1
    # experts of 3 x 2048 x 512, a router of 2048 x 256, a gate of 2048, 2 norms.
    attending, linear = 3 * 2048 * 4096 + 2 * 2048 * 512 + 512, 2 * 2048**2 + 3 * 2048 * 4096 + 2 * 2048 * 32
    each = 257 * 3 * 2048 * 512 + 2048 * 256 + 2048 + 2 * 2048
    total = 10 * attending + 30 * (linear + 4 * 8192 + 192) + 40 * each + 2 * 248320 * 2048 + 2048
    assert num_params(spec(read(FAMILIES["Qwen3.5Moe"], QWEN35_35B))) == total == 34_660_610_688


def test_doctor_says_what_stands_beside_experts():
    cfg = read(FAMILIES["Qwen3.5Moe"], golden.golden_files("Qwen3.5Moe")["config5"])
    assert "2 of 6 experts a token and a shared expert, 96 rows" in shape(cfg)


def test_a_missing_expert_is_named(tmp_path):
    folder = golden.write(tmp_path / "model", "Qwen3Moe")
    actual = load_file(folder / "model.safetensors")
    del actual["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(actual, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \(1\): model.layers.1.mlp.experts.2.up_proj.weight"):
        opened(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_key_is_refused_by_name(name):
    config = golden.golden_files(name)["config5"]
    with pytest.raises(ValueError, match="residual_multiplier"):
        read(FAMILIES[name], config | {"residual_multiplier": 0.5})
    read(FAMILIES[name], config | {"residual_multiplier": None})


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_that_are_mapped_are_listed(name):
    family, asked = FAMILIES[name], set()
    forms = [name, *(form for form, of in golden.FORMS.items() if of == name)]
    for form, layout in itertools.product(forms, ("config5", "config4")):
        keys = Keys(golden.golden_files(form)[layout])
        family.read(keys)
        asked |= keys.asked
    # What is read only of a stretched rope: LongRoPE's, or where another leaves its length out.
    stretched = {"max_position_embeddings", "original_max_position_embeddings"}
    assert asked | stretched == set(family.keys) | stretched
    assert not set(family.keys) & set(family.harmless)


def test_an_unknown_architecture_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        family_of({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    with pytest.raises(ValueError, match="LlamaForTokenClassification"):
        family_of({"architectures": ["LlamaForTokenClassification"], "model_type": "llama"})


@pytest.mark.parametrize("kind, name, family", [
    ("llama", "LlamaForSequenceClassification", "Llama"), ("gpt2", "GPT2ForSequenceClassification", "GPT2"),
    ("gemma3_text", "Gemma3TextForSequenceClassification", "Gemma3"),
    ("gemma3_text", "Gemma3ForSequenceClassification", "Gemma3"),
    ("llama", "Qwen2ForSequenceClassification", None), ("llama", "LlamaTextForSequenceClassification", None),
    ("llama", "MyOwnForSequenceClassification", None),
])  # fmt: skip
def test_a_classifier_is_of_a_family_by_its_own_name(kind, name, family):
    config = {"architectures": [name], "model_type": kind}
    if family is not None:
        assert family_of(config) is FAMILIES[family]
        return
    with pytest.raises(ValueError, match=f"unknown architecture {name} of model_type 'llama'"):
        family_of(config)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_attention_heads": 5}, "num_attention_heads = 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .*reads only floating-point weights"),
        ({"quantization": {"bits": 4}}, "quantization = .*floating-point already, remove the key"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": "1"}}, "attention_factor is '1'"),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": "32"}}, "embeddings is '32'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "both rope_scaling and rope_parameters"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, message):
    config = {k: v for k, v in (golden.golden_files("Llama")["config5"] | changes).items() if v is not None}
    config = config if "num_attention_heads" not in changes else {k: v for k, v in config.items() if k != "head_dim"}
    with pytest.raises(ValueError, match=message):
        read(FAMILIES["Llama"], config)


def test_quantized_experts_are_refused_with_what_to_do():
    config = golden.golden_files("GptOss")["config5"] | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ValueError, match=r"quantized.*mxfp4.*Mxfp4Config\(dequantize=True\)"):
        read(FAMILIES["GptOss"], config)
    with pytest.raises(ValueError, match=r"swiglu_alpha is 1\.5"):
        read(FAMILIES["GptOss"], golden.golden_files("GptOss")["config5"] | {"swiglu_alpha": 1.5})


@pytest.mark.parametrize("name, key", [("Llama", "rope_theta"), ("GPTNeoX", "rotary_emb_base")])
def test_rope_theta_of_rope_scaling_is_read_as_transformers_5_does(name, key):
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = golden.golden_files(name)["config4"] | {"rope_scaling": scaling, key: 5e5}
    within = {"rope_scaling": scaling | {"rope_theta": 5e5}}
    expected = read(FAMILIES[name], config)
    assert expected.rope_theta == 5e5 and read(FAMILIES[name], config | within) == expected
    without = {name: value for name, value in config.items() if name != key}
    assert read(FAMILIES[name], without | within) == expected
    assert read(FAMILIES[name], without | {"rope_scaling": scaling}).rope_theta == 1e4  # the default
    with pytest.raises(ValueError, match=f"{key} is 10000 and rope_theta of rope_scaling is 500000"):
        read(FAMILIES[name], config | within | {key: 1e4})


def test_attn_factor_of_yarn_multiplies_its_scale_and_is_written_beside_attention_factor():
    # Of DeepSeek-R1-0528-Qwen3-8B: 0.1 ln 4 + 1 = 1.1386, and 0.87825 of it is 1.
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
            "attn_factor": 0.8782488562869419}  # fmt: skip
    config = golden.golden_files("Qwen3")["config4"]
    cfg = read(FAMILIES["Qwen3"], config | {"rope_scaling": yarn})
    assert cfg.rope.attention_factor == pytest.approx(1, rel=1e-12)
    written = FAMILIES["Qwen3"].write(cfg)["rope_scaling"]
    assert written["attention_factor"] == cfg.rope.attention_factor
    assert written["attn_factor"] == pytest.approx(0.8782488562869419, rel=1e-12)
    assert read(FAMILIES["Qwen3"], config | {"rope_scaling": written}) == cfg
    with pytest.raises(ValueError, match=r"transformers scales .* by 2 .*SGLang by 1 \(attn_factor times 1.139\)"):
        read(FAMILIES["Qwen3"], config | {"rope_scaling": yarn | {"attention_factor": 2.0}})
    usual = {"rope_scaling": yarn | {"attn_factor": None, "attention_factor": 1.138629436111989}}
    assert "attn_factor" not in FAMILIES["Qwen3"].write(read(FAMILIES["Qwen3"], config | usual))["rope_scaling"]


@pytest.mark.parametrize("name, near", [("Gemma3", 1e4), ("OLMo3", 5e5)])
def test_rope_theta_of_rope_scaling_is_that_of_full_layers(name, near):
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 4e5}
    keys = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    config = {key: value for key, value in golden.golden_files(name)["config4"].items() if key not in keys}
    cfg = read(FAMILIES[name], config | {"rope_scaling": scaling})
    assert (cfg.rope_theta, cfg.rope.factor, cfg.window_rope_theta) == (4e5, 2.0, near)
    with pytest.raises(ValueError, match="rope_theta is 10000 and rope_theta of rope_scaling is 400000"):
        read(FAMILIES[name], config | {"rope_scaling": scaling, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="both rope_scaling and rope_parameters"):
        read(FAMILIES[name], config | {"rope_scaling": scaling, "rope_parameters": {"full_attention": scaling}})
    # transformers 5 takes what is in rope_parameters over what is beside it
    each = {"full_attention": scaling, "sliding_attention": {"rope_theta": near}}
    assert read(FAMILIES[name], config | {"rope_parameters": each, "rope_theta": 3e5}) == cfg


LONG = {"model_type": "phi3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "original_max_position_embeddings": 16, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_longrope_is_read_from_both_layouts_and_written_back(key):
    lists = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1, 2, 3, 4]}
    cfg = read(FAMILIES["Phi3"], LONG | {key: {"type": "longrope", **lists}})
    assert (cfg.rope.long, cfg.rope.original_length, cfg.rope.factor) == ((1.0, 2.0, 3.0, 4.0), 16, 4.0)
    assert read(FAMILIES["Phi3"], LONG | {key: {"type": "su", **lists}}) == cfg  # its first name
    for length, divisors in [(16, cfg.rope.short), (17, cfg.rope.long)]:
        for_this = for_length(cfg, length)
        assert for_this.rope.divisors == divisors and canonical(for_this) == canonical(cfg)
        check_length(for_this, length)
    assert for_length(for_length(cfg, 17), 3).rope.divisors == cfg.rope.long
    with pytest.raises(ValueError, match="17 tokens are more than the 16"):
        check_length(cfg, 17)
    actual = sort_keys(FAMILIES["Phi3"], LONG | {key: {"type": "longrope", **lists}})
    assert {"original_max_position_embeddings", "max_position_embeddings"} <= set(actual.read)
    written = FAMILIES["Phi3"].write(cfg)
    assert canonical(read(FAMILIES["Phi3"], written)) == canonical(cfg)
    assert (written["original_max_position_embeddings"], written["max_position_embeddings"]) == (16, 64)
    with pytest.raises(ValueError, match="need a number for each of the 4 pairs"):
        read(FAMILIES["Phi3"], LONG | {key: {"type": "longrope", **lists, "short_factor": [1.0], "long_factor": [2.0]}})
    with pytest.raises(ValueError, match="long_factor is 'x'"):
        read(FAMILIES["Phi3"], LONG | {key: {"type": "longrope", "short_factor": [1.0], "long_factor": "x"}})


@pytest.mark.parametrize("name, changes, message", [
    ("Gemma4", {"enable_moe_block": True}, "has no 'num_experts'"),
    ("Gemma4", {"enable_moe_block": 1}, "enable_moe_block is 1"),
    ("Gemma4Moe", {"top_k_experts": 7}, "per_token must be between 1 and count"),
    ("Gemma4Moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    ("Qwen3.5Moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("Qwen3.5Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ("Qwen3.5Moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
    ("Qwen3.5Moe", {"shared_expert_intermediate_size": None}, "has no 'shared_expert_intermediate_size'"),
    ("Gemma4", {"vocab_size_per_layer_input": 50}, "vocab_size_per_layer_input = 50 is not vocab_size = 96"),
    ("Gemma4", {"per_layer_config": {"2": {"head_dim": 16}}}, "per_layer_config must be the same"),
    ("Gemma4", {"per_layer_config": {"2": {"sliding_window": 3}}}, "this version supports only head_dim and num_key"),
    ("Gemma4", {"num_global_key_value_heads": 0}, "num_global_key_value_heads is 0; it must be a whole number"),
    ("Gemma4", {"num_global_key_value_heads": "2"}, "num_global_key_value_heads is '2'"),
    ("Gemma4", {"per_layer_config": {str(i): {"num_key_value_heads": 0} for i in range(6)}}, "_value_heads is 0"),
    ("Gemma4", {"per_layer_config": {str(i): {"head_dim": "8"} for i in range(6)}}, "head_dim is '8'"),
    ("Gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ("Gemma4", {"num_kv_shared_layers": "two"}, "num_kv_shared_layers is 'two'"),
    ("Gemma4", {"num_kv_shared_layers": 6}, "shared_layers must be below"),
    ("Gemma4", {"num_kv_shared_layers": 5}, "no layer before them"),
    ("Qwen3.5", {"attn_output_gate": False}, "attn_output_gate is False"),
    ("Qwen3.5", {"attention_bias": True}, "attention_bias is True"),
    ("Qwen3.5", {"layer_types": ["linear_attention"] * 4}, "must have both kinds"),
    ("Qwen3.5", {"linear_num_value_heads": 3}, "key_heads must divide value_heads"),
])  # fmt: skip
def test_what_new_families_cannot_compute_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        read(golden.family(name), golden.golden_files(name)["config5"] | changes)


@pytest.mark.parametrize("name, published, other", [
    ("Qwen2", {"use_mrope": False}, {"use_mrope": True}),  # Qwen2.5-0.5B, Qwen2.5-Math, DeepSeek-R1-Distill-Qwen
    ("Qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}, {}),  # Qwen2.5-1M
    ("Llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {}}},
     {"rope_interleaved": True}),  # SmolLM2
    ("Phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
     {"lm_head_bias": True}),  # Phi-4-mini
    ("Qwen3Moe", {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
     {"qkv_bias": True, "shared_expert_intermediate_size": 64, "use_qk_norm": False}),  # Qwen3-Coder
    ("GPT2", {"n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1}, {}),
    ("Gemma2", {"sliding_window_size": 6, "_attn_implementation": "eager"}, {"sliding_window_size": 7}),  # 9B and 27B
    ("Qwen3.5", {"output_gate_type": "swish"}, {"output_gate_type": "sigmoid"}),  # Qwen3.6
    ("GPTNeoX", {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}, {}),  # GPT-NeoX 20B
    ("Llama", {"max_sequence_length": 2048, "max_length": 4096, "do_sample": True, "temperature": 0.9, "top_p": 0.6,
               "gradient_checkpointing": False}, {}),  # LLaMA 1 and models that transformers 4 has fine-tuned
])  # fmt: skip
def test_keys_that_published_models_have_are_read(name, published, other):
    """As their config.json has them. Those of GPT-2 are of its larger sizes, and of DistilGPT-2."""
    config = golden.golden_files(name)["config4"]
    assert read(FAMILIES[name], config | published) == read(FAMILIES[name], config)
    for key, value in other.items():
        with pytest.raises(ValueError, match=f"{key} is {value!r}; this version supports only"):
            read(FAMILIES[name], config | {key: value})


def test_a_larger_qwen36_has_a_key_about_its_vision_tower():
    inner = golden.golden_files("Qwen3.5")["config5"]
    config = {"model_type": "qwen3_5", "text_config": inner, "vision_config": {}}
    more = {"language_model_only": False, "is_encoder_decoder": False}  # the second where all defaults are written
    assert read(FAMILIES["Qwen3.5"], config | more) == read(FAMILIES["Qwen3.5"], inner)


def test_the_fast_gelu_of_gpt_neox_is_the_tanh_approximation():
    config = golden.golden_files("GPTNeoX")["config4"]
    assert read(FAMILIES["GPTNeoX"], config | {"hidden_act": "gelu_fast"}).activation == "gelu_tanh"


def test_without_sliding_window_the_window_is_the_default_of_transformers_and_null_is_none():
    windowed = {"Mistral": {}, "Qwen2": {"use_sliding_window": True, "max_window_layers": 1}}
    for name, changes in windowed.items():
        config = golden.golden_files(name)["config4"] | changes
        config.pop("sliding_window")
        assert read(FAMILIES[name], config).window == 4096
        assert read(FAMILIES[name], config | {"sliding_window": None}).window is None
    named = {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(ValueError, match="names windowed layers, but sliding_window is null"):
        read(FAMILIES["Qwen2"], config | named)


@pytest.mark.parametrize(
    "name", ["Gemma2", "Gemma3", "GptOss", "Mistral", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3"]
)
def test_a_window_that_is_no_whole_number_is_refused(name):
    """It was truncated in some families, and in SmolLM3 an internal error or a window of half a token."""
    config = golden.golden_files(name)["config4"] | {"layer_types": None}
    if "use_sliding_window" in config:
        config |= {"use_sliding_window": True, "max_window_layers": 0}
    with pytest.raises(ValueError, match=r"sliding_window is 4096\.5; it must be a whole number"):
        read(FAMILIES[name], config | {"sliding_window": 4096.5})
    with pytest.raises(ValueError, match="sliding_window is 'x'; it must be a"):
        read(FAMILIES[name], config | {"sliding_window": "x"})


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3"])
def test_a_window_that_is_not_used_may_be_any_number(name):
    config = golden.golden_files(name)["config4"] | {"use_sliding_window": False, "layer_types": None}
    for unused in (-1, 0, 4096, None):
        assert read(FAMILIES[name], config | {"sliding_window": unused}).window is None


def test_gemma3_is_read_with_both_names_of_its_period():
    config = golden.golden_files("Gemma3")["config4"]
    assert config["sliding_window_pattern"] == 6
    assert read(FAMILIES["Gemma3"], config | {"_sliding_window_pattern": 6}) == read(FAMILIES["Gemma3"], config)


def test_numbers_of_gemma4_layers_may_begin_with_zeros():
    """As transformers writes them where there are more than ten."""
    config = golden.golden_files("Gemma4")["config5"] | {"num_hidden_layers": 12, "layer_types": None}
    layers = {"05": {"head_dim": 12, "num_key_value_heads": 1}, "11": {"head_dim": 12, "num_key_value_heads": 1}}
    cfg = read(FAMILIES["Gemma4"], config | {"per_layer_config": layers})
    assert (cfg.full.head_dim, cfg.full.kv_heads) == (12, 1)
    with pytest.raises(ValueError, match="absent for others"):
        read(FAMILIES["Gemma4"], config | {"per_layer_config": {"04": {"head_dim": 12}, **layers}})


def test_the_ropes_of_gemma4_have_defaults_only_where_all_are_left_out():
    """transformers' default ropes stand for all of rope_parameters; in them its defaults are those of a rope."""
    config = golden.golden_files("Gemma4")["config5"]
    without = read(FAMILIES["Gemma4"], config | {"rope_parameters": None})
    assert without.rope == ProportionalRope(share=0.25)
    assert (without.rope_theta, without.window_rope_theta) == (1e6, 1e4)
    near = {"rope_theta": 5e3}
    of = lambda full: config | {"rope_parameters": {"full_attention": full, "sliding_attention": near}}
    assert read(FAMILIES["Gemma4"], of({"rope_theta": 2e4})).rope is None
    proportional = read(FAMILIES["Gemma4"], of({"rope_theta": 2e4, "rope_type": "proportional"}))
    assert (proportional.rope, proportional.rope_theta) == (ProportionalRope(share=1.0), 2e4)
    with pytest.raises(ValueError, match="rope_parameters: full_attention has no 'rope_theta'"):
        read(FAMILIES["Gemma4"], of({"rope_type": "proportional"}))


@pytest.mark.parametrize("name, kind", [("Qwen3.5", "qwen3_5"), ("Qwen3.5Moe", "qwen3_5_moe")])
def test_a_larger_qwen35_says_beside_its_text_whether_the_head_is_tied(name, kind):
    inner = {key: value for key, value in golden.golden_files(name)["config5"].items() if key != "tie_word_embeddings"}
    around = {"model_type": kind, "text_config": inner, "vision_config": {}, "tie_word_embeddings": True}
    assert family_of(around) is FAMILIES[name] and read(FAMILIES[name], around).tied
    grids = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    rope = inner["rope_parameters"] | grids
    assert read(FAMILIES[name], around | {"text_config": inner | {"rope_parameters": rope}}).tied


def test_our_own_decoder_is_exported_as_the_family_that_can_say_it():
    cfg = Decoder(vocab_size=64)
    assert describe(cfg)[0] is FAMILIES["Qwen3"]
    family, config = describe(Decoder(vocab_size=64, qk_norm=None, tied=False))
    assert family is FAMILIES["Llama"] and not config["tie_word_embeddings"]
    with pytest.raises(ValueError, match=r"no family.*Decoder.activation = 'relu'"):
        describe(Decoder(vocab_size=64, activation="relu"))


def test_a_folder_and_its_dtype(tmp_path):
    folder = golden.write(tmp_path / "model", dtype="bfloat16")
    cfg, params = opened(folder, param_dtype="bfloat16", dtype="bfloat16")
    export(params, cfg, tmp_path / "out", dtype="bfloat16", max_bytes=1 << 30)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    actual, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    for label, tensor in original.items():
        np.testing.assert_array_equal(actual[label], tensor, strict=True)
    assert decoder_of(Published(path=str(tmp_path / "out")))[0] is FAMILIES["Llama"]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_is_read_out_of_a_larger_one(prefix, tmp_path):
    plain = golden.write(tmp_path / "plain", "Gemma3")
    inner = {name: value for name, value in golden.golden_files("Gemma3")["config5"].items() if name != "architectures"}
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
    export(params, cfg, tmp_path / "out", dtype="float32", max_bytes=1 << 30, family=FAMILIES["Gemma3"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
    for other in ("language_model.model.", "model.language_model."):  # names of versions 4.51 and 4.52 of transformers
        for parts in (("vision_tower.encoder.layers.0.fc1", other + "layers.0.mlp.down_proj"), ("vision_tower.fc1",)):
            adapter = tmp_path / f"{other}{len(parts)}"
            adapter.mkdir()
            size = {"A": (1, cfg.mlp_width), "B": (cfg.width, 1)}
            save_file({f"base_model.model.{part}.lora_{side}.weight": np.ones(size[side], np.float32)
                       for part in parts for side in "AB"}, adapter / "adapter_model.safetensors")  # fmt: skip
            settings = {"peft_type": "LORA", "task_type": "SEQ_2_SEQ_LM", "lora_alpha": 1, "r": 1}
            (adapter / "adapter_config.json").write_text(json.dumps(settings))
            if len(parts) == 1:
                with pytest.raises(ValueError, match="adapts nothing of the text model"):
                    opened(folder, adapter=str(adapter))
            else:
                down = np.asarray(opened(folder, adapter=str(adapter))[1]["layers"]["down"])
                np.testing.assert_array_equal(down[0], params["layers"]["down"][0] + 1)  # W + 1 * 1 1^T
                np.testing.assert_array_equal(down[1:], params["layers"]["down"][1:])
    (folder / "config.json").write_text(json.dumps(around | {"twist": 1}))
    with pytest.raises(ValueError, match="twist = 1"):
        opened(folder)
    (folder / "config.json").write_text(json.dumps(around | {"text_config": inner | {"turn": 1}}))
    with pytest.raises(ValueError, match=r"text_config has unknown keys .* turn = 1"):
        opened(folder)


@pytest.mark.parametrize("prefix, head", [("language_model.model.", "language_model.lm_head.weight"),
                                          ("model.language_model.", "lm_head.weight")])  # fmt: skip
@pytest.mark.parametrize("window", [6, None])
def test_the_text_model_of_mistral_small_31_is_read(prefix, head, window, tmp_path):
    """By the names of the published files, and by those of transformers 5. A null window is none here too."""
    plain = golden.write(tmp_path / "plain", "Mistral")
    inner = golden.golden_files("Mistral")["config4"] | {"sliding_window": window}
    (plain / "config.json").write_text(json.dumps(inner))
    text = {key: value for key, value in inner.items() if key != "architectures"}
    around = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text,
              "vision_config": {"hidden_size": 8}, "image_token_index": 10, "multimodal_projector_bias": False,
              "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
              "tie_word_embeddings": True}  # fmt: skip
    folder = tmp_path / "around"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(around))
    rows = {head if name == "lm_head.weight" else name.replace("model.", prefix, 1): x
            for name, x in golden.tensors("Mistral").items()}  # fmt: skip
    start = "" if prefix.startswith("language_model") else "model."
    for outside in ("vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"):
        rows[start + outside] = np.ones((2, 2), np.float32)
    save_file(rows, folder / "model.safetensors")
    cfg, params = opened(folder)
    assert cfg == opened(plain)[0] and cfg.window == window and not cfg.tied
    jax.tree.map(np.testing.assert_array_equal, params, opened(plain)[1])
    export(params, cfg, tmp_path / "out", dtype="float32", max_bytes=1 << 30, family=FAMILIES["Mistral"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    assert classifiers(FAMILIES["Mistral"]) == ("MistralForSequenceClassification",)  # its text model has no other name


@pytest.mark.parametrize("kind", ["ministral3", "mistral4"])
def test_another_text_model_in_a_mistral3_is_refused(kind):
    """They have the same architecture around them; ministral3 may have the same keys too."""
    around = {"model_type": "mistral3", "text_config": golden.golden_files("Mistral")["config4"], "vision_config": {}}
    read(FAMILIES["Mistral"], around)
    with pytest.raises(ValueError, match=f"text_config: model_type is '{kind}'; this version supports only 'mistral'"):
        read(FAMILIES["Mistral"], around | {"text_config": around["text_config"] | {"model_type": kind}})


def test_keys_are_sorted_by_what_becomes_of_them():
    config = golden.golden_files("Llama")["config4"]
    actual = sort_keys(FAMILIES["Llama"], config | {"twist": 1, "use_cache": True, "flavour": None})
    assert "hidden_size" in actual.read and "use_cache" in actual.ignored
    assert actual.unknown == ("twist",)
    around = {"model_type": "gemma3", "text_config": {"hidden_size": 8, "turn": 1}, "vision_config": {}, "twist": 2}
    actual = sort_keys(FAMILIES["Gemma3"], around)
    assert {"hidden_size", "vocab_size", "text_config"} <= set(actual.read)
    assert "vision_config" in actual.ignored and set(actual.unknown) == {"turn", "twist"}


def test_a_decoder_of_linear_layers_alone_has_no_family():
    # Two layers of the default cycle, three linear and one full: both are linear.
    linear = Linear(key_heads=1, value_heads=2, key_dim=8, value_dim=8)
    with pytest.raises(ValueError, match=r"no family can represent this decoder; the nearest, .*linear"):
        describe(Decoder(layers=2, vocab_size=8, linear=linear))
