"""Contract tests of every row of ALGOS, ours or a user's; each raises AssertionError where it fails.

Each takes a row and a configuration of it. They feed small arrays; no model is involved. Which tests a row takes
follows from the functions that it has: `contract_tests_of`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.algos import contract
from jrl.algos.contract import Groups, Objective, Sequences, Tokens
from jrl.types import Finish, PyTree

Array = jax.Array

NUM_GROUPS, SAMPLES, WIDTH = 3, 4, 6
ROWS = NUM_GROUPS * SAMPLES
TOLERANCE = 1e-5
OF_CREDIT_FIELDS = (
    "values",
    "old_logprobs",
    "behaviour_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "old_entropy",
    "old_sum_squared",
)  # of Groups, where asked for


# Of every row


def its_functions_go_together(objective: Objective, config: Any) -> None:
    """There is a loss; what is credited to tokens has a loss of tokens; a value head has targets; a reward head has as
    many weights as outputs."""
    needs, of_tokens = objective.needs(config), objective.token_loss is not None
    _true(of_tokens or objective.sequence_loss is not None, "it has neither a token_loss nor a sequence_loss")
    _true(of_tokens or objective.advantages is None, "it has advantages and no token_loss that reads them")
    _true(needs.logprobs or not of_tokens, "it has a token_loss, which needs log-probs, and Needs.logprobs is False")
    answer = objective.corrects_staleness(config)
    _true(isinstance(answer, bool), f"corrects_staleness says {answer!r}, which is neither True nor False")
    credits, has_returns = objective.advantages is not None, objective.returns is not None
    _true(credits or not has_returns, "it has returns and no advantages: stored rows are not credited")
    _true(not (credits and needs.row_values), "it credits samples, of which no data say what they are worth")
    _true(not credits or needs.values == has_returns, "it needs a value head and has no returns, or the reverse")
    of_units = objective.unit_size == 1 or objective.sequence_loss is not None
    _true(of_units, f"it compares units of {objective.unit_size} sequences and has no sequence_loss")
    weights = needs.score_weights
    _true(weights is None or len(weights) == needs.score_outputs, f"Needs.score_weights is {weights}, which is not one "
          f"weight for each of the {needs.score_outputs} outputs of its reward head (Needs.score_outputs)")  # fmt: skip


def jit_changes_nothing(objective: Objective, config: Any) -> None:
    """Compiled and plain, every function of the row gives the same numbers, and keeps none of them for itself."""
    keeps_nothing(objective, config)
    equals_plain(objective, config, compiled({"row": (objective, config)})["row"])


def keeps_nothing(objective: Objective, config: Any) -> None:
    """No function keeps an array of a compiled call in a list or a global: outside the call it has no value."""
    inputs, state = _inputs(objective, config), objective.init_state(config)
    try:
        with jax.checking_leaks():
            jax.jit(lambda *given: _results_and_next_state(objective, *given)).trace(config, inputs, state)
    except Exception as error:
        _true(not str(error).startswith("Leaked trace"), "a function keeps an array of a compiled call outside itself, "
              f"where it has no value: return it as a metric, or keep it in the state\n{error}")  # fmt: skip
        raise


def compiled(rows: dict[str, tuple[Objective, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns what the functions of each row give in the state that a run begins with, and in a later one. The rows,
    with their configurations and by any name, are one program: what they share is compiled once."""
    inputs = {name: _inputs(*row) for name, row in rows.items()}
    states = {name: _states(*row) for name, row in rows.items()}
    configs = {name: config for name, (_, config) in rows.items()}

    @jax.jit
    def run(configs: dict[str, Any], inputs: dict[str, Any], states: dict[str, PyTree]) -> dict[str, Any]:
        given = {name: (configs[name], inputs[name], states[name]) for name in rows}
        return {name: _results_and_next_state(objective, *given[name]) for name, (objective, _) in rows.items()}

    results = [run(configs, inputs, {name: of_row[place] for name, of_row in states.items()}) for place in (0, -1)]
    return {name: [result[name] for result in results] for name in rows}


def equals_plain(objective: Objective, config: Any, compiled: Sequence[dict[str, Any]]) -> None:
    """What was compiled is what the plain functions give."""
    inputs = _inputs(objective, config)
    for state, results in zip(_states(objective, config), compiled):
        plain = _results_and_next_state(objective, config, inputs, state)
        for name, result in results.items():
            which = "keep, shape, advantages, weights or denominator" if name == "advantages" else name
            if not _is_close(result, plain[name]):
                again = _results_and_next_state(objective, config, inputs, state)[name]
                _close(
                    again,
                    plain[name],
                    f"a second call with the same arguments gives another {which}: it reads "
                    "numpy's random numbers, a clock or what a call changes; under jit it would read them once",
                )
            _close(result, plain[name], f"another {which} under jit")


def another_float_compiles_nothing(objective: Objective, config: Any) -> None:
    """Float fields are traced: changing one does not trace the functions again."""
    traces = []

    @jax.jit
    def run(config: Any, inputs: dict[str, Any], state: PyTree) -> Any:
        traces.append(1)
        return _everything(objective, config, inputs, state)

    inputs, state = _inputs(objective, config), objective.init_state(config)
    run.trace(config, inputs, state)  # nothing is compiled without being traced
    run.trace(_nudged(config), inputs, state)
    _true(len(traces) == 1, "changing a float of the configuration compiled again: decorate the class with @traced")


def the_state_keeps_its_form(objective: Objective, config: Any) -> None:
    """The state is a tree of arrays; `advantages` and `next_state` keep its structure, shapes and dtypes, so that a
    checkpoint of any step can be restored."""
    first = objective.init_state(config)
    for leaf in jax.tree.leaves(first):
        _true(isinstance(leaf, jax.Array | np.ndarray), f"init_state has {leaf!r} in it, which is not an array")
    form = _form(first)
    if objective.advantages is not None:
        following = _credit(objective, config, _groups(objective, config), first)["state"]
        _true(_form(following) == form, f"advantages turn a state of {form} into one of {_form(following)}")
    following = objective.next_state(config, first, _step_metrics(objective, config, first))
    _true(_form(following) == form, f"next_state turns a state of {form} into one of {_form(following)}")


# Of rows that credit what was sampled


def zero_advantage_gives_zero_policy_gradient(objective: Objective, config: Any) -> None:
    """With advantage 0, the policy at its reference and where the update began, and no reward to imitate, log-probs get
    no gradient."""
    tokens = _tokens(objective, config)
    tokens = tokens.replace(
        advantages=jnp.zeros_like(tokens.advantages),
        old_logprobs=tokens.logprobs,
        ref_logprobs=None if tokens.ref_logprobs is None else tokens.logprobs,
        returns=None if tokens.returns is None else jnp.zeros_like(tokens.returns),
        positive_weights=None if tokens.positive_weights is None else jnp.zeros_like(tokens.positive_weights),
    )
    gradient = _gradient(objective, config, tokens)
    _true(bool(jnp.all(gradient == 0)), f"advantage 0 gives gradients up to {jnp.max(jnp.abs(gradient))}")


def rewards_without_a_signal_give_finite_numbers(objective: Objective, config: Any) -> None:
    """A step whose rewards are all 0 or all 1, with a group of which a single row has a verdict, has no 0 / 0."""
    groups = _groups(objective, config)
    valid = jnp.arange(ROWS) <= ROWS - SAMPLES  # of the last group, the first row
    for state in _states(objective, config):
        for value in (0.0, 1.0):
            reward = jnp.full(ROWS, value)
            components = dict.fromkeys(groups.components, reward)
            equal = groups.replace(reward=reward, outcome=reward, valid=valid, components=components)
            for name, leaves in _credit(objective, config, equal, state).items():
                finite = all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(leaves))
                _true(finite, f"where every reward is {value:g}, {name} has NaN or infinity: a spread of 0 divides it")


def row_order_does_not_matter(objective: Objective, config: Any) -> None:
    """Shuffled rows get the same advantages, weights and fate; the state and the denominator stay."""
    groups, order = _groups(objective, config), jnp.asarray(np.random.default_rng(0).permutation(ROWS))
    for state in _states(objective, config):
        by_row, fixed = _split(_credit(objective, config, groups, state))
        shuffled = jax.tree.map(lambda x: x[order], groups)
        by_row_shuffled, fixed_shuffled = _split(_credit(objective, config, shuffled, state))
        _close(by_row_shuffled, jax.tree.map(lambda x: x[order], by_row), "the order of rows changes what they get")
        _close(fixed_shuffled, fixed, "the order of rows changes the state, a counter or the denominator")


def pad_columns_do_not_matter(objective: Objective, config: Any) -> None:
    """Two columns of padding more change nothing."""
    groups = _groups(objective, config)
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 2))) if x.ndim == 2 else x
    cut = lambda x: x[:, :WIDTH] if x.shape == (ROWS, WIDTH + 2) else x
    for state in _states(objective, config):
        _close(
            jax.tree.map(cut, _credit(objective, config, jax.tree.map(pad, groups), state)),
            _credit(objective, config, groups, state),
            "columns of padding change an advantage, a weight, the state or the denominator",
        )


def rows_without_a_verdict_or_a_token_do_not_matter(objective: Objective, config: Any) -> None:
    """A missing reward (NaN) or an empty completion stays out of the loss, and out of every other row's advantage."""
    groups = _groups(objective, config)
    extra = Groups(
        reward=jnp.array([jnp.nan, 9.0, 9.0]),
        outcome=jnp.array([jnp.nan, 9.0, 9.0]),
        valid=jnp.array([False, True, True]),
        group=jnp.arange(3, dtype=jnp.int32),
        action_mask=jnp.array([[True] * WIDTH, [False] * WIDTH, [True] * WIDTH]),
        finish=jnp.array([Finish.STOP_TOKEN, Finish.STOP_TOKEN, Finish.FAILED], jnp.int8),
        num_groups=NUM_GROUPS,
        max_completion=WIDTH,
        sample=jnp.full(3, SAMPLES, jnp.int32),
        tokens=jnp.full((3, WIDTH), 9, jnp.int32) if groups.tokens is not None else None,
        feasible=jnp.ones(3, bool),
        task=jnp.array([0, 0, 2], jnp.int32) if groups.task is not None else None,
        example=jnp.array([-1, 0, 1], jnp.int32) if groups.example is not None else None,
        token_reward=jnp.array([[9.0] * WIDTH, [0.0] * WIDTH, [9.0] * WIDTH]),
        components={name: jnp.array([jnp.nan, 9.0, 9.0]) for name in groups.components},
        turn=jnp.zeros((3, WIDTH), jnp.int8),
        **{name: jnp.full((3, WIDTH), 9.0) for name in OF_CREDIT_FIELDS if getattr(groups, name) is not None},
    )
    more = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), groups, extra)
    for state in _states(objective, config):
        few, many = (_credit(objective, config, g, state) for g in (groups, more))
        _true(not bool(jnp.any(many["keep"][ROWS:])), "a row without a verdict or without a token enters the loss")
        advantages = many["advantages"][ROWS:]
        _true(bool(jnp.all(advantages == 0)), "a row without a verdict or without a token has an advantage")
        for name in ("keep", "advantages", "weights", "returns", "selected", "positive"):
            _close(many[name][:ROWS], few[name], f"a row without a verdict or a token changes the {name} of others")
        _close(many["state"], few["state"], "a row without a verdict or a token changes the state")


def only_sampled_tokens_have_advantages(objective: Objective, config: Any) -> None:
    """Prompt, padding and tool output have advantage and return 0, and no token off the loss mask has a weight."""
    groups = _groups(objective, config)
    for state in _states(objective, config):
        credit = _credit(objective, config, groups, state)
        _true(bool(jnp.all(jnp.where(groups.action_mask, 0, credit["advantages"]) == 0)), "an advantage on no action")
        _true(bool(jnp.all(jnp.where(groups.action_mask, 0, credit["returns"]) == 0)), "a return on no action")
        _true(bool(jnp.all(jnp.where(groups.action_mask, 0, credit["selected"]) == 0)), "a selected token is no action")
        _true(bool(jnp.all(jnp.where(credit["loss_mask"], 0, credit["weights"]) == 0)), "a weight off the loss mask")


# Of rows with a loss of tokens


def rewards_of_tokens_matter_where_they_are_asked_for(objective: Objective, config: Any) -> None:
    """They change the advantages of an objective whose Needs.token_rewards is set, and nothing of another."""
    groups = _groups(objective, config)
    more = groups.replace(token_reward=groups.token_reward + jnp.where(jnp.arange(WIDTH)[None] % 2, 1.0, -0.5))
    asked = objective.needs(config).token_rewards
    for state in _states(objective, config):
        before, after = (_credit(objective, config, g, state) for g in (groups, more))
        if not asked:
            _close(after, before, "rewards of tokens change what does not say that it reads them")
        same = bool(jnp.allclose(after["advantages"], before["advantages"], atol=1e-3))
        _true(not asked or not same, "Needs.token_rewards is set, and rewards of tokens change no advantage")


def masked_tokens_do_not_matter(objective: Objective, config: Any) -> None:
    """NaN under the mask reaches neither loss, metrics nor gradient; nor does any other value there."""
    tokens, state = _tokens(objective, config), objective.init_state(config)
    poisoned = _poisoned(tokens)
    seen = lambda tree: jax.tree.map(lambda x: jnp.where(tokens.mask, x, 0), tree)
    clean, dirty = (objective.token_loss(config, given, state) for given in (tokens, poisoned))
    _close(seen(dirty), seen(clean), "a masked token changes the loss or a metric of another")
    _true(
        bool(jnp.all(jnp.isfinite(dirty[0]))),
        "NaN under the mask comes out of token_loss: mask its inputs, not its result",
    )
    gradient = _gradient(objective, config, poisoned)
    _close(gradient, _gradient(objective, config, tokens), "NaN under the mask reaches the gradient")
    pulled = lambda g: bool(jnp.all(jnp.where(tokens.mask, 0, g) == 0) & jnp.all(jnp.isfinite(g)))
    _true(pulled(gradient), "a masked token has a gradient")
    if poisoned.values is not None:
        field, values = _values(poisoned)
        of_values = jax.grad(lambda v: _total(objective, config, poisoned.replace(**{field: v})))(values)
        of_values = of_values.reshape(*tokens.mask.shape, -1).sum(-1)
        _true(pulled(of_values), "a masked token's value has a gradient, or NaN under the mask reaches that of others")


def metrics_of_tokens_carry_no_gradient(objective: Objective, config: Any) -> None:
    """Every metric of token_loss has the shape of the loss and is not differentiated."""
    tokens, state = _tokens(objective, config), objective.init_state(config)
    loss, metrics = objective.token_loss(config, tokens, state)
    _same_shape(metrics, loss)
    total = lambda lp: sum(
        m.sum() for m in objective.token_loss(config, tokens.replace(logprobs=lp), state)[1].values()
    )
    if metrics:
        still = bool(jnp.all(jax.grad(total)(tokens.logprobs) == 0))
        _true(still, f"one of the metrics {', '.join(metrics)} carries a gradient: wrap it in jax.lax.stop_gradient")


def packing_tokens_does_not_matter(objective: Objective, config: Any) -> None:
    """Two sequences in two rows, or packed in one, have the same token losses."""
    apart, state = _tokens(objective, config), objective.init_state(config)
    rows, width = apart.mask.shape
    join = lambda x: x.reshape(1, rows * width, *x.shape[2:])
    apart = apart.replace(segment=jnp.zeros((rows, width), jnp.int32))
    together = jax.tree.map(join, apart).replace(
        segment=jnp.repeat(jnp.arange(rows), width)[None, :], num_segments=rows
    )
    loss, packed = (objective.token_loss(config, given, state)[0] for given in (apart, together))
    _close(packed, join(loss), "packing two sequences into a row changes their losses")


def a_step_without_tokens_has_loss_zero(objective: Objective, config: Any) -> None:
    """Where every row is masked the denominator is at least 1, and loss and gradient are 0 instead of 0 / 0."""
    tokens = _tokens(objective, config)
    nothing = jnp.zeros_like(tokens.mask)
    tokens = tokens.replace(mask=nothing)
    denominator = objective.denominator(config, nothing, jnp.int32(0), WIDTH)
    _true(bool(denominator >= 1), "the denominator of an empty step is below 1")
    loss = lambda lp: _total(objective, config, tokens.replace(logprobs=lp))
    value, gradient = jax.value_and_grad(loss)(tokens.logprobs)
    _true(bool((value == 0) & jnp.all(gradient == 0)), f"an empty step has loss {value}")


# Of rows that compare what was sampled


def pairs_are_of_rows_that_count(objective: Objective, config: Any) -> None:
    """A comparison has one preferred row and one other, both of one prompt, and neither without a verdict."""
    groups = _groups(objective, config)
    groups = groups.replace(reward=jnp.where(groups.valid, groups.reward, jnp.nan))
    found = objective.pairs(config, groups, objective.shape(config, groups))
    plain = jax.jit(lambda config: objective.pairs(config, groups, objective.shape(config, groups)))(config)
    _close(found, plain, "pairs under jit")
    unit, label = np.asarray(found.unit), np.asarray(found.label)
    _true(bool((unit >= 0).any()), "no group has a pair")
    _true(bool((np.asarray(objective.keep(config, groups)) | (unit < 0)).all()), "a row that is not kept is compared")
    for number in set(unit[unit >= 0].tolist()):
        rows = unit == number
        certain = sorted(label[rows]) == [0, 1]
        strong = objective.strengths and len(label[rows]) == 2 and max(label[rows]) > 0.5 and sum(label[rows]) == 1
        one = objective.unit_size == 0 and len(label[rows]) >= 2 and sorted(label[rows])[-2:] == [0, 1]
        _true(certain or strong or one, f"comparison {number} has the labels {label[rows]}")
        _true(len(set(np.asarray(groups.group)[rows].tolist())) == 1, f"comparison {number} is of several prompts")
    _true(bool(jnp.all(jnp.isfinite(found.weight))), "a weight is no number")


# Of rows that a critic of its own can learn by


def a_critics_loss_is_of_values_alone(objective: Objective, config: Any) -> None:
    """value_loss reads no log-probs, and no value under the mask; token_loss without values is the policy's alone."""
    tokens, state = _tokens(objective, config), objective.init_state(config)
    bare = dict.fromkeys(("logprobs", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "entropy", "advantages"))
    of_critic = _poisoned(tokens.replace(**bare))
    field, values = _values(of_critic)
    total = lambda v: jnp.sum(
        jnp.where(tokens.mask, objective.value_loss(config, of_critic.replace(**{field: v}), state)[0], 0)
    )
    loss, metrics = objective.value_loss(config, of_critic, state)
    _same_shape(metrics, loss)
    _true(all(bool(jnp.all(jnp.isfinite(x))) for x in (loss, *metrics.values())), "NaN under the mask comes out of it")
    gradient = jnp.abs(jax.grad(total)(values)).reshape(*tokens.mask.shape, -1).sum(-1)
    pulled = (
        jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.where(tokens.mask, 0, gradient) == 0) & jnp.any(gradient != 0)
    )
    _true(bool(pulled), "values under the mask have a gradient in value_loss, or none has")
    alone = tokens.replace(values=None, value_logits=None)
    loss, metrics = objective.token_loss(config, alone, state)
    still = {name: value for name, value in metrics.items() if name.startswith("value/")}
    _true(not still, f"without values token_loss has the metrics {', '.join(still)}")
    if tokens.value_logits is None:  # the cross-entropy of a distribution is not 0 where its mean is right
        right = tokens.replace(values=tokens.returns, old_values=tokens.returns)
        both, _ = objective.token_loss(config, right, state)
        _close(both, loss, "where values are right, token_loss has another loss than without values")


# Of rows with a loss of sequences


def masked_sequences_do_not_matter(objective: Objective, config: Any) -> None:
    """NaN in log-probs, scores and labels under the mask reaches neither loss, metrics nor gradient."""
    sequences, state = given_sequences(objective, config), objective.init_state(config)
    counts = lambda x: sequences.mask.reshape(*sequences.mask.shape, *[1] * (x.ndim - 2))
    poison = lambda x: jnp.where(counts(x), x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x
    poisoned = jax.tree.map(poison, sequences).replace(length=jnp.where(sequences.mask, sequences.length, 0))
    seen = lambda tree: jax.tree.map(lambda x: jnp.where(sequences.mask, x, 0), tree)
    clean, dirty = (objective.sequence_loss(config, given, state) for given in (sequences, poisoned))
    _close(seen(dirty), seen(clean), "a masked sequence changes the loss or a metric of another")
    _true(
        all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(dirty)),
        "NaN under the mask comes out of sequence_loss: mask its inputs, not its result",
    )
    gradient = _sequence_gradient(objective, config, poisoned)
    _close(gradient, _sequence_gradient(objective, config, sequences), "NaN under the mask reaches the gradient")
    for name, value in gradient.items():
        still = jnp.where(counts(value), 0, value) == 0
        _true(bool(jnp.all(still & jnp.isfinite(value))), f"a masked sequence's {name} has a gradient")


def metrics_of_sequences_carry_no_gradient(objective: Objective, config: Any) -> None:
    """Every metric of sequence_loss has the shape of the loss and is not differentiated."""
    sequences, state = given_sequences(objective, config), objective.init_state(config)
    loss, metrics = objective.sequence_loss(config, sequences, state)
    _true(loss.shape == sequences.mask.shape, f"the loss has shape {loss.shape}, the mask {sequences.mask.shape}")
    _same_shape(metrics, loss)
    total = lambda x: sum(m.sum() for m in objective.sequence_loss(config, sequences.replace(**x), state)[1].values())
    if metrics:
        for name, gradient in jax.grad(total)(_differentiated(sequences)).items():
            still = bool(jnp.all(gradient == 0))
            _true(still, f"one of the metrics {', '.join(metrics)} carries a gradient of {name}: wrap it in "
                  "jax.lax.stop_gradient")  # fmt: skip


def places_of_sequences_do_not_matter(objective: Objective, config: Any) -> None:
    """Other places in the row, and other numbers for the units, move the losses with their sequences."""
    sequences, state = given_sequences(objective, config), objective.init_state(config)
    order = jnp.asarray(np.random.default_rng(0).permutation(sequences.mask.shape[-1]))
    moved = jax.tree.map(lambda x: x[:, order], sequences)
    moved = moved.replace(unit=jnp.where(moved.unit < 0, -1, jnp.max(sequences.unit) - moved.unit))
    before, after = (objective.sequence_loss(config, given, state) for given in (sequences, moved))
    _close(after, jax.tree.map(lambda x: x[:, order], before), "the places of sequences change their losses")


def packing_sequences_does_not_matter(objective: Objective, config: Any) -> None:
    """The units of two rows, or all packed in one, have the same losses."""
    apart, state = given_sequences(objective, config), objective.init_state(config)
    join = lambda x: x.reshape(1, -1, *x.shape[2:])
    together = jax.tree.map(join, apart)
    loss, packed = (objective.sequence_loss(config, given, state)[0] for given in (apart, together))
    _close(packed, join(loss), "packing two rows of sequences into one changes their losses")


def a_tie_has_one_loss(objective: Objective, config: Any) -> None:
    """Pairs whose scores, log-probs and lengths are equal have one loss, whichever of the two is preferred."""
    sequences, state = given_sequences(objective, config), objective.init_state(config)
    level = lambda x, value: None if x is None else jnp.full_like(x, value)
    tied = sequences.replace(
        logprob=level(sequences.logprob, -2.0),
        ref_logprob=level(sequences.ref_logprob, -2.5),
        behaviour_logprob=level(sequences.behaviour_logprob, -2.2),
        value=level(sequences.value, 0.0),
        score=level(sequences.score, 0.5),
        length=jnp.full_like(sequences.length, 4),
        common_gain=level(sequences.common_gain, 0.5),  # all of the log-ratio
        log_sum_squared=level(sequences.log_sum_squared, -3.0),
    )
    one, other = (
        _by_unit(objective.sequence_loss(config, given, state)[0], given)
        for given in (tied, tied.replace(label=jnp.where(tied.unit < 0, 0, 1 - tied.label)))
    )
    _close(one, jnp.full_like(one, one[0]), "two ties have two losses")
    _close(other, one, "the loss of a tie depends on which sequence is preferred")


def a_step_without_sequences_has_loss_zero(objective: Objective, config: Any) -> None:
    """Where every sequence is masked the denominator is at least 1, and loss and gradient are 0 instead of 0 / 0."""
    sequences = given_sequences(objective, config)
    nothing = jnp.zeros_like(sequences.mask)
    sequences = sequences.replace(mask=nothing)
    denominator = objective.sequence_denominator(config, nothing.reshape(-1), sequences.unit.reshape(-1))
    _true(bool(denominator >= 1), "the denominator of an empty step is below 1")
    loss = _sequence_total(objective, config, sequences)
    gradient = _sequence_gradient(objective, config, sequences)
    still = all(bool(jnp.all(value == 0)) for value in gradient.values())
    _true(bool(loss == 0) and still, f"an empty step has loss {loss}")


ContractTest = Callable[[Objective, Any], None]
OF_EVERY_ROW: tuple[ContractTest, ...] = (
    its_functions_go_together,
    jit_changes_nothing,
    another_float_compiles_nothing,
    the_state_keeps_its_form,
)
OF_CREDIT: tuple[ContractTest, ...] = (
    zero_advantage_gives_zero_policy_gradient,
    rewards_without_a_signal_give_finite_numbers,
    row_order_does_not_matter,
    pad_columns_do_not_matter,
    rows_without_a_verdict_or_a_token_do_not_matter,
    only_sampled_tokens_have_advantages,
    rewards_of_tokens_matter_where_they_are_asked_for,
)
OF_TOKENS: tuple[ContractTest, ...] = (
    masked_tokens_do_not_matter,
    metrics_of_tokens_carry_no_gradient,
    packing_tokens_does_not_matter,
    a_step_without_tokens_has_loss_zero,
)
OF_COMPARED: tuple[ContractTest, ...] = (pairs_are_of_rows_that_count,)
OF_VALUES: tuple[ContractTest, ...] = (a_critics_loss_is_of_values_alone,)
OF_SEQUENCES: tuple[ContractTest, ...] = (
    masked_sequences_do_not_matter,
    metrics_of_sequences_carry_no_gradient,
    places_of_sequences_do_not_matter,
    packing_sequences_does_not_matter,
    a_step_without_sequences_has_loss_zero,
)
OF_PAIRS: tuple[ContractTest, ...] = (a_tie_has_one_loss,)

CONTRACT_TESTS: dict[str, ContractTest] = {
    fn.__name__: fn
    for fn in (*OF_EVERY_ROW, *OF_CREDIT, *OF_TOKENS, *OF_VALUES, *OF_COMPARED, *OF_SEQUENCES, *OF_PAIRS)
}


def contract_tests_of(objective: Objective) -> dict[str, ContractTest]:
    """Returns the tests that a row takes, by the functions that it has."""
    of_tokens, of_sequences = objective.token_loss is not None, objective.sequence_loss is not None
    kinds = (
        (OF_EVERY_ROW, True),
        (OF_CREDIT, objective.advantages is not None),
        (OF_TOKENS, of_tokens),
        (OF_VALUES, objective.value_loss is not None),
        (OF_COMPARED, objective.pairs is not None),
        (OF_SEQUENCES, of_sequences),
        (OF_PAIRS, of_sequences and objective.unit_size == 2),
    )
    return {fn.__name__: fn for tests, applies in kinds if applies for fn in tests}


def _nudged(config: Any) -> Any:
    """Returns the configuration with every float in it a little larger."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    nudge = lambda v: v * 1.01 if isinstance(v, float) else _nudged(v) if dataclasses.is_dataclass(v) else v
    return dataclasses.replace(config, **{name: nudge(value) for name, value in values.items()})


def sample_groups() -> Groups:
    """Returns three groups of four rows: mixed rewards, equal rewards, and one that holds a row without a verdict."""
    rng = np.random.default_rng(1)
    reward = np.array([1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 0], np.float32)
    start, stop = rng.integers(0, 2, ROWS), rng.integers(3, WIDTH + 1, ROWS)
    column = np.arange(WIDTH)
    action_mask = (column >= start[:, None]) & (column < stop[:, None])
    on_actions = lambda x: jnp.asarray(np.where(action_mask, x, 0), jnp.float32)
    old = rng.uniform(-3, -0.5, (ROWS, WIDTH))
    return Groups(
        reward=jnp.asarray(reward),
        outcome=jnp.asarray(reward),
        valid=jnp.asarray(np.arange(ROWS) != 10),
        group=jnp.repeat(jnp.arange(NUM_GROUPS, dtype=jnp.int32), SAMPLES),
        action_mask=jnp.asarray(action_mask),
        finish=jnp.where(jnp.asarray(stop) == WIDTH, Finish.LENGTH, Finish.STOP_TOKEN).astype(jnp.int8),
        num_groups=NUM_GROUPS,
        max_completion=WIDTH,
        values=jnp.asarray(rng.uniform(0, 1, (ROWS, WIDTH)), jnp.float32),
        token_reward=on_actions(rng.uniform(-0.5, 0.5, (ROWS, WIDTH))),
        components={
            "right": jnp.asarray(reward),
            "short": jnp.where(jnp.arange(ROWS) % 3 > 0, 0.5, jnp.nan),
            "first_attempt": jnp.asarray(reward / 2),
        },
        old_logprobs=on_actions(old),
        behaviour_logprobs=on_actions(old + rng.uniform(-0.3, 0.3, (ROWS, WIDTH))),
        ref_logprobs=on_actions(old + rng.uniform(-0.5, 0.5, (ROWS, WIDTH))),
        old_entropy=on_actions(rng.uniform(0, 2, (ROWS, WIDTH))),
        teacher_logprobs=on_actions(old + rng.uniform(-0.7, 0.7, (ROWS, WIDTH))),
        old_sum_squared=on_actions(np.exp(2 * old) + rng.uniform(0, 0.1, (ROWS, WIDTH))),
        sample=jnp.tile(jnp.arange(SAMPLES, dtype=jnp.int32), NUM_GROUPS),
        turn=jnp.asarray(np.broadcast_to(column >= 3, (ROWS, WIDTH)), jnp.int8),
        tokens=jnp.asarray(rng.integers(0, 4, (ROWS, WIDTH)), jnp.int32),
        feasible=jnp.arange(ROWS) % 5 > 0,
        task=jnp.repeat(jnp.array([0, 0, 2], jnp.int32), SAMPLES),
        example=jnp.repeat(jnp.array([2, 0, 1], jnp.int32), SAMPLES),
    )


def sample_tokens() -> Tokens:
    """Returns two rows of six tokens, some masked, with ratios on both sides of usual clips."""
    rng = np.random.default_rng(2)
    draw = lambda low, high: jnp.asarray(rng.uniform(low, high, (2, WIDTH)), jnp.float32)
    new = draw(-3, -0.5)
    return Tokens(
        logprobs=new,
        old_logprobs=new + draw(-0.4, 0.4),
        behaviour_logprobs=new + draw(-0.6, 0.6),
        ref_logprobs=new + draw(-0.5, 0.5),
        entropy=draw(0, 2),
        advantages=draw(-1, 1),
        mask=jnp.array([[False, True, True, True, True, False], [False, False, True, True, False, True]]),
        segment=jnp.array([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]], jnp.int32),
        num_segments=2,
        values=draw(-1, 1),
        old_values=draw(-1, 1),
        returns=draw(-1, 1),
        selected=draw(0, 1) > 0.5,
        staleness=jnp.asarray(np.arange(2 * WIDTH).reshape(2, WIDTH) % 3, jnp.int32),
        positive_weights=jnp.broadcast_to(jnp.array([[1.75], [0.0]], jnp.float32), (2, WIDTH)),
        divergence=draw(0, 2),
        state_values=draw(0, 3),
        row_values=jnp.array([[0.2], [0.9], [0.5]])[jnp.array([[0, 0, 0, 1, 1, 2], [1, 1, 1, 1, 1, 1]])],
    )


def _values(tokens: Tokens) -> tuple[str, Array]:
    """Returns the field that a value head fills, and what is in it."""
    field = "values" if tokens.value_logits is None else "value_logits"
    return field, getattr(tokens, field)


def _poisoned(tokens: Tokens) -> Tokens:
    """Returns the tokens with NaN in every number that is masked, and an age of -1: A-3PO's factor divides by 0."""

    def poison(x: Array) -> Array:
        mask = tokens.mask.reshape(*tokens.mask.shape, *[1] * (x.ndim - 2))
        return jnp.where(mask, x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

    poisoned = jax.tree.map(poison, tokens)
    if tokens.staleness is None:
        return poisoned
    return poisoned.replace(staleness=jnp.where(tokens.mask, tokens.staleness, -1))


def sample_sequences(unit_size: int = 2, numbers: int = 1) -> Sequences:
    """Returns two rows of three units and an empty place each; the last unit is masked. One of every unit of two or
    more is preferred, and every other one of units of one. numbers: those of a row in `value`."""
    rng = np.random.default_rng(3)
    unit_size = unit_size or 3  # of lists, which may have any
    places = 3 * unit_size + 1
    draw = lambda low, high: jnp.asarray(rng.uniform(low, high, (2, places)), jnp.float32)
    number = np.arange(3 * unit_size)
    empty = lambda x, fill: jnp.asarray(np.pad(x, ((0, 0), (0, 1)), constant_values=fill))
    unit = np.stack([number // unit_size, 3 + number // unit_size]).astype(np.int32)
    preferred = number % max(unit_size, 2) == 0
    logprob = draw(-9, -3)
    sequences = Sequences(
        logprob=logprob,
        ref_logprob=logprob + draw(-1, 1),
        length=jnp.asarray(rng.integers(2, 8, (2, places)), jnp.int32),
        score=draw(-1, 1),
        label=empty(np.stack([preferred, preferred]).astype(np.float32), 0),
        unit=empty(unit, -1),
        mask=empty(unit < 5, False),
        baseline=jnp.full((2, places), 0.3, jnp.float32),
        behaviour_logprob=logprob + draw(-0.5, 0.5),
        value=draw(0, 1),
        contrast=draw(-1, 1),
        floored_logprob=draw(-4, -1),
        common_gain=draw(-1, 1),
        log_sum_squared=draw(-6, -1),
    )
    if numbers == 1:
        return sequences
    # The first is above the others or below them, as the draw has it.
    return sequences.replace(value=jnp.stack([sequences.value, *[1 - sequences.value] * (numbers - 1)], axis=-1))


# What a row is given, as a run gives it


def _groups(objective: Objective, config: Any) -> Groups:
    groups, needs = sample_groups(), objective.needs(config)
    given = {
        "values": needs.values,
        "old_logprobs": needs.credit_logprobs,
        "behaviour_logprobs": needs.credit_logprobs,
        "ref_logprobs": needs.credit_logprobs and needs.reference,
        "old_entropy": needs.credit_entropy,
        "old_sum_squared": needs.credit_sum_squared,
        "teacher_logprobs": needs.teacher,
        "tokens": needs.credit_tokens,
        "task": needs.task,
        "example": needs.examples is not None,
    }
    return groups.replace(**{name: None for name, wanted in given.items() if not wanted})


def _tokens(objective: Objective, config: Any) -> Tokens:
    needs, tokens = objective.needs(config), sample_tokens()
    if not needs.reference:
        tokens = tokens.replace(ref_logprobs=None)
    if not needs.values:
        tokens = tokens.replace(values=None)
    if not contract.reads_old_values(objective, config):
        tokens = tokens.replace(old_values=None, returns=None)
    if needs.values and needs.value_bins is not None:
        logits = np.random.default_rng(4).uniform(-1, 1, (*tokens.mask.shape, needs.value_outputs))
        tokens = tokens.replace(value_logits=jnp.asarray(logits, jnp.float32))
    if objective.advantages is None:
        tokens = tokens.replace(behaviour_logprobs=None, advantages=None)
    if objective.select is None:
        tokens = tokens.replace(selected=None)
    if objective.positive is None:
        tokens = tokens.replace(positive_weights=None)
    if needs.divergence is None:
        tokens = tokens.replace(divergence=None)
    if not needs.old_logprobs:
        tokens = tokens.replace(old_logprobs=None)
    if not needs.staleness:
        tokens = tokens.replace(staleness=None)
    if not needs.state_values:
        tokens = tokens.replace(state_values=None)
    numbers = [tokens.row_values + k / 10 for k in range(len(needs.row_value_names))]
    return tokens.replace(row_values=jnp.concatenate(numbers, axis=-1) if numbers else None)


def given_sequences(objective: Objective, config: Any) -> Sequences:
    """Returns the sample sequences with what a run would give the objective."""
    needs = objective.needs(config)
    sequences = sample_sequences(objective.unit_size, max(len(needs.row_value_names), 1))
    if needs.score_outputs > 1:
        several = lambda x: jnp.stack([x + k / 10 for k in range(needs.score_outputs)], axis=-1)
        sequences = sequences.replace(score=several(sequences.score), value=several(sequences.value**2))
    return sequences.replace(
        logprob=sequences.logprob if needs.logprobs else None,
        ref_logprob=sequences.ref_logprob if needs.reference else None,
        score=sequences.score if needs.score else None,
        behaviour_logprob=None if objective.pairs is None else sequences.behaviour_logprob,
        contrast=sequences.contrast if needs.contrast else None,
        floored_logprob=None if needs.probability_floor is None else sequences.floored_logprob,
        common_gain=sequences.common_gain if needs.common_length else None,
        log_sum_squared=sequences.log_sum_squared if needs.log_sum_squared else None,
    )


def _inputs(objective: Objective, config: Any) -> dict[str, Any]:
    """Returns the input of each function that the row has."""
    return {
        name: build(objective, config)
        for name, build in (("advantages", _groups), ("token_loss", _tokens), ("sequence_loss", given_sequences))
        if getattr(objective, name) is not None
    }


def _everything(objective: Objective, config: Any, inputs: dict[str, Any], state: PyTree) -> dict[str, Any]:
    run = {
        "advantages": _credit,
        "token_loss": lambda row, *arrays: row.token_loss(*arrays),
        "sequence_loss": lambda row, *arrays: row.sequence_loss(*arrays),
    }
    return {name: run[name](objective, config, given, state) for name, given in inputs.items()}


def _results_and_next_state(objective: Objective, config: Any, inputs: dict[str, Any], state: PyTree) -> dict[str, Any]:
    """Returns what every function gives, and the state after the step, where the row has one."""
    results = _everything(objective, config, inputs, state)
    if not jax.tree.leaves(state):
        return results
    return results | {"next_state": objective.next_state(config, state, _metrics_of(objective, results))}


def _states(objective: Objective, config: Any) -> list[PyTree]:
    """Returns the state that a run begins with and, where the row has one, the state after a step."""
    first = objective.init_state(config)
    if not jax.tree.leaves(first):
        return [first]
    later = first
    if objective.advantages is not None:
        later = _credit(objective, config, _groups(objective, config), first)["state"]
    return [first, objective.next_state(config, later, _step_metrics(objective, config, first))]


def _step_metrics(objective: Objective, config: Any, state: PyTree) -> dict[str, Array]:
    """Returns what `next_state` is given after a step: the row's own metrics, those of every update, and, of sampled
    rows, how many rows and tokens entered the loss."""
    return _metrics_of(objective, _everything(objective, config, _inputs(objective, config), state))


def _metrics_of(objective: Objective, results: dict[str, Any]) -> dict[str, Array]:
    every = ("loss", "grad_norm", "policy/entropy", "policy/logprob", "update/norm", "update/tokens")
    if objective.advantages is not None:
        every = (*every, "loss/rows", "loss/tokens")
    metrics = {**results.get("token_loss", (None, {}))[1], **results.get("sequence_loss", (None, {}))[1]}
    ones = dict.fromkeys((*every, "update/skipped_nonfinite", "update/skipped_empty"), jnp.float32(1))
    return ones | {name: jnp.mean(value.astype(jnp.float32)) for name, value in metrics.items()}


def _form(state: PyTree) -> Any:
    return jax.tree.map(lambda x: (jnp.shape(x), str(jnp.asarray(x).dtype)), state)


def _credit(objective: Objective, config: Any, groups: Groups, state: PyTree) -> dict[str, Any]:
    reward = contract.shaped_reward(objective, config, groups, state)
    advantages, following, counters = objective.advantages(config, groups, reward, state)
    nothing = jnp.zeros(groups.action_mask.shape)
    keep = objective.keep(config, groups)
    loss_mask = groups.action_mask & keep[:, None]
    if objective.keep_tokens is not None:
        loss_mask = loss_mask & objective.keep_tokens(config, groups)
    return {
        "keep": keep,
        "advantages": advantages,
        "selected": nothing if objective.select is None else objective.select(config, groups, advantages),
        "positive": keep & False if objective.positive is None else objective.positive(config, groups),
        "returns": nothing if objective.returns is None else objective.returns(config, groups, reward),
        "loss_mask": loss_mask,
        "weights": objective.weights(config, loss_mask, groups.max_completion),
        "state": following,
        "counters": counters,
        "denominator": objective.denominator(config, loss_mask, jnp.int32(len(keep)), groups.max_completion),
    }


def _split(credit: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    fixed = ("state", "counters", "denominator")
    return {k: v for k, v in credit.items() if k not in fixed}, {k: credit[k] for k in fixed}


def _total(objective: Objective, config: Any, tokens: Tokens) -> Array:
    loss, _ = objective.token_loss(config, tokens, objective.init_state(config))
    weights = objective.weights(config, tokens.mask, WIDTH)
    denominator = objective.denominator(config, tokens.mask, jnp.int32(len(tokens.mask)), WIDTH)
    return jnp.sum(jnp.where(tokens.mask, weights * loss, 0)) / denominator


def _gradient(objective: Objective, config: Any, tokens: Tokens) -> Array:
    return jax.grad(lambda lp: _total(objective, config, tokens.replace(logprobs=lp)))(tokens.logprobs)


def _sequence_total(objective: Objective, config: Any, sequences: Sequences) -> Array:
    loss, _ = objective.sequence_loss(config, sequences, objective.init_state(config))
    denominator = objective.sequence_denominator(config, sequences.mask.reshape(-1), sequences.unit.reshape(-1))
    return jnp.sum(jnp.where(sequences.mask, loss, 0)) / denominator


def _differentiated(sequences: Sequences) -> dict[str, Array]:
    """Returns what of the sequences depends on the model that learns."""
    fields = ("logprob", "score", "contrast", "floored_logprob", "common_gain")
    return {name: value for name in fields if (value := getattr(sequences, name)) is not None}


def _sequence_gradient(objective: Objective, config: Any, sequences: Sequences) -> dict[str, Array]:
    total = lambda x: _sequence_total(objective, config, sequences.replace(**x))
    return jax.grad(total)(_differentiated(sequences))


def _by_unit(loss: Array, sequences: Sequences) -> Array:
    """Returns the sum of the losses of every unit that counts, [units]."""
    units = np.unique(np.asarray(sequences.unit)[np.asarray(sequences.mask)])
    return jnp.stack([jnp.sum(jnp.where(sequences.mask & (sequences.unit == unit), loss, 0)) for unit in units])


def _same_shape(metrics: dict[str, Array], loss: Array) -> None:
    for name, value in metrics.items():
        _true(value.shape == loss.shape, f"metric {name!r} has shape {value.shape}, the loss {loss.shape}")


def _close(got: Any, expected: Any, message: str) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        _true(_is_close(a, b), f"{message}\n  got      {a}\n  expected {b}")


def _is_close(got: Any, expected: Any) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    near = lambda a, b: np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    arrays = ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)
    return all(a.shape == b.shape and near(a, b) for a, b in arrays)


def _true(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def default_config(objective: Objective) -> Any:
    """Returns the configuration with every default. Raises TypeError naming the fields that have none."""
    missing = [
        field.name
        for field in dataclasses.fields(objective.config)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        name = objective.config.__name__
        raise TypeError(f"{name} has fields without a default, {', '.join(missing)}: give the checks an instance of it")
    return objective.config()
