"""Checks the contract of a source and lists the violations, for the contract tests and for a user's own parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from jrl.tasks.envs.contract import Source
from jrl.tasks.example import ROLES, Example


def check_source(
    open_fn: Callable[[], Source], n: int = 20, reward_fn: Callable[[str, Example], float | None] | None = None
) -> list[str]:
    """Returns one sentence for each rule of jrl.tasks.envs.contract that the source's first `n` examples break, on the
    first of them that does.

    Args:
        open_fn: opens the source. It is called twice, and the two sources are read in opposite orders.
        reward_fn: (completion, example) -> the reward of the example's verifiers. If given, an example's answer must
            have reward 1.
    """
    problems: list[str] = []
    first, second = open_fn(), open_fn()
    if len(first) < 1:
        return ["it has no examples"]
    if len(first) != len(second):
        problems.append(f"opened twice it has {len(first)} and {len(second)} examples")
    if not first.fingerprint or first.fingerprint != second.fingerprint:
        problems.append(f"its fingerprint is {first.fingerprint!r} and then {second.fingerprint!r}")
    n = min(n, len(first), len(second))
    forwards = [first[i] for i in range(n)]
    backwards = [second[i] for i in reversed(range(n))][::-1]
    ids: dict[str, int] = {}
    broken: dict[str, list[str]] = {"order": [], "ids": [], "messages": [], "json": [], "answer": []}  # by rule
    for i, (example, again) in enumerate(zip(forwards, backwards)):
        if not isinstance(example, Example):
            other = f"example {i} is a {type(example).__name__} and must be a jrl.tasks.example.Example"
            return [*problems, *_first_of_each(broken), other]
        if example != again:
            broken["order"].append(f"example {i} differs when the source is opened again and read in another order")
        if ids.setdefault(example.id, i) != i:
            broken["ids"].append(f"examples {ids[example.id]} and {i} have the same id {example.id!r}")
        if not example.messages or any(message.role not in ROLES for message in example.messages):
            broken["messages"].append(f"example {i} has no messages, or a role that is not one of {', '.join(ROLES)}")
        try:
            copy = Example.from_json(json.loads(json.dumps(example.to_json(), allow_nan=False)))
        except (TypeError, ValueError) as error:
            broken["json"].append(f"example {i} cannot be written as JSON: {error}")
        else:
            if copy != example:
                broken["json"].append(f"example {i} is not the same after JSON and back")
        if reward_fn is not None and example.answer is not None:
            reward = reward_fn(example.answer, example)
            if reward != 1.0:
                broken["answer"].append(
                    f"example {i}: its own answer {example.answer[:80]!r} has the reward {reward}, not 1"
                )
    problems += _first_of_each(broken)
    for index in (-1, len(first)):
        try:
            first[index]
        except IndexError:
            continue
        problems.append(f"index {index} of {len(first)} gives an example instead of an IndexError")
    return problems


def _first_of_each(broken: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the first sentence of every rule, with how many more there are."""
    more = lambda count: f" (the same for {count} more examples)" if count else ""
    return [f"{sentences[0]}{more(len(sentences) - 1)}" for sentences in broken.values() if sentences]
