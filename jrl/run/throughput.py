"""The throughput of a step: tokens per second and device, and shares of the device's peaks, by the model's shape.

The model's FLOPs are those that any implementation needs: for every token that is not padding, two for each entry of
the layers' matrices, attention over the tokens that it sees, and the head where a log-prob is read; three times as many
with gradients (twice for frozen weights). Rematerialization is not counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.device.chips import Peak, peak_of
from jrl.device.sharding import batch_shards
from jrl.learning.layout import Learner
from jrl.models import decoder, flops
from jrl.models.contract import num_params, split_params
from jrl.models.shape import Decoder
from jrl.run.batches import prompt_lengths
from jrl.run.clock import RunClock, StepWork


class TokenCount(NamedTuple):
    """Tokens of rows that run through a model."""

    tokens: int
    seen: int  # sum over tokens of the tokens that each sees, itself included
    read: int  # tokens whose log-prob is read


class Speed(NamedTuple):
    """What is needed to count a run's work."""

    devices: int  # that learn
    sampler_devices: int  # that sample: the same ones, or devices of their own
    all_devices: int
    shards: int  # batch shards of those that sample
    peak: Peak | None  # None: not known
    cfg: Decoder | None  # None: a model of the user's own, whose work is not counted
    spec: Any
    adapters: int  # entries of the adapters' matrices; 0: all weights are trained
    slots: int


def speed_of(config: Any, mesh: Mesh, sampler_mesh: Mesh | None, model: Any, cfg: Any) -> Speed:
    """Returns the numbers that the throughput of a run is computed from. sampler_mesh: None: `mesh` samples."""
    samples_on = mesh if sampler_mesh is None else sampler_mesh
    counted = isinstance(cfg, Decoder)
    frozen, trained = split_params(model.spec(cfg)) if counted else (None, None)
    return Speed(
        devices=mesh.size,
        sampler_devices=samples_on.size,
        all_devices=mesh.size if sampler_mesh is None else mesh.size + sampler_mesh.size,
        shards=batch_shards(samples_on),
        peak=peak_of(mesh.devices.flat[0].device_kind),
        cfg=cfg if counted else None,
        spec=decoder.spec(cfg) if counted else None,
        adapters=0 if frozen is None else num_params(trained),
        slots=config.sampler.slots,
    )


def count_rows(length: np.ndarray, action_mask: np.ndarray, samples: int = 1) -> TokenCount:
    """Returns the tokens of sampled rows.

    Args:
      length: [N] int. action_mask: [N, T] bool.
      samples: adjacent rows whose prompt is computed once, except its last token; 1: none is shared.
    """
    length = np.asarray(length, np.int64)
    prompts = prompt_lengths(length, action_mask)
    tokens, seen = int(length.sum()), int((length * (length + 1) // 2).sum())
    if samples > 1:
        for first in range(0, len(length), samples):
            rows = [row for row in range(first, min(first + samples, len(length))) if length[row]]
            shared = max(int(prompts[rows].min()) - 1, 0) if rows else 0
            tokens -= shared * max(len(rows) - 1, 0)
            seen -= shared * (shared + 1) // 2 * max(len(rows) - 1, 0)
    return TokenCount(tokens, seen, int(action_mask.sum()))


def count_packed(sources: Sequence[np.ndarray], action_mask: np.ndarray) -> TokenCount:
    """Returns the tokens of packed rows by where they come from: row * T + column, -1 at padding."""
    columns = [source[source >= 0] % action_mask.shape[1] for source in sources]
    return TokenCount(sum(len(c) for c in columns), int(sum((c + 1).sum() for c in columns)), int(action_mask.sum()))


def forward_flops(speed: Speed, count: TokenCount) -> float:
    """Returns the FLOPs of a forward pass."""
    length = 2 * count.seen // max(count.tokens, 1)  # of rows of one length L, tokens see (L + 1) / 2
    weights = flops.layer_weights(speed.spec, speed.cfg.experts) + speed.adapters
    attended = flops.softmax_attention(speed.cfg, count.seen)
    attended += count.tokens * flops.linear_attention(speed.cfg, max(length, 1))
    return 2.0 * count.tokens * weights + attended + 2.0 * count.read * flops.head_weights(speed.cfg)


def update_flops(speed: Speed, count: TokenCount) -> float:
    """Returns the FLOPs of an update: three times those of a forward pass; frozen matrices have no gradient."""
    forward = forward_flops(speed, count)
    if not speed.adapters:
        return 3 * forward
    frozen = flops.layer_weights(speed.spec, speed.cfg.experts) * count.tokens
    return 3 * forward - 2.0 * (frozen + count.read * flops.head_weights(speed.cfg))


def decode_steps(completions: Sequence[int], slots: int) -> int:
    """Returns the decode steps of rows that are decoded in `slots` slots, in order."""
    free = [0] * max(min(slots, len(completions)), 1)
    for tokens in completions:
        heapq.heappush(free, heapq.heappop(free) + int(tokens))
    return max(free)


def decode_bytes(speed: Speed, host: dict[str, np.ndarray]) -> float | None:
    """Returns the fewest bytes that decoding must read: all matrices at every decode step of every batch shard, and the
    keys and values of the tokens that a token sees. None for what is not counted: experts, linear attention, layers of
    several shapes, adapters."""
    cfg = speed.cfg
    if cfg.experts is not None or cfg.linear is not None or cfg.full is not None or speed.adapters:
        return None
    size = jnp.dtype(cfg.dtype).itemsize
    sampled = host["action_mask"].sum(axis=1)
    steps = max(decode_steps(rows, speed.slots) for rows in np.array_split(sampled, speed.shards))
    weights = flops.layer_weights(speed.spec) + flops.head_weights(cfg)
    length = np.asarray(host["length"], np.int64)
    prompts = length - sampled
    seen = int((length * (length + 1) // 2 - prompts * (prompts + 1) // 2).sum())
    cache = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * seen
    return float(size * (steps * speed.shards * weights + cache))


def computed_epochs(learner: Learner, kl_reached: float) -> float:
    """Returns the passes over a batch that its updates computed.

    Args:
      kl_reached: updates that a KL limit left out; all but the first of them were not computed.
    """
    return learner.epochs - max(kl_reached - 1, 0) / learner.minibatches


def figures(speed: Speed, clock: RunClock, step: StepWork, epochs: float) -> dict[str, float]:
    """Returns the time metrics of a finished step: seconds by part, tokens per second, shares of peaks.

    Args:
      epochs: passes over the batch that were computed.
    """
    out = {f"time/{part}_seconds": seconds for part, seconds in sorted(step.seconds.items())}
    device_seconds = lambda part: clock.device_seconds([work for work in step.work if work.part == part])
    sample, update = device_seconds("sample"), device_seconds("update")
    sampling_flops = 0.0
    rate = lambda name, tokens, seconds, devices: {
        f"time/{name}_tokens_per_second": tokens / seconds,
        f"time/{name}_tokens_per_second_per_device": tokens / seconds / devices,
    }
    if step.drawn:
        sampled = sum(int(host["action_mask"].sum()) for host in step.drawn)
        if sample:
            out |= {"time/sample_device_seconds": sample} | rate("sample", sampled, sample, speed.sampler_devices)
        if speed.cfg is not None and speed.peak is not None:
            sampling_flops += sum(forward_flops(speed, count_rows(h["length"], h["action_mask"])) for h in step.drawn)
            moved = [decode_bytes(speed, host) for host in step.drawn]
            if sample and None not in moved:
                out["time/decode_bandwidth"] = sum(moved) / sample / speed.sampler_devices / speed.peak.hbm_rate
    if step.packed is not None:
        count = TokenCount(*(round(epochs * n) for n in step.packed))
        if update:
            out |= {"time/update_device_seconds": update} | rate("update", count.tokens, update, speed.devices)
        if speed.cfg is not None and speed.peak is not None:
            learned, peak = update_flops(speed, count), speed.peak.matrix_rate  # of one device
            if update:
                out["time/update_mfu"] = learned / update / (speed.devices * peak)
            out["time/step_mfu"] = (sampling_flops + learned) / sum(step.seconds.values()) / (speed.all_devices * peak)
    return out
