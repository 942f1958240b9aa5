"""MacroPPO: PPO with advantages of groups of tokens, macro actions, instead of single tokens (MA-RLHF).

    macro actions: `macro_size` sampled tokens each, or as many as are drawn of several sizes, never across tool output
    V = mean of v_old over the macro's tokens, r = R_i in the last macro of a row, 0 before
    A = gae(r, V) over macros, whitened over all sampled tokens of the step; Ret = A + V before that       A15, A23

Every token gets the A and Ret of its macro. Ratio, clip, value loss and the mean over tokens are PPO's. The reward at
the end of an answer is fewer steps away, so that lambda discounts it less. macro_size = 1 is PPO.

Source: Chai et al. 2410.02743: n-grams of 5, or of 1, 2, 3, 5 or 10 at random; their segments by perplexity and by a
parser are not implemented. Random sizes are the same at every step here.
"""

from __future__ import annotations

import jax

from jrl.algos import common, ppo
from jrl.algos.contract import Facts, Groups
from jrl.algos.ppo import PPO
from jrl.ops import gae
from jrl.types import traced

Array = jax.Array


@traced
class MacroPPO(PPO):
    # sampled tokens of a macro action; several numbers, such as (1, 2, 3, 5, 10): each macro has one of them at random
    macro_size: int | tuple[int, ...] = 5


def check(config: MacroPPO, facts: Facts) -> None:
    ppo.check(config, facts)
    sizes = config.macro_size if isinstance(config.macro_size, tuple) else (config.macro_size,)
    if not sizes or not all(1 <= size <= facts.max_completion for size in sizes):
        raise ValueError(
            f"MacroPPO.macro_size = {config.macro_size} must be 1 to {facts.max_completion} tokens, the longest "
            "completion, or several such sizes: 1 is PPO, the most is one macro action for all of it. 5 is usual."
        )


def estimates(config: MacroPPO, groups: Groups, reward: Array) -> tuple[Array, Array, Array]:
    """Returns advantages before whitening and returns, [N, T] float, and the tokens that count, [N, T] bool."""
    rewards, counts = ppo.rewards_of_tokens(config, groups, reward)
    if isinstance(config.macro_size, tuple):
        starts = gae.random_starts(counts, common.token_draws(groups, 0), sizes=config.macro_size)
    else:
        starts = gae.ngram_starts(counts, size=config.macro_size)
    unwhitened, returns = gae.macro_gae(
        rewards, groups.values, counts, starts, discount=config.discount, gae_lambda=config.gae_lambda
    )
    return unwhitened, returns, counts


OBJECTIVE = ppo.OBJECTIVE._replace(
    config=MacroPPO,
    check=check,
    **ppo.estimated_by(estimates),
)
