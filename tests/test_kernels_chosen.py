"""What 'auto' stands for on each platform, and why."""

from __future__ import annotations

import dataclasses

import pytest

from jrl.device.sharding import AXES
from jrl.models.shape import Decoder
from jrl.resolve import load_config
from jrl.run.checks import check_logprobs
from jrl.run.kernels import EXPERTS, choose_kernels, sentence

BINDINGS = ["Decoder.head_dim=64", "Decoder.vocab_size=131072"]


def sizes(**axes):
    return dict.fromkeys(AXES, 1) | axes


def choice(*bindings, platform="tpu", tensor=1, sampling_tensor=None, expert=1):
    over = dict(binding.split("=", 1) for binding in [*BINDINGS, *bindings])
    config, _ = load_config("configs/tiny.gin", [f"{name}={value}" for name, value in over.items()])
    apart = None if sampling_tensor is None else sizes(tensor=sampling_tensor)
    chosen, choices = choose_kernels(config, config.model, platform, sizes(tensor=tensor, expert=expert), apart)
    return chosen, {c.field: c for c in choices}


def test_tpus_have_kernels_and_no_copy_of_the_cache():
    config, choices = choice()
    assert (config.model.attention, config.sampler.attention, config.sampler.layers) == ("splash", "ragged", "scanned")
    # A position's logits are 131072 x 4 bytes = 2^19: 2^28 bytes are 512 positions.
    learner = config.stages[-1].learner
    assert (learner.logprobs, learner.logprob_chunk) == ("vocab_parallel", 512)
    assert choices["Sampler.attention"].reason is None
    assert sentence(choices["Sampler.attention"]) == "Sampler.attention = 'ragged'"


def test_what_aborts_the_compiler_is_refused():
    unrolled = ("Sampler.layers='unrolled'", "Sampler.attention='ragged'")
    with pytest.raises(ValueError, match=r"over MeshShape.tensor=2: TPUs' compiler .* set Sampler.layers='scanned'"):
        choice(*unrolled, tensor=2)
    assert choice(*unrolled)[0].sampler.layers == "unrolled"
    choice("Sampler.layers='unrolled'", "Sampler.attention='reference'", tensor=2)


def test_devices_of_their_own_for_sampling_choose_for_their_mesh_too():
    unrolled = ("Sampler.layers='unrolled'", "Sampler.attention='ragged'")
    with pytest.raises(ValueError, match=r"over MeshShape.tensor=2: TPUs' compiler"):
        choice(*unrolled, sampling_tensor=2)
    heads = ("Decoder.heads=24", "Decoder.kv_heads=24")
    attention = lambda **over: choice(*heads, **over)[1]["Sampler.attention"]
    assert attention(tensor=1).value == attention(tensor=3, sampling_tensor=1).value == "ragged"
    # 24 heads over 2 devices are 12 each; evaluations sample on the learner's mesh.
    for over in (dict(tensor=1, sampling_tensor=2), dict(tensor=2, sampling_tensor=1)):
        assert attention(**over).value == "reference" and "not 12" in attention(**over).reason


def test_long_prompts_are_prefilled_in_chunks_on_tpus():
    chunk = lambda *bindings, **where: choice(*bindings, **where)[0].sampler.prefill_chunk
    assert chunk("Data.prompt_length=2048") is None and chunk("Data.prompt_length=2049") == 2048
    assert chunk("Data.prompt_length=4096", "Sampler.prefill_chunk=512") == 512
    assert chunk("Data.prompt_length=4096", platform="cpu") is None
    # Before the last of four segments of 1,000 a row has its prompt and 3,000 tokens.
    segments = ("Online.strategy=@Partial()", "Partial.tokens=1000", "Partial.newest_only=True",
                "Sampler.completion_length=4000")  # fmt: skip
    assert chunk(*segments, "Data.prompt_length=256") == 2048
    assert chunk(*segments, "Data.prompt_length=256", "Partial.tokens=2500") == 2048
    assert chunk(*segments, "Data.prompt_length=256", "Sampler.completion_length=1100") is None
    # A second attempt is asked with the first one in its prompt.
    attempts = ("Online.strategy=@SelfCorrection()", "Data.prompt_length=256")
    assert chunk(*attempts, "Sampler.completion_length=1700") is None
    assert chunk(*attempts, "Sampler.completion_length=2000") == 2048


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_other_devices_have_the_reference(platform):
    config, choices = choice(platform=platform)
    assert (config.model.attention, config.sampler.attention) == ("reference", "reference")
    assert config.sampler.layers == "unrolled" and config.stages[-1].learner.logprobs == "reference"
    assert config.stages[-1].learner.logprob_chunk is None and config.stages[-1].learner.chunk == 128
    assert platform.upper() in sentence(choices["Decoder.attention"])


def test_what_is_asked_for_is_left_alone():
    asked = ["Decoder.attention='reference'", "Sampler.attention='reference'", "Sampler.layers='scanned'",
             "Learner.logprobs='reference'", "Learner.logprob_chunk=64"]  # fmt: skip
    config, choices = choice(*asked)
    assert not choices and config.sampler.layers == "scanned" and config.stages[-1].learner.chunk == 64


@pytest.mark.parametrize(
    "bindings, field, reason",
    [
        (["Learner.prefix_sharing='in_row'"], "Decoder.attention", "two segments"),
        (["Decoder.attention_block=8"], "Decoder.attention", "attention_block"),
        (["Decoder.head_dim=48"], "Decoder.attention", "heads of 48"),
        (["Decoder.dtype='float64'"], "Sampler.attention", "float64"),
        (["Sampler.kv_layout='head_dim_major'"], "Sampler.attention", "kv_layout"),
        (["Decoder.heads=6", "Decoder.kv_heads=3"], "Sampler.attention", "key heads on a device, not 3"),
    ],
)
def test_the_reference_has_a_reason_on_tpus(bindings, field, reason):
    _, choices = choice(*bindings)
    assert choices[field].value == "reference" and reason in choices[field].reason


MIXTURE = ["Decoder.experts=@Experts()", "Experts.count=8", "Experts.per_token=2", "Experts.width=96",
           "Decoder.width=2880", "Decoder.dtype='bfloat16'"]  # fmt: skip
ADAPTERS = "Config.adapter=@LoRA()"


def test_experts_of_a_decoded_token_have_their_kernel_on_tpus():
    _, choices = choice(*MIXTURE)
    assert sentence(choices[EXPERTS]) == "experts of a decoded token = 'kernel'"
    merged = choice(*MIXTURE, ADAPTERS, "LoRA.targets=('expert_up',)", "LoRA.sampling='merged'")[1]
    of_others = choice(*MIXTURE, ADAPTERS, "LoRA.targets=('o',)")[1]
    clamped = choice(*MIXTURE, "Experts.clamp=7.0", "Decoder.activation='gelu'")[1]
    assert {it[EXPERTS].value for it in (merged, of_others, clamped)} == {"kernel"}
    assert EXPERTS not in choice()[1] and EXPERTS not in choice(*MIXTURE, platform="cpu")[1]


@pytest.mark.parametrize(
    "bindings, expert, reason",
    [
        (["Sampler.attention='reference'"], 1, "Sampler.attention='reference'"),
        ([ADAPTERS, "LoRA.base='int8'", "Decoder.remat='layer'"], 1, "LoRA.base='int8'"),
        ([ADAPTERS, "LoRA.targets=('o', 'expert_*')"], 1, "adapters of experts"),
        (["Decoder.activation='gelu'"], 1, "'gelu'"),
        (["Sampler.slots=1024", "Online.prompts=512", "Online.samples=2"], 1, "1024 tokens at once of width 2880"),
        # Shards that share experts have 64 sequences each, and the tokens of all 8 are computed together.
        (["Sampler.slots=1024", "Online.prompts=256", "Online.samples=2"], 8, "512 tokens at once"),
        (["Sampler.slots=1024", "Online.prompts=9", "Online.samples=64"], 8, "1024 tokens at once"),  # of 9, 2 a shard
    ],
)
def test_experts_that_xla_multiplies_have_a_reason(bindings, expert, reason):
    _, choices = choice(*MIXTURE, *bindings, expert=expert)
    assert choices[EXPERTS].value == "XLA" and reason in choices[EXPERTS].reason


def test_scanned_layers_never_read_the_references_cache_on_tpus():
    config, _ = choice("Sampler.kv_layout='head_dim_major'")
    assert config.sampler.attention == "reference" and config.sampler.layers == "unrolled"


def test_the_decoders_head_is_not_that_of_a_model_of_ones_own():
    config, _ = load_config("configs/tiny.gin", [*BINDINGS, "Learner.logprobs='vocab_parallel'"])
    check_logprobs(config, config.model)
    with pytest.raises(ValueError, match="reads the head of jrl's decoder, and object is a model of your own"):
        check_logprobs(config, object())


def test_a_model_of_ones_own_has_no_kernels():
    config, _ = load_config("configs/tiny.gin", BINDINGS)
    chosen, _ = choose_kernels(config, object(), "tpu", sizes())
    assert chosen.sampler.attention == "reference" and chosen.stages[-1].learner.logprobs == "reference"
    wide = dataclasses.replace(config.model, vocab_size=2**20)  # 2^22 bytes a position: 64 would fit
    assert isinstance(wide, Decoder)
    assert choose_kernels(config, wide, "tpu", sizes())[0].stages[-1].learner.logprob_chunk == 128
