import dataclasses
import functools
import threading
from concurrent.futures import wait

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device.program_cache import COMPILER_OPTIONS, CompileAfterFreeze, ProgramCache, _shared_jit
from jrl.device.sharding import MeshShape, make_mesh
from jrl.learning.nonfinite import find_fault
from jrl.resolve import load_config
from jrl.run.policy import open_policy
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.tools import chat, export, score


def test_a_frozen_cache_runs_what_it_has_compiled(mesh):
    program_cache = ProgramCache()
    double = program_cache.program("double", lambda x: x * 2)
    double(jnp.ones(3))
    program_cache.freeze()
    np.testing.assert_array_equal(double(jnp.full(3, 2.0)), np.full(3, 4.0))
    assert program_cache.size() == 1


def test_a_compilation_after_the_freeze_is_an_error_that_names_program_and_shape(mesh):
    program_cache = ProgramCache()
    double = program_cache.program("double", lambda x: x["rows"] * 2)
    double({"rows": jnp.ones((4, 8))})
    program_cache.freeze()
    with pytest.raises(CompileAfterFreeze, match=r"'double'.*\['rows'\] was float32\[4, 8\], is float32\[4, 9\]"):
        double({"rows": jnp.ones((4, 9))})


def test_a_program_never_called_before_the_freeze_says_so(mesh):
    program_cache = ProgramCache()
    double = program_cache.program("double", lambda x: x * 2)
    program_cache.freeze()
    with pytest.raises(CompileAfterFreeze, match="never compiled"):
        double(jnp.ones(3))


def test_compiling_from_shapes_serves_the_later_call(mesh):
    program_cache = ProgramCache()
    double = program_cache.program("double", lambda x: x * 2)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shape = double.compile(jax.ShapeDtypeStruct((3,), np.float32, sharding=everywhere))
    assert shape.shape == (3,) and shape.dtype == np.float32
    program_cache.freeze()
    np.testing.assert_array_equal(double(jax.device_put(np.ones(3, np.float32), everywhere)), np.full(3, 2.0))


def test_programs_are_announced_before_they_are_compiled(mesh):
    announced = []
    program_cache = ProgramCache(announced.append)
    program_cache.program("double", lambda x: x * 2)(jnp.ones(3))
    assert announced == ["compiling double"]


def test_a_program_compiled_ahead_is_announced_only_to_who_waits_for_it(mesh):
    announced = []
    program_cache = ProgramCache(announced.append)
    double = program_cache.program("double", lambda x: x * 2)
    x = jnp.ones(3)
    double.compile(x)
    wait(double._pending.values())
    double(x)
    assert announced == [] and program_cache.size() == 1


def test_what_the_compiler_refuses_is_raised_by_the_call(mesh):
    program_cache = ProgramCache()
    refused = program_cache.program("refused", lambda x: x * 2, compiler_options={"no_such_option": True})
    x = jnp.ones(3)
    refused.compile(x)
    wait(refused._pending.values())
    with pytest.raises(Exception, match="no_such_option"):
        program_cache.check()  # long before the call, where a run asks after every step
    with pytest.raises(Exception, match="no_such_option"):
        refused(x)


def test_the_compiler_is_told_what_suits_the_kind_of_device(mesh):
    options = lambda platform: ProgramCache(platform=platform).options
    assert options("cpu")["xla_backend_optimization_level"] == 1 and options("tpu") == options(None) == {}
    refused = ProgramCache(platform="cpu")
    refused.options = {"no_such_option": True}
    with pytest.raises(Exception, match="no_such_option"):  # which is how one sees that it is told
        refused.program("double", lambda x: x * 2)(jnp.ones(3))


def test_options_that_the_compiler_no_longer_has_are_left_out(mesh, monkeypatch):
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", {"no_such_option": True, "xla_backend_optimization_level": 1})
    program_cache = ProgramCache(platform="cpu")
    assert program_cache.options == {"xla_backend_optimization_level": 1}
    np.testing.assert_array_equal(program_cache.program("double", lambda x: x * 2)(jnp.ones(3)), 2)


def test_a_run_is_compiled_to_the_same_bits_whatever_its_process_has_chosen(mesh):
    x = jax.random.normal(jax.random.key(0), (7, 501))  # long enough that the order of a sum depends on the compiler
    results = []
    for quickly in (False, True):
        jax.config.update("jax_disable_most_optimizations", quickly)
        total = ProgramCache(platform="cpu").program("sum", lambda x: (jnp.exp(jnp.tanh(x)) * jnp.log1p(x * x)).sum(-1))
        results.append(np.asarray(total(x)))
    jax.config.update("jax_disable_most_optimizations", False)
    np.testing.assert_array_equal(*results)


def test_a_closed_cache_begins_nothing_any_more(mesh):
    program_cache = ProgramCache()
    double = program_cache.program("double", lambda x: x * 2)
    program_cache.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        double.compile(jnp.ones(3))


def test_a_cache_that_is_closed_while_the_compiler_is_at_work_says_what_it_waits_for(mesh):
    announced, go = [], threading.Event()

    def announce(what):
        announced.append(what)
        go.set()

    program_cache = ProgramCache(announce)
    double = program_cache.program("double", lambda x: x * 2)
    started = threading.Event()
    double._pending["at work"] = program_cache.compiler.submit(lambda: started.set() or go.wait(10))
    assert started.wait(10)
    program_cache.close()
    assert len(announced) == 1 and "waiting for the compiler" in announced[0] and double._pending["at work"].done()


def test_a_check_does_not_wait_for_what_is_being_compiled(mesh):
    program_cache, go = ProgramCache(), threading.Event()
    busy = [program_cache.compiler.submit(go.wait) for _ in range(2)]
    double = program_cache.program("double", lambda x: x * 2)
    double.compile(jnp.ones(3))
    program_cache.check()
    assert not any(begun.done() for begun in [*busy, *double._pending.values()])
    go.set()
    np.testing.assert_array_equal(double(jnp.ones(3)), 2)


def test_a_policy_asks_the_compiler_for_what_its_devices_want():
    config, parts = load_config("configs/tiny.gin")
    options = open_policy(config, parts, ByteTokenizer()).program_cache.options
    assert options == ProgramCache(platform="cpu").options != {}
    assert jax.config.jax_default_matmul_precision is None  # whoever opens it has JAX as they set it


def test_products_of_a_program_have_all_bits_and_no_others(mesh):
    product, x = lambda x: x @ x, jnp.ones((2, 2))
    program = ProgramCache().program("product", product)
    assert "precision = [HIGHEST, HIGHEST]" in program._lowered((x,)).as_text()
    assert "HIGHEST" not in jax.jit(product).lower(x).as_text()


@pytest.mark.parametrize(
    "compute",
    [
        lambda probe: score.score(probe, []),
        lambda probe: score.score_rewards(probe, []),
        lambda probe: score.embeddings(probe, []),
        lambda probe: score.judge_file(probe, "", ""),
        lambda probe: score.judge_conversations(probe, []),
        lambda probe: chat.ask(probe, []),
        lambda probe: export.merged(probe, "float32"),
        lambda probe: find_fault(probe, None, None, role="policy", objective=None, model=None, cfg=None, chunk=1),
    ],
)
def test_so_have_those_of_the_commands_that_run_no_program(compute):
    class Read(Exception):
        pass

    class Probe:
        def _read(self, *_):
            raise Read(jax.config.jax_default_matmul_precision)

        __getattr__ = __str__ = _read

    with pytest.raises(Read, match="highest"):
        compute(Probe())
    assert jax.config.jax_default_matmul_precision is None


TRACED = []  # what `scaled` was traced with


def scaled(x, *, by, other=None):
    TRACED.append(by)
    return x * by


@dataclasses.dataclass(frozen=True)
class Scale:
    by: float


def scaled_by(x, *, scale):
    return scaled(x, by=scale.by)


@pytest.fixture
def traced():
    TRACED.clear()
    _shared_jit.cache_clear()  # what the tests before have shared
    return TRACED


def test_a_second_cache_traces_and_compiles_nothing_that_is_equal(mesh, traced):
    for _ in range(2):
        program_cache = ProgramCache()
        double = program_cache.program("double", functools.partial(scaled_by, scale=Scale(2.0)), donate_argnums=())
        np.testing.assert_array_equal(double(jnp.ones(3)), 2)
        assert program_cache.size() == 1  # each cache counts what it has called
    assert traced == [2.0]


@pytest.mark.parametrize("first, second", [(2, 2.0), (True, 1), (1.0, True), (0.0, -0.0), (2.0, 3.0)])
def test_statics_that_trace_to_another_program_are_not_shared(mesh, traced, first, second):
    results = [
        ProgramCache().program("scale", functools.partial(scaled_by, scale=Scale(by)))(jnp.full(2, 3))
        for by in (first, second)
    ]
    assert [(type(by), str(by)) for by in traced] == [(type(by), str(by)) for by in (first, second)]
    for actual, by in zip(results, (first, second)):
        expected = jnp.full(2, 3) * by
        assert actual.dtype == expected.dtype and np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def test_programs_with_other_jit_options_are_not_shared(mesh, traced):
    for donated in (None, 0):
        double = ProgramCache().program("double", functools.partial(scaled, by=5.0), donate_argnums=donated)
        x = jnp.ones(3)
        double(x)
        assert x.is_deleted() == (donated == 0)
    assert traced == [5.0, 5.0]


def test_local_functions_and_statics_without_a_hash_are_never_shared(mesh, traced):
    def local(by):
        return lambda x: scaled(x, by=by)

    for by in (2.0, 3.0):
        np.testing.assert_array_equal(ProgramCache().program("local", local(by))(jnp.ones(3)), by)
    for by in (4.0, 5.0):
        table = functools.partial(scaled, by=by, other=np.ones(2))
        np.testing.assert_array_equal(ProgramCache().program("table", table)(jnp.ones(3)), by)
    assert traced == [2.0, 3.0, 4.0, 5.0]


def test_a_shared_function_freezes_in_each_cache_alone(mesh):
    triple = functools.partial(scaled, by=3.0)
    frozen, other = ProgramCache(), ProgramCache()
    program = frozen.program("triple", triple)
    other.program("triple", triple)(jnp.ones(3))
    frozen.freeze()
    with pytest.raises(CompileAfterFreeze, match="never compiled"):  # though the process has it by now
        program(jnp.ones(3))
    other.program("triple", triple)(jnp.ones(4))


def test_a_shared_function_runs_on_the_mesh_of_its_caller(traced):
    for device in jax.devices()[:2]:
        mesh = make_mesh(MeshShape(), [device])
        with jax.set_mesh(mesh):
            x = jax.device_put(np.ones(3), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
            result = ProgramCache().program("scale", functools.partial(scaled, by=7.0))(x)
        assert result.devices() == {device}
