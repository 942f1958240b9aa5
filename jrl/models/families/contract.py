"""A published family: the conversion between its config.json and a Decoder, and the names and layouts of its
tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrl.models.rope import LongRope
from jrl.models.shape import LARGEST, Decoder

LAYER_COUNTS = ("num_hidden_layers", "n_layer")
MOST = 1 << 30  # the largest count that a config.json may hold


class Pick(NamedTuple):
    """A published dimension of `of` entries; the leaf is entry `index`."""

    index: int
    of: int


class Place(NamedTuple):
    """The published tensors of a leaf: one for each layer, or for each expert of each layer.

    `dims` has an entry for each dimension of a tensor: the leaf's own axes (without the layers' and, where every expert
    has its own tensor, the experts'), flattened in row-major order, with Picks between them. A torch linear weight
    [out, in] of a leaf [D, H, K] is ((1, 2), (0,)). Leaves that name the same tensor are joined along dimension `join`,
    in the order of the family's table.
    """

    name: str  # the first "{}" is the index of the layer, a second that of the expert
    dims: tuple[tuple[int | Pick, ...], ...]
    join: int | None = None

    @property
    def each_expert(self) -> bool:
        return self.name.count("{}") == 2


CLASSIFIER = "ForSequenceClassification"  # the end of the names of architectures with a label head and no token head
SCORE = Place("score.weight", ((2,), (0, 1)))  # of a reward head [1, D, outputs], in every family


class Wrapped(NamedTuple):
    """A larger published model that holds one of the family in its `text_config`: only the text model is read."""

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]  # defaults of text_config for keys that the family requires
    harmless: tuple[str, ...]  # keys next to text_config that do not affect text
    prefixes: tuple[str, ...]  # alternatives to the first part of a tensor's name ("model.")
    ignored: tuple[str, ...]  # patterns of tensors outside the text model
    inherited: tuple[str, ...] = ()  # keys of the text model that may be next to text_config


class Family(NamedTuple):
    """A row of the table. `read` and `write` are inverse on what the family can represent."""

    model_type: str  # config.json's
    architecture: str  # config.json's, of the language model
    keys: tuple[str, ...]  # of config.json that `read` maps, besides those of every family
    harmless: tuple[str, ...]  # keys of config.json that do not affect the computation
    read: Callable[[Keys], Decoder]
    write: Callable[[Decoder], dict[str, Any]]  # best effort: reading it again shows what the family cannot represent
    places: Mapping[str, Place]  # leaf of a layer, or of the tree -> its published tensors
    ignored: tuple[str, ...] = ()  # patterns of published tensors without learned weights
    wrapped: Wrapped | None = None
    regrouped: Mapping[
        str, Place
    ] = {}  # leaves of experts as some folders store them: joined, or separate; never written
    pad_id: int | None = None  # a classifier's padding token where its config.json omits it


REQUIRED = object()

# Keys that every family reads, and the values that it computes.
EVERY = {"is_encoder_decoder": (False,), "add_cross_attention": (False,), "is_decoder": (False, True),
         "pruned_heads": ({},), "rope_interleaved": (False,), "use_mrope": (False,)}  # fmt: skip

# Keys of every family about the writer, the kernels, generation, training or the tokenizer.
HARMLESS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
        "attn_implementation", "auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
        "cross_attention_hidden_size", "custom_pipelines", "decoder_start_token_id", "dtype", "eos_token_id",
        "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range", "is_llama_config", "jrl_score_at",
        "label2id", "max_position_embeddings", "max_sequence_length", "model_type", "num_labels", "output_attentions",
        "output_hidden_states", "pad_token_id", "prefix", "problem_type", "return_dict", "sep_token_id",
        "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "torch_dtype",
        "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
        "use_bfloat16", "use_cache",
        # Settings of generation, which transformers 4 wrote here too.
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
        "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
        "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
        "typical_p",
    }
)  # fmt: skip


class Keys:
    """A config.json being read. Records the keys that were read, so that unread ones can be reported."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config = config
        self.asked: set[str] = set()
        self.where = where

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns the value of a key; null counts as missing. Raises ValueError where there is no value and no
        default."""
        self.asked.add(name)
        value = self._config.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ValueError(f"{self.where} has no {name!r}, which the computation needs")
        return default

    def maybe(self, name: str, default: float | None) -> float | None:
        """Returns a number, or None where the key is null; `default` where it is missing."""
        self.asked.add(name)
        return self.number(name) if self._config.get(name) is not None else None if name in self._config else default

    def maybe_count(self, name: str, default: int | None) -> int | None:
        """Returns a whole number, or None where the key is null; `default` where it is missing."""
        return None if self.maybe(name, default) is None else self.count(name, default)

    def count(self, name: str, default: Any = REQUIRED) -> int:
        value = self.take(name, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.where}: {name} is {value!r:.200}; it must be a whole number of at least 1")
        # Before anything is counted out: lists have an entry for every layer.
        most = LARGEST["layers"] if name in LAYER_COUNTS else MOST
        if value > most:
            raise ValueError(f"{self.where}: {name} is {value}; at most {most} can be read")
        return value

    def number(self, name: str, default: Any = REQUIRED) -> float:
        value = self.take(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{self.where}: {name} is {value!r:.200}; it must be a finite number above 0")
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        value = self.take(name, default)
        if type(value) is not bool:
            raise ValueError(f"{self.where}: {name} is {value!r}; it must be true or false")
        return value

    def one_of(self, name: str, options: Mapping[str, str], default: Any = REQUIRED) -> str:
        """Returns our name for a published value. Raises ValueError for a value that is not in `options`."""
        value = self.take(name, default)
        if not isinstance(value, str) or value not in options:
            raise ValueError(f"{self.where}: {name} is {value!r}; this version supports {', '.join(options)}")
        return options[value]

    def expect(self, name: str, *allowed: Any) -> None:
        """Raises ValueError unless a key is missing, null, or one of `allowed`."""
        value = self.take(name, None)
        if value is not None and value not in allowed:
            raise ValueError(
                f"{self.where}: {name} is {value!r}; this version supports only {' or '.join(map(repr, allowed))}"
            )

    def inside(self, name: str) -> Keys | None:
        """Returns a nested object, to be read and closed by itself; None where it is missing."""
        value = self.take(name, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {name} is {value!r}; it must be an object")
        return Keys(value, f"{self.where}: {name}")

    def close(self, harmless: frozenset[str] | set[str] = frozenset()) -> None:
        """Raises ValueError naming every unknown key. A null counts as missing."""
        unknown = sorted(
            name for name, value in self._config.items()
            if value is not None and name not in self.asked and name not in harmless
        )  # fmt: skip
        if unknown:
            listed = ", ".join(f"{name} = {str(self._config[name])[:60]}" for name in unknown)
            quantized = (
                ". jrl reads only floating-point weights: take the model that was quantized, or dequantize this one "
                "with the tool that did it (where its tensors are floating-point already, remove the key); LoRA.base "
                "quantizes frozen weights as they are read"
            )
            advice = quantized if {"quantization_config", "quantization"} & {*unknown} else ""
            raise ValueError(f"{self.where} has unknown keys that may change the computation: {listed}{advice}")


def read(family: Family, config: Mapping[str, Any], where: str = "config.json") -> Decoder:
    """Returns the decoder that a published config.json describes.

    Raises: ValueError naming the key that is missing, unknown, or has an unsupported value.
    """
    if is_wrapped(family, config):
        outer = Keys(config, where)
        _expect_every(outer)
        outer.inside("text_config")
        outer.close(HARMLESS | set(family.wrapped.harmless) | set(family.wrapped.inherited))
        config, where = text_config(family, config), f"{where}: text_config"
    keys = Keys(config, where)
    _expect_every(keys)
    try:
        cfg = family.read(keys)
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise ValueError(f"{where}: a value is invalid for {family.model_type}: {error}") from error
    keys.close(HARMLESS | set(family.harmless))
    return cfg


def _expect_every(keys: Keys) -> None:
    for name, allowed in EVERY.items():
        keys.expect(name, *allowed)


def is_wrapped(family: Family, config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a larger model around one of the family."""
    return family.wrapped is not None and config.get("model_type") == family.wrapped.model_type


def text_config(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the text model, wrapped or not."""
    if not is_wrapped(family, config):
        return dict(config)
    inner = config.get("text_config") or {}
    around = {name: config[name] for name in family.wrapped.inherited if config.get(name) is not None}
    outside = {**family.wrapped.defaults, **around}
    # A null counts as missing for these keys; for others it may mean something, as in sliding_window.
    return {**outside, **{name: value for name, value in inner.items() if value is not None or name not in outside}}


class Sorted(NamedTuple):
    """The keys of a config.json by their use."""

    read: tuple[str, ...]  # the computation depends on them
    ignored: tuple[str, ...]  # do not affect the computation
    unknown: tuple[str, ...]  # rejected


def sort_keys(family: Family, config: Mapping[str, Any]) -> Sorted:
    """Returns the keys that are not null, by their use. `read` also rejects invalid values."""
    inner = text_config(family, config)
    around = [name for name in config if name not in inner] if is_wrapped(family, config) else []
    present = [name for name, value in inner.items() if value is not None] + around
    known = {*family.keys, *EVERY, *(("text_config",) if around else ())}
    ignored = (HARMLESS | set(family.harmless) | set(family.wrapped.harmless if around else ())) - known
    return Sorted(
        tuple(name for name in present if name in known),
        tuple(name for name in present if name in ignored),
        tuple(name for name in present if name not in known | ignored),
    )


def canonical(cfg: Decoder) -> Decoder:
    """Returns `cfg` in a canonical form, with the options that no family has (dtypes, remat, attention kernels,
    lengths) at their defaults."""
    layers = range(cfg.layers)
    sparse = tuple(map(cfg.sparse, layers))
    windowed, rotates = tuple(map(cfg.windowed, layers)), tuple(map(cfg.rotates, layers))
    dense = any(map(cfg.dense, layers))
    same_rope = cfg.window_rope_theta == cfg.rope_theta and cfg.rope is None
    plain = Decoder()
    linear_layers = tuple(map(cfg.linear.at, layers)) if cfg.linear else ()
    # Fewer layers than the cycle may be of one kind, which Linear.layers does not take.
    linear = dataclasses.replace(cfg.linear, layers=linear_layers) if len({*linear_layers}) == 2 else cfg.linear
    rope = dataclasses.replace(cfg.rope, longest=None) if isinstance(cfg.rope, LongRope) else cfg.rope
    return dataclasses.replace(
        cfg,
        rope=rope,
        window=cfg.window if any(windowed) else None,
        window_layers=windowed,
        window_rope_theta=cfg.window_rope_theta if any(windowed) and not same_rope else None,
        rotary_dim=cfg.rotated if any(rotates) else 0,
        rotary_layers=rotates,
        rope_theta=cfg.rope_theta if any(rotates) else plain.rope_theta,
        query_scale=cfg.head_dim**-0.5 if cfg.query_scale is None else cfg.query_scale,
        experts=dataclasses.replace(cfg.experts, layers=sparse) if any(sparse) else None,
        linear=linear,
        shared_mlp_width=cfg.shared_mlp_width if cfg.shared_layers else None,
        mlp=cfg.mlp if dense else plain.mlp,
        mlp_width=cfg.mlp_width if dense else plain.mlp_width,
        mlp_bias=cfg.mlp_bias and dense,
        dtype=plain.dtype,
        param_dtype=plain.param_dtype,
        remat=plain.remat,
        attention=plain.attention,
        attention_block=plain.attention_block,
    )
