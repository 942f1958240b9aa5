"""Eight virtual CPU devices for the whole suite, set before JAX starts; implicit rank promotion raises.

Compiled programs are shared between the processes of one session, in a folder that goes with it: what an earlier
session compiled is never found.
"""

import atexit
import fnmatch
import functools
import gc
import itertools
import os
import shutil
import sys
import tempfile
import threading
from concurrent.futures import Executor, Future
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Hundreds of processes import the same modules: they are compiled to bytecode once, whatever the shell asks for.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# On a busy machine eight devices on two cores may wait for each other for longer than the default of 40 s.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=1",
        "--xla_cpu_parallel_codegen_split_count=1",  # code in one part takes a fifth less processor time than in many
        # jaxlib 0.12 has this option no more, and aborts where it is set.
        *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
        "--xla_cpu_collective_call_terminate_timeout_seconds=900",
        "--xla_cpu_collective_timeout_seconds=900",
    ]
)
# Without it an executable from the compilation cache deadlocks in its collectives when devices outnumber cores.
os.environ["NPROC"] = "16"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # operations without their lines of code are lowered faster
if "PYTEST_XDIST_WORKER" not in os.environ:  # else the folder is that of the process that started this one
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jrl-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # of small ones every process has thousands
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import pytest
from jax._src.interpreters import mlir

jax.config.update("jax_numpy_rank_promotion", "raise")

from jrl import plugins
from jrl.device import program_cache
from jrl.device.sharding import MeshShape, make_mesh
from jrl.run.report import memory


class AtOnce(Executor):
    """Compiles a program when it is asked to, in the thread that asks: two workers keep two cores busy as it is."""

    def __init__(self, **threads):
        super().__init__()

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


if hasattr(mlir, "make_ir_context"):  # not public
    made, lowered = mlir.make_ir_context, itertools.count()
    of_thousand = functools.lru_cache(maxsize=1)(lambda thousand: made())

    def context_of_many():
        """Programs are lowered in one context, a thousand of them: to make it is most of the lowering of a small one,
        and tests have many. Where other threads compile, each program has its own as it would without tests."""
        if program_cache.ThreadPoolExecutor is not AtOnce or threading.current_thread() is not threading.main_thread():
            return made()
        return of_thousand(next(lowered) // 1000)

    mlir.make_ir_context = context_of_many

if hasattr(mlir, "lower_with_sharding_in_types"):  # not public
    lower_with_sharding = mlir.lower_with_sharding_in_types

    def lower_without_sharding(ctx, op, aval, *others):  # jax 0.10.0 gives one more
        """On a mesh of one device no result is told its sharding, of which there is one: the programs are half as long.
        What is compiled as shipped (below) keeps them."""
        if program_cache.COMPILER_OPTIONS["cpu"] is QUICKLY and aval.sharding.mesh.size == 1:
            return op
        return lower_with_sharding(ctx, op, aval, *others)

    mlir.lower_with_sharding_in_types = lower_without_sharding


def mesh_restored():
    """A run sets its mesh for its whole process; what comes after it has a run of its own, or none."""
    empty = jax.sharding.get_abstract_mesh().empty
    yield
    if empty and not jax.sharding.get_abstract_mesh().empty:
        jax.set_mesh(None)


# A module's own fixtures may leave a mesh to its tests, and no test one to the next.
mesh_of_a_module = pytest.fixture(scope="module", autouse=True)(mesh_restored)
mesh_of_a_test = pytest.fixture(autouse=True)(mesh_restored)


@pytest.fixture(scope="module")
def mesh_of_the_runs():
    """The mesh of one device, set for a module of whole runs: each run sets it for the process."""
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_cleared():
    """Every program's kernels are mapped into memory, and beyond 65,530 maps of a process, which is Linux's default,
    the compiler aborts. What else a module leaves lives as long: full collections need not go through it again."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def resident_memory(request):
    """Runs report resident memory. The proportional size of a worker, which has mapped the kernels of thousands of
    programs, takes a tenth of a second to read, and every run reads it twice."""
    if request.path.name == "test_memory.py":
        yield
        return

    def resident_bytes(pid):
        try:
            return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE")
        except (OSError, ValueError, IndexError):
            return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_pss_bytes", resident_bytes)
        yield


# Files and folders whose programs are compiled as a user's are: bits of whole runs are compared there, or what the
# compiler made of a program is. All else holds however it is compiled, and compiling is most of a test's time.
COMPILED_AS_SHIPPED = ("test_loop.py", "test_program_cache.py", "trials")
SHIPPED = program_cache.COMPILER_OPTIONS["cpu"]
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(request):
    """Without the compiler's optimizations, those of a run's own programs (program_cache.COMPILER_OPTIONS) too."""
    first = request.path.relative_to(Path(__file__).parent).parts[0]
    if first in COMPILED_AS_SHIPPED:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(program_cache.COMPILER_OPTIONS, "cpu", QUICKLY)
        patch.setattr(program_cache, "ThreadPoolExecutor", AtOnce)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


row_of_first_load = functools.lru_cache(plugins._of_this_load)


@pytest.fixture(scope="module", autouse=True)
def rows_shared(request):
    """Rows that tests give as objects, but for objectives, are the same at every load, and so are the programs of their
    runs. jrl, which cannot know that, makes new functions of them each time."""
    if request.path.name in ("test_plugins.py", "test_optimizers_run.py"):  # which test that
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_of_this_load", row_of_first_load)
        yield


@pytest.fixture
def compiled_as_shipped(monkeypatch):
    """For a test that reads what the compiler made of a program."""
    quickly = program_cache.COMPILER_OPTIONS["cpu"] is QUICKLY
    monkeypatch.setitem(program_cache.COMPILER_OPTIONS, "cpu", SHIPPED)
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", quickly)


@pytest.fixture(scope="module")
def frozen_before_the_first_step():
    """Whatever these runs call must have been compiled before: what would be compiled by a call is an error."""
    from jrl import loop

    with pytest.MonkeyPatch.context() as patch:
        known = loop.precompile

        def freeze(job, done):
            job.program_cache.frozen = False  # where a damaged checkpoint sends a run back, it asks for more
            known(job, done)
            job.program_cache.freeze()

        patch.setattr(loop, "precompile", freeze)
        yield


@pytest.fixture(scope="module")
def programs_of_many_runs():
    """For runs of many kinds, one after another: what an early one compiled is there for a late one. Each function kept
    has about 60 maps of kernels (see programs_cleared), which is why not all are. Other processes compile other
    programs: none is written for them."""
    compiled = functools.lru_cache(maxsize=256)(program_cache._shared_jit.__wrapped__)
    written = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_cache, "_shared_jit", compiled)
        yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", written)


def pytest_addoption(parser):
    parser.addoption("--trials", choices=("smoke", "full"), default="smoke", help="how many cases trials try")


@pytest.fixture
def trials(request, record_property):
    """Returns a function: how many cases to try, of few and many, from a seed. `benchmarks.reliability` counts them."""

    def count(few, many=None, *, seed=0):
        number = few if many is None or request.config.getoption("--trials") == "smoke" else many
        record_property("trials", number)
        record_property("seed", seed)
        return number

    return count


@pytest.fixture
def synced(monkeypatch):
    """Returns a function: whether a file, as long as it is now, or a folder was forced to disk since the test began."""
    sizes, sync = {}, os.fsync

    def fsync(descriptor):
        state = os.fstat(descriptor)
        sizes[state.st_ino] = state.st_size
        sync(descriptor)

    def is_synced(path):
        state = os.stat(path)
        return state.st_ino in sizes and (os.path.isdir(path) or sizes[state.st_ino] == state.st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    return is_synced


@pytest.fixture
def mesh():
    """The mesh of one device, set for the test."""
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        yield mesh


# Files whose tests compile much or start many processes, the longest first: in this order they are given to the workers
# (pyproject.toml: a file to a worker), so that none is left with a long one at the end. All others make up the fast
# set, `pytest -m fast`.
LONG = (
    "contracts/test_algos.py",
    "models/test_decoder_options.py",
    "test_learner.py",
    "test_recipe_runs.py",
    "test_recipe_runs_of_several_updates.py",
    "test_sampler.py",
    "tools/test_eval_measures.py",
    "models/test_quantized.py",
    "test_sequence_loss.py",
    "test_lora_run.py",
    "models/test_lora.py",
    "contracts/test_models.py",
    "test_ppo_run.py",
    "test_critic_run.py",
    "test_pretraining_mix.py",
    "test_credit.py",
    "test_token_rewards.py",
    "test_pair_model.py",
    "test_cli.py",
    "models/test_expert_group.py",
    "models/test_experts.py",
    "test_routes.py",
    "test_state_by_example.py",
    "contracts/test_strategy_rows.py",
    "test_loop.py",
    "test_stages.py",
    "test_damaged_bucket.py",
    "test_pods.py",
    "test_strategies.py",
    "sweep/test_population.py",
    "sweep/test_sweep_command.py",
    "test_optimizers_run.py",
    "test_curricula_run.py",
    "test_export.py",
    "checkpoints/test_run_state.py",
    "checkpoints/test_unchanged.py",
    "test_best.py",
    "test_results_run.py",
    "test_sampler_devices.py",
    "test_teacher.py",
    "models/test_fused_experts.py",
    "models/test_fused_qkv.py",
    "models/test_linear.py",
    "models/test_row_shares.py",
    "test_replay.py",
    "algos/test_online_bradley_terry.py",
    "models/test_fused_mlp.py",
    "test_rewards.py",
    "judges/test_run.py",
    "families/test_families.py",
    "envs/test_layouts.py",
    "tools/test_tpu_scripts.py",
    "benchmarks/test_accept.py",
    "ops/test_divergence.py",
    "ops/test_router.py",
    "plan/test_flops.py",
    "test_vocab_parallel.py",
    "test_goodput_run.py",
    "report/test_rollouts.py",
    "ops/test_policy_losses.py",
    "judges/test_client.py",
    "algos/test_ift.py",
    "verifiers/test_confinement.py",
    "test_step_parts.py",
    "tools/test_long_rows.py",
    "ops/test_feedback.py",
    "models/test_fused.py",
    "ops/test_importance.py",
    "ops/test_categorical.py",
    "algos/test_vpl.py",
    "algos/test_lists.py",
    "algos/test_stored_advantage_rows.py",
    "models/test_decoder_contract.py",
    "checkpoints/test_peft.py",
    "test_published_run.py",
    "test_published_folder.py",
    "plan/test_collectives.py",
    "plan/test_waste.py",
    "plan/test_search.py",
    "models/test_remat.py",
    "models/test_ragged.py",
    "models/test_splash.py",
    "models/test_cudnn.py",
    "algos/test_conformance.py",
    "ops/test_segments.py",
    "ops/test_surrogate.py",
    "ops/test_draw.py",
    "test_sharding.py",
    "test_host.py",
    "test_nonfinite_run.py",
    "test_nonfinite.py",
    "test_finished_run.py",
    "contracts/test_envs.py",
    "envs/test_reasoning_gym_tasks.py",
    "tokenizers/test_template.py",
    "verifiers/test_launch.py",
    "verifiers/test_pool.py",
    "test_processes.py",
    "tools/test_check.py",
    "test_continue.py",
    "tools/test_new.py",
    "ops/test_advantages.py",
    "test_optimizer.py",
    "algos/test_online_dpo.py",
    "contracts/test_verifiers.py",
    "models/test_cached_attention.py",
    "models/test_contract.py",
    "models/test_heads.py",
    "ops/test_baselines.py",
    "ops/test_best_of_k.py",
    "ops/test_fingerprint.py",
    "ops/test_gae.py",
    "ops/test_turns.py",
    "sweep/test_sweep_launch.py",
    "test_compile_cache.py",
    "test_program_cache.py",
    "test_run_hash.py",
    "test_scoring.py",
    "tokenizers/test_published.py",
    "ops/test_plain_loops.py",
    "algos/test_pair_objectives.py",
    "verifiers/test_gym_score.py",
    "config/test_real_tree.py",
    "ops/test_pair_losses.py",
    "ops/test_truncate.py",
    "ops/test_kl.py",
    "ops/test_shaping.py",
    "ops/test_reduce.py",
    "ops/test_gated_reward.py",
    "algos/test_bradley_terry.py",
    "algos/test_dreamer_ppo.py",
    "ops/test_two_hot.py",
    "ops/test_filters.py",
    "ops/test_order_statistics.py",
    "contracts/test_optimizer_rows.py",
    "algos/test_sampled_pairs.py",
    "ops/test_pairs.py",
    "algos/test_nash_md.py",
    "algos/test_a3po.py",
    "algos/test_codpo.py",
    "models/test_expert_gradient.py",
    "algos/test_t_reg.py",
    "algos/test_ppo.py",
    "algos/test_pf_ppo.py",
    "algos/test_iq_learn.py",
    "ops/test_tree.py",
)


# Further cases of what a shorter case shows: with them the suite would take too long. `pytest -m slow`.
REPEATS = (
    "plan/test_waste.py::test_a_second_cache_*[unrolled]",
    "test_learner.py::test_loss_and_gradient_*[GRPO-packed]",
    "test_learner.py::test_loss_and_gradient_*[GRPO-data 8]",
    "test_learner.py::test_loss_and_gradient_*[GRPO-fsdp 8]",
    "test_learner.py::test_a_mixture_of_experts_learns_*",
    "test_learner.py::test_terms_of_routers_*[shared *",
    "test_learner.py::test_terms_of_routers_*[expert 2]",
    "test_learner.py::test_replayed_routes_*[expert 2, *",
    "test_routes.py::test_routes_that_are_permuted_*[unrolled]",
    "test_routes.py::test_devices_that_share_*",
    "test_lora_run.py::*[plain]",
    "test_ppo_run.py::test_the_first_completions_*",
    "test_lora_run.py::test_the_first_completions_*",
    "test_lora_run.py::test_an_adapter_written_apart_*[lora]",
    "test_lora_run.py::test_an_adapter_written_apart_*[rslora]",
)  # fmt: skip


def pytest_ignore_collect(collection_path, config):
    """Importing the files of LONG and making their cases would take a twelfth of the fast set's time."""
    tests = config.rootpath / "tests"
    if config.option.markexpr == "fast" and collection_path.is_relative_to(tests):
        return collection_path.relative_to(tests).as_posix() in LONG or None
    return None


def pytest_collection_finish(session):
    """Tracing makes many objects that live long; the collector need not look at them, nor at the modules, so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


def pytest_collection_modifyitems(config, items):
    order = {config.rootpath / "tests" / name: place for place, name in enumerate(LONG)}
    repeats = [f"tests/{pattern.replace('[', '[[]')}" for pattern in REPEATS]  # brackets as they are
    for item in items:
        if any(fnmatch.fnmatchcase(item.nodeid, pattern) for pattern in repeats):
            item.add_marker("slow")
        if item.path not in order and item.get_closest_marker("slow") is None:
            item.add_marker("fast")
    items.sort(key=lambda item: order.get(item.path, len(LONG)))  # stable: the others keep their order
