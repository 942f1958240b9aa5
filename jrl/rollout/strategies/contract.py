"""What a sampling strategy is: how the completions of a prompt come about, where that is more than to draw G of them.

A strategy has a part on the device, a function of one batch shard that calls the sampler once or several times, and a
part on the host: tokens that begin a completion, and how many attempts of a row are scored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jrl.tasks.data.prompts import Visit
from jrl.types import Array, PromptBatch

Fields = dict[str, Any]  # of a Rollout of one batch shard, without the fingerprint of its weights
FIRST_ATTEMPT = "first_attempt"  # the component of the reward that says what the first of two attempts was worth


class Sample(Protocol):
    """Calls the sampler on a batch shard. The arrays have the width of `prompts` and `completion_length` together."""

    def __call__(
        self,
        prompts: PromptBatch,
        budget: Array | None = None,  # [B * samples] int32, most tokens of each completion; None: completion_length
        *,
        samples: int,
        completion_length: int,
        role: str = "policy",  # whose weights draw
        # another role, and the weight of its logits beside those of `role`; None: `role` alone draws
        mixed_with: tuple[str, float] | None = None,
        entropy: bool = False,  # the fields have `entropy` too, [n, T] float32, nats; 0 where not an action
    ) -> Fields: ...


class Shard(NamedTuple):
    """What a strategy has on one batch shard: b prompts, and a sampler."""

    sample: Sample
    prompts: PromptBatch
    key: Array  # the run's root
    stream: Array
    samples: int  # G
    completion_length: int  # C
    pad_id: int


class Drawing(Protocol):
    """The part on the device; hashable, since it is compiled in."""

    roles: tuple[str, ...]  # beside the policy, whose weights it draws with

    def __call__(self, shard: Shard) -> Fields:
        """Returns the fields of the shard's b * G rows, those of a prompt adjacent, [b * G, P + C] by token."""
        ...


class Setting(NamedTuple):
    """What of the rest of a run decides whether a strategy makes sense."""

    samples: int  # completions of a prompt
    completion_length: int
    stop_strings: tuple[str, ...]
    roles: frozenset[str]  # that there are when the stage begins


def check_role(config: Any, field: str, setting: Setting) -> None:
    """Raises ValueError where a field of a strategy names a role that there is not."""
    role = getattr(config, field)
    if role not in setting.roles:
        raise ValueError(f"{type(config).__name__}.{field} names the role {role!r}, which no earlier stage trains "
                         f"(Offline.trains = {role!r})")  # fmt: skip


def check_no_stop_strings(config: Any, setting: Setting) -> None:
    """Raises ValueError where there are stop strings: each call of the sampler looks for them from its first token on,
    so that one which begins before a seam and ends after it would not be found."""
    if setting.stop_strings:
        raise ValueError(
            f"{type(config).__name__} does not look for stop strings across the parts of a completion, and "
            f"Sampler.stop_strings = {setting.stop_strings!r}; leave them out"
        )


class Strategy(NamedTuple):
    """A row of STRATEGIES. `config` is a frozen dataclass; each function takes an instance of it first."""

    config: type
    # (config, setting) raises ValueError where it cannot run; no device is touched
    check: Callable[[Any, Setting], None] = lambda config, setting: None
    # (config, tokenizer) -> the part on the device; None: the sampler's own
    drawing: Callable[[Any, Any], Drawing] | None = None
    # (config, visit, tokenizer, room) -> tokens after the prompt, at most `room`, that the policy goes on from
    prefix: Callable[[Any, Visit, Any, int], tuple[int, ...]] = lambda config, visit, tokenizer, room: ()
    # (config, visit, tokenizer, room) -> the prompt that completions are drawn from, at most `room` tokens, where rows
    # hold the visit's own in its place (PromptBatch.row_tokens); () from it: no completion. None: rows are as drawn
    asked: Callable[[Any, Visit, Any, int], tuple[int, ...]] | None = None
    roles: Callable[[Any], tuple[str, ...]] = lambda config: ()  # beside the policy, whose weights it draws with
    attempts: int = 1  # of a row, each scored by itself
    # (config) -> completions of a prompt that others branch from, and how many from each; None: none branches
    branches: Callable[[Any], tuple[int, int] | None] = lambda config: None
    shares_prompt: bool = True  # the rows of a prompt have the same tokens before their first actions


PLAIN = Strategy(config=type(None))
