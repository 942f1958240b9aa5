"""The text models of Gemma 4, as transformers 5.23 computes them: full layers have heads of another shape, later layers
share keys and values, each layer has an input in addition to the stream, and some models an MLP in addition to experts.
"""

from __future__ import annotations

from typing import Any

from jrl.models.experts import Experts
from jrl.models.families.contract import Family, Keys, Place, Wrapped
from jrl.models.families.gemma import PLACES
from jrl.models.families.llama import HEAD_NORMS, MLP, OUT_IN, SHAPE, VECTOR, read_shape, write_shape
from jrl.models.families.rope import layer_flags, layer_types, read_stretch
from jrl.models.rope import ProportionalRope
from jrl.models.shape import Decoder, FullHeads

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
EXPERT_KEYS = ("num_experts", "top_k_experts", "moe_intermediate_size")
OVERRIDES = ("head_dim", "num_key_value_heads")  # of single layers
ROPES = {  # where config.json has no rope_parameters
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_theta": 10_000.0},
}


def read(keys: Keys) -> Decoder:
    keys.expect("attention_bias", False)
    keys.expect("use_bidirectional_attention", "vision")  # no effect on text
    shape = read_shape(keys, tied=True, head_dim=256, kv_heads=4, rope=False)
    layers, declared = shape["layers"], layer_flags(keys, shape["layers"])
    flags = tuple((i + 1) % 6 != 0 for i in range(layers)) if declared is None else declared
    flags = (*flags[:-1], False)  # transformers makes the last layer a full one, regardless of the configuration
    same = keys.flag("attention_k_eq_v", False)
    head_dim, kv_heads = _read_full(keys, shape, flags, same)
    shared = _count(keys, "num_kv_shared_layers", 0)
    inputs = _count(keys, "hidden_size_per_layer_input", 256) or None
    rows = keys.count("vocab_size_per_layer_input", 262_144)
    if inputs is not None and rows != shape["vocab_size"]:
        raise ValueError(
            f"{keys.where}: vocab_size_per_layer_input = {rows} is not vocab_size = {shape['vocab_size']}; this "
            "version computes only tables of one size"
        )
    double = keys.flag("use_double_wide_mlp", False) and shared > 0
    return Decoder(
        **{**shape, "qk_norm": "head"},
        **_read_ropes(keys),
        norm_place="both",
        value_norm=True,
        query_scale=1.0,
        activation=keys.one_of("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        embed_scale=shape["width"] ** 0.5,
        window=keys.count("sliding_window", 512),
        window_layers=flags,
        full=FullHeads(head_dim=head_dim, kv_heads=kv_heads, keys_are_values=same),
        shared_layers=shared,
        shared_mlp_width=2 * shape["mlp_width"] if double else None,
        layer_inputs=inputs,
        layer_scale=True,
        experts=_read_experts(keys),
        logit_cap=keys.maybe("final_logit_softcapping", None),
    )


def _read_experts(keys: Keys) -> Experts | None:
    if not keys.flag("enable_moe_block", False):
        for name in EXPERT_KEYS:
            keys.take(name, None)  # unused without experts
        return None
    count, per_token, width = map(keys.count, EXPERT_KEYS)
    return Experts(count=count, per_token=per_token, width=width, reads="stream", scaled=True, shared_expert="normed")


def _count(keys: Keys, name: str, default: int) -> int:
    """Returns a count that may be 0."""
    value = keys.take(name, default)
    return 0 if type(value) is int and value == 0 else keys.count(name, default)


def _read_full(keys: Keys, shape: dict[str, Any], flags: tuple[bool, ...], same: bool) -> tuple[int, int]:
    """Returns (head_dim, kv_heads) of full layers, given once, or per layer as transformers 5 writes them."""
    head_dim = keys.count("global_head_dim", 512)
    kv_heads = keys.count("num_global_key_value_heads", shape["kv_heads"])
    each = keys.take("per_layer_config", None)
    if each is None:
        return head_dim, kv_heads if same else shape["kv_heads"]
    where, field_of = f"{keys.where}: per_layer_config", {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
    if not isinstance(each, dict) or not all(isinstance(x, dict) and set(x) <= set(OVERRIDES) for x in each.values()):
        raise ValueError(f"{where} is {each!r:.200}; this version supports only {' and '.join(OVERRIDES)} of a layer")
    each = {number.lstrip("0") or "0": layer for number, layer in each.items()}  # transformers writes "05" and "11"
    numbers = {str(i) for i, windowed in enumerate(flags) if not windowed}
    layers = [Keys(each.get(i, {}), f"{where}: {i}") for i in sorted(numbers)]
    overrides = {tuple(layer.count(key, shape[field_of[key]]) for key in OVERRIDES) for layer in layers}
    if len(overrides) != 1 or not set(each) <= numbers:
        raise ValueError(f"{where} must be the same for every full layer, and absent for others; got {each!r:.200}")
    return overrides.pop()


def _read_ropes(keys: Keys) -> dict[str, Any]:
    parameters = keys.inside("rope_parameters") or Keys(ROPES, keys.where)
    full, near = (parameters.inside(name) or Keys({}, f"{parameters.where}: {name}") for name in ROPES)
    parameters.close()
    fields = {"rope_theta": full.number("rope_theta"), "window_rope_theta": near.number("rope_theta")}
    if read_stretch(near, keys) is not None:
        raise ValueError(f"{near.where}: the rope of windowed layers is stretched, which is not supported")
    known = {name: name for name in ("proportional", "default")}
    if full.one_of("rope_type", known, full.take("type", "default")) == "default":
        full.expect("partial_rotary_factor", 1.0)
        full.close()
        return {**fields, "rope": None}
    rope = ProportionalRope(share=full.number("partial_rotary_factor", 1.0), factor=full.number("factor", 1.0))
    full.close()
    return {**fields, "rope": rope}


def write(cfg: Decoder) -> dict[str, Any]:
    full = cfg.full or FullHeads(head_dim=cfg.head_dim, kv_heads=cfg.kv_heads)
    shape = {key: value for key, value in write_shape(cfg).items() if not key.startswith("rope")}
    rope = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if isinstance(cfg.rope, ProportionalRope):
        rope |= {"rope_type": "proportional", "partial_rotary_factor": cfg.rope.share, "factor": cfg.rope.factor}
    near = cfg.rope_theta if cfg.window_rope_theta is None else cfg.window_rope_theta
    heads = {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.kv_heads}
    if full.kv_heads != cfg.kv_heads and not full.keys_are_values:  # num_global_key_value_heads is unused then
        one = {"head_dim": full.head_dim, "num_key_value_heads": full.kv_heads}
        heads = {"per_layer_config": {str(i): one for i in range(cfg.layers) if not cfg.windowed(i)}}
    routed = cfg.experts
    experts = {} if routed is None else dict(zip(EXPERT_KEYS, (routed.count, routed.per_token, routed.width)))
    return {
        **shape,
        **heads,
        "enable_moe_block": routed is not None,
        **experts,
        "hidden_activation": {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(cfg.activation),
        "sliding_window": cfg.window,
        "layer_types": layer_types(cfg),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        },
        "attention_k_eq_v": full.keys_are_values,
        "num_kv_shared_layers": cfg.shared_layers,
        "use_double_wide_mlp": cfg.shared_mlp_width is not None,
        "hidden_size_per_layer_input": cfg.layer_inputs or 0,
        "vocab_size_per_layer_input": cfg.vocab_size,
        "final_logit_softcapping": cfg.logit_cap,
    }


LAYER = "model.layers.{}."
EXPERTS = Place(LAYER + "experts.gate_up_proj", ((0,), (2,), (1,)), join=1)
ATTENTION = {name: place for name, place in PLACES.items() if name in ("q", "k", "v", "o")} | HEAD_NORMS
GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    keys=(*(key for key in SHAPE if key != "hidden_act"), "hidden_activation", "attention_bias", "sliding_window",
          "layer_types", "final_logit_softcapping", "use_bidirectional_attention", "enable_moe_block", *EXPERT_KEYS,
          "attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", "per_layer_config",
          "num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "use_double_wide_mlp",
          "rope_parameters"),
    harmless=("hidden_act",),
    read=read,
    write=write,
    places={
        **PLACES,
        **HEAD_NORMS,
        **{f"full_{name}": place for name, place in ATTENTION.items()},
        **{f"shared_mlp_{name}": MLP[name] for name in ("gate", "up", "down")},
        "layer_embed": Place("model.embed_tokens_per_layer.weight", ((0,), (1,))),
        "layer_project": Place("model.per_layer_model_projection.weight", OUT_IN),
        "layer_norm": Place("model.per_layer_projection_norm.weight", VECTOR),
        "input_gate": Place(LAYER + "per_layer_input_gate.weight", OUT_IN),
        "input_out": Place(LAYER + "per_layer_projection.weight", OUT_IN),
        "input_norm": Place(LAYER + "post_per_layer_input_norm.weight", VECTOR),
        "layer_scale": Place(LAYER + "layer_scalar", VECTOR),
        "router": Place(LAYER + "router.proj.weight", OUT_IN),
        "router_norm": Place(LAYER + "router.scale", VECTOR),
        "expert_scale": Place(LAYER + "router.per_expert_scale", VECTOR),
        "expert_gate": EXPERTS,
        "expert_up": EXPERTS,
        "expert_down": Place(LAYER + "experts.down_proj", ((0,), (2,), (1,))),
        "shared_expert_norm": Place(LAYER + "post_feedforward_layernorm_1.weight", VECTOR),
        "expert_norm": Place(LAYER + "pre_feedforward_layernorm_2.weight", VECTOR),
        "expert_out_norm": Place(LAYER + "post_feedforward_layernorm_2.weight", VECTOR),
    },
    # Layers that read another's keys may be published with their own, which nothing uses.
    ignored=(r"model\.(language_model\.)?layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight",),
    wrapped=Wrapped(
        model_type="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        defaults={},
        harmless=("vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id",
                  "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id", "vision_soft_tokens_per_image",
                  "tie_word_embeddings"),
        prefixes=("model.language_model.", "language_model.model."),
        ignored=(r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*",),
    ),
    pad_id=0,
)  # fmt: skip
