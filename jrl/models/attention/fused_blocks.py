"""Block sizes of the kernels for one token per row, and whether the kernels fit a TPU core's memory (VMEM). Pallas is
not imported here: importing it is slow."""

from __future__ import annotations

from collections.abc import Callable

from jrl.models.attention.kernels import LANES

MLP_BUFFER_BYTES = 6 * 2**20  # of the MLP kernel's weights: two blocks of each matrix
QKV_BUFFER_BYTES = 4 * 2**20  # of the weights of the kernel of queries, keys and values: two blocks
BLOCKS = (4 * LANES, 2 * LANES, LANES)
CORE_BYTES = 15 * 2**20  # limit of a kernel: XLA gives it 16 MiB, less a margin for what is not counted here
SUBLANES = 8  # rows of 32 bits in a tile; an array's second-to-last dimension is padded to whole tiles


def mlp_block(rows: int, width: int, mlp_width: int, itemsize: int, rank: int = 0) -> int | None:
    """Returns how many columns of a device's MLP are read at once: the most whose weights fit their buffers, else the
    fewest; None if the kernel does not fit the core's memory.

    Args:
      rank: of the adapters, in whole tiles; 0: there are none.
    """
    weights = lambda size: 6 * width * size * itemsize
    size = _first(_dividing(mlp_width), weights, MLP_BUFFER_BYTES)
    return None if size is None or mlp_bytes(rows, width, size, itemsize, rank) > CORE_BYTES else size


def mlp_bytes(rows: int, width: int, block: int, itemsize: int, rank: int = 0) -> int:
    """Returns the bytes that the MLP's kernel needs: double-buffered inputs and outputs, scratch memory, and results
    that are not written yet."""
    rows = _padded(rows, itemsize)
    buffers = 6 * width * block * itemsize + 2 * width * 4 + 4 * rows * width * itemsize
    scratch = rows * width * (itemsize + 4)
    if rank:
        buffers += 2 * 3 * rank * (width + block) * itemsize
        scratch += rows * -(-rank // LANES) * LANES * (2 * itemsize + 4)
    return buffers + scratch + rows * (2 * width * _unwritten(itemsize) + 3 * block * 4)


def expert_block(rows: int, width: int, expert_width: int, itemsize: int) -> int | None:
    """Returns how many columns of a device's share of an expert are read at once: all of them, or a divisor in whole
    tiles. The most whose weights fit the MLP's buffers, else the fewest; None if the kernel does not fit the core's
    memory."""
    tile = _padded(1, itemsize)
    parts = [size for size in range(expert_width - 1, 0, -1) if size % tile == 0 == expert_width % size]
    sizes = [expert_width, *parts]
    size = _first(sizes, lambda size: 6 * width * size * itemsize, MLP_BUFFER_BYTES)
    return None if expert_bytes(rows, width, size, itemsize) > CORE_BYTES else size


def expert_bytes(rows: int, width: int, block: int, itemsize: int) -> int:
    """Returns the bytes that the experts' kernel needs, counted as in `mlp_bytes`."""
    rows, (width, lanes) = _padded(rows, itemsize), (-(-size // LANES) * LANES for size in (width, block))
    buffers = 6 * width * _padded(block, itemsize) * itemsize + 4 * rows * width * itemsize
    buffers += 2 * rows * LANES * 4 + 4 * SUBLANES * lanes * 4  # weights of the tokens, biases
    # A float32 product in several passes splits a block into three parts of bfloat16.
    parts = 3 * 2 * width * block if itemsize > 2 else 0
    return buffers + parts + rows * (width * (4 + 2 * _unwritten(itemsize)) + 3 * lanes * 4)


def qkv_block(rows: int, width: int, heads: tuple[int, int], head_dim: int, itemsize: int, rank: int = 0) -> int | None:
    """Returns how many rows of a device's matrix of queries, keys and values are read at once: the most whose weights
    fit their buffers, else the fewest; None if the kernel does not fit the core's memory.

    Args:
      heads: query heads and key heads on the device.
      rank: of the adapters of all three together, in whole tiles; 0: there are none.
    """
    columns = (heads[0] + 2 * heads[1]) * head_dim
    size = _first(_dividing(width), lambda size: 2 * size * columns * itemsize, QKV_BUFFER_BYTES)
    if size is None or qkv_bytes(rows, width, size, heads, head_dim, itemsize, rank) > CORE_BYTES:
        return None
    return size


def qkv_bytes(
    rows: int, width: int, block: int, heads: tuple[int, int], head_dim: int, itemsize: int, rank: int = 0
) -> int:
    """Returns the bytes that the kernel of queries, keys and values needs, counted as in `mlp_bytes`."""
    rows, (queries, keys) = _padded(rows, itemsize), heads
    columns = (queries + 2 * keys) * head_dim
    buffers = 2 * block * columns * itemsize + 2 * rows * (width * itemsize + 2 * head_dim * 4)
    buffers += 2 * 4 * (width + _padded(queries + keys, 4) * head_dim)  # scales of the norms
    buffers += 2 * rows * head_dim * itemsize * (_padded(queries, itemsize) + 2 * _padded(keys, itemsize))
    scratch = rows * (width * itemsize + columns * 4)
    if rank:
        buffers += 2 * rank * (width + columns) * itemsize
        scratch += rows * -(-rank // LANES) * LANES * itemsize
    return buffers + scratch + rows * width * _unwritten(itemsize)


def _dividing(divided: int) -> list[int]:
    """Returns the BLOCKS that divide a dimension."""
    return [size for size in BLOCKS if divided % size == 0]


def _first(sizes: list[int], weights: Callable[[int], int], limit: int) -> int | None:
    """Returns the first of `sizes`, in decreasing order, whose weights fit; else the last; None if there are none."""
    return next((size for size in sizes if weights(size) <= limit), sizes[-1] if sizes else None)


def _padded(count: int, itemsize: int) -> int:
    """Returns `count` rows padded to whole tiles, for elements of `itemsize` bytes."""
    height = SUBLANES * 4 // itemsize
    return -(-count // height) * height


def _unwritten(itemsize: int) -> int:
    """Returns the bytes per entry of a result, the norm's or a product's, that is not in its buffer yet: float32, plus
    the parts of a float32 product in several passes."""
    return 4 if itemsize < 4 else 8
