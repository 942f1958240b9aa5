"""Block sizes of the kernels in `expert_gradient`. Pallas is not imported here: importing it is slow."""

from __future__ import annotations

from jrl.models.attention.kernels import LANES

ROWS = 128  # per tile
BLOCK_BYTES = 2**11  # of one row of a block of a matrix's gradient, at most
MATRIX_BYTES = 2**21  # of a block of a matrix, at most


def columns_at_once(columns: int, itemsize: int) -> int:
    """Returns the block size along an axis of an expert's matrix: all of it, or as many entries as leave room in a
    core's memory for a block's sum, the product that is added to it and two blocks of the result.

    Args:
      itemsize: bytes per element of the widest array that the kernel reads or writes.
    """
    return min(columns, BLOCK_BYTES // itemsize)


def matrix_block(inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """Returns how many inputs, and outputs that are summed over, of an expert's matrix are multiplied at once: all
    outputs, or the largest part that divides them and is a multiple of LANES, within MATRIX_BYTES; and where there is
    no such part fewer inputs.

    Args:
      itemsize: as in `columns_at_once`.
    """
    by_in = columns_at_once(inputs, itemsize)
    most = MATRIX_BYTES // (by_in * itemsize)
    if outputs <= most:
        return by_in, outputs
    if parts := [size for size in range(LANES, outputs, LANES) if outputs % size == 0 and size <= most]:
        return by_in, max(parts)
    return min(by_in, max(MATRIX_BYTES // (outputs * itemsize) // LANES, 1) * LANES), outputs
