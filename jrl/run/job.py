"""What a run holds open: folder, device programs, data position, verifier pool, records. Opened and closed once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrl import config as gin
from jrl import paths
from jrl.algos.contract import Algorithm
from jrl.device.host_memory import check_host_memory
from jrl.device.program_cache import ProgramCache
from jrl.device.sharding import make_mesh, replicated
from jrl.experiment import FREE, ROUNDED, Config, config_classes, row_of
from jrl.learning.pack import Shape
from jrl.models.adapters.lora import without_adapters
from jrl.models.adapters.quantized import check_bytes
from jrl.models.attention.kernels import check_attention, check_kernel, check_ragged
from jrl.models.contract import Model
from jrl.models.pretrained.published import Published, companions_of
from jrl.models.shape import Decoder, check_divides, check_length
from jrl.ops.fingerprint import fingerprint
from jrl.plugins import Parts, part_files
from jrl.rollout.rewards import Judge, open_judge
from jrl.rollout.sampler import SamplingParams
from jrl.rollout.scoring import Scorer, open_scoring
from jrl.rollout.stop_strings import StopTable
from jrl.run import programs
from jrl.run.checkpoints.lock import hold_run
from jrl.run.checkpoints.run_state import RunState, list_steps, open_run_state
from jrl.run.programs import Programs
from jrl.run.report.display import Display, open_display
from jrl.run.report.manifest import compare, make_manifest, read_manifest, write_manifest
from jrl.run.report.memory import PeakMemory
from jrl.run.report.metrics import Metrics
from jrl.run.report.rollouts import RolloutStore
from jrl.tasks.data.held_out import held_out
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stream import Stream, open_stream
from jrl.tasks.data.survey import texts_of
from jrl.tasks.envs.contract import Source, named_verifiers
from jrl.tasks.envs.mixture import open_source
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.tasks.tokenizers.published import HuggingFace
from jrl.tasks.tokenizers.published import build as build_tokenizer
from jrl.types import Array, PyTree

_log = logging.getLogger(__name__)

PUBLISHED = "published"  # what the model's folder said of itself, so that a run can be read without that folder
REWARD = "reward.json"  # which weights, tokenizer and config.json Config.reward began with
TOKENIZER_TEXTS = 4096  # most examples of the run whose texts a tokenizer is trained on


class RefusedIdentity(ValueError):
    """The folder belongs to another run. The message lists what differs."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is needed to run a policy: no optimiser, no verifiers."""

    config: Config
    parts: Parts
    mesh: Mesh
    tokenizer: Any
    cfg: Any  # a Decoder, but where the model is the user's own
    model: Model
    algorithm: Algorithm
    program_cache: ProgramCache
    programs: Programs


@dataclasses.dataclass
class Job:
    """A run that is open. Fields are set once, but for the last group, which the loop moves."""

    policy: Policy
    folder: Path
    source: Source
    stream: Stream
    sft_stream: Stream
    scorer: Scorer
    judge: Judge | None  # the reward model
    run_state: RunState
    display: Display
    memory: PeakMemory
    stop: threading.Event  # someone asked the run to stop
    key: Array  # root of every draw
    algo: PyTree  # hyper-parameters as arrays
    adamw: PyTree
    sft_adamw: PyTree | None
    router: PyTree | None  # terms of a mixture of experts
    sampling_params: SamplingParams
    eval_sampling_params: SamplingParams | None
    stop_table: StopTable | None
    temperature: Array
    shape: Shape  # packed, of one RL optimiser step
    sft_shape: Shape | None
    published: Published | None  # the weights that the run begins with; None: random ones
    # What the loop moves.
    opened: float  # monotonic seconds
    metrics: Metrics | None = None
    rollouts: RolloutStore | None = None
    done: int = 0  # steps completed, of every phase
    evals: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # where the time went, of this and earlier lives
    skipped: int = 0  # steps in a row whose update was not finite
    unscored: int = 0  # steps in a row of which no completion could be scored
    rollout_rows: int = 0  # committed to the store
    sampled_tokens: int = 0  # by training, of this and earlier lives
    visits: list[Visit] | None = None  # held-out prompts, once made

    config = property(lambda self: self.policy.config)
    mesh = property(lambda self: self.policy.mesh)
    tokenizer = property(lambda self: self.policy.tokenizer)
    cfg = property(lambda self: self.policy.cfg)
    model = property(lambda self: self.policy.model)
    algorithm = property(lambda self: self.policy.algorithm)
    program_cache = property(lambda self: self.policy.program_cache)
    programs = property(lambda self: self.policy.programs)

    @property
    def sft_steps(self) -> int:
        return self.config.sft.steps if self.config.sft is not None else 0

    @property
    def total(self) -> int:
        return self.sft_steps + self.config.loop.steps

    def held_out(self) -> list[Visit]:
        """Returns the held-out prompts of the evaluation; always the same."""
        if self.visits is None:
            e = self.config.eval
            self.visits = held_out(self.source, self.tokenizer, self.config.data, e.prompts, self.config.run.seed)
        return self.visits

    def clock(self) -> dict[str, float]:
        """Returns where the time went, of this and earlier lives: "total" is from opening the run on."""
        return {**self.seconds, "total": self.seconds.get("total", 0.0) + time.monotonic() - self.opened}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time inside to `seconds[name]`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


def open_policy(config: Config, parts: Parts, tokenizer: Any, announce: Any = lambda what: None) -> Policy:
    """Returns mesh and programs; nothing is compiled yet. Raises ValueError where the mesh does not fit the devices."""
    mesh = make_mesh(config.mesh)
    jax.set_mesh(mesh)
    if "float64" in (config.model.dtype, config.model.param_dtype) and not jax.config.jax_enable_x64:
        raise ValueError(f"{type(config.model).__name__}.dtype='float64' needs JAX_ENABLE_X64=1 in the environment")
    # Accelerators multiply float32 in fewer bits unless told; sampler and learner would differ by more than rounding.
    jax.config.update("jax_default_matmul_precision", "highest")
    platform = mesh.devices.flat[0].platform
    program_cache = ProgramCache(announce, platform)
    algorithm = row_of(parts.tables, "algos", config.algo)
    cfg = programs.model_config(config, tokenizer)
    model = programs.model_of(config, parts.tables)
    check_kernel("Sampler.attention", config.sampler.attention, platform)
    if isinstance(cfg, Decoder):
        check_divides(cfg, mesh)
        check_attention(cfg, platform)
        check_length(cfg, config.data.prompt_length + config.sampler.completion_length)
        check_bytes(model.spec(cfg), mesh)
    check_router(config, cfg)
    check_shared(config, cfg)
    check_cache(config, cfg, mesh.shape["tensor"])
    built = programs.build(config, algorithm, model, tokenizer, mesh, program_cache)
    return Policy(config, parts, mesh, tokenizer, cfg, model, algorithm, program_cache, built)


def check_host(config: Config, mesh: Mesh) -> None:
    """Raises ValueError for what is to lie in the host's memory where the devices know none. Only training asks."""
    optimizers = [config.optimizer, *([] if config.sft is None else [config.sft.optimizer])]
    wanted = ["AdamW.memory='host'"] * any(adamw.memory == "host" for adamw in optimizers)
    if getattr(config.model, "remat", None) == "offload":
        wanted.append(f"{type(config.model).__name__}.remat='offload'")
    for said in wanted:
        check_host_memory(said, mesh.devices.flat[0])


def check_router(config: Config, cfg: Any) -> None:
    """Raises ValueError for a loss of routers where the model has none."""
    if config.learner.router is not None and getattr(cfg, "experts", None) is None:
        raise ValueError("Learner.router is a loss of a mixture of experts, and this model is none; leave it out")


def check_shared(config: Config, cfg: Any) -> None:
    """Raises ValueError for prompts computed once where the attention cannot see them."""
    prefix_sharing, attention = config.learner.prefix_sharing, getattr(cfg, "attention", "reference")
    if prefix_sharing != "none" and attention == "splash":
        raise ValueError(
            f"Learner.prefix_sharing={prefix_sharing!r} needs attention='reference', or 'cudnn' on GPUs: with "
            f"{attention!r} a token sees its own segment only"
        )
    if prefix_sharing == "cross_row" and not isinstance(cfg, Decoder):
        raise ValueError(
            "Learner.prefix_sharing='cross_row' needs jrl's decoder: a module of your own sees one row; use 'in_row'"
        )
    if prefix_sharing == "cross_row" and cfg.linear is not None:
        raise ValueError(
            "Learner.prefix_sharing='cross_row' is not known to linear attention, which sees one row; use 'in_row'"
        )


def check_cache(config: Config, cfg: Any, tensor: int) -> None:
    """Raises ValueError for a layout of the cache, or a kernel over it, that the model does not have on a mesh with so
    many devices along its tensor axis."""
    kv_layout, attention = config.sampler.kv_layout, config.sampler.attention
    if kv_layout != "token_major" and not isinstance(cfg, Decoder):
        raise ValueError(f"Sampler.kv_layout={kv_layout!r} lays out jrl's own cache; this model keeps its own")
    if attention != "reference" and not isinstance(cfg, Decoder):
        raise ValueError(f"Sampler.attention={attention!r} reads jrl's own cache; this model keeps its own")
    if attention != "reference" and cfg.dtype == "float64":
        raise ValueError(f"Sampler.attention={attention!r} computes in float32; float64 needs 'reference'")
    if attention == "ragged":
        check_ragged(cfg, tensor)


def with_kept_model(config: Config, folder: Path) -> Config:
    """Returns `config` with a published model's folder replaced by what the run keeps of it: all but the weights.

    Before the manifest a folder belongs to no run, and keeps nothing.
    """
    if not isinstance(config.model, Published) or not paths.exists(folder / "manifest.json"):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder / PUBLISHED)))


@contextlib.contextmanager
def open_job(config: Config, parts: Parts, folder: Path, stop: threading.Event) -> Iterator[Job]:
    """Opens a run folder, new or old, and everything a run needs. Closes all of it, whatever happens.

    Raises: RunIsHeld where another process trains in the folder; RefusedIdentity where it holds another run;
    ConfigError and ValueError for what cannot run.
    """
    opened = time.monotonic()
    with contextlib.ExitStack() as stack:
        check_not_foreign(folder)
        folder = Path(paths.make_dir(folder))
        lock = hold_run(folder)
        stack.callback(lock.release)
        display = open_display(config.loop.steps + (config.sft.steps if config.sft is not None else 0))
        stack.callback(display.close)
        display.phase("data")
        source = open_source(config.task, parts.tables["envs"])
        if source.counts:
            found = ", ".join(f"{count} {cause}" for cause, count in sorted(source.counts.items()))
            display.note(f"{len(source)} examples; dropped or noticed: {found}")
        tokenizer = open_tokenizer(config, parts, source, folder)
        manifest = identify(config, parts, tokenizer, source)
        refuse_another(folder, manifest, config)
        started = config  # where weights come from, which a resumed run needs no more
        config = with_kept_model(config, folder)
        policy = open_policy(config, parts, tokenizer, display.phase)
        stack.callback(policy.program_cache.close)
        check_host(config, policy.mesh)
        if config.adapter is not None and (bare := without_adapters(policy.model.spec(policy.cfg))):
            display.note(f"LoRA has no adapters to {', '.join(bare)}: these stay as they are")
        seeds = np.random.SeedSequence(config.run.seed).generate_state(2)
        streams = [open_stream(source, tokenizer, config.data, seed=int(seed), split="train") for seed in seeds]
        display.phase("verifiers")
        scorer = open_scoring(
            config.scoring,
            parts.tables["verifiers"],
            parts.sources,
            folder / "journal.jsonl",
            also=sorted(named_verifiers(source)),
        )
        stack.callback(scorer.close)
        judge = None if config.reward is None else open_reward(config, policy, folder, display)
        run_state = open_run_state(folder / "checkpoints", keep=config.checkpoint.keep)
        stack.callback(run_state.close)
        everywhere = replicated(policy.mesh)
        array = lambda tree: jax.tree.map(lambda x: jax.device_put(np.float32(x), everywhere), tree)
        job = Job(
            policy=policy,
            folder=folder,
            source=source,
            stream=streams[0],
            sft_stream=streams[1],
            scorer=scorer,
            judge=judge,
            run_state=run_state,
            display=display,
            memory=PeakMemory(),
            stop=stop,
            key=jax.device_put(jax.random.key(config.run.seed), everywhere),
            algo=array(config.algo),
            adamw=array(config.optimizer),
            sft_adamw=None if config.sft is None else array(config.sft.optimizer),
            router=array(config.learner.router),
            sampling_params=programs.sampling_params(config.sampler, policy.mesh),
            eval_sampling_params=None
            if config.eval is None
            else programs.eval_sampling_params(config.eval, policy.mesh),
            stop_table=programs.stop_table(config.sampler, tokenizer, policy.mesh),
            temperature=jax.device_put(np.float32(config.sampler.temperature or 1.0), everywhere),
            shape=programs.train_shape(config, policy.mesh),
            sft_shape=None if config.sft is None else programs.sft_shape(config, policy.mesh),
            opened=opened,
            published=started.model if isinstance(started.model, Published) else None,
        )
        if not paths.exists(folder / "manifest.json"):
            preflight_data(job)
            write_run_metadata(started, parts, folder, manifest)
        try:
            yield job
        finally:
            for resource in (job.metrics, job.rollouts):
                if resource is not None:
                    resource.close()


def open_reward(config: Config, policy: Policy, folder: Path, display: Display) -> Judge:
    """Returns the run's reward model, its weights on the mesh. Its template sees the day on which the run began.

    Raises: RefusedIdentity where weights, tokenizer, template or config.json are not those that the run began with, or
      the file that says which is gone or incomplete.
    """
    path, kept = config.reward.path, folder / REWARD
    resumed = paths.exists(folder / "manifest.json")
    if resumed and not paths.exists(kept):
        raise RefusedIdentity(f"{kept} is gone, which says what reward model the run began with; put it back, or name "
                              "another folder with --run")  # fmt: skip
    began = paths.read_object(kept) if resumed else {}
    names = {"fingerprint": "weights", "config.json": "config.json", "tokenizer": "tokenizer or chat template"}
    if resumed and (missing := [repr(key) for key in (*names, "date") if key not in began]):
        raise RefusedIdentity(f"{kept} has no {' and no '.join(missing)}, which say what reward model the run began "
                              "with; put the file back as it was, or name another folder with --run")  # fmt: skip
    tokenizer = build_tokenizer(HuggingFace(path=path, date=began.get("date")), ())
    told = lambda done, total: display.phase(f"reading the reward model: {100 * done // total} %")
    judge = open_judge(config.reward, policy.mesh, policy.program_cache.program, told, tokenizer)
    found = {
        "fingerprint": f"{int(jax.jit(fingerprint)(judge.params)):08x}",  # of the weights
        "config.json": hashlib.sha256(paths.read_bytes(Path(path) / "config.json")).hexdigest(),
        "tokenizer": tokenizer.fingerprint,  # of its files and its chat template
        "date": tokenizer.chat.date if tokenizer.chat is not None else None,
    }
    if resumed and (strange := [name for key, name in names.items() if began[key] != found[key]]):
        raise RefusedIdentity(
            f"the {' and the '.join(strange)} in {path} are not those that {folder} began with; put those back, or "
            "name another folder with --run"
        )
    if not resumed:
        paths.write_bytes_atomic(kept, json.dumps(found).encode() + b"\n")
    return judge


def open_tokenizer(config: Config, parts: Parts, source: Source, folder: Path) -> Any:
    """Returns the run's tokenizer: the one in the folder, or one trained on the run's own texts and saved there."""
    saved = folder / "tokenizer"
    # Before the manifest, a folder belongs to no run. A tokenizer that was lost since is trained again; the manifest
    # holds its fingerprint.
    if paths.exists(folder / "manifest.json") and paths.exists(saved):
        return load_tokenizer(saved, parts.tables["tokenizers"])
    texts = texts_of(source, config.data, TOKENIZER_TEXTS)
    tokenizer = row_of(parts.tables, "tokenizers", config.tokenizer).build(config.tokenizer, texts)
    paths.make_dir(saved)
    tokenizer.save(saved)
    return tokenizer


def identify(config: Config, parts: Parts, tokenizer: Any, source: Source) -> dict[str, Any]:
    """Returns the manifest: what the run is, and where it runs."""
    return make_manifest(
        config_identity=gin.identity(config, FREE),
        config=gin.to_json(config),
        tokenizer=tokenizer.fingerprint,
        data=getattr(source, "fingerprint", ""),
        parts=parts.hashes,
        seed=config.run.seed,
        mesh=dataclasses.asdict(config.mesh),
    )


def check_not_foreign(folder: Path) -> None:
    """Raises RefusedIdentity for a folder that is not a run's and is not empty; hidden files do not count.

    A run's first file is its lock, so a folder with that and no manifest is what a run left that did not get far.
    """
    found = set(paths.list_dir(folder)) if paths.exists(folder) else set()
    if found & {"manifest.json"}:
        return
    taken = sorted(name for name in found if not name.startswith("."))
    if taken and "lock" not in found:
        rest = f" and {len(taken) - 3} more" if len(taken) > 3 else ""
        raise RefusedIdentity(
            f"{folder} is not a run directory and already contains {', '.join(taken[:3])}{rest}; choose another --run"
        )
    if "checkpoints" in found and list_steps(folder / "checkpoints"):
        raise RefusedIdentity(
            f"{folder} holds checkpoints, but not the manifest.json that says of which run; put that back, or name "
            "another folder with --run"
        )


def places_of(names: Sequence[str], config: Config) -> list[str]:
    """Returns named fields ("Loop.steps", "AdamW.*") as places in the configuration, all that there are: "loop.steps",
    "optimizer.*", "sft.optimizer.*"."""

    def sections(config: Any, place: str) -> Iterator[tuple[str, str]]:
        yield type(config).__name__, place
        for field in dataclasses.fields(config):
            if dataclasses.is_dataclass(part := getattr(config, field.name)):
                yield from sections(part, f"{place}{field.name}.")

    at = list(sections(config, ""))
    split = [name.split(".") for name in names]
    return [place + field for section, field in split for name, place in at if name == section]


def refuse_another(folder: Path, manifest: dict[str, Any], config: Config) -> None:
    """Raises RefusedIdentity where the folder holds another run; warns of another machine, and of ROUNDED fields."""
    if not paths.exists(folder / "manifest.json"):
        return
    begun = read_manifest(folder / "manifest.json")
    identity, environment = compare(begun, manifest, places_of(FREE, config), places_of(ROUNDED, config))
    configured = {**begun["identity"], "config": None} == {**manifest["identity"], "config": None}
    if identity and configured and all(": not there, now " in line for line in identity):
        raise RefusedIdentity(
            f"{folder} was begun by a version of jrl that did not have these:\n  " + "\n  ".join(identity) + "\n"
            "Go on with that version, or name another folder with --run"
        )
    if identity:
        raise RefusedIdentity(
            f"{folder} holds another run:\n  " + "\n  ".join(identity) + "\n"
            f"Name another folder with --run, or go on with what it began with: {folder / 'config.gin'}"
        )
    if isinstance(config.model, Published):
        theirs = Path(config.model.path) / "config.json"
        if paths.exists(theirs) and paths.read_bytes(theirs) != paths.read_bytes(folder / PUBLISHED / "config.json"):
            raise RefusedIdentity(
                f"{theirs} is not what {folder} began with, which is kept in {folder / PUBLISHED}; name another folder "
                "with --run, or put that back"
            )
    for line in environment:
        _log.warning("other than when it began: %s; bit-identity is not promised across this", line)


def preflight_data(job: Job) -> None:
    """Raises ValueError for data that a new run would stumble over later: no usable prompt, none left for evaluation,
    or nobody to judge the first. What it reads is read again by the run, from the start."""
    config = job.config
    if config.loop.steps:
        first = open_stream(job.source, job.tokenizer, config.data, seed=config.run.seed, split="train").next(1)
        job.scorer.rows_for(first[0].example)
    if config.eval is not None:
        for visit in job.held_out():
            job.scorer.rows_for(visit.example)


def write_run_metadata(config: Config, parts: Parts, folder: Path, manifest: dict[str, Any]) -> None:
    """Writes what the run is into a folder that is new, once everything could be opened: the manifest last."""
    for name, text in part_files(parts).items():
        paths.make_dir(folder / "parts")
        paths.write_bytes_atomic(folder / "parts" / name, text.encode())
    paths.remove_tree(folder / PUBLISHED)  # of an attempt that did not come as far as its manifest
    if isinstance(config.model, Published):
        paths.make_dir(folder / PUBLISHED)
        kept = {"config.json": paths.read_bytes(Path(config.model.path) / "config.json")}
        for name, data in {**kept, **companions_of(config.model.path)}.items():
            paths.write_bytes_atomic(folder / PUBLISHED / name, data)
    paths.write_bytes_atomic(folder / "config.gin", gin.to_gin(config, config_classes(parts.tables)).encode())
    paths.write_bytes_atomic(folder / "config.json", (json.dumps(gin.to_json(config), indent=2) + "\n").encode())
    write_manifest(folder / "manifest.json", manifest)
