"""Published models: a folder with config.json and safetensors becomes a Decoder and its parameters, and back.

Parameters are loaded directly onto the mesh: each device's shard of a leaf is read from the ranges of the files that
hold it and cast; no host holds the full model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import paths
from jrl.device.sharding import TRAIN, shardings
from jrl.models import decoder
from jrl.models.attention.kernels import Attention
from jrl.models.contract import axes, is_spec
from jrl.models.families import (
    classifier_json,
    config_json_of,
    describe,
    family_of,
    labels_of,
    pad_of,
    reads_answer_end,
)
from jrl.models.families.contract import CLASSIFIER, SCORE, Family, Pick, Place, read
from jrl.models.heads import REWARD, Head, head_spec
from jrl.models.leaves import layers_of
from jrl.models.pretrained import adapters, peft
from jrl.models.pretrained.adapters import part_of, rows_of
from jrl.models.pretrained.peft import Module
from jrl.models.pretrained.tensors import DTYPES, Tensors, bits_of, open_tensors, write_tensors
from jrl.models.remat import Remat
from jrl.models.shape import Decoder
from jrl.types import PyTree

# Files of the tokenizer and of sampling defaults; copied when a folder is exported from another.
GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
COMPANIONS = (GENERATION, "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
              "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
              "additional_chat_templates/tool_use.jinja", "chat_template.json")  # fmt: skip


MAX_COMPANION_BYTES = 1 << 28  # per file

MAX_POSITIONS = "max_position_embeddings"  # the longest text that other tools serve; jrl has no such bound

OWN_TOKENIZER = "jrl_tokenizer"  # where an export stores a tokenizer that has no published form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A policy that starts from published weights: a folder with config.json and safetensors."""

    path: str  # the folder
    adapter: str | None = None  # a PEFT adapter's folder, merged into the weights as they are read
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of matmuls and the KV cache
    param_dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # weights are cast to it when loaded
    remat: Remat = "none"  # what a layer keeps for the backward pass, as in Decoder
    attention: Attention = "auto"  # as in Decoder
    attention_block: int | None = None  # queries whose scores exist at once, recomputed in the backward pass


class Classifier(NamedTuple):
    """The model that a classifier's config.json describes."""

    family: Family  # its places include the head's
    cfg: Decoder
    labels: tuple[str, ...]
    pad_id: int | None  # the labels are read at the last token other than this one; None: at the last token
    answer_end: bool  # a conversation ends with the token that ends its answer; False: as its chat template writes it


@dataclasses.dataclass(frozen=True)
class Slot:
    """A leaf's part of one published tensor: the leaf, its index, and its place in the tensor."""

    path: tuple[str, ...]
    index: tuple[int, ...]  # into the leaf: (), (row,) of stacked layers, (row, expert) of separate experts
    place: Place
    start: int  # along place.join


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """One published tensor: its full shape, and the leaves in it."""

    shape: tuple[int, ...]
    slots: tuple[Slot, ...]


def read_config(folder: str | Path) -> dict[str, Any]:
    """Returns config.json of a folder. Raises ValueError where it is missing or not a JSON object."""
    local = paths.readable_without_weights(folder)
    path = local / "config.json"
    if paths.exists(local / "manifest.json") and paths.exists(local / "metrics.jsonl"):
        raise ValueError(f"{folder} is not a published model: it is a run of jrl. `jrl train CONFIG --run DIR "
                         f"--from {folder}` begins a new run with its weights, `jrl export {folder} --to DIR` "
                         "publishes them")  # fmt: skip
    if not paths.exists(path):
        why = "it has no config.json" if paths.exists(local) else "there is no such folder"
        if paths.exists(local / "adapter_config.json"):
            why = f"it holds a PEFT adapter; Published.path is the folder of its base, Published.adapter = '{folder}'"
        raise ValueError(f"{folder} is not a published model: {why}")
    return paths.read_object(path, within=local)


def decoder_of(published: Published) -> tuple[Family, Decoder]:
    """Returns the family of a folder, and its decoder in the requested dtypes. Reads config.json only.

    Raises: ValueError for a folder without a known model, or with a classifier, which generates no tokens.
    """
    if labels_of(read_config(published.path), str(Path(published.path) / "config.json")) is not None:
        raise ValueError(f"{published.path} is a classifier: it scores text and does not generate it. Use it with "
                         "`jrl score` or Config.reward = @RewardModel()")  # fmt: skip
    return _decoder_of(published)


def classifier_of(published: Published) -> Classifier:
    """Returns the classifier of a folder. Raises ValueError where it has none."""
    config, where = read_config(published.path), str(Path(published.path) / "config.json")
    labels = labels_of(config, where)
    if labels is None:
        raise ValueError(f"{published.path} is not a classifier: its architecture does not end in {CLASSIFIER}")
    family, cfg = _decoder_of(published)
    pad_id, answer_end = pad_of(config, family, where), reads_answer_end(config, where)
    return Classifier(*with_score(family, cfg), labels, pad_id, answer_end)


def with_score(family: Family, cfg: Decoder) -> tuple[Family, Decoder]:
    """Returns a classifier's family and decoder, with a reward head and no token head, whether or not it was tied."""
    return family._replace(places={**family.places, REWARD: SCORE}), dataclasses.replace(cfg, tied=True)


def classifier_spec(cfg: Decoder, labels: int) -> PyTree:
    """Returns the abstract parameters of a classifier, its head as the entry REWARD, [1, D, labels]."""
    return {**decoder.spec(cfg), REWARD: head_spec(Head(outputs=labels), cfg.width, cfg.param_dtype)}


def _decoder_of(published: Published) -> tuple[Family, Decoder]:
    config, where = read_config(published.path), str(Path(published.path) / "config.json")
    family = family_of(config, where)
    try:
        cfg = read(family, config, where)
    except ValueError as error:
        raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from error
    return family, dataclasses.replace(
        cfg,
        dtype=published.dtype,
        param_dtype=published.param_dtype,
        remat=published.remat,
        attention=published.attention,
        attention_block=published.attention_block,
    )


def plans(family: Family, cfg: Decoder, spec: PyTree | None = None) -> dict[str, TensorPlan]:
    """Returns published name -> plan of every tensor of `cfg`, or of `spec` where it has further leaves."""
    spec = decoder.spec(cfg) if spec is None else spec
    order = {name: number for number, name in enumerate(family.places)}
    # The tensor's numbers, the leaf's position in the family's table, its path, the part's shape and index in the leaf
    leaves = [((), order[name], (name,), leaf.shape, ()) for name, leaf in spec.items() if is_spec(leaf)]
    for name, leaf in spec["layers"].items():
        each = range(cfg.experts.count) if family.places[name].each_expert else None
        for row, layer in enumerate(layers_of(cfg, name)):
            if each is None:
                leaves.append(((layer,), order[name], ("layers", name), leaf.shape[1:], (row,)))
            else:
                leaves += [((layer, i), order[name], ("layers", name), leaf.shape[2:], (row, i)) for i in each]
    by_name: dict[str, TensorPlan] = {}
    for numbers, _, path, shape, index in sorted(leaves):
        place = family.places[path[-1]]
        sizes = [rows_of(dims, shape) for dims in place.dims]
        name, start = place.name.format(*numbers), 0
        if name in by_name:
            tensor = by_name[name]
            if place.join is not None:
                start = tensor.shape[place.join]
                sizes[place.join] += start
            by_name[name] = TensorPlan(tuple(sizes), (*tensor.slots, Slot(path, index, place, start)))
        else:
            by_name[name] = TensorPlan(tuple(sizes), (Slot(path, index, place, 0),))
    return by_name


def account(family: Family, cfg: Decoder, tensors: Tensors, spec: PyTree) -> dict[str, str]:
    """Returns expected name -> name in the files, once every tensor is accounted for.

    Raises: ValueError listing the tensors that are missing, unexpected, of another shape, or not floating point.
    """
    expected = plans(family, cfg, spec)
    names = renamed(expected, tensors, family)
    missing = sorted(name for name in expected if names[name] not in tensors.shapes)
    shapes = [
        f"{name} is {list(tensors.shapes[names[name]])}, expected {list(plan.shape)}"
        for name, plan in expected.items()
        if names[name] in tensors.shapes and tensors.shapes[names[name]] != plan.shape
    ]
    used = set(names.values())
    left = [name for name in sorted(tensors.shapes.keys() - used) if not is_ignored(family, name)]
    head = family.places["head"].name
    for copy in (head, f"language_model.{head}"):
        if cfg.tied and copy in left:
            _refuse_untied(tensors, names[family.places["embed"].name], copy)
            left.remove(copy)
    kinds = [f"{name} is {tensors.dtypes[name]}" for name in sorted(used & tensors.shapes.keys())
             if tensors.dtypes[name] not in DTYPES]  # fmt: skip
    lists = {"missing": missing, "unexpected": left, "of another shape": shapes, "not floating point": kinds}
    if any(lists.values()):
        problems = "; ".join(f"{what} ({len(rows)}): {', '.join(rows[:12])}{' ...' if len(rows) > 12 else ''}"
                             for what, rows in lists.items() if rows)  # fmt: skip
        raise ValueError(f"the tensors in {tensors.folder} do not match its config.json: {problems}")
    return names


def is_ignored(family: Family, name: str) -> bool:
    """Whether a tensor is never read."""
    ignored = (*family.ignored, *(family.wrapped.ignored if family.wrapped is not None else ()))
    return any(re.fullmatch(pattern, name) for pattern in ignored)


def as_stored(family: Family, tensors: Tensors) -> Family:
    """Returns the family with its experts placed as in the folder: one tensor per expert, or one per layer."""
    ends = [place.name.removeprefix("model.") for place in family.regrouped.values()]
    pattern = "|".join(re.escape(end).replace(r"\{\}", r"\d+") for end in ends)
    read = [
        name for name in tensors.shapes if not is_ignored(family, name)
    ]  # heads of multi-token prediction have experts too
    if not ends or not any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in read):
        return family
    return family._replace(places={**family.places, **family.regrouped})


def renamed(due: Mapping[str, TensorPlan], tensors: Tensors, family: Family) -> dict[str, str]:
    """Returns expected name -> name in the files. A folder may omit or add the base model's prefix, or use a larger
    model's prefix instead, for all of its tensors at once."""
    prefix = next(iter(due)).split(".")[0] + "."
    around = family.wrapped.prefixes if family.wrapped is not None else ()
    # "model.language_model." begins with "model.", so the longest prefix is tried first.
    for other in (*around, prefix):
        if any(name.startswith(other) for name in tensors.shapes):
            break
    else:
        other = ""
    inside = {name: other + name.removeprefix(prefix) for name in due if name.startswith(prefix)}
    head = {name: next((there for there in (name, f"language_model.{name}") if there in tensors.shapes), name)
            for name in due.keys() - inside.keys()}  # fmt: skip
    names_in_files = {**inside, **head}
    return {name: names_in_files[name] for name in due}


Where = tuple[str, Slot, Module | None]  # the tensor that holds a layer of a leaf, and its adapter


def adapter_to(
    family: Family, due: Mapping[str, TensorPlan], names: Mapping[str, str], folder: str | Path
) -> dict[str, Module]:
    """Returns published name -> adapter of a PEFT folder. Of a larger model's adapter, that of its text model.

    Args:
      names: expected name -> name in the model's files; an adapter may use either, or another of a larger model's
        prefixes: transformers changed the names of modules and not those of tensors.

    Raises: ValueError where it belongs to another model.
    """
    known = {name: name for name in due} | {there: name for name, there in names.items()}
    around, outside = (family.wrapped.prefixes, family.wrapped.ignored) if family.wrapped is not None else ((), ())
    known |= {
        other + name.removeprefix("model."): name for name in due if name.startswith("model.") for other in around
    }
    read = {f"{name}.weight": module for name, module in peft.read(folder).items()}
    read = {name: module for name, module in read.items() if not any(re.fullmatch(part, name) for part in outside)}
    if not read:
        raise ValueError(f"the adapter in {folder} adapts nothing of the text model")
    if unknown := sorted(read.keys() - known.keys()):
        raise ValueError(f"the adapter in {folder} belongs to another model: it also adapts {', '.join(unknown[:4])}")
    modules = {known[name]: module for name, module in read.items()}
    for name, module in modules.items():
        for slot in due[name].slots:
            adapters.check(f"{name} in {folder}", module, slot.path[-1], slot.place, due[name].shape)
    return modules


def load(published: Published, mesh: jax.sharding.Mesh, announce: Callable[[int, int], None] | None = None) -> PyTree:
    """Returns the parameters of a published folder, sharded over `mesh` as in training.

    Args:
      announce: called with (bytes read so far, bytes that this host reads in all) at every percent.

    Raises: ValueError for anything in the folder that does not match its config.json.
    """
    family, cfg = decoder_of(published)
    return _load(published, family, cfg, decoder.spec(cfg), mesh, announce)


def check_folder(published: Published) -> None:
    """Raises ValueError for a folder that `load` would reject, judging by config.json and file headers. Tensors are
    read only to compare a published head with the embedding that config.json ties it to."""
    family, cfg = decoder_of(published)
    with open_tensors(published.path) as tensors:
        account(as_stored(family, tensors), cfg, tensors, decoder.spec(cfg))


def load_classifier(
    published: Published, mesh: jax.sharding.Mesh, announce: Callable[[int, int], None] | None = None
) -> PyTree:
    """Returns the parameters of a classifier's folder, its head as the entry REWARD, [1, D, labels]. As `load`."""
    family, cfg, labels, *_ = classifier_of(published)
    return _load(published, family, cfg, classifier_spec(cfg, len(labels)), mesh, announce)


def _load(
    published: Published,
    family: Family,
    cfg: Decoder,
    spec: PyTree,
    mesh: jax.sharding.Mesh,
    announce: Callable[[int, int], None] | None,
) -> PyTree:
    with jax.set_mesh(mesh), open_tensors(published.path) as tensors:
        family = as_stored(family, tensors)
        names = account(family, cfg, tensors, spec)
        due = plans(family, cfg, spec)
        modules = {} if published.adapter is None else adapter_to(family, due, names, published.adapter)
        slots: dict[tuple[str, ...], dict[tuple[int, ...], Where]] = {}
        for name, plan in due.items():
            for slot in plan.slots:
                slots.setdefault(slot.path, {})[slot.index] = names[name], slot, modules.get(name)
        placed = shardings(axes(spec), mesh, TRAIN)
        sizes = jax.tree.map(lambda leaf, sharding: _host_bytes(leaf, sharding), spec, placed, is_leaf=is_spec)
        total, done = sum(jax.tree.leaves(sizes)), 0

        def count(size: int) -> None:
            nonlocal done
            before, done = done, done + size
            if announce is not None and 100 * before // total < 100 * done // total:
                announce(done, total)

        def leaf(path: tuple, leaf_spec: Any, sharding: Any) -> jax.Array:
            where = slots[tuple(key.key for key in path)]
            dtype = np.dtype(leaf_spec.dtype)
            block = lambda box: _block(tensors, where, leaf_spec.shape, box, dtype, count)
            return _placed(leaf_spec.shape, dtype, sharding, block)

        return jax.tree_util.tree_map_with_path(leaf, spec, placed, is_leaf=is_spec)


def _boxes(shape: tuple[int, ...], sharding: Any) -> dict[tuple[tuple[int, int], ...], list[Any]]:
    """Returns {shard: its devices} for each distinct shard of an array that this host has."""
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices.setdefault(tuple(s.indices(size)[:2] for s, size in zip(index, shape)), []).append(device)
    return devices


def _host_bytes(leaf: Any, sharding: Any) -> int:
    """Returns the bytes of a leaf that this host reads: each distinct shard once."""
    shares = [math.prod(b - a for a, b in box) for box in _boxes(leaf.shape, sharding)]
    return sum(shares) * np.dtype(leaf.dtype).itemsize


def _placed(
    shape: tuple[int, ...], dtype: np.dtype, sharding: Any, block: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Returns a sharded array. Each distinct shard is read once, and freed once it is on its devices."""
    shares = []
    for box, where in _boxes(shape, sharding).items():
        data = block(tuple(slice(a, b) for a, b in box))
        shares += [jax.device_put(data, device) for device in where]
    return jax.make_array_from_single_device_arrays(shape, sharding, shares, dtype=dtype)


def _block(
    tensors: Tensors,
    where: dict[tuple[int, ...], Where],
    shape: tuple[int, ...],
    box: tuple[slice, ...],
    dtype: np.dtype,
    count: Callable[[int], None],
) -> np.ndarray:
    """Returns a box of a leaf, read from the tensors that hold it and merged with its adapter. `count` is called with
    the bytes of each read.

    Raises: ValueError for a value that is not finite.
    """
    apart = len(next(iter(where)))
    if apart == 0:
        out = _finite(_read(tensors, *where[()], shape, box), where[()][0], tensors, dtype)
        count(out.nbytes)
        return out
    out = np.empty([s.stop - s.start for s in box], dtype)
    for row in np.ndindex(out.shape[:apart]):
        at = tuple(s.start + i for s, i in zip(box, row))
        data = _finite(_read(tensors, *where[at], shape[apart:], box[apart:]), where[at][0], tensors, dtype)
        out.view(bits_of(dtype))[row] = data.view(bits_of(dtype))
        count(data.nbytes)
    return out


def _finite(data: np.ndarray, name: str, tensors: Tensors, dtype: np.dtype) -> np.ndarray:
    """Returns a box of a published tensor in `dtype`. Raises ValueError for a value that is not finite in it."""
    with np.errstate(over="ignore"):
        cast = data.astype(dtype, copy=False)
    if bad := num_nonfinite(cast):
        values = "value that is" if bad == 1 else "values that are"
        raise ValueError(
            f"{tensors.folder}: {name} holds {bad} {values} NaN or infinite in {dtype} (published as {data.dtype}); "
            "such weights can be neither trained nor sampled from"
        )
    return cast


def num_nonfinite(data: np.ndarray) -> int:
    """Returns how many values of a float array are NaN or infinite: those whose exponent is all ones. Works on the
    bits: numpy processes bfloat16 one element at a time."""
    exponent = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "bfloat16": 0xFF << 7, "float16": 0x1F << 10}
    kind = bits_of(data.dtype)
    mask = kind.type(exponent[data.dtype.name])
    flat = data.reshape(-1).view(kind)
    pieces = (flat[i : i + _PIECE] for i in range(0, flat.size, _PIECE))
    return sum(int(np.count_nonzero((piece & mask) == mask)) for piece in pieces)


_PIECE = 1 << 18  # values checked at once: they fit a core's cache


def _read(
    tensors: Tensors,
    name: str,
    slot: Slot,
    module: Module | None,
    shape: tuple[int, ...],
    box: tuple[slice, ...],
) -> np.ndarray:
    """Returns a box of a layer's leaf with its adapter merged in."""
    published = lambda box: _read_published(tensors, name, slot, shape, box)
    if module is None:
        return published(box)
    return adapters.merged(published(box), module, slot.path[-1], slot.place, slot.start, shape, box, published)


def _read_published(
    tensors: Tensors, name: str, slot: Slot, shape: tuple[int, ...], box: tuple[slice, ...]
) -> np.ndarray:
    """Returns a box of a layer's leaf. For a published dimension that merges several axes, the rows in the first axis's
    range are read."""
    ranges, fine, inner, order = [], [], [], []
    for number, dims in enumerate(slot.place.dims):
        sizes = [d.of if isinstance(d, Pick) else shape[d] for d in dims]
        picked = [slice(d.index, d.index + 1) if isinstance(d, Pick) else box[d] for d in dims]
        stride = int(np.prod(sizes[1:], dtype=np.int64))
        start = slot.start if slot.place.join == number else 0
        ranges.append(slice(start + picked[0].start * stride, start + picked[0].stop * stride))
        fine += [picked[0].stop - picked[0].start, *sizes[1:]]
        inner += [slice(None), *picked[1:]]
        order += [None if isinstance(d, Pick) else d for d in dims]
    data = tensors.read(name, tuple(ranges))
    bits = data.view(bits_of(data.dtype)).reshape(fine)[tuple(inner)]
    bits = bits.reshape([size for size, axis in zip(bits.shape, order) if axis is not None])
    bits = bits.transpose(np.argsort([axis for axis in order if axis is not None]))
    return np.ascontiguousarray(bits).view(data.dtype)


def _refuse_untied(tensors: Tensors, embed: str, head: str) -> None:
    """Raises ValueError where a head that config.json ties to the embedding is published with other values."""
    shape = tensors.shapes[head]
    if shape == tensors.shapes.get(embed):
        rows = max(1, (64 << 20) // max(1, 4 * shape[1]))
        boxes = [(slice(i, min(i + rows, shape[0])), slice(0, shape[1])) for i in range(0, shape[0], rows)]
        if all(np.array_equal(tensors.read(embed, box), tensors.read(head, box)) for box in boxes):
            return
    raise ValueError(f"{tensors.folder} has a {head} that differs from {embed}, but config.json ties them")


def export(
    params: PyTree,
    cfg: Decoder,
    folder: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    max_bytes: int,
    family: Family | None = None,
    companions: Mapping[str, bytes] | None = None,
    ids: Mapping[str, Any] | None = None,
    length: int | None = None,
    head: jax.Array | None = None,
) -> list[str]:
    """Writes a folder that other tools load: config.json, generation_config.json, safetensors. Returns the file names.

    Args:
      params: stacked, sharded in any way. Fetched one tensor at a time.
      head: a reward head, [1, D, labels]: the folder is a classifier's, without a token head. None: a model that
        generates tokens.
      dtype: of the tensors.
      max_bytes: of one file of tensors.
      family: None: the first that can represent `cfg`.
      companions: name -> contents of further files, such as a tokenizer's.
      ids: known values of IDS, used where generation_config.json among the companions lacks them.
      length: MAX_POSITIONS of the model, from `length_of`; None: unknown, and readers take the default of their class.

    Raises: ValueError where the folder is not empty, or for an option of the decoder that no family has.
    """
    if family is None:
        family, config = describe(cfg)
    else:
        config, problem = config_json_of(family, cfg)
        if problem is not None:
            raise ValueError(f"{family.model_type} has no {', '.join(problem)}")
    folder = paths.local(folder)
    if paths.exists(folder) and paths.list_dir(folder):
        raise ValueError(f"{folder} already exists and is not empty; choose a new folder with --to")
    companions = dict(companions or {})
    defaults = json.loads(companions.get(GENERATION, b"{}"))
    # Written even where unknown: a reader's default may be an id that the embedding does not have.
    known = {name: defaults[name] if defaults.get(name) is not None else (ids or {}).get(name) for name in IDS}
    config = {**({} if length is None else {MAX_POSITIONS: length}), **config, **known, "torch_dtype": dtype}
    if head is not None:
        config |= classifier_json(family, head.shape[-1])
        ends = known["eos_token_id"]
        if known["pad_token_id"] in (ends if isinstance(ends, list) else [ends]):
            config["pad_token_id"] = None  # other tools would read the score before the token that ends a text
    new = {name: value for name, value in known.items() if value is not None and defaults.get(name) is None}
    if new or GENERATION not in companions:
        companions[GENERATION] = json.dumps({**defaults, **new}, indent=2).encode() + b"\n"
    paths.make_dir(folder)
    written = write_tensors(folder, published_tensors(params, cfg, family, dtype, head), max_bytes)
    paths.write_files(folder, companions)
    paths.write_bytes_atomic(folder / "config.json", json.dumps(config, indent=2).encode() + b"\n")
    return sorted([*written, *companions, "config.json"])


def length_of(config: Mapping[str, Any]) -> int | None:
    """Returns MAX_POSITIONS of a published config.json, of its text model if it wraps one; None if it has none."""
    texts = config.get("text_config")
    length = (texts if isinstance(texts, dict) else config).get(MAX_POSITIONS)
    return length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else None


def published_tensors(
    params: PyTree, cfg: Decoder, family: Family, dtype: str, head: jax.Array | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every published tensor of `params` in `dtype`, one at a time on the host. head: as in `export`."""
    dtype, spec = jnp.dtype(dtype), None
    if head is not None:
        family, cfg = with_score(family, cfg)
        params, spec = {**params, REWARD: head}, classifier_spec(cfg, head.shape[-1])
    for name, plan in plans(family, cfg, spec).items():
        out = np.empty(plan.shape, dtype)
        for slot in plan.slots:
            leaf = params
            for key in slot.path:
                leaf = leaf[key]
            leaf = np.asarray(jax.device_get(part_of(leaf, slot.index)))
            fine, inner, order = [], [], []
            ranges = []
            for number, dims in enumerate(slot.place.dims):
                size = rows_of(dims, leaf.shape)
                start = slot.start if slot.place.join == number else 0
                ranges.append(slice(start, start + size) if slot.place.join == number else slice(None))
                fine += [d.of if isinstance(d, Pick) else leaf.shape[d] for d in dims]
                inner += [d.index if isinstance(d, Pick) else slice(None) for d in dims]
                order += [d for d in dims if not isinstance(d, Pick)]
            view = out[tuple(ranges)]
            box = view.reshape(fine)
            box[tuple(inner)] = leaf.transpose(order).astype(dtype)
            out[tuple(ranges)] = box.reshape(view.shape)
        yield name, out


def companions_of(folder: str | Path) -> dict[str, bytes]:
    """Returns name -> contents of the files of COMPANIONS in a published folder."""
    folder = paths.readable_without_weights(folder)
    read = lambda name: paths.read_foreign(folder / name, MAX_COMPANION_BYTES, within=folder)
    return {name: read(name) for name in COMPANIONS if paths.exists(folder / name)}
