"""`jrl check`: what it asks verifiers about, which faults it finds, and where it says that they are."""

from __future__ import annotations

import pytest
from documented import write_part

from jrl import cli
from jrl.algos.conformance import CONTRACT_TESTS
from jrl.plugins import PartError
from jrl.tools import check
from jrl.tools.check import check_parts

GOLD, WRONG = "judges gold answers", "judges wrong answers"
ENVS = """
import dataclasses
from jrl.tasks.envs.contract import Environment, Generated
from jrl.tasks.example import Example, Message

@dataclasses.dataclass(frozen=True)
class Lists:
    size: int = 3

def one(index):
    return Example(str(index), (Message("user", f"list {index}"),), answer="x", info={"list": ["x", "y"]}NAMED)

ENVS = {"Lists": Environment(config=Lists, open=lambda config: Generated(config.size, one, "lists"))}
"""


def problems(folder, source):
    """Returns test -> what `jrl check` finds wrong with a part of this source."""
    file = folder / "own.py"
    file.write_text(source)
    return {row.test: row.problem for row in check_parts([file]) if row.problem}


@pytest.mark.parametrize(
    ("otherwise", "said"),
    [
        ("None", "returned a value of type NoneType"),
        ("'0'", "returned a value of type str"),
        ("float('nan')", "returned nan, which is not finite"),
        ("1 / (completion != '5')", "ZeroDivisionError"),
        ("example.info['near']", "KeyError: 'near'"),
    ],
)
def test_a_verifier_that_judges_nothing_but_the_gold_answer_fails(tmp_path, otherwise, said):
    body = f"return 1.0 if completion == example.answer else {otherwise}"
    found = problems(tmp_path, f"def Own(completion, example):\n    {body}\nVERIFIERS = {{'Own': Own}}\n")
    assert set(found) == {WRONG} and said in found[WRONG]
    assert "the completion '5' of 'What is 2 + 2?', answer '4', info {}" in found[WRONG]


def test_a_verifier_may_raise_on_an_empty_text(tmp_path):
    body = "return 1.0 / len(completion.split()[0])"
    assert problems(tmp_path, f"def Own(completion, example):\n    {body}\nVERIFIERS = {{'Own': Own}}\n") == {}


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ("completion.split('=')[-1]", None),
        ("len(completion)", "Verifier.read_answer for Own returned 1 for '4'; it must return a text or None"),
        ("completion.split()[0]", "IndexError: list index out of range"),  # of ''
    ],
)
def test_the_answer_that_a_verifier_reads_is_a_text_whatever_the_completion(tmp_path, read, said):
    source = f"""
import dataclasses
from jrl.tasks.verifiers.contract import Verifier

@dataclasses.dataclass(frozen=True, kw_only=True)
class Own:
    weight: float = 1.0

def score(config, completion, example):
    return 0.0

def read(config, completion):
    return {read}

VERIFIERS = {{'Own': Verifier(Own, score, read_answer=read)}}
"""
    found = problems(tmp_path, source)
    assert (said is None and not found) or said in found["reads a text or None in any completion"]


def test_without_gold_answers_none_are_judged(tmp_path):
    source = ENVS.replace("NAMED", "").replace('answer="x", ', "") + NEEDY
    (tmp_path / "own.py").write_text(source)
    tests = [row.test for row in check_parts([tmp_path / "own.py"]) if row.name == "Own"]
    assert WRONG in tests and GOLD not in tests


NEEDY = "def Own(completion, example):\n    return completion in example.info['list']\nVERIFIERS = {'Own': Own}\n"


def test_a_verifier_that_needs_more_than_an_answer_is_told_what_it_was_asked_about(tmp_path):
    found = problems(tmp_path, NEEDY)
    assert set(found) == {GOLD, WRONG}
    assert "KeyError" in found[GOLD] and "of 'What is 2 + 2?', answer '4', info {})" in found[GOLD]


@pytest.mark.parametrize(
    ("named", "passes"), [("", True), (", verifiers=('Own',)", True), (", verifiers=('X',)", False)]
)
def test_it_is_asked_about_the_examples_of_an_environment_that_are_meant_for_it(tmp_path, named, passes):
    other = "def X(completion, example):\n    return 1.0\nVERIFIERS['X'] = X\n"
    found = problems(tmp_path, ENVS.replace("NAMED", named) + NEEDY + other)
    assert set(found) == (set() if passes else {GOLD, WRONG})


def test_an_environment_names_a_verifier_that_there_is_not(tmp_path):
    (said,) = problems(tmp_path, ENVS.replace("NAMED", ", verifiers=('Numeric', 'Exakt')")).values()
    assert said.startswith("ValueError: Unknown verifier 'Exakt' in example '0'. Did you mean 'Exact'? Available: ")


def test_an_environment_that_opens_a_list_is_told_what_to_open(tmp_path):
    opened = 'Generated(config.size, one, "lists")'
    (said,) = problems(tmp_path, ENVS.replace("NAMED", "").replace(opened, "[one(0)]")).values()
    assert said == ("ValueError: Lists must open a source, such as jrl.tasks.envs.contract.Generated, but opened a "
                    "list, which has no fingerprint")  # fmt: skip


def test_verifiers_are_skipped_if_no_environment_of_the_file_opens(tmp_path):
    unopened = ENVS.replace("NAMED", "").replace("Generated(config.size", "Generated(config.length")
    assert not {GOLD, WRONG} & set(problems(tmp_path, unopened + NEEDY))
    shown = check.table(check_parts([tmp_path / "own.py"])).splitlines()
    assert shown[0] == "skip  Own    no ENVS of the file give examples to judge; see below"
    assert shown[-1] == "0 checks passed, 1 failed, 1 skipped"


def test_the_command_says_which_failed(tmp_path, capsys):
    (tmp_path / "own.py").write_text("VERIFIERS = {'own': lambda completion, example: None}\n")
    assert cli.main(["check", str(tmp_path / "own.py")]) == 2
    shown = capsys.readouterr().out
    assert "FAIL  own  judges wrong answers" in shown and "4 checks passed, 2 failed" in shown


def test_the_line_of_a_part_is_named_and_a_problem_is_told_once(tmp_path, monkeypatch):
    names = ("masked_tokens_do_not_matter", "a_step_without_tokens_has_loss_zero")
    monkeypatch.setattr(check, "contract_tests_of", lambda objective: {name: CONTRACT_TESTS[name] for name in names})
    (tmp_path / "own.py").write_text(
        "from jrl.algos.sft import OBJECTIVE, SFT\nfrom jrl.types import traced\n@traced\nclass Mine(SFT):\n    pass\n"
        "def token_loss(config, tokens, state):\n    return tokens.adv, {}\n"
        "ALGOS = {'Mine': OBJECTIVE._replace(config=Mine, token_loss=token_loss)}\n"
    )
    shown = check.table(check.check_parts([tmp_path / "own.py"])).splitlines()
    assert [line.strip() for line in shown] == [
        "FAIL  Mine  masked tokens do not matter",
        "AttributeError: 'Tokens' object has no attribute 'adv'",
        f"It was raised by your own {tmp_path / 'own.py'}, line 7, in token_loss",
        "FAIL  Mine  a step without tokens has loss zero",
        "as above",
        "0 checks passed, 2 failed",
    ]


OBJECTIVE = """
import jax.numpy as jnp
from jrl.algos.contract import Objective
from jrl.types import traced

@traced
class Own:
    clip: float = 0.2

def token_loss(config, tokens, state):
    masked = lambda x: jnp.where(tokens.mask, x, 0)
    BODY
    return -masked(tokens.logprobs), {}

ALGOS = {"Own": Objective(config=Own, token_loss=token_loss)}
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "reference = masked(tokens.ref_logprobs)",
            "There tokens.ref_logprobs is None: an objective gets it only if its `needs` request it",
        ),
        ("large = 1 if config.clip > 1 else 0", "use jnp.where instead of `if`"),
        ("largest = float(jnp.max(masked(tokens.logprobs)))", "and jnp instead of numpy, float() and item()"),
    ],
)
def test_common_mistakes_of_objectives_come_with_what_to_do(tmp_path, body, said):
    found = problems(tmp_path, OBJECTIVE.replace("BODY", body))["jit changes nothing"]
    assert said in found and "own.py, line" in found


@pytest.mark.parametrize("heading", ["An optimizer", "A sampling strategy", "A curriculum"])
def test_the_parts_of_the_documentation_pass(tmp_path, heading):
    results = check_parts([write_part(heading, tmp_path)])
    assert results and not [row for row in results if row.problem]


def test_a_wrong_row_of_each_table_is_found(tmp_path):
    wrong = {
        "An optimizer": ("optax.scale_by_lion(b1=config.b1, b2=config.b2)", "optax.lion(0.01)", "it goes downhill"),
        "A sampling strategy": ("if len(tokens) <= room else ()", "+ tokens", "host tokens fit"),
        "A curriculum": ("variance + config.floor", "[1.0]", "weights are of the examples"),
    }
    for heading, (right, mistake, test) in wrong.items():
        path = write_part(heading, tmp_path)
        text = path.read_text()
        assert right in text
        path.write_text(text.replace(right, mistake))
        assert test in {row.test for row in check_parts([path]) if row.problem}


def test_a_row_that_cannot_be_tested_fails_alone(tmp_path):
    (tmp_path / "own.py").write_text("""
import dataclasses
from jrl.rollout.strategies.contract import Strategy
from jrl.tasks.data.curricula import Curriculum, OutcomeMemory
part = dataclasses.dataclass(frozen=True, kw_only=True)
@part
class Roles:
    pass
@part
class Raises(OutcomeMemory):
    def __post_init__(self):
        self.missing
@part
class Bare(OutcomeMemory):
    share: float
STRATEGIES = {"Roles": Strategy(Roles, roles=lambda config: config.role, drawing=lambda config, tokenizer: None)}
CURRICULA = {"Raises": Curriculum(Raises, max), "Bare": Curriculum(Bare, max)}
""")
    results = check_parts([tmp_path / "own.py"])
    assert [(row.name, row.test) for row in results] == [(name, "has defaults") for name in ("Roles", "Raises", "Bare")]
    said = ("no attribute 'role'", "no attribute 'missing'", "missing 1 required keyword-only argument: 'share'")
    assert [part in row.problem for part, row in zip(said, results)] == [True] * 3


def test_a_part_that_raises_fails_alone(tmp_path):
    text = """
import dataclasses
from jrl.tasks.data.stored import StoredSource
from jrl.tasks.envs.contract import Environment
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.tasks.tokenizers.contract import Tokenizer
from jrl.tasks.verifiers.contract import Verifier
part = dataclasses.dataclass(frozen=True, kw_only=True)
@part
class Env:
    def __post_init__(self):
        self.missing
@part
class Verify(Env):
    weight: float = 1.0
@part
class Rows(Env):
    pass
@part
class Digits:
    pass
class OnlyDigits(ByteTokenizer):
    def encode(self, text):
        return [{"1": 49, "2": 50}[character] for character in text]
ENVS = {"Env": Environment(Env, open=max)}
VERIFIERS = {"Verify": Verifier(Verify, score=lambda config, completion, example: 1.0)}
SOURCES = {"Rows": StoredSource(Rows, rows=max)}
TOKENIZERS = {"Digits": Tokenizer(Digits, lambda config, texts: OnlyDigits(), lambda folder, row: OnlyDigits())}
"""
    found = {}
    for rows in (text, text.replace("ENVS", "OTHERS")):  # verifiers are skipped where no environment has examples
        (tmp_path / "own.py").write_text(rows)
        found |= {(row.name, row.test): row.problem for row in check_parts([tmp_path / "own.py"])}
    for name in ("Env", "Verify", "Rows"):
        assert "no attribute 'missing'" in found[name, "has defaults"]
    assert "KeyError: '+'" in found["Digits", "texts round-trip exactly"]


def test_a_function_with_other_arguments_is_refused(tmp_path):
    source = OBJECTIVE.replace("BODY", "").replace("(config, tokens, state)", "(config, tokens)")
    with pytest.raises(PartError, match=r"ALGOS\['Own'\].token_loss takes \(config, tokens\); it is called with"):
        problems(tmp_path, source)


def test_examples_may_name_a_verifier_that_a_configuration_completes(tmp_path):
    text = """
import dataclasses
from jrl.tasks.envs.contract import Environment, Generated
from jrl.tasks.example import Example, Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine:
    size: int = 5


def open_mine(config):
    make = lambda i: Example(f"m{i}", (Message("user", f"{i}?"),), answer=str(i), verifiers=("Regex",))
    return Generated(config.size, make, "v1")


ENVS = {"Mine": Environment(Mine, open_mine)}
"""
    (tmp_path / "own.py").write_text(text)
    (result,) = check_parts([tmp_path / "own.py"])
    assert result.problem is None
