"""Separate devices for sampling: programs that run on another mesh than the learner's, at the same time.

A draw is dispatched to the sampler's mesh with the current weights, published leaf by leaf, while the learner's mesh
goes on with an update. Nothing waits: the completions stay on the sampler's mesh until the step that learns from them
(`SamplerDevices.collect`). The queue of draws in `jrl.run.online` decides which version draws which batch.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jrl.device.placement import fetch, is_here, place_on_mesh
from jrl.device.processes import ONE, Processes
from jrl.device.program_cache import Program
from jrl.device.transfer import (
    Publication,
    abstract_transfer,
    copied_cuts,
    have_same_processes,
    publication,
    replace_leaf,
    transfer,
)
from jrl.models.contract import Adapted
from jrl.ops.fingerprint import fingerprint
from jrl.rollout.collect import Draw
from jrl.rollout.sampler import POLICY
from jrl.types import Array, PyTree, Rollout


class WrongWeights(RuntimeError):
    """The sampler drew with other weights than the learner published."""


class SamplerDevices:
    """The sampler's mesh, the weights on it, and the draws in progress there. Must be closed."""

    def __init__(self, learner: Mesh, sampler: Mesh, processes: Processes = ONE) -> None:
        self.learner, self.sampler = learner, sampler
        self._processes = processes
        self._is_shared = have_same_processes(learner, sampler)  # the processes that learn are those that sample
        self._structure = jax.tree.structure(None)  # of the weights
        self._frozen: dict[int, Array] = {}  # frozen leaves, published once, by their place
        self._weights: list[Array | None] = []  # trained leaves of the last draw; None: frozen
        self._source: list[weakref.ref[Array]] = []  # the learner's leaves that were published
        self._published: list[Array] = []  # the same on the sampler's mesh
        self._last: Future | None = None  # the draw that was dispatched last
        self._older: Future | None = None  # the last draw with the weights before those
        self._expected: Array | None = None  # fingerprint of the weights that were published last
        self._ended = 0.0  # monotonic seconds at which the last draw was done
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="draws")

    def close(self) -> None:
        self._watcher.shutdown(cancel_futures=True)

    def publish(self, weights: PyTree, policy: PyTree, copies: int) -> PyTree:
        """Returns the learner's weights on the sampler's mesh.

        Args:
          policy: the part of them whose fingerprint a draw reports.
          copies: 1: wait for the draw in progress, and free each leaf of its weights before sending its replacement. 2:
            keep its weights until it has ended, and wait only for draws with older ones.
        """
        leaves, structure = jax.tree.flatten(weights)
        sources = [source() for source in self._source]
        if structure == self._structure and all(a is b for a, b in zip(leaves, sources, strict=True)):
            return jax.tree.unflatten(structure, self._published)  # a stage's first draws all use one version
        pending = self._last if copies == 1 else self._older
        if pending is not None:
            pending.exception()  # waits, also for earlier draws; the caller that collects that draw raises its error
        self._older = self._last
        with jax.set_mesh(self.learner):
            self._expected = _fingerprint(policy) if is_here(self.learner) else None
        if structure != self._structure:  # another stage may draw with other roles
            self._structure, self._frozen, self._weights = structure, {}, [None] * len(leaves)
        frozen = frozen_leaves(weights)
        old, self._weights = self._weights, []
        published = []
        for place, leaf in enumerate(leaves):
            if id(leaf) in frozen:
                if place not in self._frozen:
                    self._frozen[place] = replace_leaf(None, leaf, self.sampler)
                published.append(self._frozen[place])
                self._weights.append(None)
            else:
                published.append(replace_leaf(old[place] if copies == 1 else None, leaf, self.sampler))
                self._weights.append(published[-1])
        self._source, self._published = [weakref.ref(leaf) for leaf in leaves], published
        return jax.tree.unflatten(structure, published)

    def watch(self, rollout: Rollout) -> Callable[[], dict[str, float]]:
        """Returns a function that waits for the draw that was just dispatched, and returns its seconds."""
        weights, expected = [x for x in self._weights if x is not None], self._expected
        self._last = self._watcher.submit(self._follow, weights, expected, rollout)
        return self._last.result if self._is_shared else functools.partial(self.wait_together, self._last)

    def _follow(self, weights: list[Array], expected: Array | None, rollout: Rollout) -> dict[str, Any]:
        """Returns how long the devices waited before a draw, once it is done. If other processes learn or sample, also
        the fingerprints that this one has."""
        if not self._is_shared:
            published = {} if expected is None else {"published": int(jax.device_get(expected))}
            if not is_here(self.sampler):
                return published
        jax.block_until_ready(weights)
        begun = time.monotonic()
        weights.clear()  # else this function would keep them alive until it returns
        jax.block_until_ready(rollout)
        begun, before, self._ended = max(begun, self._ended), self._ended, time.monotonic()
        seconds = {"time/sampler_idle_seconds": begun - before} if before else {}
        drawn_with = int(jax.device_get(rollout.weights_fingerprint))
        if not self._is_shared:
            return {**seconds, "time/sample_device_seconds": self._ended - begun, "drawn": drawn_with, **published}
        check_same_weights(drawn_with, int(jax.device_get(expected)))
        return seconds

    def collect(self, drawn: Draw) -> tuple[Draw, dict[str, float]]:
        """Waits for a draw. Returns it on the learner's mesh, and its seconds.

        Raises: WrongWeights.
        """
        if drawn.under_way is None:  # from a checkpoint
            return drawn._replace(rollout=transfer(drawn.rollout, self.learner)), {}
        seconds = drawn.under_way()
        if self._is_shared:
            return drawn._replace(rollout=transfer(drawn.rollout, self.learner), under_way=None), seconds
        # Through the hosts: a program over both meshes would wait for the next draw.
        place = lambda x, host: place_on_mesh(host, NamedSharding(self.learner, x.sharding.spec))
        host = fetch(drawn.rollout)
        return drawn._replace(rollout=jax.tree.map(place, drawn.rollout, host), under_way=None, host=host), seconds

    def wait_together(self, mine: Future) -> dict[str, float]:
        """Waits for a draw when sampling and learning have different processes, and returns its seconds. All processes
        must call it. mine: what this process waits for. Raises: WrongWeights."""
        begun, error = time.monotonic(), None
        try:
            report = mine.result()
        except Exception as failed:  # the others wait in the exchange: report the error before raising it
            report, error = {"failed": f"{type(failed).__name__}: {failed}"}, failed
        reports = self._processes.exchange("draw", report)
        if error is not None:
            raise error
        if problems := [f"process {i}: {report['failed']}" for i, report in enumerate(reports) if "failed" in report]:
            raise RuntimeError("a draw failed on devices of its own: " + "; ".join(problems))
        return {**of_every_process(reports), "time/wait_for_draw_seconds": time.monotonic() - begun}


def of_every_process(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the seconds of a draw: those of the slowest process. Raises WrongWeights if a process drew with other
    weights than a process has published.

    Args:
      reports: by process: its seconds, and the fingerprints of weights that it has, "drawn" and "published".
    """
    values = lambda name: [report[name] for report in reports if name in report]
    for drawn in values("drawn"):
        for published in values("published"):
            check_same_weights(int(drawn), int(published))
    names = {name for report in reports for name in report} - {"drawn", "published"}
    return {name: max(values(name)) for name in sorted(names)}


def check_same_weights(drawn_with: int, published: int) -> None:
    """Raises WrongWeights if the fingerprints of weights differ."""
    if drawn_with != published:
        raise WrongWeights(
            f"the sampler's devices drew with weights of fingerprint {drawn_with:08x}, and the learner published "
            f"{published:08x}: a device, its memory or a link is at fault. Start again from the last checkpoint"
        )


class ProgramApart:
    """A sampling program on the sampler's mesh. It is called with the learner's arrays, and its shapes are on the
    learner's mesh."""

    def __init__(self, program: Program, learner: Mesh, sampler: Mesh, *, copies: int, by_role: bool) -> None:
        """Args:
        copies: as in `SamplerDevices.publish`. by_role: the program takes weights of several roles.
        """
        self.name, self._program, self._copies, self._by_role = program.name, program, copies, by_role
        self._learner, self._sampler = learner, sampler
        self.devices: SamplerDevices | None = None  # set while a run is open

    def __call__(self, weights: PyTree, *rest: Any) -> Rollout:
        """Dispatches a draw and returns its completions on the sampler's mesh, without waiting."""
        weights = self.devices.publish(weights, weights[POLICY] if self._by_role else weights, self._copies)
        rest = transfer(rest, self._sampler)
        with jax.set_mesh(self._sampler):
            return self._program(weights, *rest)

    def shape(self, *args: Any) -> Rollout:
        """Returns the shapes of a call's result, on the learner's mesh."""
        with jax.set_mesh(self._sampler):
            rollout = self._program.shape(*abstract_transfer(args, self._sampler))
        return abstract_transfer(rollout, self._learner)

    def compile(self, *args: Any) -> Rollout:
        """Starts to compile for these arguments and returns what `shape` does."""
        with jax.set_mesh(self._sampler):
            self._program.compile(*abstract_transfer(args, self._sampler))
        return self.shape(*args)


def copies_for(lag: int) -> int:
    """Returns the number of copies of the weights on the sampler's devices while new ones are published.

    With a lag of 1 the next update waits for the draw in progress anyway, so its weights are freed first. With a larger
    lag that would leave the sampler idle.
    """
    return 1 if lag == 1 else 2


def publication_of(weights: PyTree, learner: Mesh, sampler: Mesh, lag: int) -> Publication:
    """Returns the cost of publishing. weights: the policy's, arrays or shapes on the learner's mesh."""
    frozen = frozen_leaves(weights)
    trained = [leaf for leaf in jax.tree.leaves(weights) if id(leaf) not in frozen]
    cuts = lambda x: (x.sharding.spec, copied_cuts(x.shape, x.sharding.spec, learner, sampler))
    leaves = [(math.prod(x.shape) * x.dtype.itemsize, *cuts(x)) for x in trained]
    sent = not have_same_processes(learner, sampler)
    return publication(leaves, sampler.shape, copies_for(lag), sent)


def publication_text(p: Publication) -> str:
    """Returns the cost of publishing weights as text."""
    mib = lambda size: f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
    text = f"published weights are {mib(p.received)} to each, and take {mib(p.peak)} of it at their peak"
    if not p.learner:
        return text
    return f"{text}; leaves of up to {mib(p.learner)} are gathered or sent on each device that learns"


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Returns the axes of a mesh with more than one device, as text."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def frozen_leaves(weights: PyTree) -> set[int]:
    """Returns the ids of the leaves under adapters, which no update changes."""
    is_adapted = lambda node: isinstance(node, Adapted)
    nodes = filter(is_adapted, jax.tree.leaves(weights, is_leaf=is_adapted))
    return {id(leaf) for node in nodes for leaf in jax.tree.leaves(node.base)}


_fingerprint = jax.jit(fingerprint)
