"""jrl under measurement. Started by `python -m benchmarks`; answers its questions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.child import peak_bytes, serve, timed
from benchmarks.shapes import Learning, ModelShape, Sampling
from jrl import config as gin
from jrl import loop
from jrl.device.placement import place_on_mesh
from jrl.device.sharding import batch_sharding, replicated
from jrl.experiment import TABLES, Config, config_classes
from jrl.learning.credit import Credit
from jrl.learning.learner import weights_of
from jrl.learning.step import learn_from_sampled, prepare
from jrl.models import decoder
from jrl.models.contract import init
from jrl.models.pretrained.published import export
from jrl.models.shape import Decoder
from jrl.plugins import load_parts
from jrl.rollout.collect import collect, draw
from jrl.rollout.prompts import TRAIN_STREAM, place_prompts
from jrl.rollout.sampler import params_on_device
from jrl.run import online, records
from jrl.run.batches import host_plans, plan_shardings
from jrl.run.bucket_run import RunFolder
from jrl.run.job import Job, open_job
from jrl.run.policy import root_key
from jrl.run.records import Progress
from jrl.run.trained import Trained, open_trained
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Example, Message, visit_uid
from jrl.types import Finish, Rollout


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
        max_bytes=5 * 10**9,
        companions=files,
        ids={"eos_token_id": end, "pad_token_id": pad, "bos_token_id": None},
    )


def _name(binding: str) -> str:
    """Returns what a binding binds."""
    return binding.partition("=")[0].strip()


def sampling_settings(lengths: str) -> tuple[str, ...]:
    """Returns what this machine wants: a CPU adds up an entry of many columns faster than the entries of one, and
    decodes a few rows faster than many, of which there are only a few in the end where lengths differ."""
    return ("Sampler.kv_layout='head_dim_major'", *(() if lengths == "full" else ("Sampler.max_batch_compactions=2",)))


OPENED: dict[str, tuple[Trained, Any]] = {}  # sampling case -> policy and the budget of its rows


def open_sampling(folder: str, case: list[Any], bindings: list[str]) -> None:
    """Prepares a sampling case, and runs it once."""
    case = Sampling(*case)
    completion = case.completion_length if case.cache is None else case.cache - case.prompt_length
    sampling_bindings = [
        f"Data.prompt_length={case.prompt_length}",
        f"Sampler.completion_length={completion}",
        f"Sampler.slots={case.slots}",
        f"Online.prompts={case.prompts}",
        f"Online.samples={case.samples}",
        *(setting for setting in sampling_settings(case.lengths) if _name(setting) not in map(_name, bindings)),
        *bindings,
    ]
    trained = open_trained(folder, sampling_bindings)
    budget = None
    if case.lengths != "full" or case.cache is not None:
        lengths = shapes.lengths(case)
        budget = jax.device_put(lengths, batch_sharding(trained.policy.mesh, 1))
    OPENED[case.name] = trained, budget
    sample(case, 0)


def sample(case: list[Any] | Sampling, seed: int) -> dict[str, Any]:
    """Runs a sampling call on texts that `seed` chooses. Returns its seconds and useful tokens."""
    case = Sampling(*case)
    trained, budget = OPENED[case.name]
    policy = trained.policy
    texts = shapes.prompts(case, policy.cfg.vocab_size, seed)
    everywhere, key = replicated(policy.mesh), root_key(policy)
    stream, version = (jax.device_put(x, everywhere) for x in (np.uint32(TRAIN_STREAM), np.int32(0)))
    sampling_params = params_on_device(policy.config.sampler, policy.mesh)

    def call() -> tuple[list[str], np.ndarray]:
        visits = [visit(i, text, seed, policy.tokenizer) for i, text in enumerate(texts)]
        prompts = place_prompts(visits, case.prompts, case.prompt_length, policy.tokenizer.pad_id, policy.mesh)
        rollout = policy.programs.stages[0].sample(
            trained.params, prompts, key, stream, version, sampling_params, None, budget
        )
        host = jax.device_get({"tokens": rollout.tokens, "action_mask": rollout.action_mask})
        ids = [row[sampled].tolist() for row, sampled in zip(host["tokens"], host["action_mask"])]
        return [policy.tokenizer.decode(completion) for completion in ids], host["action_mask"].sum(axis=1)

    seconds, (texts_out, drawn) = timed(call)
    if drawn.tolist() != shapes.lengths(case).tolist():
        raise ValueError(f"{case.name}: completions have {drawn.tolist()} tokens")
    return {"seconds": seconds, "tokens": int(drawn.sum()), "text": texts_out[0][:80]}


def visit(place: int, text: str, seed: int, tokenizer: Any) -> Visit:
    example = Example(id=f"{seed}-{place}", messages=(Message("user", text),), answer="", verifiers=(), info={})
    return Visit(example, visit_uid(example.id, 0), tuple(tokenizer.encode_prompt(example.messages)))


class Run:
    """A run of GRPO that is open in this process, and what it carries from step to step."""

    def __init__(self, job: Job, progress: Progress, case: Learning) -> None:
        self.job, self.progress, self.case = job, progress, case


OPEN: dict[str, Run] = {}  # learning case -> its run
HELD = contextlib.ExitStack()  # what those runs hold open, until the process ends


def settings(case: Learning) -> tuple[str, ...]:
    """Returns what this machine wants: unrolled layers compute faster on a CPU, and small micro-batches stay in its
    caches. A step computes a group's prompt once; an update alone is of whole sequences."""
    prefix, continuation = case.prompt_length - 1, case.completion_length + 1
    row = max(prefix, continuation)
    row *= -(-128 // row)  # as many of the longest as make 128 tokens
    rows = 1 + -(-case.samples // (row // continuation)) if case.lengths == "full" else 5  # and the prompt's
    apart = (
        "Learner.prefix_sharing='cross_row'",
        f"Learner.row_length={row}",
        f"Learner.micro_batch_tokens={rows * row}",
    )
    unshared = ("Learner.micro_batch_tokens=768",)
    learner = unshared if case.name == shapes.UPDATE.name else apart
    return ("Learner.layers='unrolled'", *learner, *sampling_settings(case.lengths), "Checkpoint.every=1000000")


def open_learning(folder: str, scratch: str, case: list[Any], bindings: list[str]) -> None:
    """Opens a run of GRPO from the published model, up to where its first step begins."""
    case = Learning(*case)
    place = Path(tempfile.mkdtemp(dir=scratch))
    vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    asked = Sampling("", 64 * case.prompts, 1, case.prompt_length)
    rows = [json.dumps({"prompt": text}) + "\n" for text in shapes.prompts(asked, vocab_size, 0)]
    (place / "prompts.jsonl").write_text("".join(rows))
    learning_bindings = [
        "Config.task=@Jsonl()",
        f"Jsonl.path={str(place / 'prompts.jsonl')!r}",
        "Jsonl.needs_answer=False",
        f"Data.prompt_length={case.prompt_length}",
        "Data.held_out_every=None",
        f"Sampler.completion_length={case.completion_length}",
        f"Sampler.slots={case.sequences}",
        "Config.stages=[@Online()]",
        "Online.objective=@GRPO()",
        "Config.model=@Published()",
        f"Published.path={folder!r}",
        "Config.tokenizer=@HuggingFace()",
        f"HuggingFace.path={folder!r}",
        "Scoring.verifiers=[@Regex()]",
        f"Regex.pattern={shapes.PATTERN!r}",
        f"AdamW.learning_rate={shapes.LEARNING_RATE}",
        "Online.steps=1000000",
        f"Online.prompts={case.prompts}",
        f"Online.samples={case.samples}",
        *(setting for setting in settings(case) if _name(setting) not in map(_name, bindings)),
        *bindings,
    ]
    config = gin.load(None, learning_bindings, Config, config_classes(TABLES))
    job = HELD.enter_context(open_job(config, load_parts(()), RunFolder(place / "run"), threading.Event()))
    if case.lengths != "full":
        job.stages = (with_lengths(job.stages[0], shapes.lengths(case)),)
    elif case.name != shapes.UPDATE.name:  # which draws nothing
        loop.precompile(job, 0)  # as a run does; its sampling program is told no lengths
    progress = loop.begin_stage(job, records.restore(job))
    OPEN[case.name] = Run(job, progress, case)


def with_lengths(stage: online.OnlineStage, lengths: np.ndarray) -> online.OnlineStage:
    """Returns the stage with a sampling program that is told the most tokens of every row, which a run leaves out."""
    sampler = stage.sampler
    budget = jax.device_put(lengths, batch_sharding(sampler.mesh, 1))
    with_budget = lambda *arguments: sampler.program(*arguments[:-1], budget)
    return dataclasses.replace(stage, sampler=dataclasses.replace(sampler, program=with_budget))


def step(case: list[Any], seed: int) -> dict[str, Any]:
    """Makes a whole step: draw, verify, learn, write down what happened. Returns its seconds and useful tokens."""
    del seed  # the run's own prompts follow each other
    run = OPEN[Learning(*case).name]

    def call() -> dict[str, Any]:
        with jax.transfer_guard("disallow"):
            run.progress, taken_step = loop.take_step(run.job, run.progress)
        run.job.done += 1
        jax.block_until_ready(run.progress)
        return records.emit(run.job, taken_step).metrics

    seconds, metrics = timed(call)
    lengths = shapes.lengths(run.case)
    if metrics["loss/tokens"] != lengths.sum():
        raise ValueError(f"{run.case.name}: {metrics['loss/tokens']} tokens were learned from, not {lengths.sum()}")
    return {"seconds": seconds, "tokens": int(lengths.sum()), "reward": metrics["reward/mean"]}


def parts(case: list[Any]) -> dict[str, float]:
    """Makes a step as `step` does, and waits for the device after each of its parts. Returns the seconds of each."""
    run = OPEN[Learning(*case).name]
    job, state = run.job, run.progress.state
    stage, ready = job.stages[0], jax.block_until_ready

    def scored() -> tuple[Any, Any]:
        submitted = online.send(stage, state, drawn)
        minibatches = online.pack_and_prepare(stage, state, drawn.rollout, submitted.host)
        return collect(submitted, stage.scorer, stage.sources, stage.sampler), minibatches

    policy = weights_of(state.models, "policy").params
    drawing, drawn = timed(lambda: ready(draw(stage.sampler, policy, state.models["policy"].version)))
    scoring, (batch, minibatches) = timed(lambda: ready(scored()))
    learned = (minibatches, batch.rollout, batch.scores)
    learning, (state, metrics, _) = timed(
        lambda: ready(
            learn_from_sampled(stage.programs, state, *learned, stage.arrays, role="policy", epochs=1, warms_up=False)
        )
    )
    run.progress = run.progress._replace(state=state)
    taken_step = records.Step(job.done + 1, stage.name, {**metrics, **batch.metrics}, batch)
    writing, _ = timed(lambda: (records.keep(job, taken_step), records.emit(job, taken_step)))
    job.done += 1
    return {"sampling": drawing, "verifying and packing": scoring, "update": learning, "writing": writing}


def update(case: list[Any], seed: int) -> dict[str, Any]:
    """Learns from a given batch: packing and one optimizer step. Returns its seconds, tokens, loss and the like."""
    run = OPEN[Learning(*case).name]
    job, stage = run.job, run.job.stages[0]
    given = shapes.batch(run.case, job.cfg.vocab_size, seed)
    place = lambda x: jax.device_put(x, batch_sharding(job.mesh, np.ndim(x)))
    lengths = given.prompt_length + given.lengths
    column = np.arange(given.tokens.shape[1])[None, :]
    mask = (column >= given.prompt_length) & (column < lengths[:, None])
    zeros = np.zeros(given.tokens.shape, np.float32)
    rollout = Rollout(
        tokens=place(given.tokens),
        length=place(lengths),
        action_mask=place(mask),
        sampler_logprobs=place(zeros),
        truncated_logprobs=None,
        support_size=None,
        finish=place(np.full(len(lengths), Finish.LENGTH, np.int8)),
        group=place(np.arange(len(lengths), dtype=np.int32) // run.case.samples),
        sample=place(np.arange(len(lengths), dtype=np.int32) % run.case.samples),
        version=place(np.where(mask, 0, -1).astype(np.int32)),
        turn=place(np.zeros(given.tokens.shape, np.int8)),
        weights_fingerprint=jnp.uint32(0),
    )
    advantages = place(np.where(mask, given.advantages[:, None], 0).astype(np.float32))
    programs, arrays = stage.programs, stage.arrays
    weights = stage.objective.weights(arrays.objective, rollout.action_mask, run.case.completion_length)
    credit = Credit(advantages, rollout.action_mask, weights, run.progress.state.objective, {})

    def call() -> dict[str, float]:
        plans = host_plans(stage.shape, 1, lengths, mask)
        (plan,) = place_on_mesh(plans, plan_shardings(plans, job.mesh))
        packed = programs.pack(rollout, plan, stage.temperature)
        minibatch = prepare(programs, run.progress.state, "policy", packed, plan)
        batch = programs.finish(minibatch.packed, minibatch.recomputed, plan, credit, arrays.objective)
        state, metrics = programs.update(run.progress.state, batch, arrays.objective, arrays.optimizer, arrays.router)
        run.progress = run.progress._replace(state=jax.block_until_ready(state))
        return jax.device_get(metrics)

    seconds, metrics = timed(call)
    return {
        "seconds": seconds,
        "tokens": int(lengths.sum()),
        "loss": float(metrics["loss"]),
        "gradient_norm": float(metrics["grad_norm"]),
        "logprobs": float(metrics["policy/logprob"]) * int(mask.sum()),
    }


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


if __name__ == "__main__":
    with HELD:
        serve(measure_limits, publish, open_sampling, sample, open_learning, step, parts, update, peak_bytes)
