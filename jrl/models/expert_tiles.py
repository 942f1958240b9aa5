"""How the kernel of `expert_gradient` divides its work. Nothing of Pallas is imported here: importing it is slow."""

from __future__ import annotations

ROWS = 128  # of a tile
COLUMNS = 1024  # of a matrix's rows or columns that are summed at once, at most


def columns_at_once(columns: int) -> int:
    """Returns how many rows or columns of an expert's matrix are summed at once: all, or COLUMNS of them."""
    return min(columns, COLUMNS)
