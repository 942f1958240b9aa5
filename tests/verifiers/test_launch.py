"""The pool works the same however Python was started, and no process of it holds JAX."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import psutil
import pytest

ROOT = str(pathlib.Path(__file__).resolve().parents[2])
SCRIPT = """
import sys
import jrl.rollout.scoring
from jrl.tasks.example import Example, Message
from jrl.rollout.scoring import Scoring, open_scoring
from jrl.tasks.verifiers import VERIFIERS
from jrl.tasks.verifiers.exact import Exact

{jax}
example = Example("a", (Message("user", "2 + 2?"),), answer="4")
scorer = open_scoring(Scoring(verifiers=(Exact(),), workers=2), VERIFIERS)
ticket = scorer.submit(["4", "5", ""], [example] * 3, [((0, 1), n) for n in range(3)])
print(scorer.collect(ticket).reward.tolist(), scorer.pool.template_pid, *scorer.pool.worker_pids())
{end}
"""


def script(*, jax: bool = False, closed: bool = True) -> str:
    return SCRIPT.format(
        jax="import jax" if jax else "assert 'jax' not in sys.modules", end="scorer.close()" if closed else ""
    )


def run(arguments: list[str], text: str | None = None) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=120, cwd="/",
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split("] ")


@pytest.mark.parametrize("closed", [True, False])
def test_from_standard_input(closed):
    rewards, pids = run(["-"], script(closed=closed))
    assert rewards == "[1.0, 0.0, 0.0"
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.split())


def test_from_a_script_without_a_guard(tmp_path):
    path = tmp_path / "unguarded.py"
    path.write_text(script())
    assert run([str(path)])[0] == "[1.0, 0.0, 0.0"


def test_from_a_module_run_with_c_as_a_console_script_does():
    assert (
        run(["-c", f"import sys\ndef main():\n    exec({script()!r}, globals())\nsys.exit(main())"])[0]
        == "[1.0, 0.0, 0.0"
    )


def test_from_a_notebook_cell_beside_jax(tmp_path):
    cell = f'''
import linecache
source = """
import re
DIGITS = re.compile("[0-9]+")
def reward(completion: str, example) -> float:
    return float(DIGITS.fullmatch(completion) is not None) / 2
"""
linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
space = {{"__name__": "__main__"}}
exec(compile(source, "<cell 1>", "exec"), space)
from jrl.tasks.verifiers.function_source import part_of
from jrl.tasks.verifiers import VERIFIERS, as_verifier
part = part_of({{"reward": space["reward"]}})
verifier = as_verifier("reward", space["reward"])
{script(jax=True)}
table = {{**VERIFIERS, "reward": verifier}}
with open_scoring(Scoring(verifiers=(verifier.config(weight=2.0),)), table, [part]) as scorer:
    print(scorer.collect(scorer.submit(["4", "x"], [example] * 2, [((0, 1), n) for n in range(2)])).reward.tolist())
'''
    out = "".join(run(["-"], cell))
    assert out.startswith("[1.0, 0.0, 0.0") and out.endswith("[1.0, 0.0]\n")


def test_the_workers_of_a_trainer_that_is_killed_die_with_it():
    text = script(closed=False) + "\nsys.stdout.flush()\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, timeout=120,
                          env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ROOT})  # fmt: skip
    assert done.returncode == -9
    pids = [int(pid) for pid in done.stdout.split("] ")[1].split()]
    _gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=30)
    assert not alive


def test_the_verifiers_and_the_scoring_import_no_jax():
    code = (
        "import sys, jrl.rollout.scoring, jrl.tasks.verifiers.fork_server, jrl.tasks.verifiers.pool\n"
        "from jrl.tasks.verifiers import VERIFIERS\n"
        "[row.preload() for row in VERIFIERS.values() if row.preload]\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib', 'flax')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ROOT}, check=True)  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_a_module_beside_a_notebook_is_imported(tmp_path):
    """A kernel has the empty entry on its path: the folder that it works in."""
    (tmp_path / "helper_beside.py").write_text("def bonus(): return 0.25\n")
    cell = f'''
import linecache, os, sys
os.chdir({str(tmp_path)!r})
sys.path.insert(0, "")
source = """
from helper_beside import bonus
def reward(completion: str, example) -> float:
    return bonus()
"""
linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
space = {{"__name__": "__main__"}}
exec(compile(source, "<cell 1>", "exec"), space)
from jrl.tasks.verifiers.function_source import part_of
from jrl.tasks.verifiers import VERIFIERS, as_verifier
part = part_of({{"reward": space["reward"]}})
verifier = as_verifier("reward", space["reward"])
{script()}
table = {{**VERIFIERS, "reward": verifier}}
with open_scoring(Scoring(verifiers=(verifier.config(),), workers=1), table, [part]) as scorer:
    print(scorer.collect(scorer.submit(["4"], [example], [((0, 1), 0)])).reward.tolist())
'''
    assert "".join(run(["-"], cell)).endswith("[0.25]\n")
