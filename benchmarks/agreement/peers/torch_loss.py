"""Calls of a loss written in PyTorch, with its gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Answer = tuple[np.ndarray, np.ndarray | None]


def tensors(**arrays: np.ndarray) -> dict[str, torch.Tensor]:
    """Returns arrays as tensors; masks as numbers, as these libraries have them."""
    of = lambda array: torch.tensor(array.astype(np.float32) if array.dtype == bool else array)
    return {name: of(np.asarray(array)) for name, array in arrays.items()}


def with_gradient(loss: Callable[[torch.Tensor], torch.Tensor], differentiated: np.ndarray) -> Answer:
    """Returns a loss, and the gradient of the sum of its entries."""
    leaf = torch.tensor(differentiated, requires_grad=True)
    value = loss(leaf)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach().numpy(), slope.numpy()
