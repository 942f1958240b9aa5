"""What lies in the host's memory: moments between updates. CPU devices have such a memory, so that all of it runs."""

from __future__ import annotations

import contextlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jrl
from jrl.device.host_memory import HOST, memory_kind
from jrl.device.program_cache import CompileAfterFreeze, ProgramCache
from jrl.device.sharding import MeshShape, make_mesh
from jrl.experiment import FREE
from jrl.learning.optimizer import begin, step
from jrl.learning.optimizers.adamw import OPTIMIZER as ADAMW
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.contract import leaf_of
from jrl.learning.optimizers.schedules import CosineDecay
from jrl.resolve import load_config
from jrl.run.checkpoints.run_state import restore_step, save_step, verify_step
from jrl.run.checks import check_host

TINY = [
    "Decoder.layers=2", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=8", "Online.samples=4", "Online.steps=2", "Checkpoint.every=1",
    "Checkpoint.keep=9", "Log.samples=0", "Log.writers=()", "Scoring.workers=1", "MeshShape.fsdp=2",
    "Decoder.remat='offload'", "AdamW.memory='host'",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def mesh_of_these_tests():
    """A run sets its mesh for the process; the tests after these must not find it."""
    with jax.set_mesh(make_mesh(MeshShape(fsdp=2), jax.devices()[:2])):
        yield


def drawn(seed):
    """Returns a small tree of weights, one of them cut over fsdp."""
    draw = np.random.default_rng(seed)
    leaf = lambda shape, *cut: jax.device_put(
        draw.normal(size=shape).astype(np.float32), NamedSharding(jax.sharding.get_mesh(), PartitionSpec(*cut))
    )
    return {"stack": leaf((3, 8, 4), None, "fsdp"), "others": [leaf((7,)), leaf((4, 4))]}


LEAVES = {
    "stack": leaf_of("stack", ("layers", "embed", "mlp")),
    "others": [leaf_of("bias", ("norm",), trained=False), leaf_of("matrix", ("embed", "norm"))],
}


def steps(memory, sound=(True, True, True), **more):
    """Returns (params, optimizer's state, norms of what was added) after a step for each of `sound`."""
    config = AdamW(memory=memory, learning_rate=1e-2, weight_decay=0.1, schedule=CosineDecay(decay_steps=9), **more)
    traced, params = jax.tree.map(jnp.float32, config), drawn(0)
    state = jax.jit(lambda config, params: begin(ADAMW, config, params, LEAVES))(traced, params)

    def one(config, params, state, gradient, sound):
        params, state, added = step(ADAMW, config, gradient, state, params, LEAVES, sound)
        return params, state, sum(jnp.sum(x * x) for x in jax.tree.leaves(added))

    update, norms = jax.jit(one, donate_argnums=(1, 2)), []
    for i, good in enumerate(sound):
        params, state, norm = update(traced, params, state, drawn(1 + i), jnp.bool_(good))
        norms.append(norm)
    return params, state, norms


@pytest.mark.parametrize("moments", [None, "bfloat16"])
def test_moments_on_the_host_make_the_same_steps(moments):
    expected, actual = steps("device", moments=moments), steps("host", moments=moments)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        # Two programs, of which one may fuse a product and a sum that the other rounds apart.
        np.testing.assert_allclose(
            np.float64(a), np.float64(b), rtol=1e-2 if a.dtype == jnp.bfloat16 else 1e-6, atol=1e-7
        )
    np.testing.assert_array_equal(actual[0]["others"][0], drawn(0)["others"][0])  # not trained


def test_moments_lie_on_the_host_and_nothing_else_does():
    params, state, _ = steps("host", sound=(True,))
    kinds = {jax.tree_util.keystr(path): memory_kind(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    assert {HOST if ".mu" in name or ".nu" in name else None for name in kinds} == {HOST, None}
    assert all(kind == (HOST if ".mu" in name or ".nu" in name else None) for name, kind in kinds.items())
    assert {memory_kind(leaf) for leaf in jax.tree.leaves(params)} == {None}
    on_device = steps("device", sound=(True,))[1]
    assert {memory_kind(leaf) for leaf in jax.tree.leaves(on_device)} == {None}


def test_an_unsound_step_keeps_every_bit_on_the_host():
    before, after = steps("host", sound=(True,)), steps("host", sound=(True, False))
    for a, b in zip(jax.tree.leaves(after[:2]), jax.tree.leaves(before[:2])):
        np.testing.assert_array_equal(a, b)


def test_a_device_without_such_memory_is_refused_by_the_field_that_asks():
    memory = types.SimpleNamespace(kind="device")
    device = types.SimpleNamespace(platform="tpu", addressable_memories=lambda: [memory])
    bare = types.SimpleNamespace(devices=np.array([device], object), local_devices=[device])
    asks = lambda *bindings: load_config("configs/tiny.gin", bindings)[0]
    with pytest.raises(ValueError, match=r"AdamW\.memory='host' needs host memory \(pinned_host\).* TPUs? "):
        check_host(asks("AdamW.memory='host'"), bare)
    with pytest.raises(ValueError, match=r"Decoder\.remat='offload' needs host memory"):
        check_host(asks("Decoder.remat='offload'"), bare)
    with pytest.raises(ValueError, match=r"AdamW\.memory='host'"):
        warm = (
            "Config.stages=[@warm/Offline(), @Online()]",
            "warm/Offline.source=@Demonstrations()",
            "warm/Offline.objective=@SFT()",
            "warm/AdamW.memory='host'",
        )
        check_host(asks(*warm), bare)
    check_host(asks("Decoder.remat='dots'"), bare)
    check_host(asks("AdamW.memory='host'", "Decoder.remat='offload'"), jax.sharding.get_mesh())


def test_a_program_knows_where_its_arguments_and_results_lie():
    program_cache = ProgramCache()
    begun = program_cache.program("begin", lambda params: begin(ADAMW, AdamW(memory="host"), params, LEAVES))
    doubled = program_cache.program("double", lambda x: x * 2)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), drawn(0))
    shape = begun.compile(params)
    assert memory_kind(shape[1][0].mu["stack"]) == HOST and memory_kind(shape[1][0].count) is None
    assert shape[1][0].mu["stack"].sharding.spec == PartitionSpec(None, "fsdp", None)
    program_cache.freeze()
    begun_state = begun(drawn(0))
    assert begun_state[1][0].mu["stack"].sharding == shape[1][0].mu["stack"].sharding
    program_cache.frozen = False
    place = lambda kind: jax.device_put(
        np.ones(3, np.float32), NamedSharding(jax.sharding.get_mesh(), PartitionSpec(), memory_kind=kind)
    )
    doubled(place(None))
    program_cache.freeze()
    with pytest.raises(CompileAfterFreeze, match=r"float32\[3\], is float32\[3\] in pinned_host"):
        doubled(place(HOST))


def run(folder, *bindings, stop_after=None):
    """Trains, or trains until a step is done and leaves as a notebook would."""
    named = {binding.partition("=")[0]: binding for binding in [*TINY, *bindings]}
    with contextlib.closing(jrl.steps("configs/tiny.gin", list(named.values()), run=folder)) as running:
        for seen in running:
            if seen.step == stop_after:
                break


def digests(folder, step):
    """Returns leaf -> what its checkpoint says of it: dtype, shape and hash."""
    return verify_step(folder / "checkpoints", step)["leaves"]


def test_a_run_with_its_moments_on_the_host_resumes_bit_for_bit(tmp_path):
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    run(uninterrupted)
    run(killed, stop_after=1)
    run(killed)
    assert digests(killed, 2) == digests(uninterrupted, 2)


def test_a_checkpoint_is_read_to_where_it_is_asked_for(tmp_path):
    states = {kind: steps(kind, sound=(True,))[1] for kind in ("host", "device")}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states)
    save_step(tmp_path, 1, states["host"], {})
    for kind, shape in shapes.items():
        _, read, _ = restore_step(tmp_path, shape, 1)
        for actual, saved, asked in zip(*map(jax.tree.leaves, (read, states["host"], shape))):
            assert memory_kind(actual) == memory_kind(asked) and actual.sharding.spec == asked.sharding.spec, kind
            np.testing.assert_array_equal(actual, saved)


def test_where_moments_lie_makes_no_other_run():
    assert "AdamW.memory" in FREE
