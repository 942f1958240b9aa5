"""The interface of a sampling strategy: how the completions of a prompt are sampled, if not G times independently.

A strategy has a part on the device, a function of one batch shard that calls the sampler once or several times, and a
part on the host: tokens that begin a completion, and the number of attempts in a row that are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jrl.tasks.data.prompts import Visit
from jrl.types import Array, PromptBatch

Fields = dict[str, Any]  # fields of a Rollout of one batch shard, without the fingerprint of its weights
FIRST_ATTEMPT = "first_attempt"  # the reward component of the first of two attempts


class Sample(Protocol):
    """Calls the sampler on a batch shard. The arrays are as wide as `prompts` plus `completion_length`."""

    def __call__(
        self,
        prompts: PromptBatch,
        budget: Array | None = None,  # [B * samples] int32, most tokens of each completion; None: completion_length
        *,
        samples: int,
        completion_length: int,
        role: str = "policy",  # whose weights are used
        # another role, and the weight of its logits in a mixture with those of `role`; None: no mixture
        mixed_with: tuple[str, float] | None = None,
        entropy: bool = False,  # also return the field `entropy`, [n, T] float32, nats; 0 where not an action
    ) -> Fields: ...


class Shard(NamedTuple):
    """The inputs of a strategy on one batch shard: b prompts, and a sampler."""

    sample: Sample
    prompts: PromptBatch
    key: Array  # the run's root key
    stream: Array
    samples: int  # G
    completion_length: int  # C
    pad_id: int


class Drawing(Protocol):
    """The part on the device; hashable, since it is compiled in."""

    roles: tuple[str, ...]  # in addition to the policy, whose weights it samples with

    def __call__(self, shard: Shard) -> Fields:
        """Returns the fields of the shard's b * G rows, [b * G, P + C] by token. The rows of a prompt are adjacent, and
        their `sample` counts from 0 to G - 1."""
        ...


class Setting(NamedTuple):
    """The settings of a run that a strategy is checked against."""

    samples: int  # completions of a prompt
    completion_length: int
    stop_strings: tuple[str, ...]
    roles: frozenset[str]  # that exist when the stage begins


def check_role(config: Any, field: str, setting: Setting) -> None:
    """Raises ValueError if a field of a strategy names a role that does not exist."""
    role = getattr(config, field)
    if role in setting.roles:
        return
    created = {
        "average": "only a stage that trains the policy with an average has; set AdamW.average, such as 0.99",
        "reference": "this objective does not read; use one with a KL to the reference",
    }
    why = created.get(role, f"no earlier stage trains (Offline.trains = {role!r})")
    raise ValueError(f"{type(config).__name__}.{field} names the role {role!r}, which {why}")


def check_no_stop_strings(config: Any, setting: Setting) -> None:
    """Raises ValueError if there are stop strings: each call of the sampler matches them from its first token on, and
    would miss one that begins in an earlier call."""
    if setting.stop_strings:
        raise ValueError(
            f"{type(config).__name__} does not look for stop strings across the parts of a completion, and "
            f"Sampler.stop_strings = {setting.stop_strings!r}; leave them out"
        )


class Strategy(NamedTuple):
    """A row of STRATEGIES. `config` is a frozen dataclass; each function takes an instance of it first."""

    config: type
    # (config, setting) raises ValueError if it cannot run; uses no device
    check: Callable[[Any, Setting], None] = lambda config, setting: None
    # (config, visits) raises ValueError if none of a run's first prompts has what it reads
    check_prompts: Callable[[Any, Sequence[Visit]], None] = lambda config, visits: None
    # (config, tokenizer) -> the part on the device; None: plain sampling
    drawing: Callable[[Any, Any], Drawing] | None = None
    # (config, visit, tokenizer, room) -> tokens after the prompt, at most `room`, that the policy continues from
    prefix: Callable[[Any, Visit, Any, int], tuple[int, ...]] = lambda config, visit, tokenizer, room: ()
    # (config, visit, tokenizer, room) -> the prompt that completions are sampled from, at most `room` tokens, if rows
    # hold the visit's prompt in its place (PromptBatch.row_tokens); () for no completion. None: rows hold that prompt
    asked: Callable[[Any, Visit, Any, int], tuple[int, ...]] | None = None
    # (config) -> roles in addition to the policy, whose weights it samples with
    roles: Callable[[Any], tuple[str, ...]] = lambda config: ()
    attempts: int = 1  # per row, each scored separately
    # (config) -> completions of a prompt that others branch from, and branches of each; None: no branches
    branches: Callable[[Any], tuple[int, int] | None] = lambda config: None
    shares_prompt: bool = True  # the rows of a prompt have the same tokens before their first actions
    # of what `drawing` returns: Rollout.routes are those of the policy after the prompt that rows hold, so that the
    # learner can replay them (Learner.routes); rows without `drawing` have them
    keeps_routes: bool = False


class ConfiguredStrategy(NamedTuple):
    """A strategy as a stage has it: its row of STRATEGIES, and its config; None for plain sampling."""

    row: Strategy
    config: Any


PLAIN = ConfiguredStrategy(Strategy(config=type(None)), None)  # each completion is drawn by itself
