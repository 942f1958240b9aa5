"""A-LoL: imitate stored answers with a reward above expectation, weighted by how far above.

    a_i = max(R_i - V(x), 0)                                                                 A19
    l_i = -a_i * clip(exp(LP_i - LP_ref_i), 1 - clip, 1 + clip) * LP_i, LP the sum over the answer;
          with clip = None -a_i * LP_i, and with kl + kl * (LP_i - LP_ref_i) where a_i > 0    L15
    L   = mean over the answers of the step                                                   G3

R and V(x) are columns of the data: `Rated.values = ('reward', 'expected')`. V(x) is the expected reward of the initial
policy on the prompt, such as the mean reward of its samples (`jrl eval`).

Source: Baheti et al. 2305.14718: clip 0.9. There V is a head on the frozen policy, trained on the rewards of its
samples, and rows are drawn in proportion to a_i: `ALoL.draw = 'proportional'`. By default
(`'in_turn'`) every row comes once per epoch.
"""

from __future__ import annotations

from typing import Literal

import jax

from jrl.algos import common
from jrl.algos.contract import Facts, Needs, Objective, Sequences
from jrl.algos.stored_advantages import (
    EXPECTATION,
    advantage_metrics,
    check_draw,
    check_some_better,
    draw,
    learned_rows,
    numbers,
)
from jrl.ops import offline_advantage
from jrl.ops.stored_advantages import better_than_expected
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class ALoL:
    clip: float | None = 0.9  # bounds of the ratio to the reference are 1 - clip and 1 + clip; None: a ratio of 1
    kl: float | None = None  # coefficient of the log-ratio to the reference, in the place of the ratio; None: no term
    # proportional: rows are drawn with replacement, each as likely as it earned more than was expected, in its share of
    # all; in_turn: every row once before any comes again
    draw: Literal["in_turn", "proportional"] = "in_turn"


def check(config: ALoL, facts: Facts) -> None:
    check_draw(config)
    if config.clip is not None and config.kl is not None:
        raise ValueError(
            f"ALoL.clip = {config.clip} and ALoL.kl = {config.kl} are two forms of the tie to the reference; set "
            "ALoL.clip = None or ALoL.kl = None"
        )
    if config.clip is not None and not 0 < config.clip < 1:
        raise ValueError(
            f"ALoL.clip = {config.clip} must lie in (0, 1): the ratio is held between 1 - clip and 1 + clip. 0.9 is "
            "usual; None: no ratio."
        )
    if config.kl is not None:
        common.check_positive(config, {"kl": "at 0 a reference would be run for nothing; None: no such term."})


def sequence_loss(config: ALoL, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns L15 on every answer with a token, 0 elsewhere, [..., S]; and metrics."""
    mask = learned_rows(sequences)
    reward, expected = numbers(sequences)
    weight = better_than_expected(reward, expected, mask)
    logprob, ref_logprob = sequences.logprob, sequences.ref_logprob
    if config.clip is not None:
        # The log-probs are sums over a sequence, so the "token" ratio is the sequence's.
        loss = offline_advantage.a_lol_token(logprob, ref_logprob, weight, mask, clip=config.clip)
    elif config.kl is not None:
        loss = offline_advantage.a_lol_kl(logprob, ref_logprob, weight, mask, coefficient=config.kl)
    else:
        loss = offline_advantage.a_lol_ref_free(logprob, weight, mask)
    return loss, advantage_metrics(sequences, reward - expected, weight)


OBJECTIVE = Objective(
    config=ALoL,
    check=check,
    needs=lambda config: Needs(
        reference=config.clip is not None or config.kl is not None,
        row_values=True,
        row_value_names=EXPECTATION,
    ),
    sequence_loss=sequence_loss,
    check_stored=check_some_better,
    draw=draw,
)
