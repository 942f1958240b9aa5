"""A folder of safetensors files: an index of its tensors, read by ranges. Nothing is ever unpickled."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jrl import paths

try:
    import safetensors
    from safetensors import SafetensorError
    from safetensors.numpy import save_file
except ImportError:  # pip install 'jrl-jax[hf]'
    safetensors = None

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_INDEX_BYTES = 256 << 20
HELD_BYTES = 64 << 20  # of a mapped file that are in memory at once, at most


def check_installed() -> None:
    """Raises ImportError if safetensors, an optional package, is not installed."""
    if safetensors is None:
        raise ImportError("published weights need the package safetensors; install it with pip install 'jrl-jax[hf]'")


class Tensors:
    """The tensors of a folder. Files are opened once, mapped into memory, and closed together.

    Pages of a mapped file are released after reading: the process holds the tensors, but not the file as well.
    """

    def __init__(self, folder: Path, files: dict[str, Path]) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._files: dict[Path, tuple[mmap.mmap, dict[str, tuple[int, int]]]] = {}
        self._paths = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        problems: list[str] = []
        try:
            for path in dict.fromkeys(files.values()):
                names = [name for name, place in files.items() if place == path]
                header = self._open(path)
                problems += [f"{name}, which {INDEX} places in {path.name}" for name in names if name not in header]
                self.shapes |= {name: header[name][0] for name in names if name in header}
                self.dtypes |= {name: header[name][1] for name in names if name in header}
            if problems:
                raise ValueError(f"{folder} does not contain {_some(problems)}")
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, ranges: tuple[slice, ...]) -> np.ndarray:
        """Returns a box of a tensor whose dtype is in DTYPES. Only the box's rows are read from disk."""
        mapped, offsets = self._files[self._paths[name]]
        start, end = offsets[name]
        shape, dtype = self.shapes[name], jnp.dtype(DTYPES[self.dtypes[name]])
        if start == end:
            return np.zeros(shape, dtype)[ranges]
        tensor = np.frombuffer(mapped, bits_of(dtype), math.prod(shape), start).reshape(shape)
        if not shape:
            return tensor.copy().view(dtype)
        box = tensor[ranges]
        out = np.empty(box.shape, tensor.dtype)
        row_bytes = (end - start) // shape[0]
        step = max(1, HELD_BYTES // max(1, row_bytes))
        first = start + (ranges[0].start or 0) * row_bytes
        for i in range(0, len(out), step):
            out[i : i + step] = box[i : i + step]
            _release(mapped, first + i * row_bytes, step * row_bytes)
        return out.view(dtype)

    def _open(self, path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
        """Maps a file. Returns name -> (shape, dtype) of its tensors, once safetensors has checked its header."""
        paths.check_foreign(path, within=self.folder)
        try:
            with safetensors.safe_open(str(path), "np"):
                pass
            file = self._stack.enter_context(open(path, "rb"))
        except SafetensorError as error:
            raise _damaged(path, error) from error
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        (length,) = struct.unpack("<Q", file.read(8))
        pairs = json.loads(file.read(length), object_pairs_hook=list)
        header = {name: dict(row) for name, row in pairs if name != "__metadata__"}
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError(f"{path} is damaged: its header names a tensor twice")
        begin = 8 + length
        offsets = {name: (begin + row["data_offsets"][0], begin + row["data_offsets"][1])
                   for name, row in header.items()}  # fmt: skip
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._stack.callback(mapped.close)
        self._files[path] = mapped, offsets
        return {name: (tuple(row["shape"]), row["dtype"]) for name, row in header.items()}


def bits_of(dtype: np.dtype) -> np.dtype:
    """Returns the unsigned integer dtype as wide as `dtype`: numpy copies integers in blocks, but bfloat16 one element
    at a time."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


def _release(mapped: mmap.mmap, start: int, length: int) -> None:
    """Releases the pages of a range of a mapped file; they are loaded again when read."""
    if hasattr(mmap, "MADV_DONTNEED"):
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, begin, min(start + length, len(mapped)) - begin)


def open_tensors(folder: str | Path) -> Tensors:
    """Opens the weights of a folder: model.safetensors, or the files that model.safetensors.index.json names.

    Raises: ValueError for a folder without them or with both, pickled weights, an index that points outside the folder,
    and for files that are cut short, damaged, or claim more than they hold. Headers are read, tensors are not.
    """
    check_installed()
    folder = paths.readable(folder)
    if paths.exists(folder / INDEX):
        files = _indexed(folder)
        if paths.exists(folder / SINGLE) and folder / SINGLE not in files.values():
            raise ValueError(
                f"{folder} has its weights twice: in {SINGLE}, and in the files that {INDEX} names. One is left over "
                f"from an earlier save: remove {SINGLE}, or {INDEX}"
            )
        return Tensors(folder, files)
    if paths.exists(folder / SINGLE):
        return open_file(folder / SINGLE)
    pickled = [name for name in paths.list_dir(folder) if name.endswith(PICKLED)]
    if pickled:
        raise ValueError(
            f"{folder} has its weights only as {_some(pickled)}. Loading a pickle can run any code; if you trust it, "
            "convert it to safetensors"
        )
    raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def open_file(path: str | Path) -> Tensors:
    """Opens one safetensors file. Raises ValueError if it is cut short, damaged, or claims more than it holds."""
    check_installed()
    path = paths.local(path)
    paths.check_foreign(path, within=path.parent)
    try:
        with safetensors.safe_open(str(path), "np") as handle:
            names = list(handle.keys())
    except SafetensorError as error:
        raise _damaged(path, error) from error
    return Tensors(path.parent, dict.fromkeys(names, path))


def _damaged(path: Path, error: Exception) -> ValueError:
    """Returns the error for a file that safetensors cannot open."""
    with open(path, "rb") as file:
        pointer = file.read(len(paths.LFS_POINTER)) == paths.LFS_POINTER
    return ValueError(f"{path} {paths.IS_POINTER if pointer else f'is damaged or cut short: {error}'}")


def write_file(path: str | Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes tensors into one safetensors file."""
    check_installed()
    Path(path).touch()
    mode = Path(path).stat().st_mode  # as the umask sets it; safetensors makes a file that only its owner can read
    try:
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, str(path), {"format": "pt"})
    except SafetensorError as error:  # a full disk
        raise OSError(f"could not write {path}: {error}") from error
    Path(path).chmod(mode)


def _indexed(folder: Path) -> dict[str, Path]:
    place = folder / INDEX
    data = paths.read_foreign(place, MAX_INDEX_BYTES, within=folder)
    try:
        names = json.loads(data)["weight_map"]
        pairs = list(names.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{place} is not an index of tensors: {type(error).__name__}: {error}") from error
    files = {}
    for name, file in pairs:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{place} places {name} in {file!r}; it must be the name of a .safetensors file in the folder"
            )
        files[name] = folder / file
    if absent := sorted({path.name for path in files.values() if not paths.exists(path)}):
        raise ValueError(f"{folder} lacks {_some(absent)}, which {INDEX} names")
    return files


def write_tensors(folder: str | Path, tensors: Iterator[tuple[str, np.ndarray]], max_bytes: int) -> list[str]:
    """Writes tensors into files of at most `max_bytes` each (a larger tensor gets its own file), with an index if there
    are several. Returns the files' names. The host holds the tensors of one file at a time.
    """
    check_installed()
    folder = paths.local(folder)
    written: list[tuple[Path, list[str]]] = []
    waiting: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        path = folder / f"{paths.TEMPORARY}{len(written)}.safetensors"
        write_file(path, waiting)
        written.append((path, list(waiting)))
        waiting.clear()

    try:
        for name, tensor in tensors:
            if waiting and sum(x.nbytes for x in waiting.values()) + tensor.nbytes > max_bytes:
                flush()
            waiting[name] = tensor
            total += tensor.nbytes
        flush()
    except BaseException:
        for path in folder.glob(f"{paths.TEMPORARY}*.safetensors"):
            path.unlink()
        raise
    if len(written) == 1:
        names = [SINGLE]
    else:
        names = [f"model-{i:05d}-of-{len(written):05d}.safetensors" for i in range(1, len(written) + 1)]
    for (path, _), name in zip(written, names):
        paths.rename(path, folder / name)
    if len(written) > 1:
        weight_map = {tensor: name for (_, inside), name in zip(written, names) for tensor in inside}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        paths.write_bytes_atomic(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")
        names = [*names, INDEX]
    return names


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
