from __future__ import annotations

import gc
import weakref

from jrl.tasks.data.contamination import EvaluationIndex, words
from jrl.tasks.data.hygiene import answer_type, clean
from jrl.tasks.example import Example, Message


def example(text, answer="4"):
    return Example(id=text, messages=(Message("user", text),), answer=answer)


def test_text_is_normalized_to_words():
    assert words("so, What is TWO\nplus_two?") == ("so", "what", "is", "two", "plus", "two")
    assert words("?!") == () and words("Straße") == ("strasse",)


def test_a_shared_gram_of_five_words_contaminates():
    # "what is two plus two" is 5 words; "so, What is TWO plus two?" holds the same five in a row
    held = EvaluationIndex([example("what is two plus two")], 5)
    assert held.overlap(example("so, What is TWO plus two?"))
    assert not held.overlap(example("so, what is two plus three?"))
    assert not held.overlap(example("what is plus two two"))


def test_a_text_shorter_than_a_gram_must_be_the_same_whole():
    held = EvaluationIndex([example("two plus two")], 5)
    assert held.overlap(example("Two plus two!"))
    assert not held.overlap(example("two plus")) and not held.overlap(example("two plus two today"))
    assert not EvaluationIndex([example("!")], 5).overlap(example("?"))  # no words at all are no overlap


def test_answers_that_cannot_be_judged_well_are_told_by_type():
    assert answer_type(example("How many?", "12")) is None
    assert answer_type(example("How many?", " ")) == answer_type(example("How many?", None)) == "no_answer"
    assert answer_type(example("Is it?", "Yes.")) == answer_type(example("Is it?", "false")) == "yes_no"
    assert answer_type(example("Is it?", "yes, 12")) is None
    assert answer_type(example("Which?\nA) one\nB) two", "A")) == "multiple_choice"
    assert answer_type(example("Let A: be one.\nHow many?", "3")) is None
    assert answer_type(example("Prove that x = y.", "qed")) == "proof"


def test_every_rule_counts_what_it_drops_once():
    texts = [
        ("what is one plus one", "2"),  # kept
        ("What is one plus one?", "2"),  # duplicate
        ("what is two plus two today", "4"),  # contaminated, 5 words in a row
        ("what is six times seven", "42"),  # disagrees with the next
        ("what is six times seven", "41"),
        ("one two three four five six seven eight nine", "9"),  # too long
        ("is nine a prime number", "no"),
        ("what is nine plus one", "10"),  # kept
    ]
    found = clean([example(*pair) for pair in texts], [example("so what is two plus two")], n=5, most_words=8)
    assert found.indices == [0, 7]
    assert found.counts == {"duplicate": 1, "contaminated": 1, "disagreement": 2, "too_long": 1, "yes_no": 1}


def test_a_sign_makes_another_prompt_and_another_answer():
    pairs = [
        ("What is 2+3?", "5"),
        ("What is 2-3?", "-1"),
        ("What is 2*(3+4)?", "14"),
        ("What is 2*3+4?", "10"),
        ("What is 5?", "5"),
        ("What is 5!?", "120"),
    ]
    assert clean([example(*pair) for pair in pairs], []).indices == [0, 1, 2, 3, 4, 5]
    for answers, kept in ((("-1", "1"), []), (("1/2", "12"), []), (("x = 5.", "X=5"), [0])):
        twice = [example("What is x?", answers[0]), example("what  is X", answers[1])]
        assert clean(twice, []).indices == kept


def test_nothing_held_out_contaminates_nothing():
    assert clean([example("what is one plus one")], []).indices == [0]


def test_the_same_question_under_another_system_message_is_another_prompt():
    asked = lambda system, answer: Example(
        id=system, messages=(Message("system", system), Message("user", "two plus two")), answer=answer
    )
    one, other = asked("answer in digits", "4"), asked("answer in words", "four")
    assert clean([one, other, asked("Answer in digits!", "4")], []) == ([0, 1], {"duplicate": 1})
    # Three words, and three of the system message; an evaluation set's prompts are compared without those.
    assert clean([one], [], most_words=5).counts == {"too_long": 1} and clean([one], [], most_words=6).indices == [0]
    assert clean([one], [other]).counts == {"contaminated": 1}


def test_no_example_is_kept_while_others_are_read():
    """Examples with prompts, answers or both in common: at most the one read last and its successor exist."""
    texts, alive, most = [("what is one plus one", "2"), ("what is one plus one", "3"), ("so", "1")] * 20, [], 0

    def read():
        nonlocal most
        for i, pair in enumerate(texts):
            one = example(f"{pair[0]} {i % 7}", pair[1])
            alive.append(weakref.ref(one))
            gc.collect()
            most = max(most, sum(ref() is not None for ref in alive))
            yield one

    found = clean(read(), [])
    # Of 7 prompts "so .." each is kept once; each "what is one plus one .." has both answers, so all 40 go.
    assert found.counts == {"disagreement": 40, "duplicate": 13} and len(found.indices) == 7
    assert most <= 2
