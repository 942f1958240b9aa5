"""Operations equal a count by hand, and the compiler's where it can count: two layers, unrolled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jrl.device.sharding import GATHERED
from jrl.models.adapters.lora import LoRA, adapted
from jrl.models.contract import abstract, merge_params, split_params, unstack_cache
from jrl.models.decoder import MODEL
from jrl.models.experts import Experts
from jrl.models.shape import Decoder
from jrl.ops.logprobs import token_logprobs
from jrl.tools.plan import estimate, flops

# A layer: q 64x64, k and v 64x32 each, o 64x64, gate, up and down 64x128 each.
LAYERS = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
HEAD = 64 * 512


def test_weights_of_layers_and_head_by_hand(small):
    case = small()
    assert flops.layer_weights(case.spec) == LAYERS == 73728
    assert flops.head_weights(case.cfg) == HEAD == 32768
    assert flops.layer_weights(small("Decoder.tied=False").spec) == LAYERS


def test_programs_by_hand(small):
    case = small()
    # 4 prompts of 8 tokens, each looking at 8 columns: scores and values are 2 * 4 heads * 16 a column, in 2 layers.
    assert flops.prefill(case) == (2 * 32 * LAYERS, 32 * 2 * 2 * 2 * 4 * 16 * 8)
    # 8 completions in 3 slots: 3 rounds of 24 turns, of 3 tokens, over the 32 columns of the cache.
    assert (case.slots, case.decode_steps) == (3, 72)
    assert flops.decode(case) == (2 * 216 * (LAYERS + HEAD), 216 * 2 * 2 * 2 * 4 * 16 * 32)
    # 8 rows of 32 tokens, in 4 micro-batches of 2 rows. The 24 tokens of a completion make one chunk of 32.
    assert case.shape.micro_batches * case.shape.rows == 8
    forward = flops.logprobs(case)
    assert forward == (2 * 256 * (LAYERS + HEAD), 256 * 2 * 2 * 2 * 4 * 16 * 32)
    assert flops.update(case) == (2 * 256 * (3 * LAYERS + 4 * HEAD), 3 * forward.attention)
    recomputed = flops.update(small("Decoder.remat='layer'"))
    # The last product of a layer, down, is not needed again.
    assert recomputed == (2 * 256 * (4 * LAYERS - 2 * 64 * 128 + 4 * HEAD), 4 * forward.attention)
    assert flops.update(small("Decoder.remat='offload'")) == recomputed
    # Products with matrices are kept, attention is not.
    assert flops.update(small("Decoder.remat='dots'")) == (2 * 256 * (3 * LAYERS + 4 * HEAD), 4 * forward.attention)
    blocked = flops.update(small("Decoder.remat='layer'", "Decoder.attention_block=16"))
    assert blocked == (recomputed.weights, 4.5 * forward.attention)


def test_a_turn_reads_the_filled_blocks_of_the_cache_by_hand(small):
    case = small("Data.prompt_length=60", "Sampler.completion_length=140", "Learner.row_length=200")
    # 200 columns lie in blocks of 64, 64 and 72. Turns see 60 to 199: 5 of them at most 64, then 64, and 71 the rest.
    assert flops.read_columns(case) == (5 * 64 + 64 * 128 + 71 * 200) / 140
    assert flops.decode(case).attention == 72 // 24 * 140 * 3 * 2 * 2 * 2 * 4 * 16 * flops.read_columns(case)


def test_a_turn_reads_the_blocks_of_a_kernel_by_hand(small):
    long = ("Data.prompt_length=250", "Sampler.completion_length=140", "Learner.row_length=390")
    case, reference = (small(*long, f"Sampler.attention={name!r}") for name in ("ragged", "reference"))
    # Of 2 heads filled up to 128 entries of float32 a block holds 256 columns. Turns see 250 to 389: 7 of them one,
    # 133 two. A query meets the keys of both heads.
    assert flops.read_columns(case) == (7 * 256 + 133 * 512) / 140
    attended = flops.decode(reference).attention / flops.read_columns(reference) * flops.read_columns(case)
    assert flops.decode(case) == (pytest.approx(flops.decode(reference).weights + 2 * attended), 0)
    narrow = small(*long, "Sampler.attention='ragged'", "Decoder.dtype='bfloat16'")
    # Weights of values are two numbers each: three products in place of two. One block holds all 512 columns.
    attended *= 512 / flops.read_columns(case)
    assert flops.decode(narrow) == (pytest.approx(flops.decode(reference).weights + 3 * attended), 0)


def test_ppo_takes_one_pass_more_a_minibatch(small):
    times = lambda *bindings: estimate.calls(small("Online.objective=@PPO()", *bindings))
    assert {name: n for name, n in times().items() if n} == {"rl.sample": 1, "rl.recompute": 1, "rl.update": 1}
    # With several updates that pass gives old log-probs too.
    several = times("Learner.minibatches=2", "Learner.epochs=2")
    assert several == {"rl.sample": 1, "rl.recompute": 2, "rl.update": 4}
    assert "rl.recompute" in flops.of_programs(small("Online.objective=@PPO()"))


def test_completions_in_rows_with_a_shared_prompt_by_hand(small):
    shared = lambda row: small("Learner.prefix_sharing='in_row'", f"Learner.row_length={row}", "Online.samples=4")
    # A prefix of 7 tokens, and continuations of 25: 107 for a group of four, 57 for two of them.
    assert [flops.completions_in_a_row(shared(row)) for row in (32, 57, 107, 163, 164)] == [1, 2, 4, 5, 6]
    # Across rows, of continuations of 25 alone; the prefix's 7 columns are compared with from every row.
    cross_row = small("Learner.prefix_sharing='cross_row'", "Learner.row_length=57", "Online.samples=4")
    assert (flops.completions_in_a_row(cross_row), cross_row.shape.keys) == (2, 64)
    longer = small("Learner.prefix_sharing='cross_row'", "Learner.row_length=200", "Online.samples=4")
    assert flops.completions_in_a_row(longer) == 4  # of one group


def test_the_longest_batch_with_prompts_apart_by_hand(small):
    # Rows of 25 hold one continuation and none beside a prefix of 7: 5 a group of four. In micro-batches of 5 rows that
    # is one a group, which is less than the shape has room for.
    case = small(
        "Learner.prefix_sharing='cross_row'",
        "Learner.row_length=25",
        "Learner.micro_batch_tokens=125",
        "Online.samples=4",
    )
    groups = case.sequences // 4
    assert (case.rows, case.micro_batches) == (5, groups) and case.shape.micro_batches > groups
    assert flops.read_positions(case) == groups * 5 * 25
    assert [flops.completions_in_a_row(small(f"Learner.row_length={row}")) for row in (32, 63, 64)] == [1, 1, 2]
    assert flops.completions_in_a_row(small("Learner.row_length=256", "Learner.sequences_per_row=4")) == 4


@pytest.mark.parametrize("place", ["after", "both"])
def test_what_a_norm_reads_is_computed_again(place, small):
    case = small("Decoder.remat='layer'", f"Decoder.norm_place={place!r}")
    assert flops.update(case).weights == 2 * 256 * (4 * LAYERS + 4 * HEAD)


def test_a_kernels_products_are_narrow_and_causal_by_hand(small):
    # A row of 1,024 tokens, which two blocks of 512 divide: 3 of 4 pairs of a query and a key.
    long = ("Learner.row_length=1024", "Learner.micro_batch_tokens=1024")
    reference, kernel = (small(*long, f"Decoder.attention={name!r}") for name in ("reference", "splash"))
    forward, narrow = flops.logprobs(reference), flops.logprobs(kernel)
    assert narrow == (forward.weights + 3 / 4 * forward.attention, 0)
    # Forward two products of the size of scores; back three and four.
    assert flops.update(kernel) == (flops.update(reference).weights + 4.5 * 3 / 4 * forward.attention, 0)
    assert flops.decode(kernel) == flops.decode(reference)


def test_programs_of_adapters_by_hand(small):
    # Of rank 4, a layer: q and o 64 + 64, k and v 64 + 32 each, gate, up and down 64 + 128 each.
    adapters = 2 * 4 * (2 * 128 + 2 * 96 + 3 * 192)
    lora = ("Config.adapter=@LoRA()", "LoRA.rank=4")
    case = small(*lora)
    assert flops.prefill(case).weights == 2 * 32 * (LAYERS + adapters)
    assert flops.decode(case).weights == 2 * 216 * (LAYERS + adapters + HEAD)
    assert flops.decode(small(*lora, "LoRA.sampling='merged'")).weights == 2 * 216 * (LAYERS + HEAD)
    assert flops.logprobs(case).weights == 2 * 256 * (LAYERS + adapters + HEAD)
    # Frozen matrices: forward and back through them. Adapters: their own gradient too. The head: once more forward.
    assert flops.update(case).weights == 2 * 256 * (2 * LAYERS + 3 * adapters + 3 * HEAD)
    again = flops.update(small(*lora, "Decoder.remat='layer'")).weights
    assert again == 2 * 256 * (3 * LAYERS - 2 * 64 * 128 + 4 * adapters + 3 * HEAD)


def test_only_programs_of_the_run_are_counted(small):
    assert set(flops.of_programs(small())) == {"rl.sample", "rl.update"}
    assert set(flops.of_programs(small("GRPO.kl=0.01"))) == {"rl.sample", "rl.reference", "rl.update"}


def counted_by_xla(fn, *args):
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


def unrolled_loss(cfg, rows, length):
    """Returns (loss of parameters and tokens, the shapes of both): layers one by one, all logits at once."""

    def loss(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
        hidden, _ = MODEL.forward(params, tokens, positions, jnp.zeros_like(tokens), cfg)
        unembed = lambda h: MODEL.unembed(params, h, cfg)
        everywhere = jnp.ones_like(tokens, bool)
        logprobs, _ = token_logprobs(hidden, tokens, everywhere, unembed, temperature=jnp.float32(1), chunk=length)
        return logprobs.sum()

    params = jax.eval_shape(lambda p: MODEL.unstack(p, cfg), abstract(MODEL.spec(cfg)))
    return loss, params, jax.ShapeDtypeStruct((rows, length), jnp.int32)


@pytest.mark.parametrize("remat, place", [("none", "before"), ("layer", "before"), ("layer", "both")])
def test_the_compiler_counts_the_same_within_3_percent(remat, place, small):
    cfg = Decoder(vocab_size=2048, layers=2, width=256, heads=4, kv_heads=2, head_dim=64, mlp_width=1024, remat=remat,
                  norm_place=place)  # fmt: skip
    rows, length = 4, 128
    bindings = [f"Decoder.{name}={getattr(cfg, name)!r}" for name in (
        "vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "remat",
        "norm_place")]  # fmt: skip
    bindings += ["Learner.row_length=128", "Learner.micro_batch_tokens=512", "Learner.sequences_per_row=1",
                 "Online.prompts=2"]  # fmt: skip
    case = small(*bindings)
    assert case.shape.micro_batches * case.shape.rows == rows
    loss, params, ids = unrolled_loss(cfg, rows, length)

    assert counted_by_xla(loss, params, ids) == pytest.approx(flops.logprobs(case).total, rel=0.03)
    assert counted_by_xla(jax.value_and_grad(loss), params, ids) == pytest.approx(flops.update(case).total, rel=0.03)

    case, config = small(*bindings, "Config.adapter=@LoRA()", "LoRA.rank=32"), LoRA(rank=32)
    base, adapters = split_params(abstract(adapted(MODEL, config).spec(cfg)))
    unmerged = lambda adapters, base, tokens: loss(
        adapted(MODEL, config).unstack(merge_params(base, adapters), cfg), tokens
    )
    ours = flops.update(case).total
    assert counted_by_xla(jax.value_and_grad(unmerged), adapters, base, ids) == pytest.approx(ours, rel=0.03)


MOE = ["Decoder.experts=@Experts()", "Experts.count=4", "Experts.per_token=2", "Experts.width=32"]


def test_a_mixture_of_experts_by_hand(small):
    # A layer: attention as above, 12288; the router 64x4; of four experts two, gate, up and down 64x32 each.
    layers = 2 * (12288 + 64 * 4 + 2 * 3 * 64 * 32)
    case = small(*MOE)
    assert flops.layer_weights(case.spec, case.cfg.experts) == layers == 49664
    forward = flops.logprobs(case)
    assert forward == (2 * 256 * (layers + HEAD), 256 * 2 * 2 * 2 * 4 * 16 * 32)
    assert flops.decode(case).weights == 2 * 216 * (layers + HEAD)
    assert flops.update(case).weights == 2 * 256 * (3 * layers + 4 * HEAD)
    # What an expert gives is multiplied with its weight, whose gradient needs it: down is computed again.
    assert flops.update(small(*MOE, "Decoder.remat='layer'")).weights == 2 * 256 * (4 * layers + 4 * HEAD)
    # Sharded by number, what experts make is computed again: 2 x 2 x 3 x 64 x 32 in two layers.
    over_two = small(*MOE, "MeshShape.expert=2", devices=2)
    assert flops.update(over_two).weights == 2 * 256 * (3 * layers + 2 * 2 * 3 * 64 * 32 + 4 * HEAD)
    # Every second layer sparse: the first has an MLP.
    mixed = small(*MOE, "Experts.layers=(False, True)")
    assert flops.layer_weights(mixed.spec, mixed.cfg.experts) == LAYERS // 2 + layers // 2


@pytest.mark.parametrize("beside, more", [("gated", 64), ("normed", 0)])
def test_an_mlp_beside_experts_by_hand(beside, more, small):
    # A layer as above, with an MLP of 3 x 64 x 128; what gates it is 64 x 1. Under remat all of it is computed again.
    layers = 2 * (12288 + 64 * 4 + 2 * 3 * 64 * 32 + 3 * 64 * 128 + more)
    bindings = [*MOE, f"Experts.shared_expert='{beside}'"]
    case = small(*bindings)
    assert flops.layer_weights(case.spec, case.cfg.experts) == layers
    assert flops.update(small(*bindings, "Decoder.remat='layer'")).weights == 2 * 256 * (4 * layers + 4 * HEAD)
    # A token's copies for two experts, 2 x (2 x 64 + 3 x 32), four logits, and 3 x 128 of the MLP.
    assert estimate.mlp_entries(case.cfg, 1) == 2 * (2 * 64 + 3 * 32) + 4 + 3 * 128
    # Over tensor 2 a pass sums three products a layer in place of two: half of [tokens, 64] float32, there and back.
    cut = small(*bindings, "MeshShape.tensor=2", devices=2)
    assert estimate.tensor_sums(cut, 10, 1) == {"tensor": 2 * 3 * 2 * 10 * 64 * 4 / 2}
    assert estimate.tensor_sums(small(*MOE, "MeshShape.tensor=2", devices=2), 10, 1) == {"tensor": 2 * 2 * 2560.0}


def test_layers_of_another_shape_by_hand(small):
    # The second layer has 4 heads of 32 and one key head: q and o 64x128 each, k and v 64x32 each.
    case = small("Decoder.full=@FullHeads()", "FullHeads.head_dim=32", "FullHeads.kv_heads=1", "Decoder.window=4",
                 "Decoder.window_layers=(True, False)")  # fmt: skip
    assert flops.layer_weights(case.spec) == LAYERS // 2 + 2 * 64 * 128 + 2 * 64 * 32 + 3 * 64 * 128
    assert flops.attention(case.cfg, 10) == 2 * 2 * 4 * (16 + 32) * 10
    # 3 slots of 32 columns, float32: keys and values of 2 heads of 16, and of one of 32.
    assert estimate.cache_bytes(case) == 3 * 32 * 2 * (2 * 16 + 32) * 4


def test_linear_attention_by_hand(small):
    # The first layer has 2 key heads of 8 and 4 value heads of 16: q and k 64x16, v, its gate and o 64x64, two of 64x4.
    case = small("Decoder.linear=@Linear()", "Linear.key_heads=2", "Linear.value_heads=4", "Linear.key_dim=8",
                 "Linear.value_dim=16", "Linear.layers=(True, False)")  # fmt: skip
    first = 2 * 64 * 16 + 3 * 64 * 64 + 2 * 64 * 4
    assert flops.layer_weights(case.spec) == LAYERS // 2 + first + 3 * 64 * 128
    # A row of 10 is one chunk. A key head: key with key and query with key. A value head: sums of decays 2 * 10, shares
    # with corrections 2 * 16, the system for a value's and a key's entries 16 + 8; the state read twice and written.
    linear = 2 * 2 * 2 * 8 * 10 + 4 * (10 * (20 + 32 + 24) + 3 * 2 * 8 * 16)
    assert flops.attention(case.cfg, 10) == 2 * 2 * 4 * 16 * 10 + linear
    # Rows of 130 are chunks of 44: no more operations a token than that.
    assert flops.linear_attention(case.cfg, 130) == 2 * 32 * 44 + 4 * (44 * (88 + 32 + 24) + 768)
    # With continuations two states are carried.
    assert flops.linear_attention(case.cfg, 10, 2) == linear + 4 * 768
    # Blocks are of the layer that attends: only its scores are computed once more.
    blocked = small("Decoder.linear=@Linear()", "Linear.key_heads=2", "Linear.value_heads=4", "Linear.key_dim=8",
                    "Linear.value_dim=16", "Linear.layers=(True, False)", "Decoder.attention_block=16")  # fmt: skip
    more = flops.update(blocked).attention - flops.update(case).attention
    assert more == 256 * 0.5 * 2 * 2 * 4 * 16 * 32
    # A token: the state read for its key and its query, and written: 2 * 8 * 16 each.
    assert flops.stepping(case.cfg, 10) == 2 * 2 * 4 * 16 * 10 + 4 * 3 * 2 * 8 * 16
    # 3 slots: states, the last three tokens that convolutions see, and 32 columns of the layer that attends.
    assert estimate.cache_bytes(case) == 3 * 4 * (4 * 8 * 16 + 3 * (16 + 16 + 64) + 32 * 2 * 2 * 16)


@pytest.mark.parametrize("remat, beside", [("none", None), ("layer", None), ("layer", "gated")])
def test_the_compiler_counts_a_mixture_the_same_but_for_the_experts_that_a_cpu_computes_for_nothing(
    remat, beside, small
):
    """On CPU `ragged_dot` multiplies every token with every expert: its products count `experts.count` times."""
    experts = Experts(count=3, per_token=2, width=512, shared_expert=beside)
    cfg = Decoder(vocab_size=2048, layers=2, width=256, heads=4, kv_heads=2, head_dim=64, mlp_width=512,
                  experts=experts, remat=remat)  # fmt: skip
    rows, length = 4, 128
    bindings = [f"Decoder.{name}={getattr(cfg, name)!r}" for name in (
        "vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "remat")]  # fmt: skip
    case = small(*bindings, *MOE[:1], "Experts.count=3", "Experts.per_token=2", "Experts.width=512",
                 f"Experts.shared_expert={beside!r}",
                 "Learner.row_length=128", "Learner.micro_batch_tokens=512", "Learner.sequences_per_row=1",
                 "Online.prompts=2")  # fmt: skip
    assert case.cfg == cfg and case.shape.micro_batches * case.shape.rows == rows
    loss, params, ids = unrolled_loss(cfg, rows, length)

    visits = 2.0 * rows * length * cfg.layers * experts.per_token * 3 * cfg.width * experts.width
    for_nothing = (experts.count - 1) * visits
    passes = 3 if remat == "none" else 4
    actual = counted_by_xla(loss, params, ids)
    assert actual == pytest.approx(flops.logprobs(case).total + for_nothing, rel=0.05)
    actual = counted_by_xla(jax.value_and_grad(loss), params, ids)
    assert actual == pytest.approx(flops.update(case).total + passes * for_nothing, rel=0.05)


def test_decoding_one_token_as_the_compiler_counts_it():
    cfg = Decoder(vocab_size=2048, layers=2, width=256, heads=4, kv_heads=2, head_dim=64, mlp_width=1024)
    slots, columns = 8, 128
    params = jax.eval_shape(lambda p: MODEL.unstack(p, cfg), abstract(MODEL.spec(cfg)))
    ids = jax.ShapeDtypeStruct((slots, 1), jnp.int32)
    stack = jax.eval_shape(lambda: MODEL.init_cache(cfg, slots, columns))
    cache = jax.eval_shape(unstack_cache, stack)

    def turn(params, tokens, cache):
        hidden, cache = MODEL.forward(params, tokens, tokens, None, cfg, cache)
        return MODEL.unembed(params, hidden, cfg), cache

    matrices = flops.layer_weights(MODEL.spec(cfg)) + flops.head_weights(cfg)
    ours = slots * (2 * matrices + flops.attention(cfg, columns))
    assert counted_by_xla(turn, params, ids, cache) == pytest.approx(ours, rel=0.05)


@pytest.mark.parametrize("remat, saved, sums", [("none", 1, 4), ("dots", 0, 4), ("layer", 0, 5), ("offload", 0, 5)])
def test_an_update_gathers_and_sums_again_by_remat_and_reduces_gradients_as_computed(small, remat, saved, sums):
    mesh = ("MeshShape.fsdp=2", "MeshShape.tensor=2", "Decoder.dtype='bfloat16'", f"Decoder.remat={remat!r}")
    case = small(*mesh, devices=4)
    # Of a device's half of the weights over tensor, half comes from the other one along fsdp: in bfloat16, once in the
    # forward pass and, but for those of layers if they are saved, once in the backward pass; and of the gradient once.
    weights = estimate.held_bytes(case, GATHERED, "bfloat16")
    layers = estimate.held_bytes(case, GATHERED, "bfloat16", lambda leaf: leaf.axes[0] == "layers")
    links = estimate.update_traffic(case).links
    assert links["fsdp"] == case.micro_batches * (3 * weights - saved * layers) / 2
    # In 2 layers two sums, forward and backward, and again the one after attention if it is recomputed: of [tokens, 64]
    # in bfloat16 over 2 devices, each a half twice.
    assert links["tensor"] == 2 * sums * case.micro_batches * case.tokens * 64 * 2
