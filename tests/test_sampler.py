"""The sampler: a sequence is the same wherever it is drawn, and its log-probs are those of a plain forward."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from jrl.device.program_cache import ProgramCache
from jrl.device.sharding import TRAIN, MeshShape, batch_sharding, make_mesh, replicated, shardings
from jrl.models import decoder
from jrl.models.attention.linear import Linear
from jrl.models.contract import abstract, axes
from jrl.models.shape import FullHeads
from jrl.ops.truncate import support_of_size
from jrl.rollout import sampler, stop_strings
from jrl.rollout.sampler import Sampler
from jrl.types import Finish, PromptBatch

CFG = decoder.Decoder(vocab_size=96, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=48)
STOP_IDS = (3, 7, 8, 21, 40, 41, 60, 77, 90)
PAD = 95
WIDTH = 5  # of prompts
BASE = Sampler(completion_length=9, slots=5)  # most tests share its program: compiling is what they cost
LINEAR = dict(linear=Linear(key_heads=2, value_heads=2, key_dim=4, value_dim=4, layers=(True, False)))
FIELDS = ("tokens", "length", "action_mask", "sampler_logprobs", "finish", "version")


@functools.cache
def weights(cfg=CFG, seed=0):
    """Random weights whose policy is far from uniform (about 2 nats). Norms inside stay 1: attention scores scaled up
    make a net that amplifies roundings a hundred times, and then nothing could be compared."""
    params = drawn_params(decoder.spec(cfg), seed)
    return {**params, "final_norm": params["final_norm"] * 2}


def prompts(count=8, seed=0, lengths=None):
    rng = np.random.default_rng(seed)
    return PromptBatch(
        tokens=rng.integers(0, 95, (count, WIDTH)).astype(np.int32),
        length=(rng.integers(1, WIDTH + 1, count) if lengths is None else np.asarray(lengths)).astype(np.int32),
        uid=rng.integers(0, 2**32, (count, 2), dtype=np.uint32),
    )


def one_device():
    return make_mesh(MeshShape(), jax.devices()[:1])


def run(batch, config, params=None, mesh=None, cfg=CFG, samples=3, **rest):
    params = weights(cfg) if params is None else params
    out = sampler.sample(
        sampler.BehaviorPolicy(decoder.MODEL, cfg, params, rest.pop("version", 4)),
        batch,
        rest.pop("key", jax.random.key(11)),
        stream=rest.pop("stream", 0),
        config=config,
        samples=samples,
        stop=sampler.StopRules(rest.pop("stop_ids", STOP_IDS), PAD, rest.pop("stop_table", None)),
        mesh=mesh or one_device(),
        **rest,
    )
    return jax.tree.map(np.asarray, out)


@functools.partial(jax.jit, static_argnames="cfg")
def plain_forward(params, tokens, cfg):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = decoder.forward(params, tokens, positions, None, cfg)
    return decoder.unembed(params, hidden, cfg)


def scores(out, cfg=CFG, params=None):
    """Logits [N, T, V] of a plain forward over whole rows, moved to the token they speak about; column 0 is empty."""

    with jax.set_mesh(one_device()):
        logits = np.asarray(plain_forward(weights(cfg) if params is None else params, out.tokens, cfg))
    return np.concatenate([np.zeros_like(logits[:, :1]), logits[:, :-1]], axis=1)


def logprobs(logits, tokens, temperature):
    wide = logits.astype(np.float64) / temperature
    wide = wide - wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return np.take_along_axis(wide, tokens[..., None], -1)[..., 0]


def assert_logprobs(out, temperature, cfg=CFG):
    """Holds the sampler's log-probs to a plain forward's; returns its logits."""
    logits = scores(out, cfg)
    expected = np.where(out.action_mask, logprobs(logits, out.tokens, temperature), 0)
    assert np.abs(out.sampler_logprobs - expected).max() <= 2e-6 * max(1, np.abs(logits).max() / temperature)
    return logits


def assert_same(one, two, rows=None, fields=FIELDS):
    for name in fields:
        left, right = getattr(one, name), getattr(two, name)
        np.testing.assert_array_equal(left if rows is None else left[rows], right, err_msg=name)


def take(batch, index):
    return jax.tree.map(lambda x: x[np.asarray(index)], batch)


# What a rollout holds


def test_rows_hold_prompt_completion_and_padding():
    batch = prompts()
    out = run(batch, BASE)
    assert out.tokens.shape == (24, WIDTH + 9)
    for row in range(24):
        start, end = batch.length[row // 3], out.length[row]
        np.testing.assert_array_equal(out.tokens[row, :start], batch.tokens[row // 3, :start])
        assert (out.tokens[row, end:] == PAD).all()
        np.testing.assert_array_equal(np.flatnonzero(out.action_mask[row]), np.arange(start, end))
        assert (out.version[row] == np.where(out.action_mask[row], 4, -1)).all()
        assert (out.sampler_logprobs[row] != 0).sum() == end - start
        completion = out.tokens[row, start:end]
        stopped = np.isin(completion, STOP_IDS)
        if out.finish[row] == Finish.STOP_TOKEN:  # the stop token is an action, and the last
            assert stopped[-1] and not stopped[:-1].any()
        else:
            assert out.finish[row] == Finish.LENGTH and len(completion) == 9 and not stopped.any()
    assert set(out.finish) == {Finish.STOP_TOKEN, Finish.LENGTH}
    assert out.group.tolist() == [i // 3 for i in range(24)] and out.sample.tolist() == [0, 1, 2] * 8
    assert out.truncated_logprobs is None and out.support_size is None
    assert out.sampler_logprobs.dtype == np.float32 and out.finish.dtype == np.int8 and out.turn.dtype == np.int8


def test_draws_depend_on_sample_stream_visit_and_seed():
    batch = prompts()
    config = dataclasses.replace(BASE, temperature=4.0)  # near uniform: chance agreement is out of the question
    out = run(batch, config)
    assert len({row.tobytes() for row in out.tokens}) == 24
    following = out.action_mask[:, 1:] & out.action_mask[:, :-1]
    assert (out.tokens[:, 1:] == out.tokens[:, :-1])[following].mean() < 0.1  # each position has noise of its own
    others = [
        run(batch, config, stream=1),
        run(dataclasses.replace(batch, uid=batch.uid ^ 1), config),
        run(batch, config, key=jax.random.key(12)),
    ]
    for other in others:
        assert (out.tokens != other.tokens).any(axis=1).mean() > 0.9


# One sequence, any layout


def test_a_sequence_drawn_alone_is_the_same():
    batch = prompts()
    out = run(batch, BASE)
    for row in (0, 3, 7):
        alone = run(take(batch, [row]), BASE)
        rows = slice(3 * row, 3 * row + 3)
        assert_same(out, alone, rows, ("tokens", "length", "finish", "action_mask"))
        np.testing.assert_allclose(out.sampler_logprobs[rows], alone.sampler_logprobs, atol=2e-5)


def test_any_row_and_order_gives_the_same_bits_at_one_batch_shape():
    batch = prompts()
    out = run(batch, BASE)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(8)
        assert_same(out, run(take(batch, order), BASE), (3 * order[:, None] + np.arange(3)).ravel())


def test_other_neighbors_do_not_change_a_bit():
    batch, others = prompts(), prompts(seed=1)
    mixed = jax.tree.map(lambda a, b: np.concatenate([b[:3], a[3:4], b[4:]]), batch, others)
    one, two = run(batch, BASE), run(mixed, BASE)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(one, name)[9:12], getattr(two, name)[9:12], err_msg=name)


@pytest.mark.parametrize("slots", [1, 100])
def test_any_number_of_slots_draws_the_same(slots):
    batch = prompts()
    out = run(batch, dataclasses.replace(BASE, slots=slots))  # 100: a slot for every sequence, so no refill
    plain = run(batch, BASE)
    assert_same(plain, out, None, ("tokens", "length", "finish", "action_mask"))
    np.testing.assert_allclose(plain.sampler_logprobs, out.sampler_logprobs, atol=2e-5)


@pytest.mark.parametrize("shape", [dict(data=8), dict(fsdp=2, tensor=2, sequence=2)], ids=str)
def test_eight_devices_draw_the_same(shape):
    batch, config = prompts(), dataclasses.replace(BASE, top_p=0.9)
    params, mesh = weights(), make_mesh(MeshShape(**shape))
    one = run(batch, config, params)
    stored = shardings(axes(decoder.spec(CFG)), mesh, TRAIN)  # as the learner holds them
    many = run(batch, config, jax.device_put(params, stored), mesh)
    assert_same(one, many, None, ("tokens", "length", "finish", "action_mask", "group", "sample", "support_size"))
    np.testing.assert_allclose(one.sampler_logprobs, many.sampler_logprobs, atol=2e-5)
    assert one.weights_fingerprint == many.weights_fingerprint


@pytest.mark.parametrize("layers, shape", [("unrolled", {}), ("scanned", dict(data=2, tensor=2))], ids=str)
def test_the_last_sequences_are_the_same_in_fewer_slots(layers, shape):
    batch, budget = prompts(), np.where(np.arange(24) % 5 == 4, 9, 2)  # most are done when the last few begin
    mesh = make_mesh(MeshShape(**shape), jax.devices()[: 4 if shape else 1])
    plain = run(batch, BASE, budget=budget)
    stored = jax.device_put(weights(), shardings(axes(decoder.spec(CFG)), mesh, TRAIN))
    out = run(batch, dataclasses.replace(BASE, layers=layers, max_batch_compactions=2), stored, mesh, budget=budget)
    assert_same(plain, out, None, ("tokens", "length", "finish", "action_mask"))
    np.testing.assert_allclose(plain.sampler_logprobs, out.sampler_logprobs, atol=2e-5)


@pytest.mark.parametrize("layers, shape", [("unrolled", {}), ("scanned", dict(data=2, tensor=2))], ids=str)
def test_keys_that_lie_by_entry_draw_the_same(layers, shape):
    batch, long = prompts(), dataclasses.replace(BASE, completion_length=110)  # two blocks of columns
    mesh = make_mesh(MeshShape(**shape), jax.devices()[: 4 if shape else 1])
    plain = run(batch, long, stop_ids=(3,))
    stored = jax.device_put(weights(), shardings(axes(decoder.spec(CFG)), mesh, TRAIN))
    out = run(batch, dataclasses.replace(long, layers=layers, kv_layout="head_dim_major"), stored, mesh, stop_ids=(3,))
    assert (plain.length - batch.length.repeat(3)).max() > 64
    assert_same(plain, out, None, ("tokens", "length", "finish", "action_mask"))
    np.testing.assert_allclose(plain.sampler_logprobs, out.sampler_logprobs, atol=2e-5)


def test_the_width_of_the_prompts_does_not_matter():
    batch = prompts()
    wider = dataclasses.replace(batch, tokens=np.pad(batch.tokens, ((0, 0), (0, 3)), constant_values=1))
    one, two = run(batch, BASE), run(wider, BASE)
    np.testing.assert_array_equal(one.length, two.length)
    for row, length in enumerate(one.length):
        np.testing.assert_array_equal(one.tokens[row, :length], two.tokens[row, :length])


# Log-probs


@pytest.mark.parametrize(
    "layers, option, chunk", [("unrolled", {}, 3), ("scanned", LINEAR, 2)], ids=["attention", "linear"]
)
def test_a_prompt_prefilled_in_chunks_draws_the_same(layers, option, chunk):
    """Five tokens as three and two, or two, two and one: the same but for roundings, of products of other shapes."""
    cfg, config = dataclasses.replace(CFG, **option), dataclasses.replace(BASE, layers=layers)
    batch = prompts(lengths=[5, 4, 3, 2, 1, 5, 4, 5])
    at_once = run(batch, config, cfg=cfg)
    chunked = run(batch, dataclasses.replace(config, prefill_chunk=chunk), cfg=cfg)
    np.testing.assert_array_equal(chunked.tokens, at_once.tokens)
    largest = np.abs(at_once.sampler_logprobs).max()
    np.testing.assert_allclose(chunked.sampler_logprobs, at_once.sampler_logprobs, rtol=0, atol=1e-6 * largest)


def test_prefill_ends_at_the_longest_prompt():
    """Rows of eight columns in chunks of three, three and two; the last token of a prompt is fed when it is decoded.
    A chunk with the token `bad` in it, after every prompt's end, makes the whole cache NaN: which columns are run?"""
    bad = 94

    def forward(params, tokens, *rest):
        hidden, cache = decoder.forward(params, tokens, *rest)
        spoilt = (tokens == bad).any() & (tokens.shape[1] > 1)
        return hidden, jax.tree.map(lambda x: jnp.where(spoilt, jnp.nan, x), cache)

    batch = prompts(count=3)
    config = dataclasses.replace(BASE, completion_length=2, prefill_chunk=3)
    policy = sampler.BehaviorPolicy(decoder.MODEL._replace(forward=forward), CFG, weights(), 4)
    options = dict(stream=0, config=config, samples=1, stop=sampler.StopRules(STOP_IDS, PAD), mesh=one_device())

    def is_run(column, longest):
        tokens = np.pad(np.minimum(batch.tokens, bad - 1), ((0, 0), (0, 3)))
        tokens[:, column] = bad
        spoilt = dataclasses.replace(batch, tokens=tokens, length=np.int32([1, longest, min(longest, 2)]))
        return bool(np.isnan(sampler.sample(policy, spoilt, jax.random.key(11), **options).sampler_logprobs).any())

    for longest, end in ((1, 0), (4, 3), (5, 6), (7, 6)):
        after = range(longest, 8)
        assert [is_run(column, longest) for column in after] == [column < end for column in after]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_a_plain_forward(temperature):
    out = run(prompts(), dataclasses.replace(BASE, temperature=temperature))
    assert_logprobs(out, temperature)


@pytest.mark.parametrize("sampling_params", [dict(top_p=0.7), dict(top_k=9, top_p=0.8, min_p=0.05)], ids=str)
def test_truncated_logprobs_are_those_of_the_kept_support(sampling_params):
    out = run(prompts(), dataclasses.replace(BASE, temperature=0.8, **sampling_params))
    logits = assert_logprobs(out, 0.8)
    keep = np.asarray(support_of_size(jnp.asarray(logits), jnp.asarray(out.support_size)[..., None]))
    limited = logprobs(np.where(keep, logits, -1e9), out.tokens, 0.8)
    mask = out.action_mask
    assert np.abs(out.truncated_logprobs - limited)[mask].max() <= 2e-6 * max(1, np.abs(logits).max() / 0.8)
    assert (out.support_size[mask] >= 1).all() and (out.support_size[~mask] == 0).all()
    assert (out.truncated_logprobs[mask] > out.sampler_logprobs[mask]).any()
    if "top_k" in sampling_params:
        assert (out.support_size <= sampling_params["top_k"]).all()


def test_float64_agrees_to_its_own_rounding():
    with jax.enable_x64(True):
        cfg = dataclasses.replace(CFG, dtype="float64", param_dtype="float64")
        params = weights(cfg)
        out = run(prompts(), dataclasses.replace(BASE, temperature=0.75, top_k=20), params, cfg=cfg)
        logits = scores(out, cfg, params)
        expected = np.where(out.action_mask, logprobs(logits, out.tokens, 0.75), 0)
        assert out.sampler_logprobs.dtype == np.float64
        assert np.abs(out.sampler_logprobs - expected).max() <= 1e-12 * max(1, np.abs(logits).max() / 0.75)


def test_greedy_takes_the_most_probable_and_reports_both_laws():
    out = run(prompts(), dataclasses.replace(BASE, temperature=None))
    best = assert_logprobs(out, 1.0).argmax(-1)
    np.testing.assert_array_equal(out.tokens[out.action_mask], best[out.action_mask])
    assert (out.truncated_logprobs == 0).all() and (out.support_size == out.action_mask).all()
    np.testing.assert_array_equal(out.tokens[0::3], out.tokens[1::3])
    only_one = run(prompts(), dataclasses.replace(BASE, top_k=1, top_p=1.0, min_p=0.0))
    assert_same(out, only_one, None, ("tokens", "length", "finish", "support_size"))


# Where sequences end


def test_budgets_are_kept_row_by_row():
    budget = np.arange(24, dtype=np.int32) % 12  # 0 .. 11, capped at 9
    batch = prompts()
    out, free = run(batch, BASE, budget=budget), run(batch, BASE)
    drawn = free.action_mask.sum(1)
    np.testing.assert_array_equal(out.action_mask.sum(1), np.minimum(budget, drawn))
    np.testing.assert_array_equal(out.finish, np.where(budget < drawn, Finish.LENGTH, free.finish))
    for row in range(24):
        np.testing.assert_array_equal(out.tokens[row, : out.length[row]], free.tokens[row, : out.length[row]])


def test_a_sequence_may_stop_at_its_first_token_and_that_counts_before_its_budget():
    out = run(prompts(), BASE, budget=np.full(24, 9, np.int32))
    at_once = (out.action_mask.sum(1) == 1) & (out.finish == Finish.STOP_TOKEN)
    assert at_once.any()
    short = run(prompts(), BASE, budget=np.ones(24, np.int32))
    np.testing.assert_array_equal(short.finish, np.where(at_once, Finish.STOP_TOKEN, Finish.LENGTH))
    np.testing.assert_array_equal(short.length, out.length - out.action_mask.sum(1) + 1)


def test_prompts_of_length_one_and_of_full_width():
    assert_logprobs(run(prompts(lengths=[1, WIDTH] * 4), BASE), 1.0)


def test_a_prompt_of_length_zero_gives_rows_without_an_action():
    out = run(prompts(lengths=[0, 3, 0, 0, 0, 0, 0, 0]), BASE)
    assert not out.action_mask[[0, 1, 2]].any() and out.action_mask[[3, 4, 5]].any(axis=1).all()
    assert (out.tokens[:3] == PAD).all() and (out.length[:3] == 0).all()


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it():
    token_bytes = [bytes([97 + i % 4]) for i in range(96)]  # a, b, c, d again and again
    strings = ("ab", "ca")
    table = stop_strings.build(strings, token_bytes)
    batch = prompts()
    config = dataclasses.replace(BASE, temperature=2.0)
    free = run(batch, config)
    stop_ids = (*STOP_IDS, *range(1, 96, 8))  # some of the tokens that complete "ab"
    out = run(batch, dataclasses.replace(config, stop_strings=strings), stop_table=table, stop_ids=stop_ids)
    both = 0
    for row in range(24):
        start = batch.length[row // 3]
        drawn = free.tokens[row, start : free.length[row]]
        text = b"".join(token_bytes[t] for t in drawn)
        by_string = min((text.index(s.encode()) + len(s) for s in strings if s.encode() in text), default=99)
        by_token = min(np.flatnonzero(np.isin(drawn, stop_ids)), default=98) + 1
        end = min(by_string, by_token, len(drawn))  # here a token is a byte
        finish = Finish.STOP_TOKEN if by_token == end else Finish.STOP_STRING if by_string == end else Finish.LENGTH
        assert (out.finish[row], out.length[row]) == (finish, start + end)
        np.testing.assert_array_equal(out.tokens[row, : start + end], free.tokens[row, : start + end])
        both += by_string == by_token == end
    assert (out.finish == Finish.STOP_STRING).sum() > 4 and both


def test_the_first_samples_may_be_greedy_and_the_others_stay_as_they_are():
    batch = prompts()
    plain, mixed = run(batch, BASE), run(batch, BASE, greedy_samples=1)
    likeliest = run(batch, dataclasses.replace(BASE, temperature=None))
    first = np.arange(24) % 3 == 0
    for name in ("tokens", "length", "finish"):
        np.testing.assert_array_equal(getattr(mixed, name)[first], getattr(likeliest, name)[first])
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(mixed, name)[~first], getattr(plain, name)[~first])
    assert (mixed.tokens[first] != plain.tokens[first]).any()
    # The policy's own log-probs, not 0: the learner says the same of these tokens.
    np.testing.assert_allclose(mixed.sampler_logprobs[first], likeliest.sampler_logprobs[first], rtol=1e-5, atol=1e-6)


def test_entropy_is_that_of_the_policy_at_the_sampling_temperature():
    # p is (4, 1) / 5 at temperature 1 and (2, 1) / 3 at 2: ln 5 - 0.8 ln 4, and ln 3 - 2/3 ln 2
    logits = jnp.log(jnp.array([[4.0, 1.0]]))
    entropy = lambda temperature: sampler._entropy(logits, sampler.SamplingParams(temperature, None, None, None))
    np.testing.assert_allclose(entropy(jnp.float32(2)), [np.log(3) - 2 / 3 * np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(entropy(None), [np.log(5) - 0.8 * np.log(4)], rtol=1e-6)


# The program


def compiled(
    mesh,
    completion_length=9,
    *,
    count=8,
    width=WIDTH,
    layers="unrolled",
    max_batch_compactions=0,
    cfg=CFG,
    **sampling_params,
):
    """The compiled program of 8 prompts and 4 samples in 16 slots."""
    with jax.set_mesh(mesh):
        place = lambda shape, dtype, sharding: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        number = lambda dtype: place((), dtype, replicated(mesh))
        by_row = lambda shape, dtype: place(shape, dtype, batch_sharding(mesh, len(shape)))
        spec = decoder.spec(cfg)
        stored = shardings(axes(spec), mesh, TRAIN)
        params = jax.tree.map(lambda leaf, s: place(leaf.shape, leaf.dtype, s), abstract(spec), stored)
        batch = PromptBatch(
            tokens=by_row((count, width), jnp.int32),
            length=by_row((count,), jnp.int32),
            uid=by_row((count, 2), jnp.uint32),
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        sampling_params = sampler.SamplingParams(
            temperature=number(jnp.float32),
            top_k=None,
            top_p=number(jnp.float32) if sampling_params else None,
            min_p=None,
        )
        config = sampler.Sampler(
            completion_length=completion_length, slots=16, layers=layers, max_batch_compactions=max_batch_compactions
        )
        return sampler.program.lower(
            params, batch, key, number(jnp.uint32), number(jnp.int32), sampling_params, None, None,
            options=sampler.static_options(config, decoder.MODEL, cfg, samples=4, stop_ids=STOP_IDS, pad_id=PAD),
        ).compile(ProgramCache(platform="cpu").options)  # fmt: skip


COLLECTIVE = r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(-start)?\("


def loop_collectives(text):
    """The instructions that exchange data inside a `while`, with all that it calls."""
    blocks = dict(re.findall(r"^(?:ENTRY )?(%[\w.\-]+) .*?\{\n(.*?)^\}", text, re.M | re.S))
    waiting = re.findall(r"(?:body|condition)=(%[\w.\-]+)", text)
    assert waiting
    seen = set()
    while waiting:
        name = waiting.pop()
        if name not in seen and name in blocks:
            seen.add(name)
            waiting += re.findall(r"%[\w.\-]+", blocks[name])
    return [line.strip() for name in seen for line in blocks[name].splitlines() if re.search(COLLECTIVE, line)]


def test_no_collective_stands_in_the_loop():
    text = compiled(make_mesh(MeshShape(data=2, fsdp=4)), top_p=True).as_text()
    assert re.search(COLLECTIVE, text)  # weights are gathered before the loop
    assert loop_collectives(text) == []


def test_only_tensor_collectives_stand_in_the_loop():
    # Devices are numbered data, fsdp, tensor: [4,2]<=[8] are the pairs (0, 1), (2, 3) ... that differ in tensor alone.
    lines = loop_collectives(compiled(make_mesh(MeshShape(data=2, fsdp=2, tensor=2))).as_text())
    assert lines
    for line in lines:
        groups = re.search(r"replica_groups=(\[[^ ]*|\{\{.*?\}\})", line).group(1).rstrip(",")
        assert groups in ("[4,2]<=[8]", "{{0,1},{2,3},{4,5},{6,7}}"), line


def test_the_cache_is_held_once():
    columns = 1000
    temporary = compiled(one_device(), completion_length=columns).memory_analysis().temp_size_in_bytes
    cache = 2 * CFG.layers * 16 * CFG.kv_heads * (WIDTH + columns) * CFG.head_dim * 4
    assert cache <= temporary < 1.5 * cache


@pytest.mark.usefixtures("compiled_as_shipped")
def test_the_last_sequences_have_half_the_cache_and_then_half_of_that():
    columns, cfg = 500, dataclasses.replace(CFG, layers=1)
    program = compiled(one_device(), completion_length=columns, max_batch_compactions=2, cfg=cfg)
    text = program.as_text()
    loops = re.findall(r" = \((.*)\) while\(", text)
    block = f"{cfg.kv_heads},{WIDTH + columns - 256},{cfg.head_dim}]"  # the last of a slot's blocks of columns
    held = [{rows for rows in (16, 8, 4) if f"f32[{rows},{block}" in carried} for carried in loops]
    # The first size has two loops, one in the other: between refills, and over them.
    assert [{16}, {16}, {8}, {4}] == [rows for rows in held if len(rows) == 1]
    cache = 2 * cfg.layers * 16 * cfg.kv_heads * (WIDTH + columns) * cfg.head_dim * 4
    assert 1.5 * cache <= program.memory_analysis().temp_size_in_bytes < 2 * cache


@pytest.mark.parametrize("layers, stacks", [("unrolled", False), ("scanned", True)])
def test_weights_that_are_unrolled_are_not_carried_stacked_too(layers, stacks):
    cfg = dataclasses.replace(CFG, layers=3)
    text = compiled(one_device(), layers=layers, cfg=cfg).as_text()
    loops = re.findall(r" = \((.*)\) while\(", text)
    assert any(f"f32[{cfg.layers},{cfg.width},{cfg.mlp_width}]" in carried for carried in loops) == stacks


@pytest.mark.parametrize("layers, number", [("unrolled", 2), ("scanned", 8)])
def test_memory_is_that_of_the_slots_and_of_the_resident_prompts(layers, number):
    # 32 prompts, 4 samples each: a queue of 8 times the 16 slots. At hand are 16 / 4 + 2 prompts.
    cfg = dataclasses.replace(CFG, layers=number, kv_heads=4, head_dim=64)  # a column is large beside the outputs
    width, columns = 40, 500
    memory = compiled(one_device(), columns, count=32, width=width, layers=layers, cfg=cfg).memory_analysis()
    column = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * 4
    held = column * (16 * (width + columns) + 6 * width)
    assert held <= memory.temp_size_in_bytes < 1.1 * held


def test_traced_values_do_not_compile_again():
    batch = prompts()
    sampling_params = dict(temperature=0.8, top_k=9, top_p=0.8, min_p=0.05)
    run(batch, dataclasses.replace(BASE, **sampling_params))
    before = sampler.program._cache_size()
    run(batch, dataclasses.replace(BASE, temperature=0.3, top_k=7, top_p=1, min_p=0), version=9, stream=2)
    assert sampler.program._cache_size() == before


def test_bad_settings_are_refused():
    for sampling_params in (
        dict(temperature=0.0),
        dict(temperature=1e-31),
        dict(temperature=float("nan")),
        dict(top_k=0),
        dict(top_p=0.0),
        dict(top_p=1.5),
        dict(min_p=-0.1),
        dict(slots=0),
    ):
        with pytest.raises(ValueError, match=f"Sampler.{next(iter(sampling_params))}"):
            Sampler(completion_length=4, **sampling_params)
    with pytest.raises(ValueError, match="completion_length"):
        Sampler(completion_length=0)
    with pytest.raises(ValueError, match="3 prompts cannot be divided over 8"):
        run(prompts(3), BASE, mesh=make_mesh(MeshShape(data=8)))
    with pytest.raises(ValueError, match="stop_table"):
        run(prompts(), dataclasses.replace(BASE, stop_strings=("x",)))


# The cache in blocks, and prompts that come when they are needed


def long_prompts(count, lengths):
    rng = np.random.default_rng(5)
    return PromptBatch(
        tokens=rng.integers(0, 95, (count, 78)).astype(np.int32),
        length=np.asarray(lengths, np.int32),
        uid=rng.integers(0, 2**32, (count, 2), dtype=np.uint32),
    )


OPTIONS = [
    ("unrolled", {"window": 50, "window_layers": (True, False)}),
    ("scanned", {"layers": 3, "shared_layers": 1}),
    ("unrolled", {"full": FullHeads(head_dim=16, kv_heads=1), "window": 120, "window_layers": (True, False)}),
]


@pytest.mark.parametrize("layers, option", OPTIONS, ids=["windows", "shared", "two shapes"])
def test_a_cache_of_several_blocks_gives_the_logprobs_of_a_plain_forward(layers, option):
    """Blocks end at 64, 128 and 174 columns. Prompts end on both sides of the first end, completions beyond the second,
    and slots pass from rows that have been there to rows that have not."""
    cfg = dataclasses.replace(CFG, **option)
    batch = long_prompts(6, [78, 64, 3, 65, 63, 58])
    config = Sampler(completion_length=96, slots=3, layers=layers)
    out = run(batch, config, cfg=cfg, samples=1, stop_ids=())
    assert (out.length == batch.length + 96).all()
    logits = scores(out, cfg)
    expected = np.where(out.action_mask, logprobs(logits, out.tokens, 1.0), 0)
    assert np.abs(out.sampler_logprobs - expected).max() <= 2e-6 * max(1, np.abs(logits).max())


def test_at_most_so_many_prompts_are_resident_and_hardly_one_is_computed_twice():
    # local prompts, slots, samples -> resident prompts. At most 32 / 8 + 2 = 6: 8 prompts in two rounds of 4, 11 in
    # two of 6.
    assert [sampler.num_resident_prompts(n, 32, 8, 64) for n in (1, 6, 8, 11, 13)] == [1, 6, 4, 6, 5]
    # Eight prompts of 2,048 tokens have 16,384: 64 completions of a prompt each are prefilled in eight rounds.
    assert [sampler.num_resident_prompts(64, 64, 1, width) for width in (256, 257, 2048, 20_000)] == [64, 32, 8, 1]
    for local in range(1, 60):
        for slots, samples, width in ((1, 1, 5), (3, 2, 5), (32, 4, 5), (64, 8, 5), (32, 4, 4096)):
            held = sampler.num_resident_prompts(local, slots, samples, width)
            rounds = -(-local // held)
            assert held <= -(-slots // samples) + 2 and rounds * held - local < rounds
            assert held * width <= sampler.RESIDENT_TOKENS
