"""A policy out of a run folder, or out of a published model's: its configuration, tokenizer and weights. Reads only."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from jrl import config as gin
from jrl import paths, programs
from jrl.checkpoints.published import decoder_of, load
from jrl.checkpoints.run_state import restore_step
from jrl.config import ConfigError
from jrl.contents import newest, saved_steps
from jrl.example import Message
from jrl.experiment import TABLES, Config, config_classes
from jrl.job import Policy, open_policy, with_kept_model
from jrl.models.decoder import Decoder
from jrl.parts import load_parts
from jrl.resolve import load_config
from jrl.sharding import MeshShape, replicated
from jrl.tokenizers import load as load_tokenizer
from jrl.tokenizers.published import VOCABULARIES, HuggingFace
from jrl.tokenizers.published import build as build_tokenizer
from jrl.types import Array, PyTree

# What a run's configuration would say: a published folder has none, and nothing of it is scored or learned from.
PLAIN = ("Config.task=@Addition()", "Config.algo=@GRPO()", "Config.model=@Published()", "Data.prompt_length=128",
         "Sampler.completion_length=256")  # fmt: skip

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A policy and its weights at one step."""

    policy: Policy
    step: int  # 0: a published model, as it came
    params: PyTree
    key: Array  # [] typed key, the run's root


def open_trained(folder: str | Path, bindings: Sequence[str] = (), step: int | None = None) -> Trained:
    """Opens the policy of a run, or of a published folder, on this machine's devices, whatever it was trained on.

    Args:
      bindings: NAME=VALUE over the run's configuration, or over PLAIN for a published folder. `MeshShape.*` lays the
        policy out over devices; without it the run's own mesh is used where it fits, else one device.
      step: a saved step; None: the newest.

    Raises: ValueError where the folder holds no run or no such step; ConfigError for a binding that does not fit.
    """
    folder = Path(folder)
    if is_published(folder):
        if step is not None:
            raise ValueError(f"{folder} is a published model, which has no steps; leave --step out")
        return open_published(folder, bindings)
    steps = saved_steps(folder)
    if step is not None and step not in steps:
        raise ValueError(f"{folder} holds no save of step {step}; there are {', '.join(map(str, steps))}")
    # The run's parts as they were, whatever became of the files they came from.
    kept = sorted((folder / "parts").glob("*.py"), key=lambda path: int(path.stem))
    try:
        config, parts = load_config(str(folder / "config.gin"), [*bindings, "Config.parts=[]"], kept)
    except ConfigError as error:
        if not paths.exists(folder / "config.gin"):
            raise ValueError(f"{folder} is not a run folder: it holds no config.gin") from error
        raise
    asked = any(binding.split("=")[0].strip().startswith("MeshShape.") for binding in bindings)
    if not asked:
        config = dataclasses.replace(config, mesh=mesh_that_fits(config.mesh, len(jax.devices())))
    config = with_kept_model(config, folder)
    tokenizer = load_tokenizer(folder / "tokenizer", parts.tables["tokenizers"])
    policy = open_policy(config, parts, tokenizer)
    key = jax.device_put(jax.random.key(config.run.seed), replicated(policy.mesh))
    state = policy.programs.init.shape(programs.abstract(key, policy.mesh))
    wanted = {"state": {"params": state.params}}
    at, tree, _ = restore_step(folder / "checkpoints", wanted, step, part=True)
    if step is None and at != newest(folder):
        _log.warning("step %d is damaged; using the weights of step %d", newest(folder), at)
    return Trained(policy, at, tree["state"]["params"], key)


def is_published(folder: Path) -> bool:
    """Whether a folder is a published model's: config.json, and no run's manifest."""
    return paths.exists(folder / "config.json") and not paths.exists(folder / "manifest.json")


def open_published(folder: Path, bindings: Sequence[str]) -> Trained:
    """Opens the policy of a folder with config.json and safetensors.

    Raises: ValueError for a folder that is not as it says; ConfigError for a binding that does not fit.
    """
    said = [*PLAIN, f"Published.path={str(folder)!r}", *bindings]
    config = gin.load(None, said, Config, config_classes(TABLES))
    parts = load_parts(())
    cfg = decoder_of(config.model)[1]
    there = [name for name in VOCABULARIES if paths.exists(folder / name)]
    tokenizer = build_tokenizer(HuggingFace(path=str(folder)), ()) if there else without_tokenizer(folder, cfg)
    policy = open_policy(config, parts, tokenizer)
    key = jax.device_put(jax.random.key(config.run.seed), replicated(policy.mesh))
    return Trained(policy, 0, load(config.model, policy.mesh), key)


@dataclasses.dataclass(frozen=True)
class NoTokenizer:
    """Stands where a published folder brings no tokenizer: such a model reads and says token ids only."""

    folder: Path
    vocab_size: int
    pad_id: int
    end_ids: tuple[int, ...]

    @property
    def filled(self) -> int:
        return self.vocab_size

    def encode(self, text: str) -> list[int]:
        raise ValueError(f"{self.folder} holds no tokenizer ({' or '.join(VOCABULARIES)}); give token ids")

    def encode_prompt(self, messages: Iterable[Message]) -> list[int]:
        return self.encode("")

    def token_bytes(self) -> list[bytes]:
        raise ValueError(f"{self.folder} holds no tokenizer: what an id spells is not known")

    start_ids = ()


def without_tokenizer(folder: Path, cfg: Decoder) -> NoTokenizer:
    """Returns what is known without a tokenizer: which ids end an answer, by generation_config.json or config.json."""
    said: dict = {}
    for name in ("config.json", "generation_config.json"):
        if paths.exists(folder / name):
            try:
                said |= {k: v for k, v in json.loads(paths.read_bytes(folder / name)).items() if v is not None}
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{folder / name} is no JSON object: {error}") from error
    ends = said.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    for i in ends:
        if type(i) is not int or not 0 <= i < cfg.vocab_size:
            raise ValueError(f"{folder} names the eos_token_id {i!r}; the model's ids are 0 to {cfg.vocab_size - 1}")
    return NoTokenizer(folder, cfg.vocab_size, 0, tuple(ends))


def mesh_that_fits(shape: MeshShape, num_devices: int) -> MeshShape:
    """Returns `shape` where `num_devices` are enough for it, else one device."""
    try:
        shape.sizes(num_devices)
    except ValueError:
        _log.warning("the run's mesh does not fit %d devices; using one", num_devices)
        return MeshShape()
    return shape
