"""How the kernel of `expert_gradient` divides its work. Nothing of Pallas is imported here: importing it is slow."""

from __future__ import annotations

ROWS = 128  # of a tile
BLOCK_BYTES = 2**11  # of a row of the block of a matrix's gradient that is summed at once, at most


def columns_at_once(columns: int, itemsize: int) -> int:
    """Returns how many rows or columns of an expert's matrix are summed at once: all, or as many as leave room in a
    core's memory for a block's sum, the product that is added to it and two blocks of the result.

    Args:
      itemsize: bytes of a number, of the widest array that the kernel reads or writes.
    """
    return min(columns, BLOCK_BYTES // itemsize)
