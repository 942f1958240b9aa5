"""Chooses what each 'auto' is on the devices of a run: the attention kernels, how layers are decoded, and on TPUs
what multiplies the experts of a decoded token.

On TPUs splash attention stores no scores, and ragged attention reads the cache in place; with the reference and scanned
layers XLA copies the whole stacked cache in every layer of every decode step (docs/performance.md). The reference is
for CPUs, GPUs and what the kernels do not support.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jrl.device.sharding import BATCH_AXES, num_shards
from jrl.experiment import Config, Online, completion_length, correction_length, stage_names
from jrl.learning.layout import Learner
from jrl.models.attention.fused import has_expert_activation
from jrl.models.attention.fused_blocks import expert_block
from jrl.models.attention.kernels import LANES, check_ragged
from jrl.models.shape import Decoder
from jrl.rollout.strategies.partial import Partial, tokens_before_last

AUTO = "auto"
EXPERTS = "experts of a decoded token"
LOGITS_BYTES = 2**28  # of a row's logits that exist at once by default
PREFILL_CHUNK = 2048  # tokens of a prompt that a TPU prefills at once: enough to fill the matrix unit
LARGEST_CHUNK = 1024  # positions: longer chunks compute more positions that nobody reads


class Choice(NamedTuple):
    """The value chosen for an 'auto', and the reason if it is not the kernel."""

    field: str  # of the configuration; or EXPERTS, which no field chooses
    value: str | int
    reason: str | None


def choose_kernels(
    config: Config,
    cfg: Any,
    platform: str,
    sizes: Mapping[str, int],
    sampling_sizes: Mapping[str, int] | None = None,
) -> tuple[Config, list[Choice]]:
    """Returns `config` with every 'auto' of a kernel replaced for devices of a platform, and what was chosen.

    Args:
      cfg: the model's configuration, as its functions take it.
      platform: cpu, gpu or tpu. sizes: of the mesh's axes.
      sampling_sizes: likewise of separate sampling devices; evaluations sample on the learner's. None: there are none.

    Raises: ValueError for a choice that aborts the TPUs' compiler.
    """
    model, sampler, choices = config.model, config.sampler, []
    meshes = (sizes,) if sampling_sizes is None else (sizes, sampling_sizes)
    sampled_over = [mesh["tensor"] for mesh in meshes]
    learners = [chosen_learner(stage.learner, cfg, platform, sizes["tensor"]) for stage in config.stages]
    stages = tuple(dataclasses.replace(stage, learner=learner) for stage, learner in zip(config.stages, learners))
    for name, stage, learner in zip(stage_names(config.stages), config.stages, learners):
        section = f"{name}.Learner" if len(config.stages) > 1 else "Learner"
        for field in ("logprobs", "logprob_chunk"):
            if getattr(learner, field) != getattr(stage.learner, field):
                choices.append(Choice(f"{section}.{field}", getattr(learner, field), None))

    def chosen(part: Any, name: str, value: str | int, reason: str | None) -> Any:
        choices.append(Choice(f"{type(part).__name__}.{name}", value, reason))
        return dataclasses.replace(part, **{name: value})

    if getattr(model, "attention", None) == AUTO:
        reason = no_splash(config, cfg, platform)
        model = chosen(model, "attention", "reference" if reason else "splash", reason)
    if sampler.attention == AUTO:
        reason = no_ragged(config, cfg, platform, sampled_over)
        sampler = chosen(sampler, "attention", "reference" if reason else "ragged", reason)
    if sampler.layers == AUTO:
        scanned = sampler.attention == "ragged"
        sampler = chosen(sampler, "layers", "scanned" if scanned else "unrolled", None)
    if platform == "tpu" and (sampler.attention, sampler.layers) == ("ragged", "unrolled") and max(sampled_over) > 1:
        raise ValueError(
            f"Sampler.layers='unrolled' with Sampler.attention='ragged' over MeshShape.tensor={max(sampled_over)}: "
            "TPUs' compiler (libtpu 0.0.42.1) aborts where heads are sharded; set Sampler.layers='scanned' or leave "
            "it out"
        )
    if platform == "tpu" and sampler.prefill_chunk is None and longest_prefilled(config) > PREFILL_CHUNK:
        sampler = chosen(sampler, "prefill_chunk", PREFILL_CHUNK, None)
    if platform == "tpu" and isinstance(cfg, Decoder) and cfg.experts is not None:
        reason = no_expert_kernel(dataclasses.replace(config, sampler=sampler), cfg, meshes[-1])
        choices.append(Choice(EXPERTS, "XLA" if reason else "kernel", reason))
    return dataclasses.replace(config, model=model, sampler=sampler, stages=stages), choices


def longest_prefilled(config: Config) -> int:
    """Returns the most tokens of a row that the sampler of any stage prefills: a prompt, possibly with a completion to
    correct or continue, or with the segments of a completion that are already sampled."""
    lengths = [config.data.prompt_length]
    for stage in config.stages:
        if isinstance(stage, Online) and stage.corrector is not None:
            lengths.append(correction_length(stage, config))
        if isinstance(stage, Online) and stage.strategy is not None:
            before = completion_length(stage, config)
            if isinstance(stage.strategy, Partial):
                before = tokens_before_last(before, stage.strategy.tokens)
            lengths.append(config.data.prompt_length + before)
    return max(lengths)


def chosen_learner(learner: Learner, cfg: Any, platform: str, tensor: int) -> Learner:
    """Returns a stage's learner with the program for log-probs and its chunk size chosen."""
    if learner.logprobs == AUTO:
        parallel = platform == "tpu" and isinstance(cfg, Decoder)
        learner = dataclasses.replace(learner, logprobs="vocab_parallel" if parallel else "reference")
    if learner.logprobs != "vocab_parallel" or learner.logprob_chunk is not None:
        return learner
    position = cfg.vocab_size // tensor * 4  # bytes of a position's logits in float32
    fits = max(LOGITS_BYTES // position, LANES)
    return dataclasses.replace(learner, logprob_chunk=min(2 ** (fits.bit_length() - 1), LARGEST_CHUNK))


def no_splash(config: Config, cfg: Any, platform: str) -> str | None:
    """Returns why attention over rows does not use the splash kernel; None if it does."""
    if (reason := no_kernel(cfg, platform)) is not None:
        return reason
    if cfg.attention_block is not None:
        return "attention_block is of the reference"
    sharing = [stage for stage in config.stages if isinstance(stage, Online) and stage.learner.prefix_sharing != "none"]
    if sharing:
        return "with Learner.prefix_sharing a token sees two segments"
    widths = {cfg.head_dim} | ({cfg.full.head_dim} if cfg.full is not None else set())
    if odd := sorted(width for width in widths if width % (LANES // 2)):
        return f"heads of {odd[0]} are not a multiple of {LANES // 2}"
    return None


def no_ragged(config: Config, cfg: Any, platform: str, tensor: Sequence[int]) -> str | None:
    """Returns why attention over the cache does not use the ragged kernel; None if it does.

    Args:
      tensor: devices along the tensor axis, of every mesh that samples.
    """
    if (reason := no_kernel(cfg, platform)) is not None:
        return reason
    if config.sampler.kv_layout != "token_major":
        return f"Sampler.kv_layout={config.sampler.kv_layout!r} is of the reference"
    try:
        for devices in tensor:
            check_ragged(cfg, devices)
    except ValueError as error:
        return str(error).split(";")[0]
    return None


def no_expert_kernel(config: Config, cfg: Decoder, sizes: Mapping[str, int]) -> str | None:
    """Returns why XLA multiplies the experts of decoded tokens, which copies all experts in every layer; None if the
    kernel does (`models.attention.fused`).

    Args:
      sizes: of the axes of the mesh that samples.
    """
    sampler, adapter = config.sampler, config.adapter
    if sampler.attention != "ragged":
        return f"Sampler.attention={sampler.attention!r}"
    if adapter is not None and adapter.base is not None:
        return f"LoRA.base={adapter.base!r}"
    if adapter is not None and adapter.sampling == "unmerged" and any(t.startswith("expert") for t in adapter.targets):
        return "adapters of experts with LoRA.sampling='unmerged'"
    if not has_expert_activation(cfg):
        return f"no kernel for the activation {cfg.activation!r}"
    shards = num_shards(BATCH_AXES, sizes)
    # Prompts are padded to a multiple of the shards.
    local = [-(-stage.prompts // shards) * stage.samples for stage in config.stages if isinstance(stage, Online)]
    rows = min([sampler.slots, *([max(local)] if local else [])])
    together, share = rows * sizes["expert"], cfg.experts.width // sizes["tensor"]
    if expert_block(together, cfg.width, share, jnp.dtype(cfg.dtype).itemsize) is None:
        return f"{together} tokens at once of width {cfg.width} do not fit a core's memory"
    return None


def no_kernel(cfg: Any, platform: str) -> str | None:
    """Returns why a model can use no attention kernel on devices of a platform; None if it can."""
    if platform != "tpu":
        return f"no kernel for {platform.upper()}s"
    if not isinstance(cfg, Decoder):
        return "the model is one of your own"
    return "dtype='float64' needs the reference" if cfg.dtype == "float64" else None


def sentence(choice: Choice) -> str:
    """Returns a choice as a run prints it."""
    return f"{choice.field} = {choice.value!r}" + (f" ({choice.reason})" if choice.reason else "")
