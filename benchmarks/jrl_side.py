"""jrl under measurement. Started by `python -m benchmarks`; answers its questions."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.child import peak_bytes, serve, timed
from benchmarks.shapes import ModelShape, Sampling
from jrl import programs
from jrl.checkpoints.published import export
from jrl.collect import completion_text
from jrl.data.prompts import Visit
from jrl.example import Example, Message, visit_uid
from jrl.models import decoder
from jrl.models.contract import init
from jrl.models.decoder import Decoder
from jrl.policy import Trained, open_trained
from jrl.sharding import batch_sharding, replicated


def decoder_of(shape: ModelShape) -> Decoder:
    return Decoder(
        vocab_size=shape.vocab_size,
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        mlp_width=shape.mlp_width,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm="head",
        tied=True,
        dtype=shape.dtype,
    )


def weights(shape: ModelShape) -> dict[str, Any]:
    """Returns random weights under which END and PAD are never drawn.

    Column 0 of the embedding is the same for all other tokens, and no layer adds to it: it stays positive in every
    hidden state, and the two rows of the head that are negative there get logits of about -70. To the other logits
    it adds one and the same number.
    """
    params = init(jax.random.key(0), decoder.spec(decoder_of(shape)))
    embed = params["embed"].at[:, 0].set(0.5)
    for token in shapes.special_ids(shape.vocab_size):
        embed = embed.at[token].set(0).at[token, 0].set(-60)
    layers = dict(params["layers"])
    for name in ("o", "down"):
        layers[name] = layers[name].at[..., 0].set(0)
    return {**params, "embed": embed, "layers": layers}


def publish(folder: str, shape: dict[str, Any]) -> None:
    """Writes the model that every system loads: config.json, safetensors and the tokenizer, in Qwen3's form."""
    shutil.rmtree(folder, ignore_errors=True)
    shape = ModelShape(**shape)
    files = {name: text.encode() for name, text in shapes.tokenizer_files(shape.vocab_size).items()}
    end, pad = shapes.special_ids(shape.vocab_size)
    export(
        weights(shape),
        decoder_of(shape),
        folder,
        dtype=shape.dtype,
        most_bytes=5 * 10**9,
        companions=files,
        ids={"eos_token_id": end, "pad_token_id": pad, "bos_token_id": None},
    )


OPENED: dict[str, tuple[Trained, Any]] = {}  # sampling case -> policy and the budget of its rows


def open_sampling(folder: str, case: list[Any], bindings: list[str]) -> None:
    """Prepares a sampling case, and runs it once."""
    case = Sampling(*case)
    completion = case.completion_length if case.cache is None else case.cache - case.prompt_length
    said = [
        f"Data.prompt_length={case.prompt_length}",
        f"Sampler.completion_length={completion}",
        f"Sampler.slots={case.slots}",
        f"Loop.prompts={case.prompts}",
        f"Loop.samples={case.samples}",
        *bindings,
    ]
    trained = open_trained(folder, said)
    budget = None
    if case.lengths != "full" or case.cache is not None:
        wanted = shapes.lengths(case)
        budget = jax.device_put(wanted, batch_sharding(trained.policy.mesh, 1))
    OPENED[case.name] = trained, budget
    sample(case, 0)


def sample(case: list[Any] | Sampling, seed: int) -> dict[str, Any]:
    """Runs a sampling call on texts that `seed` chooses. Returns its seconds and useful tokens."""
    case = Sampling(*case)
    trained, budget = OPENED[case.name]
    policy = trained.policy
    texts = shapes.prompts(case, policy.cfg.vocab_size, seed)
    everywhere = replicated(policy.mesh)
    stream, version = (jax.device_put(x, everywhere) for x in (np.uint32(programs.TRAIN_STREAM), np.int32(0)))
    law = programs.law(policy.config.sampler, policy.mesh)
    rows = range(case.prompts * case.samples)

    def call() -> tuple[list[str], np.ndarray]:
        visits = [visit(i, text, seed, policy.tokenizer) for i, text in enumerate(texts)]
        prompts = programs.place_prompts(visits, case.prompts, case.prompt_length, policy.tokenizer.pad_id, policy.mesh)
        rollout = policy.programs.sample(trained.params, prompts, trained.key, stream, version, law, None, budget)
        host = jax.device_get({"tokens": rollout.tokens, "action_mask": rollout.action_mask})
        return [completion_text(policy.tokenizer, host, row) for row in rows], host["action_mask"].sum(axis=1)

    seconds, (said, drawn) = timed(call)
    if drawn.tolist() != shapes.lengths(case).tolist():
        raise ValueError(f"{case.name}: completions have {drawn.tolist()} tokens")
    return {"seconds": seconds, "tokens": int(drawn.sum()), "text": said[0][:80]}


def visit(place: int, text: str, seed: int, tokenizer: Any) -> Visit:
    example = Example(id=f"{seed}-{place}", messages=(Message("user", text),), answer="", verifiers=(), info={})
    return Visit(example, visit_uid(example.id, 0), tuple(tokenizer.encode_prompt(example.messages)))


def measure_limits(dtype: str) -> dict[str, float]:
    """Returns the fields of `Limits`: the best of several runs each, on one device with all its cores."""
    on_cpu = jax.default_backend() == "cpu"
    size = 2048 if on_cpu else 8192
    factor = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(jnp.matmul)
    matmul = 2 * size**3 / best(lambda: product(factor, factor).block_until_ready())
    if on_cpu:
        # XLA reduces on the CPU more slowly than memory allows; numpy's kernels, one thread a core, do not.
        count, cores = 1 << 26, os.cpu_count() or 1
        source, target = np.ones((cores, count // cores), np.float32), np.zeros((cores, count // cores), np.float32)
        with ThreadPoolExecutor(cores) as pool:
            read = source.nbytes / best(lambda: list(pool.map(lambda row: np.dot(row, row), source)))
            copy = 2 * source.nbytes / best(lambda: list(pool.map(np.copyto, target, source)))
    else:
        source = jnp.ones(1 << 29, jnp.float32)
        total, double = jax.jit(jnp.sum), jax.jit(lambda x: x + 1)
        read = source.nbytes / best(lambda: total(source).block_until_ready())
        copy = 2 * source.nbytes / best(lambda: double(source).block_until_ready())
    return {"matmul": matmul, "read": read, "copy": copy}


def best(call: Any, repeats: int = 10) -> float:
    """Returns the least seconds of `call`, after it has run once."""
    call()
    return min(timed(call)[0] for _ in range(repeats))


FUNCTIONS = {
    "measure_limits": measure_limits,
    "publish": publish,
    "open_sampling": open_sampling,
    "sample": sample,
    "peak_bytes": peak_bytes,
}

if __name__ == "__main__":
    serve(FUNCTIONS)
