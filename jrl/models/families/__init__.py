"""Published model families: one file and one row each, name -> row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jrl.models.families.contract import CLASSIFIER, Family, Keys, canonical, read
from jrl.models.families.gemma import GEMMA2, GEMMA3
from jrl.models.families.gemma4 import GEMMA4
from jrl.models.families.gpt2 import GPT2
from jrl.models.families.gpt_neox import GPT_NEOX
from jrl.models.families.gpt_oss import GPT_OSS
from jrl.models.families.llama import LLAMA
from jrl.models.families.mistral import MISTRAL
from jrl.models.families.mixtral import MIXTRAL
from jrl.models.families.olmo2 import OLMO2, OLMO3
from jrl.models.families.olmoe import OLMOE
from jrl.models.families.phi3 import PHI3
from jrl.models.families.qwen import QWEN2, QWEN3
from jrl.models.families.qwen35 import QWEN35
from jrl.models.families.qwen35_moe import QWEN35_MOE
from jrl.models.families.qwen_moe import QWEN3_MOE
from jrl.models.families.smollm3 import SMOLLM3
from jrl.models.shape import Decoder

SCORE_AT, ANSWER_END = "jrl_score_at", "answer_end"  # a key of a classifier's config.json, and its one value
# A decoder that fits several families is exported as the first one.
FAMILIES: dict[str, Family] = {
    "Llama": LLAMA,
    "Qwen2": QWEN2,
    "Qwen3": QWEN3,
    "Mistral": MISTRAL,
    "OLMo2": OLMO2,
    "OLMo3": OLMO3,
    "SmolLM3": SMOLLM3,
    "Gemma2": GEMMA2,
    "Gemma3": GEMMA3,
    "Phi3": PHI3,
    "GPTNeoX": GPT_NEOX,
    "GPT2": GPT2,
    "Qwen3Moe": QWEN3_MOE,
    "Mixtral": MIXTRAL,
    "OLMoE": OLMOE,
    "GptOss": GPT_OSS,
    "Gemma4": GEMMA4,
    "Qwen3.5": QWEN35,
    "Qwen3.5Moe": QWEN35_MOE,
}


def known() -> str:
    rows = [row for family in FAMILIES.values() for row in (family, family.wrapped) if row is not None]
    return ", ".join(f"{row.architecture} ({row.model_type})" for row in rows)


def family_of(config: Mapping[str, Any], where: str = "config.json") -> Family:
    """Returns the family that a published config.json names. Raises ValueError, listing the known ones, for another."""
    kind, architectures = config.get("model_type"), _architectures(config, where)
    for family in FAMILIES.values():
        if kind == family.model_type and (
            not architectures or {family.architecture, *classifiers(family)} & set(architectures)
        ):
            return family
        if kind is None and family.architecture in architectures:
            return family
        around = family.wrapped
        if (
            around is not None
            and kind == around.model_type
            and (not architectures or around.architecture in architectures)
        ):
            return family
    raise ValueError(
        f"{where}: unknown architecture {', '.join(architectures) or None} of model_type {kind!r}. Known: {known()}"
    )


def _architectures(config: Mapping[str, Any], where: str) -> list[str]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: architectures is {names!r:.200}; it must be a list of names")
    return names


def classifiers(family: Family) -> tuple[str, ...]:
    """Returns the architecture names of a family's classifier in config.json; the text model of a larger model has
    two, where its model_type is its own."""
    stem = family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return (stem + CLASSIFIER, *([f"{stem}Text{CLASSIFIER}"] if family.model_type.endswith("_text") else []))


def labels_of(config: Mapping[str, Any], where: str = "config.json") -> tuple[str, ...] | None:
    """Returns the label names of a classifier, and None for a model that generates tokens.

    Raises: ValueError for labels that are not numbered from 0, and for an invalid number of labels.
    """
    if not any(name.endswith(CLASSIFIER) for name in _architectures(config, where)):
        return None
    id2label = config.get("id2label")
    if id2label is None:
        count = Keys(config, where).count("num_labels", 2)  # transformers omits 2
        id2label = {str(i): f"LABEL_{i}" for i in range(count)}
    if (
        not isinstance(id2label, Mapping)
        or not id2label
        or {str(i) for i in range(len(id2label))} != set(map(str, id2label))
    ):
        raise ValueError(f"{where}: id2label is {id2label!r:.200}; it must name the labels 0, 1, ...")
    return tuple(str(id2label[key]) for key in sorted(id2label, key=int))


def classifier_json(family: Family, labels: int) -> dict[str, Any]:
    """Returns the entries of config.json for a family's classifier with `labels` labels, except its decoder's."""
    names = {str(i): f"LABEL_{i}" for i in range(labels)}
    label_keys = {
        "id2label": names,
        "label2id": {name: int(i) for i, name in names.items()},
        "problem_type": "regression",
    }
    return {"architectures": [classifiers(family)[-1]], "num_labels": labels, **label_keys, SCORE_AT: ANSWER_END}


def reads_answer_end(config: Mapping[str, Any], where: str) -> bool:
    """Whether a classifier's labels are read at the token that ends the answer, as in reward models that jrl trains;
    else after everything that its chat template writes. Raises ValueError for another value of SCORE_AT."""
    at = config.get(SCORE_AT)
    if at not in (None, ANSWER_END):
        raise ValueError(f"{where}: {SCORE_AT} is {at!r:.200}; it must be {ANSWER_END!r}, or absent")
    return at == ANSWER_END


def pad_of(config: Mapping[str, Any], family: Family, where: str = "config.json") -> int | None:
    """Returns the padding token of a classifier, which reads its labels at the last other token; None: at the last
    token.

    transformers writes null for none, and omits the default of the family.

    Raises: ValueError for a value that is not an id.
    """
    pad_id = config.get("pad_token_id", family.pad_id)
    if pad_id is not None and type(pad_id) is not int:
        raise ValueError(f"{where}: pad_token_id is {pad_id!r:.200}; it must be a whole number, or null")
    return pad_id


def describe(cfg: Decoder) -> tuple[Family, dict[str, Any]]:
    """Returns the first family that can represent `cfg`, and its config.json without dtype.

    Raises: ValueError naming the options that the nearest family lacks.
    """
    nearest: tuple[int, str] | None = None
    for name, family in FAMILIES.items():
        config, problem = config_json_of(family, cfg)
        if problem is None:
            return family, config
        if nearest is None or len(problem) < nearest[0]:
            nearest = len(problem), f"{name} has no {', '.join(problem)}"
    raise ValueError(f"no family can represent this decoder; the nearest, {nearest[1]}")


def config_json_of(family: Family, cfg: Decoder) -> tuple[dict[str, Any], list[str] | None]:
    """Returns config.json of `cfg` for a family, and the options that it cannot represent (None: it represents all)."""
    config = {"architectures": [family.architecture], "model_type": family.model_type, **family.write(cfg)}
    expected = canonical(cfg)
    try:
        read_back = canonical(read(family, config))
    except ValueError as error:
        return config, [str(error)]
    fields = [field.name for field in dataclasses.fields(cfg)]
    differs = [f"Decoder.{name} = {getattr(expected, name)!r}" for name in fields
               if getattr(read_back, name) != getattr(expected, name)]  # fmt: skip
    return config, differs or None
