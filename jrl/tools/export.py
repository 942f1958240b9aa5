"""Exports a policy as a folder that other tools load, for `jrl export`."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jrl import paths
from jrl.device.precision import full_precision
from jrl.experiment import needs_of, trained_heads
from jrl.models import decoder
from jrl.models.adapters.lora import dequantize_params, merge
from jrl.models.adapters.matrices import EXPERTS
from jrl.models.contract import abstract, axes
from jrl.models.heads import REWARD
from jrl.models.pretrained import peft
from jrl.models.pretrained.adapters import modules_of, transposed
from jrl.models.pretrained.published import (
    OWN_TOKENIZER,
    Published,
    companions_of,
    decoder_of,
    export,
    length_of,
    plans,
    read_config,
)
from jrl.models.shape import Decoder
from jrl.run.begin_from import origin_of
from jrl.run.trained import NoTokenizer, Trained, is_published, open_trained
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers.contract import SAVED_AS
from jrl.tasks.tokenizers.published import PublishedTokenizer
from jrl.types import PyTree

_log = logging.getLogger(__name__)

SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


def export_policy(
    source: str | Path,
    to: str | Path,
    step: int | str | None = None,
    *,
    dtype: str = "float32",
    max_shard: str = "5GB",
    announce: Callable[[int, int], None] | None = None,
    stage: str | None = None,
    role: str = "policy",
) -> tuple[int, list[str]]:
    """Writes the policy of a run, or of a published folder, to a new folder. Returns (its step, the files written).

    The family is the published model's own, or else the first that can express the decoder. The files of a published
    tokenizer are copied. A tokenizer that the run trained has no published form: it goes into the subfolder
    OWN_TOKENIZER, which `jrl sample` and `jrl eval` read and other tools ignore. Adapters are merged into the weights;
    quantized weights (LoRA.base) are dequantized for it. A role with a reward head is written as a classifier,
    {family}ForSequenceClassification, with one label per output of the head.

    Args:
      to: a folder that does not exist yet, or is empty.
      dtype: of the tensors, "float32" or "bfloat16".
      max_shard: most bytes of one file of tensors, such as "5GB" or "500MB".
      stage, role: see `open_trained`.
      announce: called with (bytes read, total bytes) while a published folder is read.

    Raises: ValueError for a source, a step, a size or a decoder that cannot be exported.
    """
    max_bytes = size_of(max_shard)
    trained = open_trained(source, (), step, announce=announce, stage=stage, role=role)
    head = trained.heads.get(REWARD)
    note_other_models(trained, source, without=None if head is None else (role, REWARD))
    model = trained.policy.config.model
    if not isinstance(trained.policy.cfg, Decoder):
        raise ValueError(f"{type(model).__name__} is a custom model, and has no published format")
    family = decoder_of(model)[0] if isinstance(model, Published) else None
    tokenizer, companions = trained.policy.tokenizer, {}
    if isinstance(tokenizer, PublishedTokenizer):
        companions = {name: data for name, data in tokenizer.files.items() if name != "config.json"}
    elif isinstance(tokenizer, NoTokenizer) and isinstance(model, Published):
        companions = companions_of(model.path)
    config = read_config(model.path) if isinstance(model, Published) else {}
    files = export(
        merged(trained, dtype),
        trained.policy.cfg,
        to,
        dtype=dtype,
        max_bytes=max_bytes,
        family=family,
        companions=companions,
        ids=ids_of(tokenizer, config),
        length=length_of(config),
        head=head,
    )
    if not companions and not isinstance(tokenizer, NoTokenizer):
        files += save_tokenizer(tokenizer, Path(to) / OWN_TOKENIZER)
    return trained.step, files


def save_tokenizer(tokenizer: Any, folder: Path) -> list[str]:
    """Writes a tokenizer in jrl's own format to a new folder. Returns the files written, as FOLDER/NAME."""
    paths.make_dir(folder)
    tokenizer.save(folder)
    kind = paths.read_object(folder / SAVED_AS)["kind"]
    if kind not in TOKENIZERS:
        _log.warning("the tokenizer %s comes from the run's parts: `jrl eval` reads it with a --config that names "
                     "them; `jrl sample` and other tools do not", kind)  # fmt: skip
    return [f"{folder.name}/{name}" for name in paths.list_dir(folder)]


def note_other_models(trained: Trained, source: str | Path, without: tuple[str, str] | None = None) -> None:
    """Logs a warning for every trained head that is not exported and stays in the run.

    Args:
      without: (role, name) of the head that is exported; None: none is.
    """
    if is_published(Path(source)):
        return
    config, tables = trained.policy.config, trained.policy.parts.tables
    trained_by = lambda stage: trained_heads(stage, needs_of(stage, tables))
    heads = [(role, head) for stage in config.stages for role, names in trained_by(stage).items() for head in names]
    for role, head in dict.fromkeys(heads):  # several stages may train one
        if (role, head) != without:
            _log.warning("the %s head of the role %s is not written: it stays in %s", head, role, source)


@full_precision()
def merged(trained: Trained, dtype: str) -> PyTree:
    """Returns the weights with adapters merged in, W + s A B in `dtype`; the run's weights if it has no adapters."""
    policy = trained.policy
    if policy.config.adapter is None:
        return trained.params
    names = axes(policy.model.spec(policy.cfg))
    with jax.set_mesh(policy.mesh):
        return jax.jit(functools.partial(merge, config=policy.config.adapter, names=names, dtype=dtype))(trained.params)


def export_adapter(
    source: str | Path,
    to: str | Path,
    step: int | str | None = None,
    *,
    dtype: str = "float32",
    stage: str | None = None,
    role: str = "policy",
) -> tuple[int, list[str]]:
    """Writes the adapters of a run to a new folder in PEFT's format. Returns (the run's step, the files written).

    Raises: ValueError if the run has no adapters or has adapters to experts, or if its frozen weights are not those of
      a published folder.
    """
    trained = open_trained(source, (), step, stage=stage, role=role)
    note_other_models(trained, source)
    policy = trained.policy
    if policy.config.adapter is None:
        raise ValueError(f"{source} has no adapters (Config.adapter); leave --adapter-only out")
    base = frozen_folder(Path(source))
    if any(name in EXPERTS for name in trained.params.adapters):
        raise ValueError(f"{source} has adapters to experts, whose format differs between versions of PEFT. Leave "
                         "--adapter-only out")  # fmt: skip
    tensor_plans = plans(decoder_of(policy.config.model)[0], policy.cfg)
    params = trained.params
    if policy.config.adapter.kind == "lora":  # only the shapes of the frozen matrices are needed
        params = params._replace(base=abstract(decoder.spec(policy.cfg)))
    elif policy.config.adapter.base is not None:  # DoRA's norms are of dequantized matrices
        full = functools.partial(dequantize_params, names=axes(policy.model.spec(policy.cfg)), dtype="float32")
        with jax.set_mesh(policy.mesh), full_precision():
            params = params._replace(base=jax.jit(full)(params.base))
    modules = dict(modules_of(params, policy.config.adapter, tensor_plans))
    files = peft.write(
        to,
        modules,
        base=base,
        rslora=policy.config.adapter.scaling == "alpha/sqrt(rank)",
        transposed=any(transposed(tensor_plans[f"{name}.weight"].slots[0].place) for name in modules),
        dtype=dtype,
    )
    return trained.step, files


def frozen_folder(run: Path) -> str:
    """Returns the published folder that holds the frozen weights of a run with adapters: its own, or that of the run
    whose adapters it continued. Raises ValueError if no folder holds them."""
    initial, began = json.loads(paths.read_bytes(run / "config.json"))["model"], origin_of(run, None)
    advice = "Leave --adapter-only out"
    if began is not None:
        try:
            adapted = json.loads(paths.read_bytes(began.folder / "config.json"))["adapter"] is not None
        except FileNotFoundError:
            raise ValueError(
                f"the frozen weights of {run} are those of {began.run}, with which it began, and whose config.json is "
                f"not there to say which folder holds them. {advice}"
            ) from None
        if adapted:
            return frozen_folder(began.folder)
        why = f"are those that {began.run} trained"
        advice += f", or export {began.run} and train adapters on that folder"
    elif "path" not in initial:
        why = "were drawn at random"
    elif initial["adapter"] is not None:
        why = f"have the adapter {initial['adapter']} in them"
    else:
        return initial["path"]
    raise ValueError(f"the frozen weights of {run} {why}: no folder holds them, and an adapter without them is of no "
                     f"use. {advice}")  # fmt: skip


def ids_of(tokenizer: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids that begin, end and pad a text: from a published config.json, else from the tokenizer."""
    ends, start = list(tokenizer.end_ids), list(tokenizer.start_ids)
    known = not isinstance(tokenizer, NoTokenizer)
    from_tokenizer = {
        "bos_token_id": start[0] if start else None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": tokenizer.pad_id if known else None,
    }
    return {name: config[name] if config.get(name) is not None else value for name, value in from_tokenizer.items()}


def size_of(text: str) -> int:
    """Returns the bytes of a size such as "5GB", "500MB", "20KB" or "1000". Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*(KB|MB|GB|B)?\s*", text, re.IGNORECASE)
    if match is None or int(match[1]) < 1:
        raise ValueError(f"--max-shard-size is {text!r}; give a size such as 5GB or 500MB")
    return int(match[1]) * SIZES[(match[2] or "B").upper()]
