"""What the reader accepts, and what comes out."""

from __future__ import annotations

import subprocess
import sys

import pytest
from reader_tree import (
    DAPO,
    GRPO,
    SFT,
    TABLES,
    AdamW,
    Config,
    Exact,
    Length,
    Loop,
    Mixture,
    Run,
    Schedule,
    Scoring,
    Sum,
)  # fmt: skip

from jrl.config import ConfigError, load, peek

SMALLEST = ["Config.task = @Sum()", "Config.algo = @GRPO()", "Loop.steps = 3"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the current folder and returns its relative name."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return write


def read(path, *bindings):
    return load(path, bindings, Config, TABLES)


def test_bindings_alone_make_a_configuration_with_every_default():
    assert read(None, *SMALLEST) == Config(
        task=Sum(), algo=GRPO(), run=Run(), loop=Loop(steps=3), optimizer=AdamW(schedule=Schedule())
    )


def test_file_with_blocks_macros_comments_and_parts(write):
    path = write(
        "a.gin",
        """
        # a comment
        STEPS = 5
        Config:
          task = @Mixture()  # trailing
          algo = @DAPO()
        Mixture.parts = {'easy': @Sum(), 'hard': @hard/Sum()}
        Mixture.weights = {'easy': 1, 'hard': 0.5, 'note': 'x'}
        hard/Sum.digits = [3,
                           4]
        Loop.steps = %STEPS
        DAPO.refill = None
        Config.sft = @SFT()
        SFT:
            steps = %STEPS
            batch = 2
        Scoring.verifiers = (@Exact(), @short/Length(), @Length())
        short/Length.target = 1.5
        parts = ['my_parts.py']
        """.replace("\n        ", "\n"),
    )
    config = read(path)
    assert config.task == Mixture(
        parts={"easy": Sum(), "hard": Sum(digits=(3, 4))}, weights={"easy": 1.0, "hard": 0.5, "note": "x"}
    )
    assert config.algo == DAPO(refill=None)
    assert config.loop.steps == 5
    assert config.sft == SFT(steps=5, batch=2)
    assert config.scoring.verifiers == (Exact(), Length(target=1.5), Length(target=100))
    assert config.parts == ("my_parts.py",)


def test_numbers_keep_their_kind():
    config = read(None, *SMALLEST, "AdamW.learning_rate = 1", "Scoring.verifiers = [@Length()]", "Length.target = 7")
    assert type(config.optimizer.learning_rate) is float
    assert type(config.scoring.verifiers[0].target) is int


def test_later_replaces_earlier_from_include_to_command_line(write):
    write("base.gin", "Loop.steps = 1\nRun.seed = 1\nRun.name = 'base'\nConfig.task = @Sum()\nConfig.algo = @GRPO()\n")
    write("middle.gin", "include 'base.gin'\nLoop.steps = 2\nRun.seed = 2\n")
    path = write("top.gin", "include 'middle.gin'\nLoop.steps = 3\n")
    config = read(path, "Loop.steps = 4")
    assert (config.loop.steps, config.run.seed, config.run.name) == (4, 2, "base")
    assert read(path).loop.steps == 3


def test_include_is_relative_to_the_including_file(write):
    write("inner/base.gin", "include 'more.gin'\nConfig.task = @Sum()\n")
    write("inner/more.gin", "Config.algo = @GRPO()\n")
    assert read(write("top.gin", "include 'inner/base.gin'\nLoop.steps = 3\n")).loop.steps == 3


def test_one_file_may_be_included_along_two_ways(write):
    write("base.gin", "\n".join(SMALLEST))
    write("a.gin", "include 'base.gin'\n")
    write("b.gin", "include 'base.gin'\nLoop.steps = 9\n")
    assert read(write("top.gin", "include 'a.gin'\ninclude 'b.gin'\n")).loop.steps == 9


def test_macro_from_the_command_line_replaces_the_one_in_the_file(write):
    path = write("a.gin", "STEPS = 5\nLoop.steps = %STEPS\nConfig.task = @Sum()\nConfig.algo = %ALGO\nALGO = @GRPO()\n")
    assert read(path, "STEPS = 7").loop.steps == 7
    assert read(path, "ALGO = @DAPO()").algo == DAPO()


def test_macro_of_a_macro_and_inside_a_list(write):
    path = write("a.gin", "A = %B\nB = 4\nLoop.steps = %A\nSum.digits = [%A, 2]\n" + "\n".join(SMALLEST[:2]))
    assert (read(path).loop.steps, read(path).task.digits) == (4, (4, 2))


def test_scope_is_laid_over_the_bindings_without_one():
    scoped = ["Config.optimizer = @warm/AdamW()", "AdamW.betas = [0.5, 0.6]", "warm/AdamW.learning_rate = 1e-2"]
    config = read(None, *SMALLEST, *scoped)
    assert config.optimizer == AdamW(learning_rate=1e-2, betas=(0.5, 0.6), schedule=Schedule())


def test_scope_reaches_the_dataclasses_nested_in_its_instance():
    config = read(None, *SMALLEST, "Config.optimizer = @warm/AdamW()", "warm/Schedule.warmup = 4")
    assert config.optimizer.schedule == Schedule(warmup=4)


def test_nested_dataclass_may_be_named_with_a_scope():
    config = read(None, *SMALLEST, "AdamW.schedule = @slow/Schedule()", "slow/Schedule.warmup = 9")
    assert config.optimizer.schedule.warmup == 9


def test_bindings_reach_a_part_that_is_only_a_default():
    config = read(None, *SMALLEST, "Exact.weight = 2", "Scoring.workers = 3")
    assert config.scoring == Scoring(verifiers=(Exact(weight=2.0),), workers=3)


def test_replaced_selection_leaves_the_inner_bindings_aside(write):
    write("base.gin", "Config.algo = @DAPO()\nDAPO.clip_high = 0.3\nConfig.task = @Sum()\nLoop.steps = 3\n")
    path = write("top.gin", "include 'base.gin'\nConfig.algo = @GRPO()\n")
    assert read(path).algo == GRPO()
    assert read("base.gin", "Config.algo = @GRPO()").algo == GRPO()


def test_replaced_selection_leaves_aside_what_only_it_named(write):
    path = write(
        "a.gin",
        "Config.task = @Mixture()\nMixture.parts = {'a': @big/Sum()}\nbig/Sum.digits = [8]\n" + "\n".join(SMALLEST[1:]),
    )
    assert read(path, "Config.task = @Sum()").task == Sum()


def test_option_that_the_command_line_switches_off_leaves_its_bindings_aside(write):
    path = write("a.gin", "Config.sft = @SFT()\nSFT.steps = 4\n" + "\n".join(SMALLEST))
    assert read(path, "Config.sft = None").sft is None


def test_peek_reads_one_name_before_the_tables_are_known(write):
    write("base.gin", "parts = ['a.py']\nConfig.algo = @Unheard()\n")
    path = write("top.gin", "include 'base.gin'\n")
    assert peek(path, [], Config, "parts") == (("a.py",), "base.gin")
    assert peek(path, ["Config.parts = ['b.py']"], Config, "parts") == (("b.py",), None)
    assert peek(path, [], Config, "run") == (None, None)
    with pytest.raises(ConfigError, match=r"base\.gin:2: Config\.algo takes plain values only"):
        peek(path, [], Config, "algo")
    with pytest.raises(ConfigError, match=r"command line: Config\.parts expects a list of str, got 'c\.py' \(str\)"):
        peek(path, ["parts = 'c.py'"], Config, "parts")
    with pytest.raises(ConfigError, match=r"command line: Config\.parts\[0\] expects str, got 3 \(int\)"):
        peek(path, ["parts = [3]"], Config, "parts")


def test_reader_imports_no_jax():
    code = "import sys, jrl.config, jrl.config.sweep; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
