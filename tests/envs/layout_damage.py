"""Damaged files of every layout, made by rule: a good file, one thing wrong in it, and what must be said of that."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from jrl.tasks.envs.layouts import LAYOUTS

# What may be missing or null without damage; and what is true or false, for which 1 and 0 are taken.
OPTIONAL = {
    "alpaca": {"input"},
    "helpsteer3": {"domain", "language"},
    "ultrafeedback": {"source", "completions[0].model", "completions[1].model"},
    "nectar": {"answers[0].model", "answers[1].model"},
    "openassistant_trees": {"prompt.parent_id", "prompt.rank", "prompt.lang", "prompt.replies"}
    | {f"prompt.replies[{i}].{name}" for i in (0, 1) for name in ("parent_id", "rank", "lang")},
    "openassistant_messages": {"lang", "rank"},
    "rollouts": {"reward", "valid"},
    "tldr_comparisons": {"extra", "extra.confidence"},
}
MAY_BE_EMPTY = {
    ("alpaca", "input"),
    ("openassistant_trees", "prompt.replies"),
    ("rollouts", "completion"),
    ("tldr_comparisons", "extra"),
}
# Fields that hold a text or a list of messages: the other of the two is no damage of its own.
EITHER = {("rlvr", "messages"), ("verl", "prompt"), ("verl_verbatim", "prompt"), ("helpsteer3", "context")}
ANY_VALUE = {("verl_verbatim", "reward_model.ground_truth")}  # but a blank text


class Case(NamedTuple):
    """A file with one thing wrong."""

    name: str
    data: bytes
    line: int  # that must be named
    field: str | None  # that must be named, or what begins with it; None: the row as a whole
    rows: int  # that are dropped
    causes: tuple[str, ...] | None = None  # that are right; None: any, and replies whose prompt is dropped


def good_rows(layout: str, i: int) -> list[dict[str, Any]]:
    """Returns the layout's example rows, with a prompt and a tree of their own."""
    text = json.dumps(LAYOUTS[layout].example).replace("Name a prime.", f"Name prime {i}.")
    rows = json.loads(text)
    for row in rows:
        if "message_tree_id" in row:
            row["message_tree_id"] = f"t{i}"
        if layout == "rollouts":
            row["step"] = i
    return rows


def file_of(rows: list[Any]) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def places(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path and the value of every field of a row."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        path = f"{name}[{key}]" if isinstance(value, list) else f"{name}.{key}" if name else key
        yield path, inner
        yield from places(inner, path)


def changed(row: dict, path: str, change: Any, remove: bool = False) -> dict:
    """Returns a copy of a row with another value at a path, or without it."""
    row = copy.deepcopy(row)
    keys = [int(key) if key.isdigit() else key for key in path.replace("[", ".").replace("]", "").split(".")]
    target = row
    for key in keys[:-1]:
        target = target[key]
    if remove:
        del target[keys[-1]]
    else:
        target[keys[-1]] = change
    return row


HUGE, DEEP = 10**30, "[" * 100 + "]" * 100
WRONG = {
    str: [7, ["a"], {"a": 1}, True, "", " \n\t"],
    int: ["many", [1], {"a": 1}, HUGE, -HUGE],
    float: ["many", [1], {"a": 1}, HUGE, -HUGE],
    bool: ["yes", 2, 0.5, HUGE, [True]],
    list: [[], 7, {}, [7]],
    dict: [7, [], "text", {}],
}


def field_cases(layout: str) -> Iterator[Case]:
    """Yields files in which one field of one row is missing, null or of a wrong value."""
    before, after, rows = good_rows(layout, 1), good_rows(layout, 3), good_rows(layout, 2)
    for number, row in enumerate(rows):
        for path, value in places(row):
            if value is None:
                continue
            optional = path in OPTIONAL.get(layout, ()) or (
                # the root of flat trees has no parent, and a reply that lost its own is one
                layout == "openassistant_messages" and path == "parent_id"
            )
            damages = [] if optional else [("null", changed(row, path, None))]
            if not optional and not path.endswith("]"):
                damages.append(("missing", changed(row, path, None, remove=True)))
            for wrong in WRONG[type(value)]:
                if wrong in ("", [], {}, " \n\t") and (layout, path) in MAY_BE_EMPTY:
                    continue
                if (layout, path) in EITHER and isinstance(wrong, str):
                    continue
                if (layout, path) in ANY_VALUE and not isinstance(wrong, str):
                    continue
                if optional and path == "parent_id" and isinstance(wrong, str):
                    continue
                damages.append((json.dumps(wrong)[:12], changed(row, path, wrong)))
            for name, damaged in damages:
                lines = [*before, *rows[:number], damaged, *rows[number + 1 :], *after]
                orphans = len(rows) - 1 if layout == "openassistant_messages" and number == 0 else 0
                yield Case(f"{path}={name}", file_of(lines), len(before) + number + 1, path, 1 + orphans)


def file_cases(layout: str) -> Iterator[Case]:
    """Yields files in which a line is no row of anything."""
    before, after = good_rows(layout, 1), good_rows(layout, 3)
    row = json.dumps(good_rows(layout, 2)[0]).encode()
    lines = {
        "cut": (row[: len(row) // 2], "bad_json"),
        "two on a line": (row + row, "bad_json"),
        "single quotes": (row.replace(b'"', b"'"), "bad_json"),
        "latin-1": (
            row.replace(b"prime", "primé".encode("latin-1")).replace(b"math", "é".encode("latin-1")),
            "bad_utf8",
        ),
        "utf-16": (row.decode().encode("utf-16-le"), "bad_json"),
        "byte order mark": (b"\xef\xbb\xbf" + row, "bom"),
        "NUL": (b"\0" + row, "bad_json"),
        "NaN": (row[:-1] + b', "x": NaN}', "not_finite"),
        "1e999": (row[:-1] + b', "x": 1e999}', "not_finite"),
        "5000 digits": (row[:-1] + b', "x": ' + b"9" * 5000 + b"}", "bad_json"),
        "nested": (row[:-1] + b', "x": ' + DEEP.encode() + b"}", "too_deep"),
        "twice": (row[:-1] + b', "x": 1, "x": 2}', "duplicate_key"),
        "surrogate": (row[:-1] + b', "x": "\\ud800"}', "surrogate"),
        "list": (b"[" + row + b"]", "not_object"),
        "number": (b"3", "not_object"),
        "blank": (b"  ", "blank"),
        "csv": (b"prompt,chosen,rejected", "bad_json"),
    }
    for name, (line, cause) in lines.items():
        yield Case(name, file_of([*before, line, *after]), len(before) + 1, None, 1, (cause,))


def semantic_cases(layout: str) -> Iterator[Case]:
    """Yields files in which a row's fields contradict each other, or mean nothing."""
    for name, line, field, causes, change in SEMANTIC.get(layout, ()):
        before, after, rows = good_rows(layout, 1), good_rows(layout, 3), good_rows(layout, 2)
        result = change(rows)
        rows = rows if result is None else result
        together = LAYOUTS[layout].group is not None and "alone" not in name
        data = file_of([*before, *rows, *after])
        yield Case(name, data, len(before) + line, field, len(rows) if together else 1, causes)


def _set(path: str, value: Any, row: int = 0):
    def change(rows):
        rows[row] = changed(rows[row], path, value)

    return change


def _copied(target: str, source: str):
    def change(rows):
        rows[0] = changed(rows[0], target, dict(places(rows[0]))[source])

    return change


def _same(*names: str):
    return ("equal sides", 1, names[1], ("equal_sides",), _copied(names[1], names[0]))


ASKED, TOLD = {"role": "user", "content": "Name a prime."}, {"role": "assistant", "content": "7"}


def turns(column: str) -> list[tuple]:
    return [
        ("ends with the user", 1, column, ("no_answer",), _set(column, [ASKED])),
        ("two users", 1, f"{column}[1]", ("wrong_turn",), _set(column, [ASKED, ASKED, TOLD])),
        ("begins with an answer", 1, f"{column}[0]", ("wrong_turn",), _set(column, [TOLD, ASKED, TOLD])),
        ("late system", 1, f"{column}[2]", ("wrong_turn",),
         _set(column, [ASKED, TOLD, {"role": "system", "content": "x"}, TOLD])),
        ("a strange role", 1, f"{column}[0].role", ("unknown_role",), _set(f"{column}[0].role", "robot")),
    ]  # fmt: skip


TURNS = turns("messages")
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}


def _message(name: str, parent: str | None, role: str, rank: int | None = None, replies: Any = (), **more: Any) -> dict:
    one = {"message_id": name, "parent_id": parent, "role": role, "text": f"text of {name}", "rank": rank, **more}
    return {**one, "replies": list(replies)} if replies != () else one


def _tree(root: dict):
    return lambda rows: [{"message_tree_id": "t2", "prompt": root}]


def _flat(*messages: dict):
    return lambda rows: [{"message_tree_id": "t2", **one} for one in messages]


P1 = _message("p1", None, "prompter")
DEEP_TREE = functools.reduce(lambda inner, i: _message(f"d{i}", None, "prompter", replies=[inner]), range(40), P1)
A1, A2 = _message("a1", "p1", "assistant", 0), _message("a2", "p1", "assistant", 1)
VERL = [("ends with an answer", 1, "prompt", ("wrong_turn",), _set("prompt", [ASKED, TOLD]))]
SEMANTIC: dict[str, list[tuple]] = {
    "messages": TURNS,
    "conversation": turns("conversation"),
    "tulu": TURNS,
    "rlvr": [("ends with an answer", 1, "messages", ("wrong_turn",), _set("messages", [ASKED, TOLD])), TURNS[1]],
    "verl": VERL,
    "verl_verbatim": VERL,
    "sharegpt": [
        ("ends with the human", 1, "conversations", ("no_answer",), _set("conversations", [HUMAN])),
        ("two humans", 1, "conversations[1]", ("wrong_turn",), _set("conversations", [HUMAN, HUMAN, GPT])),
        ("begins with gpt", 1, "conversations[0]", ("wrong_turn",), _set("conversations", [GPT, HUMAN, GPT])),
        ("two systems", 1, "system", ("wrong_turn",),
         lambda rows: [{"system": "x", "conversations": [{"from": "system", "value": "y"}, HUMAN, GPT]}]),
    ],
    "alpaca": [
        ("history of one", 1, "history[0]", ("wrong_type",), _set("history", [["a"]])),
        ("history of texts", 1, "history[0]", ("wrong_type",), _set("history", ["a"])),
        ("history blank", 1, "history[0][1]", ("empty",), _set("history", [["a", " "]])),
        ("system a number", 1, "system", ("wrong_type",), _set("system", 3)),
    ],
    "prompt_completion": [
        ("prompt ends with an answer", 1, "prompt", ("wrong_turn",), _set("prompt", [ASKED, TOLD])),
        ("completion of two", 1, "completion", ("wrong_turn",), _set("completion", [TOLD, TOLD])),
        ("completion of the user", 1, "completion", ("wrong_turn",), _set("completion", [ASKED])),
    ],
    "unpaired": [
        ("label 2", 1, "label", ("out_of_range",), _set("label", 2)),
        ("label -1", 1, "label", ("out_of_range",), _set("label", -1)),
        ("label 0.5", 1, "label", ("out_of_range",), _set("label", 0.5)),
        ("label in words", 1, "label", ("wrong_type",), _set("label", "good")),
    ],
    "preference": [_same("chosen", "rejected")],
    "margin_preference": [
        _same("chosen", "rejected"),
        ("margin below 0", 1, "margin", ("out_of_range",), _set("margin", -0.5)),
    ],
    "implicit_preference": [
        _same("chosen", "rejected"),
        ("no shared prompt", 1, "rejected", ("no_shared_prompt",), _set("rejected[0].content", "Else?")),
        ("only answers", 1, "chosen", ("wrong_turn",), lambda rows: [{"chosen": [TOLD], "rejected": [TOLD]}]),
        ("a side without an answer", 1, "rejected", ("no_answer",), _set("rejected", [ASKED])),
        ("of other lengths", 1, "rejected", ("no_shared_prompt",), _set("rejected", [ASKED, TOLD, ASKED, TOLD])),
    ],
    "scored_preference": [
        _same("chosen", "rejected"),
        ("scores the wrong way", 1, "score_rejected", ("contradiction",), _set("score_rejected", 9.5)),
        ("another prompt", 1, "chosen", ("no_shared_prompt",), _set("prompt", "Else?")),
        ("no shared prompt", 1, "rejected", ("no_shared_prompt",), _set("rejected[0].content", "Else?")),
    ],
    "sharegpt_preference": [
        _same("chosen", "rejected"),
        ("ends with an answer", 1, "conversations", ("wrong_turn",), _set("conversations", [HUMAN, GPT])),
        ("chosen by the human", 1, "chosen", ("wrong_turn",), _set("chosen.from", "human")),
    ],
    "anthropic_hh": [
        _same("chosen", "rejected"),
        ("no shared prompt", 1, "rejected", ("no_shared_prompt",),
         _set("rejected", "\n\nHuman: Else?\n\nAssistant: 8")),
        ("no transcript", 1, "chosen", ("wrong_type",), _set("chosen", "Name a prime.")),
        ("a title before it", 1, "chosen", ("wrong_type",), _set("chosen", "So:\n\nHuman: a\n\nAssistant: b")),
        ("two humans", 1, "chosen", ("wrong_turn",), _set("chosen", "\n\nHuman: a\n\nHuman: b\n\nAssistant: c")),
        ("only the assistant", 1, "chosen", ("wrong_turn",), _set("chosen", "\n\nAssistant: c")),
        ("an empty answer", 1, "rejected", ("empty",), _set("rejected", "\n\nHuman: a\n\nAssistant: ")),
        ("no answer", 1, "chosen", ("no_answer",), _set("chosen", "\n\nHuman: a")),
    ],
    "tldr_comparisons": [
        _same("summaries[0].text", "summaries[1].text"),
        ("choice 2", 1, "choice", ("out_of_range",), _set("choice", 2)),
        ("choice -1", 1, "choice", ("out_of_range",), _set("choice", -1)),
        ("one summary", 1, "summaries", ("wrong_type",), _set("summaries", [{"text": "a"}])),
        ("three summaries", 1, "summaries", ("wrong_type",), _set("summaries", [{"text": t} for t in "abc"])),
        ("confidence 10", 1, "extra.confidence", ("out_of_range",), _set("extra.confidence", 10)),
    ],
    "shp": [
        _same("human_ref_A", "human_ref_B"),
        ("the label against the scores", 1, "labels", ("contradiction",), _set("labels", 0)),
        ("label 2", 1, "labels", ("out_of_range",), _set("labels", 2)),
    ],
    "webgpt_comparisons": [
        _same("answer_0", "answer_1"),
        ("scores of one sign", 1, "score_1", ("contradiction",), _set("score_1", 0.5)),
        ("score 2", 1, "score_0", ("out_of_range",), _set("score_0", 2.0)),
    ],
    "stack_exchange": [_same("response_j", "response_k")],
    "safe_rlhf": [
        _same("response_0", "response_1"),
        ("better 2", 1, "better_response_id", ("out_of_range",), _set("better_response_id", 2)),
        ("the safer one is not safe", 1, "safer_response_id", ("contradiction",), _set("is_response_0_safe", False)),
    ],
    "helpsteer2": [
        ("alone: above 4", 2, "helpfulness", ("out_of_range",), _set("helpfulness", 5, 1)),
        ("alone: below 0", 1, "verbosity", ("out_of_range",), _set("verbosity", -1)),
        ("alone: a half", 1, "coherence", ("out_of_range",), _set("coherence", 2.5)),
        ("alone: two users", 1, "prompt", ("wrong_turn",), _set("prompt", "a\n<extra_id_1>User\nb")),
        ("alone: ends with an answer", 1, "prompt", ("wrong_turn",), _set("prompt", "a\n<extra_id_1>Assistant\nb")),
    ],
    "helpsteer2_preference": [
        _same("response_1", "response_2"),
        ("strength 4", 1, "preference_strength", ("out_of_range",), _set("preference_strength", 4)),
        ("strength 0.5", 1, "preference_strength", ("out_of_range",), _set("preference_strength", 0.5)),
    ],
    "helpsteer3": [
        _same("response1", "response2"),
        ("ends with an answer", 1, "context", ("wrong_turn",), _set("context", [ASKED, TOLD])),
        ("strength -4", 1, "overall_preference", ("out_of_range",), _set("overall_preference", -4)),
    ],
    "rollouts": [
        ("another prompt", 2, "prompt", ("contradiction",), _set("prompt", "Else?", 1)),
        ("alone: step -1", 1, "step", ("out_of_range",), _set("step", -1)),
        ("alone: a half", 2, "group", ("out_of_range",), _set("group", 0.5, 1)),
        ("alone: valid 2", 2, "valid", ("out_of_range",), _set("valid", 2, 1)),
    ],
    "ultrafeedback": [
        ("score 11", 1, "completions[1].overall_score", ("out_of_range",), _set("completions[1].overall_score", 11)),
        ("rating 6", 1, "completions[0].annotations.honesty.Rating", ("out_of_range",),
         _set("completions[0].annotations.honesty.Rating", "6")),
        ("rating 0", 1, "completions[0].annotations.honesty.Rating", ("out_of_range",),
         _set("completions[0].annotations.honesty.Rating", "0")),
        ("rating in words", 1, "completions[0].annotations.honesty.Rating", ("wrong_type",),
         _set("completions[0].annotations.honesty.Rating", "five")),
        ("rating of many digits", 1, "completions[0].annotations.honesty.Rating", ("wrong_type",),
         _set("completions[0].annotations.honesty.Rating", "9" * 5000)),
    ],
    "nectar": [
        ("one rank twice", 1, "answers[1].rank", ("contradiction",), _set("answers[1].rank", 1)),
        ("rank 0", 1, "answers[0].rank", ("out_of_range",), _set("answers[0].rank", 0)),
        ("rank beyond the answers", 1, "answers[0].rank", ("out_of_range",), _set("answers[0].rank", 3)),
        ("ends with an answer", 1, "prompt", ("wrong_turn",), _set("prompt", "\n\nHuman: a\n\nAssistant: b")),
    ],
    "openassistant_trees": [
        ("cycle", 1, "prompt.replies[0].message_id", ("cycle",),
         _tree({**P1, "replies": [_message("p1", "p1", "assistant")]})),
        ("duplicate", 1, "prompt.replies[1].message_id", ("duplicate_message",), _tree({**P1, "replies": [A1, A1]})),
        ("another parent", 1, "prompt.replies[0].parent_id", ("missing_parent",),
         _tree({**P1, "replies": [_message("a1", "p9", "assistant")]})),
        ("a parent of the root", 1, "prompt.parent_id", ("missing_parent",), _tree(_message("p1", "p0", "prompter"))),
        ("one rank twice", 1, "prompt.replies[1].rank", ("contradiction",),
         _tree({**P1, "replies": [A1, {**A2, "rank": 0}]})),
        ("rank -1", 1, "prompt.replies[0].rank", ("out_of_range",), _tree({**P1, "replies": [{**A1, "rank": -1}]})),
        ("rank 0.5", 1, "prompt.replies[0].rank", ("out_of_range",), _tree({**P1, "replies": [{**A1, "rank": 0.5}]})),
        ("two prompters", 1, "prompt.replies[0].role", ("wrong_turn",),
         _tree({**P1, "replies": [{**A1, "role": "prompter"}]})),
        ("begins with an answer", 1, "prompt.role", ("wrong_turn",), _tree({**P1, "role": "assistant"})),
        ("label 2", 1, "prompt.labels.quality.value", ("out_of_range",),
         _tree({**P1, "labels": {"quality": {"value": 2}}})),
        ("deep", 1, None, ("too_deep",), _tree(DEEP_TREE)),
    ],
    "openassistant_messages": [
        ("cycle", 3, "parent_id", ("cycle",),
         _flat(P1, A1, _message("c1", "c2", "prompter"), _message("c2", "c1", "assistant"))),
        ("its own parent", 2, "parent_id", ("cycle",), _flat(P1, _message("a1", "a1", "assistant"))),
        ("a cycle and what hangs on it", 3, "parent_id", ("cycle",),
         _flat(P1, _message("c0", "c1", "prompter"), _message("c1", "c2", "assistant"),
               _message("c2", "c1", "prompter"))),
        ("only a cycle", 1, "parent_id", ("cycle",),
         _flat(_message("p1", "a1", "prompter"), _message("a1", "p1", "assistant"))),
        ("missing parent", 2, "parent_id", ("missing_parent",), _flat(P1, _message("a1", "p9", "assistant"))),
        ("two roots", 2, "message_tree_id", ("contradiction",), _flat(P1, _message("p2", None, "prompter"))),
        ("duplicate", 3, "message_id", ("duplicate_message",), _flat(P1, A1, A1)),
        ("one rank twice", 3, "rank", ("contradiction",), _flat(P1, A1, {**A2, "rank": 0})),
        ("two prompters", 2, "role", ("wrong_turn",), _flat(P1, {**A1, "role": "prompter"})),
        ("begins with an answer", 1, "role", ("wrong_turn",), _flat({**P1, "role": "assistant"})),
        ("alone: a number as parent", 2, "parent_id", ("wrong_type",), _flat(P1, {**A1, "parent_id": 3})),
    ],
}  # fmt: skip


def cases(layout: str) -> list[Case]:
    return [*field_cases(layout), *file_cases(layout), *semantic_cases(layout)]
