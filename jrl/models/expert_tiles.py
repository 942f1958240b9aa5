"""Block sizes of the `expert_gradient` kernel. Pallas is not imported here: importing it is slow."""

from __future__ import annotations

ROWS = 128  # per tile
BLOCK_BYTES = 2**11  # of one row of a block of a matrix's gradient, at most


def columns_at_once(columns: int, itemsize: int) -> int:
    """Returns the block size along an axis of an expert's matrix: all of it, or as many entries as leave room in a
    core's memory for a block's sum, the product that is added to it and two blocks of the result.

    Args:
      itemsize: bytes per element of the widest array that the kernel reads or writes.
    """
    return min(columns, BLOCK_BYTES // itemsize)
