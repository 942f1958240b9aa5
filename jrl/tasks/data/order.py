"""The order in which a source is walked: a permutation of its indices for each epoch, looked up by position."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import numpy as np

# grain computes one place of a shuffle without the others, by walking a cycle of 65,536: about 40 ms / size a place.
# That is 6 us at 10,000 and 4 ms at 10 (2 CPU cores), so below this size an epoch's permutation is made whole and kept.
_SMALL = 4096


def open_order(size: int, seed: int) -> Callable[[int], int]:
    """Returns position -> index: positions e * size .. (e + 1) * size - 1 go through 0 .. size - 1 once, in the order
    of epoch e. Orders of other epochs and seeds are unrelated."""
    # grain's order of epoch e under seed s is that of epoch e - 1 under seed s + 1; a hash keeps seeds apart.
    key = hashlib.sha256(f"order/{seed}".encode()).digest()
    if size >= _SMALL:
        import grain  # 0.7 s to import, and a typo in a configuration must be refused at once

        places = grain.MapDataset.range(size).seed(int.from_bytes(key[:4], "little")).shuffle().repeat(None)
        return lambda position: int(places[position])

    @functools.lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        # Ranks of a counter-based generator's raw bits: numpy promises these, and not the order of Generator.shuffle.
        bits = np.random.Philox(key=int.from_bytes(key[:16], "little"), counter=epoch << 64).random_raw(size)
        return np.argsort(bits, kind="stable")

    return lambda position: int(permutation(position // size)[position % size])
