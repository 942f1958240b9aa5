"""Conversations: message lists, ShareGPT's format, and transcripts with the speakers' names in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.tasks.envs.layouts.contract import PAIR_TAKES, TURN_TAKES, Answer, Layout, Prompted
from jrl.tasks.envs.layouts.fields import BadField, Field, present
from jrl.tasks.example import Message

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "function_call": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
_DECODER = json.JSONDecoder()
_MARK = re.compile(r"\n\n(Human|Assistant):")


def message(field: Field, role: str, content: str, roles: Mapping[str, str]) -> Message:
    """Returns the message of an object that has the speaker in the field `role` and the text in `content`. Raises:
    BadField."""
    return Message(roles[field[role].one_of(tuple(roles), "unknown_role")], field[content].text())


def messages(field: Field, role: str = "role", content: str = "content", roles: Mapping[str, str] = ROLES):
    """Returns the messages of a list, in order. A system message may come first; then the user and the assistant
    alternate. Tool messages follow the assistant or another tool. Raises: BadField.
    """
    conversation: list[Message] = []
    for item in field.items():
        next_message = message(item, role, content, roles)
        last = conversation[-1].role if conversation else None
        allowed = {None: ("system", "user"), "system": ("user",), "user": ("assistant",),
                   "assistant": ("user", "tool"), "tool": ("assistant", "tool")}[last]  # fmt: skip
        if next_message.role not in allowed:
            before = "begins the conversation" if last is None else f"follows one of the role {last!r}"
            raise BadField("wrong_turn", item, f"a message of the role {next_message.role!r} {before}")
        conversation.append(next_message)
    return tuple(conversation)


def turns(conversation: Sequence[Message], field: Field, info: dict[str, Any]) -> list[Prompted]:
    """Returns every answer of the assistant with the messages before it as its prompt. Raises: BadField if the
    conversation does not end with an answer."""
    if conversation[-1].role != "assistant":
        raise BadField("no_answer", field, f"the last message is of the role {conversation[-1].role!r}")
    indices = [i for i, message in enumerate(conversation) if message.role == "assistant"]
    return [Prompted(tuple(conversation[:i]), (Answer(conversation[i].content),), info) for i in indices]


def prompt_of(field: Field) -> tuple[Message, ...]:
    """Returns a prompt from a text or a list of messages. Raises: BadField, also if the last message is an answer."""
    if isinstance(field.value, str):
        return (Message("user", field.text()),)
    prompt = messages(field)
    if prompt[-1].role not in ("user", "tool"):
        raise BadField("wrong_turn", field, f"a prompt that ends with a message of the role {prompt[-1].role!r}")
    return prompt


def answer_of(field: Field) -> str:
    """Returns an answer from a text, or from a list of one assistant message. Raises: BadField."""
    if isinstance(field.value, str):
        return field.text()
    items = field.items()
    first = message(items[0], "role", "content", ROLES)
    if len(items) > 1 or first.role != "assistant":
        raise BadField("wrong_turn", field, "an answer is one message of the assistant")
    return first.content


def split_pair(
    chosen: Sequence[Message], rejected: Sequence[Message], fields: tuple[Field, Field]
) -> tuple[tuple[Message, ...], str, str]:
    """Returns the prompt that two conversations share, and their last answers. Raises: BadField if one does not end
    with an answer, the prompts differ, or the answers are the same."""
    for conversation, field in zip((chosen, rejected), fields):
        if conversation[-1].role != "assistant":
            raise BadField("no_answer", field, f"the last message is of the role {conversation[-1].role!r}")
    if chosen[:-1] != rejected[:-1]:
        raise BadField("no_shared_prompt", fields[1])
    return tuple(chosen[:-1]), *different(chosen[-1].content, rejected[-1].content, fields[1])


def different(chosen: str, rejected: str, field: Field) -> tuple[str, str]:
    """Returns the two answers. Raises: BadField of `field` if they are the same."""
    if chosen == rejected:
        raise BadField("equal_sides", field)
    return chosen, rejected


def transcript(field: Field) -> tuple[Message, ...]:
    r"""Returns the messages of a text such as "\n\nHuman: hi\n\nAssistant: hello". Raises: BadField if it does not
    begin with "\n\nHuman:", a turn is blank, or a speaker has two turns in a row."""
    before, *parts = _MARK.split(field.text())
    if before.strip() or not parts:
        raise BadField("wrong_type", field, r"it does not begin with '\n\nHuman:'")
    conversation: list[Message] = []
    for speaker, text in zip(parts[::2], parts[1::2]):
        role = "user" if speaker == "Human" else "assistant"
        if role != ("assistant" if conversation and conversation[-1].role == "user" else "user"):
            turn = f"turn {len(conversation) + 1} is of the {speaker}"
            raise BadField("wrong_turn", field, f"{turn}, too" if conversation else turn)
        if not text.strip():
            raise BadField("empty", field, f"turn {len(conversation) + 1} says nothing")
        conversation.append(Message(role, text.strip()))
    return tuple(conversation)


def read_messages(row: Field, rank_by: str | None) -> list[Prompted]:
    return turns(messages(row["messages"]), row["messages"], present(row, ("id", "source")))


def read_conversation(row: Field, rank_by: str | None) -> list[Prompted]:
    conversation = row["conversation"]
    return turns(messages(conversation), conversation, present(row, ("model", "language")))


def read_tulu(row: Field, rank_by: str | None) -> list[Prompted]:
    info = {name: row[name].text() for name in ("id", "source")}
    return turns(messages(row["messages"]), row["messages"], info)


def read_rlvr(row: Field, rank_by: str | None) -> list[Prompted]:
    answer = Answer(row["ground_truth"].text())
    return [Prompted(prompt_of(row["messages"]), (answer,), {"dataset": row["dataset"].text()})]


def read_verl(row: Field, rank_by: str | None) -> list[Prompted]:
    """Returns a prompt with its `reward_model.ground_truth`. `data_source`, `ability` and `extra_info` are in its
    info."""
    return _verl(row, ground_truth(row["reward_model"]["ground_truth"]))


def read_verl_verbatim(row: Field, rank_by: str | None) -> list[Prompted]:
    """Returns the same as `read_verl`, with the ground truth as it is in the file: a text unchanged, anything else as
    JSON."""
    truth = row["reward_model"]["ground_truth"]
    is_text = isinstance(truth.value, str)
    return _verl(row, truth.text() if is_text else json.dumps(truth.value, ensure_ascii=False))


def _verl(row: Field, answer: str) -> list[Prompted]:
    info = present(row, ("data_source", "ability", "extra_info"))
    return [Prompted(prompt_of(row["prompt"]), (Answer(answer),), info)]


def ground_truth(field: Field) -> str:
    """Returns the text; of a JSON list of one text (["7"]), which is how Skywork-OR1 writes answers, that text. Raises:
    BadField if something follows in the list."""
    text = field.text()
    try:
        answer, end = _DECODER.raw_decode(text, 1) if text.startswith('["') else ("", 0)
        answer.encode()
    except ValueError:  # no JSON, or half of a surrogate pair
        return text
    if answer and text[end:].lstrip().startswith(","):
        raise BadField("several_answers", field, text[:80])
    return answer if answer.strip() and text[end:].strip() == "]" else text


def read_sharegpt(row: Field, rank_by: str | None) -> list[Prompted]:
    return turns(sharegpt(row), row["conversations"], present(row, ("id",)))


def sharegpt(row: Field) -> tuple[Message, ...]:
    """Returns the messages of a row's `conversations`, after its `system` message if there is one: "" is none. Raises:
    BadField."""
    conversation = messages(row["conversations"], "from", "value", SPEAKERS)
    system = row.optional("system")
    if system is None or system.value == "":
        return conversation
    if conversation[0].role == "system":
        raise BadField("wrong_turn", system, "the conversation has a system message, too")
    return (Message("system", system.text()), *conversation)


def read_sharegpt_preference(row: Field, rank_by: str | None) -> list[Prompted]:
    prompt, answers = sharegpt(row), []
    if prompt[-1].role not in ("user", "tool"):
        raise BadField("wrong_turn", row["conversations"], "it ends with an answer")
    for name in ("chosen", "rejected"):
        answer = message(row[name], "from", "value", SPEAKERS)
        if answer.role != "assistant":
            raise BadField("wrong_turn", row[name], f"an answer of the role {answer.role!r}")
        answers.append(answer.content)
    chosen, rejected = different(*answers, row["rejected"])
    return [Prompted(prompt, compared(chosen, rejected))]


def compared(chosen: str, rejected: str) -> tuple[Answer, Answer]:
    """Returns the two answers, the first one preferred."""
    return Answer(chosen, 1.0, {"label": True}), Answer(rejected, 0.0, {"label": False})


def read_anthropic_hh(row: Field, rank_by: str | None) -> list[Prompted]:
    fields = row["chosen"], row["rejected"]
    prompt, chosen, rejected = split_pair(*map(transcript, fields), fields)
    return [Prompted(prompt, compared(chosen, rejected))]


_ASKED = {"role": "user", "content": "Name a prime."}
_TOLD = {"role": "assistant", "content": "7"}

MESSAGES = Layout(
    read=read_messages, takes=TURN_TAKES, example=[{"messages": [_ASKED, _TOLD]}],
    of="any list of messages: No Robots, UltraChat 200k, SmolTalk",
)  # fmt: skip
CONVERSATION = Layout(
    read=read_conversation, takes=TURN_TAKES, example=[{"conversation": [_ASKED, _TOLD]}],
    of="LMSYS-Chat-1M, WildChat",
)  # fmt: skip
TULU = Layout(
    read=read_tulu, takes=TURN_TAKES, example=[{"id": "a1", "messages": [_ASKED, _TOLD], "source": "flan_v2"}],
    of="the SFT mixtures of Tulu 2, Tulu 3 and OLMo 2",
)  # fmt: skip
RLVR = Layout(
    read=read_rlvr, takes=("each",), example=[{"messages": [_ASKED], "ground_truth": "7", "dataset": "math"}],
    of="prompts with verifiable answers of Tulu 3 and OLMo 2",
)  # fmt: skip
VERL = Layout(
    read=read_verl, takes=("each",), example=[{"prompt": [_ASKED], "reward_model": {"ground_truth": "7"}}],
    of="prompts with verifiable answers as verl reads them: DAPO-Math-17k, Skywork-OR1",
)  # fmt: skip
VERL_VERBATIM = Layout(
    read=read_verl_verbatim, takes=("each",),
    example=[{"prompt": [_ASKED], "reward_model": {"ground_truth": '["7", "11"]'}}],
    of="the same for verifiers of your own: the ground truth as it is, such as a list of tests, or as JSON",
)  # fmt: skip
SHAREGPT = Layout(
    read=read_sharegpt,
    takes=TURN_TAKES,
    example=[{"conversations": [{"from": "human", "value": "Name a prime."}, {"from": "gpt", "value": "7"}]}],
    of="ShareGPT, OpenHermes 2.5, SlimOrca",
)
SHAREGPT_PREFERENCE = Layout(
    read=read_sharegpt_preference,
    takes=PAIR_TAKES,
    example=[
        {"conversations": [{"from": "human", "value": "Name a prime."}], "chosen": {"from": "gpt", "value": "7"},
         "rejected": {"from": "gpt", "value": "8"}}
    ],
    of="preference data in ShareGPT's words, such as LLaMA-Factory's",
)  # fmt: skip
ANTHROPIC_HH = Layout(
    read=read_anthropic_hh,
    takes=PAIR_TAKES,
    example=[
        {"chosen": "\n\nHuman: Name a prime.\n\nAssistant: 7", "rejected": "\n\nHuman: Name a prime.\n\nAssistant: 8"}
    ],
    of="Anthropic's helpful and harmless comparisons (hh-rlhf)",
)
