"""IFT: supervised fine-tuning that weights each token by the loss that follows it, so that early mistakes count more.

    x_t = (1 - share) e(y_t) + share e(argmax pi(. | y_<t)), the input embedding that replaces y_t             P34
    w_t proportional to sum_{j >= t} discount^(j - t) (-lp_j), mean 1 over a completion, no gradient          P34
    l_t = -w_t log pi(y_t | x_<t),  L = mean over all tokens of the step                                      G1

A first pass without a gradient finds the policy's likeliest token at each position. The second pass trains on inputs
that mix in its embedding, which resembles the inputs when the policy samples.

Source: Intuitive Fine-Tuning, Hua et al. 2405.11870 eq. 9, and its code.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts, Needs, Objective, Tokens
from jrl.ops import reduce
from jrl.ops.supervised import propagated_weights
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class IFT:
    # of the embedding of what the policy itself would have said in the place of a token; None: no pass before
    share: float | None = 0.2
    discount: float = 0.95  # of the loss of each later token; at 0 a token counts by its loss alone


def check(config: IFT, facts: Facts) -> None:
    if not 0 <= config.discount <= 1:
        raise ValueError(f"IFT.discount = {config.discount} must be in [0, 1]; 0.95 is usual")
    if config.share is not None and not 0 < config.share <= 1:
        raise ValueError(f"IFT.share = {config.share} must be in (0, 1], or None for no mixed inputs; 0.2 is usual")


def token_loss(config: IFT, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P34's IFT of every token, [..., L], 0 where masked; no gradient passes the weight."""
    logprobs = reduce.masked(tokens.logprobs, tokens.mask)
    weights = propagated_weights(
        logprobs, tokens.mask, tokens.segment, num_segments=tokens.num_segments, discount=config.discount
    )
    return -weights * logprobs, {}


OBJECTIVE = Objective(
    config=IFT, check=check, needs=lambda config: Needs(input_mix=config.share), token_loss=token_loss
)
