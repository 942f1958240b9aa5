"""Sampling strategies: rows that begin in other rows, in a guide's words or in the data's, and second attempts. Whole
runs of each are those of its recipe (tests/recipe_runs.py)."""

import dataclasses
import functools
import json
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import published_forms
import pytest
import test_sampler as sampling
from documented import write_part
from short_runs import run
from small_model import BIGRAM, PLAIN_DECODER

import jrl
from jrl.config.errors import ConfigError
from jrl.device.sharding import MeshShape, make_mesh
from jrl.ops.draw import draw
from jrl.ops.keys import row_key, token_key
from jrl.ops.mixture import mixed_logits
from jrl.rollout.collect import last_of_two, prefix_of, scored_columns, tokens_of
from jrl.rollout.sampler import Sampler, SamplingParams, static_options
from jrl.rollout.scoring import HostScores
from jrl.rollout.segments import next_segment
from jrl.rollout.strategies import STRATEGIES, branching, reset, roll_in, roll_out, rows, self_correction
from jrl.rollout.strategies.branching import BranchDrawing, Branching
from jrl.rollout.strategies.contract import ConfiguredStrategy, Setting, Strategy
from jrl.rollout.strategies.opponent import MixtureOpponent, OpponentDrawing
from jrl.rollout.strategies.partial import FirstSegment
from jrl.rollout.strategies.reference_samples import ReferenceDrawing, ReferenceSamples
from jrl.rollout.strategies.refinement import Refinement
from jrl.rollout.strategies.reset import Reset
from jrl.rollout.strategies.roll_in import RollIn, RollInDrawing, taken_of_guide
from jrl.rollout.strategies.roll_out import RollOut, RollOutDrawing, rolled_in
from jrl.rollout.strategies.self_correction import AttemptDrawing
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Example, Message, visit_uid
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.tasks.tokenizers.published import HuggingFace, build
from jrl.tasks.verdict import Status
from jrl.types import Finish, PromptBatch

CFG = dataclasses.replace(sampling.CFG, layers=1)
CONFIG = sampling.BASE  # 9 tokens
LONGEST, WIDTH = 9, sampling.WIDTH + 9
PROMPTS = sampling.prompts(4, seed=3)


SMALL = [
    BIGRAM, "Online.prompts=4", "Online.samples=4", "Online.steps=1", "Log.samples=0", "Scoring.workers=1",
]  # fmt: skip


def rows_of(folder):
    """Returns the metrics of a run without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "host/"))} for row in rows]


sample = functools.partial(sampling.run, cfg=CFG)


def starts(out):
    """Returns the first column of each row that the policy drew."""
    return np.where(out.action_mask.any(1), out.action_mask.argmax(1), out.length)


def assert_rows_are_whole(out, samples):
    """Shapes and names as those of plain sampling, and one run of actions that ends the row."""
    assert out.tokens.shape == (4 * samples, WIDTH)
    np.testing.assert_array_equal(out.group, np.repeat(np.arange(4), samples))
    np.testing.assert_array_equal(out.sample, np.tile(np.arange(samples), 4))
    columns, given = np.arange(WIDTH), np.repeat(PROMPTS.length, samples)
    np.testing.assert_array_equal(out.action_mask, (columns >= starts(out)[:, None]) & (columns < out.length[:, None]))
    assert (out.length <= given + LONGEST).all() and (starts(out) >= given).all()
    assert (out.tokens[columns >= out.length[:, None]] == sampling.PAD).all()
    np.testing.assert_array_equal(out.version, np.where(out.action_mask, 4, -1))
    for row, prompt in enumerate(np.repeat(PROMPTS.tokens, samples, axis=0)):
        np.testing.assert_array_equal(out.tokens[row, : given[row]], prompt[: given[row]])


# Branching (S8)

EVERY_THIRD = bytes(int(token % 3 > 0) for token in range(96))


def test_branches_go_on_from_within_the_first_rows():
    drawing = BranchDrawing(Branching(first=2, continuations=2, candidates=2), EVERY_THIRD)
    mesh = make_mesh(MeshShape(data=2, tensor=2), jax.devices()[:4])
    branched = sample(PROMPTS, CONFIG, samples=6, drawing=drawing, mesh=mesh)
    assert_rows_are_whole(branched, 6)
    plain, by_prompt = sample(PROMPTS, CONFIG, samples=2), np.arange(24).reshape(4, 6)
    firsts = jax.tree.map(lambda x: x[by_prompt[:, :2].ravel()] if x.ndim else x, branched)
    sampling.assert_same(plain, firsts, fields=("tokens", "length", "action_mask", "finish"))
    logits = sampling.assert_logprobs(branched, 1.0, CFG)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy, seen, different = -(np.exp(logp) * logp).sum(-1), 0, 0
    for prompt in range(4):
        for i in range(2):
            parent, start = by_prompt[prompt, i], PROMPTS.length[prompt]
            drawn = np.arange(start + 1, branched.length[parent])  # not the first token
            drawn = drawn[branched.tokens[parent, drawn] % 3 > 0]
            best = drawn[np.argsort(-entropy[parent, drawn])][:2]
            pair = by_prompt[prompt, 2 + 2 * i : 4 + 2 * i]
            column, other = starts(branched)[pair]
            assert column == other and (column in best if len(best) else column == start)
            seen += len(best) > 0
            for row in pair:
                np.testing.assert_array_equal(branched.tokens[row, :column], branched.tokens[parent, :column])
            texts = {tuple(branched.tokens[row, column : branched.length[row]]) for row in [parent, *pair]}
            different += len(texts) > 1
    assert seen >= 4 and different >= 4  # each has noise of its own


def test_a_group_has_as_many_rows_as_branching_draws():
    setting = types.SimpleNamespace(samples=8, stop_strings=())
    with pytest.raises(ValueError, match=r"4 \* \(1 \+ 3\) = 16 .* Online.samples is 8"):
        branching.check(Branching(), setting)
    setting.samples = 16
    branching.check(Branching(), setting)
    short, long, control = (branching.drawing(Branching(min_characters=n), ByteTokenizer()).eligible for n in (1, 2, 1))
    assert short[ord("a")] == 1 and long[ord("a")] == 0 and control[ByteTokenizer().end_id] == 0


# Roll-in (S7)


def test_a_guide_begins_and_the_policy_goes_on():
    guide = sampling.weights(CFG, seed=1)
    params = {"policy": sampling.weights(CFG), "guide": guide}
    out = sample(PROMPTS, CONFIG, samples=3, drawing=RollInDrawing(RollIn(guide="guide", tokens=4)), params=params)
    assert_rows_are_whole(out, 3)
    sampling.assert_logprobs(out, 1.0, CFG)
    # The guide's draw is that of a fourth sample of the prompt with its weights.
    said = sample(PROMPTS, CONFIG, samples=4, params=guide)
    for prompt in range(4):
        first, *others = starts(out)[3 * prompt : 3 * prompt + 3]
        begun, words = first - PROMPTS.length[prompt], said.length[4 * prompt + 3] - PROMPTS.length[prompt]
        most = min(4, words - (said.finish[4 * prompt + 3] == Finish.STOP_TOKEN and words <= 4))
        assert others == [first, first] and min(1, most) <= begun <= most
        np.testing.assert_array_equal(out.tokens[3 * prompt, :first], said.tokens[4 * prompt + 3, :first])
    assert (starts(out) > np.repeat(PROMPTS.length, 3)).any()


def test_the_policy_draws_a_token_and_the_guide_goes_on():
    tokens, guide, policy = 2, sampling.weights(CFG, seed=1), sampling.weights(CFG)
    drawing = RollOutDrawing(RollOut(guide="guide", tokens=tokens))
    out = sample(PROMPTS, CONFIG, samples=3, drawing=drawing, params={"policy": policy, "guide": guide})
    assert out.tokens.shape == (12, WIDTH)
    np.testing.assert_array_equal(out.group, np.repeat(np.arange(4), 3))
    np.testing.assert_array_equal(out.sample, np.tile(np.arange(3), 4))
    sampling.assert_logprobs(out, 1.0, CFG)  # of the policy, on its own tokens
    np.testing.assert_array_equal(out.version, np.where(out.action_mask, 4, -1))
    # The roll-in is that of a fourth sample of the prompt; rows of a prompt begin with the same part of it.
    said = sample(PROMPTS, CONFIG, samples=4, params=policy)
    begun, drawn = starts(out), out.action_mask.sum(1)
    for row in range(12):
        own = 4 * (row // 3) + 3
        assert begun[row] == begun[3 * (row // 3)] and PROMPTS.length[row // 3] <= begun[row] < said.length[own]
        np.testing.assert_array_equal(out.tokens[row, : begun[row]], said.tokens[own, : begun[row]])
    columns = np.arange(WIDTH)
    np.testing.assert_array_equal(out.action_mask, (columns >= begun[:, None]) & (columns < (begun + drawn)[:, None]))
    assert (drawn <= tokens).all() and (drawn == tokens).any()
    assert (out.length <= np.repeat(PROMPTS.length, 3) + LONGEST).all()
    # From there on a row is what the guide says after it, of the same name.
    went_on = begun + drawn < out.length
    given = PromptBatch(
        tokens=np.asarray(out.tokens)[:, : WIDTH], length=np.where(went_on, begun + drawn, 0).astype(np.int32),
        uid=np.repeat(PROMPTS.uid, 3, axis=0), sample=np.asarray(out.sample),
    )  # fmt: skip
    alone = sample(given, CONFIG, samples=1, params=guide)
    assert went_on.any()
    for row in np.flatnonzero(went_on):
        np.testing.assert_array_equal(alone.tokens[row, : out.length[row]], out.tokens[row, : out.length[row]])
    # LOLS: of some prompts the policy goes on itself, after the same tokens; a prompt's rows are ended by one of them.
    lols = RollOutDrawing(RollOut(guide="guide", tokens=tokens, probability=0.5))
    mixed = sample(PROMPTS, CONFIG, samples=3, drawing=lols, params={"policy": policy, "guide": guide})
    itself = sample(given, CONFIG, samples=1, params=policy)
    same = lambda row, other: bool(
        (mixed.tokens[row, : mixed.length[row]] == other.tokens[row, : mixed.length[row]]).all()
    )
    by_guide, by_policy = ([all(same(row, whose) for row in range(3 * p, 3 * p + 3) if went_on[row]) for p in range(4)]
                           for whose in (alone, itself))  # fmt: skip
    assert all(a or b for a, b in zip(by_guide, by_policy)) and not all(by_guide) and not all(by_policy)
    for name in ("action_mask", "sampler_logprobs", "version"):
        np.testing.assert_array_equal(getattr(mixed, name), getattr(out, name))
    # Where the guide is the policy, who goes on makes no difference.
    drawings = [RollOutDrawing(RollOut(guide="policy", tokens=tokens, probability=p)) for p in (0.5, 1.0)]
    some, every = (
        sample(PROMPTS, CONFIG, samples=3, drawing=drawing, params={"policy": policy}) for drawing in drawings
    )
    np.testing.assert_array_equal(some.tokens, every.tokens)


def test_what_is_kept_of_a_roll_in_by_hand():
    # floor(place * words): 0, 2 and 3 of 4; all of one token is drawn again; of none nothing is kept. The guide ends
    # what chance gives it, wherever the roll-in was cut.
    words, place = jnp.array([4, 4, 4, 1, 0]), jnp.array([0.0, 0.5, 0.999, 0.999, 0.5])
    chance = jnp.array([0.9, 0.1, 0.6, 0.59, 0.0])
    kept, guided = jax.jit(rolled_in, static_argnames="probability")(words, place, chance, probability=0.6)
    assert kept.tolist() == [0, 2, 3, 0, 0] and guided.tolist() == [False, True, False, True, True]
    kept, guided = rolled_in(jnp.array([3, 1]), jnp.array([1.0, 1.0]), jnp.array([0.0, 0.999]), probability=1.0)
    assert kept.tolist() == [2, 0] and guided.tolist() == [True, True]  # a place that was rounded up


def test_what_is_taken_of_a_guide_by_hand():
    words = jnp.array([4, 4, 4, 4, 0, 1])
    chance = jnp.array([0.1, 0.1, 0.1, 0.6, 0.1, 0.1])
    place = jnp.array([0.0, 0.5, 0.999, 0.5, 0.5, 0.999])
    # 1 + floor(place * words): 1, 3, 4; by chance none; nothing was said; all of one word.
    taken = jax.jit(taken_of_guide, static_argnames="probability")(words, chance, place, probability=0.5)
    assert taken.tolist() == [1, 3, 4, 0, 0, 1]


def test_a_guide_that_is_not_there_is_refused(tmp_path):
    bindings = ["Online.strategy=@RollIn()", "RollIn.guide='guide'", "RollIn.tokens=1"]
    with pytest.raises(ConfigError, match=r"RollIn.guide names the role 'guide', which no earlier stage trains"):
        run([], tmp_path, *bindings)
    out = ["Online.strategy=@RollOut()", "RollOut.guide='guide'"]
    with pytest.raises(ConfigError, match=r"RollOut.guide names the role 'guide', which no earlier stage trains"):
        run([], tmp_path, *out)
    with pytest.raises(ConfigError, match=r"RollOut.tokens = 99 leaves the guide nothing: .* has 12 tokens"):
        run([], tmp_path, *out, "RollOut.tokens=99", "Online.completion_length=12", "Sampler.completion_length=24")
    # Roles that stages create: no stage may train them.
    with pytest.raises(ConfigError, match=r"'average', which only a stage .* has; set AdamW.average, such as 0.99"):
        run([], tmp_path, *bindings, "RollIn.guide='average'")
    with pytest.raises(ConfigError, match=r"'reference', which this objective does not read; use one with a KL"):
        run([], tmp_path, *bindings, "RollIn.guide='reference'")
    guided = ["Config.stages=[@guide/Offline(), @Online()]", "guide/Offline.source=@Demonstrations()",
              "guide/Offline.objective=@SFT()", "guide/Offline.trains='guide'"]  # fmt: skip
    with pytest.raises(ConfigError, match=r"a verifier that rewards spans rewards those words, which are not learned"):
        run([], tmp_path, *out, *guided, "Online.objective=@PPO()", "Scoring.verifiers=[@ConfidenceSpan()]")
    with pytest.raises(ConfigError, match=r"Online.samples = 1 draws one"):
        run([], tmp_path, *out, "Online.samples=1", "Online.objective=@Reinforce()")
    with pytest.raises(ConfigError, match=r"RollOut.probability must be above 0 and at most 1; got 0"):
        run([], tmp_path, *out, "RollOut.probability=0")
    with pytest.raises(ConfigError, match=r"RollIn.tokens = 99 leaves the policy nothing"):
        run([], tmp_path, *bindings[:2], "RollIn.tokens=99")


@pytest.mark.parametrize(
    ("row", "config"),
    [
        (branching, Branching()),
        (roll_in, RollIn(guide="guide", tokens=2)),
        (roll_out, RollOut(guide="guide")),
        (reset, reset.Reset()),
    ],
)
def test_stop_strings_are_refused_where_one_may_cross_a_seam(row, config):
    setting = Setting(samples=16, completion_length=9, stop_strings=(), roles=frozenset({"guide"}))
    row.STRATEGY.check(config, setting)
    refusal = rf"{type(config).__name__} does not look for stop strings .*Sampler.stop_strings = \('ab',\)"
    with pytest.raises(ValueError, match=refusal):
        row.STRATEGY.check(config, setting._replace(stop_strings=("ab",)))


# Opponents (S14)


def test_opponents_are_drawn_from_the_mixture():
    params = {"policy": sampling.weights(CFG), "reference": sampling.weights(CFG, seed=1)}
    drawing = OpponentDrawing(MixtureOpponent(opponents=1, weight=0.25))
    out = sample(PROMPTS, CONFIG, samples=3, drawing=drawing, params=params)
    mixed = np.arange(12) % 3 == 2
    plain = sample(PROMPTS, CONFIG, samples=2)
    own = jax.tree.map(lambda x: x[~mixed] if x.ndim else x, out)
    sampling.assert_same(plain, own, fields=("tokens", "length", "action_mask", "finish", "sampler_logprobs", "group"))
    assert not out.action_mask[mixed].any() and (out.turn[mixed] == -1).all() and (out.turn[~mixed] == 0).all()
    np.testing.assert_array_equal(out.sample, np.tile(np.arange(3), 4))
    # Its tokens are those of the race that the mixture's logits run, with the noise of a third sample.
    logits = mixed_logits(*(sampling.scores(out, CFG, params[role]) for role in ("policy", "reference")), weight=0.25)
    seen = 0
    for row in np.flatnonzero(mixed):
        start, end = PROMPTS.length[row // 3], out.length[row]
        key = row_key(jax.random.key(11), 0, PROMPTS.uid[row // 3], 2)
        for column in range(start, end):
            assert draw(token_key(key, column), logits[row, column]) == out.tokens[row, column]
            seen += 1
    assert seen > 8


def test_an_opponent_needs_a_reference_and_a_player(tmp_path):
    bindings = ["Online.strategy=@MixtureOpponent()"]
    with pytest.raises(ConfigError, match="begin differently, which cannot share a prefix"):
        run(SMALL, tmp_path, *bindings, "Online.objective=@NashMD()", "Learner.prefix_sharing='in_row'")
    with pytest.raises(ConfigError, match="mixes the policy with the reference"):
        run(SMALL, tmp_path, *bindings)
    with pytest.raises(ConfigError, match=r"opponents = 4 of Online.samples = 4"):
        run(SMALL, tmp_path, *bindings, "Online.objective=@NashMD()", "MixtureOpponent.opponents=4")


# Samples of the reference (P20)


def test_half_of_the_samples_are_the_references_with_tokens_to_learn_from():
    params = {"policy": sampling.weights(CFG), "reference": sampling.weights(CFG, seed=1)}
    out = sample(PROMPTS, CONFIG, samples=4, drawing=ReferenceDrawing(ReferenceSamples()), params=params)
    theirs = np.arange(16) % 4 >= 2
    fields = ("tokens", "length", "action_mask", "finish", "sampler_logprobs", "group")
    own, other = (jax.tree.map(lambda x, rows=rows: x[rows] if x.ndim else x, out) for rows in (~theirs, theirs))
    sampling.assert_same(sample(PROMPTS, CONFIG, samples=2), own, fields=fields)
    after = PROMPTS.replace(sample=np.full(4, 2, np.int32))
    sampling.assert_same(sample(after, CONFIG, samples=2, params=params["reference"]), other, fields=fields)
    np.testing.assert_array_equal(out.sample, np.tile(np.arange(4), 4))
    assert (out.turn == 0).all()


# Resets (S6)


def visit(answer, name="x"):
    return Visit(Example(name, (Message("user", "?"),), answer=answer), visit_uid(name, 0), (1, 2))


def test_a_reset_keeps_a_part_of_the_answer():
    tokenizer, found = ByteTokenizer(), []
    for i in range(200):
        ids = reset.prefix(Reset(), visit("abcde", f"x{i}"), tokenizer, 99)
        assert bytes(ids) == b"abcde"[: len(ids)]
        found.append(len(ids))
    # h is 1 to 4 of 5 tokens, each about as often.
    counts = np.bincount(found)
    assert counts[0] == 0 and len(counts) == 5 and counts[1:].min() > 30
    assert reset.prefix(Reset(), visit("abcde", "x7"), tokenizer, 99) == tuple(b"abcde"[: found[7]])  # by name
    assert len(reset.prefix(Reset(), visit("abcde" * 9), tokenizer, 1)) == 1  # what is left of Data.prompt_length


def test_answers_without_two_tokens_and_visits_by_chance_are_not_reset():
    tokenizer = ByteTokenizer()
    assert [reset.prefix(Reset(), visit(answer), tokenizer, 9) for answer in ("a", "", None)] == [()] * 3
    half = [len(reset.prefix(Reset(probability=0.5), visit("abc", f"x{i}"), tokenizer, 9)) > 0 for i in range(400)]
    assert 150 < sum(half) < 250
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        Reset(probability=0.0)


def test_a_template_that_no_prompt_fills_is_refused_at_the_start(tmp_path):
    with pytest.raises(ValueError, match=r"Reset.template is '\{answr\}', and none of the first \d+ examples has that; "
                                         "the first one has answer"):  # fmt: skip
        run(SMALL, tmp_path, "Online.strategy=@Reset()", "Reset.template='{answr}'", "Data.prompt_length=10")
    some = [visit(None), visit("12")]
    STRATEGIES["Reset"].check_prompts(Reset(), some)
    solution, numbers = Reset(template="{solution}"), Refinement(condition="{answer}{score}")
    with pytest.raises(ValueError, match="none of the first 2 examples has that; the first one has no text"):
        STRATEGIES["Reset"].check_prompts(solution, some)
    rated = some[1]._replace(example=dataclasses.replace(some[1].example, info={"score": 3, "steps": ["a"]}))
    STRATEGIES["Refinement"].check_prompts(numbers, [some[0], rated])
    with pytest.raises(ValueError, match=r"Refinement.condition is .* the first one has answer$"):
        STRATEGIES["Refinement"].check_prompts(numbers, some[1:])
    with pytest.raises(ValueError, match="the first one has answer, score"):
        STRATEGIES["Refinement"].check_prompts(Refinement(condition="{steps}"), [rated])


# Two attempts (S17)


def test_turns_by_hand():
    # y1 has 3 tokens, the instruction 2, y2 2: gen = 1 1 1 0 0 1 1, turns 1 1 1 - - 2 2, counted from 0 here.
    field = lambda mask, number: {
        "tokens": jnp.where(mask, number, 50)[None], "action_mask": mask[None], "turn": jnp.zeros((1, 8), jnp.int8),
        "sampler_logprobs": jnp.where(mask, -number, 0)[None], "truncated_logprobs": None, "support_size": None,
        "version": jnp.where(mask, 9, -1)[None], "length": mask.nonzero()[0].max(keepdims=True) + 1,
        "finish": jnp.array([number]), "group": jnp.array([0]), "sample": jnp.array([0]),
    }  # fmt: skip
    columns = np.arange(8)
    first, second = field((columns > 0) & (columns < 4), 1), field((columns > 5), 2)
    both = rows.second_turn(first, second)
    assert both["action_mask"][0].tolist() == [False, True, True, True, False, False, True, True]
    assert both["turn"][0].tolist() == [0, 0, 0, 0, 0, 0, 1, 1] and both["length"].tolist() == [8]
    assert both["sampler_logprobs"][0].tolist() == [0, -1, -1, -1, 0, 0, -2, -2] and both["finish"].tolist() == [2]
    nothing = {**second, "action_mask": jnp.zeros((1, 8), bool)}
    alone = rows.second_turn(first, nothing)
    assert alone["length"].tolist() == [4] and alone["finish"].tolist() == [1] and alone["turn"].sum() == 0
    np.testing.assert_array_equal(alone["tokens"], first["tokens"])


def test_the_same_tokens_come_after_every_row():
    tokens, length = rows.appended(jnp.array([[1, 2, 9], [3, 9, 9]]), jnp.array([2, 1]), jnp.array([7, 8]), 9)
    assert tokens.tolist() == [[1, 2, 7, 8, 9], [3, 7, 8, 9, 9]] and length.tolist() == [4, 3]


def test_a_second_attempt_follows_the_first_and_the_instruction():
    out = sample(PROMPTS, CONFIG, samples=3, drawing=AttemptDrawing((11, 12, 13)))  # 3 and twice 3 tokens
    plain = sample(PROMPTS, dataclasses.replace(CONFIG, completion_length=3), samples=3)
    sampling.assert_logprobs(out, 1.0, CFG)
    assert out.tokens.shape == (12, WIDTH) and out.sample.tolist() == [0, 1, 2] * 4
    answered = plain.finish == Finish.STOP_TOKEN
    assert 0 < answered.sum() < 12
    for row in range(12):
        start, end = PROMPTS.length[row // 3], plain.length[row]
        np.testing.assert_array_equal(out.tokens[row, :end], plain.tokens[row, :end])
        np.testing.assert_array_equal(out.sampler_logprobs[row, start:end], plain.sampler_logprobs[row, start:end])
        actions = np.arange(start, end)
        if answered[row]:
            np.testing.assert_array_equal(out.tokens[row, end : end + 3], [11, 12, 13])
            actions = np.concatenate([actions, np.arange(end + 3, out.length[row])])
            assert 1 <= out.length[row] - (end + 3) <= 3
        else:  # cut: no second attempt
            assert out.length[row] == end
        np.testing.assert_array_equal(np.flatnonzero(out.action_mask[row]), actions)
        np.testing.assert_array_equal(out.turn[row, actions], (actions >= end).astype(int))


def test_what_stands_between_attempts_is_a_turn_of_the_user():
    t = ByteTokenizer()
    ids = self_correction.between(t, "Again.")
    assert ids == (t.role_ids["user"], *b"Again.", t.end_id, t.role_ids["assistant"])


def test_blanks_before_the_stop_token_of_a_template_are_not_said_again(tmp_path):
    pytest.importorskip("tokenizers")
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} </s>"
        "{% endif %}{% endfor %}"
    )
    folder = published_forms.byte_level("mistral", tmp_path / "m", template=template)
    tokenizer = build(HuggingFace(path=str(folder)), [])
    assert tokenizer.spelled(self_correction.between(tokenizer, "Check.")) == "[INST] Check. [/INST]"


def test_each_attempt_is_scored():
    host = {"action_mask": np.array([[0, 1, 1, 0, 0, 1, 0], [0, 1, 1, 1, 0, 0, 0], [0] * 7], bool), "length": [6, 4, 1]}
    columns = lambda row, attempts: [part.tolist() for part in scored_columns(host, row, 1, attempts)]
    assert columns(0, 2) == [[1, 2], [5]] and columns(1, 2) == [[1, 2, 3], []] and columns(2, 2) == [[], []]
    assert columns(0, 1) == [[1, 2, 3, 4, 5]] and columns(2, 1) == [[]]
    right, wrong, lost = Status.CORRECT, Status.WRONG, Status.INFRA_ERROR
    scores = HostScores(
        reward=np.array([1, 0.5, 9, 1, 0.25, 9, 0, 9], np.float32),
        valid=np.array([True, True, False, True, True, True, True, False]),
        verdict=np.array([right, wrong, lost, right, wrong, right, wrong, lost], np.int8),
        outcome=np.array([1, 0, 0, 1, 0, 1, 0, 0], np.float32),
        components={"Exact": np.arange(8, dtype=np.float32)},
        details=["", "", "a", "", "", "", "", "b"],
    )
    found = last_of_two(scores, 4)
    assert found.reward.tolist() == [1, 0.5, 0, 0] and found.valid.tolist() == [True, True, False, False]
    assert found.verdict.tolist() == [right, wrong, lost, lost] and found.details == ["", "", "a", "b"]
    np.testing.assert_array_equal(found.components["first_attempt"], [0.25, 9, np.nan, np.nan])
    assert found.components["Exact"].tolist() == [0, 1, 2, 3] and found.counts["INFRA_ERROR"] == 2


# Segments (S5)


def test_segments_of_the_same_weights_are_what_one_call_draws():
    whole = sample(PROMPTS, CONFIG, samples=3)
    parts = sample(PROMPTS, CONFIG, samples=3, drawing=FirstSegment(4))
    assert parts.tokens.shape == (12, WIDTH) and (parts.length - np.repeat(PROMPTS.length, 3) <= 4).all()
    mesh = sampling.one_device()
    config = Sampler(completion_length=LONGEST, slots=5, layers="unrolled")
    options = static_options(config, sampling.decoder.MODEL, CFG, 3, sampling.STOP_IDS, sampling.PAD)
    further = jax.jit(functools.partial(next_segment, tokens=4, options=options))
    uid = jnp.repeat(PROMPTS.uid, 3, axis=0)
    params = SamplingParams(jnp.float32(1.0), None, None, None)
    expected = np.where(whole.action_mask, 4, -1)
    place = np.arange(WIDTH) - np.repeat(PROMPTS.length, 3)[:, None]
    for version, begin in ((5, 4), (6, 8)):  # 4 tokens, 4, and the last 1
        with jax.set_mesh(mesh):
            parts = further(
                sampling.weights(CFG), parts, uid, jax.random.key(11), np.uint32(0), np.int32(version), params
            )
        parts = jax.tree.map(np.asarray, parts)
        expected = np.where(whole.action_mask & (place >= begin), version, expected)
    sampling.assert_same(
        whole, parts, fields=("tokens", "length", "action_mask", "finish", "sampler_logprobs", "group")
    )
    np.testing.assert_array_equal(parts.version, expected)
    assert (expected == 6).any() and (expected[place == 0] == 4).any()


@pytest.fixture(scope="module")
def in_segments(tmp_path_factory):
    bindings = [
        "Online.strategy=@Partial()", "Partial.tokens=2", "Sampler.completion_length=6", "Online.steps=5",
        "Partial.newest_only=True",
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("segments")
    return bindings, folder, run(SMALL, folder, *bindings)


def test_segments_are_of_the_versions_of_their_steps(in_segments):
    _, _, steps = in_segments
    for t, step in enumerate(steps):
        version, acts = step.rollout["version"], step.rollout["action_mask"]
        place = np.cumsum(acts, axis=1) - 1
        # K = 3 segments of 2 tokens: segment i of what update t learns from is of version max(0, t - 2 + i).
        np.testing.assert_array_equal(version[acts], np.maximum(0, t - 2 + place // 2)[acts])
        newest = acts & (version == t)
        assert step.metrics["loss/tokens"] == newest[step.rollout["valid"]].sum()
        assert step.metrics["rollout/staleness"] == pytest.approx((t - version[acts]).mean())
    assert (np.concatenate([step.rollout["action_mask"].sum(1) for step in steps]) == 6).any()


def test_a_run_in_segments_is_left_and_resumed(in_segments, tmp_path):
    bindings, folder, _ = in_segments
    run(SMALL, tmp_path, *bindings, stop_after=2)  # one batch with 2 segments, one with 1
    run(SMALL, tmp_path, *bindings)
    assert rows_of(tmp_path) == rows_of(folder)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["Partial.tokens=6"], "draws every completion at once"),
        (["Online.lag=1"], "declares the version of every segment"),
        (["Online.objective=@DAPO()"], "DAPO.max_refills = None"),
        ([], r"2 versions old, and GRPO as configured has no bound .* or Partial.tokens = 3"),
        (["Sampler.stop_strings=('.',)"], "does not look for stop strings"),
    ],
)
def test_what_does_not_go_with_segments_is_refused(tmp_path, more, reason):
    bindings = ["Online.strategy=@Partial()", "Partial.tokens=2", "Sampler.completion_length=6"]
    with pytest.raises(ConfigError, match=reason):
        run(SMALL, tmp_path, *bindings, *more)


# Whole runs


def test_what_waits_in_the_queue_begins_alike_after_a_resume(tmp_path):
    bindings = ["Online.strategy=@Reset()", "Online.lag=1", "Online.steps=3", "Data.prompt_length=10"]
    run(SMALL, tmp_path / "whole", *bindings)
    run(SMALL, tmp_path / "cut", *bindings, stop_after=1)
    steps = run(SMALL, tmp_path / "cut", *bindings)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    # An answer of two digits has begun with its first one, which the text that is scored and stored has too.
    texts = [text for step in steps for _, text in step.texts]
    given = [step.rollout["action_mask"].argmax(1) for step in steps]
    assert len({start for row in given for start in row}) > 1 and any(text[:1].isdigit() for text in texts)
    for step, starts in zip(steps, given):
        prompts = np.repeat([len(visit.prompt) for visit in step.batch.visits], 4)
        assert step.metrics["rollout/prefix_length"] == pytest.approx((starts - prompts).mean())


def test_a_strategy_of_a_parts_file_begins_every_completion(tmp_path):
    part = write_part("A sampling strategy", tmp_path)
    own = [f"Config.parts=['{part}']", "Online.strategy=@Opening()", "Opening.text='12'", "Data.prompt_length=10"]
    (step,) = run(SMALL, tmp_path / "run", *own)
    assert all(text.startswith("12") for _, text in step.texts) and step.metrics["rollout/prefix_length"] == 2
    prompts = np.repeat([len(visit.prompt) for visit in step.batch.visits], 4)
    np.testing.assert_array_equal(step.rollout["action_mask"].argmax(1), prompts + 2)  # it is not learned


@pytest.mark.parametrize(("name", "message"), [("score", "two attempts in it"), ("nash_md", "an opponent's tokens")])
def test_rewards_that_a_strategy_compares_are_not_shaped(name, message):
    with pytest.raises(ConfigError, match=message):
        jrl.load_config(f"configs/algos/{name}.gin", ["Online.shaping=@Shaping()"])


class Changed(NamedTuple):
    """Draws plain rows, and returns what a function makes of them."""

    change: Callable[..., Any]
    roles: tuple[str, ...] = ()

    def __call__(self, shard):
        return self.change(
            shard.sample(shard.prompts, samples=shard.samples, completion_length=shard.completion_length)
        )


@dataclasses.dataclass(frozen=True)
class Mistaken:
    """A strategy whose drawing is wrong."""


@pytest.mark.parametrize(
    ("drawing", "said"),
    [
        (Changed(lambda fields: fields | {"tokens": fields["tokens"][1:]}), r"draws 'tokens' of the shape \[15, 12\]"),
        (
            Changed(lambda fields: fields | {"group": fields["group"][:3]}),
            r"'group' of the shape \[3\]; .* has 16 rows",
        ),
        (Changed(lambda fields: fields | {"version": None}), r"draws 'version' of the shape \[\]"),
        (Changed(lambda fields: fields | {"entropy": 0}), "draws 'entropy', which is not a field of Rollout"),
        (Changed(lambda fields: {"tokens": fields["tokens"]}), "draws no 'length'"),
        (Changed(lambda fields: None), "draws a NoneType; a shard of 4 prompts has 16 rows of 12 tokens"),
        (lambda shard: {}, r"@Mistaken\(\): what its `drawing` returns has no attribute `roles`"),
    ],
)
def test_a_drawing_that_no_run_can_use_is_refused(tmp_path, drawing, said):
    parts = [{"STRATEGIES": {"Mistaken": Strategy(Mistaken, drawing=lambda config, tokenizer: drawing)}}]
    bindings = [*PLAIN_DECODER, "Decoder.width=16", "Decoder.mlp_width=16", *SMALL[1:], "Online.strategy=@Mistaken()"]
    with pytest.raises(ValueError, match=said):
        jrl.train("configs/tiny.gin", bindings, parts=parts, run=tmp_path / "run")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ((65, 66, 67), r"returns \(65, 66, 67\) for example 'one'; it must return a tuple of at most 2 ids below 9"),
        ([1], r"returns \[1\]"),
        ((9,), r"returns \(9,\)"),
        ((-1,), r"returns \(-1,\)"),
        ((1.5,), r"returns \(1\.5,\)"),
        (("a",), r"returns \('a',\)"),
        (None, "returns None"),
    ],
)
def test_tokens_of_a_strategy_that_no_prompt_can_have_are_refused_by_name(tokens, said):
    strategy = Strategy(Mistaken, prefix=lambda *_: tokens, asked=lambda *_: tokens)
    sampler = types.SimpleNamespace(
        strategy=ConfiguredStrategy(strategy, Mistaken()), tokenizer=types.SimpleNamespace(vocab_size=9),
        prompt_length=5,
    )  # fmt: skip
    visit = Visit(Example("one", (Message("user", "1"),)), (0, 0), (1, 2, 3))
    for function, give in (("prefix", prefix_of), ("asked", lambda *given: tokens_of(given[0], "asked", given[1], 2))):
        with pytest.raises(ValueError, match=rf"@Mistaken\(\): `{function}` {said}"):
            give(sampler, visit)
