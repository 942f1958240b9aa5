"""Every layout: its example, each kind of damage, each kind of file; and what examples are made of."""

from __future__ import annotations

import gzip
import json

import pytest
from layout_damage import ASKED, LAYOUTS, TOLD, cases, file_of, good_rows

from jrl.tasks.envs.dataset import Dataset, open_dataset, readable_as
from jrl.tasks.envs.layouts.contract import Answer, Prompted, taken
from jrl.tasks.example import Message


def opened(path, rows, layout, **config):
    path.write_bytes(rows if isinstance(rows, bytes) else file_of(rows))
    return open_dataset(Dataset(path=str(path), layout=layout, **config))


def examples(source):
    return [source[i] for i in range(len(source))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_refused_by_file_row_and_field_or_dropped_with_exact_counts(layout, tmp_path):
    every = cases(layout)
    assert len(every) >= 20
    for case in every:
        path = tmp_path / "rows.jsonl"
        with pytest.raises(ValueError) as refused:
            opened(path, case.data, layout)
        text = str(refused.value)
        assert f"rows.jsonl, line {case.line}: " in text, (case.name, text)
        assert "the row" in text if case.field is None else f"field '{case.field}" in text, (case.name, text)
        source = opened(path, case.data, layout, on_bad_row="drop", max_dropped=1.0)
        noticed = {"duplicate_prompt", "single_answer", "unranked", "unanswered"}
        dropped = {cause: count for cause, count in source.counts.items() if cause not in noticed}
        assert sum(dropped.values()) == case.rows, (case.name, dropped)
        assert (
            len(dropped.keys() - {"missing_parent"}) <= 1 if case.causes is None else set(dropped) <= set(case.causes)
        )
        assert all(example.messages[-1].content for example in examples(source))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_file_holds_the_same_examples(layout, tmp_path):
    rows = [row for i in range(3) for row in good_rows(layout, i)]
    kinds = {"rows.jsonl": file_of(rows), "rows.jsonl.gz": gzip.compress(file_of(rows)),
             "rows.parquet": as_parquet(rows, tmp_path), "rows.array_record": as_records(rows, tmp_path)}  # fmt: skip
    every = {}
    for name, data in kinds.items():
        source = opened(tmp_path / name, data, layout, take=LAYOUTS[layout].takes[-1])
        every[name] = [(e.messages, e.answer, e.info) for e in examples(source)]
        assert [e.id.split("/")[0] for e in examples(source)] == [name] * len(source)
    assert len(every["rows.jsonl"]) >= 3 and all(found == every["rows.jsonl"] for found in every.values())
    assert len({json.dumps([m.content for m in e[0]]) for e in every["rows.jsonl"]}) >= (
        1 if layout in SAME_PROMPT else 3
    )


SAME_PROMPT = ("tldr_comparisons",)  # whose example's prompt has another text


def as_parquet(rows, folder):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "made")
    return (folder / "made").read_bytes()


def as_records(rows, folder):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "made"), "group_size:1")
    for row in rows:
        writer.write(row if isinstance(row, bytes) else json.dumps(row).encode())
    writer.close()
    return (folder / "made").read_bytes()


def test_records_that_are_damaged_are_refused_with_the_file_or_the_record(tmp_path):
    rows = good_rows("preference", 0) * 3
    data = as_records(rows, tmp_path)
    for damaged in (data[:100], data[:-1], data[: len(data) // 2], bytes(len(data)), b"text",
                    data[:64] + b"\xff" * 32 + data[96:]):  # fmt: skip
        with pytest.raises(ValueError, match=r"rows\.array_record is damaged, or not an ArrayRecord file"):
            opened(tmp_path / "rows.array_record", damaged, "preference")
    data = as_records([rows[0], b"\xff", b"{", rows[1]], tmp_path)
    with pytest.raises(ValueError, match=r"rows\.array_record, record 2: the row is not UTF-8"):
        opened(tmp_path / "rows.array_record", data, "preference")
    source = opened(tmp_path / "rows.array_record", data, "preference", on_bad_row="drop", max_dropped=0.5)
    assert source.counts == {"bad_utf8": 1, "bad_json": 1, "duplicate_prompt": 1}
    for empty, message in ((b"", "holds no examples"), (as_records([], tmp_path), "no record in its 131072 bytes")):
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / "rows.array_record", empty, "preference")
    with pytest.raises(ValueError, match=r"Dataset\.path: .*none\.array_record' cannot be read"):
        open_dataset(Dataset(path=str(tmp_path / "none.array_record"), layout="preference"))


@pytest.mark.parametrize("truth, answer", [
    ("7", "7"),
    ('["7"]', "7"),  # as Skywork-OR1 has it
    (r'["\\frac{1}{2}"]', r"\frac{1}{2}"),
    ('["[0, 1]"]', "[0, 1]"),
    ("[0, 1]", "[0, 1]"),  # an interval
    ('["a" is', '["a" is'),
    ('["a', '["a'),
    ('[" "]', '[" "]'),
    (r'["\ud800"]', r'["\ud800"]'),
    (r'["\ud800", "b"]', r'["\ud800", "b"]'),
])  # fmt: skip
def test_a_list_of_one_ground_truth_is_that_one(truth, answer, tmp_path):
    row = {"prompt": "Name a prime.", "reward_model": {"ground_truth": truth}}
    assert opened(tmp_path / "rows.jsonl", json.dumps(row).encode(), "verl")[0].answer == answer


def test_several_ground_truths_are_refused_by_field(tmp_path):
    row = {"prompt": "Name a prime.", "reward_model": {"ground_truth": '["7", "11"]'}}
    message = (
        r"field 'reward_model\.ground_truth' lists several answers: \[\"7\", \"11\"\]\. "
        "Dataset.layout is 'verl'; these read the row: verl_verbatim"
    )
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / "rows.jsonl", json.dumps(row).encode(), "verl")


@pytest.mark.parametrize("truth, answer", [
    ('["7"]', '["7"]'),
    ('["assert f(1) == 1", "assert f(2) == 4"]', '["assert f(1) == 1", "assert f(2) == 4"]'),
    (' {"inputs": ["1\\n"]}', ' {"inputs": ["1\\n"]}'),
    ({"target": 24, "numbers": [1, 2]}, '{"target": 24, "numbers": [1, 2]}'),  # as in the files of TinyZero
    (["é", "\n"], '["é", "\\n"]'),
    (7, "7"),
])  # fmt: skip
def test_a_ground_truth_can_be_read_as_it_is(truth, answer, tmp_path):
    row = {"prompt": "Name a prime.", "reward_model": {"ground_truth": truth}, "extra_info": {"index": 3}}
    (one,) = examples(opened(tmp_path / "rows.jsonl", [row], "verl_verbatim"))
    assert (one.answer, one.info) == (answer, {"extra_info": {"index": 3}})


@pytest.mark.parametrize("asked, row_of, could", [
    ("messages", "preference", ["preference"]),
    ("preference", "margin_preference", None),  # it has the columns of one
    ("anthropic_hh", "implicit_preference", ["implicit_preference"]),
    ("sharegpt", "helpsteer2", ["helpsteer2"]),
    ("unpaired", "rollouts", ["prompt_completion", "rollouts"]),
    ("alpaca", "scored_preference", ["implicit_preference", "scored_preference"]),
    ("preference", "openassistant_messages", ["openassistant_messages"]),
])  # fmt: skip
def test_a_wrong_layout_is_refused_with_those_that_read_the_row(asked, row_of, could, tmp_path):
    rows = good_rows(row_of, 0)
    if could is None:
        assert len(opened(tmp_path / "rows.jsonl", rows, asked)) == 1
        return
    with pytest.raises(ValueError, match=f"Dataset.layout is '{asked}'; these read the row: {', '.join(could)}"):
        opened(tmp_path / "rows.jsonl", rows, asked)
    assert readable_as(rows[0], asked) == could


@pytest.mark.parametrize("config, message", [
    ({"layout": "ultrafedback"}, "there is no layout 'ultrafedback'; did you mean ultrafeedback"),
    ({"layout": "messages", "take": "best"}, "'best' does not go with the layout 'messages', which has last_turn"),
    ({"layout": "helpsteer2", "rank_by": "humor"}, "'humor' does not go with .*, which has helpfulness, correctness"),
    ({"layout": "preference", "rank_by": "score"}, "which ranks nothing"),
    ({"layout": "preference", "max_dropped": 2.0}, "it is a share"),
    ({"layout": "preference", "max_row_bytes": 1}, "at least 2"),
])  # fmt: skip
def test_what_a_configuration_cannot_say(config, message):
    with pytest.raises(ValueError, match=message):
        Dataset(path="x.jsonl", **config)


# What examples are made of, by hand


def said(*texts):
    """Messages of the user and the assistant in turn."""
    return tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))


def test_every_turn_of_a_conversation_follows_what_was_said_before(tmp_path):
    roles = ["system", "user", "assistant", "user", "assistant"]
    row = {"messages": [{"role": role, "content": f"{i}"} for i, role in enumerate(roles)], "source": "s"}
    source = opened(tmp_path / "r.jsonl", [row], "messages", take="every_turn", system="not this")
    assert [(e.id, [m.content for m in e.messages], e.answer) for e in examples(source)] == [
        ("r.jsonl/1.0", ["0", "1"], "2"), ("r.jsonl/1.1", ["0", "1", "2", "3"], "4")]  # fmt: skip
    (last,) = examples(opened(tmp_path / "r.jsonl", [row], "messages"))
    assert (last.id, last.messages[0], last.answer) == ("r.jsonl/1", Message("system", "0"), "4")
    assert (last.info, last.task) == ({"source": "s"}, "r")


def test_a_system_message_goes_before_conversations_without_one(tmp_path):
    (one,) = examples(opened(tmp_path / "r.jsonl", good_rows("preference", 1), "preference", system="Be brief.",
                             task="prefs", verifiers=("Exact",)))  # fmt: skip
    assert one.messages == (Message("system", "Be brief."), Message("user", "Name prime 1."))
    assert (one.task, one.verifiers, one.answer, one.info) == ("prefs", ("Exact",), "7", {"rejected": "8"})


def test_a_transcript_of_several_turns(tmp_path):
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c: Human: d\n\nAssistant:"
    (one,) = examples(opened(tmp_path / "r.jsonl", [{"chosen": start + " yes\n\nso", "rejected": start + " no"}],
                             "anthropic_hh"))  # fmt: skip
    assert one.messages == said("a", "b", "c: Human: d")
    assert (one.answer, one.info["rejected"]) == ("yes\n\nso", "no")
    answered = {"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"}
    with pytest.raises(ValueError, match=r"'chosen' is out of turn: turn 1 is of the Assistant\. "):
        opened(tmp_path / "r.jsonl", [answered], "anthropic_hh")
    with pytest.raises(ValueError, match=r"holds no examples: 1 wrong_turn\. The first bad row: .*line 1"):
        opened(tmp_path / "r.jsonl", [answered], "anthropic_hh", on_bad_row="drop", max_dropped=1.0)


def test_the_root_of_a_tree_replies_to_none(tmp_path):
    (row,) = good_rows("openassistant_trees", 0)
    row["prompt"]["parent_id"] = "p0"
    with pytest.raises(ValueError, match=r"'prompt\.parent_id' names .*: the root of a tree replies to none"):
        opened(tmp_path / "r.jsonl", [row], "openassistant_trees")


def test_words_of_sharegpt(tmp_path):
    turns = [
        ("human", "a"),
        ("function_call", "f"),
        ("observation", "4"),
        ("chatgpt", "b"),
        ("user", "c"),
        ("bard", "d"),
    ]
    row = {"system": "s", "conversations": [{"from": who, "value": text} for who, text in turns]}
    (one,) = examples(opened(tmp_path / "r.jsonl", [row], "sharegpt"))
    assert [m.role for m in one.messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert one.answer == "d"


@pytest.mark.parametrize("layout", ["messages", "sharegpt"])
def test_an_id_of_any_type_is_information(tmp_path, layout):
    rows = [{**good_rows(layout, i)[0], "id": name} for i, name in enumerate([5, "", ["a", 2], None])]
    found = examples(opened(tmp_path / "r.jsonl", rows, layout))
    assert [(one.id, one.answer, one.info) for one in found] == [
        ("r.jsonl/1", "7", {"id": 5}),
        ("r.jsonl/2", "7", {"id": ""}),
        ("r.jsonl/3", "7", {"id": ["a", 2]}),
        ("r.jsonl/4", "7", {}),
    ]


def test_what_rewards_of_verl_read_is_information(tmp_path):
    given = [{"data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": "a"}}, {"ability": ""}]
    rows = [{**good_rows("verl", i)[0], "data_source": None, **one, "unread": 1} for i, one in enumerate(given)]
    assert [one.info for one in examples(opened(tmp_path / "r.jsonl", rows, "verl"))] == given


@pytest.mark.parametrize("layout", ["sharegpt", "sharegpt_preference", "alpaca"])
def test_an_empty_system_field_is_none(tmp_path, layout):
    (row,) = good_rows(layout, 1)
    (one,) = examples(opened(tmp_path / "r.jsonl", [{**row, "system": ""}], layout, system="Be brief."))
    assert [message.role for message in one.messages] == ["system", "user"]
    assert one.messages[0].content == "Be brief."


def test_instructions_with_a_history(tmp_path):
    row = {"system": "s", "instruction": "i", "input": "more", "output": "o", "history": [["q", "a"]]}
    (one,) = examples(opened(tmp_path / "r.jsonl", [row], "alpaca"))
    assert one.messages == (Message("system", "s"), *said("q", "a", "i\n\nmore")) and one.answer == "o"


def test_a_post_and_its_summaries(tmp_path):
    row = good_rows("tldr_comparisons", 0)[0]
    (one,) = examples(opened(tmp_path / "r.jsonl", [row], "tldr_comparisons"))
    assert one.messages[0].content == "SUBREDDIT: r/math\n\nTITLE: Primes\n\nPOST: I like 7.\n\nTL;DR:"
    assert (one.answer, one.info) == ("Likes 7.", {"confidence": 8, "rejected": "Primes."})
    row |= {"choice": 1, "info": {"article": "News.", "post": None}, "extra": {"confidence": None}}
    (one,) = examples(opened(tmp_path / "r.jsonl", [row], "tldr_comparisons"))
    assert (one.messages[0].content, one.answer, one.info["rejected"]) == (
        "ARTICLE: News.\n\nTL;DR:",
        "Primes.",
        "Likes 7.",
    )


def test_the_responses_of_a_prompt_are_read_together_wherever_they_are(tmp_path):
    turns = "a\n<extra_id_1>Assistant\nb\n<extra_id_1>User\nc"
    grades = lambda **more: {
        "helpfulness": 2,
        "correctness": 1,
        "coherence": 3,
        "complexity": 0,
        "verbosity": 0,
        **more,
    }
    rows = [{"prompt": turns, "response": "x", **grades()}, {"prompt": "q", "response": "y", **grades()},
            {"prompt": turns, "response": "z", **grades(helpfulness=3, correctness=0)},
            {"prompt": turns, "response": "w", **grades(helpfulness=0)}]  # fmt: skip
    source = opened(tmp_path / "r.jsonl", rows, "helpsteer2")
    (one,) = examples(source)
    assert (one.id, one.messages, one.answer) == ("r.jsonl/1", said("a", "b", "c"), "z")
    assert one.info == {"rejected": "w", "score": 3.0, "rejected_score": 0.0, "margin": 3.0}
    assert source.counts == {"single_answer": 1}
    (one,) = examples(opened(tmp_path / "r.jsonl", rows, "helpsteer2", rank_by="correctness"))
    assert (one.answer, one.info["rejected"]) == ("x", "z")  # correctness 1, 0 and 1
    every = examples(opened(tmp_path / "r.jsonl", rows, "helpsteer2", take="all_pairs"))
    assert [(e.answer, e.info["rejected"]) for e in every] == [("z", "x"), ("z", "w"), ("x", "w")]
    each = examples(opened(tmp_path / "r.jsonl", rows, "helpsteer2", take="each"))
    assert [e.answer for e in each] == ["x", "z", "w", "y"] and each[1].info["helpfulness"] == 3


def test_the_best_answer_meets_any_of_those_that_are_worse(tmp_path):
    answers = lambda *scores: [Answer(f"{i}", score, {"score": score}) for i, score in enumerate(scores)]
    prompts = [Prompted((Message("user", f"q{i}"),), tuple(answers(2.0, 5.0, 5.0, 1.0, 3.0))) for i in range(60)]
    found = taken(prompts, "best_and_random", {})
    assert {one.answer for one in found} == {"1"} and taken(prompts, "best_and_random", {}) == found
    others = [one.info["rejected"] for one in found]
    assert set(others) == {"0", "3", "4"} and min(map(others.count, set(others))) > 8  # of 60, a third each
    assert all(one.info["margin"] == 5 - {"0": 2, "3": 1, "4": 3}[one.info["rejected"]] for one in found)
    # Equal scores and a single answer give no pair, and are counted.
    skipped = {}
    alone = [one._replace(answers=tuple(answers(*scores))) for one, scores in zip(prompts, [(4.0, 4.0), (4.0,)])]
    assert taken(alone, "best_and_random", skipped) == [] and skipped == {"tied": 1, "single_answer": 1}


def test_strengths_and_ties(tmp_path):
    rows = [{"prompt": "q", "response_1": "a", "response_2": "b", "preference_strength": s} for s in (2, 0, -1)]
    source = opened(tmp_path / "r.jsonl", rows, "helpsteer2_preference")
    assert [(e.answer, e.info) for e in examples(source)] == [
        ("b", {"margin": 2.0, "rejected": "a"}), ("a", {"margin": 1.0, "rejected": "b"})]  # fmt: skip
    assert source.counts == {"tied": 1, "duplicate_prompt": 1}
    rows = [{"context": [ASKED, TOLD, {"role": "user", "content": f"q{s}"}], "response1": "a", "response2": "b",
             "overall_preference": s, "domain": "code"} for s in (-2, 0, 1)]  # fmt: skip
    source = opened(tmp_path / "r.jsonl", rows, "helpsteer3")
    assert [(e.answer, e.info["rejected"], e.info["margin"]) for e in examples(source)] == [
        ("a", "b", 2.0), ("b", "a", 1.0)]  # fmt: skip
    assert source.counts == {"tied": 1} and examples(source)[0].info["domain"] == "code"
    rows = good_rows("scored_preference", 0) + good_rows("scored_preference", 1)
    rows[0] |= {"score_rejected": 8.0}
    assert opened(tmp_path / "r.jsonl", rows, "scored_preference").counts == {"tied": 1}
    best = examples(opened(tmp_path / "r.jsonl", rows, "scored_preference", take="each"))
    assert [e.info.get("label") for e in best] == [None, None, True, False]


def test_ratings_that_are_not_there_rank_nothing(tmp_path):
    (row,) = good_rows("ultrafeedback", 0)
    first, second = row["completions"]
    for aspect in first["annotations"]:
        first["annotations"][aspect]["Rating"] = "N/A"
    assert open_counts(tmp_path, row, rank_by="ratings") == {"unranked": 1}
    first["annotations"]["honesty"]["Rating"] = "2"
    (one,) = examples(opened(tmp_path / "r.jsonl", [row], "ultrafeedback", rank_by="ratings"))
    assert (one.answer, one.info["margin"]) == ("7", 1.0)  # a mean of 2 alone, and of 1, 1, 1, 1
    assert open_counts(tmp_path, row, rank_by="helpfulness") == {"unranked": 1}
    second["response"] = first["response"]
    assert open_counts(tmp_path, row) == {"same_answers": 1}


def open_counts(folder, row, **config):
    """What is counted of a row, beside another one that is good."""
    return opened(folder / "r.jsonl", [row, *good_rows("ultrafeedback", 9)], "ultrafeedback", **config).counts


def test_ranked_answers_to_a_transcript(tmp_path):
    (row,) = good_rows("nectar", 0)
    (one,) = examples(opened(tmp_path / "r.jsonl", [row], "nectar"))
    assert one.messages == said("Name prime 0.") and (one.answer, one.info) == ("7", {"rejected": "8"})


def test_scores_beside_a_choice(tmp_path):
    (row,) = good_rows("shp", 0)
    (one,) = examples(opened(tmp_path / "r.jsonl", [row | {"labels": 0, "score_A": 1}], "shp"))
    assert (one.answer, one.info) == ("8", {"rejected": "7", "score": 4.0, "rejected_score": 1.0, "margin": 3.0})
    (row,) = good_rows("webgpt_comparisons", 0)
    (one,) = examples(opened(tmp_path / "r.jsonl", [row | {"score_0": -1, "score_1": 1}], "webgpt_comparisons"))
    assert (one.answer, one.info["margin"]) == ("8", 2.0)
    (row,) = good_rows("safe_rlhf", 0)
    row |= {"safer_response_id": 1, "is_response_0_safe": False}
    answers = [examples(opened(tmp_path / "r.jsonl", [row], "safe_rlhf", rank_by=by))[0].answer
               for by in (None, "safer_response_id")]  # fmt: skip
    assert answers == ["7", "8"]


def test_rollouts_of_a_group_are_ranked_by_their_rewards(tmp_path):
    row = lambda group, text, reward, valid=True: {"step": 3, "group": group, "prompt": f"q{group}", "completion": text,
                                                   "reward": reward, "valid": valid, "example_id": "e"}  # fmt: skip
    rows = [row(0, "a", 0.5), row(1, "x", 1), row(0, "b", 1.0), row(0, "", 0.0), row(0, "lost", 0, False),
            row(1, "y", None), row(2, "z", 0.2), row(2, "w", 0.2)]  # fmt: skip
    source = opened(tmp_path / "r.jsonl", rows, "rollouts")
    (one,) = examples(source)
    assert (one.messages, one.answer) == (said("q0"), "b") and source.counts == {"unranked": 1, "tied": 1}
    assert one.info == {"example_id": "e", "rejected": "", "score": 1.0, "rejected_score": 0.0, "margin": 1.0}
    each = examples(opened(tmp_path / "r.jsonl", rows, "rollouts", take="each"))
    assert [(e.answer, e.info.get("score"), e.info.get("label")) for e in each] == [
        ("a", 0.5, None), ("b", 1.0, True), ("", 0.0, False), ("lost", None, None), ("x", 1.0, True), ("y", None, None),
        ("z", 0.2, None), ("w", 0.2, None)]  # fmt: skip


def tree_rows(flat):
    """p1 - a1 (rank 1), a2 (rank 0), a3 (no rank); a2 - p2 - a4, deleted, with p3 under it; a1 - p4 without a reply."""
    one = lambda name, parent, role, **more: {
        "message_id": name,
        "parent_id": parent,
        "role": role,
        "text": name,
        **more,
    }
    messages = [
        one("p1", None, "prompter", lang="en"), one("a1", "p1", "assistant", rank=1.0, labels=labels(flat, 0.9)),
        one("a2", "p1", "assistant", rank=0, labels=labels(flat, 0.1)), one("a3", "p1", "assistant", rank=None),
        one("p2", "a2", "prompter"), one("a4", "p2", "assistant", deleted=True), one("p3", "a4", "prompter"),
        one("p4", "a1", "prompter"),
    ]  # fmt: skip
    if flat:
        return [{"message_tree_id": "p1", **m} for m in reversed(messages)]
    for message in messages:
        message["replies"] = [m for m in messages if m["parent_id"] == message["message_id"]]
    return [{"message_tree_id": "p1", "prompt": messages[0]}]


def labels(flat, quality):
    if flat:
        return {"name": ["spam", "quality"], "value": [0.0, quality], "count": [3, 3]}
    return {"spam": {"value": 0.0, "count": 3}, "quality": {"value": quality, "count": 3}}


@pytest.mark.parametrize("layout", ["openassistant_trees", "openassistant_messages"])
def test_a_tree_by_hand(layout, tmp_path):
    rows = tree_rows(flat=layout == "openassistant_messages")
    source = opened(tmp_path / "r.jsonl", rows, layout)
    (one,) = examples(source)
    assert (one.messages, one.answer) == (said("p1"), "a2")
    assert one.info == {"tree": "p1", "lang": "en", "rejected": "a1"}
    assert source.counts == {"unanswered": 2}  # p2, whose reply is deleted, and p4
    (one,) = examples(opened(tmp_path / "r.jsonl", rows, layout, rank_by="quality"))
    assert (one.answer, one.info["rejected"], one.info["margin"]) == ("a1", "a2", 0.9 - 0.1)
    each = examples(opened(tmp_path / "r.jsonl", rows, layout, take="each"))
    assert {e.answer for e in each} == {"a1", "a2", "a3"}
    assert next(e for e in each if e.answer == "a1").info == {"tree": "p1", "lang": "en", "rank": 1, "spam": 0.0,
                                                             "quality": 0.9}  # fmt: skip


def test_a_conversation_deep_in_a_flat_tree(tmp_path):
    message = lambda i: {"message_tree_id": "t", "message_id": f"m{i}", "parent_id": f"m{i - 1}" if i else None,
                         "role": ("prompter", "assistant")[i % 2], "text": f"t{i}"}  # fmt: skip
    source = opened(tmp_path / "r.jsonl", [message(i) for i in range(2000)], "openassistant_messages", take="each")
    assert len(source) == 1000 and len(source[999].messages) == 1999 and source[999].answer == "t1999"


def test_the_same_in_any_order_and_after_the_file_changed_a_refusal(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [row for i in range(5) for row in good_rows("helpsteer2", i)]
    source = opened(path, rows, "helpsteer2", take="each")
    forwards = examples(source)
    assert forwards == [source[i] for i in reversed(range(10))][::-1] and len({e.id for e in forwards}) == 10
    path.write_bytes(file_of(rows[1:]))
    with pytest.raises(ValueError, match="changed"):
        source[0]


def test_the_fingerprint_follows_the_bytes_and_what_is_read_from_them(tmp_path):
    rows = good_rows("helpsteer2", 0)
    fingerprint = lambda **config: opened(tmp_path / "r.jsonl", rows, "helpsteer2", **config).fingerprint
    every = [fingerprint(), fingerprint(take="each"), fingerprint(rank_by="correctness", take="each"),
             fingerprint(system="s"), fingerprint(task="t"), fingerprint(verifiers=("Exact",))]  # fmt: skip
    assert len(set(every)) == len(every) and every[0] == fingerprint()
    assert fingerprint(on_bad_row="drop") == every[0]
    rows[0]["response"] = "9"
    assert fingerprint() not in every
