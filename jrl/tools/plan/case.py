"""A run as its shapes on a mesh: all that memory, operations and time are counted from. No device, no array."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax.sharding import AbstractMesh, AxisType

from jrl import paths
from jrl.device.sharding import AXES, BATCH_AXES, MeshShape
from jrl.experiment import Config, row_of
from jrl.learning.pack import Shape
from jrl.learning.prefix_packing import micro_batches_of_longest
from jrl.models import decoder
from jrl.models.adapters.quantized import check_bytes
from jrl.models.contract import ParamSpec, policy_of, split
from jrl.models.pretrained.published import Published, decoder_of
from jrl.models.shape import Decoder, check_divides, check_length, for_length
from jrl.plugins import Parts
from jrl.run import programs
from jrl.run.job import check_cache, check_router, check_shared
from jrl.tasks.tokenizers.bytes import Bytes, ByteTokenizer
from jrl.types import PyTree


@dataclasses.dataclass(frozen=True)
class Case:
    """The shapes of a run on one mesh."""

    config: Config
    cfg: Decoder  # its vocabulary filled in
    sizes: dict[str, int]  # devices along each mesh axis
    spec: PyTree  # ParamSpecs of the decoder's weights, all of them whole
    stored: PyTree  # and as the run keeps them: frozen matrices perhaps in few bits
    adapters: PyTree | None  # and of the adapters to them, which are then all that is trained
    shape: Shape  # packed, of one RL optimiser step
    prompts: int  # B, padded to the batch shards
    reference: bool  # the algorithm keeps what is trained as it was
    behaviour: bool  # and as it was a version before
    passes: int  # log-prob passes over a batch: old and reference
    values: bool  # one more before the update, which reads the value head, and old log-probs where they are wanted

    shards = property(lambda self: math.prod(self.sizes[axis] for axis in BATCH_AXES))
    sequences = property(lambda self: self.prompts * self.config.loop.samples)  # N
    width = property(lambda self: self.config.data.prompt_length + self.config.sampler.completion_length)  # T

    @property
    def slots(self) -> int:
        """Sequences that a batch shard decodes at once."""
        return min(self.config.sampler.slots, self.sequences // self.shards)

    @property
    def turns(self) -> int:
        """Decoding turns of a step where every completion is as long as it may be."""
        return -(-(self.sequences // self.shards) // self.slots) * self.config.sampler.completion_length

    @functools.cached_property
    def micro_batches(self) -> int:
        """Micro-batches of an optimiser step where everything is as long as it may be. Where prompts lie apart that is
        less than the shape has room for, which must hold the worst lengths."""
        s = self.shape
        if not s.ahead:
            return s.micro_batches
        groups = -(-(s.sequences // s.shards // self.config.learner.minibatches) // s.samples)
        trunk = self.config.data.prompt_length - 1
        return micro_batches_of_longest(
            groups, s.samples, trunk, s.width - trunk, row_length=s.row_length, rows=self.rows, max_per_row=s.places
        )

    @property
    def rows(self) -> int:
        """Packed rows of a micro-batch on one batch shard."""
        return self.shape.rows // self.shards


# Shapes of published models: config.json by the name of the folder, what decides the shape and no more. Source: the
# config.json in each model's repository, read in 2025.
KNOWN = Path(__file__).with_name("published")


def with_known_shape(config: Config) -> tuple[Config, str | None]:
    """Returns (`config`, None), or where a published model is not here but its shape is known, `config` with that in
    its place, and a sentence that says so."""
    model = config.model
    if not isinstance(model, Published) or paths.exists(Path(model.path) / "config.json"):
        return config, None
    known = KNOWN / Path(model.path).name
    if not known.is_dir():
        return config, None
    told = f"{model.path} is not here; its shape is that of {known.name} as it was published"
    return dataclasses.replace(config, model=dataclasses.replace(model, path=str(known))), told


def uncounted(config: Config) -> str | None:
    """Returns a sentence that says what of a run is not counted; None where everything is."""
    return None if config.reward is None else "the memory and the time of Config.reward are not counted"


def vocab_size_of(config: Config) -> int | None:
    """Returns the vocabulary of the run, or None where the configuration does not say. Opens no tokenizer's file."""
    if isinstance(config.model, Published):
        return decoder_of(config.model)[1].vocab_size
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if isinstance(config.tokenizer, Bytes):
        return ByteTokenizer.vocab_size
    return getattr(config.tokenizer, "vocab_size", None)


def decoder_of_run(config: Config) -> Decoder:
    """Returns the decoder of the run. Neither data nor a tokenizer's file is opened.

    Raises: ValueError where the configuration does not say how large the vocabulary is.
    """
    if isinstance(config.model, Published):
        longest = config.data.prompt_length + config.sampler.completion_length
        return for_length(decoder_of(config.model)[1], longest)
    if not isinstance(config.model, Decoder):
        raise ValueError(f"a plan counts what a Decoder computes; {type(config.model).__name__} is a model of your own")
    vocab_size = vocab_size_of(config)
    if vocab_size is None:
        raise ValueError("a plan needs the size of the vocabulary: set Decoder.vocab_size")
    return dataclasses.replace(config.model, vocab_size=vocab_size)


def make_case(config: Config, parts: Parts, num_devices: int) -> Case:
    """Returns the shapes of `config` on `num_devices`. Raises ValueError where they do not divide."""
    sizes = dict(zip(AXES, config.mesh.sizes(num_devices)))
    mesh = abstract_mesh(config.mesh, num_devices)
    cfg = decoder_of_run(config)
    check_divides(cfg, mesh)
    check_router(config, cfg)
    check_shared(config, cfg)
    check_cache(config, cfg, mesh.shape["tensor"])
    check_length(cfg, config.data.prompt_length + config.sampler.completion_length)
    # A value head is as wide as one row of the embedding, and not counted.
    stored, trained = split(policy_of(programs.model_of(config, parts.tables).spec(cfg)))
    check_bytes(stored or trained, mesh)
    algorithm = row_of(parts.tables, "algos", config.algo)
    reference = algorithm.needs_reference(config.algo)
    return Case(
        config=config,
        cfg=cfg,
        sizes=sizes,
        spec=decoder.spec(cfg),
        stored=stored or trained,
        adapters=None if stored is None else trained,
        shape=programs.train_shape(config, mesh),
        prompts=programs.padded_prompts(config, mesh),
        reference=reference,
        behaviour=config.loop.lag > 0 and algorithm.refill(config.algo) is not None,
        passes=(config.learner.updates_per_batch > 1 and algorithm.returns is None) + reference,
        values=algorithm.returns is not None,
    )


BEFORE_RL = ("init", "pack_sft", "update_sft", "close_sft")  # programs that run while no weights are frozen


def before_rl(case: Case) -> Case:
    """Returns the case while no weights are frozen yet."""
    return dataclasses.replace(case, reference=False, behaviour=False, passes=0, values=False)


def supervised_case(case: Case) -> Case:
    """Returns the shapes of the warm start: its own batches, no frozen weights yet."""
    mesh = abstract_mesh(case.config.mesh, math.prod(case.sizes.values()))
    return dataclasses.replace(before_rl(case), shape=programs.sft_shape(case.config, mesh))


def evaluated_case(case: Case) -> Case:
    """Returns the shapes of an evaluation's sampling."""
    e, shards = case.config.eval, case.shards
    config = dataclasses.replace(case.config, loop=dataclasses.replace(case.config.loop, samples=e.samples))
    return dataclasses.replace(case, config=config, prompts=-(-e.batch // shards) * shards)


class Program(NamedTuple):
    """A program that multiplies matrices: what it does, and on which shapes."""

    kind: Literal["sample", "logprobs", "update"]
    case: Case


def programs_of(case: Case) -> dict[str, Program]:
    """Returns the programs of a run that decide what it takes, by name. The warm start and evaluations have shapes of
    their own."""
    found = {"sample": Program("sample", case)}
    if case.config.sft is not None:
        found["update_sft"] = Program("update", supervised_case(case))
    if case.config.eval is not None:
        found["sample_eval"] = Program("sample", evaluated_case(case))
    if case.passes:
        found["logprobs"] = Program("logprobs", case)
    if case.values:
        found["values"] = Program("logprobs", case)
    return {**found, "update": Program("update", case)}


def abstract_mesh(shape: MeshShape, num_devices: int) -> AbstractMesh:
    """Returns the mesh without devices."""
    return AbstractMesh(shape.sizes(num_devices), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def share(parameter: ParamSpec, rules: dict[str | None, Any], sizes: dict[str, int]) -> int:
    """Returns the elements of a parameter that one device holds under a table of `jrl.device.sharding`."""
    cut = math.prod(sizes[rules[name]] for name in parameter.axes if name is not None and rules[name] is not None)
    return math.prod(parameter.shape) // cut
