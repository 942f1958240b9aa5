"""Where an update stopped being finite: each fault is planted at one place and found there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_learner import model_config, update_program

from jrl.algos import ALGOS
from jrl.learning import nonfinite
from jrl.learning.learner import Weights
from jrl.learning.nonfinite import Fault, find_fault
from jrl.models.contract import MixedTokens
from jrl.models.decoder import MODEL
from jrl.types import SequenceTargets


@pytest.fixture
def found(mesh):
    """(change of the weights, change of the batch) -> the fault of an update on them."""

    def find(weights=lambda params: params, batch=lambda batch: batch, algo="GRPO"):
        state, sound, _ = update_program()
        policy = state.models["policy"]
        policy = policy.replace(params=weights(policy.params))
        hyper = jax.tree.map(jnp.float32, ALGOS[algo].config())
        return find_fault(
            state.replace(models={"policy": policy}), batch(sound), hyper, role="policy", objective=ALGOS[algo],
            model=MODEL, cfg=model_config("float32"), chunk=16,
        )  # fmt: skip

    return find


def layer(name, index, factor):
    """Multiplies a matrix of one layer."""
    by = np.ones(2, np.float32)
    by[index] = factor
    scaled = lambda leaf: leaf * by.reshape(2, *[1] * (leaf.ndim - 1))
    return lambda params: {**params, "layers": {**params["layers"], name: scaled(params["layers"][name])}}


def of_first_token(field, value):
    """Sets a field at the first token that is learned from; returns (change, the sequence of that token)."""

    def change(batch):
        values = np.array(getattr(batch, field))
        values[tuple(np.argwhere(np.asarray(batch.loss_mask))[0])] = value
        return batch.replace(**{field: jnp.asarray(values)})

    _, batch, _ = update_program()
    m, r, column = np.argwhere(np.asarray(batch.loss_mask))[0]
    return change, int(batch.packed.sequence[m, r, batch.packed.segment[m, r, column]])


def test_a_sound_update_has_no_fault(found):
    assert found() is None


@pytest.mark.parametrize("index", [0, 1])
def test_a_weight_is_named_with_its_layer(found, index):
    assert found(layer("q", index, np.nan)) == Fault("weights", "params/layers/q", index)


@pytest.mark.parametrize("field", ["advantages", "loss_weights"])
def test_a_field_of_the_batch_is_named_with_its_sequence(found, field):
    change, sequence = of_first_token(field, np.inf)
    assert found(batch=change) == Fault("batch", field, None, (sequence,))


def test_what_the_loss_does_not_read_is_no_fault(found):
    def change(batch):
        return batch.replace(advantages=jnp.where(batch.loss_mask, batch.advantages, jnp.nan))

    assert found(batch=change) is None


@pytest.mark.parametrize("index", [0, 1])
def test_activations_that_overflow_are_found_in_their_layer(found, index):
    weights = lambda params: layer("gate", index, 1e25)(layer("up", index, 1e25)(params))  # 1e25 * 1e25 overflows
    fault = found(weights)
    assert (fault.place, fault.layer) == ("activations", index) and fault.sequences


def test_they_are_looked_for_in_what_the_update_reads(found, monkeypatch):
    """IFT's second pass reads mixed embeddings; so does the search."""
    read, hidden_of = [], nonfinite.hidden_of
    recorded = lambda params, micro, *rest: read.append(type(micro.tokens)) or hidden_of(params, micro, *rest)
    monkeypatch.setattr(nonfinite, "hidden_of", recorded)
    nonfinite._compiled.cache_clear()
    fault = found(lambda params: layer("gate", 1, 1e25)(layer("up", 1, 1e25)(params)), algo="IFT")
    assert (fault.place, fault.layer) == ("activations", 1) and set(read) == {MixedTokens}


def test_a_sum_that_overflows_is_the_loss(found):
    def change(batch):
        huge = jnp.where(batch.loss_mask, 3e38, 0).astype(jnp.float32)
        return batch.replace(loss_weights=huge, advantages=jnp.ones_like(batch.advantages))

    assert found(batch=change) == Fault("loss", "sum")


def test_a_gradient_is_found_where_the_loss_is_finite(found):
    change, _ = of_first_token("advantages", 1e37)
    head = lambda params: {**params, "embed": params["embed"] * 1e4}
    assert found(head, change).place == "gradient"


@pytest.mark.parametrize(
    ("bad", "first"),
    [
        ({"params/embed": 0}, ("params/embed", None)),
        # From layer 1 on, all that the backward pass computes later is NaN too.
        ({"params/embed": 0, "params/layers/q": slice(0, 2)}, ("params/layers/q", 1)),
        ({"params/layers/q": slice(0, 2), "params/layers/up": 0}, ("params/layers/q", 1)),
        ({"params/embed": 0, "params/layers/q": slice(0, 2), "params/final_norm": 0}, ("params/final_norm", None)),
        (
            {"params/embed": 0, "params/layers/q": slice(0, 2), "params/final_norm": 0, "heads/value/v": 0},
            ("heads/value/v", None),
        ),
        ({"params/embed": 0, "params/final_norm": 0, "params/head": 0}, ("params/head", None)),
    ],
)
def test_the_gradient_that_is_named_is_the_first_of_the_backward_pass(bad, first):
    leaves = lambda prefix, *names: (
        {name: np.ones(3, np.float32) for name in names if bad.get(prefix + name) is None}
        | {name: np.full(3, np.nan, np.float32) for name in names if prefix + name in bad}
    )
    layers = {name: np.ones((3, 4), np.float32) for name in ("q", "up")}
    for name, leaf in layers.items():
        leaf[bad.get(f"params/layers/{name}", slice(0))] = np.nan
    params = {**leaves("params/", "embed", "final_norm", "head"), "layers": layers}
    gradient = Weights(params, {"value": leaves("heads/value/", "v")})
    assert nonfinite._bad_gradient(gradient, None) == first


@pytest.mark.parametrize("worst, fault", [(np.nan, None), (np.inf, "value")])
def test_an_attribute_that_nobody_rated_is_no_fault(worst, fault):
    _, batch, _ = update_program()
    there = batch.packed.sequence < batch.packed.sequence.shape[-1]
    m, r, s = np.argwhere(np.asarray(there))[0]
    value = jnp.zeros((*there.shape, 3)).at[m, r, s, 1].set(worst)
    zeros = jnp.zeros(there.shape)
    targets = SequenceTargets(there, zeros, zeros, zeros.astype(jnp.int32), jnp.float32(1), value=value)
    found = nonfinite._bad_field(batch.replace(targets=targets))
    if fault is None:
        assert found is None
    else:
        assert found == Fault("batch", fault, None, (int(batch.packed.sequence[m, r, s]),))


def test_any_output_of_a_reward_head_flags_its_sequence():
    flags, mask = np.zeros((2, 2, 3), bool), np.array([[True, True], [False, True]])
    flags[0, 1, 2] = flags[1, 0, 0] = True  # the latter in an empty place
    np.testing.assert_array_equal(nonfinite._of_any_output(flags, mask), [[False, True], [False, False]])
    np.testing.assert_array_equal(nonfinite._of_any_output(flags[..., 2], mask), [[False, True], [False, False]])
