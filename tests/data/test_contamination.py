"""What a training set shares with evaluation sets: by hand, and what configurations make of it."""

from __future__ import annotations

import json

import pytest

from jrl import cli
from jrl.tasks.data.contamination import EvaluationIndex, described
from jrl.tasks.envs import ENVS, Generated, open_source
from jrl.tasks.envs.filtered import Filtered, open_filtered
from jrl.tasks.example import Example, Message

pytestmark = pytest.mark.fast


def asked(name, text, answer="1", **info):
    return Example(name, (Message("system", "be kind and brief"), Message("user", text)), answer=answer, info=info)


def source_of(*examples, fingerprint="x"):
    return Generated(len(examples), lambda i: examples[i], fingerprint, {"bad_json": 2})


EVAL = [asked("e0", "one two three four five six"), asked("e1", "seven eight nine"), asked("e2", "two")]


def test_the_share_of_an_evaluation_prompt_by_hand():
    index = EvaluationIndex(EVAL, 3)
    # Shared trigrams of e0: (one two three), (two three four) cover its words 1 to 4 of 6.
    found = index.overlap(asked("t", "So: one, TWO three four! and more"))
    assert (found.example, found.evaluated, found.kind, found.share) == ("t", "e0", "ngram", 4 / 6)
    # Two runs that overlap in no word: 3 of 6, and 3 of 3, which is the most
    assert index.overlap(asked("t", "one two three, seven eight nine"))[1:] == ("e1", "ngram", 1.0)
    assert index.overlap(asked("t", "four five six"))[1:] == ("e0", "ngram", 0.5)
    assert index.overlap(asked("t", "one two x three four x five six")) is None
    # of prompts that are shorter than an n-gram only the same words are found; system messages are not compared
    assert index.overlap(asked("t", "Two."))[1:] == ("e2", "exact", 1.0)
    assert index.overlap(asked("t", "one two")) is None and index.overlap(asked("t", "be kind and brief")) is None
    assert EvaluationIndex(EVAL, None).overlap(asked("t", "seven eight nine ten")) is None
    assert EvaluationIndex(EVAL, None).overlap(asked("t", "Seven, eight: NINE"))[1:] == ("e1", "exact", 1.0)
    assert EvaluationIndex([asked("e", "!?")], 1).overlap(asked("t", "?")) is None


def test_the_shares_are_those_of_a_plain_loop():
    words = lambda i, n: [f"w{(i * 7 + k * k) % 11}" for k in range(n)]
    held = [words(i, 4 + i % 5) for i in range(12)]
    index = EvaluationIndex([asked(str(i), " ".join(text)) for i, text in enumerate(held)], 2)
    for i in range(40):
        text = words(i + 100, 3 + i % 9)
        grams = {tuple(text[k : k + 2]) for k in range(len(text) - 1)}
        shares = []
        for one in held:
            marked = [False] * len(one)
            for k in range(len(one) - 1):
                if tuple(one[k : k + 2]) in grams:
                    marked[k] = marked[k + 1] = True
            shares.append(1.0 if one == text else sum(marked) / len(one))
        found = index.overlap(asked("t", " ".join(text)))
        assert (0.0 if found is None else found.share) == max(shares)


def test_examples_repeat_only_where_every_text_does():
    same = asked("a", "q", rejected="r")
    others = [asked("b", "q"), asked("c", "q", "2", rejected="r"), asked("d", "q", rejected="s"),
              asked("e", "Q", rejected="r"), asked("f", "q", rejected="r", label=True)]  # fmt: skip
    source = open_filtered(
        Filtered(task=None), source_of(same, *others, asked("g", "q", rejected="r", score=3), same), ()
    )
    assert source.indices.tolist() == [0, 1, 2, 3, 4, 5] and source.counts["duplicate"] == 2


def test_data_is_read_once_and_a_repeated_prompt_is_looked_up_once(monkeypatch):
    """Both sets repeat prompts, as DAPO-Math-17k and AIME-2024 are published, and all have a template's words in
    common: 4 prompts 25 times, 3 prompts 10 times."""
    looked_up = []
    plain = EvaluationIndex._most_shared
    monkeypatch.setattr(
        EvaluationIndex,
        "_most_shared",
        lambda index, known: looked_up.append(sum(map(len, known))) or plain(index, known),
    )
    template = "answer this in the last line please"  # 7 words: 2 6-grams
    train = [asked(f"t{i}", f"{template} t{i % 4} a b c d e f g") for i in range(100)]
    held_out = [asked(f"e{i}", f"{template} e{i % 3} h i j k l m n") for i in range(30)]
    reads = []
    source = Generated(100, lambda i: reads.append(i) or train[i], "x", verifiers=frozenset())
    config = Filtered(task=None, contaminated="report", ngram=6, overlap=0.4)
    filtered = open_filtered(config, source, (source_of(*held_out),))
    # The template is 7 of an evaluation prompt's 15 words, above 0.4 of them.
    assert filtered.overlaps[99] == ("t99", "e0", "ngram", 7 / 15) and len(filtered.overlaps) == 100
    assert reads == [*range(100)] and looked_up == [2 * 3] * 4  # two n-grams, each in three distinct prompts


TRAIN = [asked("t0", "one two three four five six"), asked("t1", "fresh"), asked("t2", "fresh"),
         asked("t3", "x one two three four five y"), asked("t4", "four five six")]  # fmt: skip


@pytest.mark.parametrize("config, left, counts", [
    ({}, ["t1", "t4"], {"duplicate": 1, "contaminated_exact": 1, "contaminated_ngram": 1}),  # t4 holds 3 of 6
    ({"overlap": 0.4}, ["t1"], {"duplicate": 1, "contaminated_exact": 1, "contaminated_ngram": 2}),
    ({"ngram": None}, ["t1", "t3", "t4"], {"duplicate": 1, "contaminated_exact": 1}),
    ({"contaminated": "report"}, ["t0", "t1", "t3", "t4"],
     {"duplicate": 1, "contaminated_exact": 1, "contaminated_ngram": 1}),
    ({"duplicates": "report", "ngram": 6}, ["t1", "t2", "t3", "t4"], {"duplicate": 1, "contaminated_exact": 1}),
])  # fmt: skip
def test_what_is_found_is_dropped_or_counted(config, left, counts):
    config = Filtered(**{"task": None, "ngram": 3, **config})
    source = open_filtered(config, source_of(*TRAIN), [source_of(*EVAL[:1]), source_of(*EVAL[1:])])
    assert [source[i].id for i in range(len(source))] == left and len(source.task) == len(left)
    assert source.counts == {"bad_json": 2, **counts}
    assert len(source.overlaps) == sum(n for cause, n in counts.items() if cause != "duplicate")


def test_what_is_found_may_be_refused_with_its_rows():
    config = Filtered(task=None, ngram=3, contaminated="refuse")
    with pytest.raises(
        ValueError, match=r"2 of 5 examples hold .*: t0 is the same prompt as e0; t3 holds 83% of the words of e0"
    ):
        open_filtered(config, source_of(*TRAIN), [source_of(*EVAL)])
    with pytest.raises(ValueError, match="1 of 5 examples repeat earlier ones: t2 is t1 again"):
        open_filtered(Filtered(task=None, duplicates="refuse"), source_of(*TRAIN), [])
    with pytest.raises(ValueError, match="leaves no example of 1"):
        open_filtered(Filtered(task=None), source_of(TRAIN[0]), [source_of(*EVAL)])
    for bad, message in (
        ({"ngram": 0}, "at least 1, or None"),
        ({"overlap": 1.0}, "below 1"),
        ({"overlap": -0.1}, "share"),
    ):
        with pytest.raises(ValueError, match=message):
            Filtered(task=None, **bad)


def test_the_identity_follows_rules_and_sets():
    prints = {open_filtered(Filtered(task=None, **config), source_of(*TRAIN), sets).fingerprint
              for config in ({}, {"ngram": 3}, {"overlap": 0.1}, {"duplicates": "report"}, {"contaminated": "report"})
              for sets in ([], [source_of(EVAL[2], fingerprint="y")])}  # fmt: skip
    assert len(prints) == 10


@pytest.mark.parametrize("around", [{}, {"duplicates": "report"}], ids=["dropped", "reported"])
def test_prompts_that_repeat_are_said_to_be_kept_only_where_they_are(tmp_path, around):
    """Three rows with one prompt: `Dataset` counts two that repeat it and keeps them, `Filtered` drops them."""
    row = {"prompt": [{"role": "user", "content": "Name a prime."}], "reward_model": {"ground_truth": "7"}}
    (tmp_path / "a.jsonl").write_text(3 * (json.dumps(row) + "\n"))
    rows = ENVS["Dataset"].config(path=str(tmp_path / "a.jsonl"), layout="verl")
    assert open_source(rows, ENVS).counts == {"duplicate_prompt": 2}
    kept = {"duplicate_prompt": 2} if around else {}
    source = open_source(ENVS["Filtered"].config(task=rows, **around), ENVS)
    assert source.counts == {"duplicate": 2, **kept} and len(source) == (3 if around else 1)
    assert open_source(ENVS["Cleaned"].config(task=rows), ENVS).counts == {"duplicate": 2}


def test_prompts_that_repeat_with_another_answer_are_kept_and_counted(tmp_path):
    rows = [{"prompt": "q", "answer": answer} for answer in ("4", "5", "4")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(ENVS["Filtered"].config(task=ENVS["Jsonl"].config(path=str(tmp_path / "a.jsonl"))), ENVS)
    # Two repeat the prompt; one of them repeats the answer, too.
    assert len(source) == 2 and source.counts == {"duplicate": 1, "duplicate_prompt": 1}


def test_prompts_that_repeat_are_counted_among_those_that_are_left(tmp_path):
    write = lambda name, rows: (tmp_path / name).write_text(
        "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows)
    )
    task = lambda name: ENVS["Jsonl"].config(path=str(tmp_path / name))
    write("a.jsonl", [("q", "1"), ("q", "2"), ("q", "3"), ("p", "4")])
    write("b.jsonl", [("q", "1"), ("p", "4")])
    write("c.jsonl", [("q", "1")])
    filtered = lambda **options: open_source(ENVS["Filtered"].config(**options), ENVS)
    # The two that repeat q are in an evaluation set, and go with it.
    source = filtered(task=task("a.jsonl"), evaluation=(task("c.jsonl"),), duplicates="report")
    assert open_source(task("a.jsonl"), ENVS).counts == {"duplicate_prompt": 2}
    assert source.counts == {"contaminated_exact": 3} and len(source) == 1
    # The mixture's three rows of b repeat whole rows of a, which leaves q three times and p once.
    source = filtered(task=ENVS["Mixture"].config(tasks=(task("a.jsonl"), task("b.jsonl"))))
    assert source.counts == {"duplicate": 3, "duplicate_prompt": 2} and len(source) == 4


def test_it_is_an_environment_around_any_other():
    addition = lambda **config: ENVS["Addition"].config(digits=1, **config)
    config = ENVS["Filtered"].config(task=addition(size=150), evaluation=(addition(size=10, seed=1),))
    source, every = open_source(config, ENVS), open_source(addition(size=150), ENVS)
    held = {open_source(addition(size=10, seed=1), ENVS)[i].messages for i in range(10)}
    said = lambda one: (one.messages, one.answer, one.info["rejected"])
    left = {said(every[i]) for i in range(150) if every[i].messages not in held}
    assert len(source) == len(left) < 150 and {said(source[i]) for i in range(len(source))} == left


def test_most_lines_of_a_report():
    index = EvaluationIndex(EVAL, 3)
    found = [index.overlap(one) for one in (TRAIN[4], TRAIN[0], TRAIN[3])]
    assert described(found, 2) == ["t0 is the same prompt as e0", "t3 holds 83% of the words of e0", "and 1 more"]


def test_the_command_names_the_rows(tmp_path, capsys):
    row = lambda text: json.dumps({"prompt": text, "chosen": "a", "rejected": "b"}) + "\n"
    (tmp_path / "train.jsonl").write_text(row("one two three four five six") + row("fresh") + row("fresh"))
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": "one two three four five"}) + "\n")
    arguments = ["data", "inspect", str(tmp_path / "train.jsonl"), "--layout", "preference", "--as", "Preferences",
                 "--against", str(tmp_path / "test.jsonl"), "--ngram", "3"]  # fmt: skip
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "1 of 3 rows hold one of 1 evaluation prompt, 0 of them exactly, else by 3-grams above 50%" in out
    assert "train.jsonl/1 holds 100% of the words of test.jsonl/1" in out
    assert "duplicates, with the answer too: 1" in out
    assert cli.main([*arguments[:3], "--layout", "messages"]) == 2
    assert "train.jsonl, line 1: field 'messages' is missing" in (text := capsys.readouterr().err)
    assert "these read the row: preference" in text
    assert cli.main(["data", "inspect"]) == 2 and "name a FILE" in capsys.readouterr().err
    assert cli.main(["data", "inspect", "Jsonl.on_bad_row='drop'"]) == 2
    assert "Jsonl.on_bad_row='drop': a binding overrides --config, and none is given" in capsys.readouterr().err
    assert cli.main([*arguments[:3], "--take", "each"]) == 2 and "name one" in capsys.readouterr().err
