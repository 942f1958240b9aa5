"""Tunix under measurement: its own sampler and its own GRPO learner. Runs in its own environment.

Started by `python -m benchmarks`; answers its questions. Its settings are those of its examples, where they do not
cost it speed: no reference model, no log-probs from the sampler, the whole batch in one micro-batch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner, TrainExample
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks import shapes
from benchmarks.child import peak_bytes, serve, timed
from benchmarks.shapes import Learning, Sampling

MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def load(folder: str) -> tuple[qwen3.Qwen3, Any]:
    """Returns model and tokenizer of a published folder."""
    published = json.loads((Path(folder) / "config.json").read_text())
    dtype = jnp.dtype(published["torch_dtype"])
    config = qwen3.ModelConfig(
        num_layers=published["num_hidden_layers"],
        vocab_size=published["vocab_size"],
        embed_dim=published["hidden_size"],
        hidden_dim=published["intermediate_size"],
        num_heads=published["num_attention_heads"],
        head_dim=published["head_dim"],
        num_kv_heads=published["num_key_value_heads"],
        rope_theta=1_000_000,
        norm_eps=published["rms_norm_eps"],
        use_tied_embedding=True,
        dtype=dtype,
        param_dtype=dtype,
    )
    model = qwen3_params.create_model_from_safe_tensors(folder, config, MESH, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(folder)


def with_lengths(sampler: Sampler, prompt_length: int, ends: list[int]) -> None:
    """Makes a sampler end when the longest row of its batch is done, and puts END at the end of shorter rows.

    It does to the buffer what it would find there had the rows ended by themselves: its loop goes on until all of them
    are done, and computes all of them in every step. `ends` is read at every call: tokens of each row, END included.
    """
    decode = sampler._compiled_decode_fn

    def decode_lengths(params: Any, state: Any) -> Any:
        longest = max(ends)
        state = decode(params, dataclasses.replace(state, total_sampling_steps=prompt_length + longest))
        rows, last = np.arange(len(ends)), prompt_length + np.array(ends) - 1
        short = np.array(ends) < state.token_buffer.shape[1] - prompt_length
        end = jnp.where(short, sampler.eos_ids[0], state.token_buffer[rows, last])
        return dataclasses.replace(state, token_buffer=state.token_buffer.at[rows, last].set(end))

    sampler._compiled_decode_fn = decode_lengths


LOADED: dict[str, Any] = {}  # folder -> model and tokenizer
OPENED: dict[str, tuple[Sampler, list[int]]] = {}  # sampling case -> its sampler, and the ends of the batch under way


def open_sampling(folder: str, case: list[Any]) -> None:
    """Prepares a sampling case, and runs it once."""
    case = Sampling(*case)
    if folder not in LOADED:
        LOADED[folder] = load(folder)
    model, tokenizer = LOADED[folder]
    cache = case.cache or case.prompt_length + case.completion_length
    sizes = CacheConfig(cache, model.config.num_layers, model.config.num_kv_heads, model.config.head_dim)
    sampler, ends = Sampler(model, tokenizer, sizes), []
    with_lengths(sampler, case.prompt_length, ends)
    OPENED[case.name] = sampler, ends
    sample(case, 0)


def sample(case: list[Any] | Sampling, seed: int) -> dict[str, Any]:
    """Runs a sampling call on texts that `seed` chooses, `slots` rows at a time. Returns seconds and useful tokens."""
    case = Sampling(*case)
    sampler, ends = OPENED[case.name]
    texts = [text for text in shapes.prompts(case, sampler.transformer.config.vocab_size, seed)
             for _ in range(case.samples)]  # fmt: skip
    lengths = shapes.lengths(case)

    def call() -> list[str]:
        completions = []
        for first in range(0, len(texts), case.slots):
            batch = slice(first, first + case.slots)
            ends[:] = lengths[batch].tolist()
            out = sampler(
                texts[batch],
                max_generation_steps=case.completion_length,
                max_prompt_length=case.prompt_length,
                temperature=1.0,
                top_p=1.0,
                seed=seed + first,
            )
            completions += out.text
        return completions

    seconds, completions = timed(call)
    return {"seconds": seconds, "tokens": int(lengths.sum()), "text": completions[0][:80]}


OPEN: dict[str, tuple[GRPOLearner, Learning, Any]] = {}  # learning case -> its learner, and the texts still to come


def open_learning(folder: str, scratch: str, case: list[Any]) -> None:
    """Opens a learner on the published model, up to where its first step begins."""
    case = Learning(*case)
    model, tokenizer = load(folder)
    rollout = RolloutConfig(
        max_tokens_to_generate=case.completion_length,
        max_prompt_length=case.prompt_length,
        kv_cache_size=case.prompt_length + case.completion_length,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
    )
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(shapes.LEARNING_RATE, 0.9, 0.95)),
        mini_batch_size=case.prompts,
        train_micro_batch_size=case.prompts,
        max_steps=10**9,
        eval_every_n_steps=10**9,
    )
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=model,
        reference=None,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: MESH for role in roles},
            rollout_engine="vanilla",
            training_config=training,
            rollout_config=rollout,
        ),
    )
    cluster.close = lambda: None  # `train` is called once a step, and would close it at the end of the first
    learner = GRPOLearner(
        cluster, GRPOConfig(num_generations=case.samples, num_iterations=1, beta=0.0, epsilon=0.2), reward
    )
    if case.lengths != "full":
        with_lengths(cluster.rollout._sampler, case.prompt_length, shapes.lengths(case).tolist())
    texts = shapes.prompts(Sampling("", 64 * case.prompts, 1, case.prompt_length), model.config.vocab_size, 0)
    OPEN[case.name] = learner, case, iter(texts)


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(re.fullmatch(shapes.PATTERN, text, flags=re.DOTALL) is not None) for text in completions]


def step(case: list[Any], seed: int) -> dict[str, Any]:
    """Makes a whole step with the learner's own loop. Returns its seconds and useful tokens."""
    del seed
    learner, case, texts = OPEN[Learning(*case).name]
    batch = {"prompts": np.array([next(texts) for _ in range(case.prompts)])}  # a list would be taken apart

    def call() -> None:
        learner.train([batch])
        jax.block_until_ready(nnx.state(learner.rl_cluster.actor_trainer.model))

    with MESH:
        seconds, _ = timed(call)
    return {"seconds": seconds, "tokens": int(shapes.lengths(case).sum())}


def update(case: list[Any], seed: int) -> dict[str, Any]:
    """Learns from a given batch with the trainer's own compiled step. Returns seconds, tokens, loss and the like."""
    learner, case, _ = OPEN[Learning(*case).name]
    trainer, pad = learner.rl_cluster.actor_trainer, learner.rl_cluster.rollout.pad_id()
    given = shapes.batch(case, trainer.model.config.vocab_size, seed)
    prompt, completion = np.split(given.tokens, [given.prompt_length], axis=1)
    mask = np.arange(completion.shape[1])[None, :] < given.lengths[:, None]
    example = TrainExample(
        prompt_ids=jnp.array(prompt),
        prompt_mask=jnp.ones(prompt.shape, bool),
        completion_ids=jnp.array(np.where(mask, completion, pad)),
        completion_mask=jnp.array(mask),
        ref_per_token_logps=None,
        advantages=jnp.array(given.advantages),
        old_per_token_logps=None,
    )
    logprobs = None
    if seed == 0:  # asked once, before the timed runs
        graph, weights = nnx.split(trainer.model)
        values = common.compute_per_token_logps(
            graph, weights, prompt_tokens=example.prompt_ids, completion_tokens=example.completion_ids,
            pad_id=pad, eos_id=learner.rl_cluster.rollout.eos_id(), stop_gradient=True, return_logits=False,
        )  # fmt: skip
        values = values[0] if isinstance(values, tuple) else values
        logprobs = float((np.asarray(values) * mask).sum())

    def call() -> tuple[Any, Any]:
        train_step, _ = trainer.jit_train_and_eval_step(False, True)
        loss, _, norm = train_step(example)
        jax.block_until_ready(nnx.state(trainer.model))
        return loss, norm

    with MESH:
        seconds, (loss, norm) = timed(call)
    tokens = int((given.prompt_length + given.lengths).sum())
    return {"seconds": seconds, "tokens": tokens, "loss": float(loss), "gradient_norm": float(norm),
            "logprobs": logprobs}  # fmt: skip


if __name__ == "__main__":
    serve(open_sampling, sample, open_learning, step, update, peak_bytes)
