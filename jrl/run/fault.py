"""A run whose updates stop being finite: which checkpoint is good, where the fault is, and a bundle that replays it.

    RUN/fault/checkpoints/00000051   the state before the last step
    RUN/fault/batches.npz            what that step learned from
    RUN/fault/fault.json             the diagnosis
    RUN/fault/config.gin ...         the run's configuration, parts and tokenizer, and the shape of a published model

The bundle needs neither the run's devices nor its data: `jrl replay RUN/fault` repeats the step's updates on a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jrl import paths
from jrl.algos.contract import Objective
from jrl.bucket.client import shown
from jrl.device.sharding import MeshShape, replicated, row_sharding, row_shards
from jrl.experiment import Config, Stage, optimizers, row_of
from jrl.learning.critic import CRITIC, of_critic, of_policy
from jrl.learning.nonfinite import Fault, bad_weights, find_fault
from jrl.learning.step import Learned, StageArrays, StagePrograms, critic_batch, limit_after
from jrl.resolve import load_run_config
from jrl.run import records
from jrl.run.bucket_run import LeaseLost, readable
from jrl.run.checkpoints.digest import named_leaves
from jrl.run.checkpoints.run_state import SaveFailed, known_good, restore_step, save_step
from jrl.run.identity import PUBLISHED, with_saved_model
from jrl.run.job import Job
from jrl.run.policy import Policy, open_policy, root_key
from jrl.run.programs import abstract, teacher_kind
from jrl.run.records import Progress, Step, StopRun
from jrl.run.report.messages import bad_end_message, doubt_message, doubts, examples_at_fault, not_finite_message
from jrl.run.stages import number_on, stage_arrays
from jrl.run.trained import on_this_machine
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.types import PackedBatch, PretrainingBatch, Recomputed, SequenceTargets, TrainBatch, TrainState

FOLDER = "fault"
FILES = ("manifest.json", "config.gin", "config.json")
FOLDERS = ("tokenizer", "parts", PUBLISHED)
REPLAYED = ("step", "stage", "stage_name", "last_good_step", "epochs", "warms_up", "shards")  # of fault.json


class Replayed(NamedTuple):
    """The outcome of replaying a bundle."""

    recorded: dict[str, Any]  # fault.json
    fault: Fault | None  # None: every update was finite
    role: str | None  # the model whose update it was


def begin_bundle(job: Job, progress: Progress) -> None:
    """Saves the state before a step that may be the last. If that fails, the run says so when it stops."""
    if job.processes.count > 1:  # a bundle needs all arrays in one process
        return
    folder = _unfinished(job)
    paths.remove_tree(folder)
    job.display.phase("saving the state before a step that may not be finite")
    try:
        save_step(folder / "checkpoints", job.done, {"state": progress.state}, {})
    except SaveFailed as error:
        job.display.note(str(error))
        paths.remove_tree(folder)


def discard(job: Job) -> None:
    """Removes what `begin_bundle` saved, once the run goes on or starts again."""
    if job.processes.writer:
        paths.remove_tree(_unfinished(job))


def stopped(job: Job, progress: Progress, step: Step) -> StopRun:
    """Returns the error that ends a run whose updates are not finite, once the checkpoints that led to them are set
    aside and the bundle is written."""
    stage = job.stages[progress.stage]
    first = step.step - job.skipped + 1
    good, condemned = condemn_unproven(job, progress)
    job.display.phase("looking for the first value that is not finite")
    try:
        fault, role = locate(job.policy, stage.config, progress.state, step.learned, stage.arrays)
        where = "nothing any more, with the weights after the step" if fault is None else f"{fault} of the role {role}"
    except Exception as error:  # out of memory, say: the run still ends with everything else that is known
        fault, role = None, None
        where = f"unknown, since looking for it failed ({type(error).__name__}: {error})"
    ids = step.examples
    if step.batch is not None:
        ids = [visit.example.id for visit in step.batch.visits for _ in range(step.batch.samples)]
    sequences = () if fault is None else fault.sequences
    examples = list(dict.fromkeys(ids[n] for n in sequences if n < len(ids)))
    count = len(ids) or stage.shape.sequences
    report = {
        "step": step.step,
        "first_skipped": first,
        "stage": progress.stage,
        "stage_name": stage.name,
        "role": role,
        "fault": None if fault is None else {**fault._asdict(), "sequences": list(fault.sequences)},
        "examples": examples,
        "last_good_step": good,
        "condemned": condemned,
        "epochs": step.learned.epochs,
        "warms_up": step.learned.warms_up,
        "shards": row_shards(job.mesh),
        "metrics": {name: str(value) for name, value in sorted(step.metrics.items())},
    }
    bundle = _finish_bundle(job, step.learned, report)
    # Of several processes in a bucket an error commits nothing, and the next start would find what was set aside.
    with contextlib.suppress(OSError, LeaseLost):
        job.publish()
    return StopRun(
        not_finite_message(
            first=first,
            last=step.step,
            stage=stage.name,
            losses=f"loss {step.metrics['loss']}, gradient norm {step.metrics['grad_norm']}",
            fault=where,
            examples=examples_at_fault(None if fault is None else sequences, ids, count),
            good=good,
            condemned=condemned,
            bundle=bundle,
        )
    )


def check_end(job: Job, progress: Progress) -> None:
    """Checks the final weights of a stage, if its updates leave them in doubt.

    Raises: StopRun if they are not finite; the checkpoints since the doubt began are set aside.
    """
    if (where := bad_end(job, progress.state)) is None:
        return
    stage = job.stages[progress.stage].name
    good, condemned = condemn_unproven(job, progress)
    with contextlib.suppress(OSError, LeaseLost):
        job.publish()
    why = doubts(job.done, job.skipped, job.overflowed)
    raise StopRun(bad_end_message(stage, why, fault=where, good=good, condemned=condemned))


def condemn_unproven(job: Job, progress: Progress) -> tuple[int | None, list[int]]:
    """Returns the newest checkpoint that is known to be good, and all later ones, which it sets aside.

    A run without checkpoints saves its state first and sets that aside: a rerun then says why it starts over.
    """
    if not (job.run_state.steps() or job.run_state.condemned()):
        try:
            records.save(job, progress)
        except (OSError, LeaseLost) as error:  # the run ends with its diagnosis all the same
            if job.processes.count > 1:  # the other processes have not failed and wait in the save: they are told
                job.display.note(f"The run was to stop: weights may not be finite from step {job.unproven} on.")
                raise
            job.display.note(str(error))
    return known_good(job.run_state.steps(), job.unproven), job.run_state.condemn(job.unproven)


def bad_end(job: Job, state: TrainState) -> str | None:
    """Returns where the weights after a stage are not finite; None if they are finite or not in doubt.

    They are in doubt if the last updates were skipped, or the last update of a role was too large. If they turn out to
    be finite, the run says so and forgets the large updates.
    """
    if not in_doubt(job):
        return None
    if (bad := bad_weights(state, job.policy.cfg)) is not None:
        fault, role = bad
        return f"{fault} of the role {role}"
    job.display.note(f"jrl: {doubt_message(doubts(job.done, job.skipped, job.overflowed))}")
    job.overflowed.clear()
    return None


def in_doubt(job: Job) -> bool:
    """Whether no later update has shown that the weights are finite."""
    return bool(job.skipped or job.overflowed)


class RoleUpdate(NamedTuple):
    """An update of one role."""

    role: str
    objective: Objective  # that updates it
    batch: TrainBatch


def role_updates(policy: Policy, stage: Stage, learned: Learned) -> Iterator[RoleUpdate]:
    """Yields the updates of one epoch of a step, in order."""
    objective, with_critic = row_of(policy.parts.tables, "algos", stage.objective), CRITIC in optimizers(stage)
    of_role = of_policy(objective) if with_critic else objective
    of_its_critic = of_critic(objective)
    for batch in learned.batches:
        if not learned.warms_up:
            yield RoleUpdate(stage.trains, of_role, batch)
        if with_critic:
            yield RoleUpdate(CRITIC, of_its_critic, critic_batch(batch))


def locate(
    policy: Policy, stage: Stage, state: TrainState, learned: Learned, arrays: StageArrays
) -> tuple[Fault | None, str | None]:
    """Returns the first fault of a step's updates with the weights in `state`, and the role it belongs to."""
    for update in role_updates(policy, stage, learned):
        if (fault := _fault_of(policy, stage, state, arrays, update)) is not None:
            return fault, update.role
    return None, None


def readable_bundle(source: str | Path) -> Path:
    """Returns where to read a bundle on this machine: RUN/fault itself, or a local copy of gs://BUCKET/NAME/fault."""
    if not paths.is_remote(source):
        return Path(source)
    run, _, last = shown(source).rstrip("/").rpartition("/")
    if last != FOLDER:
        raise ValueError(f"{shown(source)} is not the bundle of a run; give gs://BUCKET/NAME/{FOLDER}")
    return readable(run, (f"{FOLDER}/",)) / FOLDER


def replay(source: str | Path) -> Replayed:
    """Repeats the updates of a bundle on one device of this machine, one after the other, up to the first that is not
    finite.

    Raises: ValueError for a folder that holds no bundle; DamagedStep if its state is not what was saved.
    """
    folder = readable_bundle(source)
    if not paths.exists(folder / "fault.json"):
        raise ValueError(
            f"{shown(source)} holds no fault.json; give the folder RUN/{FOLDER} of a run that stopped because its "
            "updates were not finite"
        )
    report = paths.read_object(folder / "fault.json")
    if missing := [name for name in REPLAYED if name not in report]:
        raise ValueError(f"{shown(source)}/fault.json is damaged: it has no {', '.join(missing)}")
    config, parts = load_run_config(folder)
    config = with_saved_model(_on_one_device(on_this_machine(config, ())), folder)
    policy = open_policy(config, parts, load_tokenizer(folder / "tokenizer", parts.tables["tokenizers"]))
    try:
        return _replay(folder, report, policy)
    finally:
        policy.program_cache.close()


def _replay(folder: Path, report: Mapping[str, Any], policy: Policy) -> Replayed:
    stage_index = report["stage"]
    target = policy.programs.inside(stage_index, policy.config, abstract(root_key(policy), policy.mesh))
    _, tree, _ = restore_step(folder / "checkpoints", {"state": target})
    state, stage, programs = tree["state"], policy.config.stages[stage_index], policy.programs.stages[stage_index]
    arrays = stage_arrays(stage, functools.partial(number_on, policy.mesh))
    learned = Learned(_read_batches(folder, report["shards"], policy.mesh), report["epochs"], report["warms_up"])
    for _ in range(learned.epochs):
        for update in role_updates(policy, stage, learned):
            if (fault := _fault_of(policy, stage, state, arrays, update)) is not None:
                return Replayed(dict(report), fault, update.role)
            state, arrays = _updated(programs, state, arrays, update)
    return Replayed(dict(report), None, None)


def _updated(
    programs: StagePrograms, state: TrainState, arrays: StageArrays, update: RoleUpdate
) -> tuple[TrainState, StageArrays]:
    """Returns the state after an update, and the arrays for the next one."""
    if update.role == CRITIC:
        critic = (arrays.objective, arrays.critic_optimizer, arrays.router)
        return programs.update_critic(state, update.batch, *critic)[0], arrays
    given = (arrays.objective, arrays.optimizer, arrays.router, arrays.kl_limit)
    state, metrics = programs.update(state, update.batch, *given)
    return state, arrays._replace(kl_limit=limit_after(arrays.kl_limit, metrics))


def _fault_of(policy: Policy, stage: Stage, state: TrainState, arrays: StageArrays, update: RoleUpdate) -> Fault | None:
    return find_fault(
        state,
        update.batch,
        arrays.objective,
        arrays.router,
        role=update.role,
        objective=update.objective,
        model=policy.model,
        cfg=policy.cfg,
        chunk=stage.learner.chunk,
        teacher_kind=teacher_kind(policy.config),
    )


def _finish_bundle(job: Job, learned: Learned, report: Mapping[str, Any]) -> str:
    """Completes the bundle. Returns how to replay it, or why there is none."""
    if job.processes.count > 1:
        return "A run of several processes leaves nothing to replay."
    folder, final = _unfinished(job), job.folder / FOLDER
    if not paths.exists(folder):
        return "The state before the step could not be saved, so there is nothing to replay."
    try:
        _write_batches(folder, learned)
        for name in FILES:
            paths.write_bytes_atomic(folder / name, paths.read_bytes(job.folder / name))
        for subfolder in FOLDERS:
            for name in paths.files_below(job.folder / subfolder):
                paths.make_dir((folder / subfolder / name).parent)
                paths.write_bytes_atomic(folder / subfolder / name, paths.read_bytes(job.folder / subfolder / name))
        paths.write_bytes_atomic(folder / "fault.json", json.dumps(report, indent=1).encode() + b"\n")
        paths.remove_tree(final)
        paths.rename(folder, final)
    except OSError as error:
        return f"What would replay it could not be written ({error})."
    return f"`jrl replay {job.location}/{FOLDER}` repeats the last step's updates on a CPU."


def _unfinished(job: Job) -> Path:
    return job.folder / f"{paths.TEMPORARY}{FOLDER}"


def _write_batches(folder: Path, learned: Learned) -> None:
    arrays = {}
    for i, batch in enumerate(learned.batches):
        for name, leaf in named_leaves(batch).items():
            arrays[f"{i}/{name}"] = np.asarray(jax.device_get(leaf))
    with open(folder / "batches.npz", "wb") as file:
        np.savez(file, **arrays)


def _read_batches(folder: Path, shards: int, mesh: Mesh) -> list[TrainBatch]:
    """Returns the batches of a bundle on `mesh`, which has one device.

    Args:
      shards: the batch shards of the run's mesh.
    """
    with np.load(folder / "batches.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    by_row = row_sharding(mesh)
    place = lambda x: jax.device_put(x, by_row if np.ndim(x) >= 3 else replicated(mesh))  # [M, R, ...] by row

    def fields(record: type, prefix: str) -> dict[str, Any]:
        return {field.name: arrays.get(f"{prefix}/{field.name}") for field in dataclasses.fields(record)}

    batches = []
    for i in range(len({name.split("/")[0] for name in arrays})):
        packed = fields(PackedBatch, f"{i}/packed")
        if packed["prefix_row"] is not None:
            packed["prefix_row"] = _global_rows(packed["prefix_row"], shards)
        targets = fields(SequenceTargets, f"{i}/targets")
        mixed = fields(PretrainingBatch, f"{i}/pretraining")
        if mixed["num_tokens"] is not None:
            mixed["packed"] = PackedBatch(**fields(PackedBatch, f"{i}/pretraining/packed"))
        parts = {
            "packed": PackedBatch(**packed),
            "recomputed": Recomputed(**fields(Recomputed, f"{i}/recomputed")),
            "targets": None if targets["counts"] is None else SequenceTargets(**targets),
            "pretraining": None if mixed["num_tokens"] is None else PretrainingBatch(**mixed),
        }
        batches.append(jax.tree.map(place, TrainBatch(**{**fields(TrainBatch, f"{i}"), **parts})))
    return batches


def _global_rows(prefix_row: np.ndarray, shards: int) -> np.ndarray:
    """Returns row indices within the micro-batch, from those within a shard; -1 stays."""
    rows = prefix_row.shape[1]
    rows_per_shard = rows // shards
    first_row = (np.arange(rows) // rows_per_shard * rows_per_shard)[None, :, None]
    return np.where(prefix_row < 0, prefix_row, prefix_row + first_row).astype(prefix_row.dtype)


def _on_one_device(config: Config) -> Config:
    """Returns a configuration for one device that keeps nothing in host memory, which a CPU does not have apart."""
    model = config.model
    if getattr(model, "remat", None) == "offload":
        model = dataclasses.replace(model, remat="layer")
    stages = tuple(_with_moments_on_device(stage) for stage in config.stages)
    return dataclasses.replace(config, mesh=MeshShape(), model=model, stages=stages)


def _with_moments_on_device(stage: Stage) -> Stage:
    on_host = [
        name
        for name in ("optimizer", "critic_optimizer")
        if getattr(getattr(stage, name, None), "memory", None) == "host"
    ]
    changed = {name: dataclasses.replace(getattr(stage, name), memory="device") for name in on_host}
    return dataclasses.replace(stage, **changed)
