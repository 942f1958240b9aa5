import threading
from concurrent.futures import wait

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device.program_cache import COMPILER_OPTIONS, CompileAfterFreeze, ProgramCache
from jrl.resolve import load_config
from jrl.run.job import open_policy
from jrl.tasks.tokenizers.bytes import ByteTokenizer


def test_a_sealed_lattice_runs_what_it_has_compiled(mesh):
    program_cache = ProgramCache()
    double = program_cache.program("double", lambda x: x * 2)
    double(jnp.ones(3))
    program_cache.freeze()
    np.testing.assert_array_equal(double(jnp.full(3, 2.0)), np.full(3, 4.0))
    assert program_cache.size() == 1


def test_a_compilation_after_the_seal_is_an_error_that_names_program_and_shape(mesh):
    program_cache = ProgramCache()
    double = program_cache.program("double", lambda x: x["rows"] * 2)
    double({"rows": jnp.ones((4, 8))})
    program_cache.freeze()
    with pytest.raises(CompileAfterFreeze, match=r"'double'.*\['rows'\] was float32\[4, 8\], is float32\[4, 9\]"):
        double({"rows": jnp.ones((4, 9))})


def test_a_program_never_called_before_the_seal_says_so(mesh):
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
    said = []
    program_cache = ProgramCache(said.append)
    program_cache.program("double", lambda x: x * 2)(jnp.ones(3))
    assert said == ["compiling double"]


def test_a_program_compiled_ahead_is_announced_only_to_who_waits_for_it(mesh):
    said = []
    program_cache = ProgramCache(said.append)
    double = program_cache.program("double", lambda x: x * 2)
    x = jnp.ones(3)
    double.compile(x)
    wait(double._begun.values())
    double(x)
    assert said == [] and program_cache.size() == 1


def test_what_the_compiler_refuses_is_raised_by_the_call(mesh):
    program_cache = ProgramCache()
    refused = program_cache.program("refused", lambda x: x * 2, compiler_options={"no_such_option": True})
    x = jnp.ones(3)
    refused.compile(x)
    wait(refused._begun.values())
    with pytest.raises(Exception, match="no_such_option"):
        program_cache.check()  # long before the call, where a run asks after every step
    with pytest.raises(Exception, match="no_such_option"):
        refused(x)


def test_the_compiler_is_told_what_suits_the_kind_of_device(mesh):
    told = lambda platform: ProgramCache(platform=platform).options
    assert told("cpu") == {"xla_backend_optimization_level": 1} and told("tpu") == told(None) == {}
    refused = ProgramCache(platform="cpu")
    refused.options = {"no_such_option": True}
    with pytest.raises(Exception, match="no_such_option"):  # which is how one sees that it is told
        refused.program("double", lambda x: x * 2)(jnp.ones(3))


def test_a_closed_lattice_begins_nothing_any_more(mesh):
    program_cache = ProgramCache()
    double = program_cache.program("double", lambda x: x * 2)
    program_cache.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        double.compile(jnp.ones(3))


def test_a_lattice_that_is_closed_while_the_compiler_is_at_work_says_what_it_waits_for(mesh):
    said, go = [], threading.Event()

    def announce(what):
        said.append(what)
        go.set()

    program_cache = ProgramCache(announce)
    double = program_cache.program("double", lambda x: x * 2)
    started = threading.Event()
    double._begun["at work"] = program_cache.compiler.submit(lambda: started.set() or go.wait(10))
    assert started.wait(10)
    program_cache.close()
    assert len(said) == 1 and "waiting for the compiler" in said[0] and double._begun["at work"].done()


def test_a_check_does_not_wait_for_what_is_being_compiled(mesh):
    program_cache, go = ProgramCache(), threading.Event()
    busy = [program_cache.compiler.submit(go.wait) for _ in range(2)]
    double = program_cache.program("double", lambda x: x * 2)
    double.compile(jnp.ones(3))
    program_cache.check()
    assert not any(begun.done() for begun in [*busy, *double._begun.values()])
    go.set()
    np.testing.assert_array_equal(double(jnp.ones(3)), 2)


def test_a_policy_asks_the_compiler_for_what_its_devices_want():
    config, parts = load_config("configs/tiny.gin")
    assert open_policy(config, parts, ByteTokenizer()).program_cache.options == COMPILER_OPTIONS["cpu"] != {}
