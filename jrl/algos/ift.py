"""IFT: supervised fine-tuning that counts a token by the loss that follows from it, so that early mistakes weigh more.

    w_t proportional to sum_{j >= t} discount^(j - t) (-lp_j), mean 1 over a completion, no gradient          P34
    l_t = -w_t log pi(y_t | y_<t),  L = mean over all tokens of the step                                      G1

Source: Intuitive Fine-Tuning, Hua et al. 2405.11870 eq. 9, its propagation of the loss. The paper also trains on inputs
mixed with the embeddings of the model's own predictions, lambda = 0.2 there; here lambda is 0.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts, Objective, Tokens
from jrl.ops import reduce
from jrl.ops.supervised import propagated_weights
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class IFT:
    discount: float = 0.95  # of the loss of each later token; at 0 a token counts by its loss alone


def check(config: IFT, facts: Facts) -> None:
    if not 0 <= config.discount <= 1:
        raise ValueError(f"IFT.discount = {config.discount} must be in [0, 1]; 0.95 is usual")


def token_loss(config: IFT, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P34's IFT of every token, [..., L], 0 where masked; no gradient passes the weight."""
    logprobs = reduce.masked(tokens.logprobs, tokens.mask)
    weights = propagated_weights(
        logprobs, tokens.mask, tokens.segment, num_segments=tokens.num_segments, discount=config.discount
    )
    return -weights * logprobs, {}


OBJECTIVE = Objective(config=IFT, check=check, token_loss=token_loss)
