"""Samples completions of the user's own prompts from a trained policy, for `jrl sample`."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from jrl import paths
from jrl.device.precision import full_precision
from jrl.experiment import check_seed
from jrl.rollout import sampler
from jrl.rollout.prompts import INTERACTIVE_STREAM, place_prompts
from jrl.rollout.sampler import BehaviorPolicy, Sampler, StopRules, stop_table_on_device
from jrl.run.report.text import printable
from jrl.run.trained import Trained
from jrl.tasks.data.prompts import Visit
from jrl.tasks.envs.columns import BadRow, messages_of
from jrl.tasks.example import Example, Message, visit_uid
from jrl.tasks.tokenizers.incremental import IncrementalDecoder
from jrl.types import Finish

BATCH = 16  # prompts sampled at once
MOST_PROMPT_TOKENS = 16_384
SHOWN = 4000  # most characters of a text shown on the terminal
FORMS = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'

Prompt = str | tuple[Message, ...]  # a user's text, or a conversation


class Completion(NamedTuple):
    text: str
    finish: str  # "stop_token", "stop_string", "length"


@dataclasses.dataclass(frozen=True)
class Chat:
    """A policy to sample from. Asking a prompt again draws a new completion; the same prompts in the same order give
    the same completions."""

    trained: Trained
    config: Sampler
    samples: int
    seed: int
    asked: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def open_chat(
    trained: Trained,
    *,
    samples: int = 1,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
) -> Chat:
    """Returns a policy to sample from. None takes the run's own setting; temperature 0 is greedy.

    Raises: ValueError for `samples`, `temperature`, `max_tokens` or `seed` out of range.
    """
    for name, value in (("n", samples), ("max-tokens", max_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")
    if seed is not None:
        check_seed(seed, "--seed")
    config = trained.policy.config.sampler
    if max_tokens is not None:
        config = dataclasses.replace(config, completion_length=max_tokens)
    if temperature is not None:
        if not temperature >= 0:
            raise ValueError(f"--temperature is {temperature}; it must be at least 0, which is greedy")
        config = dataclasses.replace(config, temperature=temperature or None)
    return Chat(trained, config, samples, trained.policy.config.run.seed if seed is None else seed)


@full_precision()
def ask(chat: Chat, prompts: Sequence[Prompt]) -> list[list[Completion]]:
    """Returns `samples` completions of each prompt. A text is the user's message of a new conversation.

    Raises: ValueError for a prompt that is empty, too long or refused by the chat template, with its number.
    """
    policy = chat.trained.policy
    tokenizer, mesh = policy.tokenizer, policy.mesh
    visits = []
    for number, prompt in enumerate(prompts, start=1):
        messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
        if not messages[-1].content.strip():
            raise ValueError(f"prompt {number} is empty")
        text = text_of(prompt)
        try:
            ids = tuple(tokenizer.encode_prompt(messages))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
        if len(ids) > MOST_PROMPT_TOKENS:
            raise ValueError(f"prompt {number} has {len(ids)} tokens; at most {MOST_PROMPT_TOKENS} can be asked")
        visits.append(Visit(Example(text, messages), visit_uid(text, chat.asked[text]), ids))
        chat.asked[text] += 1
    width = policy.config.data.prompt_length
    while width < max((len(visit.prompt) for visit in visits), default=0):
        width *= 2
    count = BATCH if len(visits) > 1 else 1
    behavior = BehaviorPolicy(policy.model, policy.cfg, chat.trained.params, version=0)
    stop = StopRules(tokenizer.end_ids, tokenizer.pad_id, stop_table_on_device(chat.config, tokenizer, mesh))
    answers: list[list[Completion]] = []
    for start in range(0, len(visits), count):
        batch = visits[start : start + count]
        rollout = sampler.sample(
            behavior,
            place_prompts(batch, count, width, tokenizer.pad_id, mesh),
            jax.random.key(chat.seed),
            stream=INTERACTIVE_STREAM,
            config=chat.config,
            samples=chat.samples,
            stop=stop,
            mesh=mesh,
        )
        tokens, actions, finish = jax.device_get((rollout.tokens, rollout.action_mask, rollout.finish))
        pieces = tokenizer.token_bytes()
        completions = [
            Completion(
                decoded_text(row[mask].tolist(), pieces, tokenizer.leads, Finish(int(reason))),
                Finish(int(reason)).name.lower(),
            )
            for row, mask, reason in zip(tokens, actions, np.asarray(finish))
        ]
        answers += [completions[i * chat.samples : (i + 1) * chat.samples] for i in range(len(batch))]
    return answers


def decoded_text(ids: Sequence[int], pieces: Sequence[bytes], leads: bool, finish: Finish) -> str:
    """Returns the text of a completion. If it was cut at the length limit, an incomplete last character is dropped."""
    decoder = IncrementalDecoder(pieces, leads)
    text = decoder.feed(ids)
    return text if finish == Finish.LENGTH else text + decoder.close()


def text_of(prompt: Prompt) -> str:
    """Returns a prompt as one text, for display and to identify it: messages as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(rows_of(prompt), ensure_ascii=False)


def rows_of(prompt: Prompt) -> str | list[dict[str, str]]:
    """Returns a prompt as JSON: its text, or its messages."""
    return prompt if isinstance(prompt, str) else [dataclasses.asdict(message) for message in prompt]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Returns the prompts in a file, one per line: plain text, a JSON string, or a JSON object with a text as "prompt"
    or with "messages", whose other keys are not read. Blank lines are skipped.

    Raises: ValueError if the file cannot be read, is not UTF-8 or contains no prompt, for an object without one, and
      for plain text in a file whose name ends in .jsonl.
    """
    try:
        text = paths.read_foreign(path, paths.MOST_ROWS_BYTES).decode("utf-8-sig")  # some editors write a mark first
        lines = text.replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error  # an OSError names the path once more
        raise ValueError(f"the prompts cannot be read: {path}: {reason}") from error
    is_jsonl = Path(path).suffix.lower() == ".jsonl"
    prompts = [
        _prompt(line, f"{path}, line {number}", is_jsonl) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{path} contains no prompt; write one per line, as plain text, a JSON string or {FORMS}")
    return prompts


def _prompt(line: str, place: str, is_jsonl: bool) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        if is_jsonl:
            raise ValueError(f"{place}: not JSON: {error}; plain text belongs in another file") from error
        return line
    if isinstance(value, dict):
        return _prompt_of(value, place)
    if isinstance(value, str):
        return _text(value, place)
    if is_jsonl:
        raise ValueError(f"{place}: a prompt in a .jsonl file is a JSON string or {FORMS}")
    return line


def _prompt_of(row: dict[str, Any], place: str) -> Prompt:
    """Returns the prompt of a row of data. Raises ValueError if it has none, or two."""
    if len(row.keys() & {"prompt", "messages"}) != 1:
        named = ", ".join(repr(name[:40]) for name in [*row][:8]) or "no key"
        raise ValueError(f"{place}: a prompt as a JSON object is {FORMS}; this one has {named}")
    if "prompt" in row and isinstance(row["prompt"], str):
        return _text(row["prompt"], place)
    (column,) = row.keys() & {"prompt", "messages"}
    try:
        messages = messages_of(row[column], column)
    except BadRow as error:
        raise ValueError(f"{place}: {error}; a prompt as a JSON object is {FORMS}") from error
    if messages[-1].role == "assistant":
        raise ValueError(f"{place}: the last message is the assistant's; a prompt ends with another's")
    return tuple(Message(message.role, _text(message.content, place)) for message in messages)


def _text(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: the prompt contains half a surrogate pair, which is not text") from error
    return text


def write_completions(path: str | Path, prompts: Sequence[Prompt], answers: Sequence[Sequence[Completion]]) -> None:
    """Writes one line per completion: {"prompt","sample","completion","finish"}. A prompt of messages is their list."""
    rows = [
        {"prompt": rows_of(prompt), "sample": k, "completion": completion.text, "finish": completion.finish}
        for prompt, completions in zip(prompts, answers)
        for k, completion in enumerate(completions)
    ]
    paths.write_bytes_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def show(prompt: Prompt, completions: Iterable[Completion], stream: TextIO) -> None:
    """Prints a prompt and its completions."""
    print(f"> {printable(text_of(prompt), SHOWN)}", file=stream)
    show_completions(completions, stream)


def show_completions(completions: Iterable[Completion], stream: TextIO) -> None:
    """Prints completions, one per line, with control characters escaped."""
    for completion in completions:
        tail = "  [cut at the length limit]" if completion.finish == "length" else ""
        print(f"{printable(completion.text, SHOWN)}{tail}", file=stream, flush=True)


def converse(chat: Chat, read: Callable[[], str], stream: TextIO) -> None:
    """Answers each line that `read` returns, until it returns "/quit" or raises EOFError or KeyboardInterrupt."""
    while True:
        try:
            text = read()
        except (EOFError, KeyboardInterrupt):
            print(file=stream)
            return
        if text.strip() == "/quit":
            return
        if not text.strip():
            continue
        try:
            (completions,) = ask(chat, [text])
        except UnicodeEncodeError:
            print("(this line is not UTF-8)", file=stream)
            continue
        except ValueError as error:
            print(f"({error})", file=stream)
            continue
        show_completions(completions, stream)
