"""The precision that a run's programs are traced with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Inside, products of float32 are traced with all their bits. A `with` block, or a decorator.

    Accelerators multiply float32 in fewer bits by default; sampler and learner would differ by more than rounding.
    Products of bfloat16 take one pass either way. What else the process traces is left alone.
    """
    with jax.default_matmul_precision("highest"):
        yield
