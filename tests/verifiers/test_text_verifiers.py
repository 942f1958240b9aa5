"""Exact, Numeric, Regex, FormatTags and Length: labeled completions, and configs that make no sense."""

import pytest
from verifier_fakes import example

from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import exact, length, numeric, regex, tags
from jrl.tasks.verifiers.exact import Exact
from jrl.tasks.verifiers.length import Length
from jrl.tasks.verifiers.numeric import Numeric
from jrl.tasks.verifiers.regex import Regex
from jrl.tasks.verifiers.tags import FormatTags


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        ("4", Status.CORRECT),
        (" 4\n", Status.CORRECT),
        ("44", Status.WRONG),
        ("the answer is 4", Status.WRONG),
        ("４", Status.WRONG),
        ("4\u200b", Status.WRONG),
        ("", Status.UNPARSABLE),
        ("\n\t ", Status.UNPARSABLE),
    ],
)
def test_exact_wants_every_character(completion, status):
    verdict = exact.score(Exact(), completion, example("4"))
    assert verdict.status is status
    assert verdict.reward == float(status is Status.CORRECT)


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999}", "(" * 3000 + ")" * 3000])
def test_a_pattern_that_python_refuses_is_refused(pattern):
    with pytest.raises(ValueError, match=r"Regex\.pattern .* is not a regular expression: "):
        Regex(pattern=pattern)


def test_exact_without_a_gold_answer_is_an_error_of_the_data():
    with pytest.raises(ValueError, match="'e' has no answer"):
        exact.score(Exact(), "4", example(None))


@pytest.mark.parametrize(
    ("gold", "completion", "status"),
    [
        ("1000", "1,000", Status.CORRECT),
        ("1000", "1e3", Status.CORRECT),
        ("0.5", "1/2", Status.CORRECT),
        ("-0.25", "-1/4", Status.CORRECT),
        ("0.1", ".1", Status.CORRECT),
        ("5", "+5.0", Status.CORRECT),
        ("1/3", "0.333333333333", Status.WRONG),
        ("5", "6", Status.WRONG),
        ("5", "5 6", Status.UNPARSABLE),
        ("5", "1,0,0", Status.UNPARSABLE),
        ("5", "5%", Status.UNPARSABLE),
        ("5", "5 cm", Status.UNPARSABLE),
        ("5", "nan", Status.UNPARSABLE),
        ("5", "inf", Status.UNPARSABLE),
        ("5", "5/0", Status.UNPARSABLE),
        ("5", "1/5/5", Status.UNPARSABLE),
        ("5", "٥", Status.UNPARSABLE),
        ("5", "5_0", Status.UNPARSABLE),
        ("5", "0x5", Status.UNPARSABLE),
        ("5", "1e999999999", Status.UNPARSABLE),
        ("5", "5" * 5000, Status.UNPARSABLE),
        ("5", ".", Status.UNPARSABLE),
        ("5", "--5", Status.UNPARSABLE),
        ("5", "5=5", Status.UNPARSABLE),
    ],
)
def test_numeric_reads_one_plain_number_exactly(gold, completion, status):
    assert numeric.score(Numeric(), completion, example(gold)).status is status


@pytest.mark.parametrize(
    ("tolerance", "completion", "status"),
    [
        ({"absolute": 0.5}, "10.5", Status.CORRECT),
        ({"absolute": 0.5}, "10.5000001", Status.WRONG),
        ({"relative": 0.125}, "8.75", Status.CORRECT),  # 10 - 10/8, and 1/8 is exact in binary
        ({"relative": 0.125}, "8.7499", Status.WRONG),
        ({"absolute": 2.0, "relative": 0.125}, "12", Status.CORRECT),  # the larger of the two counts
    ],
)
def test_numeric_counts_what_lies_within_the_declared_tolerance(tolerance, completion, status):
    assert numeric.score(Numeric(**tolerance), completion, example("10")).status is status


def test_numeric_refuses_a_gold_answer_that_is_no_number():
    with pytest.raises(ValueError, match="'four'"):
        numeric.score(Numeric(), "4", example("four"))


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
def test_numeric_refuses_a_tolerance_that_is_none(tolerance):
    with pytest.raises(ValueError, match=r"Numeric\.absolute"):
        Numeric(absolute=tolerance)


@pytest.mark.parametrize(
    ("completion", "status"),
    [("abc", Status.CORRECT), ("xabcx", Status.WRONG), ("abc\n!", Status.WRONG), ("", Status.UNPARSABLE)],
)
def test_regex_matches_the_whole_text(completion, status):
    assert regex.score(Regex(pattern="[abc]+"), completion, example()).status is status


def test_regex_does_not_look_at_a_text_above_its_cap():
    verdict = regex.score(Regex(pattern="a*", max_characters=10), "a" * 11, example())
    assert verdict.status is Status.FORBIDDEN
    assert verdict.reward is None


def test_regex_refuses_a_pattern_that_is_none():
    with pytest.raises(ValueError, match=r"Regex\.pattern '\(' is not a regular expression"):
        Regex(pattern="(")


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        ("<think>a</think><answer>b</answer>", Status.CORRECT),
        (" <think>a</think>\n<answer>b</answer>\n", Status.CORRECT),
        ("<answer>b</answer><think>a</think>", Status.WRONG),
        ("<think>a</think><answer>b</answer>!", Status.WRONG),
        ("x<think>a</think><answer>b</answer>", Status.WRONG),
        ("<think>a</think><answer>b</answer><answer>c</answer>", Status.WRONG),
        ("<think><answer>b</answer></think>", Status.WRONG),
        ("<think>a<answer></think>b</answer>", Status.WRONG),
        ("<think></think><answer>b</answer>", Status.WRONG),
        ("<think>a</think><answer>b", Status.WRONG),
        ("<THINK>a</THINK><answer>b</answer>", Status.WRONG),
        ("", Status.UNPARSABLE),
    ],
)
def test_format_tags_wants_each_tag_once_and_in_order(completion, status):
    assert tags.score(FormatTags(), completion, example()).status is status


@pytest.mark.parametrize("names", [(), ("a", "a"), ("<a>",), ("",)])
def test_format_tags_refuses_names_that_are_no_tags(names):
    with pytest.raises(ValueError, match="FormatTags"):
        FormatTags(tags=names)


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        ("ab", Status.CORRECT),
        ("abcd", Status.CORRECT),
        ("a", Status.WRONG),
        ("abcde", Status.WRONG),
        ("", Status.WRONG),
    ],
)
def test_length_includes_both_bounds(completion, status):
    assert length.score(Length(low=2, high=4), completion, example()).status is status


def test_length_refuses_bounds_that_nothing_can_meet():
    with pytest.raises(ValueError, match="low 5 and high 4"):
        Length(low=5, high=4)
