"""Every mistake is refused at its place, with the nearest valid name."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import pytest
from reader_tree import DAPO, GRPO, TABLES, Config

from jrl.config import ConfigError, all_fields, load

BASE = ["Config.task = @Sum()", "Config.algo = @GRPO()", "Loop.steps = 3"]


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Returns the (place, reason) with which files and bindings are refused; the first file is the one that is read."""
    monkeypatch.chdir(tmp_path)

    def refused(files, *bindings):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(next(iter(files), None), bindings, Config, TABLES)
        assert str(caught.value) == f"{caught.value.location}: {caught.value.reason}"
        return caught.value.location, caught.value.reason

    return refused


# Each case: the line that is wrong, appended to the three good ones as line 4, and what the error must say.
WRONG_LINES = [
    ("Loop.stpes = 3", "Loop has no field 'stpes'; did you mean steps? (fields of Loop: eval_every, lag, steps,"),
    ("Lop.lag = 1", "there is no section 'Lop'; did you mean Loop.lag?"),
    ("loop.lag = 1", "there is no section 'loop'; did you mean Loop.lag?"),
    ("jrl.Loop.lag = 1", "there is no section 'jrl.Loop'; did you mean Loop.lag?"),
    ("Run.lag = 1", "Run has no field 'lag' (fields of Run: name, parts, seed); sections that have it: Loop"),
    ("Run.steps = 1", "Run has no field 'steps' (fields of Run: name, parts, seed); sections that have it: Loop, SFT"),
    ("DAPO.clip_high = 0.3", "unused binding: DAPO.clip_high: no DAPO is part of this configuration"),
    ("SFT.steps = 3", "To select SFT, bind Config.sft = @SFT()"),
    ("Length.target = 3", "To select Length, bind Scoring.verifiers = [@Length()]"),
    ("warm/AdamW.betas = [0.1, 0.2]", "there is no @warm/AdamW() in this configuration; refer to it as @warm/AdamW()"),
    ("a/b/AdamW.betas = [0.1, 0.2]", "scope 'a/b' has more than one level"),
    ("Config.optimizer = @a/b/AdamW()", "a scope has one level, @scope/AdamW()"),
    ("Loop.lag = 'one'", "Loop.lag expects int, got 'one' (str)"),
    ("Loop.lag = 1.0", "Loop.lag expects int, got 1.0 (float)"),
    ("Loop.lag = True", "Loop.lag expects int, got True"),
    ("Loop.lag = None", "Loop.lag expects int, got None"),
    ("Loop.lag = [1]", "Loop.lag expects int, got [1] (list)"),
    ("Loop.lag = @Loop()", "Loop.lag expects int, got @Loop()"),
    ("Run.name = 3", "Run.name expects str, got 3 (int)"),
    ("Exact.strip = 1", "Exact.strip expects bool, got 1 (int)"),
    ("Loop.stop_at = '0.5'", "Loop.stop_at expects float or None, got '0.5' (str)"),
    ("Loop.stop_at = 1e999", "Loop.stop_at expects a finite float, got inf"),
    ("Loop.stop_at = 1" + "0" * 400, "expects a float of at most 3.4e+38, got an int of"),
    ("AdamW.betas = [0.1]", "AdamW.betas expects 2 items, got 1"),
    ("AdamW.betas = [0.1, 'b']", "AdamW.betas[1] expects float, got 'b' (str)"),
    ("Sum.digits = 3", "Sum.digits expects a list of int, got 3 (int)"),
    ("Sum.digits = [1, [2]]", "Sum.digits[1] expects int, got [2] (list)"),
    ("Schedule.kind = 'cosin'", "Schedule.kind expects one of 'constant', 'cosine', got 'cosin' (str); did you mean"),
    ("Config.sft = @GRPO()", "Config.sft expects @SFT(), got @GRPO()"),
    ("Config.sft = @SFT", "@SFT must be written @SFT()"),
    ("Config.sft = @SFTT()", "Config.sft: unknown part 'SFTT'; did you mean SFT? Available: SFT"),
    ("Scoring.verifiers = [@Nope()]", "Scoring.verifiers: unknown verifier 'Nope'. Available: Exact, Length"),
    ("ANY = @SFTT()", "ANY: unknown part 'SFTT'; did you mean SFT?"),
    ("Config.sft = SFT", "SFT is not a value; text needs quotes, a part is written @SFT() in 'Config.sft = SFT'"),
    ("Schedule.steps = null", "null is not a value; write None in 'Schedule.steps = null'"),
    ("Schedule.warm = true", "true is not a value; write True in 'Schedule.warm = true'"),
    ("Config.sft = 'SFT'", "Config.sft expects @SFT(), got 'SFT' (str); did you mean @SFT()?"),
    ("Config.scoring = None", "Config.scoring expects @Scoring(), got None"),
    ("Scoring.verifiers = [@Exact(), @Sum()]", "Scoring.verifiers[1] expects one of @Exact(), @Length(), got @Sum()"),
    ("Scoring.verifiers = @Exact()", "Scoring.verifiers expects a list of one of @Exact(), @Length(), got @Exact()"),
    ("Loop.lag = %LGA", "Loop.lag: macro %LGA is not defined"),
    ("Loop.lag = %a/LAG", "Loop.lag: macro %a/LAG is not defined"),
    ("LAG = 1", "macro LAG is never used; nothing uses %LAG"),
    ("lag = 1", "macro lag is never used; did you mean Loop.lag?"),
    ("sfft = @SFT()", "macro sfft is never used; did you mean sft?"),
    ("a/LAG = 1", "a/LAG: a macro takes no scope"),
    ("Loop = 1", "Loop is a section; bind one of its fields"),
    ("Loop.steps = 4", "Loop.steps is bound twice, first at a.gin:3"),
    ("algo = @DAPO()", "Config.algo is bound twice, first at a.gin:2"),
    ("Loop.lag = 2", "Loop: lag must be 0 or 1, not 2"),
    ("import os", "'import os': configuration imports nothing"),
    ("from os import path", "'from os import path': configuration imports nothing"),
    ("include 'b.gin'", "there is no file 'b.gin'"),
    ("include 'a.gin'", "include of 'a.gin': the file includes itself"),
    ("include b", "cannot read this"),
    ("Loop.lag =", "a value is missing or malformed after '='"),
    ("Loop.lag", "expected ':' or '='"),
    ("Loop.lag = 1 2", "Expected newline"),
    ("Loop.lag = 1 + 1", "Expected newline"),
    ("Loop.lag = int('1')", "int is not a value"),
    ("Loop.lag = __import__('os')", "__import__ is not a value"),
    ("Run.name = f'{1}'", "cannot read this"),
    ("Run.name = b'a'", "Run.name expects str, got b'a' (bytes)"),
    ("Run.name = 'a", "cannot read this"),
    ("Run.parts = ['a'", "cannot read this"),
    ("Mixture.weights = {[1]: 2}", "cannot read this"),
    ("Mixture.weights = {%K: 2}\nK = [1]", "unused binding: Mixture.weights"),
    ("= 3", "cannot read this"),
    ("Loop.lag = " + "[" * 3000, "cannot read this"),
    ("Loop.lag = $", "cannot read this"),
]


@pytest.mark.parametrize(("line", "reason"), WRONG_LINES, ids=[line[:40] for line, _ in WRONG_LINES])
def test_wrong_line_is_refused_at_its_place(refused, line, reason):
    place, message = refused({"a.gin": "\n".join([*BASE, line]) + "\n"})
    assert reason in message and "did you mean a.gin" not in message  # which includes itself
    # A value that never ends is noticed at the end of the text.
    assert place in ("a.gin:4", "a.gin:5") if "[" in line and "]" not in line else place == "a.gin:4"


def test_a_line_that_is_indented_further_is_named(refused):
    place, message = refused({"a.gin": "Loop:\n  lag = 1\n   steps = 2\n"})
    assert place == "a.gin:3" and "no name begins here; the lines of a block are indented alike" in message


@pytest.mark.parametrize(
    ("binding", "reason"),
    [
        ("Loop.stpes = 3", "Loop has no field 'stpes'; did you mean steps?"),
        ("LAG = 1", "macro LAG is never used"),
        ("Loop.lag = 5", "Loop: lag must be 0 or 1, not 5"),
        ("Loop.steps = 4", "Loop.steps is bound twice"),
        ("include 'a.gin'", "expected one NAME=VALUE"),
        ("import os", "expected one NAME=VALUE"),
        ("Run.seed = 1\nLoop.lag = 1", "expected one NAME=VALUE"),
        ("", "expected one NAME=VALUE"),
        ("--flag", "expected one NAME=VALUE, got '--flag'"),
        ("Loop.lag", "expected one NAME=VALUE, got 'Loop.lag'"),
        ("Loop.lag = 1\0", "cannot read this"),
        ("Loop.lag = [1", "a bracket is not closed in 'Loop.lag = [1'"),
        ("Loop.lag = '''one", "a text in quotes is not closed in \"Loop.lag = '''one\""),
    ],
)
def test_wrong_binding_is_refused_on_the_command_line(refused, binding, reason):
    place, message = refused({}, *BASE, binding)
    assert (place, reason in message) == ("command line", True), message


def test_error_in_an_included_file_names_that_file(refused):
    files = {"a.gin": "include 'b.gin'\n" + "\n".join(BASE), "b.gin": "\n\nLoop.lga = 1\n"}
    assert refused(files) == (
        "b.gin:3",
        "Loop has no field 'lga'; did you mean lag? (fields of Loop: eval_every, lag, steps, stop_at)",
    )


def test_error_in_a_block_names_the_line_within_it(refused):
    place, _ = refused({"a.gin": "\n".join([*BASE, "AdamW:", "  learning_rate = 1.0", "", "  betas = 3"])})
    assert place == "a.gin:7"


def test_unknown_block_is_named_at_its_head(refused):
    place, reason = refused({"a.gin": "\n".join([*BASE, "AdmaW:", "  learning_rate = 1.0"])})
    assert (place, reason) == ("a.gin:4", "there is no section 'AdmaW'; did you mean AdamW?")


def test_missing_value_names_the_field_and_where_its_class_was_chosen(refused):
    assert refused({"a.gin": BASE[0] + "\n" + BASE[1]}) == (
        "a.gin",
        "Loop.steps has no value and no default; bind Loop.steps = ... (@Loop() is part of this configuration)",
    )
    assert refused({"a.gin": "Config.loop = @x/Loop()\n" + BASE[0] + "\n" + BASE[1]})[0] == "a.gin:1"
    place, reason = refused({"a.gin": BASE[0]})
    assert (place, reason.endswith("bind Config.algo = ..., one of @GRPO(), @DAPO()")) == ("a.gin", True)


def test_wrong_type_through_a_macro_is_named_where_the_value_stands(refused):
    place, reason = refused({"a.gin": "LAG = 'x'\nLoop.lag = %LAG\n" + "\n".join(BASE)})
    assert (place, reason) == ("a.gin:1", "Loop.lag expects int, got 'x' (str) (Loop.lag is %LAG at a.gin:2)")


def test_misspelled_macro_names_the_one_that_was_meant(refused):
    text = "\n".join(BASE)
    assert refused({"a.gin": f"WARMUP = 5\nSchedule.warmup = %WARMPU\n{text}"}) == (
        "a.gin:2",
        "Schedule.warmup: macro %WARMPU is not defined; did you mean WARMUP? (macros: WARMUP)",
    )
    place, reason = refused({"a.gin": f"include 'b.gin'\nWARMPU = 5\n{text}",
                             "b.gin": "WARMUP = 1\nSchedule.warmup = %WARMUP\n"})  # fmt: skip
    assert (place, reason) == ("a.gin:2", "macro WARMPU is never used; did you mean WARMUP?")


def test_macro_on_the_command_line_must_reach_a_value(refused):
    place, reason = refused({"a.gin": "LAG = 1\nLoop.lag = %LAG\n" + "\n".join(BASE)}, "LAG = 0", "Loop.lag = 1")
    assert (place, "every binding that uses %LAG is replaced" in reason) == ("command line", True)


def test_macros_that_go_in_a_circle_are_refused(refused):
    _, reason = refused({"a.gin": "A = %B\nB = %A\nLoop.lag = %A\n" + "\n".join(BASE)})
    assert "is defined by itself: A -> B -> A" in reason


def test_misspelled_scope_names_the_one_that_was_meant(refused):
    text = "\n".join([*BASE, "Config.optimizer = @warm/AdamW()", "wram/AdamW.learning_rate = 1.0"])
    place, reason = refused({"a.gin": text})
    assert (place, reason.endswith("did you mean warm/AdamW.learning_rate?")) == ("a.gin:5", True)


def test_binding_that_a_scope_hides_everywhere_is_refused(refused):
    text = "\n".join([*BASE, "Config.optimizer = @warm/AdamW()", "warm/AdamW.learning_rate = 1.0"])
    place, reason = refused({"a.gin": text}, "AdamW.learning_rate = 2.0")
    assert (place, "warm/AdamW.learning_rate at a.gin:5 wins" in reason) == ("command line", True)


def test_replaced_selection_does_not_excuse_bindings_of_the_same_layer(refused):
    base = "\n".join([BASE[0], "Config.algo = @DAPO()", BASE[2]])
    place, _ = refused({"a.gin": "include 'b.gin'\nConfig.algo = @GRPO()\nDAPO.clip_high = 0.3\n", "b.gin": base})
    assert place == "a.gin:3"
    place, _ = refused({"b.gin": base}, "Config.algo = @GRPO()", "DAPO.clip_high = 0.3")
    assert place == "command line"


def test_includes_that_go_in_a_circle_are_refused(refused):
    files = {"a.gin": "include 'b.gin'\n", "b.gin": "\ninclude 'a.gin'\n"}
    assert refused(files) == ("b.gin:2", "include of 'a.gin': the file includes itself")


def test_include_below_what_it_would_replace_is_refused(refused):
    place, reason = refused({"a.gin": "Run.seed = 1\ninclude 'b.gin'\n", "b.gin": "Run.seed = 2\n"})
    assert (place, "would replace Run.seed, bound above it at a.gin:1" in reason) == ("a.gin:2", True)


def test_missing_file_names_the_one_beside_it(refused, tmp_path):
    (tmp_path / "tiny.gin").write_text("")
    with pytest.raises(ConfigError, match=re.escape("there is no file 'tinny.gin'; did you mean tiny.gin?")):
        load("tinny.gin", [], Config, TABLES)


def test_file_that_is_not_text_is_refused(refused, tmp_path):
    (tmp_path / "b.gin").write_bytes(b"\xff\xfe\x00")
    assert refused({"a.gin": "include 'b.gin'\n"}) == ("a.gin:1", "'b.gin' is not UTF-8 text")
    assert refused({"a.gin": "include '.'\n"})[1] == "cannot read '.': it is not a plain file"
    assert refused({"a.gin": "include '/dev/zero'\n"})[1] == "cannot read '/dev/zero': it is not a plain file"
    assert "longer than" in refused({"a.gin": "include 'c.gin'\n", "c.gin": "#" * 2_000_000})[1]
    assert "is not a file name" in refused({"a.gin": "include 'a\\0b'\n"})[1]


def test_macros_and_parts_that_double_are_stopped(refused):
    laughs = "\n".join(f"M{i} = [%M{i + 1}, %M{i + 1}]" for i in range(40))
    assert "grows beyond" in refused({"a.gin": f"{laughs}\nM40 = 1\nSum.digits = %M0\n" + "\n".join(BASE)})[1]
    parts = "\n".join(f"s{i}/Mixture.parts = {{'a': @s{i + 1}/Mixture(), 'b': @s{i + 1}/Mixture()}}" for i in range(40))
    assert "grows beyond" in refused({"a.gin": "\n".join(["Config.task = @s0/Mixture()", *BASE[1:], parts])})[1]


HOSTILE = """
    Run.name = open('/etc/passwd').read()
    Run.name = __import__('os').system('id')
    Run.name = eval('1')
    Run.name = exec
    Run.name = lambda: 0
    Run.name = [x for x in (1,)]
    Run.name = 'a' if True else 'b'
    Run.name = 'a'.upper()
    Run.name = 'a' * 1000000000
    Run.name = 9 ** 9 ** 9
    Run.name = f'{__import__("os")}'
    Run.name = {'a': __builtins__}
    Run.name = `id`
    Run.name = $(id)
    Run.name = !id
    Run.name = @os.system()
    Run.name = @os.system('id')
    Run.name = @builtins.eval()
    Run.name = @subprocess.Popen
    Run.name = @jrl.config.load.load()
    Run.name = @Run().__class__
    Run.name = @__class__()
    Run.name = @gin.macro()
    Run.name = @x/gin.constant()
    Run.name = @gin.singleton()
    Run.name = %gin.REQUIRED
    Run.name = %os.environ
    Run.name = %x/__builtins__
    Run.__class__ = 'x'
    Run.__init__ = 'x'
    Run.__post_init__ = 'x'
    Run.__dict__ = {}
    Run.name.upper = 'x'
    __builtins__.open = 'x'
    os.environ = {}
    builtins.open = 'x'
    Loop.__post_init__ = None
    gin.macro.value = 1
    x/gin.macro.value = 1
    gin.config.enter_interactive_mode = True
    macro.value = 1
    SEED/macro.value = 1
    import os
    import os as path
    import jrl.cli
    from os import system
    from os import system as s
    from . import x
    from __gin__ import dynamic_registration
    include '/etc/hostname'
    include 'https://example.com/a.gin'
    include 'file:///etc/hostname'
    include '../../../../etc/hostname'
    include %FILE
    include @file()
    include '~/.bashrc'
    include '$HOME/.bashrc'
    Run.seed = 1; import os
    exec('import os')
    def f(): pass
    class A: pass
    del Run
    Run.seed: int = 1
    Run.seed += 1
    Run.seed := 1
"""


@pytest.mark.parametrize("line", [line.strip() for line in HOSTILE.strip().splitlines()])
def test_text_that_tries_to_run_or_reach_something_is_refused(refused, line):
    place, _ = refused({"a.gin": "\n".join([*BASE, line])})
    assert place == "a.gin:4" or "/etc/hostname" in place


def test_part_that_contains_itself_is_refused(refused):
    text = "\n".join(["Config.task = @Mixture()", *BASE[1:], "Mixture.parts = {'a': @Mixture()}"])
    assert refused({"a.gin": text}) == ("a.gin:4", "@Mixture() contains itself")


def test_what_cannot_be_read_is_shown_cut(refused):
    place, reason = refused({"a.gin": '{"prompt": "' + "a" * 100_000 + '"}\n'})
    assert place == "a.gin:1" and reason.startswith('cannot read this: Unexpected token in \'{"prompt": "aaa')
    assert len(reason) < 300
    assert len(refused({}, "Loop.steps = " + "a" * 100_000)[1]) < 600 and len(refused({}, "a" * 100_000)[1]) < 300


def test_check_across_sections_is_named_at_the_binding_it_speaks_about(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Strict(Config):
        def __post_init__(self):
            if self.run.seed > self.loop.steps:
                raise ValueError(f"Run.seed = {self.run.seed} is above Loop.steps")

    Strict.__annotations__ = {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gin").write_text("Strict.task = @Sum()\nStrict.algo = @GRPO()\nLoop.steps = 3\nRun.seed = 4\n")
    with pytest.raises(ConfigError) as caught:
        load("a.gin", [], Strict, TABLES)
    assert str(caught.value) == "a.gin:4: Strict: Run.seed = 4 is above Loop.steps"


def test_what_a_developer_got_wrong_is_a_type_error():
    table_field = dataclasses.field(metadata={"table": "envs"})
    no_table = dataclasses.make_dataclass("NoTable", [("x", Any)], frozen=True)
    strange = dataclasses.make_dataclass("Strange", [("x", set[int])], frozen=True)
    missing = dataclasses.make_dataclass("Missing", [("x", Any, table_field)], frozen=True)
    for root in (no_table, strange, missing):
        with pytest.raises(TypeError, match=f"{root.__name__}.x"):
            load(None, [], root, {})
    with pytest.raises(TypeError, match="must be named like its config class 'GRPO'"):
        load(None, [], Config, {**TABLES, "algos": {"grpo": GRPO}})
    other = dataclasses.make_dataclass("DAPO", [("x", int, 0)], frozen=True)
    with pytest.raises(TypeError, match="two config classes are named 'DAPO'"):
        load(None, [], Config, {**TABLES, "algos": {"DAPO": DAPO, "GRPO": GRPO}, "envs": {"DAPO": other}})


def test_one_edit_typos_are_refused_and_the_meant_name_is_suggested(trials):
    draw = random.Random(0)
    fields = [(cls.__name__, field) for cls, field in all_fields(Config, TABLES)]
    real = {f"{section}.{field}" for section, field in fields}
    letters = "abcdefghijklmnopqrstuvwxyz_"
    tried, right, number = 0, 0, trials(1_000)
    while tried < number:
        section, field = draw.choice(fields)
        part = draw.choice(("section", "field"))
        word = section if part == "section" else field
        i = draw.randrange(len(word))
        edits = [
            word[:i] + word[i + 1 :],
            word[:i] + draw.choice(letters) + word[i:],
            word[:i] + draw.choice(letters) + word[i + 1 :],
            word[:i] + word[i : i + 2][::-1] + word[i + 2 :],
        ]
        typo = draw.choice(edits)
        key = f"{typo}.{field}" if part == "section" else f"{section}.{typo}"
        if key in real or not typo.isidentifier():
            continue
        tried += 1
        with pytest.raises(ConfigError) as caught:
            load(None, [*BASE, f"{key} = 1"], Config, TABLES)
        meant = f"{section}.{field}" if part == "section" else field
        right += f"did you mean {meant}?" in caught.value.reason
    assert right / tried >= 0.95, right / tried
