"""ReasoningGymScore over every dataset of reasoning-gym, and a look into the scorers that it trusts."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap

import pytest
from reasoning_gym import factory
from verifier_fakes import example

from jrl.tasks.envs.reasoning_gym import plain
from jrl.tasks.example import Example
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import reasoning_gym
from jrl.tasks.verifiers.reasoning_gym import FENCED, ReasoningGymScore

DATASETS = sorted(set(factory.DATASETS) - {"composite"})
NO_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
RUNS_TEXT = {"eval", "exec", "compile", "parse_expr", "sympify", "literal_eval", "loads_pickle", "system", "Popen"}
# Their scorers call a parser of their own that has the name of sympy's.
OWN_PARSERS = {"propositional_logic"}


def task(name: str, index: int = 0) -> Example:
    """One task in the form of envs/reasoning_gym.py, which refuses here those that depend on the hash seed."""
    dataset = factory.create_dataset(name, seed=7, size=index + 1)
    entry = json.loads(json.dumps(plain(dataset[index])))
    config = {k: v for k, v in plain(dataclasses.asdict(dataset.config)).items() if k not in ("size", "seed")}
    return example(entry["answer"], info={"dataset": name, "config": config, "entry": entry})


def score(answer: str, example: Example, **fields):
    return reasoning_gym.score(ReasoningGymScore(**fields), answer, example)


@pytest.mark.parametrize("name", DATASETS)
def test_the_reference_answer_is_right_and_junk_is_not(name, trials):
    trials(6)
    example = task(name)
    for junk in ("zqj", "[", "0 0 0 0 0 0 0", "__import__('os').abort()"):
        verdict = score(junk, example)
        assert verdict.status is not Status.CORRECT
        assert verdict.reward in (None, 0.0)
    if name in NO_REFERENCE:
        assert example.answer is None
    elif FENCED.get(name, True) is None:
        assert score(example.answer, example).status is Status.FORBIDDEN
    else:
        verdict = score(example.answer, example)
        assert (verdict.status, verdict.reward) == (Status.CORRECT, 1.0)
    assert score("", example).status is Status.UNPARSABLE


JUNK = (
    "0", "1", "-1", "0.0", "1e999", "nan", "NaN", "inf", "-inf", "nan+nanj", "None", "True", "[]", "{}", "yes",
    "\u0660", "I do not know", "0, 0", "()", "9" * 400,
)  # fmt: skip


def false_rewards(name: str, tasks: int) -> list[tuple[int, str]]:
    """Returns (task, junk) wherever junk that is not the task's answer has full marks."""
    examples = [task(name, index) for index in range(tasks)]
    return [
        (index, junk)
        for index, example in enumerate(examples)
        for junk in JUNK
        if not says(junk, str(example.answer)) and marks(junk, example) == 1
    ]


def says(text: str, answer: str) -> bool:
    """Whether two texts are the same, or the same number."""
    try:
        return float(text) == float(answer)
    except ValueError:
        return text.strip().casefold() == answer.strip().casefold()


def marks(answer: str, example: Example) -> float:
    """Returns the reward, 0 where there is none."""
    return score(answer, example, credit="partial").reward or 0.0


@pytest.mark.parametrize("name", DATASETS)
def test_no_junk_has_full_marks(name, trials):
    trials(3 * len(JUNK))
    assert false_rewards(name, 3) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", DATASETS)
def test_no_junk_has_full_marks_on_fifteen_tasks(name, trials):
    trials(15 * len(JUNK))
    assert false_rewards(name, 15) == []


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("3/8", Status.CORRECT), ("0.375", Status.CORRECT), (".375", Status.CORRECT), ("6 / 16", Status.CORRECT),
        ("0.3751", Status.CORRECT), ("0.376", Status.WRONG), ("0", Status.WRONG), ("0.3", Status.WRONG),
        ("3", Status.WRONG), ("3/0", Status.UNPARSABLE), ("nan", Status.UNPARSABLE), ("\u0660", Status.UNPARSABLE),
        ("1e999", Status.UNPARSABLE), ("9" * 400, Status.UNPARSABLE), ("", Status.UNPARSABLE),
    ],
)  # fmt: skip
def test_a_probability_is_no_beginning_of_one(answer, status):
    entry = {"answer": "0.375", "metadata": {"rational": {"numerator": 3, "denominator": 8}}}
    assert score(answer, example("0.375", info={"dataset": "coin_flip", "entry": entry})).status is status


def test_a_small_probability_is_not_zero():
    entry = {"answer": "3.051757812e-05", "metadata": {"rational": {"numerator": 1, "denominator": 2**15}}}
    small = example("3.051757812e-05", info={"dataset": "coin_flip", "entry": entry})
    assert score("0", small).status is Status.WRONG
    assert score("1/32768", small).status is Status.CORRECT


@pytest.mark.parametrize("name", ["countdown", "puzzle24"])
def test_a_number_of_five_thousand_digits_is_wrong_and_no_error(name):
    assert score("9" * 5000, task(name)).status in (Status.WRONG, Status.UNPARSABLE)


@pytest.mark.parametrize("name", DATASETS)
def test_no_scorer_that_is_trusted_can_run_text(name):
    cls, _ = factory.DATASETS[name]
    called = calls_within_reach(cls, "score_answer")
    dangerous = called & (RUNS_TEXT - ({"parse_expr"} if name in OWN_PARSERS else set()))
    assert not dangerous or name in FENCED
    assert bool(dangerous) == (name in set(FENCED) - {"game_of_life_halting", "coin_flip"})


def calls_within_reach(cls: type, method: str) -> set[str]:
    """The names called by a method, and by the methods and functions of its module that it calls, however deep."""
    module = inspect.getmodule(inspect.unwrap(cls.__dict__.get(method, next(
        base.__dict__[method] for base in cls.__mro__ if method in base.__dict__))))  # fmt: skip
    seen, waiting = set(), [method]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        thing = inspect.getattr_static(cls, name, None) or vars(module).get(name)
        thing = thing.__func__ if isinstance(thing, staticmethod | classmethod) else thing
        if not inspect.isfunction(thing) and not (inspect.isclass(thing) and thing.__module__ == module.__name__):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(thing)))):
            if isinstance(node, ast.Call):
                waiting.append(
                    node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func).split(".")[-1]
                )
    return seen


@pytest.mark.parametrize("name", [name for name in FENCED if name in factory.DATASETS])
def test_no_fenced_dataset_runs_its_answer(name, tmp_path):
    canary = tmp_path / "ran"
    example = task(name)
    for attack in (
        f"open({str(canary)!r}, 'w')",
        f"[open({str(canary)!r}, 'w')]",
        f"__import__('os').mkdir({str(canary)!r})",
    ):
        assert score(attack, example).status is not Status.CORRECT
    assert not canary.exists()


@pytest.mark.parametrize(
    ("answer", "status"),
    [("82 + 20 + 67 - 50", 0), ("67-50+(20+82)", 0), ("119", 1), ("82+20+67-50+0", 1), ("82+20+67+50", 1),
     ("82 + 20 + 67 - 50 = 119", 1), ("(82 + 20 + 67 - 50", 2), ("82,20,67,50", 2), ("9**9**9", 1)],
)  # fmt: skip
def test_countdown_wants_an_expression_of_exactly_its_numbers(answer, status):
    entry = {"answer": "82 + 20 + 67 - 50", "metadata": {"numbers": [67, 50, 20, 82], "target": 119}}
    assert score(answer, example(info={"dataset": "countdown", "entry": entry})).status == status


@pytest.mark.parametrize(
    ("numbers", "target", "answer"),
    [([3, 2, 50], 350, "3e2+50"), ([2, 5, 4], 10, "2.5*4"), ([0, 18, 2], 26, "0x18+2"), ([5, 2], 1, ".5*2")],
)
def test_countdown_does_not_make_a_number_of_the_digits_of_two(numbers, target, answer):
    entry = {"answer": "?", "metadata": {"numbers": numbers, "target": target}}
    verdict = score(answer, example(info={"dataset": "countdown", "entry": entry}))
    assert (verdict.status, verdict.reward) == (Status.WRONG, 0.0)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("[1, 2, 3]", Status.CORRECT), ("['1', '2', '3.0005']", Status.CORRECT), ("[1, 3, 2]", Status.WRONG),
        ("'123'", Status.UNPARSABLE), ('{"1": 0, "2": 0, "3": 0}', Status.UNPARSABLE),
        ("[true, 2, 3]", Status.UNPARSABLE), ("[[1], 2, 3]", Status.UNPARSABLE), ("123", Status.UNPARSABLE),
    ],
)  # fmt: skip
def test_sorted_numbers_are_a_list(answer, status):
    entry = {"answer": "['1', '2', '3']", "metadata": {}}
    assert score(answer, example("x", info={"dataset": "number_sorting", "entry": entry})).status is status


MALFORMED = (
    *JUNK, "9" * 5000, f"[{'9' * 400}]", "[1e400]", '{"a": 1}', "[[1]]", "[null]", '"x"', "[", "(", "\ud800",
)  # fmt: skip


@pytest.mark.parametrize("name", DATASETS)
def test_no_junk_makes_a_scorer_raise(name, trials):
    # Such a row would be masked, where any other wrong answer has the reward 0.
    trials(len(MALFORMED))
    example = task(name)
    for junk in MALFORMED:
        assert score(junk, example).status in (Status.CORRECT, Status.WRONG, Status.UNPARSABLE, Status.FORBIDDEN)


@pytest.mark.parametrize("letters", range(2, 24))
def test_more_than_the_word_is_not_the_word_backward(letters):
    # The scorer adds 1 / letters for each letter; of 9 letters the sum is 1.0000000000000002.
    word = "abcdefghijklmnopqrstuvwxyz"[:letters]
    spelled = example(word, info={"dataset": "spell_backward", "config": {}, "entry": {"answer": word, "metadata": {}}})
    assert score(word, spelled).reward == 1.0
    assert score(f"{word} x", spelled).status is Status.WRONG
    assert score(f"{word} x", spelled, credit="partial").reward < 1


@pytest.mark.parametrize(
    ("answer", "reward"), [("25", 1), ("$25.", 1), ("it is twenty-five: 25", 1), ("-25", 0), ("it is -25", 0), ("", 0)]
)
def test_a_word_problem_wants_the_sign(answer, reward):
    problem = example("25", info={"dataset": "gsm_symbolic", "config": {}, "entry": {"answer": "25", "metadata": {}}})
    assert score(answer, problem).reward == reward


def test_a_move_out_of_the_grid_is_an_answer_to_boxnet():
    state = {"0.5_0.5": ["box_red"], "0.5_1.5": ["target_red"]}
    entry = {"answer": None, "metadata": {"initial_state": state}}
    boxes = example(info={"dataset": "boxnet", "config": {}, "entry": entry})
    move = lambda place: f'[{{"Agent[0.5, 0.5]": "move(box_red, square[{place}])"}}]'
    assert score(move("0.5, 1.5"), boxes).status is Status.WRONG  # it lifts none
    assert score(move("0.5, -0.5"), boxes).status is not Status.CORRECT
    assert score(move("1.5, 0.5"), boxes).status is Status.UNPARSABLE


def test_puzzle24_does_not_let_the_answer_choose_its_numbers():
    entry = {"answer": "4*8 - 6 - 2", "metadata": {"numbers": [4, 8, 6, 2]}}
    puzzle = example(info={"dataset": "puzzle24", "entry": entry})
    assert score("8*4 - (2 + 6)", puzzle).status is Status.CORRECT
    assert score("6*4*1*1", puzzle).status is Status.WRONG
    powers = example(info={"dataset": "puzzle24", "entry": {"answer": "?", "metadata": {"numbers": [2, 5, 4, 4]}}})
    assert score("2**5 - 4 - 4", powers).status is Status.WRONG  # the task names + - * /


def test_an_integral_is_any_antiderivative():
    entry = {"answer": "x**3 + C", "metadata": {"integrand": "3*x**2", "variable": "x"}}
    integral = example(info={"dataset": "simple_integration", "entry": entry})
    assert score("x**3 + 7", integral).status is Status.CORRECT
    assert score("x**3 + x", integral).status is Status.WRONG


def test_partial_credit_is_given_only_where_it_was_asked_for():
    example = task("chain_sum")
    answer = f"it is {example.answer}"
    assert score(answer, example).reward == 0.0
    partial = score(answer, example, credit="partial")
    assert partial.status is Status.WRONG
    assert 0 < partial.reward < 1


@pytest.mark.parametrize(
    ("name", "reference", "answer", "status"),
    [
        ("gcd", "12", "12", Status.CORRECT),
        ("gcd", "12", "13", Status.WRONG),
        ("gcd", "12", "-1,300.5", Status.WRONG),
        ("gcd", "12", "1 2", Status.UNPARSABLE),
        ("gcd", "12", "12 or 13", Status.UNPARSABLE),
        ("gcd", "12", "['12']", Status.UNPARSABLE),
        ("number_filtering", "['1', '2']", "['1']", Status.WRONG),
        ("number_filtering", "['1', '2']", "[]", Status.WRONG),
        ("number_filtering", "['1', '2']", "['1', '2", Status.UNPARSABLE),
        ("number_filtering", "['1', '2']", "[" * 10_000, Status.UNPARSABLE),
        ("number_filtering", "['1', '2']", "1", Status.UNPARSABLE),
    ],
)
def test_an_answer_that_has_not_the_references_form_is_no_answer(name, reference, answer, status):
    entry = {"question": "?", "answer": reference, "metadata": {"result": ["1", "2"]}}
    verdict = score(answer, example(reference, info={"dataset": name, "config": {}, "entry": entry}))
    assert verdict.status is status
    assert verdict.reward == float(status is Status.CORRECT)


def test_a_task_whose_right_answer_is_empty_is_forbidden():
    entry = {"answer": "", "metadata": {}}
    assert score("junk", example(info={"dataset": "polynomial_equations", "entry": entry})).status is Status.FORBIDDEN


@pytest.mark.parametrize("info", [{}, {"dataset": "chain_sum"}, {"dataset": "nope", "entry": {"metadata": {}}}])
def test_an_example_that_is_no_task_of_it_is_an_error_of_the_data(info):
    with pytest.raises(ValueError, match="reasoning-gym"):
        score("4", example(info=info))
