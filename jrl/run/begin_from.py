"""A new run that begins with the weights of another."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jrl import paths
from jrl.bucket.client import shown
from jrl.device.processes import Processes
from jrl.run.best import BEST, saved_step
from jrl.run.bucket_run import readable
from jrl.run.checkpoints.digest import named_leaves
from jrl.run.checkpoints.run_state import (
    DamagedStep,
    NoIntactStep,
    StateMismatch,
    check_leaves,
    list_steps,
    read_step_manifest,
    restore_step,
)
from jrl.run.identity import RefusedIdentity
from jrl.run.policy import Policy, root_key
from jrl.run.programs import Programs, abstract
from jrl.run.report.manifest import read_manifest
from jrl.run.run_hash import newest
from jrl.types import Array, TrainState

FROZEN = "state/models/policy/frozen"
WEIGHTS = ("state/models/policy/params", FROZEN)  # begin the names of a policy's leaves


class Origin(NamedTuple):
    """The run and the step whose weights another begins with."""

    run: str  # its folder, or gs://BUCKET/NAME
    step: int
    copy: Path | None = None  # where it is read from; None: found when it is needed
    weights: str | None = None  # their hash when the run began; None: it begins now, or did in an earlier version

    @property
    def folder(self) -> Path:
        """Where to read the run: its folder, or a local copy of what is committed."""
        return readable(self.run) if self.copy is None else self.copy


class Request(NamedTuple):
    """The run whose weights a user asks to begin with, and one of its saved steps."""

    run: str | Path
    step: int | str | None = None  # or "best"; None: the newest


def request(begin_from: str | Path | None, begin_from_step: int | str | None) -> Request | None:
    """Returns what a caller asks for, None if nothing. Raises ValueError for a step of no run, or one that is no
    number."""
    if begin_from_step not in (None, BEST):
        if not isinstance(begin_from_step, Integral):
            raise ValueError(f"begin_from_step must be a number or {BEST!r}; got {begin_from_step!r}")
        begin_from_step = int(begin_from_step)  # NumPy's is not JSON
    if begin_from is not None:
        return Request(begin_from, begin_from_step)
    if begin_from_step is not None:
        raise ValueError("--from-step (in Python begin_from_step) is a step of another run; name the run by --from "
                         "(begin_from)")  # fmt: skip
    return None


def origin_of(folder: Path, begin_from: Request | None, location: str | None = None) -> Origin | None:
    """Returns where a run's weights come from: by its manifest, else by `begin_from`; None: by its configuration.

    Args:
      location: of the run, for messages, where the folder is a local copy of it; None: the folder.

    Raises: RefusedIdentity if the run began with other weights; ValueError if `begin_from` holds no run, or no such
      step.
    """
    manifest = read_manifest(folder / "manifest.json") if paths.exists(folder / "manifest.json") else None
    recorded = None if manifest is None else manifest.get("from")
    if manifest is None and begin_from is not None:
        source_run = _place_of(begin_from.run)
        copy = readable(source_run)
        step = newest(copy) if begin_from.step is None else saved_step(copy, begin_from.step, source_run)
        return Origin(source_run, step, copy)
    if begin_from is not None:
        _check_begun(recorded, begin_from, location or str(folder))
    return None if recorded is None else Origin(recorded["run"], recorded["step"], weights=recorded.get("weights"))


def _check_begun(recorded: Mapping[str, Any] | None, begin_from: Request, location: str) -> None:
    """Raises RefusedIdentity if a run began with other weights than is asked for."""
    if recorded is None or recorded["run"] != _place_of(begin_from.run):
        raise RefusedIdentity(f"{location} did not begin with the weights of {begin_from.run}; use another "
                              "--run, or leave --from (in Python begin_from) out")  # fmt: skip
    # The best step of the other run changes while it goes on; what this one began with does not.
    if begin_from.step not in (None, BEST, recorded["step"]):
        raise RefusedIdentity(f"{location} began with the weights of step {recorded['step']} of {begin_from.run}, not "
                              f"{begin_from.step}; use another --run, or leave --from-step (in Python begin_from_step) "
                              "out")  # fmt: skip


def _place_of(run: str | Path) -> str:
    """Returns the folder of a run, absolute, or its gs:// address."""
    return shown(run).rstrip("/") if paths.is_remote(run) else str(paths.normalize(run))


def manifest_entry(origin: Origin | None) -> dict[str, Any]:
    """Returns the manifest's entry on where the weights come from."""
    return {} if origin is None else {"from": {"run": origin.run, "step": origin.step, "weights": origin.weights}}


def check_fits(origin: Origin, policy: Policy) -> str:
    """Returns a hash of another run's weights, for the manifest. Raises ValueError if they do not have the shapes of
    this run's model, or are adapters and this run has none; NoIntactStep if they cannot be read."""
    target, _ = _target(origin, policy.programs, abstract(root_key(policy), policy.mesh))
    saved = _leaves(origin)
    try:
        check_leaves(origin.step, saved, named_leaves(target), part=True)
    except StateMismatch as error:
        raise ValueError(
            f"the weights of {origin.run} do not fit this model: {error}. Give the model, and its adapter, the fields "
            f"that {origin.run}/config.gin has"
        ) from error
    return _weights_hash(saved)


def state_from_run(
    origin: Origin, programs: Programs, key: Array, abstract_key: jax.ShapeDtypeStruct, processes: Processes
) -> TrainState:
    """Returns the state before the first step with the weights of another run's policy, which fit (`check_fits`). A run
    with adapters trains new ones over the other's full weights, or continues with the other's adapters.

    Raises: RefusedIdentity if the other run's step has other weights than when this run began; NoIntactStep if they
      cannot be read.
    """
    origin = origin._replace(copy=origin.folder)  # one copy of a run in a bucket, which may go on meanwhile
    if origin.weights not in (None, _weights_hash(_leaves(origin))):
        raise RefusedIdentity(
            f"step {origin.step} of {origin.run} has other weights than those that this run began with, and this run "
            "has no checkpoint yet; restore those, or use another --run"
        )
    target, adapted = _target(origin, programs, abstract_key)
    checkpoints = origin.folder / "checkpoints"
    with _readable(origin):
        _, restored, _ = restore_step(checkpoints, target, origin.step, part=True, processes=processes, shared=False)
    saved = restored["state"]["models"]["policy"]
    if not adapted:
        return programs.init_from(saved["params"], key)
    begun = programs.init_from(saved["frozen"], key)
    policy = begun.models["policy"].replace(params=saved["params"])
    return begun.replace(models={"policy": policy})


@contextlib.contextmanager
def _readable(origin: Origin) -> Iterator[None]:
    """Raises NoIntactStep, naming the other run, where its step is damaged or gone."""
    try:
        yield
    except (DamagedStep, NoIntactStep) as error:
        steps = list_steps(origin.folder / "checkpoints")
        why = error if origin.step in steps else f"it is gone; there are {', '.join(map(str, steps)) or 'none'}"
        raise NoIntactStep(
            f"the weights of step {origin.step} of {origin.run}, with which this run begins, cannot be read: {why}. "
            "Bring that checkpoint back, or begin a new run with another (--from-step)"
        ) from error


def _leaves(origin: Origin) -> dict[str, Any]:
    """Returns the leaves of the other run's checkpoint, with their digests."""
    with _readable(origin):
        return read_step_manifest(origin.folder / "checkpoints", origin.step)["leaves"]


def _weights_hash(leaves: Mapping[str, Any]) -> str:
    """Returns a hash of a policy's weights, by the digests in a checkpoint's manifest."""
    weights = {name: entry for name, entry in leaves.items() if name.startswith(WEIGHTS)}
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()


def _target(origin: Origin, programs: Programs, abstract_key: jax.ShapeDtypeStruct) -> tuple[dict[str, Any], bool]:
    """Returns what to read from the other run's checkpoint, as shapes, and whether it trained adapters."""
    policy = programs.init.shape(abstract_key).models["policy"]
    adapted = any(name.startswith(FROZEN) for name in _leaves(origin))
    if adapted and policy.frozen is None:
        raise ValueError(f"{origin.run} trained adapters, and this run has none: export it and start from that folder, "
                         "or set Config.adapter as it did")  # fmt: skip
    if adapted:
        weights = {"params": policy.params, "frozen": policy.frozen}
    else:
        weights = {"params": policy.params if policy.frozen is None else policy.frozen}
    return {"state": {"models": {"policy": weights}}}, adapted
