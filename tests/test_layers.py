"""Imports go down only, read from the source with `ast`; and what must not import JAX does not."""

from __future__ import annotations

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# From the ground up. A module may import from the rows below its own, and a folder from itself.
LAYERS = (
    ("types", "exit_codes"),
    ("ops",),
    ("device",),
    ("bucket",),
    ("paths",),
    ("config",),
    ("tasks",),
    ("models",),
    ("algos",),
    ("learning", "rollout"),
    ("run.checkpoints", "run.report", "run.signals"),
    ("experiment",),
    ("compatibility",),
    ("plugins",),
    ("resolve",),
    ("run",),
    ("loop", "tools.plan"),
    ("api",),
    ("tools",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
NO_JAX = ("bucket", "paths", "config", "tasks", "run.signals", "rollout.stop_strings")
ARRAYS = {"jax", "jaxlib", "flax", "optax", "orbax", "tensorstore"}

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, pathlib.Path]:
    """Returns dotted name -> file of every module of the package."""
    actual = {}
    for path in sorted((ROOT / "jrl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        actual[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return actual


MODULES = modules()


def imports(path: pathlib.Path, known: dict[str, pathlib.Path]) -> set[str]:
    """Returns what a file imports, at its top or inside functions; modules of `known` by their full name."""
    actual: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            actual |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer; write the full name"
            for alias in node.names:
                imported = f"{node.module}.{alias.name}"
                actual.add(imported if imported in known else str(node.module))
    return actual


GRAPH = {name: imports(path, MODULES) for name, path in MODULES.items()}


def unit(module: str) -> str:
    """Returns the longest name under which a module stands in LAYERS: `jrl.ops.kl` is "ops"."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in names if name in LEVEL), names[-1])


def wrong_imports(graph: dict[str, set[str]]) -> list[str]:
    """Returns every import that does not go down."""
    wrong = []
    for module, used in graph.items():
        for other in sorted(used):
            if module == "jrl" or other.split(".")[0] != "jrl" or other == "jrl" or unit(other) == unit(module):
                continue
            if LEVEL[unit(other)] >= LEVEL[unit(module)]:
                wrong.append(f"{module} imports {other}")
    return wrong


def test_every_module_has_a_place():
    assert {unit(module) for module in MODULES if module != "jrl"} <= set(LEVEL)
    assert len(LEVEL) == sum(map(len, LAYERS))


def test_imports_go_down_only():
    assert wrong_imports(GRAPH) == []


def test_an_import_that_goes_up_would_be_found():
    assert wrong_imports({"jrl.ops.kl": {"jrl.learning.learner"}}) == ["jrl.ops.kl imports jrl.learning.learner"]
    assert wrong_imports({"jrl.run.report": {"jrl.run.job"}}) == ["jrl.run.report imports jrl.run.job"]


def test_there_is_no_cycle_between_modules():
    inside = {module: {used for used in names if used in MODULES} for module, names in GRAPH.items() if module != "jrl"}
    list(graphlib.TopologicalSorter(inside).static_order())


def test_the_package_itself_imports_only_the_api_and_only_when_asked():
    top = ast.parse(MODULES["jrl"].read_text(encoding="utf-8")).body
    assert not [node for node in top if isinstance(node, ast.ImportFrom) and node.module.startswith("jrl")]
    assert {name for name in GRAPH["jrl"] if name.startswith("jrl")} <= {"jrl.api", "jrl"}


def reachable(module: str) -> set[str]:
    """Returns everything that importing a module imports, the roots of other packages included."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        for used in GRAPH.get(waiting.pop(), ()):
            if used not in seen and used != "jrl":
                seen.add(used)
                waiting.append(used)
    return seen


MANY = 10  # parameters
# Arguments of one jitted call, or of a kernel's body, each an array of its own.
CALLED_BY_XLA = {
    "jrl.learning.credit.credit", "jrl.learning.learner.loss_sums", "jrl.learning.learner.update",
    "jrl.learning.nonfinite._read", "jrl.models.attention.fused_qkv._kernel", "jrl.rollout.sampler.sample",
}  # fmt: skip


def test_no_function_is_longer_than_a_hundred_lines_or_takes_more_than_ten_parameters():
    long, wide = [], set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given, name = node.args, f"{module}.{node.name}"
                long += [name] if node.end_lineno - node.lineno >= 100 else []
                if len([*given.posonlyargs, *given.args, *given.kwonlyargs]) > MANY:
                    wide.add(name)
    assert not long
    assert not wide - CALLED_BY_XLA


@pytest.mark.parametrize("name", NO_JAX)
def test_no_jax_is_named_below(name):
    for module in MODULES:
        if f"{module}.".startswith(f"jrl.{name}."):
            assert not {used for used in reachable(module) if used.split(".")[0] in ARRAYS}, module


def test_no_jax_is_loaded_in_a_process_that_imports_all_of_it():
    modules = [module for module in MODULES if f"{module}.".startswith(tuple(f"jrl.{name}." for name in NO_JAX))]
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += f"print(sorted({ARRAYS!r} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert output.returncode == 0, output.stderr
    assert output.stdout.strip() == "[]"


def test_the_configuration_needs_no_package_of_an_extra():
    """A plain install trains what needs no published weights."""
    hidden = "tokenizers", "safetensors", "jinja2", "pyarrow", "psutil", "tensorboardX"
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); import jrl.resolve, jrl.loop"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
