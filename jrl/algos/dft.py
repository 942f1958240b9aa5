"""DFT: supervised fine-tuning that weights each token by its probability, so that unlikely targets count less.

    l_t = -sg(pi(y_t | y_<t)) log pi(y_t | y_<t),  L = mean over all tokens of the step              P34, G1

Source: Wu et al. 2508.05629, as in TRL's "dft".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Objective, Tokens
from jrl.ops import reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class DFT:
    """Supervised fine-tuning weighted by each token's probability. It has no options."""


def token_loss(config: DFT, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P34's DFT of every token, [..., L], 0 where masked; no gradient passes the weight. Its gradient is that
    of minus the token's probability, whose mean is logged: training raises it, but not always the log-prob."""
    logprobs = reduce.masked(tokens.logprobs, tokens.mask)
    probability = jax.lax.stop_gradient(jnp.exp(logprobs))
    return -probability * logprobs, {"dft/probability": reduce.masked(probability, tokens.mask)}


OBJECTIVE = Objective(config=DFT, token_loss=token_loss)
