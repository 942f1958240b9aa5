"""What an algorithm is: a record of pure functions on arrays. It never sees a model, a tokenizer or a device.

Groups --keep, shape, advantages--> advantages [N, T] --pack--> Tokens --token_loss--> loss [..., L]
       --returns------------------> returns [N, T], where it has a value head
loss of a step = sum(weights * token_loss) / denominator, both over the whole optimiser step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.types import Finish

Array = jax.Array


@struct.dataclass
class Groups:
    """The rows of one step, before packing. Those of a prompt share `group`; any may be missing, in any order."""

    reward: Array  # [N] float32, as scored
    outcome: Array  # [N] float32, right or wrong without any shaping: what the zero-signal filter judges
    valid: Array  # [N] bool, the verdict can be trained on
    group: Array  # [N] int32, 0..num_groups-1
    action_mask: Array  # [N, T] bool
    finish: Array  # [N] int8, a Finish
    num_groups: int = struct.field(pytree_node=False)
    max_completion: int = struct.field(pytree_node=False)  # tokens, as configured
    values: Array | None = None  # [N, T] float32, of the value head before the update; None without one, and in refills


@struct.dataclass
class Tokens:
    """Packed tokens. What is masked may hold anything, NaN included."""

    logprobs: Array  # [..., L] float32, differentiated
    old_logprobs: Array  # [..., L] float32, recomputed by the learner: never the sampler's, that would count twice
    behaviour_logprobs: Array  # [..., L] float32, of the sampling distribution
    ref_logprobs: Array | None  # [..., L] float32, where the algorithm needs a reference
    entropy: Array  # [..., L] float32, nats; differentiated where the algorithm needs its gradient
    advantages: Array  # [..., L] float32
    mask: Array  # [..., L] bool, the loss mask
    segment: Array  # [..., L] int32, place of the token's sequence in its row, num_segments or more off every sequence
    num_segments: int = struct.field(pytree_node=False)
    values: Array | None = None  # [..., L] float32, differentiated; these three where the algorithm has a value head
    old_values: Array | None = None  # [..., L] float32, before the update
    returns: Array | None = None  # [..., L] float32, as Algorithm.returns said


class Facts(NamedTuple):
    """What of the rest of the run decides whether an algorithm's configuration makes sense."""

    samples: int  # completions a prompt
    lag: int  # versions between sampling and learning
    updates_per_batch: int
    truncated_sampling: bool  # top-k, top-p or min-p is on
    greedy: bool
    max_completion: int  # tokens


class Algorithm(NamedTuple):
    """A row of ALGOS. `config` is a traced dataclass; each function takes an instance of it first."""

    config: type
    check: Callable[[Any, Facts], None]  # raises ValueError where the combination is illegal; no device is touched
    keep: Callable[[Any, Groups], Array]  # [N] bool, rows that enter the loss
    refill: Callable[[Any], int | None]  # most rounds of fresh prompts for groups without signal; None: off
    shape: Callable[[Any, Groups], Array]  # [N] float32, the reward that advantages are taken of
    advantages: Callable[[Any, Groups, Array, Array], tuple[Array, Array, dict[str, Array]]]
    #   (config, groups, reward [N], baseline []) -> advantages [N, T], next baseline [], counters {name: []}
    token_loss: Callable[[Any, Tokens], tuple[Array, dict[str, Array]]]  # loss [..., L], metrics {name: [..., L]}
    weights: Callable[[Any, Array, int], Array]  # (config, loss_mask [N, T], max_completion) -> [N, T]
    denominator: Callable[
        [Any, Array, Array | int, int], Array
    ]  # (config, loss_mask, rows, max_completion) -> [], >= 1
    needs_reference: Callable[[Any], bool]
    needs_entropy_gradient: Callable[[Any], bool]
    returns: Callable[[Any, Groups, Array], Array] | None = None
    #   (config, groups, reward [N]) -> [N, T], what a value head should have said; None: there is no such head


def eligible(groups: Groups) -> Array:
    """Returns the rows that may enter a statistic or the loss, [N] bool: judged (E3), and with tokens of its own (E4).

    A completion that is one stop token is not empty.
    """
    return groups.valid & ~aborted(groups)


def aborted(groups: Groups) -> Array:
    """Returns the rows that hold no sampled token or whose sampling failed, [N] bool."""
    return ~jnp.any(groups.action_mask, axis=-1) | (groups.finish == jnp.int8(Finish.FAILED))
