"""The kernel and the loops around it, compiled for a TPU that is not there. Needs libtpu: .ci/run puts it beside the
environment for this file alone, as with it every plan would compile."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jrl.device.sharding import MeshShape, batch_axes, gather
from jrl.models import expert_gradient, fused_experts
from jrl.models.attention import fused_blocks, fused_qkv, ragged, splash
from jrl.models.attention.fused import QK_NORM, QKV, Stacked
from jrl.models.experts import KERNEL_LEAVES
from jrl.models.shape import Decoder
from jrl.resolve import load_config
from jrl.tools.plan import budget, cycles
from jrl.tools.plan.case import make_case
from jrl.tools.plan.chips import parse_topology
from jrl.tools.plan.compiled import compile_now, topology_mesh
from jrl.tools.plan.counted import network_seconds
from jrl.tools.plan.shapes import lower, topology_meshes

TINY = ["Decoder.attention='splash'", "Sampler.attention='ragged'", "Decoder.window=4",
        "Decoder.window_layers=(True, False)", "Decoder.attention_cap=30.0", "Decoder.sinks=True",
        "MeshShape.fsdp=2", "MeshShape.tensor=2"]  # fmt: skip
# An update of few rows runs the same kernels, and is compiled in half the time.
FEW_ROWS = ["Online.prompts=4", "Online.samples=4"]

COMPILES = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def placed(mesh, shape, dtype):
    """Returns an array that every device has, as a shape."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


@COMPILES
@pytest.mark.parametrize(
    "dtype, head_dim, remat, memory", [("bfloat16", 64, "offload", "host"), ("float32", 128, "dots", "device")]
)
def test_an_update_and_a_decode_loop_with_the_kernel_compile_for_a_tpu(dtype, head_dim, remat, memory, tmp_path):
    command = [sys.executable, "-m", "jrl.cli", "plan", "configs/tiny.gin", "--topology", "v5e:2x2",
               "--no-collectives", "--json", *TINY, *FEW_ROWS, f"Decoder.dtype={dtype!r}",
               f"Decoder.head_dim={head_dim}", f"Decoder.remat={remat!r}", f"AdamW.memory={memory!r}"]  # fmt: skip
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["fits"] and {"sample", "update"} <= {program["name"] for program in result["programs"]}
    update = next(program for program in result["programs"] if program["name"] == "update")
    assert (update["host"] > 0) == (memory == "host") == (sum(result["host_gib"].values()) > 0)
    assert "update: compiled in" in done.stderr and "sample: compiled in" in done.stderr


@COMPILES
@pytest.mark.parametrize("tensor, head_dim", [(1, 64), (2, 128)])
def test_ragged_attention_reads_the_cache_where_it_lies(tensor, head_dim):
    bindings = ["Sampler.attention='ragged'", "Sampler.layers='scanned'", "Sampler.slots=24", "Data.prompt_length=200",
                "Sampler.completion_length=12000", "Decoder.dtype='bfloat16'", f"Decoder.head_dim={head_dim}",
                f"MeshShape.fsdp={4 // tensor}", f"MeshShape.tensor={tensor}"]  # fmt: skip
    config, parts = load_config("configs/tiny.gin", bindings)
    cache = budget.sample(make_case(config, parts, 4)).cache  # with the resident prompts, a fiftieth of it
    mesh = topology_mesh(parse_topology("v5e:2x2"), config.mesh)
    with jax.default_matmul_precision("highest"):  # as in a run
        compiled = lower(config, parts, mesh)["rl.sample"].compile()
    text = compiled.as_text()
    # Of two layers, 24 rows and 96 x 128 columns, of which neither keys nor values fit into the core; heads of
    # 64 are filled up. Carried once, and never moved: a copy of the keys alone would be half as much again.
    carried = [line.count(f"bf16[2,24,{2 // tensor},12288,128]") for line in re.findall(r" = \((.*)\) while\(", text)]
    assert "ragged_attention" in text and max(carried) == 2
    assert cache < compiled.memory_analysis().temp_size_in_bytes < 1.1 * cache


@COMPILES
def test_the_gradient_of_attention_over_wide_heads_fits_into_a_core():
    mesh = topology_mesh(parse_topology("v4:2x2x1"), MeshShape())
    with jax.set_mesh(mesh):  # Gemma 4's full heads, in the dtype that a published model has by default
        query, keys = placed(mesh, (1, 1024, 2, 512), "float32"), placed(mesh, (1, 1, 1024, 512), "float32")
        attend = lambda q, k, v, segment: splash.attend(q, k, v, segment).sum()
        gradient = jax.jit(jax.grad(attend, (0, 1, 2)))
        assert (
            "splash_mha_dkv" in gradient.lower(query, keys, keys, placed(mesh, (1, 1024), "int32")).compile().as_text()
        )


@COMPILES
@pytest.mark.parametrize("heads, head_dim, dtype", [(64, 256, "float32"), (128, 128, "bfloat16")])
def test_ragged_attention_of_many_heads_fits_into_a_core(heads, head_dim, dtype):
    mesh = topology_mesh(parse_topology("v4:2x2x1"), MeshShape())  # whose core has 16 MiB, the least of all
    with jax.set_mesh(mesh):
        query, cache = placed(mesh, (8, 1, heads, head_dim), dtype), placed(mesh, (8, heads, 1024, head_dim), dtype)
        attend = jax.jit(lambda q, k, v, first, last: ragged.attend(q, k, v, None, first, last))
        bounds = [placed(mesh, (8,), "int32")] * 2
        assert "ragged_attention" in attend.lower(query, cache, cache, *bounds).compile().as_text()


@COMPILES
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_block_of_an_experts_gradient_fits_into_a_core(dtype, topology):
    mesh = topology_mesh(parse_topology(topology), MeshShape())
    with jax.set_mesh(mesh):
        of = lambda *shape, dtype=dtype: placed(mesh, shape, dtype)
        of_matrices = lambda *arrays: expert_gradient.of_matrices(*arrays, dtype)
        sizes = of(2, dtype="int32")
        for run, x, y in (
            (of_matrices, of(256, 1024), of(256, 1024)),
            (expert_gradient.of_rows, of(256, 2048), of(2, 1024, 2048)),
            (expert_gradient.of_rows, of(256, 2880), of(2, 1024, 2880)),  # a block of all columns
            (expert_gradient.of_rows, of(256, 192), of(2, 2048, 192)),
        ):
            shard = jax.shard_map(run, in_specs=(PartitionSpec(),) * 3, out_specs=PartitionSpec())
            assert "expert_" in jax.jit(shard).lower(x, y, sizes).compile().as_text()


@COMPILES
@pytest.mark.parametrize(
    "dtype, width, expert_width, bias",
    [
        ("bfloat16", 2048, 192, False),
        ("bfloat16", 2048, 768, False),
        ("bfloat16", 2880, 360, True),  # one block that is larger than its buffers
        ("float32", 2048, 192, False),
        ("float32", 2048, 768, False),
        ("float32", 1024, 512, True),
    ],
)
def test_experts_of_as_many_rows_as_are_taken_fit_into_a_core(dtype, width, expert_width, bias):
    mesh, itemsize = topology_mesh(parse_topology("v4:2x2x1"), MeshShape()), jnp.dtype(dtype).itemsize
    rows = max(n for n in range(8, 2048, 8) if fused_blocks.expert_block(n, width, expert_width, itemsize) is not None)
    of = lambda *shape, dtype=dtype: placed(mesh, shape, dtype)
    leaves = dict.fromkeys(KERNEL_LEAVES[:3], of(1, 2, expert_width, width))
    leaves |= dict.fromkeys(KERNEL_LEAVES[3:], of(1, 2, expert_width)) if bias else {}
    run = functools.partial(fused_experts.mix, activation=jax.nn.silu, clamp=7.0 if bias else None)
    with jax.set_mesh(mesh):
        mixed = jax.jit(lambda h, share, ids, *weights: run(h, share, ids, Stacked(*weights)))
        token = of(rows, 1, width), of(rows, 1, 2, dtype="float32"), of(rows, 1, 2, dtype="int32")
        assert "fused_experts" in mixed.lower(*token, leaves, of(dtype="int32")).compile().as_text()


@COMPILES
def test_queries_of_as_many_rows_as_are_taken_fit_into_a_core():
    """Of the 8B over fsdp alone. Compiled in seconds; with a store for every row and head in many minutes."""
    mesh = topology_mesh(parse_topology("v4:2x2x1"), MeshShape())
    cfg = Decoder(width=4096, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    rows = max(n for n in range(8, 2048, 8) if fused_blocks.qkv_block(n, 4096, (32, 8), 128, 2) is not None)
    of = lambda *shape, dtype="bfloat16": placed(mesh, shape, dtype)
    leaves = {"attention_norm": of(2, 4096), QKV: of(2, 4096, 48 * 128), QK_NORM: of(2, 40, 128)}
    with jax.set_mesh(mesh):
        project = jax.jit(lambda x, leaves, layer, *angle: fused_qkv.project(x, Stacked(leaves, layer), *angle, cfg))
        angle = of(rows, 1, 1, 64, dtype="float32")
        lowered = project.lower(of(rows, 1, 4096), leaves, of(dtype="int32"), angle, angle)
        assert rows > fused_qkv.MOST_STORED and "fused_qkv" in lowered.compile().as_text()


@COMPILES
@pytest.mark.parametrize("dtype, axis", [("bfloat16", "fsdp"), ("float32", "expert")])
def test_a_mixture_decodes_and_learns_by_kernels(dtype, axis):
    bindings = ["Decoder.experts=@Experts()", "Experts.count=4", "Experts.per_token=2", "Experts.width=192",
                "Decoder.width=128", f"Decoder.dtype={dtype!r}", "Sampler.attention='ragged'",
                "Sampler.layers='scanned'", f"MeshShape.{axis}=2", "MeshShape.tensor=2", *FEW_ROWS]  # fmt: skip
    config, parts = load_config("configs/tiny.gin", bindings)
    mesh = topology_mesh(parse_topology("v5e:2x2"), config.mesh)
    lowered = lower(config, parts, mesh)
    texts = {name: compile_now(lowered[name]).text for name in ("rl.sample", "rl.update")}
    assert "/fused_experts" in texts["rl.sample"]
    assert "/expert_gradient/" in texts["rl.update"] and "/expert_rows_gradient/" in texts["rl.update"]
    # A prefill takes a layer's matrices of the stack, and lays out no more than these anew.
    runs = cycles.runs(cycles.parse(texts["rl.sample"]), cycles.Frequency())
    copied = {run.instruction.shapes[0].dims for run in runs if run.instruction.op == "copy" and run.loops}
    assert (2, 4 // config.mesh.expert, 192 // 2, 128) not in copied


@COMPILES
def test_gradients_are_summed_within_a_slice_before_they_cross():
    topology = parse_topology("2xv5e:2x2")
    mesh = topology_mesh(topology, MeshShape(slices=2, data=4, fsdp=2))
    assert [{device.slice_index for device in copies.flat} for copies in mesh.devices] == [{0}, {0}, {1}, {1}]

    def loss(weight, x):
        y = jnp.einsum("bd,de->be", x, gather(weight, "embed", None), out_sharding=PartitionSpec(batch_axes(), None))
        return (y.astype(jnp.float32) ** 2).sum()

    of = lambda spec: jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss)).lower(of(PartitionSpec("fsdp", None)), of(PartitionSpec(batch_axes(), None)))
        text = compile_now(lowered).text
    runs = cycles.runs(cycles.parse(text), cycles.Frequency({}, {}))
    # Of 2 MiB a device has half, and each of the two copies in a slice sums half of that with the other slice.
    assert network_seconds(runs, topology.chip, 2) * topology.chip.network_rate == pytest.approx(2**19)


@COMPILES
def test_a_slice_that_only_samples_is_compiled_for_by_itself():
    meshes = ["Config.mesh=@MeshShape()", "MeshShape.fsdp=4", "Config.sampler_mesh=@sampler/MeshShape()"]
    small = [
        *meshes,
        "sampler/MeshShape.fsdp=1",
        "sampler/MeshShape.data=4",
        "Decoder.layers=1",
        "Online.lag=1",
        *FEW_ROWS,
    ]
    config, parts = load_config("configs/tiny.gin", small)
    learner, sampler = topology_meshes(config, parse_topology("2xv5e:2x2"))
    assert learner.shape["fsdp"] == sampler.shape["data"] == 4
    lowered = lower(config, parts, learner, sampler)
    for name in ("rl.sample", "rl.update"):
        assert compile_now(lowered[name]).needed is None  # it fits
