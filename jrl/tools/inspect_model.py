"""Finds what jrl recognizes in a published folder and what it does not, for `jrl doctor DIR`. Changes nothing."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jrl import paths
from jrl.models.families import FAMILIES, family_of, labels_of
from jrl.models.families.contract import Family, sort_keys
from jrl.models.pretrained.published import (
    COMPANIONS,
    GENERATION,
    OWN_TOKENIZER,
    Published,
    account,
    as_stored,
    classifier_of,
    classifier_spec,
    decoder_of,
    plans,
    read_config,
)
from jrl.models.pretrained.tensors import INDEX, SINGLE, open_tensors
from jrl.models.shape import Decoder
from jrl.run.trained import generation_defaults, unsupported_generation_options, without_tokenizer
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.tasks.tokenizers.published import (
    VOCABULARIES,
    HuggingFace,
    PublishedTokenizer,
    build,
    fit_to_embedding,
    how_to_convert,
    rewrites,
)
from jrl.tasks.tokenizers.spelling import NO_UTF8, unspelled
from jrl.types import PyTree

SHOWN = 12  # most names shown of a list


class Finding(NamedTuple):
    good: bool
    text: str


def recognized(folder: Path) -> Iterator[Finding]:
    """Yields findings on the configuration, tensors, tokenizer, chat template, end tokens and sampling defaults."""
    try:
        config = read_config(folder)
        family = family_of(config, str(folder / "config.json"))
    except ValueError as error:
        yield Finding(False, str(error))
        return
    name = next(name for name, row in FAMILIES.items() if row is family)
    yield Finding(True, f"family {name}: {family.architecture}, model_type {family.model_type}")
    keys = sort_keys(family, config)
    yield Finding(True, f"config.json: {len(keys.read)} keys read ({_some(keys.read)})")
    yield Finding(True, f"config.json: {len(keys.ignored)} keys that change nothing here ({_some(keys.ignored)})")
    if keys.unknown:
        yield Finding(False, f"config.json: {len(keys.unknown)} unknown keys ({_some(keys.unknown)})")
    try:
        labels = labels_of(config, str(folder / "config.json"))
        if labels is None:
            cfg, spec = decoder_of(Published(path=str(folder)))[1], None
        else:
            family, cfg, _, pad_id, answer_end = classifier_of(Published(path=str(folder)))
            spec = classifier_spec(cfg, len(labels))
    except ValueError as error:
        yield Finding(False, f"the model is refused: {error}")
        return
    if labels is not None:
        yield Finding(True, f"a classifier, for `jrl score` and Config.reward; its labels: {_some(labels)}")
        position = "the last token" if pad_id is None else f"the last token that is not {pad_id}, its padding"
        position += "; a conversation ends with the token that ends its answer" if answer_end else ""
        yield Finding(True, f"its labels are read at {position}")
    yield Finding(True, shape(cfg))
    yield from tensors(folder, family, cfg, spec)
    yield from tokenizer(folder, cfg)
    yield from sampling(folder)
    yield from others(folder)


def shape(cfg: Decoder) -> str:
    """Returns a description of a decoder on one line."""
    heads = f"{cfg.heads} heads of {cfg.head_dim} over {cfg.kv_heads} of keys and values"
    tied = "tied to the head" if cfg.tied else "not tied to the head"
    shared = "" if cfg.experts is None or cfg.experts.shared_expert is None else " and a shared expert"
    routed = "" if cfg.experts is None else f"{cfg.experts.per_token} of {cfg.experts.count} experts a token{shared}, "
    return f"{cfg.layers} layers of width {cfg.width}, {heads}, {routed}{cfg.vocab_size} rows of the embedding, {tied}"


def tensors(folder: Path, family: Family, cfg: Decoder, spec: PyTree | None) -> Iterator[Finding]:
    """Yields whether every tensor is accounted for. Reads headers, and values only of a head that should be tied."""
    try:
        with open_tensors(folder) as stored:
            family = as_stored(family, stored)
            names = account(family, cfg, stored, spec)
            kinds = collections.Counter(stored.dtypes[name] for name in names.values())
            extra = sorted(stored.shapes.keys() - set(names.values()))
    except (ValueError, ImportError) as error:
        yield Finding(False, str(error))
        return
    size = sum(int(np.prod(plan.shape, dtype=np.int64)) for plan in plans(family, cfg, spec).values())
    dtypes = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    yield Finding(True, f"{len(names)} tensors hold {size:,} parameters ({dtypes}), all accounted for")
    if extra:
        yield Finding(True, f"{len(extra)} tensors are buffers or copies ({_some(extra)})")


def tokenizer(folder: Path, cfg: Decoder) -> Iterator[Finding]:
    """Yields findings on the tokenizer, its chat template and the tokens that end an answer."""
    vocabularies = [name for name in VOCABULARIES if paths.exists(folder / name)]
    try:
        if not vocabularies and paths.exists(folder / OWN_TOKENIZER):
            bundled = load_tokenizer(folder / OWN_TOKENIZER)
            yield Finding(True, f"{OWN_TOKENIZER}/ holds a tokenizer in jrl's form: it fills {bundled.filled} ids of "
                                f"{cfg.vocab_size}; other tools read token ids only")  # fmt: skip
            return
        if not vocabularies and not how_to_convert(folder):
            ends = without_tokenizer(folder, cfg).end_ids
            yield Finding(
                True, f"no tokenizer ({' or '.join(VOCABULARIES)}): token ids only; they end with {ends or None}"
            )
            return
        opened = fit_to_embedding(build(HuggingFace(path=str(folder)), ()), cfg.vocab_size)
    except (ValueError, ImportError) as error:
        yield Finding(False, str(error))
        return
    free = cfg.vocab_size - opened.filled
    yield Finding(True, f"{vocabularies[0]} fills {opened.filled} ids of {cfg.vocab_size} ({free} rows free), "
                        f"{len(opened.controls)} of them controls")  # fmt: skip
    spell = lambda ids: ", ".join(f"{opened.spelled([i])!r} = {i}" for i in ids) or "nothing"
    yield Finding(True, f"an answer ends with {spell(opened.end_ids)}; a text starts with {spell(opened.start_ids)}"
                        f"; padding is {spell([opened.pad_id])}")  # fmt: skip
    if lost := unspelled(opened.pieces) - NO_UTF8:
        yield Finding(True, f"no token spells {len(lost)} of the bytes of UTF-8; a text is encoded without them, as "
                            "transformers does")  # fmt: skip
    yield template(opened)


def template(opened: PublishedTokenizer) -> Finding:
    """Returns whether a tokenizer's chat template leaves earlier turns unchanged when a turn is added."""
    if opened.chat is None:
        return Finding(True, "no chat template: a prompt is sent as plain text")
    try:
        changed = rewrites(opened)
    except ValueError as error:  # the template is invalid, or refuses the conversation
        return Finding(False, f"{error}. It was tried on a conversation of three turns")
    return Finding(True, changed or "the chat template leaves earlier turns unchanged when one is added")


def sampling(folder: Path) -> Iterator[Finding]:
    """Yields the sampling defaults in generation_config.json, and the options that jrl does not support."""
    try:
        defaults, unsupported = generation_defaults(folder), unsupported_generation_options(folder)
    except ValueError as error:
        yield Finding(False, str(error))
        return
    drawn = ", ".join(binding.removeprefix("Sampler.").replace("=", " = ") for binding in defaults)
    yield Finding(True, f"jrl sample draws with {drawn}, as {GENERATION} sets" if defaults
                  else f"{GENERATION} sets no sampling options: jrl sample draws at temperature 1")  # fmt: skip
    if unsupported:
        yield Finding(True, f"{GENERATION} also sets {', '.join(unsupported)}, which this version does not support")


def others(folder: Path) -> Iterator[Finding]:
    """Yields the files that jrl does not read."""
    read = {"config.json", SINGLE, INDEX, OWN_TOKENIZER, *(name.split("/")[0] for name in COMPANIONS)}
    unread = [name for name in paths.list_dir(folder) if name not in read and not name.endswith(".safetensors")]
    if unread:
        yield Finding(True, f"not read: {_some(unread)}")


def _some(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "") or "none"
