"""The attention kernels, the devices they run on, and their block sizes. No kernel is imported here: importing Pallas
is slow."""

from __future__ import annotations

from typing import Any, Literal

# On TPUs 'auto' becomes splash, or ragged, if that kernel supports the model and the run; otherwise, and always on CPUs
# and GPUs, the reference (jrl/run/kernels.py). Where nothing has resolved it, it is the reference.
Attention = Literal["auto", "reference", "splash", "cudnn"]  # over full rows
OneToken = Literal["auto", "reference", "ragged"]  # for one new token per row, over a cache
NO_KERNEL = ("auto", "reference")

PLATFORMS = {"splash": "tpu", "cudnn": "gpu", "ragged": "tpu"}  # attention -> the only platform that supports it
LANES = 128  # TPU kernels read the last axis of an array padded to a multiple of it
BLOCKS = (4 * LANES, 2 * LANES, LANES)  # queries and keys that are multiplied at once: the first that divides a row
LARGEST_PADDING = (
    1 / 16
)  # of a row, for larger blocks: a block of 512 x 512 is computed at a higher rate than 16 of 128
BLOCK_BYTES = 2**19  # of a block of queries, at most: the backward kernels need over 16 MiB of a core for twice as many
CACHE_BLOCKS = (*BLOCKS, LANES // 2, LANES // 4, LANES // 8)  # columns of a cache that are read at once
CACHE_BLOCK_BYTES = (
    2**18
)  # of keys that ragged attention reads at once: fetching them hides the cost of starting a block


def padded_length(length: int) -> int:
    """Returns the tokens of a row of `length` tokens after padding for a TPU kernel."""
    return -(-length // LANES) * LANES


def padded_row(length: int) -> int:
    """Returns the tokens of a row of `length` tokens after padding for 'splash': a multiple of the most of BLOCKS that
    adds no more than LARGEST_PADDING to `padded_length`."""
    fewest = padded_length(length)
    lengths = (-(-length // size) * size for size in BLOCKS)
    return next(padded for padded in lengths if padded <= fewest * (1 + LARGEST_PADDING))


def block_of(length: int, head_bytes: int = 0) -> int:
    """Returns the number of queries, and of keys, in a block of a padded row: the most of BLOCKS that divide it and
    take no more than BLOCK_BYTES; else the fewest.

    Args:
      head_bytes: of a query's head; 0: few enough for every block.
    """
    fit = [size for size in BLOCKS if padded_row(length) % size == 0 and size * head_bytes <= BLOCK_BYTES]
    return fit[0] if fit else LANES


def causal_share(length: int) -> float:
    """Returns the share of all pairs of a query and a key that 'splash' computes: blocks at or below the diagonal."""
    blocks = padded_row(length) // block_of(length)
    return (blocks + 1) / (2 * blocks) * (padded_row(length) / length) ** 2


def cache_block(columns: int, column_bytes: int) -> int:
    """Returns the columns of a cache that ragged attention reads at once: the most of CACHE_BLOCKS that divide the
    padded columns and whose keys, of all heads of a device, take no more than CACHE_BLOCK_BYTES; else the fewest.

    Args:
      column_bytes: of a column's keys.
    """
    fit = [
        size for size in CACHE_BLOCKS if padded_length(columns) % size == 0 and size * column_bytes <= CACHE_BLOCK_BYTES
    ]
    return fit[0] if fit else CACHE_BLOCKS[-1]


def check_ragged(cfg: Any, tensor: int) -> None:
    """Raises ValueError where ragged attention would read incomplete tiles of a device's shard of a Decoder's cache,
    over `tensor` devices: XLA would copy the whole cache for every token."""
    for heads in [cfg.kv_heads] + ([] if cfg.full is None else [cfg.full.kv_heads]):
        local_heads = heads // tensor
        if local_heads not in (1, 2, 4) and local_heads % 8:
            raise ValueError(
                f"Sampler.attention='ragged' needs 1, 2, 4 or a multiple of 8 key heads on a device, not "
                f"{local_heads} (kv_heads={heads} over MeshShape.tensor={tensor}); set Sampler.attention='reference'"
            )


def check_attention(cfg: Any, platform: str) -> None:
    """Raises ValueError where the attention of a Decoder is not available on devices of `platform`: cpu, gpu or tpu."""
    check_kernel("attention", cfg.attention, platform)


def check_kernel(name: str, kernel: str, platform: str) -> None:
    """Raises ValueError if `kernel`, the value of the field `name`, is not available on devices of `platform`."""
    needed = PLATFORMS.get(kernel, platform)
    if platform != needed:
        raise ValueError(
            f"{name}={kernel!r} is a kernel for {needed.upper()}s, and these devices are {platform.upper()}s; "
            f"set {name}='reference'"
        )
