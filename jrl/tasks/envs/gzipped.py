"""Random access to the text of a gzip file: the decompressor's state is saved every SPAN bytes.

A state takes about 40 KiB, so an open file keeps 4 % of its text's size in memory. Seeking decompresses at most
SPAN + CHUNK bytes before the offset, which takes a few milliseconds; from one row to the next it decompresses at most
CHUNK bytes again. No JAX.
"""

from __future__ import annotations

import bisect
import io
import os
import zlib
from typing import Any, NamedTuple

from jrl import paths

SPAN = 1 << 20  # bytes of text between two saved states, up to CHUNK more
CHUNK = 1 << 16
GZIP = 31  # zlib's code for a gzip header and trailer


class State(NamedTuple):
    """A point at which decompression can resume: offsets in text and file, and the decompressor's state."""

    text: int  # bytes of text before it
    file: int  # bytes of the file before it
    decompressor: Any


class Piece(NamedTuple):
    """A piece of the text, at most CHUNK bytes, and the state after it."""

    data: bytes
    end: State


class GzipText:
    """The points of a gzip file from which its text can be read. They are recorded as the file is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._states = [State(0, 0, zlib.decompressobj(GZIP))]
        self._last = Piece(b"", self._states[0])  # where the last `open` began: the next row is often near it

    def open(self, offset: int) -> io.BufferedReader:
        """Returns the text from byte `offset` on. Must be closed.

        Raises: OSError if the file cannot be opened; ValueError if it is damaged, also when the text is read.
        """
        last, file = self._last, open(paths.local(self._path), "rb")
        start = last.end.text - len(last.data)
        if start <= offset < last.end.text:
            return io.BufferedReader(_Text(file, last.end, self._states, last.data[offset - start :]), CHUNK)
        state = self._states[bisect.bisect_right(self._states, offset, key=lambda state: state.text) - 1]
        text = _Text(file, last.end if state.text < last.end.text <= offset else state, self._states)
        while (data := text.read(CHUNK)) and text.offset <= offset:
            pass
        self._last = Piece(data, text.state())
        text.ready = data[offset - (text.offset - len(data)) :]
        return io.BufferedReader(text, CHUNK)


class _Text(io.RawIOBase):
    """The text after a state, as a stream. It appends new states to `states` as it reads.

    Args:
      ready: the text just before the state, which the stream begins with.
    """

    def __init__(self, file: io.BufferedReader, state: State, states: list[State], ready: bytes = b"") -> None:
        self.name, self._file, self._states, self.ready = file.name, file, states, ready
        self.offset, self._file_offset = state.text, state.file  # without `ready`
        self._decompressor = state.decompressor.copy()
        self._data = b""  # of the file, not decompressed yet
        file.seek(state.file)

    def fileno(self) -> int:
        return self._file.fileno()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.ready:
            chunk, self.ready = self.ready[: len(buffer)], self.ready[len(buffer) :]
            buffer[: len(chunk)] = chunk
            return len(chunk)
        chunk = b""
        while not chunk:
            self._save_state()
            if not self._data:
                self._data = self._file.read(CHUNK)
                self._file_offset += len(self._data)
            ended = not self._data
            if self._decompressor.eof:
                if ended:
                    return 0
                self._data = self._data.lstrip(b"\0")  # padding after a member, as of archives in blocks
                if not self._data:
                    continue
                self._decompressor = zlib.decompressobj(GZIP)  # a file may have several members
            try:
                chunk = self._decompressor.decompress(self._data, len(buffer))
            except zlib.error as error:
                raise ValueError(f"{self.name} is damaged, or not a gzip file: {error}") from error
            self._data = self._decompressor.unconsumed_tail or self._decompressor.unused_data
            if ended and not chunk and not self._decompressor.eof:
                raise ValueError(f"{self.name} is damaged: its compressed data ends too early")
        buffer[: len(chunk)] = chunk
        self.offset += len(chunk)
        return len(chunk)

    def close(self) -> None:
        self._file.close()
        super().close()

    def state(self) -> State:
        """Returns the point that has been read up to."""
        return State(self.offset, self._file_offset - len(self._data), self._decompressor.copy())

    def _save_state(self) -> None:
        if self.offset >= self._states[-1].text + SPAN:
            self._states.append(self.state())
