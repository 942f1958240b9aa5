"""CRC-32C (Castagnoli), which the standard library lacks, vectorized over blocks with numpy."""

from __future__ import annotations

import numpy as np

_POLYNOMIAL = 0x82F63B78  # reflected; RFC 3720, appendix B.4
_LANES = 1 << 14  # blocks that are hashed in parallel


def _table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


_TABLE = _table()


def crc32c(data: bytes, before: int = 0) -> int:
    """Returns the CRC-32C of `data` appended to earlier bytes.

    Args:
      before: the CRC-32C of the earlier bytes; 0: there are none.
    """
    value, step = before ^ 0xFFFFFFFF, len(data) // _LANES
    if step:  # equal blocks, each hashed from 0, then combined: a CRC is linear
        lanes = np.frombuffer(data, np.uint8, step * _LANES).reshape(_LANES, step)
        parts = np.zeros(_LANES, np.uint32)
        for column in np.ascontiguousarray(lanes.T):
            parts = _TABLE[(parts ^ column) & 0xFF] ^ (parts >> 8)
        shift = _shift_by(step)
        while len(parts) > 1:
            parts = _apply(shift, parts[0::2]) ^ parts[1::2]
            shift = _apply(shift, shift)
        value = int(_apply(shift, np.array([value], np.uint32))[0]) ^ int(parts[0])
    for byte in data[step * _LANES :]:
        value = int(_TABLE[(value ^ byte) & 0xFF]) ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _shift_by(length: int) -> np.ndarray:
    """Returns the effect of `length` zero bytes on a CRC, as the image of each of its bits: [32] uint32."""
    basis = np.uint32(1) << np.arange(32, dtype=np.uint32)
    result, power = basis, _TABLE[basis & 0xFF] ^ (basis >> 8)
    while length:
        if length & 1:
            result = _apply(power, result)
        power, length = _apply(power, power), length >> 1
    return result


def _apply(images: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns, for each value, the XOR of the images of its set bits."""
    bits = (values[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    return np.bitwise_xor.reduce(np.where(bits == 1, images, np.uint32(0)), axis=1)
