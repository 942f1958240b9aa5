"""The shapes of a run on a mesh, from which memory, operations and time are computed. No device, no array."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType

from jrl import paths
from jrl.algos.contract import Needs
from jrl.device.sharding import AXES, BATCH_AXES, TRAIN, num_shards, rows_over_shards, spec, split_sizes
from jrl.device.transfer import Publication, publication, shared_cuts
from jrl.experiment import (
    Config,
    Online,
    Stage,
    completion_length,
    configured_optimizers,
    correction_length,
    longest_row,
    optimizers,
    row_of,
    segments_of,
    stage_names,
    trains_online,
)
from jrl.learning.critic import CRITIC
from jrl.learning.optimizer import keeps_on_host
from jrl.learning.optimizers.contract import ConfiguredOptimizer
from jrl.learning.pack import Shape
from jrl.learning.prefix_packing import micro_batches_of_longest
from jrl.models import decoder
from jrl.models.contract import ParamSpec, is_spec, split_params
from jrl.models.pretrained.published import Published, classifier_of, decoder_of
from jrl.models.shape import Decoder, for_length
from jrl.plugins import Parts
from jrl.rollout.sampler import chunk_of_prompts
from jrl.rollout.strategies.partial import Partial
from jrl.run import programs
from jrl.run.checks import check_model
from jrl.run.kernels import Choice, choose_kernels
from jrl.run.sampler_devices import copies_for
from jrl.tasks.tokenizers.bytes import Bytes, ByteTokenizer
from jrl.types import PyTree


class ReadWeights(NamedTuple):
    """Bytes on one device of the frozen models that are read from folders; None: a model's shape is not known."""

    teacher: int | None = 0
    reward: int | None = 0  # of all members of an ensemble


@dataclasses.dataclass(frozen=True)
class Case:
    """The shapes of one stage of a run on one mesh."""

    config: Config
    stage: Stage
    name: str  # the stage's
    index: int  # its place in Config.stages
    cfg: Decoder  # its vocabulary filled in
    sizes: dict[str, int]  # devices along each mesh axis
    spec: PyTree  # ParamSpecs of the decoder's weights, none of them quantized
    stored: PyTree  # ParamSpecs of the weights as stored: frozen matrices may be quantized
    adapters: PyTree | None  # ParamSpecs of the adapters, which are then the only trained weights; None: no adapters
    shape: Shape  # packed, of one optimizer step
    prompts: int  # B, padded to the batch shards; for an Offline stage its rows
    samples: int  # completions of each prompt
    needs: Needs  # of the stage's objective
    updates: str  # the role that an optimizer step updates
    optimizers: Mapping[str, ConfiguredOptimizer]  # the optimizer of every role that the stage trains
    roles: int  # models with trained parameters: the policy, and those that this stage and earlier ones train
    previous: int  # older versions of the policy in the state
    recomputes: bool  # old log-probs or values are computed by the weights before the update
    read: ReadWeights  # bytes on one device of the models that are read from folders
    before: Case | None  # the stage that ends when this one begins
    waiting: int  # draws that are on the device while a step learns from another
    others: tuple[Case, ...] = ()  # the run's other stages that are planned
    segments: tuple[int, ...] = ()  # for sampling further segments: the most tokens of a row before each of them
    sampler_sizes: dict[str, int] | None = None  # axis sizes of the mesh that only samples; None: `sizes` samples too
    learner_sizes: dict[str, int] | None = None  # for a case on that mesh: axis sizes of the learner's mesh
    slices: int = 1  # of the topology, over all meshes

    devices = property(lambda self: math.prod(self.sizes.values()))
    shards = property(lambda self: num_shards(BATCH_AXES, self.sizes))
    shares = property(lambda self: self.sizes["sequence"])  # of a packed row
    weight_shards = property(lambda self: num_shards(TRAIN["embed"], self.sizes))
    sequences = property(lambda self: self.prompts * self.samples)  # N
    completion_length = property(lambda self: completion_length(self.stage, self.config))  # C
    width = property(lambda self: programs.width_of(self.stage, self.config))  # T
    has_critic = property(lambda self: CRITIC in self.optimizers)
    optimizer = property(lambda self: self.optimizers[self.updates].config)
    trained = property(lambda self: self.spec if self.adapters is None else self.adapters)  # ParamSpecs
    moments_on_host = property(lambda self: keeps_on_host(self.optimizer))

    @property
    def all_devices(self) -> int:
        """Devices of the run: those that learn, and those that only sample."""
        learner = self.learner_sizes or self.sizes
        return math.prod(learner.values()) + (math.prod(self.sampler_sizes.values()) if self.sampler_sizes else 0)

    @property
    def mesh_slices(self) -> int:
        """Number of slices of the case's own mesh."""
        return (self.config.mesh if self.learner_sizes is None else self.config.sampler_mesh).slices

    @property
    def network_sizes(self) -> list[tuple[str, int]]:
        """(axis, devices) of the mesh; on several slices an axis `slices` comes first and `data` is per slice."""
        slices = self.mesh_slices
        if slices == 1:
            return list(self.sizes.items())
        return [("slices", slices), *{**self.sizes, "data": self.sizes["data"] // slices}.items()]

    @property
    def copies(self) -> int:
        """Copies of the trained parameters."""
        average = self.stage.optimizer.average is not None
        return self.roles + self.needs.reference + self.previous + average

    @property
    def slots(self) -> int:
        """Sequences that a batch shard decodes at once."""
        return min(self.config.sampler.slots, self.sequences // self.shards)

    @property
    def drawn(self) -> int:
        """The most tokens that a sampling call draws of one completion."""
        strategy = getattr(self.stage, "strategy", None)
        return strategy.tokens if isinstance(strategy, Partial) else self.completion_length

    @property
    def decode_steps(self) -> int:
        """Decode steps of a sampling call if every completion has the maximum length."""
        return -(-(self.sequences // self.shards) // self.slots) * self.drawn

    @property
    def prefill_chunk(self) -> int:
        """Tokens of a prompt that are prefilled at once."""
        return chunk_of_prompts(self.config.data.prompt_length, self.config.sampler.prefill_chunk)

    @property
    def begun(self) -> tuple[int, ...]:
        """The most tokens that a row has before each call of the sampling program in a step."""
        return self.segments or (self.config.data.prompt_length,)

    @property
    def prefilled(self) -> float:
        """Columns of a row that a sampling call prefills, in whole chunks: the mean over a step's calls."""
        length, chunk = self.config.data.prompt_length, self.prefill_chunk
        ends = [min(-(-(longest - 1) // chunk) * chunk, length) for longest in self.begun]
        return length if chunk == length else sum(ends) / len(ends)

    @functools.cached_property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step if all sequences have the maximum length. With prefix_sharing='cross_row'
        the shape has room for more, because it must fit the worst lengths."""
        s = self.shape
        if not s.prefix_columns:
            return s.micro_batches
        groups = -(-(s.sequences // s.shards // self.stage.learner.minibatches) // s.samples)
        prefix = self.config.data.prompt_length - 1
        return micro_batches_of_longest(
            groups, s.samples, prefix, s.width - prefix, row_length=s.row_length, rows=self.rows, max_per_row=s.places
        )

    @property
    def rows(self) -> int:
        """Packed rows of a micro-batch on one row shard. A device may hold only a share of each."""
        return self.shape.rows // self.shape.shards

    @property
    def share_length(self) -> int:
        """Tokens of a packed row on one device."""
        return self.shape.row_length // self.shares

    @property
    def chunk(self) -> int:
        """Positions of a row's share whose logits exist at once."""
        return min(self.stage.learner.chunk, self.share_length)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one device."""
        return self.rows * self.share_length


# Shapes of published models: FOLDER NAME/config.json with only the keys that determine the shape. Source: the
# config.json in each model's repository, read in 2025.
KNOWN = Path(__file__).with_name("published")


def with_known_shape(config: Config) -> tuple[Config, str | None]:
    """Returns (config, note). If the folder of the published model or teacher is missing but its shape is known, the
    config uses that shape and the note says so; else (`config`, None)."""
    notes = []
    for field in ("model", "teacher"):
        published = getattr(config, field)
        if not isinstance(published, Published) or paths.readable_file(published.path, "config.json") is not None:
            continue
        known = KNOWN / Path(published.path).name
        if known.is_dir():
            notes.append(f"{published.path} does not exist; the plan uses the shape of {known.name} as published")
            config = dataclasses.replace(config, **{field: dataclasses.replace(published, path=str(known))})
    return config, "; ".join(notes) or None


def for_tpus(config: Config, num_devices: int) -> tuple[Config, list[Choice]]:
    """Returns `config` with every 'auto' resolved for this many TPUs, and the choices made.

    Raises: ValueError if the mesh does not fit the devices, or the configuration does not set the vocabulary size.
    """
    return choose_kernels(config, decoder_of_run(config), "tpu", *mesh_sizes(config, num_devices))


def uncounted(config: Config) -> str | None:
    """Returns a note about the parts of a run that a plan does not count; None if it counts everything."""
    known = {name: size is not None for name, size in read_weights(config, dict.fromkeys(AXES, 1))._asdict().items()}
    notes = []
    if config.reward is not None:
        quantities = "time and workspace" if known["reward"] else "memory and time"
        notes.append(f"the {quantities} of Config.reward are not counted")
    if config.teacher is not None:
        notes.append("the time of Config.teacher is counted as of a model like the policy")
        notes += ["the memory of Config.teacher is not counted"] * (not known["teacher"])
    notes += ["the time of Config.judges is not counted"] * bool(config.judges)
    compared = any(isinstance(stage, Online) and stage.pair_model is not None for stage in config.stages)
    notes += ["the memory and the time of Online.pair_model are not counted"] * compared
    strategies = any(
        isinstance(stage, Online) and not isinstance(stage.strategy, Partial | None) for stage in config.stages
    )
    notes += ["Online.strategy is counted as plain sampling, except by the compiler"] * strategies
    return "; ".join(notes) or None


def read_weights(config: Config, sizes: dict[str, int]) -> ReadWeights:
    """Returns the bytes of the teacher's and the reward model's weights on one device of a mesh of these sizes, in the
    dtypes that they are stored in; None for a model whose folder neither exists nor has the name of a known model."""

    def size(published: Published, classifier: bool) -> int | None:
        if paths.readable_file(published.path, "config.json") is not None:
            cfg = classifier_of(published).cfg if classifier else decoder_of(published)[1]
        elif (known := KNOWN / Path(published.path).name).is_dir():
            cfg = decoder_of(dataclasses.replace(published, path=str(known)))[1]
            cfg = dataclasses.replace(cfg, tied=True) if classifier else cfg  # a classifier has no token head
        else:
            return None
        leaves = jax.tree.leaves(decoder.spec(cfg), is_leaf=is_spec)
        return sum(share(leaf, TRAIN, sizes) * leaf.dtype.itemsize for leaf in leaves)

    members = () if config.reward is None else config.reward.published
    each = [size(member, classifier=True) for member in members]
    return ReadWeights(
        teacher=0 if config.teacher is None else size(config.teacher, classifier=False),
        reward=None if None in each else sum(each),
    )


def vocab_size_of(config: Config) -> int | None:
    """Returns the vocabulary size of the run; None if the configuration does not define it. Opens no tokenizer
    file."""
    if isinstance(config.model, Published):
        return decoder_of(config.model)[1].vocab_size
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if isinstance(config.tokenizer, Bytes):
        return ByteTokenizer.vocab_size
    return getattr(config.tokenizer, "vocab_size", None)


def decoder_of_run(config: Config) -> Decoder:
    """Returns the decoder config of the run. Opens neither data nor a tokenizer file.

    Raises: ValueError for a custom model, or if the configuration does not define the vocabulary size.
    """
    if isinstance(config.model, Published):
        return for_length(decoder_of(config.model)[1], longest_row(config))
    if not isinstance(config.model, Decoder):
        raise ValueError(f"a plan counts what a Decoder computes; {type(config.model).__name__} is a model of your own")
    vocab_size = vocab_size_of(config)
    if vocab_size is None:
        raise ValueError("a plan needs the size of the vocabulary: set Decoder.vocab_size")
    return dataclasses.replace(config.model, vocab_size=vocab_size)


def make_case(config: Config, parts: Parts, num_devices: int, stage: str | None = None, slices: int = 1) -> Case:
    """Returns the shapes of a stage of `config` on `num_devices`.

    Args:
      stage: the name of the only stage to plan; None: the main stage (see `main_stage`), with all others in `others`.
      slices: number of slices that the devices belong to.

    Raises: ValueError if the shapes do not divide, or there is no such stage.
    """
    names = stage_names(config.stages)
    if stage is not None and stage not in names:
        raise ValueError(f"unknown stage {stage!r}; available: {', '.join(names)}")
    planned = len(names) if stage is None else names.index(stage) + 1
    fields = {**model_fields(config, parts, num_devices), "slices": slices}
    cases: list[Case] = []
    for i in range(planned):
        cases.append(stage_case(config, parts, i, cases[-1] if cases else None, fields))
    if stage is not None:
        return cases[-1]
    main = cases[main_stage(config)]
    return dataclasses.replace(main, others=tuple(case for case in cases if case is not main))


def main_stage(config: Config) -> int:
    """Returns the index of the last Online stage, or of the last stage if there is none."""
    online = [i for i, stage in enumerate(config.stages) if isinstance(stage, Online)]
    return online[-1] if online else len(config.stages) - 1


def model_fields(config: Config, parts: Parts, num_devices: int) -> dict[str, Any]:
    """Returns the fields of a Case that all stages share. Raises ValueError if the model cannot be sharded."""
    sizes, sampler_sizes = mesh_sizes(config, num_devices)
    sampler_mesh = None if sampler_sizes is None else abstract_mesh(sampler_sizes)
    cfg = decoder_of_run(config)
    # Heads are not counted: each is as small as one row of the embedding.
    stored, trained = split_params(programs.model_of(config, parts.tables).spec(cfg))
    check_model(config, cfg, stored or trained, abstract_mesh(sizes), sampler_mesh)
    return {
        "config": config,
        "cfg": cfg,
        "sizes": sizes,
        "sampler_sizes": sampler_sizes,
        "read": read_weights(config, sizes),
        "spec": decoder.spec(cfg),
        "stored": stored or trained,
        "adapters": None if stored is None else trained,
    }


def stage_case(config: Config, parts: Parts, index: int, before: Case | None, fields: dict[str, Any]) -> Case:
    """Returns the shapes of one stage. `fields`: those that all stages share."""
    mesh = abstract_mesh(fields["sizes"])
    stage = config.stages[index]
    objective, online = row_of(parts.tables, "algos", stage.objective), isinstance(stage, Online)
    needs = objective.needs(stage.objective)
    shape = programs.packed_shape(stage, config, parts.tables, mesh)
    return Case(
        stage=stage,
        name=stage_names(config.stages)[index],
        index=index,
        shape=shape,
        prompts=rows_over_shards(stage.prompts, mesh) if online else shape.sequences,
        samples=stage.samples if online else 1,
        needs=needs,
        updates=stage.trains,
        optimizers=configured_optimizers(stage, parts.tables),
        roles=len({"policy", *(role for each in config.stages[: index + 1] for role in optimizers(each))}),
        previous=programs.num_previous(stage, objective),
        recomputes=bool(programs.recomputed_fields(stage, objective)),
        before=before,
        waiting=stage.lag + segments_of(stage, config) - 1 if online else 0,
        **fields,
    )


def cases_of(case: Case) -> list[Case]:
    """Returns the stages that are planned, in the order of the run."""
    return sorted((case, *case.others), key=lambda planned: planned.index)


def case_of(case: Case, name: str) -> Case:
    """Returns the planned stage that the named program belongs to; `case` if it belongs to no stage."""
    return next((stage_case for stage_case in cases_of(case) if stage_case.name == split_name(name)[0]), case)


def sampling_case(case: Case) -> Case:
    """Returns the case on the devices that sample: those that only sample, or those that also learn."""
    if case.sampler_sizes is None:
        return case
    return dataclasses.replace(case, sizes=case.sampler_sizes, learner_sizes=case.sizes)


def publication_of(case: Case) -> Publication | None:
    """Returns what publishing weights to the devices that only sample takes; None if there are none."""
    if case.sampler_sizes is None or not isinstance(case.stage, Online):
        return None
    trained = jax.tree.leaves(case.trained, is_leaf=is_spec)
    learner = case.learner_sizes or case.sizes
    stored = lambda leaf: spec(leaf.axes, TRAIN, learner)
    cuts = lambda leaf: (stored(leaf), shared_cuts(stored(leaf), learner, case.sampler_sizes))
    sizes = [(math.prod(leaf.shape) * leaf.dtype.itemsize, *cuts(leaf)) for leaf in trained]
    # A host has 4 or 8 devices: with more than 4, weights may be sent from host to host.
    sent = case.slices > 1 or case.all_devices > 4
    return publication(sizes, case.sampler_sizes, copies_for(case.stage.lag), sent)


def evaluated_case(case: Case) -> Case:
    """Returns the shapes of an evaluation's sampling, with the state of the stage that has the most copies of the
    trained parameters. Its completions are of Sampler.completion_length, whatever the stage's."""
    e, shards = case.config.eval, case.shards
    largest = with_sampler_length(max(cases_of(case), key=lambda planned: planned.copies))
    return plain(largest, largest.config, samples=e.samples, prompts=-(-e.batch // shards) * shards)


def plain(case: Case, config: Config, **changes: Any) -> Case:
    """Returns the case with another config and other fields, without a sampling strategy."""
    stage = dataclasses.replace(case.stage, strategy=None) if isinstance(case.stage, Online) else case.stage
    return dataclasses.replace(case, config=config, stage=stage, **changes)


def with_sampler_length(case: Case) -> Case:
    """Returns the case without a completion length of its stage's own."""
    if not isinstance(case.stage, Online):
        return case
    return dataclasses.replace(case, stage=dataclasses.replace(case.stage, completion_length=None))


def segment_case(case: Case) -> Case:
    """Returns the shapes of sampling further segments: every completion so far is a separate prompt."""
    length, tokens = case.config.data.prompt_length, case.stage.strategy.tokens
    begun = tuple(range(length + tokens, length + case.completion_length, tokens))
    data = dataclasses.replace(case.config.data, prompt_length=begun[-1])
    config = dataclasses.replace(
        case.config, data=data, sampler=dataclasses.replace(case.config.sampler, completion_length=tokens)
    )
    return plain(with_sampler_length(case), config, prompts=case.prompts * case.samples, samples=1, segments=begun)


def correcting_case(case: Case) -> Case:
    """Returns the shapes of a corrector's sampling: a separate prompt for every completion of the stage."""
    data = dataclasses.replace(case.config.data, prompt_length=correction_length(case.stage, case.config))
    config = dataclasses.replace(case.config, data=data)
    return plain(case, config, prompts=case.prompts * case.samples, samples=1)


def pretraining_case(case: Case) -> Case | None:
    """Returns the shapes of the stored rows that an optimizer step also imitates; None if there are none."""
    stage = case.stage
    if not isinstance(stage, Online) or stage.pretraining is None or case.updates != stage.trains:
        return None
    shape = programs.pretraining_shape(stage, case.config, abstract_mesh(case.sizes))
    return dataclasses.replace(case, shape=shape, prompts=shape.sequences, samples=1, needs=Needs())


def learned_cases(case: Case) -> list[Case]:
    """Returns [case], with the case of the stored rows if an optimizer step also learns from them."""
    stored = pretraining_case(case)
    return [case] if stored is None else [case, stored]


class PlannedProgram(NamedTuple):
    """A program that computes matmuls: its kind, and its shapes."""

    kind: Literal["sample", "logprobs", "scores", "update"]
    case: Case


def programs_of(case: Case) -> dict[str, PlannedProgram]:
    """Returns {name in the program cache: program} for the programs that decide the memory and time of the planned
    stages."""
    programs: dict[str, PlannedProgram] = {}
    for stage_case in cases_of(case):
        programs |= {f"{stage_case.name}.{part}": program for part, program in parts_of(stage_case).items()}
    if evaluates(case.config, (stage_case.stage for stage_case in cases_of(case))):
        programs["sample_eval"] = PlannedProgram("sample", evaluated_case(case))
    return programs


def parts_of(case: Case) -> dict[str, PlannedProgram]:
    """Returns {part of a program's name: program} for those of one stage."""
    stage, parts = case.stage, {}
    if isinstance(stage, Online):
        parts["sample"] = PlannedProgram("sample", sampling_case(case))
        if isinstance(stage.strategy, Partial):
            parts["next_segment"] = PlannedProgram("sample", segment_case(case))
        if stage.rewards:
            parts["scores"] = PlannedProgram("scores", case)
        if stage.process is not None:
            parts["step_scores"] = PlannedProgram("scores", case)
        if stage.corrector is not None:
            parts["correct"] = PlannedProgram("sample", correcting_case(case))
    if case.recomputes:
        parts["recompute"] = PlannedProgram("logprobs", case)
    if case.needs.reference:
        parts["reference"] = PlannedProgram("logprobs", case)
    if case.needs.teacher:
        parts["teacher"] = PlannedProgram("logprobs", case)
    parts["update"] = PlannedProgram("update", case)
    if case.has_critic:
        critic = dataclasses.replace(case, needs=Needs(logprobs=False, values=True), updates=CRITIC)
        parts["critic_values"] = PlannedProgram("scores", critic)
        parts["update_critic"] = PlannedProgram("update", critic)
    return parts


def evaluates(config: Config, planned: Iterable[Stage]) -> bool:
    """Returns whether evaluations belong to any of the planned stages: a run evaluates around the stages that train the
    policy on its own samples, and after the last stage."""
    return config.eval is not None and any(trains_online(stage) or stage is config.stages[-1] for stage in planned)


def split_name(name: str) -> tuple[str | None, str]:
    """Returns (stage, part) of a program's name in the program cache; (None, name) if it belongs to no stage."""
    stage, _, part = name.rpartition(".")
    return stage or None, part


def shown_name(case: Case, name: str) -> str:
    """Returns a program's name for reports: with its stage only if the run has several."""
    return name if len(case.config.stages) > 1 else split_name(name)[1]


def mesh_sizes(config: Config, num_devices: int) -> tuple[dict[str, int], dict[str, int] | None]:
    """Returns the size of every axis of the learner's mesh, and of the sampler's; None if the learner samples."""
    if config.sampler_mesh is None:
        return dict(zip(AXES, config.mesh.sizes(num_devices))), None
    learner, sampler = split_sizes(config.mesh, config.sampler_mesh, num_devices)
    return dict(zip(AXES, learner)), dict(zip(AXES, sampler))


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Returns a mesh without devices."""
    return AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def shard_shape(parameter: ParamSpec, rules: dict[str | None, Any], sizes: dict[str, int]) -> tuple[int, ...]:
    """Returns the shape of a parameter's shard on one device under sharding rules of `jrl.device.sharding`."""
    cuts = spec(parameter.axes, rules, sizes)
    return tuple(size // num_shards(part, sizes) for size, part in zip(parameter.shape, cuts, strict=True))


def share(parameter: ParamSpec, rules: dict[str | None, Any], sizes: dict[str, int]) -> int:
    """Returns the number of elements of a parameter on one device under sharding rules of `jrl.device.sharding`."""
    cuts = spec(parameter.axes, rules, sizes)
    return math.prod(parameter.shape) // math.prod(num_shards(part, sizes) for part in cuts)
