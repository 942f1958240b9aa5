"""Memory by kind equals a count by hand, and moves the way a change should move it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jrl.device.sharding import GATHERED
from jrl.resolve import load_config
from jrl.tools.plan import budget, cheaper, estimate, flops
from jrl.tools.plan.case import learned_cases, make_case, programs_of, publication_of
from jrl.tools.plan.chips import CHIPS
from jrl.tools.plan.compiled import hbm_assigned

# Matrices of two layers and the tied embedding; then norms: two of 64 and two of a head, 16, a layer; one of 64 last.
PARAMETERS = 73728 + 32768 + 2 * (2 * 64 + 2 * 16) + 64


def test_what_a_run_keeps_by_hand(small):
    actual = budget.resident_memory(small())
    assert (actual.weights, actual.optimizer) == (4 * PARAMETERS, 8 * PARAMETERS)
    frozen = budget.resident_memory(small("GRPO.kl=0.01"))
    assert (frozen.weights, frozen.optimizer) == (2 * 4 * PARAMETERS, 8 * PARAMETERS)


def test_a_checkpoint_has_every_weight_and_moment_once(small):
    of = lambda *bindings, **devices: budget.checkpoint_bytes(small(*bindings, **devices))
    assert of() == of("MeshShape.data=2", "MeshShape.fsdp=2", devices=4) == 3 * 4 * PARAMETERS
    assert of("GRPO.kl=0.01") == 4 * 4 * PARAMETERS and of("AdamW.memory='host'") == 3 * 4 * PARAMETERS
    assert of(*LORA, "Decoder.param_dtype='bfloat16'") == 2 * PARAMETERS + 3 * 4 * ADAPTERS


# Adapters of rank 4, a layer: q and o 64 + 64, k and v 64 + 32 each, gate, up and down 64 + 128 each.
ADAPTERS = 2 * 4 * (2 * 128 + 2 * 96 + 3 * 192)
LORA = ("Config.adapter=@LoRA()", "LoRA.rank=4")


def test_what_a_run_of_adapters_keeps_by_hand(small):
    case = small(*LORA, "Decoder.param_dtype='bfloat16'", "GRPO.kl=0.01")
    actual = budget.resident_memory(case)
    assert (actual.weights, actual.optimizer) == (2 * PARAMETERS + 2 * 4 * ADAPTERS, 8 * ADAPTERS)
    assert budget.update(case).gradients == 4 * ADAPTERS
    # The first state has weights alone: the stage that begins makes the copy and the moments.
    assert budget.init(case)[:2] == (2 * PARAMETERS + 4 * ADAPTERS, 0)
    assert budget.begin(case) == actual


def test_a_base_in_four_bits_by_hand(small):
    # Two inputs in a byte. Scales of a layer, one for 64 inputs: q 64; k and v 32 each; o, one for 16 inputs of each
    # of 4 heads, 4 * 64; gate and up 128 each; down 2 * 64.
    few = 73728 // 2 + 4 * 2 * (64 + 2 * 32 + 4 * 64 + 2 * 128 + 2 * 64)
    case = (*LORA, "LoRA.base='int4'", "Decoder.param_dtype='bfloat16'", "Decoder.remat='layer'")
    assert budget.frozen(small(*case)) == few + 2 * (PARAMETERS - 73728)
    # Over fsdp all is cut but norms, and scales whose groups are of the width: those of o and down share it as outputs.
    apart, norms = 4 * 2 * (64 + 2 * 32 + 2 * 128), 2 * (PARAMETERS - 73728 - 32768)
    cut = budget.frozen(small(*case, "MeshShape.fsdp=2", devices=2))
    assert cut == (few - apart) // 2 + apart + 32768 + norms


def test_sampling_reads_frozen_weights_where_they_lie(small):
    """Where they lie as they multiply: not cut over fsdp, in the dtype of the products, and scanned."""
    lies = (*LORA, "Sampler.layers='scanned'", "MeshShape.data=2")
    temporary = lambda *more: budget.sample(small(*lies, *more, devices=2)).temporary
    merged = 4 * 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)  # every matrix of both layers
    assert temporary("LoRA.sampling='merged'") - temporary() == merged
    gathered = temporary("MeshShape.data=1", "MeshShape.fsdp=2") - temporary()
    assert gathered == 4 * (PARAMETERS + ADAPTERS)


def test_shards_share_matrices_and_not_norms(small):
    actual = budget.resident_memory(small("MeshShape.fsdp=2", "MeshShape.tensor=2", devices=4))
    assert actual.weights == 4 * ((73728 + 32768) // 4 + 2 * (2 * 64 + 2 * 16) + 64)
    copies = budget.resident_memory(small("MeshShape.data=4", devices=4))
    assert copies.weights == 4 * PARAMETERS


def test_every_expert_is_kept_and_cut_by_width(small):
    # A layer: attention 12288, router 64x4, four experts of 3 x 64 x 32, norms 160; embedding 32768; last norm 64.
    experts = ["Decoder.experts=@Experts()", "Experts.count=4", "Experts.per_token=2", "Experts.width=32"]
    matrices = 2 * (12288 + 4 * 3 * 64 * 32) + 32768
    assert budget.resident_memory(small(*experts)).weights == 4 * (matrices + 2 * (256 + 160) + 64)
    cut = budget.resident_memory(small(*experts, "MeshShape.fsdp=2", "MeshShape.tensor=2", devices=4))
    assert cut.weights == 4 * (matrices // 4 + 2 * (256 // 2 + 160) + 64)  # the router is cut over fsdp alone
    with pytest.raises(ValueError, match=r"Experts\.width = 32 does not divide"):
        small(*experts, "Decoder.heads=64", "Decoder.kv_heads=64", "Decoder.mlp_width=192", "Decoder.vocab_size=576",
              "MeshShape.tensor=64", devices=64)  # fmt: skip


MOE = ["Decoder.experts=@Experts()", "Experts.count=4", "Experts.per_token=2", "Experts.width=32"]
OVER_EXPERT = [*MOE, "MeshShape.fsdp=2", "MeshShape.expert=2"]


def test_experts_are_cut_by_number_and_all_else_over_fsdp_and_expert(small):
    matrices = 2 * (12288 + 4 * 3 * 64 * 32) + 32768  # as above; an expert's inputs over fsdp, the others' over both
    cut = small(*OVER_EXPERT, devices=4)
    assert budget.resident_memory(cut).weights == 4 * (matrices // 4 + 2 * (256 // 4 + 160) + 64)
    # A device reads its 2 experts, of which each of 2 x slots tokens of a group leaves out half.
    case, experts = small(*MOE, "MeshShape.expert=2", devices=2), 4 * 2 * 2 * 3 * 64 * 32
    others = 4 * (2 * (12288 + 256 + 160) + 32768 + 64)
    assert estimate.decode_step_bytes(case) == others + experts * (1 - 0.5 ** (2 * case.slots))


def test_what_the_expert_axis_moves_by_hand(small):
    case = small(*OVER_EXPERT, devices=4)
    # Of 100 bytes 60 of experts, gathered over fsdp 2; the rest over 4 devices.
    assert estimate.gathered_over(case, 100.0, 60.0) == {"fsdp": 30.0, "fsdp+expert": 30.0}
    both = small(*OVER_EXPERT, "MeshShape.sequence=2", devices=8)
    assert estimate.gathered_over(both, 100.0, 60.0) == {"fsdp+sequence": 45.0, "fsdp+expert+sequence": 35.0}
    # Two layers, one other device's 10 tokens: two times 64 numbers of 4 bytes, and 2 ids and weights.
    assert estimate.exchanged_tokens(case, 10, 2) == {"expert": 2 * 10 * (2 * 64 * 4 + 2 * 8)}
    assert estimate.exchanged_tokens(small(*MOE), 10, 2) == {}
    # A chunk has 5/4 of the copies, 2 x (2 x 64 + 3 x 32); beside it tokens and sums of two devices; four logits.
    assert estimate.mlp_entries(case.cfg, 1, 2) == 448 * 5 // 4 + 2 * 2 * 64 + 4


def test_a_turn_of_decoding_reads_the_experts_that_slots_go_to(small):
    # Three slots go to 2 of 4 experts each: one is left alone with 1/2 to the third, 1/8.
    experts = ["Decoder.experts=@Experts()", "Experts.count=4", "Experts.per_token=2", "Experts.width=32"]
    case = small(*experts)
    every = 4 * (2 * (12288 + 256 + 160 + 4 * 3 * 64 * 32) + 32768 + 64)
    assert case.slots == 3
    assert estimate.decode_step_bytes(case) == every - 4 * 2 * 4 * 3 * 64 * 32 / 8
    dense = small()
    assert estimate.decode_step_bytes(dense) == estimate.held_bytes(dense, GATHERED, "float32")


def test_a_loss_of_routers_needs_routers(small):
    with pytest.raises(ValueError, match=r"Learner\.router"):
        small("Learner.router=@RouterLoss()", "RouterLoss.z=0.001")


def test_moments_in_bfloat16_are_half(small):
    case, narrow = small(), small("AdamW.moments='bfloat16'")
    assert 2 * estimate.moment_bytes(narrow) == estimate.moment_bytes(case) == 2 * 4 * PARAMETERS
    assert budget.resident_memory(narrow).optimizer == budget.begin(narrow).optimizer == estimate.moment_bytes(narrow)
    assert budget.init(narrow).optimizer == 0  # which a stage makes when it begins
    # Both are read and written once a step.
    less = estimate.update_traffic(case).hbm - estimate.update_traffic(narrow).hbm
    assert less == 2 * estimate.moment_bytes(narrow)


def test_a_critic_of_its_own_is_a_copy_with_moments_and_two_more_programs(small):
    shared = small("Online.objective=@PPO()", "Learner.minibatches=2")
    case = small("Online.objective=@PPO()", "Learner.minibatches=2", "Online.critic='policy'",
                 "Online.critic_optimizer=@critic/AdamW()", "critic/AdamW.moments='bfloat16'")  # fmt: skip
    before, after = budget.resident_memory(shared), budget.resident_memory(case)
    assert after.weights - before.weights == 4 * PARAMETERS  # float32
    assert after.optimizer - before.optimizer == 2 * 2 * PARAMETERS == before.optimizer / 2
    assert estimate.of_programs(case).keys() - estimate.of_programs(shared).keys() == {
        "rl.critic_values", "rl.update_critic"}  # fmt: skip
    assert estimate.calls(case)["rl.update_critic"] == 2
    # Without logits it does less than the policy's update. A layer is the fullest moment of both.
    found = budget.of_programs(case)
    assert found["rl.update_critic"] == found["rl.update"]
    assert flops.of_programs(case)["rl.update_critic"].weights < flops.of_programs(case)["rl.update"].weights
    assert "rl.recompute" in found and "rl.recompute" in budget.of_programs(shared)
    alone = small("Online.objective=@PPO()", "Online.critic='policy'")
    assert "rl.recompute" not in budget.of_programs(alone)  # one update needs no old log-probs


def test_the_cache_by_hand(small):
    # Keys and values of 2 layers, 2 heads of 16, float32: 512 bytes a column. 3 slots of 32 columns; of 2 samples each,
    # 4 prompts of 8 resident, and the next ones beside them.
    assert budget.sample(small()).cache == 512 * (3 * 32 + 2 * 4 * 8)
    assert budget.sample(small("Decoder.dtype='bfloat16'")).cache == 256 * (3 * 32 + 2 * 4 * 8)
    # One slot: at most 3 of the 4 prompts, 1 / 2 rounded up and 2 more; two rounds of 2.
    assert budget.sample(small("Sampler.slots=1")).cache == 512 * (32 + 2 * 2 * 8)
    # In 8 slots of 32, prompts of 1: the last sequences move to 4 slots while the 8 are there.
    last = (
        "Sampler.slots=8",
        "Sampler.max_batch_compactions=2",
        "Data.prompt_length=1",
        "Sampler.completion_length=31",
    )
    assert budget.sample(small(*last)).cache == 512 * (8 + 4) * 32


def test_routes_that_are_replayed_by_hand(small):
    # 2 sparse layers of 4, 2 experts a token, of 300: 8 bytes. 8 sequences of 32 tokens.
    mixture = ("Decoder.layers=4", *MOE, "Experts.count=300", "Experts.layers=(True, False)", "Learner.epochs=2")
    computed, replayed = small(*mixture), small(*mixture, "Learner.routes='replayed'")
    more = lambda count: count(replayed).total - count(computed).total
    assert more(budget.sample) == 8 * (8 * 32 + 2 * 4 * 8)  # 4 prompts of 8 resident, and the next ones
    # Packed into 8 rows of 32, in which nothing is filled up; and as they were sampled.
    assert more(budget.update) == more(budget.logprobs) == more(budget.scores) == 8 * (8 * 32 + 8 * 32)


def test_the_cache_of_a_kernel_is_filled_up_by_hand(small):
    # Every head to 128 entries: 4096 bytes a column; slots of 32 columns and prompts of 8 to 128 each.
    assert budget.sample(small("Sampler.attention='ragged'")).cache == 4096 * (3 * 128 + 2 * 4 * 128)
    with pytest.raises(ValueError, match="not 3"):
        small("Sampler.attention='ragged'", "Decoder.heads=6", "Decoder.kv_heads=3")


def test_gradients_and_layer_inputs_by_hand(small):
    actual = budget.update(small("Decoder.remat='layer'"))
    assert actual.gradients == 4 * PARAMETERS  # the sum; the micro-batch's own is there while a layer goes back
    assert actual.activations == 2 * (2 * 32) * 64 * 4  # layers, rows x length, width, float32


MIXED = ("Online.pretraining=@PretrainingMix()", "PretrainingMix.source=@Demonstrations()")


def test_stored_rows_that_a_step_imitates_by_hand(small):
    alone = small("Decoder.remat='layer'")
    # 16 stored rows beside 8 completions: twice as many of them, in rows of the same 32 tokens.
    both = small("Decoder.remat='layer'", *MIXED, "PretrainingMix.batch_size=16")
    one, two = budget.update(alone), budget.update(both)
    assert two == one._replace(gradients=2 * one.gradients)
    assert flops.update(both) == flops.plus(*[flops.update(alone)] * 3)
    one, two = estimate.update_traffic(alone), estimate.update_traffic(both)
    fixed = 6 * 4 * PARAMETERS + 2 * 2 * 4 * PARAMETERS  # the optimizer's weights and moments
    assert two.hbm - fixed == 3 * (one.hbm - fixed)
    # Of another role's step, such as a critic's, they are no part.
    assert learned_cases(dataclasses.replace(both, updates="critic")) == [dataclasses.replace(both, updates="critic")]


def test_models_that_are_read_from_folders_by_hand(small):
    # Parameters as published, the embedding once: a classifier has no token head.
    small_one, large_one = 596_049_920, 1_720_574_976
    reward = ("Config.reward=@RewardModel()", "RewardModel.path='models/Qwen3-0.6B'")
    ensemble = (*reward, "RewardModel.members=('models/Qwen3-1.7B',)", "RewardModel.param_dtype='bfloat16'")
    taught = ("Online.objective=@OnPolicyDistillation()", "Config.teacher=@Published()")
    alone, judged = small(), small(*ensemble)
    both = small(*ensemble, *taught, "Published.path='models/Qwen3-1.7B'")
    assert alone.read == (0, 0) and judged.read == (0, 2 * (small_one + large_one))
    assert both.read == (4 * large_one, 2 * (small_one + large_one))
    divided = small(*reward, "MeshShape.fsdp=2", devices=2).read.reward  # all but norms
    assert 0.5 < divided / (4 * small_one) < 0.501
    assert small(*taught, "Published.path='models/mine'").read == (None, 0)
    # The teacher is part of the state. The reward model is not, and is there whatever else is.
    for count in (budget.resident_memory, budget.update, budget.logprobs, budget.scores, budget.sample):
        one, two = count(dataclasses.replace(both, read=alone.read)), count(both)
        assert two == one._replace(weights=one.weights + both.read.teacher, temporary=one.temporary + both.read.reward)


def test_what_layers_keep_by_hand(small):
    # 64 tokens, float32: a layer's input, its queries, keys and values, what attention gives, gate and up.
    of = lambda remat: budget.update(small(f"Decoder.remat={remat!r}")).activations
    assert of("dots") == 2 * 64 * (64 + 64 + 2 * 32 + 64 + 2 * 128) * 4
    # By the kernel also its result, and queries and keys as it reads them.
    kernel = budget.update(small("Decoder.remat='dots'", "Decoder.attention='splash'")).activations
    assert kernel == of("dots") + 2 * 64 * (64 + 64 + 32) * 4
    assert of("layer") == 2 * 64 * 64 * 4 == budget.on_host(small("Decoder.remat='offload'")).activations
    assert of("offload") == budget.IN_FLIGHT * 64 * 64 * 4
    assert budget.on_host(small("Decoder.remat='layer'")) == (0, 0)
    # Of experts: two a token, gate and up of 32 and what comes out, 64.
    experts = ["Decoder.experts=@Experts()", "Experts.count=4", "Experts.per_token=2", "Experts.width=32"]
    sparse = budget.update(small("Decoder.remat='dots'", *experts)).activations
    assert sparse == 2 * 64 * (64 + 64 + 2 * 32 + 64 + 2 * (2 * 32 + 64)) * 4


def test_the_state_of_other_optimizers_by_hand(small):
    case = small()
    layers = case.spec["layers"]
    matrices = [s.shape for s in layers.values() if len(s.shape) > 2]
    assert len(matrices) == 7  # q, k, v, o, gate, up, down
    entries = sum(map(math.prod, matrices))
    # Muon: a momentum of matrices; Adam's two moments of the embedding and the norms.
    muon = small("Online.optimizer=@Muon()")
    assert estimate.moment_bytes(muon) == 4 * (entries + 2 * (PARAMETERS - entries))
    assert budget.resident_memory(muon).optimizer == estimate.moment_bytes(muon)
    # Adafactor: inputs and outputs of each matrix, the embedding's too; every entry of a norm.
    inputs = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
    split = {name: (s.shape[1 : 1 + inputs[name]], s.shape[1 + inputs[name] :])
             for name, s in layers.items() if name in inputs}  # fmt: skip
    sides = sum(case.cfg.layers * (math.prod(a) + math.prod(b)) for a, b in split.values())
    vocab, width = case.cfg.vocab_size, case.cfg.width
    norms = PARAMETERS - entries - vocab * width
    factored = small("Online.optimizer=@Adafactor()")
    assert estimate.moment_bytes(factored) == 4 * (sides + vocab + width + norms)
    averaging = small("Online.optimizer=@Adafactor()", "Adafactor.momentum=0.9")
    assert estimate.moment_bytes(averaging) == estimate.moment_bytes(factored) + 4 * PARAMETERS


def test_a_frozen_group_has_no_moments_and_an_average_is_one_more_copy(small):
    case = small()
    frozen = small("AdamW.groups=[@ParameterGroup()]", "ParameterGroup.names='embed'", "ParameterGroup.frozen=True")
    saved = 2 * 4 * case.cfg.vocab_size * case.cfg.width
    assert estimate.moment_bytes(case) - estimate.moment_bytes(frozen) == saved
    averaged = small("AdamW.average=0.9")
    assert budget.resident_memory(averaged).weights - budget.resident_memory(case).weights == 4 * PARAMETERS


def test_moments_on_the_host_by_hand(small):
    there, away = small("Decoder.remat='layer'"), small("Decoder.remat='layer'", "AdamW.memory='host'")
    assert budget.resident_memory(away).optimizer == budget.begin(away).optimizer == 0
    assert budget.on_host(away) == (8 * PARAMETERS, 0)
    assert budget.update(there).total - budget.update(away).total == 8 * PARAMETERS
    # The largest leaf is the embedding, 512 x 64: both moments as they came, and as they go.
    assert budget.offload_buffer_bytes(away) == 4 * 4 * 512 * 64 and budget.offload_buffer_bytes(there) == 0
    narrow = small("AdamW.memory='host'", "AdamW.moments='bfloat16'")
    assert (budget.on_host(narrow).optimizer, budget.offload_buffer_bytes(narrow)) == (4 * PARAMETERS, 4 * 2 * 512 * 64)


def test_the_hosts_memory_is_no_part_of_what_the_compiler_puts_on_a_device():
    what = ["size 64, parameter 0, shape |f32[16]|:", "size 32, color 5, parameter 1, shape |f32[8]|:",
            "size 8, maybe-live-out:", "size 4, preallocated-temp:", "size 2, color 1, preallocated-temp:"]  # fmt: skip
    lines = [f"allocation {i}: {line}" for i, line in enumerate(what)]
    actual = hbm_assigned("\n".join(lines))
    assert (actual.arguments, actual.outputs, actual.temporary, actual.host, actual.total) == (64, 8, 4, 32, 76)


def test_a_layer_on_its_way_back_by_hand(small):
    # The micro-batch's gradient; a layer's 36864 + 160 weights and their gradient; 64 tokens of 2 x 64 + 192 + 3 x 128
    # entries; two arrays of scores [2 rows, 4 heads, 32, 32]. All in float32.
    layer_workspace_bytes = 64 * (2 * 64 + 192 + 3 * 128) * 4
    scores = 2 * (2 * 4 * 32 * 32) * 4
    expected = 4 * PARAMETERS + 2 * 4 * (36864 + 160) + layer_workspace_bytes + scores
    assert budget.update(small("Decoder.remat='layer'")).temporary == expected


def test_a_chunk_of_logits_on_its_way_back_by_hand(small):
    # The head of 2048 x 64 three times: gathered, its gradient, the sum of that over shards. Of 2 rows x 32 positions
    # x 2048: logits, their gradient, and where the tokens are, a byte each.
    actual = budget.update(small("Decoder.remat='layer'", "Decoder.vocab_size=2048"))
    assert actual.temporary == 3 * 4 * 2048 * 64 + 2 * 32 * 2048 * (4 + 4 + 1)
    # In bfloat16: gathered and summed narrow, the gradient wide, and every weight once more as it multiplies.
    narrow = budget.update(small("Decoder.remat='layer'", "Decoder.vocab_size=2048", "Decoder.dtype='bfloat16'"))
    weights = PARAMETERS + (2048 - 512) * 64
    assert narrow.temporary == 2 * weights + (2 + 2 + 4) * 2048 * 64 + 2 * 32 * 2048 * (4 + 4 + 1)


def test_sampling_holds_some_weights_twice_by_hand(small):
    # Queries' and keys' matrices once more; over tensor the embedding too, cut over its width.
    weights = 4 * (PARAMETERS + 2 * (64 * 64 + 64 * 32))
    scanned = "Sampler.layers='scanned'"
    temporary = lambda *more, devices=1: budget.sample(small(*more, devices=devices)).temporary
    prefill = 2 * (4 * 4 * 8 * 8) * 4 + 4 * 8 * (2 * 64 + 192 + 3 * 128) * 4
    assert temporary(scanned) == weights + prefill
    cut = 4 * ((73728 + 32768) // 2 + 2 * (2 * 64 + 2 * 16) + 64 + (64 * 64 + 64 * 32) + 512 * 64 // 2)
    cut += 2 * (4 * 2 * 8 * 8) * 4 + 4 * 8 * (2 * 64 + 96 + 3 * 64) * 4
    assert temporary(scanned, "MeshShape.tensor=2", devices=2) == cut
    # Unrolled, a layer's part of the stack is read where it lies, by prompts and turns alike.
    assert temporary(scanned) - temporary("Sampler.layers='unrolled'") == 4 * 2 * (64 * 64 + 64 * 32)


def test_computing_again_keeps_less(small):
    assert budget.update(small("Decoder.remat='layer'")).total < budget.update(small()).total


LAYER = ["Decoder.remat='layer'"]  # of the compiled program whose figures are below


@pytest.fixture(scope="module")
def large():
    config, parts = load_config("configs/plan/8b.gin", LAYER)
    return make_case(config, parts, 64), parts


def test_8b_is_within_a_twentieth_of_the_compilers(large):
    # jax 0.10.2, libtpu 0.0.42.1, v5p:4x4x4 as fsdp 16 x tensor 4: 1.434 GiB of arguments and 2.607 temporary; the
    # sampler's 5.650 hold the weights already, and the optimizer's 0.956 lie beside them.
    assert budget.update(large[0]).total / 2**30 == pytest.approx(1.434 + 2.607, rel=0.05)
    assert budget.sample(large[0]).total / 2**30 == pytest.approx(5.650 + 0.956, rel=0.05)


@pytest.mark.parametrize("bindings, compiled", [((8, 16, 151936), 2.327), ((4, 32, 32768), 2.391)])
def test_linear_attention_is_within_a_tenth_of_the_compilers(bindings, compiled):
    """Of updates with rows of 4,096 tokens, three layers of four linear: jax 0.10.2, libtpu 0.0.42.1, v5e:2x4."""
    layers, heads, vocab = bindings
    config, parts = load_config("configs/plan/0.6b.gin", [
        f"Decoder.layers={layers}", f"Decoder.vocab_size={vocab}", "Decoder.heads=8", "Decoder.kv_heads=2",
        "Decoder.head_dim=256", "Decoder.attention_block=512", "Decoder.output_gate=True", "Decoder.linear=@Linear()",
        f"Linear.value_heads={heads}", "Linear.key_heads=16", "Linear.key_dim=128", "Linear.value_dim=128",
        "Learner.row_length=4096", "Learner.micro_batch_tokens=32768"])  # fmt: skip
    assert budget.update(make_case(config, parts, 8)).total / 2**30 == pytest.approx(compiled, rel=0.1)


def test_changes_save_what_they_say_and_those_that_fit_come_first(large):
    case, parts = large
    _, before = budget.peak(case)
    actual = cheaper.cheapest(case, parts, before - 2**28, 64, CHIPS["v5p"])
    assert len(actual) == 3
    assert actual[0].fits and [c.fits for c in actual] == sorted((c.fits for c in actual), reverse=True)
    for change in actual:
        config, _ = load_config("configs/plan/8b.gin", [*LAYER, *change.bindings])
        assert before - budget.peak(make_case(config, parts, 64))[1] == change.saves > 0


KERNELS = ["Decoder.attention='splash'", "Sampler.attention='ragged'", "Decoder.remat='layer'"]


def test_a_mesh_that_takes_several_halvings_is_suggested():
    config, parts = load_config("configs/plan/8b.gin", [*KERNELS, "MeshShape.fsdp=16", "MeshShape.tensor=1"])
    first, *_ = cheaper.cheapest(make_case(config, parts, 16), parts, int(15.75 * 2**30), 16, CHIPS["v5e"])
    assert first.bindings == ("MeshShape.data=1", "MeshShape.fsdp=4", "MeshShape.tensor=4") and first.fits


def test_a_change_that_is_slower_and_saves_no_more_is_not_suggested():
    # The cache of 32 slots takes the most. With 8 or fewer of them the update does, so that 4 or 2 save no more.
    long = ["Sampler.completion_length=49152", "Sampler.slots=32", "Online.prompts=64", "MeshShape.fsdp=4"]
    config, parts = load_config("configs/plan/8b.gin", [*KERNELS, *long])
    case, limit = make_case(config, parts, 16), int(15.75 * 2**30)
    changes = cheaper.cheapest(case, parts, limit, 16, CHIPS["v5e"])
    assert [change.bindings for change in changes if "slots" in change.bindings[0]] == [("Sampler.slots=8",)]
    assert [change.saves for change in changes] == sorted({change.saves for change in changes}, reverse=True)
    assert len(cheaper.cheapest(case, parts, limit, 16, None)) == 3  # where no time is known, all that save the most


def test_layers_that_keep_more_than_their_inputs_are_told_to_keep_those_alone(small):
    suggests_layer = lambda remat: (
        {"Decoder.remat": "layer"} in list(cheaper.candidates(small(f"Decoder.remat={remat!r}")))
    )
    assert [suggests_layer(remat) for remat in ("none", "dots", "layer", "offload")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("bindings", "suggested"),
    [
        (["Decoder.dtype='bfloat16'", "Config.adapter=@LoRA()"], True),
        (["Decoder.dtype='bfloat16'", "Config.adapter=@LoRA()", "Decoder.param_dtype='bfloat16'"], False),
        (["Config.adapter=@LoRA()"], False),  # float32 products would read other weights
        (["Decoder.dtype='bfloat16'"], False),  # trained weights keep float32
    ],
)
def test_narrow_frozen_weights_are_suggested_under_adapters(small, bindings, suggested):
    assert ({"Decoder.param_dtype": "bfloat16"} in list(cheaper.candidates(small(*bindings)))) == suggested


def test_a_run_that_cannot_be_laid_out_is_refused(small):
    with pytest.raises(ValueError, match="kv_heads = 2 does not divide"):
        small("MeshShape.tensor=4", devices=4)


def test_blocks_that_a_row_fits_into_are_none(small):
    unblocked, same = small(), small("Decoder.attention_block=32")
    assert budget.update(same) == budget.update(unblocked)
    # Two layers keep two arrays of scores [2 rows, 4 heads, 32 queries, 32 keys] in float32 each; in blocks, none.
    blocked = budget.update(small("Decoder.attention_block=16"))
    assert budget.update(unblocked).activations - blocked.activations == 2 * 2 * (2 * 4 * 32 * 32) * 4


def test_scores_of_a_kernel_are_not_kept(small):
    long = ("Learner.row_length=1024", "Learner.micro_batch_tokens=1024")
    reference, kernel = (budget.update(small(*long, f"Decoder.attention={name!r}")) for name in ("reference", "splash"))
    # Two layers keep two arrays of scores [1 row, 4 heads, 1024 queries, 1024 keys] in float32 each.
    assert reference.activations - kernel.activations == 2 * 2 * (4 * 1024 * 1024) * 4
    with pytest.raises(ValueError, match="'in_row' needs attention='reference', or"):
        small(*long, "Decoder.attention='splash'", "Learner.prefix_sharing='in_row'")
    linear = ["Decoder.linear=@Linear()", "Linear.key_heads=2", "Linear.value_heads=2", "Linear.key_dim=4"]
    with pytest.raises(ValueError, match="'cross_row' is not supported by linear attention"):
        small(*linear, "Linear.value_dim=4", "Decoder.layers=4", "Learner.prefix_sharing='cross_row'")


def test_what_lies_ahead_of_rows_is_counted_with_their_scores(small):
    # Rows of 32 with 7 columns ahead; three of them, in micro-batches of 96 tokens. 2 layers keep two arrays of scores.
    cross_row = small("Learner.prefix_sharing='cross_row'", "Learner.row_length=32", "Learner.micro_batch_tokens=96")
    assert (cross_row.rows, cross_row.shape.prefix_columns) == (3, 7)
    assert budget.row_scores(cross_row) == 3 * 4 * 32 * (32 + 7) * 4
    # Keys and values of 2 heads of 16, before 3 rows, in the model's float32 and again as they multiply.
    alone = dataclasses.replace(cross_row, shape=cross_row.shape._replace(prefix_columns=0))
    scores = 2 * (3 * 4 * 32 * 7) * 4
    assert (
        budget.layer_activation_bytes(cross_row) - budget.layer_activation_bytes(alone)
        == 3 * 7 * 2 * 32 * (4 + 4) + scores
    )


def test_stages_and_evaluations_are_counted_by_their_own_shapes(small, two_stages):
    case = small(*two_stages, "warm/Offline.batch_size=64", "GRPO.kl=0.01", "Config.eval=@Eval()",
                 "Data.held_out_every=5", "Eval.batch=16", "Eval.samples=2")  # fmt: skip
    actual = budget.of_programs(case)
    # The first stage keeps no reference: one copy of the weights, not two.
    assert actual["sft.update"].weights == 4 * PARAMETERS and actual["rl.update"].weights == 2 * 4 * PARAMETERS
    # Of its 16 prompts 4 are resident; see the cache by hand above.
    assert actual["sample_eval"].cache == 512 * (3 * 32 + 2 * 4 * 8)
    assert actual["sample_eval"].weights == 2 * 4 * PARAMETERS
    counts = flops.of_programs(case)
    assert counts["sample_eval"].total > counts["rl.sample"].total
    # The update's operations grow with its packed tokens: 64 rows of 32 against 8.
    assert counts["sft.update"].total == 8 * counts["rl.update"].total
    assert estimate.step_seconds(case, CHIPS["v5e"]) > 0


def test_a_stage_that_begins_holds_the_moments_of_the_one_that_ends(small, two_stages):
    case = small(*two_stages, "GRPO.kl=0.01")
    actual = budget.of_programs(case)["rl.begin"]
    # Weights, the reference and the new moments; the old moments are given up only afterwards.
    assert actual == budget.Memory(weights=2 * 4 * PARAMETERS, optimizer=8 * PARAMETERS, temporary=8 * PARAMETERS)
    # The reference of a stage that ends goes with them.
    again = small("Config.stages=[@Online(), @again/Online()]", "again/Online.name='again'",
                  "again/Online.objective=@DrGRPO()", "GRPO.kl=0.01")  # fmt: skip
    assert again.name == "again" and budget.resident_memory(again).weights == 4 * PARAMETERS
    assert budget.begin(again).temporary == 8 * PARAMETERS + 4 * PARAMETERS
    # An optimizer that goes on has its moments once.
    continued = small("Config.stages=[@Online(), @again/Online()]", "again/Online.optimizer_state='continued'")
    assert budget.begin(continued) == budget.Memory(weights=4 * PARAMETERS, optimizer=8 * PARAMETERS)
    # Moments of a stage whose own optimizer keeps them on the host are not there.
    away = small(*two_stages, "warm/Offline.optimizer=@warm/AdamW()", "warm/AdamW.memory='host'")
    assert budget.begin(away).temporary == 0 and budget.begin(away).optimizer == 8 * PARAMETERS


def test_the_queue_of_draws_and_the_older_versions_are_counted(small):
    corrected = ("DAPO.importance=@TruncatedImportance()", "Online.objective=@DAPO()", "DAPO.max_refills=None")
    case = small(*corrected, "Online.lag=3", "MeshShape.data=2", devices=2)
    # 3 draws of half the sequences on each device: token, log-prob and version, mask and turn.
    tokens = 3 * case.sequences // 2 * case.width
    assert budget.resident_memory(case).queue == tokens * 14
    update = lambda case: budget.of_programs(case)["rl.update"].total
    assert update(case) - update(small(*corrected, "MeshShape.data=2", devices=2)) == tokens * 14
    # A truncated support adds its log-prob and its size.
    assert budget.queue_bytes(small(*corrected, "Online.lag=3", "Sampler.top_k=4")) == 2 * tokens * 22
    assert budget.resident_memory(small()).queue == 0
    # Routes take a byte for each of 2 experts in 2 layers.
    replayed = small(*corrected, "Online.lag=3", "MeshShape.data=2", *MOE, "Learner.routes='replayed'", devices=2)
    assert budget.resident_memory(replayed).queue == tokens * (14 + 4)
    # What refills are drawn by: the policy of 3 versions before it.
    assert small(*corrected[:2], "Online.lag=3").copies == case.copies + 3


REWARD_STAGE = (
    "Config.stages=[@pairs/Offline(), @Online()]",
    "pairs/Offline.source=@Preferences()",
    "pairs/Offline.objective=@BradleyTerry()",
    "pairs/Offline.trains='reward'",
    "pairs/Offline.batch_size=4",
    "Learner.row_length=64",
    "Online.rewards={'reward': 1.0}",
)


def test_a_corrector_writes_once_for_every_completion_from_longer_prompts(small):
    trained = ("Config.stages=[@pairs/Offline(), @Online()]", "pairs/Offline.source=@Corrections()",
               "pairs/Offline.objective=@SFT()", "pairs/Offline.trains='corrector'", "Online.objective=@PPO()",
               "Online.corrector=@Corrector()", "Online.completion_length=8")  # fmt: skip
    case = small(*trained)
    kind, correcting = programs_of(case)["rl.correct"]
    assert kind == "sample" and estimate.calls(case)["rl.correct"] == 1
    assert (correcting.prompts, correcting.samples) == (case.prompts * case.samples, 1)
    # Prompts of 16 tokens more, the room of an answer, and answers of 8 as before.
    longer = case.config.data.prompt_length + 16
    assert correcting.config.data.prompt_length == longer and correcting.width == longer + 8
    assert budget.of_programs(case)["rl.correct"].cache > budget.of_programs(case)["rl.sample"].cache


def test_a_role_that_an_earlier_stage_trained_stays_without_its_moments(small):
    case = small(*REWARD_STAGE)
    pairs = small(*REWARD_STAGE, stage="bradleyterry")
    # The policy and the reward model; moments of the one that learns.
    for stage_case in (case, pairs):
        assert budget.resident_memory(stage_case)[:2] == (2 * 4 * PARAMETERS, 8 * PARAMETERS)
    actual = budget.of_programs(case)
    assert {"bradleyterry.update", "rl.scores", "rl.update"} <= set(actual)
    # A pass that reads no logits has no head in it.
    assert flops.scores(case).weights == flops.logprobs(case).weights - 2 * flops.read_positions(case) * 64 * 512
    # Nor has a comparison's update: 4 rows of 64 tokens hold a pair each, and layers have 73728 entries in matrices.
    assert flops.read_positions(pairs) == 0 and flops.update(pairs).weights == 3 * 2 * 4 * 64 * 73728
    assert estimate.calls(case) == {"bradleyterry.update": 1, "rl.sample": 1, "rl.scores": 1, "rl.update": 1}


def test_a_change_of_a_section_reaches_every_stage_that_shares_it(small, two_stages):
    case = small(*two_stages)
    changed = cheaper.applied(case.config, {"Learner.micro_batch_tokens": 32})
    assert [stage.learner.micro_batch_tokens for stage in changed.stages] == [32, 32]
    scoped = small(*two_stages, "warm/Offline.learner=@warm/Learner()", "warm/Learner.micro_batch_tokens=128")
    changed = cheaper.applied(scoped.config, {"Learner.micro_batch_tokens": 32})
    assert [stage.learner.micro_batch_tokens for stage in changed.stages] == [128, 32]


def test_devices_of_their_own_for_sampling_hold_what_is_published_and_the_queue(small):
    apart = ["MeshShape.fsdp=2", "Config.sampler_mesh=@sampler/MeshShape()", "sampler/MeshShape.fsdp=1",
             "sampler/MeshShape.data=2", "GRPO.importance=@TruncatedImportance()"]  # fmt: skip
    one, two = (small(*apart, f"Online.lag={lag}", devices=4) for lag in (1, 2))
    actual = budget.of_programs(one)
    # Whole weights on each of the devices that sample, no optimizer; twice where a draw still reads the older ones.
    assert actual["rl.sample"].weights == 4 * PARAMETERS and actual["rl.sample"].optimizer == 0
    assert budget.of_programs(two)["rl.sample"].weights == 2 * 4 * PARAMETERS
    # 8 sequences on 2 devices, 32 tokens of 14 bytes.
    assert actual["rl.sample"].queue == 8 // 2 * 32 * 14 and actual["rl.update"].queue == 0
    # A device that learns holds what it holds without them, in turn on as many.
    in_turn = small("MeshShape.fsdp=2", devices=2)
    assert actual["rl.update"] == budget.of_programs(in_turn)["rl.update"]
    taken = publication_of(one)
    largest = 4 * 512 * 64  # the embedding, gathered
    assert taken.received == 4 * PARAMETERS and taken.learner == largest and taken.peak == 4 * PARAMETERS + largest


def test_a_step_takes_as_long_as_the_longer_of_sampling_and_learning_on_devices_of_their_own(small):
    case = small("MeshShape.data=1", "Config.sampler_mesh=@sampler/MeshShape()", "Online.lag=1", devices=2)
    chip, p = CHIPS["v5e"], publication_of(case)
    assert estimate.publication_seconds(p, case, chip) == 4 * PARAMETERS / chip.ring_rate
    assert estimate.step_of(case, chip, {"rl.sample": 3.0, "rl.update": 2.0}) == 3.0 + 4 * PARAMETERS / chip.ring_rate
    assert estimate.step_of(case, chip, {"rl.sample": 3.0, "rl.update": 5.0}) == 5.0
    in_turn = small()
    assert estimate.step_of(in_turn, chip, {"rl.sample": 3.0, "rl.update": 5.0}) == 8.0
