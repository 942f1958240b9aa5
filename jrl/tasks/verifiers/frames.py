"""Messages between the trainer, the template and the workers: four bytes of length, then that many bytes of JSON.

Only JSON is sent over these sockets, so nothing that arrives can run. Text is escaped to ASCII, which preserves lone
surrogates and control characters.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

HEADER = struct.Struct("!I")
REQUEST_LIMIT = 16 << 20  # bytes: a completion, its example and the parts' source
REPLY_LIMIT = 64 << 10  # bytes: a verdict; a worker that announces more is killed


class Oversized(ValueError):
    """A frame is larger than the limit."""


class Garbled(ValueError):
    """The bytes of a frame are not the JSON object that was expected."""


def pack(message: dict[str, Any], limit: int) -> bytes:
    """Returns `message` as one frame. Raises Oversized above `limit` bytes."""
    return pack_text(json.dumps(message), limit)


def pack_text(text: str, limit: int) -> bytes:
    """Returns JSON `text` (ASCII) as one frame. Raises Oversized above `limit` bytes."""
    body = text.encode("ascii")
    if len(body) > limit:
        raise Oversized(f"a frame of {len(body)} bytes; at most {limit} are sent")
    return HEADER.pack(len(body)) + body


def pop(buffer: bytearray, limit: int) -> dict[str, Any] | None:
    """Removes the first frame from `buffer` and returns it; None if it is incomplete. Raises Oversized; Garbled."""
    if len(buffer) < HEADER.size:
        return None
    (size,) = HEADER.unpack_from(buffer)
    if size > limit:
        raise Oversized(f"a frame announces {size} bytes; at most {limit} are read")
    if len(buffer) < HEADER.size + size:
        return None
    body = bytes(buffer[HEADER.size : HEADER.size + size])
    del buffer[: HEADER.size + size]
    return parse(body)


def read(connection: socket.socket, limit: int) -> dict[str, Any] | None:
    """Blocks for one frame and returns it; None at the end of the stream. Raises Oversized; Garbled."""
    message, _ = read_with_fds(connection, limit, 0)
    return message


def read_with_fds(connection: socket.socket, limit: int, max_fds: int) -> tuple[dict[str, Any] | None, list[int]]:
    """Blocks for one frame; returns it with the received descriptors, or (None, []) at the end of the stream.

    Raises: Oversized above `limit` bytes; Garbled for anything but a JSON object.
    """
    fds: list[int] = []
    header = b""
    while len(header) < HEADER.size:
        if max_fds:
            data, received, _, _ = socket.recv_fds(connection, HEADER.size - len(header), max_fds)
            fds += received
        else:
            data = connection.recv(HEADER.size - len(header))
        if not data:
            return None, []
        header += data
    (size,) = HEADER.unpack(header)
    if size > limit:
        raise Oversized(f"a frame announces {size} bytes; at most {limit} are read")
    body = bytearray()
    while len(body) < size:
        data = connection.recv(min(size - len(body), 1 << 16))
        if not data:
            return None, []
        body += data
    return parse(bytes(body)), fds


def parse(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in `body`. Raises Garbled if it is not one."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"a frame that is not JSON: {body[:40]!r}") from error
    if not isinstance(message, dict):
        raise Garbled(f"a frame that is not a JSON object: {body[:40]!r}")
    return message
