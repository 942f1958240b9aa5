"""How often a program runs its data-dependent loops and conditions, if completions have the maximum length."""

from __future__ import annotations

from jrl.learning.learner import MICRO_BATCHES, PRETRAINING
from jrl.learning.vocab_parallel import CHUNKS, MIDDLE
from jrl.models.expert_group import EXPERT_CHUNKS
from jrl.ops.logprobs import CHUNK
from jrl.rollout import sampler
from jrl.tools.plan import flops
from jrl.tools.plan.case import Case, pretraining_case
from jrl.tools.plan.cycles import Frequency


def frequency(kind: str, case: Case) -> Frequency:
    """Returns the trip counts of a program's data-dependent loops and the frequency of its conditions, if every
    completion has the maximum length: a shard's sequences take the slots in rounds, and a round decodes all tokens of a
    completion. Experts are used evenly."""
    if kind != "sample":
        filled, stored = filled_chunks(case), pretraining_case(case)
        batches = {MICRO_BATCHES: case.micro_batches, PRETRAINING: 0 if stored is None else stored.micro_batches}
        return Frequency(
            trips={**batches, CHUNKS: filled, MIDDLE: max(filled - 2, 0), EXPERT_CHUNKS: 0},
            taken={CHUNK: filled / all_chunks(case), CHUNKS: float(filled <= 1)},
        )
    sequences, prompts = case.sequences // case.shards, case.prompts // case.shards
    rounds = -(-sequences // case.slots)
    length, chunk, calls = case.config.data.prompt_length, case.prefill_chunk, len(case.begun)
    prefills = -(-prompts // sampler.num_resident_prompts(prompts, case.slots, case.samples, length))
    chunks = length // chunk
    return Frequency(
        trips={
            sampler.REFILLS: rounds,
            sampler.ADMIT: sequences / rounds,
            sampler.PREFILL_CHUNKS: sum(min(-(-(n - 1) // chunk), chunks) for n in case.begun) / calls,
            sampler.DECODE: case.drawn,
            sampler.COMPACTED: 0,
            EXPERT_CHUNKS: 0,
        },
        taken={
            sampler.PREFILL: prefills / sequences,
            sampler.PREFILL_REST: sum(n - 1 > chunks * chunk for n in case.begun) / calls,
        },
    )


def filled_chunks(case: Case) -> int:
    """Returns how many chunks of a packed row's share on one device have their logits computed."""
    rows = case.micro_batches * case.shape.rows * case.shares
    return max(flops.read_positions(case) // (rows * case.chunk), 1)


def all_chunks(case: Case) -> int:
    """Returns the number of chunks of a packed row's share on one device."""
    return -(-case.share_length // case.chunk)
