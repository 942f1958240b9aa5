"""A policy from a run folder or a published folder: its configuration, tokenizer and weights. Reads only."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jrl import config as gin
from jrl import paths
from jrl.config import ConfigError
from jrl.device.sharding import MeshShape, devices_by_slice, replicated
from jrl.experiment import (
    TABLES,
    Config,
    attribute_weights_of,
    config_classes,
    needs_of,
    stage_names,
    trained_heads,
)
from jrl.learning.average import AVERAGE
from jrl.models.attention.kernels import PLATFORMS
from jrl.models.contract import merge_params
from jrl.models.heads import fresh_heads
from jrl.models.pretrained.published import GENERATION, Published, decoder_of, load, read_config
from jrl.models.pretrained.tokenizer import published_tokenizer
from jrl.models.shape import Decoder
from jrl.plugins import load_parts
from jrl.resolve import load_config, load_run_config
from jrl.run import programs
from jrl.run.best import saved_step
from jrl.run.checkpoints.run_state import restore_step
from jrl.run.identity import with_saved_model
from jrl.run.policy import Policy, open_policy, root_key
from jrl.run.run_hash import saved_steps
from jrl.run.stage_steps import stage_at
from jrl.tasks.example import Message
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.tasks.tokenizers.published import VOCABULARIES, HuggingFace, how_to_convert
from jrl.types import Array, PyTree

# The configuration of a published folder, which has none of its own. Nothing is scored or learned from it.
PLAIN_LENGTHS = {"Data.prompt_length": 128, "Sampler.completion_length": 256}
PLAIN = ("Config.task=@Addition()", "Config.stages=[@Online()]", "Online.objective=@GRPO()",
         *(f"{name}={value}" for name, value in PLAIN_LENGTHS.items()))  # fmt: skip

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A policy and its weights at one step."""

    policy: Policy
    step: int  # 0: a published model
    params: PyTree
    heads: dict[str, Array] = dataclasses.field(default_factory=dict)  # of a role that has some, by name
    attribute_weights: tuple[float, ...] | None = None  # of its reward head's outputs; None: their mean is the score


def open_trained(
    folder: str | Path,
    bindings: Sequence[str] = (),
    step: int | str | None = None,
    config: str | Path | None = None,
    announce: Callable[[int, int], None] | None = None,
    *,
    stage: str | None = None,
    role: str = "policy",
) -> Trained:
    """Opens a model of a run, or of a published folder, on this machine's devices, whatever it was trained on.

    Args:
      bindings: NAME=VALUE, which override the configuration of the run or the published folder. `MeshShape.*` sets the
        devices; without it the configured mesh is used if it fits, else one device.
      step: a saved step; "best": the one with the highest held-out accuracy; None: the newest.
      config: the configuration of a published folder, which has none: a .gin file; None: PLAIN.
      announce: called with (bytes read, bytes in all) while a published folder is read.
      stage: the name of a stage of the run, to open its newest saved step; None: of any stage.
      role: which of the run's models.

    Raises: ValueError if the folder holds no run or no such step, stage or role; ConfigError for a binding that does
      not fit.
    """
    folder = Path(folder)
    check_is_model(folder)
    if is_published(folder):
        if step is not None or stage is not None or role != "policy":
            raise ValueError(f"{folder} is a published model, which has no steps, stages or roles; leave --step, "
                             "--stage and --role out")  # fmt: skip
        return open_published(folder, bindings, config, announce)
    if config is not None:
        raise ValueError(f"{folder} is a run, which has its own configuration; leave --config out, and override single "
                         "fields with NAME=VALUE")  # fmt: skip
    steps = saved_steps(folder)
    if step is not None:
        step = saved_step(folder, step)
    try:
        run_config, parts = load_run_config(folder, bindings)
    except ConfigError as error:
        if not paths.exists(folder / "config.gin"):
            raise ValueError(f"{folder} is not a run folder: it holds no config.gin") from error
        raise
    config = with_saved_model(on_this_machine(run_config, bindings), folder)
    if stage is not None:
        step = step_of_stage(folder, config, stage, step)
    tokenizer = load_tokenizer(folder / "tokenizer", parts.tables["tokenizers"])
    policy = open_policy(config, parts, tokenizer)
    state = policy.programs.init.shape(programs.abstract(root_key(policy), policy.mesh))
    policy_state = state.models["policy"]
    models = {"policy": {"params": policy_state.params, "frozen": policy_state.frozen}}
    reached = stage_at(config, steps[-1] if step is None else step)
    if role != "policy":
        models = {
            "policy": {"frozen": policy_state.frozen},
            role: {"params": policy_state.params, "heads": role_heads(policy, role, reached)},
        }
    restored_step, tree, _ = restore_step(folder / "checkpoints", {"state": {"models": models}}, step, part=True)
    if step is None and restored_step < steps[-1]:
        _log.warning("using the weights of step %d", restored_step)
    saved = tree["state"]["models"]
    params = merge_params(saved["policy"]["frozen"], saved[role]["params"])
    heads, reached = saved[role].get("heads", {}), stage_at(config, restored_step)
    attribute_weights = attribute_weights_of(config.stages, role, parts.tables, reached)
    return Trained(policy, restored_step, params, heads, attribute_weights)


def step_of_stage(folder: Path, config: Config, stage: str, step: int | None) -> int:
    """Returns `step`, or the newest saved one of a stage if it is None. Raises ValueError if there is none."""
    names = stage_names(config.stages)
    if stage not in names:
        raise ValueError(f"{folder} has no stage {stage!r}. Available: {', '.join(names)}")
    i = names.index(stage)
    inside = [saved for saved in saved_steps(folder) if stage_at(config, saved) == i]
    if (step is not None and step not in inside) or not inside:
        wanted = stage if step is None else f"{stage} at step {step}"
        raise ValueError(f"{folder} has no checkpoint of stage {wanted}; its checkpoints are of steps "
                         f"{', '.join(map(str, saved_steps(folder)))}")  # fmt: skip
    return inside[-1] if step is None else step


def role_heads(policy: Policy, role: str, reached: int) -> PyTree:
    """Returns the heads of a role that a stage trains, or of the moving average of one, as shapes. Raises ValueError
    if no stage trains it.

    Args:
      reached: the index of the last stage to count. A role keeps the heads of earlier stages.
    """
    stages, tables = [stage for stage in policy.config.stages[: reached + 1] if stage.steps], policy.parts.tables
    needs = [needs_of(stage, tables) for stage in stages]
    heads: dict[str, dict[str, int]] = {}  # role -> the outputs of its heads, by name
    for stage, need in zip(stages, needs):
        heads.pop(AVERAGE, None)  # every stage makes its own, or none
        for trained, names in trained_heads(stage, need).items():
            heads[trained] = {**heads.get(trained, {}), **{name: need.head_outputs[name] for name in names}}
        if stage.optimizer.average is not None:
            heads[AVERAGE] = heads[stage.trains]
    if role not in heads:
        names = stage_names(policy.config.stages)
        roles = lambda s: [*trained_heads(s, needs_of(s, tables)), *([] if s.optimizer.average is None else [AVERAGE])]
        trains = [i for i, s in enumerate(policy.config.stages) if s.steps and role in roles(s)]
        if later := [names[i] for i in trains if i > reached]:
            raise ValueError(f"the role {role!r} is trained from stage {later[0]!r} on, and this checkpoint is of "
                             f"stage {names[reached]!r}; choose a later --step or --stage")  # fmt: skip
        if trains:
            raise ValueError(f"the role {role!r} ends with stage {names[trains[-1]]!r}, and this checkpoint is of "
                             f"stage {names[reached]!r}; choose an earlier --step or --stage")  # fmt: skip
        raise ValueError(f"the run has no role {role!r}. Available: {', '.join(sorted({'policy', *heads}))}")
    key = jax.eval_shape(jax.random.key, 0)
    fresh = lambda key: fresh_heads([*heads[role]], key, policy.cfg.width, policy.cfg.param_dtype, outputs=heads[role])
    shapes = jax.eval_shape(fresh, key)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(policy.mesh)), shapes)


def is_published(folder: Path) -> bool:
    """Whether a folder is a published model's: config.json, and no run's manifest."""
    return paths.exists(folder / "config.json") and not paths.exists(folder / "manifest.json")


def check_is_model(folder: Path) -> None:
    """Raises ValueError for a folder that is neither a run's nor a published model's."""
    advice = "give the --run folder of jrl train, or the folder of a published model"
    if not paths.exists(folder):
        raise ValueError(f"{folder} does not exist; {advice}")
    saved = folder if folder.name == "checkpoints" else folder.parent
    if saved.name == "checkpoints" and paths.exists(saved.parent / "config.gin"):
        raise ValueError(f"{folder} is inside a run: give {saved.parent}, and the step as an option")
    if paths.exists(folder / "manifest.json") or is_published(folder):
        return
    if paths.exists(folder / "adapter_config.json"):
        raise ValueError(f"{folder} is a PEFT adapter and no model: Published.path is the folder of its base, "
                         f"Published.adapter = '{folder}'")  # fmt: skip
    names = paths.list_dir(folder) if paths.local(folder).is_dir() else []
    if inside := [name for name in names if paths.exists(folder / name / "manifest.json")]:
        raise ValueError(f"{folder} is no run; choose one of the {len(inside)} in it, such as {folder / inside[0]}")
    raise ValueError(
        f"{folder} is neither a run nor a published model: it holds neither manifest.json nor config.json; {advice}"
    )


def open_published(
    folder: Path,
    bindings: Sequence[str],
    file: str | Path | None,
    announce: Callable[[int, int], None] | None,
) -> Trained:
    """Opens the policy of a folder with config.json and safetensors.

    Args:
      file: a .gin file with the task and the verifiers. None: PLAIN, with the sampling settings of
        generation_config.json.

    Raises: ValueError for an inconsistent folder; ConfigError for a binding that does not fit.
    """
    there = [name for name in VOCABULARIES if paths.exists(folder / name)]
    published_bindings = [f"Published.path={str(folder)!r}", "Config.model=@Published()"]
    if file is None:
        published_bindings += [*plain_bindings(folder), *generation_defaults(folder)]
    elif there:
        published_bindings += [f"HuggingFace.path={str(folder)!r}", "Config.tokenizer=@HuggingFace()"]
    bound = {name_of(binding) for binding in bindings}
    published_bindings = [*(binding for binding in published_bindings if name_of(binding) not in bound), *bindings]
    if file is None:
        config, parts = gin.load(None, published_bindings, Config, config_classes(TABLES)), load_parts(())
    else:
        config, parts = load_config(str(file), published_bindings)
    # A recipe may train adapters; the folder has none.
    config = dataclasses.replace(on_this_machine(config, bindings), adapter=None)
    cfg = decoder_of(config.model)[1]
    chosen = config.tokenizer if isinstance(config.tokenizer, HuggingFace) else None
    tokenizer = published_tokenizer(folder, parts.tables["tokenizers"], chosen)
    if tokenizer is None:
        tokenizer = without_tokenizer(folder, cfg)
    policy = open_policy(config, parts, tokenizer)
    return Trained(policy, 0, load(config.model, policy.mesh, announce))


def plain_bindings(folder: Path) -> list[str]:
    """Returns PLAIN, with lengths scaled down in proportion if the model has learned fewer positions."""
    longest = decoder_of(Published(path=str(folder)))[1].learned_positions
    if longest is None or longest >= sum(PLAIN_LENGTHS.values()):
        return list(PLAIN)
    prompt = max(1, longest * PLAIN_LENGTHS["Data.prompt_length"] // sum(PLAIN_LENGTHS.values()))
    fitting = zip(PLAIN_LENGTHS, (prompt, longest - prompt))
    return [*(b for b in PLAIN if name_of(b) not in PLAIN_LENGTHS), *(f"{name}={value}" for name, value in fitting)]


def name_of(binding: str) -> str:
    """Returns what NAME=VALUE binds."""
    return binding.split("=")[0].strip()


def on_this_machine(config: Config, bindings: Sequence[str]) -> Config:
    """Returns `config` with a mesh and attention kernels that this host has, unless the bindings set them."""
    bound = [name_of(binding) for binding in bindings]
    config = dataclasses.replace(config, sampler_mesh=None)  # only training uses it
    if not any(name.startswith("MeshShape.") for name in bound):
        config = dataclasses.replace(config, mesh=mesh_that_fits(config.mesh, jax.devices()))
    platform = jax.devices()[0].platform
    for field, section in (("model", config.model), ("sampler", config.sampler)):
        kernel, name = getattr(section, "attention", "reference"), f"{type(section).__name__}.attention"
        if PLATFORMS.get(kernel, platform) != platform and not any(bound_name.endswith(name) for bound_name in bound):
            warning = "%s=%r is not on this %s: using the reference, whose rounding differs"
            _log.warning(warning, name, kernel, platform.upper())
            config = dataclasses.replace(config, **{field: dataclasses.replace(section, attention="reference")})
    return config


def generation_defaults(folder: Path) -> list[str]:
    """Returns the sampling settings of generation_config.json as bindings; [] if it has none.

    Raises: ValueError for a value that is out of range.
    """
    generation = generation_config(folder)
    limits = {"temperature": (float, 0.0, math.inf), "top_k": (int, -1, math.inf), "top_p": (float, 0.0, 1.0),
              "min_p": (float, 0.0, 1.0)}  # fmt: skip
    for name, (kind, low, high) in limits.items():
        value = generation.get(name)
        is_number = type(value) is int or (kind is float and type(value) is float)
        if value is not None and not (is_number and low <= value <= high):
            raise ValueError(f"{folder / GENERATION}: {name} is {value!r}; it must be a number from {low} to {high}")
    if generation.get("do_sample") is False or generation.get("temperature") == 0:
        return ["Sampler.temperature=None"]
    # In that file these values switch a setting off: a top_k of 0 in transformers, one of -1 in vLLM.
    off = {"top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,)}
    limits_set = {
        name: generation[name]
        for name in limits
        if generation.get(name) is not None and generation[name] not in off.get(name, ())
    }
    return [f"Sampler.{name}={value!r}" for name, value in limits_set.items()]


def unsupported_generation_options(folder: Path) -> list[str]:
    """Returns the sampling options in generation_config.json that jrl does not support, as NAME = VALUE."""
    generation = generation_config(folder)
    plain = {"repetition_penalty": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "num_beams": 1,
             "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "suppress_tokens": None,
             "begin_suppress_tokens": None, "bad_words_ids": None, "forced_bos_token_id": None,
             "forced_eos_token_id": None, "penalty_alpha": None, "top_h": None}  # fmt: skip
    return [
        f"{name} = {generation[name]!r:.60}"
        for name, off in plain.items()
        if generation.get(name) not in (None, off, [])
    ]


def generation_config(folder: Path) -> dict[str, Any]:
    """Returns generation_config.json; {} if there is none. Raises ValueError for one that is not a JSON object."""
    return paths.read_object(folder / GENERATION, within=folder) if paths.exists(folder / GENERATION) else {}


@dataclasses.dataclass(frozen=True)
class NoTokenizer:
    """Takes the place of the tokenizer of a published folder without one: the model reads and writes token ids only."""

    folder: Path
    vocab_size: int
    pad_id: int
    end_ids: tuple[int, ...]

    @property
    def filled(self) -> int:
        return self.vocab_size

    def encode(self, text: str) -> list[int]:
        raise ValueError(
            f"{self.folder} holds no tokenizer ({' or '.join(VOCABULARIES)}){how_to_convert(self.folder)}; without "
            "one, give token ids"
        )

    def encode_prompt(self, messages: Iterable[Message]) -> list[int]:
        return self.encode("")

    def token_bytes(self) -> list[bytes]:
        raise ValueError(f"{self.folder} has no tokenizer, so ids cannot be decoded")

    start_ids = ()


def without_tokenizer(folder: Path, cfg: Decoder) -> NoTokenizer:
    """Returns a NoTokenizer with the ids that end an answer, from generation_config.json or else config.json."""
    config = read_config(folder)
    texts = config.get("text_config")
    files = [texts if isinstance(texts, dict) else {}, config, generation_config(folder)]
    ends = next((file["eos_token_id"] for file in reversed(files) if file.get("eos_token_id") is not None), [])
    ends = ends if isinstance(ends, list) else [ends]
    for i in ends:
        if type(i) is not int or not 0 <= i < cfg.vocab_size:
            raise ValueError(f"{folder} names the eos_token_id {i!r}; the model's ids are 0 to {cfg.vocab_size - 1}")
    return NoTokenizer(folder, cfg.vocab_size, 0, tuple(ends))


def mesh_that_fits(shape: MeshShape, devices: Sequence[Any]) -> MeshShape:
    """Returns `shape` if there are enough devices for it, on one slice if they have fewer slices; else one device."""
    for candidate in (shape, dataclasses.replace(shape, slices=1)):
        try:
            devices_by_slice(devices, math.prod(candidate.sizes(len(devices))), candidate.slices)
        except ValueError:
            continue
        return candidate
    _log.warning("the run's mesh does not fit %d devices; using one", len(devices))
    return MeshShape()
