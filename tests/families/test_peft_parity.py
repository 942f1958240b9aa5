"""Against PEFT, live: folders both ways, the same logits. `pytest -m slow`, extra `reference`."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from families.published import WIDE, logits, one_device, opened
from families.shapes import AMPLIFIED, CLASSES, SHAPES

from jrl.models.adapters.lora import LoRA, adapted
from jrl.models.contract import Adapted
from jrl.models.decoder import MODEL
from jrl.models.pretrained import peft as ours
from jrl.models.pretrained.adapters import modules_of, transposed
from jrl.models.pretrained.published import Published, decoder_of, load, plans

pytestmark = pytest.mark.slow
LENGTH = 24
KINDS = {
    "lora": LoRA(rank=4, alpha=8.0),
    "rslora": LoRA(rank=4, alpha=3.5, scaling="alpha/sqrt(rank)", targets=("q", "o", "down")),
    "dora": LoRA(rank=2, alpha=2.0, kind="dora"),
}


# What PEFT may adapt where there are matrices that jrl has no adapters to: experts, linear attention, layers' inputs.
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KNOWN = {name: ATTENTION for name in ("Qwen3Moe", "Mixtral", "OLMoE", "GptOss")} | {
    name: [*ATTENTION, "gate_proj", "up_proj", "down_proj"] for name in ("Gemma4", "Gemma4Moe", "Qwen3.5", "Qwen3.5Moe")
}


def of_family(config, cfg):
    """Returns the adapters without a target that sparse layers do not have."""
    if not any(map(cfg.dense, range(cfg.layers))):
        return dataclasses.replace(config, targets=tuple(name for name in config.targets if name != "down"))
    return config


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request, tmp_path_factory):
    """Returns a folder with a model of transformers."""
    pytest.importorskip("peft")
    from families.theirs import random_model

    folder = tmp_path_factory.mktemp("model")
    random_model(CLASSES[request.param], SHAPES[request.param][0], seed=0).save_pretrained(folder)
    return folder


def fresh(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval().float()


def theirs(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.double().numpy()


def tokens_of(cfg):
    return np.random.default_rng(1).integers(0, cfg.vocab_size, (2, LENGTH))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_our_adapter_and_computes_the_same(model, kind, tmp_path, request, recwarn):
    import peft
    from families.theirs import wide_logits

    family, cfg = decoder_of(Published(path=str(model)))
    config = of_family(KINDS[kind], cfg)
    with jax.set_mesh(one_device()):
        drawn = jax.jit(lambda key: adapted(MODEL, config).init(key, cfg).adapters)(jax.random.key(0))
        leaves, tree = jax.tree.flatten(drawn)
        moved = [x + 0.1 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)]
    params = Adapted(load(Published(path=str(model)), one_device()), jax.tree.unflatten(tree, moved))
    due = plans(family, cfg)
    modules = dict(modules_of(params, config, due))
    flipped = transposed(due[f"{next(iter(modules))}.weight"].slots[0].place)
    to = tmp_path / "adapter"
    rslora = config.scaling != "alpha/rank"
    ours.write(to, modules, base=str(model), rslora=rslora, transposed=flipped, dtype="float32")
    bare = fresh(model)
    tokens = tokens_of(cfg)
    before = theirs(bare, tokens)
    loaded = peft.PeftModel.from_pretrained(bare, to)
    actual = theirs(loaded.eval(), tokens)
    assert not [w for w in recwarn if "missing" in str(w.message).lower() or "unexpected" in str(w.message).lower()]
    trained = sum(p.numel() for name, p in loaded.named_parameters() if "lora_" in name)
    assert trained == sum(
        m.a.size + m.b.size + (0 if m.magnitude is None else m.magnitude.size) for m in modules.values()
    )
    expected = logits_of(params, config, cfg, tokens)
    absolute = np.abs(actual - expected).max()
    print(f"FIGURE {family.architecture} {kind} export: abs {absolute:.2e}, moved {np.abs(actual - before).max():.2f}")
    assert absolute <= 1e-3 * np.abs(expected).max() and np.abs(actual - before).max() > 0.05
    if request.node.callspec.params["model"] not in AMPLIFIED:
        assert absolute <= 2e-4
        return
    with jax.enable_x64(True):
        wide_cfg, wide = opened(model, **WIDE)
        adapters = jax.tree.map(lambda x: x.astype(np.float64), params.adapters)
        expected = logits_of(Adapted(wide, adapters), config, wide_cfg, tokens)
    absolute = np.abs(wide_logits(loaded, tokens) - expected).max()
    print(f"FIGURE {family.architecture} {kind} export in float64: abs {absolute:.2e}")
    assert absolute <= 5e-5  # adapters are float32, and so are the norms of DoRA


def logits_of(params, config, cfg, tokens):
    model = adapted(MODEL, config)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    with jax.set_mesh(one_device()):

        def run(params, tokens):
            hidden, _ = model.forward(params, tokens, positions, None, cfg)
            return model.unembed(params, hidden, cfg)

        return np.asarray(jax.jit(run)(params, tokens.astype(np.int32)))


@pytest.mark.parametrize("kind", KINDS)
def test_we_load_an_adapter_of_peft_and_compute_the_same(model, kind, tmp_path, request):
    import peft
    import torch
    from families.theirs import wide_logits

    config = KINDS[kind]
    cfg = decoder_of(Published(path=str(model)))[1]
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=config.rank, lora_alpha=config.alpha,
        target_modules=KNOWN.get(request.node.callspec.params["model"], "all-linear"),
        use_rslora=config.scaling != "alpha/rank", use_dora=config.kind == "dora",
    )  # fmt: skip
    peft_model = peft.get_peft_model(fresh(model), settings).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    tokens = tokens_of(cfg)
    expected = theirs(peft_model, tokens)
    peft_model.save_pretrained(tmp_path / "adapter")
    json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    params = load(Published(path=str(model), adapter=str(tmp_path / "adapter")), one_device())
    actual = logits(cfg, params, tokens)
    bare = logits(cfg, load(Published(path=str(model)), one_device()), tokens)
    absolute = np.abs(actual - expected).max()
    print(f"FIGURE {type(peft_model.base_model.model).__name__} {kind} import: abs {absolute:.2e}")
    assert absolute <= 1e-3 * np.abs(expected).max() and np.abs(actual - bare).max() > 0.05
    if request.node.callspec.params["model"] not in AMPLIFIED:
        assert absolute <= 2e-4
        return
    with jax.enable_x64(True):
        actual = logits(*opened(model, adapter=str(tmp_path / "adapter"), **WIDE), tokens)
    absolute = np.abs(actual - wide_logits(peft_model, tokens)).max()
    print(f"FIGURE {type(peft_model.base_model.model).__name__} {kind} import in float64: abs {absolute:.2e}")
    assert absolute <= 5e-5  # adapters are float32, and so are the norms of DoRA
