"""One prompt with one answer: prompts and completions, Alpaca's instructions, labeled answers."""

from __future__ import annotations

from jrl.tasks.envs.layouts.contract import Answer, Layout, Prompted
from jrl.tasks.envs.layouts.conversations import answer_of, prompt_of
from jrl.tasks.envs.layouts.fields import BadField, Field
from jrl.tasks.example import Message


def read_prompt_completion(row: Field, rank_by: str | None) -> list[Prompted]:
    return [Prompted(prompt_of(row["prompt"]), (Answer(answer_of(row["completion"])),))]


def read_unpaired(row: Field, rank_by: str | None) -> list[Prompted]:
    answer = Answer(answer_of(row["completion"]), info={"label": row["label"].flag()})
    return [Prompted(prompt_of(row["prompt"]), (answer,))]


def read_alpaca(row: Field, rank_by: str | None) -> list[Prompted]:
    """Returns the instruction, followed by `input` if there is one, as the prompt, after the earlier [question, answer]
    pairs of `history`."""
    question, extra, system, history = row["instruction"].text(), *map(row.optional, ("input", "system", "history"))
    if extra is not None and not isinstance(extra.value, str):
        raise BadField("wrong_type", extra, "it is not text")
    if extra is not None and extra.value.strip():
        question = f"{question}\n\n{extra.value}"
    messages = [] if system is None or system.value == "" else [Message("system", system.text())]
    for pair in history.items() if history is not None and history.value != [] else []:
        sides = pair.items()
        if len(sides) != 2:
            raise BadField("wrong_type", pair, f"it has {len(sides)} texts, not a question and its answer")
        messages += [Message("user", sides[0].text()), Message("assistant", sides[1].text())]
    return [Prompted((*messages, Message("user", question)), (Answer(row["output"].text()),))]


PROMPT_COMPLETION = Layout(
    read=read_prompt_completion, takes=("each",), example=[{"prompt": "Name a prime.", "completion": "7"}],
    of="prompts and completions, texts or lists of messages",
)  # fmt: skip
UNPAIRED = Layout(
    read=read_unpaired, takes=("each",), example=[{"prompt": "Name a prime.", "completion": "8", "label": False}],
    of="answers that are good or bad, as KTO and BCO learn from",
)  # fmt: skip
ALPACA = Layout(
    read=read_alpaca, takes=("each",),
    example=[{"instruction": "Name a prime.", "input": "It is below 10.", "output": "7"}],
    of="Alpaca, Code Alpaca, and what LLaMA-Factory calls alpaca",
)  # fmt: skip
