import pytest

from jrl.tasks.verifiers.extract import extract_answer


@pytest.mark.parametrize(
    ("place", "text", "answer"),
    [
        ("all", "  4 \n", "4"),
        ("all", " \n", None),
        ("answer_tag", "<think>5</think><answer> 4 </answer>", "4"),
        ("answer_tag", "<answer>4</answer><answer>4</answer>", None),
        ("answer_tag", "<answer>4", None),
        ("answer_tag", "</answer>4<answer>", None),
        ("answer_tag", "<answer> </answer>", None),
        ("boxed", r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{4} or \boxed{5}", None),
        ("boxed", r"\boxed{\boxed{4}}", None),
        ("boxed", r"\boxed{4", None),
        ("boxed", r"\boxed 4", None),
        ("boxed", "4", None),
        ("hash", "2 + 2\n#### 4\nthanks", "4"),
        ("hash", "#### 4\n#### 5", None),
        ("hash", "4", None),
        ("answer_line", "Answer: 3?\nNo.\n  Answer: $4$ \n\n", "$4$"),
        ("answer_line", "Answer: 4\nSo it is.", None),
        ("answer_line", "The Answer: 4", None),
        ("answer_line", "Answer:\n", None),
        ("last_line", "first\n 4 \n\n", "4"),
        ("last_line", "", None),
    ],
)
def test_only_the_one_answer_in_the_declared_place_is_found(place, text, answer):
    assert extract_answer(text, place) == answer


def test_an_undeclared_place_is_refused():
    with pytest.raises(ValueError, match=r"'prose'.*'answer_tag', 'boxed'"):
        extract_answer("4", "prose")
