"""Nothing in jrl turns text into code, but for the one function that loads a user's own parts, or opens a port."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2] / "jrl"
FORBIDDEN_CALLS = {"eval", "exec", "compile", "parse_expr", "sympify", "__import__", "system", "popen"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "yaml"}
OPENS_A_PORT = {"listen", "create_server", "start_server", "serve_forever"}
SERVERS = ("http.server", "socketserver", "wsgiref", "xmlrpc.server")
# (file, function): the user's own source, named on the command line or passed from the notebook.
LOADS_THE_USERS_SOURCE = {("tasks/verifiers/source.py", "_execute")}
HARMLESS = {"re.compile", "ast.literal_eval"}


def violations(tree: ast.AST, file: str) -> list[str]:
    """What a source file does that it may not, as "line: what"."""
    actual = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.split(".")[-1]
            compiled = last == "compile" and name != "compile"  # jitted.lower(...).compile(): no text
            allowed = (file, function) in LOADS_THE_USERS_SOURCE or name in HARMLESS or compiled
            if (last in FORBIDDEN_CALLS and not allowed) or last in OPENS_A_PORT:
                actual.append(f"{node.lineno}: calls {name}")
            if any(k.arg == "shell" and getattr(k.value, "value", True) for k in node.keywords):
                actual.append(f"{node.lineno}: shell=True")
            if any(
                k.arg in ("allow_pickle", "trust_remote_code") and getattr(k.value, "value", True)
                for k in node.keywords
            ):
                actual.append(f"{node.lineno}: {[k.arg for k in node.keywords]}")
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        actual.extend(f"{node.lineno}: imports {m}" for m in modules if m.split(".")[0] in FORBIDDEN_MODULES)
        actual.extend(f"{node.lineno}: imports {m}" for m in modules if m.startswith(SERVERS))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return actual


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_text_becomes_code_and_no_port_is_opened(path):
    assert violations(ast.parse(path.read_text()), str(path.relative_to(ROOT))) == []


@pytest.mark.parametrize(
    "text",
    ["eval('1')", "exec(x)", "builtins.eval(x)", "sympy.sympify(x)", "import pickle", "os.system(x)",
     "from multiprocessing import Pool", "subprocess.run(x, shell=True)", "np.load(p, allow_pickle=True)",
     "s.listen()", "asyncio.start_server(f)", "from http.server import HTTPServer", "import socketserver",
     "compile(x, 'f', 'exec')", "import yaml\nyaml.load(x)",
     "from sympy.parsing.sympy_parser import parse_expr\nparse_expr(x)"],
)  # fmt: skip
def test_the_gate_sees_what_it_is_for(text):
    assert violations(ast.parse(text), "some.py")


def test_the_gate_lets_harmless_code_through():
    assert not violations(ast.parse("re.compile('a'); jax.jit(f).lower(x).compile(); run(x, shell=False)"), "some.py")
