"""Several answers to a prompt with scores, attributes or ranks: UltraFeedback, HelpSteer, Nectar."""

from __future__ import annotations

import re

from jrl.tasks.envs.layouts.contract import PAIR_TAKES, Answer, Layout, Prompted
from jrl.tasks.envs.layouts.conversations import different, prompt_of, transcript
from jrl.tasks.envs.layouts.fields import BadField, Field, texts
from jrl.tasks.example import Message

ASPECTS = ("instruction_following", "honesty", "truthfulness", "helpfulness")
ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
MOST_STEPS = 10**9
_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")


def read_ultrafeedback(row: Field, rank_by: str | None) -> list[Prompted]:
    """Returns answers ranked by `overall_score` (0 to 10), by the mean of the ratings of the four aspects (1 to 5), or
    by one of these. An answer without that number (a rating of N/A) is in no pair."""
    answers = []
    for completion in row["completions"].items():
        ratings = {aspect: _rating(completion["annotations"], aspect) for aspect in ASPECTS}
        known = {aspect: rating for aspect, rating in ratings.items() if rating is not None}
        if rank_by == "overall_score":
            score = completion["overall_score"].number(0, 10)
        elif rank_by == "ratings":
            score = sum(known.values()) / len(known) if known else None
        else:
            score = ratings[rank_by]
        info = {**texts(completion, ("model",)), **known, **({} if score is None else {"score": score})}
        answers.append(Answer(completion["response"].text(), score, info))
    return [Prompted((Message("user", row["instruction"].text()),), tuple(answers), texts(row, ("source",)))]


def _rating(annotations: Field, aspect: str) -> float | None:
    """Returns a rating, which is published as text; None for N/A. Raises: BadField."""
    text = annotations[aspect]["Rating"]
    if text.value == "N/A":
        return None
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", text.text()):
        raise BadField("wrong_type", text, "it is neither a number in a text nor 'N/A'")
    return Field(float(text.value), text.name, text.row).number(1, 5)


def helpsteer_row(row: Field) -> tuple[tuple[Message, ...], str, dict[str, int]]:
    """Returns the prompt, the response and its attributes, each from 0 to 4. Raises: BadField."""
    attributes = {name: row[name].whole(0, 4) for name in ATTRIBUTES}
    return helpsteer_prompt(row["prompt"]), row["response"].text(), attributes


def helpsteer_prompt(field: Field) -> tuple[Message, ...]:
    """Returns the messages of a prompt. `<extra_id_1>User` and `<extra_id_1>Assistant` begin further turns in it.
    Raises: BadField."""
    first, *parts = _TURN.split(field.text())
    conversation = [Message("user", first)]
    for speaker, text in zip(parts[::2], parts[1::2]):
        if (speaker == "User") == (conversation[-1].role == "user"):
            raise BadField("wrong_turn", field, f"turn {len(conversation) + 1} is of the {speaker}, too")
        conversation.append(Message("user" if speaker == "User" else "assistant", text))
    if conversation[-1].role != "user" or not all(message.content.strip() for message in conversation):
        raise BadField("wrong_turn", field, "it ends with an answer, or a turn is blank")
    return tuple(conversation)


def read_helpsteer2(rows: list[Field], rank_by: str | None) -> list[Prompted]:
    read = [helpsteer_row(row) for row in rows]
    answers = tuple(
        Answer(response, float(attributes[rank_by]), {**attributes, "score": float(attributes[rank_by])})
        for _, response, attributes in read
    )
    return [Prompted(read[0][0], answers)]


def helpsteer_key(row: Field) -> str:
    helpsteer_row(row)
    return row["prompt"].text()


def read_helpsteer2_preference(row: Field, rank_by: str | None) -> list[Prompted]:
    sides = row["response_1"], row["response_2"]
    return [Prompted(helpsteer_prompt(row["prompt"]), *by_strength(*sides, row["preference_strength"]))]


def read_helpsteer3(row: Field, rank_by: str | None) -> list[Prompted]:
    answers, info = by_strength(row["response1"], row["response2"], row["overall_preference"])
    return [Prompted(prompt_of(row["context"]), answers, {**info, **texts(row, ("domain", "language"))})]


def by_strength(first: Field, second: Field, strength: Field) -> tuple[tuple[Answer, Answer], dict[str, float]]:
    """Returns two answers and their margin. `strength` ranges from -3 (the first is much better) to 3 (the second is);
    0: tie. Raises: BadField."""
    sides = different(first.text(), second.text(), second)
    whole = strength.whole(-3, 3)
    answers = (Answer(side, float(s), {} if s == 0 else {"label": s > 0}) for side, s in zip(sides, (-whole, whole)))
    return tuple(answers), {"margin": float(abs(whole))}


def read_nectar(row: Field, rank_by: str | None) -> list[Prompted]:
    """Returns ranked answers; `rank` 1 is the best. The prompt is a transcript that may end with an empty assistant
    turn."""
    answers, items, seen = [], row["answers"].items(), {}
    for item in items:
        rank = item["rank"].whole(1, len(items))
        if rank in seen:
            raise BadField("contradiction", item["rank"], f"field {seen[rank]!r} is {rank}, too")
        seen[rank] = item["rank"].name
        answers.append(Answer(item["answer"].text(), -float(rank), {**texts(item, ("model",)), "rank": rank}))
    text = row["prompt"].text()
    asked = text.rstrip().removesuffix("Assistant:").rstrip()
    prompt = transcript(Field(asked if asked else text, "prompt", row.row))
    if prompt[-1].role != "user":
        raise BadField("wrong_turn", row["prompt"], "it ends with an answer")
    return [Prompted(prompt, tuple(answers))]


def read_rollouts(rows: list[Field], rank_by: str | None) -> list[Prompted]:
    """Returns the samples of one prompt at one step, ranked by reward. Unscored samples are in no pair. A reward of 1
    or 0 also becomes a label."""
    answers = []
    for row in rows:
        text, reward = rollout_row(row)
        if not row["prompt"].same_as(rows[0]["prompt"]):
            raise BadField("contradiction", row["prompt"], "its group has another prompt")
        info = {} if reward is None else {"score": reward}
        label = {"label": reward == 1} if reward in (0, 1) else {}
        answers.append(Answer(text, reward, {**info, **label}))
    return [Prompted((Message("user", rows[0]["prompt"].text()),), tuple(answers), texts(rows[0], ("example_id",)))]


def rollout_row(row: Field) -> tuple[str, float | None]:
    """Returns a completion, which may be empty, and its reward; None if it has no valid one. Raises: BadField."""
    if not isinstance(row["completion"].value, str):
        raise BadField("wrong_type", row["completion"], "it is not text")
    reward, valid = row.optional("reward"), row.optional("valid")
    number = None if reward is None else reward.number()
    return row["completion"].value, None if valid is not None and not valid.flag() else number


def rollout_key(row: Field) -> str:
    rollout_row(row)
    row["prompt"].text()
    return f"{row['step'].whole(0, MOST_STEPS)}/{row['group'].whole(0, MOST_STEPS)}"


def _annotated(response: str, score: float, rating: str) -> dict:
    return {"model": "m", "response": response, "overall_score": score,
            "annotations": {aspect: {"Rating": rating} for aspect in ASPECTS}}  # fmt: skip


ULTRAFEEDBACK = Layout(
    read=read_ultrafeedback,
    takes=PAIR_TAKES,
    example=[{"instruction": "Name a prime.", "completions": [_annotated("7", 9.0, "5"), _annotated("8", 2.0, "1")],
              "source": "sharegpt"}],
    of="UltraFeedback, with every completion and its annotations",
    rank_by=("overall_score", "ratings", *ASPECTS),
)  # fmt: skip
HELPSTEER2 = Layout(
    read=read_helpsteer2,
    takes=PAIR_TAKES,
    example=[
        {"prompt": "Name a prime.", "response": "7", "helpfulness": 4, "correctness": 4, "coherence": 4,
         "complexity": 0, "verbosity": 0},
        {"prompt": "Name a prime.", "response": "8", "helpfulness": 1, "correctness": 0, "coherence": 4,
         "complexity": 0, "verbosity": 0},
    ],
    of="HelpSteer and HelpSteer2: a row for each response, those of a prompt are read together",
    rank_by=ATTRIBUTES,
    group=helpsteer_key,
)  # fmt: skip
HELPSTEER2_PREFERENCE = Layout(
    read=read_helpsteer2_preference, takes=PAIR_TAKES,
    example=[{"prompt": "Name a prime.", "response_1": "7", "response_2": "8", "preference_strength": -3}],
    of="HelpSteer2-Preference",
)  # fmt: skip
HELPSTEER3 = Layout(
    read=read_helpsteer3, takes=PAIR_TAKES,
    example=[{"domain": "general", "language": "english", "context": [{"role": "user", "content": "Name a prime."}],
              "response1": "7", "response2": "8", "overall_preference": -3}],
    of="HelpSteer3-Preference",
)  # fmt: skip
NECTAR = Layout(
    read=read_nectar, takes=PAIR_TAKES,
    example=[{"prompt": "\n\nHuman: Name a prime.\n\nAssistant: ",
              "answers": [{"answer": "7", "model": "m", "rank": 1}, {"answer": "8", "model": "n", "rank": 2}]}],
    of="Nectar, up to seven ranked answers",
)  # fmt: skip
ROLLOUTS = Layout(
    read=read_rollouts,
    takes=PAIR_TAKES,
    example=[
        {"step": 1, "group": 0, "reward": 1.0, "valid": True, "prompt": "Name a prime.", "completion": "7"},
        {"step": 1, "group": 0, "reward": 0.0, "valid": True, "prompt": "Name a prime.", "completion": "8"},
    ],
    of="what `jrl rollouts RUN --out FILE` writes: the samples of a prompt at a step are read together",
    group=rollout_key,
)
