"""Kills, stops and misconfigures one of the local processes of a run of configs/tiny.gin, and looks at the others and
at the run that goes on. Run by hand:

pytest -m slow tests/trials/test_kill_pods.py -s
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from test_pods import EVAL, ONE_SAMPLES, ONE_SMALL, assert_same, metrics, train

import jrl
from jrl.run.checkpoints.run_state import list_steps
from jrl.run.launch import free_port

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[2] / "configs" / "tiny.gin"
STEPS = 6
SMALL = {binding.partition("=")[0]: binding for binding in [*ONE_SMALL, f"Online.steps={STEPS}"]}
# What the killed process is doing, how many times that is announced before, and the longest wait after.
POINTS = [
    ("save", 1, 0.05), ("save", 2, 0.1), ("save", 3, 0.2), ("save", 4, 0.05), ("save", 5, 0.1),
    ("scoring", 1, 0.01), ("scoring", 2, 0.02), ("scoring", 3, 0.01), ("scoring", 4, 0.02), ("scoring", 5, 0.01),
    ("sample", 2, 0.05), ("sample", 4, 0.05), ("update", 2, 0.05), ("update", 3, 0.02), ("update", 5, 0.05),
    ("exchange", 12, 0.01), ("exchange", 30, 0.01), ("exchange", 47, 0.01),
    ("compile", 1, 0.3), ("compile", 3, 0.3),
]  # fmt: skip


class Machine(NamedTuple):
    """One process of a run, on standard error of which tests/trials/announce.py says what it does."""

    process: subprocess.Popen
    log: Path

    def messages(self):
        return self.log.read_text(errors="replace")

    def wait_until(self, doing, times=1, seconds=300):
        end = time.monotonic() + seconds
        while self.messages().count(f"NOW {doing}\n") < times:
            assert self.process.poll() is None, f"ended before {doing} {times}: {self.messages()[-800:]}"
            assert time.monotonic() < end, f"{doing} did not come {times} times"
            time.sleep(0.01)


def start(folder, logs, *bindings, count=2, changed=None, environments=None, devices=None, config=TINY, folders=None,
          cached=True, indices=None):  # fmt: skip
    """Starts the processes of a run as on several machines. By process: `changed` are bindings, `environments` what is
    set in its environment, `devices` how many it has, `folders` where it starts. `indices`: those that
    are started; None: all."""
    port, machines = free_port(), []
    logs.mkdir(exist_ok=True)
    for index in range(count) if indices is None else indices:
        named = {b.partition("=")[0]: b for b in [*SMALL.values(), *bindings, *(changed or {}).get(index, ())]}
        settings = [*(named.values() if config == TINY else ()), *([] if cached else ["--no-compile-cache"])]
        command = [sys.executable, str(Path(__file__).with_name("announce.py")), "train", str(config), *settings,
                   "--run", str(folder),
                   "--coordinator", f"127.0.0.1:{port}", "--process-count", str(count), "--process-index", str(index),
                   "--devices", str((devices or {}).get(index, 4 // count))]  # fmt: skip
        environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JRL_START_SECONDS": "60"}
        log = logs / f"{index}.log"
        with open(log, "w") as file:
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=file,
                cwd=folders and folders[index],
                env={**environment, **(environments or {}).get(index, {})},
            )
        machines.append(Machine(process, log))
    return machines


def end(machines):
    for machine in machines:
        machine.process.kill()
        machine.process.wait()


def family(machines):
    """Returns the processes and all that they have started."""
    found = []
    for machine in machines:
        root = psutil.Process(machine.process.pid)
        found += [root, *root.children(recursive=True)]
    return found


def left(processes, seconds=5.0):
    """Returns which of the processes are still there after some seconds."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def lag_of(lag):
    return (f"Online.lag={lag}",)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folders = {lag: tmp_path_factory.mktemp(f"whole{lag}") for lag in (0, 1)}
    for lag, folder in folders.items():
        train(folder, f"Online.steps={STEPS}", *lag_of(lag))
    return folders


def contents(folder):
    done = subprocess.run(
        [sys.executable, "-m", "jrl.cli", "fingerprint", str(folder), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), metrics(folder)


def killed(folder, logs, bindings, doing, times, longest, lost, count=2):
    """Kills one process and holds the others to their promises."""
    machines = start(folder, logs, *bindings, count=count, cached=doing != "compile")
    try:
        machines[lost].wait_until(doing, times)
        time.sleep(random.Random(f"{doing}{times}{bindings[-1]}").uniform(0, longest))
        every = family(machines)
        assert machines[lost].process.poll() is None, "the process had ended before it was killed"
        machines[lost].process.kill()
        began = time.monotonic()
        for index, machine in enumerate(machines):
            if index != lost:
                code = machine.process.wait(timeout=90)
                assert code == 76, (code, machine.messages()[-1500:])
                assert f"process {lost} (" in machine.messages(), machine.messages()[-1500:]
        seconds = time.monotonic() - began
        machines[lost].process.wait()
        assert left(every) == []
    finally:
        end(machines)
    assert seconds < 30, f"the others ended after {seconds:.1f} s"
    return seconds


@pytest.mark.parametrize(("trial", "point"), list(enumerate(POINTS)))
def test_the_others_end_and_the_run_goes_on_to_the_same_bits(tmp_path, uninterrupted, trial, point):
    lag, lost = trial % 2, trial // 2 % 2
    seconds = killed(tmp_path / "run", tmp_path / "logs", lag_of(lag), *point, lost)
    train(tmp_path / "run", f"Online.steps={STEPS}", *lag_of(lag))
    print(f"lag {lag}: process {lost} killed in {point[0]}, the other ended after {seconds:.1f} s")
    assert contents(tmp_path / "run") == contents(uninterrupted[lag])


# Process 0 learns and evaluates, process 1 samples.
APART_POINTS = [
    (1, "sample", 2, 0.05), (1, "save", 2, 0.1), (1, "scoring", 3, 0.02), (1, "exchange", 40, 0.01),
    (1, "sample_eval", 2, 0.05), (0, "update", 2, 0.05), (0, "save", 3, 0.1), (0, "sample_eval", 2, 0.05),
    (0, "exchange", 47, 0.01), (1, "compile", 1, 0.3),
]  # fmt: skip


@pytest.fixture(scope="module")
def sampled_apart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart") / "run"
    train(folder, *ONE_SAMPLES, *EVAL, f"Online.steps={STEPS}")
    return contents(folder)


@pytest.mark.parametrize(("lost", "doing", "times", "longest"), APART_POINTS)
def test_a_process_that_only_samples_or_the_one_that_learns_is_killed(
    tmp_path, sampled_apart, lost, doing, times, longest
):
    apart = (*ONE_SAMPLES, *EVAL)
    seconds = killed(tmp_path / "run", tmp_path / "logs", apart, doing, times, longest, lost)
    train(tmp_path / "run", *apart, f"Online.steps={STEPS}")
    print(f"{'the sampler' if lost else 'the learner'} killed in {doing}, the other ended after {seconds:.1f} s")
    assert contents(tmp_path / "run") == sampled_apart


# Of copies of an array, process 0 writes one; so process 1 fails only where it alone has a part.
@pytest.mark.parametrize(("full", "apart", "in_save"), [(0, 0, 1), (1, 1, 1), (0, 1, 0)])
def test_a_full_disk_of_one_process_ends_all_with_its_message(tmp_path, request, full, apart, in_save):
    """While a step is saved, or from some moment on, where the log of the process is full too."""
    run, bindings = tmp_path / "run", (*ONE_SAMPLES, *EVAL) if apart else ()
    machines = start(
        run, tmp_path / "logs", *bindings, environments={full: {"FULL_DISK_AT_SAVE": "3"}} if in_save else None
    )
    every = family(machines)
    try:
        machines[full].wait_until("saved", 2)
        if not in_save:
            pid = machines[full].process.pid
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        else:
            machines[full].wait_until("save", 3)
        began = time.monotonic()
        codes = [machine.process.wait(timeout=120) for machine in machines]
        seconds = time.monotonic() - began
        assert codes == [4, 4], [machine.messages()[-1500:] for machine in machines]
        assert left(every) == []
    finally:
        end(machines)
    told = machines[1 - full].messages()
    line = next(line for line in told.splitlines() if f"process {full} (" in line)
    print(line)
    assert "File too large" in line and "Last checkpoint: step 2" in line and "Traceback" not in told, told[-1500:]
    assert not in_save or "step 3 could not be saved" in line
    assert seconds < 30 and list_steps(run / "checkpoints") == [1, 2]
    train(run, *bindings, f"Online.steps={STEPS}")
    whole = request.getfixturevalue("sampled_apart" if apart else "uninterrupted")
    assert contents(run) == (whole if apart else contents(whole[0]))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (4, 2), (4, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("lag", [0])
def test_after_a_kill_another_number_of_processes_goes_on(tmp_path, uninterrupted, before, after, lag, request):
    point = random.Random(request.node.name).choice([("update", 3, 0.02), ("scoring", 4, 0.01), ("save", 3, 0.1)])
    killed(tmp_path / "run", tmp_path / "logs", lag_of(lag), *point, lost=before - 1, count=before)
    train(tmp_path / "run", f"Online.steps={STEPS}", *lag_of(lag), processes=after, devices=4 // after)
    assert_same(tmp_path / "run", uninterrupted[lag])


@pytest.mark.parametrize("trial", range(5))
def test_a_stopped_process_is_found_and_the_run_goes_on(tmp_path, uninterrupted, trial):
    stopped, lag = trial % 2, trial // 2 % 2
    machines = start(tmp_path / "run", tmp_path / "logs", *lag_of(lag))
    try:
        machines[stopped].wait_until("update", 2 + trial % 4)
        machines[stopped].process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert machines[1 - stopped].process.wait(timeout=120) == 76
        seconds = time.monotonic() - began
        messages = machines[1 - stopped].messages()
    finally:
        end(machines)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step = sorted(row["time/step_seconds"] for row in rows)[len(rows) // 2]
    print(f"process {stopped} stopped: found after {seconds:.1f} s; a step takes {step:.2f} s")
    assert seconds < 3 * step + 30
    for index in (0, 1):
        assert f"process {index} (" in messages  # and where it was
    train(tmp_path / "run", f"Online.steps={STEPS}", *lag_of(lag))
    assert contents(tmp_path / "run") == contents(uninterrupted[lag])


@pytest.mark.parametrize("trial", range(10))
def test_a_notice_to_one_process_is_one_save_of_all(tmp_path, trial):
    doing, times = [("update", 2), ("scoring", 3), ("sample", 4), ("save", 2), ("exchange", 20)][trial // 2]
    machines = start(tmp_path / "run", tmp_path / "logs", "Online.steps=400", *lag_of(trial % 2))
    try:
        machines[trial % 2].wait_until(doing, times)
        machines[trial % 2].process.terminate()
        assert [machine.process.wait(timeout=200) for machine in machines] == [75, 75]
    finally:
        end(machines)
    steps = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps[-1] == metrics(tmp_path / "run")[-1]["step"]


# What process 1 has that the others have not: a binding, and what the message names.
BINDINGS = [
    ("AdamW.learning_rate=0.5", "learning_rate"), ("AdamW.weight_decay=0.5", "weight_decay"), ("Run.seed=7", "seed"),
    ("Online.samples=8", "samples"), ("Online.lag=1", "lag"), ("Checkpoint.every=2", "every"),
    ("Scoring.verifiers=[]", "verifiers"), ("Decoder.layers=2", "layers"), ("MeshShape.data=2", "data"),
    ("Sampler.temperature=0.5", "temperature"), ("Log.rollouts=False", "rollouts"),
]  # fmt: skip
PACKAGE = Path(jrl.__file__).parent


def changed_package(folder, old, new):
    """Returns an environment with another checkout of jrl."""
    shutil.copytree(PACKAGE, folder / "jrl", ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "jrl" / "__init__.py").read_text()
    assert old in text
    (folder / "jrl" / "__init__.py").write_text(text.replace(old, new, 1))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def other_library(folder, name):
    """Returns an environment in which another version of a library is said to be installed."""
    metadata = folder / f"{name}-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


ENVIRONMENTS = {
    "source of jrl": lambda folder: changed_package(folder, '"""', '""" '),
    "version of jrl": lambda folder: changed_package(folder, "__version__ = ", "__version__ = '0.0.1' or "),
    "version of optax": lambda folder: other_library(folder, "optax"),
    "version of jax": lambda folder: other_library(folder, "jax"),
    "64-bit numbers": lambda folder: {"JAX_ENABLE_X64": "1"},
}
FILES = {
    "newton.py": ("parts file", "\n# Another line.\n"),
    "newton.jsonl": ("data", '{"prompt": "1+1=", "answer": "2"}\n'),
}
KINDS = [*BINDINGS, *ENVIRONMENTS, *FILES, "--devices"]


def refused(machines, name, run):
    """Holds all processes to one refusal that names the field and the processes, before anything is written."""
    began = time.monotonic()
    try:
        codes = [machine.process.wait(timeout=120) for machine in machines]
    finally:
        end(machines)
    seconds = time.monotonic() - began
    for machine in machines:
        messages = machine.messages()
        assert name in messages and "process 0 (" in messages and "process 1 (" in messages, messages[-1500:]
    assert codes == [2] * len(machines) and not run.exists()
    return seconds


@pytest.mark.parametrize("trial", range(60))
def test_processes_that_disagree_are_refused(tmp_path, trial):
    kind, count = KINDS[trial % len(KINDS)], 4 if trial >= 3 * len(KINDS) else 2
    run, logs, other = tmp_path / "run", tmp_path / "logs", tmp_path / "other"
    if kind in BINDINGS:
        binding, name = kind
        machines = start(run, logs, count=count, changed={1: (binding,)})
    elif kind in ENVIRONMENTS:
        name = kind
        machines = start(run, logs, count=count, environments={1: ENVIRONMENTS[kind](other)})
    elif kind == "--devices":
        name = "devices of a process"
        machines = start(run, logs, count=count, devices={1: 1})
    else:
        name, line = FILES[kind]
        (tmp_path / "one").mkdir()
        subprocess.run([sys.executable, "-m", "jrl.cli", "new", "newton"], cwd=tmp_path / "one", check=True)
        shutil.copytree(tmp_path / "one", other)
        with open(other / "newton" / kind, "a") as file:
            file.write(line)
        folders = [other if index == 1 else tmp_path / "one" for index in range(count)]
        machines = start(run, logs, count=count, config="newton/newton.gin", folders=folders)
    seconds = refused(machines, name, run)
    print(f"{name}: refused by all {count} after {seconds:.1f} s")
    assert seconds < 30


@pytest.mark.parametrize(("index", "message"), [(0, "fewer than 2 processes came"), (1, "process 0 must listen there")])
def test_a_process_alone_says_that_the_others_did_not_come(tmp_path, index, message):
    soon = {index: {"JRL_START_SECONDS": "20"}}
    (machine,) = start(tmp_path / "run", tmp_path / "logs", indices=(index,), environments=soon)
    try:
        assert machine.process.wait(timeout=120) == 76
    finally:
        end([machine])
    assert message in machine.messages() and not (tmp_path / "run").exists()
