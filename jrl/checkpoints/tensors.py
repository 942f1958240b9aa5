"""A folder of safetensors files: which tensor lies where, read by ranges. Nothing is unpickled, ever."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jrl import paths

try:
    import safetensors
    from safetensors import SafetensorError
    from safetensors.numpy import save_file
except ImportError:  # pip install 'jrl-jax[hf]' brings it
    safetensors = None

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MOST_INDEX_BYTES = 256 << 20


class Tensors:
    """The tensors of a folder. Files are opened once, mapped into memory, and closed together."""

    def __init__(self, folder: Path, found: dict[str, Path]) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._files: dict[Path, Any] = {}
        self._slices: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        problems: list[str] = []
        try:
            for path in dict.fromkeys(found.values()):
                self._open(path)
            for name, path in found.items():
                if name not in self._files[path][1]:
                    problems.append(f"{name}, which {INDEX} places in {path.name}")
                    continue
                part = self._files[path][0].get_slice(name)
                self._slices[name], self.shapes[name] = part, tuple(part.get_shape())
                self.dtypes[name] = part.get_dtype()
            if problems:
                raise ValueError(f"{folder} does not hold {_some(problems)}")
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, ranges: tuple[slice, ...]) -> np.ndarray:
        """Returns a box of a tensor. Only its rows are read from the disk."""
        if not self.shapes[name]:
            return self._slices[name][...]
        return self._slices[name][ranges]

    def _open(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(safetensors.safe_open(str(path), "np"))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or cut short: {error}") from error
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        self._files[path] = handle, set(handle.keys())


def open_tensors(folder: str | Path) -> Tensors:
    """Opens the weights of a folder: model.safetensors, or the files that model.safetensors.index.json names.

    Raises: ValueError for a folder without them, pickled weights, an index that points outside the folder, and for
    files that are cut short, damaged, or claim more than they hold. Headers are read, tensors are not.
    """
    if safetensors is None:
        raise ImportError("published weights need the package safetensors; pip install 'jrl-jax[hf]' brings it")
    folder = paths.local(folder)
    if paths.exists(folder / INDEX):
        return Tensors(folder, _indexed(folder))
    if paths.exists(folder / SINGLE):
        path = folder / SINGLE
        try:
            with safetensors.safe_open(str(path), "np") as handle:
                names = list(handle.keys())
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or cut short: {error}") from error
        return Tensors(folder, dict.fromkeys(names, path))
    pickled = [name for name in paths.list_dir(folder) if name.endswith(PICKLED)]
    if pickled:
        raise ValueError(
            f"{folder} holds its weights only as {_some(pickled)}. A pickle can run any code when it is read; "
            "convert it to safetensors where you trust it"
        )
    raise ValueError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}")


def _indexed(folder: Path) -> dict[str, Path]:
    place = folder / INDEX
    if paths.size(place) > MOST_INDEX_BYTES:
        raise ValueError(f"{place} has {paths.size(place)} bytes; an index has at most {MOST_INDEX_BYTES}")
    try:
        names = json.loads(paths.read_bytes(place))["weight_map"]
        pairs = list(names.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{place} is no index of tensors: {type(error).__name__}: {error}") from error
    found = {}
    for name, file in pairs:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{place} places {name} in {file!r}; a name of a .safetensors file in the folder is due")
        found[name] = folder / file
    if absent := sorted({path.name for path in found.values() if not paths.exists(path)}):
        raise ValueError(f"{folder} lacks {_some(absent)}, which {INDEX} names")
    return found


def write_tensors(folder: str | Path, tensors: Iterator[tuple[str, np.ndarray]], most_bytes: int) -> list[str]:
    """Writes tensors into files of at most `most_bytes` each (a larger tensor has its own), with an index where there
    are several. Returns the files' names. One file's tensors are on the host at a time.
    """
    if safetensors is None:
        raise ImportError("published weights need the package safetensors; pip install 'jrl-jax[hf]' brings it")
    folder = paths.local(folder)
    written: list[tuple[Path, list[str]]] = []
    waiting: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        path = folder / f"{paths.TEMPORARY}{len(written)}.safetensors"
        save_file({name: np.ascontiguousarray(x) for name, x in waiting.items()}, str(path), {"format": "pt"})
        written.append((path, list(waiting)))
        waiting.clear()

    try:
        for name, tensor in tensors:
            if waiting and sum(x.nbytes for x in waiting.values()) + tensor.nbytes > most_bytes:
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
