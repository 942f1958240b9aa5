"""SFT: maximum likelihood of stored completions.

    l_t = -log pi(y_t | y_<t),  L = mean over all tokens of the step                                      G1

Source: maximum likelihood (P33), reduced by G1.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Objective, Tokens
from jrl.ops import reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class SFT:
    """Supervised fine-tuning: the log-likelihood of the completions. It has no options."""


def token_loss(config: SFT, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P33, the negative log-prob of every token, [..., L], 0 where masked; G1 makes it the token mean."""
    return -reduce.masked(tokens.logprobs, tokens.mask), {}


OBJECTIVE = Objective(config=SFT, token_loss=token_loss)
