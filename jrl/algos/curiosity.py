"""Curiosity: PPO with a reward for novel completions.

    R_i = reward_i - novelty * (mean cosine of y_i to its `neighbors` nearest earlier completions)          R23
    everything else is PPO; its entropy bonus is the paper's entropy term                                A13, L2, V1, G1

Completions are compared by counts of n-grams (up to `max_order`), hashed to `width` buckets: no model is needed. The
history holds the last `history` completions of earlier steps. It starts empty and is saved in every checkpoint.

Source: curiosity-driven red teaming, Hong et al. 2402.19464, which uses embeddings of a sentence model, a self-BLEU
term and a gibberish classifier; the last two are left out.
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract, ppo
from jrl.algos.contract import Facts, Groups, Needs
from jrl.algos.ppo import PPO
from jrl.ops import novelty, reduce
from jrl.ops.novelty import History
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class Curiosity(PPO):
    novelty: float = 0.5  # reward lost by a completion whose `neighbors` nearest were the same, word for word
    entropy_bonus: float | None = 0.01  # coefficient of the entropy bonus; None: no bonus
    neighbors: int = 16  # completions of the history that one is compared with, the nearest
    history: int = 1024  # completions that are remembered
    max_order: int = 3  # tokens of the longest n-gram
    width: int = 256  # numbers that stand for a completion


def check(config: Curiosity, facts: Facts) -> None:
    ppo.check(config, facts)
    common.check_positive(
        config,
        {
            "novelty": "what was said before would not matter, and PPO does that. 0.5 is usual.",
            "neighbors": "it is a number of completions. 16 is usual.",
            "history": "it is a number of completions. 1024 is usual.",
            "max_order": "it is the length of an n-gram. 3 is usual.",
            "width": "it is a number of hash buckets. 256 is usual.",
        },
    )


def embedding(config: Curiosity, groups: Groups) -> Array:
    return novelty.ngram_embedding(groups.tokens, groups.action_mask, max_order=config.max_order, width=config.width)


def similarity(config: Curiosity, groups: Groups, state: History) -> Array:
    return novelty.nearest_cosine(embedding(config, groups), state, neighbors=config.neighbors)


def shape_with_state(config: Curiosity, groups: Groups, reward: Array, state: History) -> Array:
    return novelty.novelty_reward(reward, similarity(config, groups, state), coefficient=config.novelty)


def advantages(
    config: Curiosity, groups: Groups, reward: Array, state: History
) -> tuple[Array, PyTree, dict[str, Array]]:
    token_advantages, _, counters = ppo.advantages(config, groups, reward, state)
    rows = contract.eligible(groups)
    counters["similarity"] = reduce.masked_mean(similarity(config, groups, state), rows)
    history = novelty.add_to_history(
        state, embedding(config, groups), rows, groups.group, groups.sample, num_groups=groups.num_groups
    )
    return token_advantages, history, counters


def needs(config: Curiosity) -> Needs:
    return ppo.OBJECTIVE.needs(config)._replace(credit_tokens=True)


OBJECTIVE = ppo.OBJECTIVE._replace(
    config=Curiosity,
    check=check,
    needs=needs,
    init_state=lambda config: novelty.no_history(config.history, config.width),
    shape_with_state=shape_with_state,
    advantages=advantages,
)
