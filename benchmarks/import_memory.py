"""Peak host memory of reading a published model onto a mesh of virtual CPU devices, which is host memory too.

    python -m benchmarks.import_memory                        2 GB of bfloat16 on 8 devices, a minute
    python -m benchmarks.import_memory --gigabytes 1 --devices 4

Writes a random Qwen3-shaped folder of that size into a scratch folder, reads it in a process of its own, and prints one
JSON object: the model's bytes, the PSS of that process before and at its peak during the import (sampled every 50 ms),
the bytes of the parameters afterwards, and the seconds. The bar: all of the peak is at most the model and 1 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CHILD = "--child"
BLOCK = 64 << 20


def write_model(folder: Path, gigabytes: float) -> int:
    """Writes a Qwen3 of about `gigabytes` in bfloat16, tied, 8 layers to a file. Returns its bytes. The values repeat a
    block of random ones."""
    import numpy as np

    from jrl.models.pretrained.published import Published, decoder_of, plans

    shape = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=32768, hidden_size=2048,
                 intermediate_size=6144, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=8,
                 head_dim=128, tie_word_embeddings=True, rope_theta=1e6)  # fmt: skip
    layers = 1
    while True:
        (folder / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": layers}))
        family, cfg = decoder_of(Published(path=str(folder)))
        due = plans(family, cfg)
        sizes = {name: 2 * int(np.prod(plan.shape)) for name, plan in due.items()}
        if sum(sizes.values()) >= gigabytes * 1e9:
            break
        layers += 1
    block = np.random.default_rng(0).integers(0, 1 << 15, BLOCK // 2, np.uint16)
    block = (block & 0x3FFF).tobytes()  # below 2: no infinity, no NaN
    files: dict[str, list[str]] = {}
    for name in due:
        part = name.split(".")[2] if name.startswith("model.layers.") else "0"
        files.setdefault(f"model-{int(part) // 8 + 1:05d}.safetensors", []).append(name)
    for file, names in files.items():
        header, at = {}, 0
        for name in names:
            header[name] = {"dtype": "BF16", "shape": list(due[name].shape), "data_offsets": [at, at + sizes[name]]}
            at += sizes[name]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for start in range(0, at, BLOCK):
                out.write(block[: min(BLOCK, at - start)])
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(sizes.values())


def read_model(folder: str, fsdp: int) -> dict[str, float]:
    """Reads the folder over `fsdp` devices, and returns what it took."""
    import jax

    from jrl.device.sharding import MeshShape, make_mesh
    from jrl.models.pretrained.published import Published, load
    from jrl.run.report.memory import tree_pss_bytes
    from jrl.run.report.text import bar

    mesh = make_mesh(MeshShape(fsdp=fsdp))
    jax.block_until_ready(jax.device_put(1.0))
    before, peak, done = tree_pss_bytes(os.getpid()), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, tree_pss_bytes(os.getpid()))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    show = lambda now, total: print(f"\rreading weights {bar(now, total)}", end="", file=sys.stderr, flush=True)
    params = load(Published(path=folder, dtype="bfloat16", param_dtype="bfloat16"), mesh, show)
    jax.block_until_ready(params)
    seconds = time.monotonic() - start
    done.set()
    watcher.join()
    print(file=sys.stderr)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"before": before, "peak": peak, "params": held, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the model, in bfloat16 (2)")
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices, all along fsdp (8)")
    parser.add_argument(CHILD, dest="child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(read_model(args.child, args.devices)))
        return
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": str(max(16, 2 * args.devices))}
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        size = write_model(Path(scratch), args.gigabytes)
        command = [sys.executable, "-m", "benchmarks.import_memory", CHILD, scratch, "--devices", str(args.devices)]
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    result = json.loads(output)
    above = result["peak"] - size
    print(json.dumps({"model": size, **result, "above_model": above, "within_1_gb": above <= 1e9}))


if __name__ == "__main__":
    main()
