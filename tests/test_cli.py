"""The commands, their exit codes and what they print, on one tiny run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl import cli, exit_codes
from jrl.algos.conformance import CONTRACT_TESTS
from jrl.commands import evaluate, exits, start
from jrl.commands.weights import weights_of
from jrl.device.sharding import MeshShape, make_mesh
from jrl.experiment import TABLES
from jrl.models import decoder
from jrl.run.checkpoints.run_state import SaveFailed
from jrl.run.trained import open_trained
from jrl.tasks.envs import ENVS
from jrl.tasks.envs.mixture import open_source
from jrl.tasks.example import Message
from jrl.tasks.verifiers import VERIFIERS, look_up
from jrl.tools import catalog, chat, check, doctor, evaluation
from jrl.tools.chat import Completion

TINY = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=8", "Online.samples=4", "Online.steps=2", "Checkpoint.every=1",
    "Log.samples=0", "Scoring.workers=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps, both saved."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
        jrl.train("configs/tiny.gin", TINY, run=folder)
        yield folder


@pytest.fixture
def command(capsys, monkeypatch):
    """Returns a function: arguments -> (exit code, standard output, standard error). The environment stays as it is."""
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)

    def call(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def rows_file(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# What a mistake costs


def test_a_typo_is_refused_by_name_before_a_device_is_touched_or_anything_slow_is_imported(tmp_path):
    config = tmp_path / "typo.gin"
    config.write_text("include '" + os.path.abspath("configs/tiny.gin") + "'\nOnline.stps = 3\n")
    code = (
        "import sys; from jrl import cli\n"
        f"code = cli.main(['train', {str(config)!r}, '--run', {str(tmp_path / 'run')!r}])\n"
        "assert not {'orbax', 'grain', 'tensorstore', 'jrl.run.job'} & set(sys.modules), 'slow imports'\n"
        "sys.exit(code)\n"
    )
    # No such platform: a device that is touched would be an error of another kind.
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "none"}, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"jrl: {config}:2: Online has no field 'stps'; did you mean steps?")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["nosuch"], ["help", "nosuch"]])
def test_an_unknown_command_is_answered_with_all_commands(words, command):
    code, _, err = command(*words)
    assert code == 2 and err.startswith("jrl: unknown command 'nosuch'. Available: train, sweep, compare, new, ")


def test_help_of_a_mistyped_command_names_the_nearest(command):
    code, _, err = command("help", "trian")
    assert code == 2 and "unknown command 'trian'; did you mean train?" in err


def test_help_describes_one_section_of_the_configuration(command):
    code, out, _ = command("help", "config", "Length")
    assert code == 0 and out.startswith("Length  Bounds on the") and "fewest characters" in out
    assert "Sampler" not in out
    code, _, err = command("help", "config", "Lenght")
    assert code == 2 and "did you mean Length?" in err


def test_a_mistyped_command_names_the_nearest_and_help_is_printed_without_jax():
    code = "import sys; from jrl import cli; code = cli.main(sys.argv[1:]); sys.exit('jax' in sys.modules or code)"
    call = lambda *words: subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    wrong, right = call("trian"), call("--help")
    assert wrong.returncode == 2 and "did you mean train?" in wrong.stderr
    assert right.returncode == 0 and all(name in right.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("name", exits.EXITS)
def test_every_error_with_an_exit_code_exists(name):
    module, _, cls = name.rpartition(".")
    error_class = getattr(importlib.import_module(module), cls)
    assert issubclass(error_class, Exception)
    error = error_class.__new__(error_class)
    assert exits.exit_code(error) == exits.EXITS[name]


def test_exit_codes_of_the_contract():
    assert exit_codes.EXIT_CODES_HELP.count("\n") == len(exit_codes.MEANINGS) == 10
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = readme.split("| exit code | meaning |")[1].split("\n\n")[0]
    said = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.M)}
    assert said.keys() == exit_codes.MEANINGS.keys()
    said[exit_codes.STOPPED] = exit_codes.MEANINGS[exit_codes.STOPPED]  # README says more of it
    assert said == exit_codes.MEANINGS
    assert [exit_codes.DONE, exit_codes.REFUSED, exit_codes.OTHER_RUN, exit_codes.STOPPED] == [0, 2, 3, 4]
    assert [exit_codes.NOTHING_TO_DO, exit_codes.PREEMPTED, exit_codes.LOST, exit_codes.INTERRUPTED] == [5, 75, 76, 130]
    assert exits.exit_code(OSError(28, "No space left on device")) == 4
    assert exits.exit_code(OSError("rollouts could not be written: no space")) == 4
    assert exits.exit_code(FileNotFoundError(2, "No such file")) == 2
    assert exits.exit_code(MemoryError()) == 4
    assert exits.exit_code(ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")) == 4
    assert exits.exit_code(ValueError("UNKNOWN shape")) == 1
    assert exits.exit_code(KeyError("x")) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["data", "inspect", "rows.jsonl", "--ngram", "0"], "'0' is not a number of words; it must be at least 1"),
        (["data", "inspect", "rows.jsonl", "--overlap", "3"], "'3' is not a share; it must be in [0, 1]"),
        (["data", "inspect", "rows.jsonl", "--rows", "-1"], "'-1' is not a number of rows; it must be at least 0"),
        (["rollouts", "run", "--most", "0"], "'0' is not a number of rows; it must be at least 1"),
        (["sweep", "tiny", "--out", "x", "--jobs", "two"], "'two' is not a number of members; it must be at least 1"),
    ],
)
def test_numbers_of_arguments_are_checked(arguments, reason, capsys):
    assert cli.main(arguments) == exit_codes.REFUSED and reason in capsys.readouterr().err


def test_an_input_is_refused_alike_however_jrl_is_started():
    command = [sys.executable, "-m", "jrl.cli", "train", "tiny", "--processes", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        exit_codes.REFUSED, "jrl: --processes is 0; it counts processes and must be at least 1\n",
    )  # fmt: skip


def test_an_error_nobody_foresaw_shows_its_trace(command, monkeypatch):
    def broken(args):
        raise KeyError("surprise")

    monkeypatch.setitem(cli.COMMANDS, "list", dataclasses.replace(cli.COMMANDS["list"], run=broken))
    code, _, err = command("list", "algos")
    assert code == 1 and "Traceback" in err and "surprise" in err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_teaches_itself(name, command):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert cli.COMMANDS[name].summary in out and cli.COMMANDS[name].example in out and "exit codes:" in out


def test_bindings_may_stand_on_both_sides_of_options():
    args = cli.parser_of("train").parse_intermixed_args(["a.gin", "Online.lag=1", "--run", "x", "Run.seed=2"])
    assert (args.config, args.bindings, str(args.run)) == ("a.gin", ["Online.lag=1", "Run.seed=2"], "x")


# Before JAX starts


def environment(monkeypatch, arguments, unasked=None, **variables):
    monkeypatch.setattr(os, "environ", dict(variables))
    start.prepare_jax(cli.parser_of("train").parse_intermixed_args(["a.gin", *arguments]), devices=unasked)
    return os.environ


def test_virtual_devices_come_with_threads_for_them(monkeypatch):
    actual = environment(monkeypatch, ["--devices", "8"], XLA_FLAGS="--a --xla_force_host_platform_device_count=2")
    assert actual["XLA_FLAGS"] == "--a --xla_force_host_platform_device_count=8"
    assert actual["NPROC"] == "16" and actual["JAX_PLATFORMS"] == "cpu"


def test_virtual_devices_that_nobody_asked_for_give_way_and_leave_the_platform_open(monkeypatch):
    flag = "--xla_force_host_platform_device_count"
    actual = environment(monkeypatch, [], unasked=12)
    assert (actual["XLA_FLAGS"], actual["NPROC"]) == (f"{flag}=12", "24") and "JAX_PLATFORMS" not in actual
    assert environment(monkeypatch, ["--devices", "1"], unasked=12)["XLA_FLAGS"] == f"{flag}=1"
    assert environment(monkeypatch, [], unasked=12, XLA_FLAGS=f"{flag}=3")["XLA_FLAGS"] == f"{flag}=3"


def test_without_virtual_devices_the_environment_says_nothing_of_them(monkeypatch):
    actual = environment(monkeypatch, [], HOME="/home/someone")
    assert not {"NPROC", "XLA_FLAGS", "JAX_PLATFORMS"} & set(actual)


def test_compiled_programs_are_kept_unless_asked_not_to_and_where_the_user_says(monkeypatch):
    folder = lambda *arguments, **given: environment(monkeypatch, arguments, **given).get("JAX_COMPILATION_CACHE_DIR")
    assert folder(XDG_CACHE_HOME="/cache") == "/cache/jrl/xla"
    assert folder(XDG_CACHE_HOME="/cache", JAX_COMPILATION_CACHE_DIR="/mine") == "/mine"
    assert folder("--no-compile-cache", XDG_CACHE_HOME="/cache") is None


# Signals

WAITING = """
import hashlib, sys, threading, time
from jrl.run.signals import leave_on_second_interrupt, stop_on_signals
stop = threading.Event()
with stop_on_signals(stop), leave_on_second_interrupt():
    print("ready", flush=True)
    stop.wait()
    print("asked", flush=True)
    if sys.argv[1] == "stay":
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)  # minutes in C, as a compilation
print("left in order", flush=True)
"""


def waiting(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_asks_to_stop(number):
    process = waiting("leave")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "asked\nleft in order\n")
    again = " again" if number == signal.SIGINT else ""
    assert err == f"\njrl: Stopping: ending this step and saving. Press Ctrl-C{again} to leave now without saving.\n"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_after_a_stop_request_leaves_at_once_whatever_the_main_thread_does(first):
    process = waiting("stay")
    process.send_signal(first)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.endswith("\njrl: Left without saving. Run the same command to continue from the last checkpoint.\n")


def test_an_interrupted_command_that_saves_nothing_says_no_more(capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    assert cli.guarded(interrupted, argparse.Namespace(command="list", traceback=False)) == 130
    assert capsys.readouterr().err == "jrl: interrupted.\n"


# A trained run


def test_another_seed_in_the_same_folder_is_another_run(run, command):
    code, _, err = command("train", "configs/tiny.gin", *TINY, "Run.seed=5", "--run", run)
    assert code == 3 and "run.seed: 0, now 5" in err


def test_a_folder_that_is_held_is_refused(run, command):
    from jrl.run.checkpoints.lock import hold_run

    lock = hold_run(run)
    try:
        code, _, err = command("train", "configs/tiny.gin", *TINY, "--run", run)
        assert code == 2 and "is held by process" in err
        assert "is training in this folder" in command("doctor", run)[1]
    finally:
        lock.release()


def test_fingerprint_ends_with_the_total_and_knows_every_saved_step(run, command):
    code, plain, _ = command("fingerprint", run)
    as_json = json.loads(command("fingerprint", run, "--json")[1])
    assert code == 0 and plain.splitlines()[-1] == as_json["total"]
    assert list(as_json) == ["step", "total", "params", "opt_state", "keys", "data", "metrics"]
    first = json.loads(command("fingerprint", run, "--step", 1, "--json")[1])
    assert (first["step"], as_json["step"]) == (1, 2)
    assert first["keys"] == as_json["keys"] and first["params"] != as_json["params"]
    assert command("fingerprint", run, "--step", 9)[0] == 2


def test_scores_are_the_log_softmax_of_the_model_in_the_order_of_the_rows(run, command, tmp_path):
    trained = open_trained(run)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, trained.policy.cfg.vocab_size, n).tolist() for n in (5, 1, 140, 2, 17)]
    path, out = rows_file(tmp_path, *({"tokens": row} for row in rows)), tmp_path / "out.jsonl"
    assert command("score", run, path, "--out", out)[0] == 0
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tokens"] for row in scored] == rows
    for tokens, row in zip(rows, scored):
        array = jnp.asarray([tokens])
        hidden, _ = decoder.forward(trained.params, array, jnp.arange(len(tokens))[None, :], None, trained.policy.cfg)
        every = jax.nn.log_softmax(decoder.unembed(trained.params, hidden, trained.policy.cfg))[0]
        expected = [0.0, *(float(every[t - 1, tokens[t]]) for t in range(1, len(tokens)))]
        np.testing.assert_allclose(row["logprobs"], expected, rtol=0, atol=2e-5)
        assert row["logprobs"][0] == 0


def test_a_text_is_scored_after_bos(run, command, tmp_path):
    tokenizer = open_trained(run).policy.tokenizer
    path, out = rows_file(tmp_path, {"text": "3+4=7"}), tmp_path / "out.jsonl"
    assert command("score", run, path, "--out", out, "--step", 1)[0] == 0
    row = json.loads(out.read_text())
    assert row["tokens"] == [tokenizer.bos_id, *tokenizer.encode("3+4=7")]
    assert len(row["logprobs"]) == len(row["tokens"]) and row["logprobs"][0] == 0 and max(row["logprobs"][1:]) < 0


def test_a_conversation_is_scored_as_the_policy_would_have_said_it(run, command, tmp_path):
    tokenizer = open_trained(run).policy.tokenizer
    asked = {"role": "user", "content": "3+4"}
    path, out = (
        rows_file(tmp_path, {"messages": [asked, {"role": "assistant", "content": "7"}]}),
        tmp_path / "out.jsonl",
    )
    assert command("score", run, path, "--out", out)[0] == 0
    prompt = tokenizer.encode_prompt([Message(**asked)])
    assert json.loads(out.read_text())["tokens"] == [*prompt, *tokenizer.encode("7"), tokenizer.end_id]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "q"}]}, "must end with one of the assistant"),
        ({"messages": [{"role": "user"}]}, 'is not {"role": text, "content": text}'),
        ({"messages": [{"role": "robot", "content": "q"}, {"role": "assistant", "content": "a"}]}, "'robot'"),
        ({"tokens": [1, 99999]}, r"tokens[1] is 99999; ids are whole numbers from 0 to"),
        ({"tokens": [True]}, "tokens[0] is true"),
        ({"tokens": []}, "tokens is []"),
        ({"text": ""}, 'text is ""'),
        ({"prompt": "x"}, "a row is"),
        ('{"tokens": [1', "not JSON"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line_and_nothing_is_written(run, command, tmp_path, row, message):
    path, out = rows_file(tmp_path, {"tokens": [1, 2]}, row), tmp_path / "out.jsonl"
    code, _, err = command("score", run, path, "--out", out)
    assert code == 2 and f"{path}, line 2: " in err and message in err
    assert not out.exists()


def test_sampling_a_file_of_prompts_repeats_with_its_seed(run, command, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('"3+4="\n\n5+5=\n3+4=\n')

    def ask(*options):
        out = tmp_path / "out.jsonl"
        assert command("sample", run, "--prompts", prompts, "--n", 2, "--out", out, *options)[0] == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    rows = ask()
    assert [(row["prompt"], row["sample"]) for row in rows] == [
        (prompt, k) for prompt in ("3+4=", "5+5=", "3+4=") for k in (0, 1)
    ]
    completions = [row["completion"] for row in rows]
    assert completions == [row["completion"] for row in ask("--seed", 0)]  # the run's own
    assert completions != [row["completion"] for row in ask("--seed", 9)]
    assert completions[:2] != completions[4:]  # the same prompt asked again is drawn anew
    greedy = [row["completion"] for row in ask("--temperature", 0)]
    assert greedy[0] == greedy[1] == greedy[4]


def test_a_conversation_answers_each_line_and_ends_with_the_input(run, command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("3+4=\n\n5+\udcff=\n5+5=\n/quit\nnever asked\n"))
    code, out, _ = command("sample", run, "--max-tokens", 2)
    assert code == 0 and len(out.splitlines()) == 3 and out.splitlines()[1] == "(this line is not UTF-8)"


@pytest.mark.parametrize(
    "options", [["--n", 0], ["--max-tokens", 0], ["--temperature", -1], ["--seed", -1], ["--seed", 2**32]]
)
def test_a_number_that_makes_no_sense_is_refused(run, command, tmp_path, options):
    (tmp_path / "p").write_text("x\n")
    code, _, err = command("sample", run, "--prompts", tmp_path / "p", *options)
    assert code == 2 and options[0] in err


@pytest.mark.parametrize("asked", [["score", "rows.jsonl"], ["sample"], ["eval"], ["rollouts"]], ids=lambda a: a[0])
def test_no_command_writes_over_a_file_of_a_run(command, tmp_path, asked):
    (tmp_path / "manifest.json").write_text("{}")
    code, _, err = command(*asked[:1], tmp_path, *asked[1:], "--out", tmp_path / "metrics.jsonl")
    assert (
        code == exit_codes.REFUSED and f"metrics.jsonl is a file of the run in {tmp_path}; choose another name" in err
    )
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_command_writes_neither_over_what_it_reads_nor_over_a_folder_nor_into_one_that_is_not_there(
    command, tmp_path, monkeypatch
):
    (tmp_path / "rows").write_text("x\n")
    monkeypatch.chdir(tmp_path)
    for asked in (["score", "run", "rows"], ["sample", "run", "--prompts", "rows"], ["eval", "run", "--pairs", "r*"]):
        code, _, err = command(*asked, "--out", tmp_path / "rows")
        assert code == exit_codes.REFUSED and "rows, which this command reads; choose another name" in err
        code, _, err = command(*asked, "--out", tmp_path / "nowhere" / "rows")
        assert code == exit_codes.REFUSED and f"there is no folder {tmp_path / 'nowhere'}" in err
        code, _, err = command(*asked, "--out", tmp_path)
        assert code == exit_codes.REFUSED and f"{tmp_path} is a folder; name a file" in err


def test_completions_of_no_prompts_are_refused_before_the_model_is_opened(command, tmp_path):
    code, _, err = command("sample", tmp_path / "nowhere", "--out", tmp_path / "out.jsonl")
    assert code == exit_codes.REFUSED and "--out needs --prompts" in err


def test_nothing_a_model_says_reaches_the_terminal_raw():
    stream = io.StringIO()
    chat.show("\x1b[2J", [Completion("a\x1b]0;x\x07\nb\u202e", "length")], stream)
    assert stream.getvalue() == "> \\x1b[2J\na\\x1b]0;x\\x07\\nb\\u202e  [cut at the length limit]\n"


def test_eval_needs_an_eval_section_and_then_prints_every_number(run, command, tmp_path):
    assert command("eval", run)[0] == 2
    out = tmp_path / "eval.json"
    given = ["Data.held_out_every=3", "Config.eval=@Eval()", "Eval.prompts=4", "Eval.batch=8", "Eval.samples=2"]
    code, text, _ = command("eval", run, *given, "--out", out)
    printed = json.loads(out.read_text())
    assert code == 0 and (printed["step"], printed["n"], printed["samples"]) == (2, 4, 2)
    expected = {"jrl": jrl.__version__, "jax": jax.__version__, "task": "Addition", "temperature": 1.0, "seed": 0,
                "verifiers": ["Regex"]}  # fmt: skip
    assert {name: printed["protocol"][name] for name in expected} == expected
    assert 0 <= printed["truncated"] <= 1 and re.fullmatch("[0-9a-f]{8}", printed["weights_fingerprint"])
    for name in ("avg@2", "pass@1", "pass@2", "majority@1", "majority@2", "mean reward of the best of 2"):
        assert name in text


def test_several_sources_are_evaluated_in_one_table(run, command, tmp_path):
    out = tmp_path / "eval.json"
    given = ["Data.held_out_every=3", "Config.eval=@Eval()", "Eval.prompts=4", "Eval.batch=8", "Eval.samples=2"]
    code, text, _ = command("eval", run, run, *given, "--out", out)
    first, second = json.loads(out.read_text())
    assert code == 0 and first == second and first["source"] == str(run)
    title, head, *rows = text.splitlines()
    assert title.startswith("4 held-out prompts of Addition, 2 samples each")
    assert head.split() == ["source", "step", "avg", "pass@1", "pass@2", "pass^2", "majority@1", "majority@2"]
    assert rows[0] == rows[1] and rows[0].startswith(f"{run}  ")
    assert "P(sample higher)" in text and first["all_of_k"]["1"] == first["pass_at_k"]["1"]


def test_a_folder_of_a_sweeps_member_is_no_binding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("sweep/rate=0.1,seed=0")
    words = ["run", "sweep/rate=0.1,seed=0", "gs://b/seed=1", "Eval.prompts=4", "other"]
    assert evaluate.sources_among(words) == words[:3]


def test_a_table_of_sources_by_hand():
    interval = lambda mean, low, high: {"mean": mean, "low": low, "high": high, "n": 9}
    one = {"source": "a", "step": 7, "samples": 4, "prompts_digest": "x", **interval(0.5, 0.25, 0.75),
           "protocol": {"task": "Words"}, "pass_at_k": {"4": interval(1.0, 1.0, 1.0)}}  # fmt: skip
    other = {"source": "long/b", "step": 12, "samples": 2, "prompts_digest": "x", **interval(None, None, None)}
    assert evaluation.side_by_side([one, other]).splitlines() == [
        "9 held-out prompts of Words, 2 to 4 samples each; percent, 95 % intervals",
        "source  step                avg                pass@4",
        "a          7  50.0 [25.0, 75.0]  100.0 [100.0, 100.0]",
        "long/b    12                  -                     -",
    ]
    with pytest.raises(ValueError, match="long/b is evaluated on other prompts than a"):
        evaluation.side_by_side([one, other | {"prompts_digest": "y"}])


def test_an_evaluation_of_nothing_has_a_table_too():
    nothing = {"mean": None, "low": None, "high": None, "n": 0}
    given = {"step": 1, "samples": 1, "parsed": 0.0, "unscorable": 4, "protocol": {"task": "Words"}}
    text = evaluation.table({**given, **nothing})
    assert "- %           none" in text and "4 could not be judged" in text


def test_a_binding_over_a_run_that_does_not_fit_is_refused(run, command, tmp_path):
    code, _, err = command("sample", run, "Sampler.tmperature=1.0", "--prompts", rows_file(tmp_path, '"x"'))
    assert code == 2 and "did you mean temperature?" in err


def test_doctor_finds_a_damaged_save(run, command, tmp_path):
    code, out, _ = command("doctor", run)
    assert code == 0 and "checkpoint of step 2: intact" in out and "metrics.jsonl has 2 rows" in out
    assert "configuration, tokenizer, data and parts match the run" in out
    host = run / "checkpoints" / "00000001" / "host.json"
    before = host.read_bytes()
    host.write_bytes(before[:-1])
    try:
        code, out, _ = command("doctor", run)
        assert code == 4 and "!!  step 1 is damaged: host.json has other bytes" in out
        assert "ok  a resume uses the checkpoint of step 2" in out
        (run / "checkpoints" / "00000002").rename(tmp_path / "aside")
        code, out, _ = command("doctor", run)
        assert code == 4 and "!!  no checkpoint is intact, so a resume is refused: put a good copy" in out
    finally:
        host.write_bytes(before)
        (tmp_path / "aside").rename(run / "checkpoints" / "00000002")
    assert command("doctor", tmp_path)[0] == 2


# Tables and parts


def test_every_table_of_a_run_can_be_listed(command):
    assert set(TABLES) <= set(catalog.KINDS)
    assert all(command("list", kind)[0] == 0 for kind in TABLES)
    assert {row["name"] for row in catalog.rows("sources")} == {
        "Comparisons",
        "ConditionedPreferences",
        "ContrastedPreferences",
        "Corrections",
        "Demonstrations",
        "Labeled",
        "Preferences",
        "Rated",
        "RationalePreferences",
        "StepLabels",
        "StepValues",
        "UserPreferences",
    }


@pytest.mark.parametrize("kind", ["algos", "sources", "verifiers", "envs", "families", "tokenizers"])
def test_a_table_is_listed_with_a_sentence_for_each_row(kind, command):
    code, out, _ = command("list", kind, "--json")
    assert code == 0
    for_people = command("list", kind)[1]
    for row in json.loads(out):
        config = "Decoder" if kind == "families" else row["name"]  # a family is a form of the one decoder
        assert row["doc"] and row["config"].endswith(f":{config}")
        assert row["name"] in for_people


def test_parts_are_listed_with_what_the_contract_names(command):
    rows = json.loads(command("list", "parts", "--json")[1])
    assert {"A3", "L2", "G1"} <= {row["id"] for row in rows}
    assert all(set(row) == {"id", "function", "inputs", "output", "tests"} for row in rows)


PARTS = """
import argparse
import dataclasses
from jrl.tasks.envs.contract import Environment, Generated, digest_of
from jrl.tasks.example import Example, Message

def Shout(completion, example):
    return float(completion == (example.answer or "").upper())

@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    size: int = 6

def open_words(config):
    make = lambda i: Example(f"w{i}", (Message("user", f"say {i}"),), answer=f"ANSWER{i}", verifiers=("Shout",))
    return Generated(config.size, make, digest_of("words", config.size))

VERIFIERS = {"Shout": Shout}
ENVS = {"Words": Environment(Words, open_words)}
"""


def test_good_parts_pass_every_contract_test(command, tmp_path):
    path = tmp_path / "my_parts.py"
    path.write_text(PARTS)
    code, out, _ = command("check", path)
    assert code == 0, out
    assert "FAIL" not in out and "Shout" in out and "Words" in out and out.endswith("7 checks passed, 0 failed\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return float(completion ==", "return 1 / 0 + float(completion ==", "ZeroDivisionError"),
        ('answer=f"ANSWER{i}"', 'answer="lower"', "has the reward 0.0, not 1"),
        ("import dataclasses\n", "import dataclasses, jax\n", "imports jax"),
        ("size: int = 6", "size: int", "Words"),
    ],
)
def test_a_failed_contract_test_is_named(command, tmp_path, old, new, message):
    path = tmp_path / "my_parts.py"
    path.write_text(PARTS.replace(old, new))
    code, out, _ = command("check", path)
    assert code == 2 and "FAIL" in out and message in out


def test_contract_tests_run_on_a_users_objective(command, tmp_path, monkeypatch):
    names = ("zero_advantage_gives_zero_policy_gradient", "row_order_does_not_matter")
    monkeypatch.setattr(check, "contract_tests_of", lambda objective: {name: CONTRACT_TESTS[name] for name in names})
    path = tmp_path / "my_algo.py"
    path.write_text(
        "from jrl.algos import ALGOS as OURS\n"
        "from jrl.types import traced\n"
        "@traced\n"
        "class Mine(OURS['GRPO'].config):\n"
        "    pass\n"
        "grpo = OURS['GRPO']\n"
        "broken = lambda config, tokens, state: (tokens.logprobs, {})\n"
        "ALGOS = {'Mine': grpo._replace(config=Mine, token_loss=broken)}\n"
    )
    code, out, _ = command("check", path)
    assert code == 2
    assert "FAIL  Mine  zero advantage gives zero policy gradient" in out
    assert "ok    Mine  row order does not matter" in out


@pytest.mark.parametrize("arguments", [["check"], ["list", "envs", "--parts"], ["help", "config", "--parts"]])
def test_parts_that_are_no_file_are_refused(command, tmp_path, arguments):
    code, _, err = command(*arguments, tmp_path / "nothing.py")
    assert code == 2 and "there is no file" in err and "begins at the current directory" in err


def test_a_users_own_rows_are_listed_and_described(command, tmp_path):
    path, second = tmp_path / "my_parts.py", tmp_path / "second.py"
    path.write_text(PARTS.replace("size: int = 6", "size: int = 6  # how many words"))
    second.write_text('import functools\n'
                      'def Quiet(completion, example):\n    """1 for lower case."""\n    return completion.islower()\n'
                      'VERIFIERS = {"Quiet": Quiet, "Bound": functools.partial(Quiet)}\n')  # fmt: skip
    both = ["--parts", path, "--parts", second]
    rows = {row["name"]: row for row in json.loads(command("list", "verifiers", "--json", *both)[1])}
    assert {"Shout", "Quiet", "Regex"} <= rows.keys() and rows["Quiet"]["doc"] == "1 for lower case."
    assert rows["Bound"]["doc"] == rows["Quiet"]["doc"]
    assert rows["Shout"]["fields"] == {"weight": "of this verifier in the reward"}
    assert "Words" in command("list", "envs", "--parts", path)[1] and "Words" not in command("list", "envs")[1]
    assert command("help", "config", "Words", *both)[1] == "Words\n  size: int = 6  how many words\n\n"
    assert command("help", "config", "Words")[0] == 2
    assert command("list", "models")[1].startswith("jrl has no models of its own")
    code, _, err = command("list", "configs", *both)
    assert code == 2 and "no part adds to configs" in err


# From outside

LONGER = [*(binding for binding in TINY if not binding.startswith("Online.steps")), "Online.steps=40"]


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_and_the_same_command_goes_on(tmp_path):
    command = [sys.executable, "-m", "jrl.cli", "train", "configs/tiny.gin", *LONGER]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    process = subprocess.Popen(
        [*command, "--run", tmp_path / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGTERM)
            break
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75 and "Run the same command to continue" in err
    for folder in ("run", "whole"):
        subprocess.run([*command, "--run", tmp_path / folder], check=True, env=environment, capture_output=True)
    prints = [
        subprocess.run(
            [sys.executable, "-m", "jrl.cli", "fingerprint", tmp_path / folder], check=True, capture_output=True
        ).stdout
        for folder in ("run", "whole")
    ]
    assert prints[0] == prints[1]


# What is said


def test_doctor_names_what_published_models_need():
    assert {"safetensors", "tokenizers", "jinja2"} <= {
        package for package, extra, _ in doctor.OPTIONAL if extra == "hf"
    }


def test_doctor_marks_an_optional_package_that_is_missing_as_neither_good_nor_bad(command, monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL", (("no_such_package", "wandb", "the wandb writer"),))
    monkeypatch.setattr(doctor, "verifiers", lambda: doctor.Line(True, "verifiers"))
    code, out, _ = command("doctor")
    assert code == 0
    assert "--  no_such_package: not installed (optional, for the wandb writer): pip install 'jrl-jax[wandb]'" in out


@pytest.mark.parametrize(
    ("saved", "message"),
    [((), "Nothing was saved."), (("00000005", "00000010", ".jrl-tmp-x"), "Last checkpoint: step 10.")],
)
def test_a_broken_system_call_names_the_last_checkpoint(tmp_path, capsys, saved, message):
    for name in saved:
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)

    def broken(args):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    args = cli.parser_of("train").parse_args(["tiny", "--run", str(tmp_path / "run")])
    assert cli.guarded(broken, args) == 4
    assert capsys.readouterr().err == (
        f"jrl: [Errno 28] No space left on device: 'metrics.jsonl'. {message} Fix the cause and rerun.\n"
    )


def test_a_failed_save_names_the_last_checkpoint_once(tmp_path, capsys):
    def broken(args):
        raise SaveFailed("step 4 could not be saved under x: No space left on device. Last checkpoint: step 2")

    args = cli.parser_of("train").parse_args(["tiny", "--run", str(tmp_path)])
    assert cli.guarded(broken, args) == 4
    assert capsys.readouterr().err.endswith("on device. Last checkpoint: step 2. Fix the cause and rerun.\n")


def test_a_command_that_saves_nothing_says_nothing_of_checkpoints():
    error = OSError(5, "Input/output error")
    assert exits.message(error, 4) == "[Errno 5] Input/output error. Fix the cause and rerun."
    assert exits.message(KeyError("x"), 1).startswith("Unexpected internal error: KeyError: 'x'\n")


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: Out of memory allocating 52038517528 bytes.",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 18.26G of 15.75G hbm. Exceeded hbm capacity",
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 1.00G. That was not possible.",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Largest: copy_to_vmem.3",
    ],
)
def test_a_device_without_enough_memory_is_told_with_what_takes_less(text, tmp_path, capsys):
    def too_large(args):
        raise jax.errors.JaxRuntimeError(text)

    (tmp_path / "checkpoints" / "00000004").mkdir(parents=True)
    args = cli.parser_of("train").parse_args(["tiny", "--run", str(tmp_path)])
    assert cli.guarded(too_large, args) == exit_codes.STOPPED
    told = capsys.readouterr().err
    assert told.startswith(f"jrl: Out of device memory: {text}\nCompute less at once (Learner.micro_batch_tokens, ")
    assert told.endswith("`jrl plan` shows what takes memory. Last checkpoint: step 4.\n")
    args = cli.parser_of("sample").parse_args([str(tmp_path)])
    assert cli.guarded(too_large, args) == exit_codes.STOPPED
    assert "\nAsk for fewer or shorter completions at once, or use more devices.\n" in capsys.readouterr().err
    for other in (
        "Failed to write: No space left on device",
        "Ran out of memory in memory space vmem. Used 20M of 16M",
    ):
        error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {other}")
        assert exits.message(error, 4) == str(error)


def test_weights_of_an_export_are_named_by_its_folder(tmp_path):
    assert weights_of(tmp_path, 0) == f"the weights of {tmp_path}"
    (tmp_path / "manifest.json").touch()
    assert weights_of(tmp_path, 3) == "the weights of step 3"


def test_an_unknown_verifier_or_environment_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"Unknown verifier 'Nope' in the run\. Available: Exact, "):
        look_up(VERIFIERS, "Nope", "the run")
    with pytest.raises(ValueError, match=r"Unknown verifier 'Exakt' in the run\. Did you mean 'Exact'\? Available: "):
        look_up(VERIFIERS, "Exakt", "the run")
    with pytest.raises(ValueError, match=r"Unknown environment 'int'\. Available: "):
        open_source(3, ENVS)


@pytest.mark.parametrize("asked", [["help"], ["--version"], ["help", "train"]])
def test_help_says_nothing_of_a_reader_that_has_left(asked):
    """As in `jrl help | true`: the pipe has nobody at its end when the command begins to print."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jrl.cli", *asked]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has one")
@pytest.mark.parametrize("asked", [["--version"], ["list", "optimizers"]])
def test_output_on_a_full_disk_is_told_as_that_and_once(asked):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "jrl", *asked], stdin=subprocess.DEVNULL, stdout=full,
                              stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": ""})  # fmt: skip
    assert done.returncode == exit_codes.STOPPED
    told = "jrl: [Errno 28] standard output could not be written: No space left on device"
    assert done.stderr in (f"{told}\n", f"{told}. Fix the cause and rerun.\n")


def test_what_a_terminal_cannot_show_is_escaped(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert cli.main(["--version"]) == 0
    print("caf\u00e9", flush=True)
    assert sys.stdout.buffer.getvalue().endswith(b"caf\\xe9\n")


@pytest.mark.parametrize("address", ["gs://", "gs:///runs/one"])  # of gs://$BUCKET where BUCKET is not set
def test_an_address_without_a_bucket_is_refused_before_its_slashes_are_dropped(address, capsys):
    assert cli.main(["train", "tiny", "--run", address]) == 2
    assert f"{address} names no bucket; it is gs://BUCKET/NAME" in capsys.readouterr().err
