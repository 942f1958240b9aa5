"""The declared set of compiled programs of a run.

Every program is called through the program cache, which compiles it for each combination of argument shapes. Programs
that will be needed are precompiled from shapes while the calling thread continues. Once the cache is frozen, a call
that would compile raises an error that names the program and the shape. A process without a device of the program's
mesh compiles and runs nothing, and returns arrays without shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import NamedSharding

from jrl.device.host_memory import HOST, memory_kind
from jrl.device.placement import is_here, without_shards
from jrl.device.precision import full_precision

# Gather the weights of the next product while the current one is computed: with an 8B model over fsdp 16, the update
# waits for 2 of the 14 gathers per layer, not for all. Source: MaxText's flags for TPUs (async collective fusion),
# which libtpu also accepts as options.
TPU_OPTIONS = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
}
# Platform or kind of device -> compiler options. On CPUs LLVM's optimization level 1 takes an eighth less time overall,
# and its code is as fast: matrix products come from a library, and sums and exponentials are vectorized at level 1 too.
# The other options are defaults, written out so that a run compiles to the same bits whatever else its process sets.
# Options that the installed compiler no longer has are left out.
COMPILER_OPTIONS = {
    "cpu": {
        "xla_backend_optimization_level": 1,
        "xla_llvm_disable_expensive_passes": False,
        "xla_cpu_use_fusion_emitters": True,
    }
} | dict.fromkeys(("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"), TPU_OPTIONS)
MAX_SHARED = 64  # jitted functions that a process keeps for later runs; a run has about 20


class CompileAfterFreeze(RuntimeError):
    """A program was called with shapes it was not compiled for, after the program cache was frozen."""


class Program:
    """One jitted function and its executables, one for each signature. Arguments are positional arrays and trees."""

    def __init__(self, name: str, fn: Callable, program_cache: ProgramCache, jit_options: dict[str, Any]) -> None:
        self.name = name
        self._jitted = shared_jit(fn, jit_options)
        self._program_cache = program_cache
        self._compiled: dict[tuple, Any] = {}
        self._pending: dict[tuple, Future] = {}  # compiling, and not called yet

    def __call__(self, *args: Any) -> Any:
        if not is_here(jax.sharding.get_mesh()):
            return jax.tree.map(without_shards, self.shape(*args))
        return self._executable(args)(*args)

    def shape(self, *args: Any) -> Any:
        """Returns shape, dtype and sharding of the result, from those of the arguments alone."""
        mesh = jax.sharding.get_mesh()

        def place(x: Any) -> jax.ShapeDtypeStruct:
            kind = HOST if x.memory_space == jax.memory.Space.Host else None  # jax.eval_shape drops it
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec, memory_kind=kind)
            )

        with full_precision():
            traced = self._jitted.trace(*args)
        return jax.tree.map(place, traced.out_avals)

    def compile(self, *args: Any) -> Any:
        """Starts compiling for these arguments and returns the result of `shape`. The first call waits for the
        compiler."""
        signature = _signature(args)
        if is_here(jax.sharding.get_mesh()) and not self._knows(signature):
            self._check_not_frozen(args, signature)
            # Only the compiler runs in a thread: tracing and lowering hold the GIL anyway.
            self._pending[signature] = self._program_cache.compiler.submit(self._lowered(args).compile)
        return self.shape(*args)

    def _lowered(self, args: tuple) -> jax.stages.Lowered:
        with full_precision():
            return self._jitted.lower(*args)

    def _executable(self, args: tuple) -> Any:
        signature = _signature(args)
        if not self._knows(signature):
            self._check_not_frozen(args, signature)
            self._program_cache.announce(f"compiling {self.name}")
            with self._program_cache.compiling():
                self._compiled[signature] = self._lowered(args).compile()
        elif signature in self._pending:
            if not self._pending[signature].done():
                self._program_cache.announce(f"compiling {self.name}")
            with self._program_cache.compiling():
                self._compiled[signature] = self._pending.pop(signature).result()
        return self._compiled[signature]

    def _knows(self, signature: tuple) -> bool:
        return signature in self._compiled or signature in self._pending

    def _check_not_frozen(self, args: tuple, signature: tuple) -> None:
        if self._program_cache.frozen:
            raise CompileAfterFreeze(self._explain(args, signature))

    def _explain(self, args: tuple, signature: tuple) -> str:
        message = f"program {self.name!r} would compile after the program cache was frozen"
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(args)[0]]
        for structure, compiled_leaves in reversed([*self._compiled, *self._pending]):
            if structure == signature[0]:
                changed = [
                    f"argument {path} was {_show(old)}, is {_show(new)}"
                    for path, old, new in zip(paths, compiled_leaves, signature[1])
                    if old != new
                ]
                return f"{message}: " + "; ".join(changed[:5])
        return f"{message}: it was never compiled for arguments of this structure"


class ProgramCache:
    """The programs of a run."""

    def __init__(self, announce: Callable[[str], None] = lambda what: None, platform: str | None = None) -> None:
        """Creates an empty cache.

        Args:
          announce: called with what the caller is about to wait for.
          platform: a key of COMPILER_OPTIONS, or another kind of device, which has none.
        """
        self.programs: dict[str, Program] = {}
        self.frozen = False
        self.announce = announce
        self.compiling: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # entered to wait
        options = COMPILER_OPTIONS.get(platform, {})
        self.options = {name: value for name, value in options.items() if compiler_has(name, value)}
        self.compiler = ThreadPoolExecutor(max_workers=2, thread_name_prefix="compiler")

    def program(self, name: str, fn: Callable, **jit_options: Any) -> Program:
        """Adds `fn` to the cache and returns its program. Bind static arguments first."""
        self.programs[name] = Program(name, fn, self, {"compiler_options": self.options, **jit_options})
        return self.programs[name]

    def freeze(self) -> None:
        """Makes every later compilation an error."""
        self.frozen = True

    def check(self) -> None:
        """Raises the first compiler error among the programs that were precompiled and not yet called."""
        for program in self.programs.values():
            for pending in program._pending.values():
                if pending.done():
                    pending.result()

    def close(self) -> None:
        """Starts no more compilations and waits for those in progress."""
        self.compiler.shutdown(wait=False, cancel_futures=True)
        if any(pending.running() for program in self.programs.values() for pending in program._pending.values()):
            self.announce("waiting for the compiler, which cannot be interrupted")
        self.compiler.shutdown()

    def size(self) -> int:
        """Returns the number of executables, including those still compiling."""
        return sum(len(program._compiled) + len(program._pending) for program in self.programs.values())


@functools.cache
def compiler_has(name: str, value: bool | int) -> bool:
    """Whether the installed compiler has an option. XLA removes options that have lost their alternatives: jaxlib 0.12
    has no `xla_cpu_use_fusion_emitters`."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True


def shared_jit(fn: Callable, jit_options: dict[str, Any]) -> Callable:
    """Returns `jax.jit(fn, **jit_options)`, the same object for equal functions, so that JAX traces and compiles them
    once.

    Two functions are equal if they are the same module-level function, or partials of it with equal static arguments. A
    later run in the same process (a sweep, a notebook) then reuses what an earlier one compiled. Local functions are
    never shared: the values they close over may differ, and must not outlive their run.
    """
    function = fn.func if isinstance(fn, functools.partial) else fn
    call = _Jit((static_key(fn), static_key(jit_options)), fn, jit_options)
    local = "<locals>" in getattr(function, "__qualname__", "<locals>")
    return jax.jit(fn, **jit_options) if local or not call.hashable() else _shared_jit(call)


@dataclasses.dataclass(frozen=True)
class _Jit:
    key: Hashable
    fn: Callable = dataclasses.field(compare=False)
    jit_options: dict[str, Any] = dataclasses.field(compare=False)

    def hashable(self) -> bool:
        try:
            hash(self.key)
        except TypeError:  # a bound array or list, which only the caller can compare
            return False
        return True


@functools.lru_cache(maxsize=MAX_SHARED)
def _shared_jit(call: _Jit) -> Callable:
    return jax.jit(call.fn, **call.jit_options)


def static_key(value: Any) -> Hashable:
    """Returns a key that is equal only for static values that trace to the same program.

    Stricter than `==`, for which 1 equals 1.0 and True, and -0.0 equals 0.0. A value that is not a container is its own
    key.
    """
    kind = type(value)
    if isinstance(value, functools.partial):
        return kind, static_key(value.func), static_key(value.args), static_key(value.keywords)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kind, tuple(static_key(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, dict):
        return kind, tuple((static_key(name), static_key(entry)) for name, entry in value.items())
    if isinstance(value, tuple):
        return kind, tuple(static_key(entry) for entry in value)
    return kind, value.hex() if isinstance(value, float) else value


def _signature(args: tuple) -> tuple:
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple(_describe(leaf) for leaf in leaves)


def _describe(leaf: Any) -> tuple:
    spec = tuple(getattr(getattr(leaf, "sharding", None), "spec", ()))
    while spec and spec[-1] is None:  # P('data') and P('data', None) are the same layout
        spec = spec[:-1]
    return tuple(leaf.shape), str(leaf.dtype), spec, memory_kind(leaf)


def _show(described: tuple) -> str:
    shape, dtype, spec, kind = described
    text = f"{dtype}{list(shape)}" + (f" sharded over {spec}" if spec else "")
    return text if kind is None else f"{text} in {kind}"
