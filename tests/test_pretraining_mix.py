"""Stored rows that an Online stage imitates beside its loss (L17, PPO-ptx)."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_runs
from small_model import BIGRAM, MODEL, PARTS, Bigram

from jrl.algos.sft import OBJECTIVE as SFT
from jrl.config import ConfigError
from jrl.device.sharding import MeshShape, make_mesh
from jrl.learning import learner
from jrl.learning.credit import StoredLabels, finish_stored, pack_pretraining
from jrl.learning.layout import Learner, packed_shape
from jrl.learning.pack import pack_tokens, plan
from jrl.learning.step import Learned, critic_batch
from jrl.resolve import load_config
from jrl.run import fault, replay, run_hash
from jrl.run.programs import pretraining_shape
from jrl.types import Recomputed

pytestmark = pytest.mark.usefixtures("mesh_of_the_runs")

SETTINGS = [
    BIGRAM, "Online.prompts=8", "Online.samples=4", "Online.steps=3", "Checkpoint.every=1", "Checkpoint.keep=9",
    "Log.samples=0", "Log.writers=()", "Scoring.workers=1", "Config.eval=None", "Online.pretraining=@PretrainingMix()",
    "PretrainingMix.source=@Demonstrations()", "PretrainingMix.batch_size=16", "PretrainingMix.coefficient=5.0",
    "Learner.minibatches=2", "AdamW.learning_rate=3e-2",
]  # fmt: skip
run = functools.partial(short_runs.run, SETTINGS)
N, T, CFG = 6, 9, Bigram(vocab_size=11)
LAYOUTS = Learner(), Learner(row_length=9, micro_batch_tokens=18)  # one micro-batch, three


def rows(seed, layout=LAYOUTS[0]):
    """Returns tokens, mask and packing of random rows, the last of which is padding."""
    rng = np.random.default_rng(seed)
    prompt, length = rng.integers(1, 4, N), rng.integers(5, T + 1, N)
    length[-1] = 0
    column = np.arange(T)
    mask = (column >= prompt[:, None]) & (column < length[:, None])
    return rng.integers(0, 11, (N, T)), mask, plan(length, packed_shape(layout, N, T, 1), 0, 1, prompt)


@jax.jit
def supervised(tokens, mask, packing):
    zeros = np.zeros(N, np.float32)
    labels = StoredLabels(mask, zeros, zeros, zeros.astype(np.int32))
    packed = pack_tokens(tokens, mask, packing, jnp.float32(1))
    return finish_stored(packed, Recomputed(), packing, labels, SFT.config(), objective=SFT, max_completion=T)


imitated_too = jax.jit(pack_pretraining)


@jax.jit
def loss_and_gradient(batch):
    weights = learner.Weights(MODEL.init(jax.random.key(0), CFG), {})
    sums = learner.loss_sums(weights, batch, SFT.config(), (), objective=SFT, model=MODEL, cfg=CFG, chunk=4)
    nll = sums.metrics.get("pretraining/nll", 0) / batch.loss_mask.sum()
    return jax.tree.map(lambda x: x / batch.denominator, (sums.loss, sums.gradient.params)), nll


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_gets_the_coefficient_times_the_mean_over_stored_tokens(layout):
    own, stored = supervised(*rows(0)), rows(1, layout)
    mixed = own.replace(pretraining=imitated_too(*stored, jnp.float32(0.3)))
    assert float(mixed.pretraining.num_tokens) == stored[1].sum() != own.denominator
    (alone, _), (imitated, _), (both, nll) = map(loss_and_gradient, (own, supervised(*stored), mixed))
    jax.tree.map(
        lambda a, b, c: np.testing.assert_allclose(c, a + 0.3 * b, rtol=1e-5, atol=1e-7), alone, imitated, both
    )
    np.testing.assert_allclose(nll, imitated[0], rtol=1e-6)
    assert imitated[0] > 1


def test_a_critic_of_its_own_imitates_nothing():
    mixed = supervised(*rows(0)).replace(pretraining=imitated_too(*rows(1), jnp.float32(0.3)))
    assert critic_batch(mixed).pretraining is None


def test_the_bundle_of_a_fault_holds_the_stored_rows_too(tmp_path):
    mixed = supervised(*rows(0)).replace(pretraining=imitated_too(*rows(1), jnp.float32(0.3)))
    fault._write_batches(tmp_path, Learned([mixed], 1, False))
    (read,) = fault._read_batches(tmp_path, 1, make_mesh(MeshShape(), jax.devices()[:1]))
    assert jax.tree.structure(read) == jax.tree.structure(mixed)
    jax.tree.map(np.testing.assert_array_equal, read, mixed)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mix"
    return folder, run(folder)


def test_stored_rows_become_likelier_while_the_policy_learns_from_samples(straight):
    nll = [step.metrics["pretraining/nll"] for step in straight[1]]
    assert nll == sorted(nll, reverse=True) and nll[-1] < 0.9 * nll[0]
    assert all(step.batch is not None for step in straight[1])


def test_a_run_that_is_left_and_resumed_imitates_the_same_rows(straight, tmp_path):
    run(tmp_path, stop_after=1)
    run(tmp_path)
    assert run_hash.run_fingerprint(tmp_path, 3) == run_hash.run_fingerprint(straight[0], 3)


def test_its_updates_are_not_repeated_from_the_rollouts():
    config, _ = load_config("configs/tiny.gin", SETTINGS, [PARTS])
    assert "step 2 imitated stored rows too (Online.pretraining)" in replay.why_not_repeatable(config, 1, 2)


@pytest.mark.parametrize(
    "bindings, message",
    [
        (["PretrainingMix.coefficient=0.0"], "PretrainingMix.coefficient = 0.0 must be above 0"),
        (["PretrainingMix.batch_size=0"], "PretrainingMix.batch_size must be 1 to"),
        (
            ["PretrainingMix.source=@Preferences()"],
            "PretrainingMix.source = @Preferences() gives rows that are compared",
        ),
        (["PretrainingMix.source=@Labeled()"], "PretrainingMix.source = @Labeled() gives rows that are compared"),
        (
            ["Online.objective=@OnlineBradleyTerry()", "Online.trains='reward'", "Config.model=@Decoder()"],
            "Online.pretraining is for the policy to imitate, and this stage trains 'reward'",
        ),
    ],
)
def test_what_cannot_be_imitated_is_refused(bindings, message):
    named = {binding.partition("=")[0]: binding for binding in [*SETTINGS, *bindings]}
    with pytest.raises((ConfigError, ValueError), match=re.escape(message)):
        load_config("configs/tiny.gin", list(named.values()), [PARTS])


def test_rows_that_do_not_divide_into_minibatches_say_what_to_change():
    settings = [binding.replace("batch_size=16", "batch_size=3") for binding in SETTINGS]
    config, _ = load_config("configs/tiny.gin", settings, [PARTS])
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    with pytest.raises(ValueError, match=r"3 sequences a step do not divide .* PretrainingMix\.batch_size"):
        pretraining_shape(config.stages[0], config, mesh)
