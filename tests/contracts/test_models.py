"""Our decoder and the two models that docs/bring-your-own.md brings pass every contract test on one device and more."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jrl
from jrl.config import ConfigError
from jrl.device.sharding import MeshShape, make_mesh
from jrl.models.conformance import CONTRACT_TESTS
from jrl.models.contract import CustomModel
from jrl.models.decoder import MODEL
from jrl.models.flax_adapter import from_linen
from jrl.models.shape import Decoder
from jrl.plugins import PartError, load_parts
from jrl.rollout import sampler
from jrl.rollout.sampler import Sampler
from jrl.run import run_hash
from jrl.run.checks import check_cache, check_prefix_sharing
from jrl.run.trained import open_trained
from jrl.tools.check import check_parts
from jrl.tools.export import export_policy
from jrl.tools.score import score
from jrl.types import PromptBatch

OWN = Path(__file__).parents[2] / "configs" / "own"
FILES = {"Small": OWN / "linen_model.py", "Bag": OWN / "nnx_model.py"}


@functools.cache
def row(name):
    if name == "Decoder":
        return CustomModel(Decoder, MODEL)
    return load_parts([FILES[name]]).tables["models"][name]


@functools.cache
def shape(name):
    cfg = dataclasses.replace(row(name).config(), vocab_size=24, layers=2, width=16)
    return dataclasses.replace(cfg, kv_heads=2, head_dim=4, mlp_width=32) if name == "Decoder" else cfg


NAMES = ["Decoder", *FILES]


@pytest.mark.parametrize("contract_test", CONTRACT_TESTS)
@pytest.mark.parametrize("name", NAMES)
def test_it_passes_the_contract_test(name, contract_test):
    CONTRACT_TESTS[contract_test](row(name).model, shape(name))


def sampled(model, cfg, devices, layers):
    """Returns what is drawn over so many devices, along data."""
    mesh = make_mesh(MeshShape(data=devices), jax.devices()[:devices])
    rng = np.random.default_rng(5)
    prompts = PromptBatch(
        tokens=rng.integers(0, 24, (4, 5)).astype(np.int32),
        length=rng.integers(1, 6, 4).astype(np.int32),
        uid=rng.integers(0, 2**32, (4, 2), dtype=np.uint32),
    )
    with jax.set_mesh(mesh):
        params = jax.jit(lambda key: model.init(key, cfg))(jax.random.key(0))
        out = sampler.sample(
            sampler.BehaviorPolicy(model, cfg, params, version=4), prompts, jax.random.key(11), stream=0,
            stop=sampler.StopRules((3, 7), 0), samples=2,
            config=Sampler(completion_length=6, slots=3, layers=layers), mesh=mesh,
        )  # fmt: skip
        positions = np.broadcast_to(np.arange(out.tokens.shape[1], dtype=np.int32), out.tokens.shape)

        @jax.jit
        def plain(params, tokens):
            hidden, _ = model.forward(params, tokens, positions, None, cfg)
            return jax.nn.log_softmax(model.unembed(params, hidden, cfg))

        log_probs = np.asarray(plain(params, out.tokens))
    return jax.tree.map(np.asarray, out), log_probs


@pytest.mark.parametrize("name, layers", [("Small", "unrolled"), ("Bag", "scanned")])
def test_sampler_and_learner_are_one_model(name, layers):
    one, log_probs = sampled(row(name).model, shape(name), 1, layers)
    expected = np.take_along_axis(log_probs[:, :-1], one.tokens[:, 1:, None], -1)[..., 0]
    assert one.action_mask.any(1).all()
    np.testing.assert_allclose(one.sampler_logprobs[:, 1:], np.where(one.action_mask[:, 1:], expected, 0), atol=2e-5)
    if name == "Small":
        two, _ = sampled(row(name).model, shape(name), 2, layers)
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.sampler_logprobs, two.sampler_logprobs, atol=5e-6)


def test_jrl_check_holds_it_to_the_same():
    findings = check_parts([FILES["Bag"]])
    assert {row.test for row in findings} == {name.replace("_", " ") for name in CONTRACT_TESTS}
    assert not [row for row in findings if row.problem]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Broken:
    vocab_size: int | None = None
    dtype: str = "float32"
    param_dtype: str = "float32"


class Recurs(linen.Module):
    cfg: Broken

    def setup(self):
        self.embed, self.head = linen.Embed(self.cfg.vocab_size, 8), linen.Dense(self.cfg.vocab_size)
        self.layer = linen.RNN(linen.GRUCell(8))  # whose loop begins with zeros

    def __call__(self, tokens, positions, mask):
        return self.layer(self.embed(tokens))

    def unembed(self, hidden):
        return self.head(hidden)


def test_a_recurrent_layer_of_flax_is_sampled_from():
    out, log_probs = sampled(from_linen(Broken, Recurs).model, Broken(vocab_size=24), 2, "scanned")
    expected = np.take_along_axis(log_probs[:, :-1], out.tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(out.sampler_logprobs[:, 1:], np.where(out.action_mask[:, 1:], expected, 0), atol=2e-5)


class Sees(linen.Module):
    """Every token sees the mean of its whole row, whatever the mask says."""

    cfg: Broken

    def setup(self):
        self.embed, self.head = linen.Embed(self.cfg.vocab_size, 8), linen.Dense(self.cfg.vocab_size)

    def __call__(self, tokens, positions, mask):
        x = self.embed(tokens)
        return x + x.mean(1, keepdims=True)

    def unembed(self, hidden):
        return self.head(hidden)


def test_a_model_that_looks_ahead_or_across_sequences_is_caught():
    model, cfg = from_linen(Broken, Sees).model, Broken(vocab_size=24)
    for name in ("a_token_does_not_see_later_ones", "packed_sequences_see_only_themselves"):
        with pytest.raises(AssertionError):
            CONTRACT_TESTS[name](model, cfg)


class Leaks(Sees):
    """A state that every token halves and adds to, which no column can take back."""

    def __call__(self, tokens, positions, mask):
        return jnp.where(mask, 0.5 ** (positions[:, :, None] - positions[:, None, :]), 0) @ self.embed(tokens)

    def init_cache(self, batch, length):
        return jnp.zeros((batch, 8))

    def decode(self, tokens, positions, cache):
        at = jnp.arange(tokens.shape[1])
        share = jnp.where(at[:, None] >= at[None], 0.5 ** (at[:, None] - at[None]), 0)
        out = share[None] @ self.embed(tokens) + (0.5 ** (at + 1))[None, :, None] * cache[:, None]
        return out, out[:, -1]


class Counts(Sees):
    """A sequence is what lies between two positions of 0, whatever the mask says."""

    def __call__(self, tokens, positions, mask):
        sequence, x = jnp.cumsum(positions == 0, axis=1), self.embed(tokens)
        same = jnp.tril(sequence[:, :, None] == sequence[:, None, :])
        return x + same / same.sum(-1, keepdims=True) @ x


@pytest.mark.parametrize("module, passed, failed", [
    (Leaks, "prefill_and_decode_equal_one_full_forward", "a_prompt_filled_up_with_padding_is_the_prompt_alone"),
    (Counts, "packed_sequences_see_only_themselves", "continuations_see_their_prefix_and_themselves"),
])  # fmt: skip
def test_a_model_that_is_sampled_or_packed_wrong_is_caught(module, passed, failed):
    model, cfg = from_linen(Broken, module).model, Broken(vocab_size=24)
    CONTRACT_TESTS[passed](model, cfg)
    with pytest.raises(AssertionError):
        CONTRACT_TESTS[failed](model, cfg)


class Remembers(Sees):
    def setup(self):
        super().setup()
        self.norm = linen.BatchNorm(use_running_average=True)

    def __call__(self, tokens, positions, mask):
        return self.norm(self.embed(tokens))


def test_a_module_with_state_beside_its_parameters_is_refused():
    with pytest.raises(ValueError, match=r"Broken keeps state other than parameters \(batch_stats\)"):
        from_linen(Broken, Remembers).model.spec(Broken(vocab_size=24))


class OnlyDecodes(Sees):
    def decode(self, tokens, positions, cache):
        return self.embed(tokens), cache


class OnlyCaches(Sees):
    def init_cache(self, batch, length):
        return jnp.zeros((batch, length))


@pytest.mark.parametrize(("module", "defined", "missing"), [(OnlyDecodes, "decode", "init_cache"),
                                                            (OnlyCaches, "init_cache", "decode")])  # fmt: skip
def test_a_module_with_half_of_a_cache_is_refused(module, defined, missing):
    model = from_linen(Broken, module)
    with pytest.raises(ValueError, match=rf"Broken has the method {defined} and no {missing}: define both"):
        model.model.spec(Broken())


class NamesNoCache(Sees):
    init_cache = None  # as a base class may have it that leaves both to its children
    decode: bool = False  # as modules of Flax have it


def test_names_that_are_no_methods_are_no_cache():
    model, cfg = from_linen(Broken, NamesNoCache).model, Broken(vocab_size=24)
    params = model.init(jax.random.key(0), cfg)
    tokens, positions = jnp.array([[3], [5]]), jnp.zeros((2, 1), jnp.int32)
    hidden, cache = model.forward(params, tokens, positions, None, cfg, model.init_cache(cfg, 2, 4))
    assert hidden.shape == (2, 1, 8)
    np.testing.assert_array_equal(cache, [[[3, 0, 0, 0], [5, 0, 0, 0]]])  # the tokens


class Named(Sees):
    def setup(self):
        super().setup()
        self.bias = self.param("value", linen.initializers.ones, ())

    def __call__(self, tokens, positions, mask):
        return self.embed(tokens) * self.bias


def test_a_parameter_may_have_the_name_of_a_head():
    model, cfg = from_linen(Broken, Named).model, Broken(vocab_size=24)
    assert model.spec(cfg)["value"].shape == ()
    CONTRACT_TESTS["gradients_are_finite_and_reach_something"](model, cfg)


def test_a_configuration_without_the_fields_that_jrl_reads_is_refused(tmp_path):
    file = tmp_path / "part.py"
    file.write_text(FILES["Small"].read_text().replace('    param_dtype: str = "float32"\n', ""))
    with pytest.raises(PartError, match=r"MODELS\['Small'\] has no param_dtype"):
        load_parts([file])


TINY = ["Online.steps=4", "Online.prompts=4", "Online.samples=4", "Checkpoint.every=2", "Log.samples=0",
        "Log.writers=()", "Scoring.workers=1"]  # fmt: skip


@pytest.mark.parametrize("name, file, cut", [("Small", "linen.gin", True), ("Bag", "nnx.gin", False)])
def test_it_trains_resumes_and_scores(name, file, cut, tmp_path, monkeypatch):
    monkeypatch.chdir(OWN.parents[1])
    config, bindings = f"configs/own/{file}", [*TINY, f"{name}.width=16", f"{name}.layers=1"]
    jrl.train(config, bindings, run=tmp_path / "run")
    if cut:
        with contextlib.closing(jrl.steps(config, bindings, run=tmp_path / "cut")) as steps:
            while next(steps).step < 3:  # the save of step 2 is done by then
                pass
        jrl.train(config, bindings, run=tmp_path / "cut")
        assert run_hash.run_fingerprint(tmp_path / "cut", 4) == run_hash.run_fingerprint(tmp_path / "run", 4)
    values = score(open_trained(tmp_path / "run"), [[1, 2, 3, 40], [9]])
    assert np.isfinite(values[0]).all() and (values[0][1:] < 0).all()
    with pytest.raises(ValueError, match=f"{name} is a custom model, and has no published form"):
        export_policy(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConfigError, match=f"not those of {name}"):
        jrl.load_config(config, ["Config.adapter=@LoRA()"])


def test_layouts_of_our_own_decoder_are_refused_to_other_models():
    mine = shape("Small")
    config = SimpleNamespace(sampler=Sampler(completion_length=1, kv_layout="head_dim_major"))
    with pytest.raises(ValueError, match="prefix_sharing='cross_row' needs jrl's decoder"):
        check_prefix_sharing("cross_row", mine)
    with pytest.raises(ValueError, match="kv_layout='head_dim_major' is a layout of jrl's cache"):
        check_cache(config, mine, 1)


def test_gradients_over_two_devices_are_those_of_one():
    model, cfg = row("Small").model, shape("Small")
    tokens = np.random.default_rng(0).integers(0, 24, (4, 6)).astype(np.int32)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), tokens.shape)
    gradients = []
    for devices in (1, 2):
        mesh = make_mesh(MeshShape(data=devices), jax.devices()[:devices])
        with jax.set_mesh(mesh):
            by_row = lambda x, mesh=mesh: jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
            params = jax.jit(lambda key: model.init(key, cfg))(jax.random.key(0))

            def loss(params, tokens, positions):
                hidden, _ = model.forward(params, tokens, positions, None, cfg)
                return jnp.mean(jax.nn.logsumexp(model.unembed(params, hidden, cfg), -1) ** 2)

            gradients.append(
                jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(params, by_row(tokens), by_row(positions)))
            )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *gradients)
