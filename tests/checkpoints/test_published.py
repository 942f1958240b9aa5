"""Folders that cannot be trusted: refused at once, with the reason."""

from __future__ import annotations

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from families import golden
from families.published import opened
from safetensors.numpy import load_file, save_file

from jrl.models.pretrained import tensors as tensors_module
from jrl.models.pretrained.published import num_nonfinite
from jrl.models.pretrained.tensors import open_tensors, write_file

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return golden.write(tmp_path / "model")


def rewrite(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def refused(folder, *parts):
    with pytest.raises(ValueError) as caught:
        opened(folder)
    for part in parts:
        assert part in str(caught.value)


def test_what_is_missing_left_over_and_mis_shaped_is_listed_together(folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.7.extra.weight"] = np.zeros(3, np.float32)
        tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((48, 31), np.float32)
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((48, 32), np.int8)

    rewrite(folder, change)
    refused(
        folder,
        "missing (1): model.norm.weight",
        "unexpected (1): model.layers.7.extra.weight",
        "model.layers.1.mlp.up_proj.weight is [48, 31], expected [48, 32]",
        "model.layers.0.mlp.up_proj.weight is I8",
    )


def test_a_prefix_that_all_tensors_lack_is_none_that_matters(folder):
    want = opened(folder)[1]

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(folder, change)
    actual = opened(folder)[1]
    np.testing.assert_array_equal(actual["layers"]["q"], want["layers"]["q"])


def test_a_copy_of_a_tied_head_is_passed_over_and_another_head_is_refused(folder):
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    opened(folder)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((3, 4), 9))
    refused(folder, "lm_head.weight that differs", "config.json ties them")


def test_pickled_weights_are_refused(folder):
    (folder / FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(folder, "pytorch_model.bin", "can run any code")


def test_an_index_stays_in_its_folder(folder):
    for outside in ("../../etc/passwd", "/etc/passwd", "sub/a.safetensors", "..", 7):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": outside}}))
        refused(folder, repr(outside), "of a .safetensors file in the folder")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(folder, text):
    (folder / INDEX).write_text(text)
    refused(folder, "is not an index of tensors")


def test_an_index_that_names_what_is_not_there_is_refused(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-2.safetensors"}}))
    refused(folder, "lacks model-2.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.nrm.weight": FILE}}))
    refused(folder, "does not contain model.nrm.weight")


def test_weights_of_two_saves_are_refused(folder):
    """transformers would read the single file, and other tools the files that the index names."""
    (folder / "model-00001-of-00001.safetensors").write_bytes((folder / FILE).read_bytes())
    weight_map = dict.fromkeys(load_file(folder / FILE), "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "has its weights twice", f"remove {FILE}, or {INDEX}")
    (folder / FILE).unlink()
    opened(folder)


def test_damaged_files_are_refused(folder):
    intact = (folder / FILE).read_bytes()
    huge = json.dumps({"a": {"dtype": "F32", "shape": [10**6, 10**7], "data_offsets": [0, 4 * 10**13]}}).encode()
    for data in (
        intact[:-5],
        intact[:100],
        b"",
        intact[:9] + b"\xff" + intact[10:],
        struct.pack("<Q", 10**13) + intact[8:],
        struct.pack("<Q", len(huge)) + huge,
    ):
        (folder / FILE).write_bytes(data)
        refused(folder, FILE, "damaged or cut short")


def test_a_clone_without_git_lfs_is_named(folder):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / FILE).write_bytes(pointer)
    refused(folder, FILE, "is a pointer of Git LFS")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": FILE}}))
    refused(folder, FILE, "is a pointer of Git LFS")


def test_a_flipped_byte_of_a_header_is_refused_wherever_it_is(folder):
    data = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for place in [*range(8), *range(8, 8 + length, 97)]:
        for bit in (0x01, 0x80):
            (folder / FILE).write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            with pytest.raises(ValueError):
                opened(folder)
    (folder / FILE).write_bytes(data)
    opened(folder)


def test_a_header_that_names_a_tensor_twice_is_refused(folder):
    row = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = f'{{"a": {json.dumps(row)}, "a": {json.dumps(row)}}}'.encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    refused(folder, FILE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 2}, "q_proj.weight is [32, 32], expected [16, 32]"),
        ({"num_key_value_heads": 1}, "k_proj.weight is [16, 32], expected [8, 32]"),
        ({"num_hidden_layers": 3}, "missing (9): model.layers.2"),
        ({"num_hidden_layers": 1}, "unexpected (9): model.layers.1"),
        ({"vocab_size": 95}, "embed_tokens.weight is [96, 32], expected [95, 32]"),
    ],
)
def test_a_config_of_another_shape_than_the_tensors_is_refused_by_name(tmp_path, changes, message):
    refused(golden.write(tmp_path / "model", head_dim=8, **changes), message)


@pytest.mark.parametrize(("value", "name"), [
    (np.nan, "model.layers.1.mlp.up_proj.weight"), (-np.inf, "model.norm.weight"),
])  # fmt: skip
def test_weights_that_are_not_finite_are_refused_by_name(folder, value, name):
    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].flat[3] = value

    rewrite(folder, change)
    refused(folder, name, "holds 1 value that is NaN or infinite")


def test_weights_that_a_narrower_dtype_cannot_hold_are_refused(folder):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64) + 1e39

    rewrite(folder, change)
    refused(folder, "model.norm.weight holds 32 values that are NaN or infinite in float32", "published as float64")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_is_not_finite_is_counted_by_its_bits(dtype):
    largest = float(jnp.finfo(dtype).max)
    values = np.array([0, -0.0, 1, largest, -largest, np.nan, np.inf, -np.inf], jnp.dtype(dtype))
    assert num_nonfinite(values) == 3 and num_nonfinite(values[:5]) == 0


def test_rows_and_columns_are_read_by_ranges_and_in_pieces(folder, monkeypatch):
    want = load_file(folder / FILE)
    monkeypatch.setattr(tensors_module, "HELD_BYTES", 300)
    with open_tensors(folder) as tensors:
        for name, tensor in want.items():
            ranges = tuple(slice(n // 3, n - n // 4) for n in tensor.shape)
            np.testing.assert_array_equal(tensors.read(name, ranges), tensor[ranges])
            np.testing.assert_array_equal(tensors.read(name, tuple(slice(0, n) for n in tensor.shape)), tensor)


def test_a_folder_without_a_config_or_weights_is_refused(tmp_path, folder):
    refused(tmp_path, "has no config.json")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "it holds a PEFT adapter; Published.path is the folder of its base, Published.adapter = ")
    for name in ("config.json", "manifest.json", "metrics.jsonl"):
        (tmp_path / name).write_text("{}")
    refused(tmp_path, "it is a run of jrl. `jrl train CONFIG --run DIR --from")
    (folder / FILE).unlink()
    refused(folder, "has no weights")
    for text in ("[]", "{", "[" * 100_000):
        (folder / "config.json").write_text(text)
        refused(folder, "config.json")


def test_tensors_that_cannot_be_written_are_an_error_of_the_disk(tmp_path, monkeypatch):
    def full(*args):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensors_module, "save_file", full)
    with pytest.raises(OSError, match=r"could not write .*a\.safetensors: I/O error: No space left"):
        write_file(tmp_path / "a.safetensors", {"a": np.zeros(4, np.float32)})
