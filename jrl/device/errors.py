"""Recognizes device errors by name and message. No JAX here: the command line handles errors without it."""

from __future__ import annotations

import re

_NAMES = ("JaxRuntimeError", "XlaRuntimeError")
# The beginning of an absl status message. A program that fails while it is dispatched raises ValueError with one, such
# as a collective whose peer is gone (jaxlib 0.10.2: "UNKNOWN: Gloo AllGather failed: ... Connection closed by peer").
_STATUS = re.compile(
    "(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|"
    "RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS|"
    "UNAUTHENTICATED): "
)
# A disk that is full is RESOURCE_EXHAUSTED too, and so is a kernel that does not fit a TPU core's own memory.
_MEMORY = re.compile("memory|hbm|allocat", re.IGNORECASE)
_OF_A_KERNEL = re.compile("memory space (vmem|smem)", re.IGNORECASE)


def is_of_device(error: BaseException) -> bool:
    """Whether a device, a collective or the coordination service raised it, and not Python code."""
    named = any(cls.__name__ in _NAMES for cls in type(error).__mro__)
    return named or (type(error) is ValueError and _STATUS.match(str(error)) is not None)


def is_of_file(error: BaseException) -> bool:
    """Whether TensorStore raised it over a file. `is_of_device` takes such an error for a device's: a full disk is
    "RESOURCE_EXHAUSTED: Failed writing: ... No space left on device [os_error_code='28']"."""
    return "[os_error_code=" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory, or the compiler found that a program would not fit."""
    text = str(error)
    if not is_of_device(error) or is_of_file(error) or "RESOURCE_EXHAUSTED" not in text or _OF_A_KERNEL.search(text):
        return False
    return _MEMORY.search(text) is not None
