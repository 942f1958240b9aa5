"""The order in which a source is read: a permutation of its indices for each epoch, looked up by position."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jrl.tasks.envs.contract import Source
from jrl.tasks.example import Example
from jrl.tasks.stopping import Stop, check_stop

# grain computes one entry of a shuffle without the others, by walking a cycle of 65,536: about 40 ms / size per entry.
# That is 6 us at 10,000 and 4 ms at 10 (2 CPU cores), so below this size an epoch's whole permutation is cached.
_SMALL = 4096


def open_order(size: int, seed: int) -> Callable[[int], int]:
    """Returns a function position -> index: positions e * size .. (e + 1) * size - 1 visit 0 .. size - 1 once each, in
    the order of epoch e. Different epochs and seeds have unrelated orders."""
    # grain's order of epoch e with seed s is that of epoch e - 1 with seed s + 1; hashing the seed prevents overlap.
    key = hashlib.sha256(f"order/{seed}".encode()).digest()
    if size >= _SMALL:
        import grain  # takes 0.7 s; a typo in a configuration must be reported at once

        indices = grain.MapDataset.range(size).seed(int.from_bytes(key[:4], "little")).shuffle().repeat(None)
        return lambda position: int(indices[position])

    @functools.lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        # numpy guarantees a counter-based generator's raw bits across versions, but not the order of Generator.shuffle.
        bits = np.random.Philox(key=int.from_bytes(key[:16], "little"), counter=epoch << 64).random_raw(size)
        return np.argsort(bits, kind="stable")

    return lambda position: int(permutation(position // size)[position % size])


def read_in_order(source: Source, indices: Iterable[int], stop: Stop, doing: str) -> Iterator[tuple[int, Example]]:
    """Yields (index, example) in the source's order: in a random one, a file may unpack thousands of rows for each.
    Raises: StopRequested if `stop` returns True while `doing`."""
    for index in sorted(indices):
        check_stop(stop, doing)
        yield index, source[index]
