"""Which kernels of attention there are, on what devices, and in what blocks they read. None is imported here: Pallas
takes a while."""

from __future__ import annotations

from typing import Any, Literal

Attention = Literal["reference", "splash"]

PLATFORMS = {"splash": "tpu"}  # attention -> the only kind of device that has it
LANES = 128  # tokens: a kernel reads rows that are filled up to a multiple of it
BLOCKS = (4 * LANES, 2 * LANES, LANES)  # queries and keys that are multiplied at once: the first that divides a row


def filled(length: int) -> int:
    """Returns the tokens of a row of `length` as a kernel reads it."""
    return -(-length // LANES) * LANES


def block_of(length: int) -> int:
    """Returns the queries, and the keys, of a block of a row that is filled up."""
    return next(size for size in BLOCKS if filled(length) % size == 0)


def causal_share(length: int) -> float:
    """Returns the part of all pairs of a query and a key that a kernel computes: blocks at or below the diagonal."""
    blocks = filled(length) // block_of(length)
    return (blocks + 1) / (2 * blocks) * (filled(length) / length) ** 2


def check_attention(cfg: Any, platform: str) -> None:
    """Raises ValueError where the attention of a Decoder is not there on devices of `platform`: cpu, gpu or tpu."""
    needed = PLATFORMS.get(cfg.attention, platform)
    if platform != needed:
        raise ValueError(
            f"attention={cfg.attention!r} is a kernel of {needed.upper()}s, and these devices are "
            f"{platform.upper()}s; set attention='reference'"
        )
