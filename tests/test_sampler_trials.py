"""Long trials of the sampler: `pytest -m slow -s tests/test_sampler_trials.py`. They print what they measure."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from jrl.device.sharding import MeshShape, make_mesh
from jrl.learning import layout, learner, pack
from jrl.models import decoder
from jrl.ops.draw import race
from jrl.ops.keys import row_key, token_key
from jrl.ops.truncate import support_of_size
from jrl.rollout import sampler
from jrl.rollout.sampler import Sampler
from jrl.types import PromptBatch

pytestmark = pytest.mark.slow

CFG = decoder.Decoder(vocab_size=512, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=64)
STOP_IDS = tuple(range(0, 512, 40))
KEY = 21


def weights(cfg=CFG, seed=0, gain=4.0):
    params = drawn_params(decoder.spec(cfg), seed)
    return {**params, "final_norm": params["final_norm"] * gain}


def prompts(count, width, seed):
    rng = np.random.default_rng(seed)
    return PromptBatch(
        tokens=rng.integers(0, 512, (count, width)).astype(np.int32),
        length=rng.integers(1, width + 1, count).astype(np.int32),
        uid=rng.integers(0, 2**32, (count, 2), dtype=np.uint32),
    )


def run(batch, config, params, mesh=None, cfg=CFG, samples=8, **rest):
    out = sampler.sample(
        sampler.BehaviorPolicy(decoder.MODEL, cfg, params, version=0), batch, jax.random.key(KEY), stream=0,
        config=config, samples=samples, stop=sampler.StopRules(STOP_IDS, 0), mesh=mesh or one_device(), **rest,
    )  # fmt: skip
    return jax.tree.map(np.asarray, out)


def take(batch, index):
    return jax.tree.map(lambda x: x[np.asarray(index)], batch)


def one_device():
    return make_mesh(MeshShape(), jax.devices()[:1])


@functools.partial(jax.jit, static_argnames="cfg")
def plain_forward(params, tokens, cfg):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = decoder.forward(params, tokens, positions, None, cfg)
    return decoder.unembed(params, hidden, cfg)


def scores(params, tokens, cfg=CFG):
    """Logits [N, T, V], moved to the token they speak about."""
    with jax.set_mesh(one_device()):
        logits = np.asarray(plain_forward(params, tokens, cfg))
    return np.concatenate([np.zeros_like(logits[:, :1]), logits[:, :-1]], axis=1)


LEARNER = layout.Learner(row_length=32, micro_batch_tokens=4 * 32, logprob_chunk=7)


@functools.partial(jax.jit, static_argnames="cfg")
def learner_forward(params, out, plan, temperature, cfg):
    batch = pack.pack_rollout(out, plan, temperature)
    values = learner.logprobs(
        learner.Weights(params, {}), batch, model=decoder.MODEL, cfg=cfg, chunk=LEARNER.logprob_chunk
    )
    return pack.unpack(values, plan.source, out.tokens.shape[1], out.tokens.shape[0])


def packed_logprobs(params, out, lengths, cfg, temperature):
    """Log-probs [N, T] of the learner's own path: packed into rows of 32, two micro-batches or more, chunks of 7."""
    shape = layout.packed_shape(LEARNER, *out.tokens.shape, 1)
    plan = pack.plan(lengths, shape, 0, 1)
    assert plan.num_real >= 2
    with jax.set_mesh(one_device()):
        return np.asarray(learner_forward(params, out, plan, np.float32(temperature), cfg), np.float64)


def log_softmax(logits, temperature):
    wide = logits.astype(np.float64) / temperature
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def margin(params, batch, row, tokens, column, samples, temperature):
    """Gap between the two best scores of the closer race of the draw at `column`, over its allowance."""
    scaled = scores(params, tokens[None])[0, column] / np.float32(temperature)
    uid = batch.uid[row // samples]
    key = token_key(row_key(jax.random.key(KEY), 0, jnp.asarray(uid), row % samples), column)
    outer, inner, _ = race(key, jnp.asarray(scaled))
    gaps = [float(np.diff(np.sort(np.asarray(x))[-2:])[0]) for x in (outer, inner)]
    return min(gaps) / (4e-6 * max(1.0, np.abs(scaled).max()))


def differing(one, two):
    """(row, column) where rows part for the first time."""
    parts = np.argmax(one != two, axis=1)
    return [(row, int(parts[row])) for row in np.flatnonzero((one != two).any(axis=1))]


def test_2000_sequences_are_the_same_tokens_in_every_layout(trials):
    params, batch, samples, temperature = weights(), prompts(256, 8, 0), 8, 0.9
    config = Sampler(completion_length=16, slots=32, temperature=temperature)
    base = run(batch, config, params)
    total = trials(len(base.tokens))

    def report(name, tokens, must_hold=True):
        parts = differing(base.tokens, tokens)
        ratios = [margin(params, batch, row, base.tokens[row], column, samples, temperature) for row, column in parts]
        worst = max(ratios, default=0)
        print(f"{name}: {len(parts)} of {total} sequences differ; largest margin / allowance {worst:.2f}")
        if must_hold:
            assert len(parts) <= 2 and worst <= 1

    alone = np.zeros_like(base.tokens)
    for row in range(total):
        prompt = row // samples
        only = (np.arange(samples) == row % samples) * 16
        one = run(take(batch, [prompt]), config, params, budget=only.astype(np.int32))
        alone[row] = one.tokens[row % samples]
    report("alone", alone)
    for slots in (1, 7, 2048):
        report(f"{slots} slots", run(batch, dataclasses.replace(config, slots=slots), params).tokens)
    report("8 devices, data", run(batch, config, params, make_mesh(MeshShape(data=8))).tokens)
    report("8 devices, data and fsdp", run(batch, config, params, make_mesh(MeshShape(data=2, fsdp=4))).tokens)
    tensor = make_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    report("8 devices, tensor = 2", run(batch, config, params, tensor).tokens, must_hold=False)
    half = dataclasses.replace(CFG, dtype="bfloat16")
    narrow = run(batch, config, params, cfg=half)
    other = run(batch, dataclasses.replace(config, slots=7), params, cfg=half)
    print(f"bfloat16, 32 against 7 slots: {len(differing(narrow.tokens, other.tokens))} of {total} sequences differ")

    for seed in range(4):
        order = np.random.default_rng(seed).permutation(256)
        shuffled = run(take(batch, order), config, params)
        rows = (samples * order[:, None] + np.arange(samples)).ravel()
        np.testing.assert_array_equal(base.tokens[rows], shuffled.tokens)
        np.testing.assert_array_equal(base.sampler_logprobs[rows], shuffled.sampler_logprobs)
    print("4 permutations of the prompts: tokens and log-probs bitwise equal")


TRUNCATIONS = [{}, {"top_k"}, {"top_p"}, {"min_p"}, {"top_k", "top_p", "min_p"}]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_2000_random_cases_agree_with_the_learner_and_a_plain_forward(dtype, trials):
    with jax.enable_x64(dtype == "float64"):
        param_dtype = "float64" if dtype == "float64" else "float32"
        cfg = dataclasses.replace(CFG, dtype=dtype, param_dtype=param_dtype)
        cases, worst, worst_packed, worst_truncated, errors, entropies, first, single = 0, 0.0, 0.0, 0.0, [], [], 0, 0
        for truncations in TRUNCATIONS:
            for trial in range(25):
                rng = np.random.default_rng([trial, len(truncations)])
                params = weights(cfg, seed=trial % 5)
                temperature = float(np.float32(rng.choice([0.5, 0.7, 1.0, 1.0, 1.3])))
                values = dict(
                    top_k=int(rng.integers(1, 100)), top_p=float(rng.uniform(0.3, 1)), min_p=float(rng.uniform(0, 0.3))
                )
                batch = prompts(8, 6, trial)
                config = Sampler(
                    completion_length=12, slots=8, temperature=temperature, **{n: values[n] for n in truncations}
                )
                out = run(batch, config, params, cfg=cfg, samples=2)
                logits = scores(params, out.tokens, cfg)
                full = log_softmax(logits, temperature)
                chosen = np.take_along_axis(full, out.tokens[..., None], -1)[..., 0]
                mask = out.action_mask
                scale = max(1.0, np.abs(logits[mask]).max() / temperature)
                worst = max(worst, np.abs(out.sampler_logprobs - chosen)[mask].max() / scale)
                lengths = np.repeat(batch.length, 2) + mask.sum(1)
                packed = packed_logprobs(params, out, lengths, cfg, temperature)
                difference = np.abs(out.sampler_logprobs - packed)[mask]
                worst_packed = max(worst_packed, difference.max() / scale)
                errors.append(difference)
                if truncations:
                    keep = np.asarray(support_of_size(jnp.asarray(logits), jnp.asarray(out.support_size)[..., None]))
                    # The chosen token is not looked up in it: at the edge of the support two tokens may trade places.
                    lost = np.log(np.where(keep | ~mask[..., None], np.exp(full), 0).sum(-1))
                    truncated = np.abs(out.truncated_logprobs - (chosen - lost))[mask]
                    worst_truncated = max(worst_truncated, truncated.max() / scale)
                entropies.append(-(np.exp(full) * full).sum(-1)[mask].mean())
                cases += len(out.tokens)
                first += int((mask.sum(1) == 1).sum())
                single += int((batch.length == 1).sum()) * 2
        error = np.exp(np.concatenate(errors).mean())
        trials(cases)
        print(
            f"{dtype}: {cases} cases ({first} stop at their first token, {single} prompts of length 1), mean entropy "
            f"{np.mean(entropies):.2f} nats; largest difference / scale to the learner {worst_packed:.2e}, to a plain "
            f"forward {worst:.2e}, truncated {worst_truncated:.2e}; mean multiplicative error {error:.6f}"
        )
        assert cases == 2000 and np.mean(entropies) < 2 and first and single
        bar = {"float32": 2e-6, "float64": 1e-12, "bfloat16": np.inf}[dtype]
        assert worst <= bar and worst_packed <= bar and worst_truncated <= bar
        assert error <= 1.01


TEMPERATURE = 0.8
LAYOUT = Sampler(completion_length=12, slots=8, temperature=TEMPERATURE, top_p=0.7)


def chosen(params, tokens, temperature=TEMPERATURE, cfg=CFG, of=None):
    """Log-probs [N, T] of `of` (None: the tokens themselves) after the tokens before them."""
    full = log_softmax(scores(params, tokens, cfg), temperature)
    return np.take_along_axis(full, (tokens if of is None else of)[..., None], -1)[..., 0]


def another(tokens, rows, columns, by=1):
    """Returns tokens of which one a row is another."""
    tokens = tokens.copy()
    tokens[rows, columns] = (tokens[rows, columns] + by) % 512
    return tokens


def changed(params, name, change):
    """Returns parameters with one leaf changed."""
    return jax.tree_util.tree_map_with_path(lambda p, x: change(x) if name in jax.tree_util.keystr(p) else x, params)


def neighbors_seen(params, tokens):
    """Log-probs where every second row is packed behind the one before it, which it attends to."""
    both = np.concatenate([tokens[0::2], tokens[1::2]], axis=1)
    return np.stack([chosen(params, tokens)[0::2], chosen(params, both)[:, tokens.shape[1] :]], 1).reshape(tokens.shape)


# What a learner may get wrong of the sampler's draws. Each is given (params, out, prompt lengths of the rows).
SHAPES = {
    "the base of the rotations": dict(rope_theta=9_900.0),
    "the norms' epsilon": dict(norm_eps=1e-4),
    "the scale of queries": dict(query_scale=0.36),
    "a window": dict(window=6),
    "a layer without rotation": dict(rotary_layers=(True, False)),
    "a cap on attention": dict(attention_cap=20.0),
    "a cap on logits": dict(logit_cap=60.0),
    "another activation": dict(activation="gelu_tanh"),
    "a scale of the embedding": dict(embed_scale=1.001),
    "bfloat16": dict(dtype="bfloat16"),
}
FAULTS = {
    "no temperature": lambda params, out, lengths: chosen(params, out.tokens, 1.0),
    "another temperature": lambda params, out, lengths: chosen(params, out.tokens, 0.81),
    "a column early": lambda params, out, lengths: np.roll(chosen(params, out.tokens), 1, axis=1),
    "a column late": lambda params, out, lengths: np.roll(chosen(params, out.tokens), -1, axis=1),
    "the token itself is seen": lambda params, out, lengths: chosen(params, np.roll(out.tokens, -1, 1), of=out.tokens),
    "the next sample's": lambda params, out, lengths: np.roll(chosen(params, out.tokens), 1, axis=0),
    "samples before prompts": lambda params, out, lengths: chosen(params, out.tokens).reshape(8, 2, -1).swapaxes(
        0, 1).reshape(16, -1),
    "the first token lost": lambda params, out, lengths: chosen(
        params, another(out.tokens, np.arange(16), 0), of=out.tokens),
    "the prompt's last token lost": lambda params, out, lengths: chosen(
        params, another(out.tokens, np.arange(16), lengths - 1), of=out.tokens),
    "a stale key": lambda params, out, lengths: chosen(
        params, another(out.tokens, np.arange(16), lengths // 2, by=7), of=out.tokens),
    "end tokens left out": lambda params, out, lengths: np.where(
        np.isin(out.tokens, STOP_IDS), 0.0, chosen(params, out.tokens)),
    "the truncated distribution": lambda params, out, lengths: out.truncated_logprobs,
    "bits for nats": lambda params, out, lengths: chosen(params, out.tokens) / np.log(2),
    "float16": lambda params, out, lengths: chosen(params, out.tokens).astype(np.float16),
    "the row before it is seen": lambda params, out, lengths: neighbors_seen(params, out.tokens),
    "a norm of one step before": lambda params, out, lengths: chosen(
        changed(params, "final_norm", lambda x: x * 0.999), out.tokens),
    "one matrix of one step before": lambda params, out, lengths: chosen(
        changed(params, "down", lambda x: x * 0.999), out.tokens),
    "rounded weights": lambda params, out, lengths: chosen(
        changed(params, "", lambda x: x.astype(jnp.bfloat16).astype(x.dtype)), out.tokens),
} | {
    name: lambda params, out, lengths, change=change: chosen(
        params, out.tokens, cfg=dataclasses.replace(CFG, **change)) for name, change in SHAPES.items()
}  # fmt: skip


def test_planted_disagreements_are_caught(trials):
    params, batch = weights(), prompts(8, 6, 0)
    out = run(batch, LAYOUT, params, samples=2)
    lengths = np.repeat(batch.length, 2)
    assert np.isin(out.tokens[out.action_mask], STOP_IDS).any()
    allowed = 2e-6 * max(1.0, np.abs(scores(params, out.tokens)[out.action_mask]).max() / TEMPERATURE)
    worst = lambda given: np.abs(out.sampler_logprobs - given)[out.action_mask].max()
    assert worst(chosen(params, out.tokens)) <= allowed
    trials(len(FAULTS))
    assert [name for name, fault in FAULTS.items() if not worst(fault(params, out, lengths)) > allowed] == []
