"""The queue of draws of an Online stage: with which weights each batch is drawn, by index and not by arrival."""

import contextlib
import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_learner import sequences

from jrl.device.processes import ONE
from jrl.learning.previous import previous_roles, with_previous
from jrl.resolve import load_config
from jrl.rollout.collect import Draw, Submitted, hand_out, submit
from jrl.rollout.strategies import roll_in, self_correction
from jrl.rollout.strategies.contract import PLAIN, ConfiguredStrategy
from jrl.run import online, records
from jrl.run.programs import version_before
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.types import ModelState


def model(version):
    return ModelState(f"weights {version}", None, {}, None, version)


def stage_of(config, segments):
    before = lambda version: int(version_before(jnp.int32(version), lag=config.lag))
    programs, sampler = SimpleNamespace(before=before), SimpleNamespace(segments=segments, devices=None, strategy=PLAIN)
    return SimpleNamespace(config=config, sampler=sampler, programs=programs)


def test_update_t_learns_from_the_version_that_the_lag_declares_whatever_the_lag(trials, monkeypatch):
    """Of stages of any length, one after another, each with a lag and completions of some segments; left and resumed
    between any two steps, with what a checkpoint holds."""
    draw = random.Random(0)
    monkeypatch.setattr(online, "draw", lambda sampler, weights, version: [(weights, int(version))])
    monkeypatch.setattr(
        online, "draw_further", lambda sampler, begun, weights, version: [*begun, (weights, int(version))]
    )
    monkeypatch.setattr(online, "hand_out", lambda drawn: drawn)
    for _ in range(trials(20, 300)):
        names = [f"s{i}" for i in range(draw.randrange(1, 4))]
        bindings = [f"Config.stages = [{', '.join(f'@{name}/Online()' for name in names)}]",
                    "GRPO.importance = @TruncatedImportance()"]  # fmt: skip
        for name in names:
            lag = [f"{name}/Online.lag = {draw.randrange(5)}"]
            partial = [f"{name}/Online.strategy = @{name}/Partial()", f"{name}/Partial.tokens = {draw.randrange(1, 4)}"]
            bindings += [f"{name}/Online.name = '{name}'", f"{name}/Online.steps = {draw.randrange(1, 9)}",
                         f"{name}/Online.objective = @GRPO()", *draw.choice([lag, partial])]  # fmt: skip
        config, _ = load_config("configs/tiny.gin", [*bindings, "Sampler.completion_length = 4"])
        done = 0
        for settings in config.stages:
            segments = records.segments_of(settings, config)
            stage, waiting = stage_of(settings, segments), []
            roles = previous_roles(settings.lag)
            models = dict.fromkeys(("policy", *roles), model(0))  # versions count a stage's updates
            for step in range(settings.steps):
                state = SimpleNamespace(models=models)
                ahead = records.draws_ahead(config, done + 1)
                current, *waiting = online.draws(stage, state, waiting, 1 + ahead)
                # Each segment is one step newer than the one before it.
                ages = range(settings.lag + segments - 1, settings.lag - 1, -1)
                declared = [max(step - age, 0) for age in ages]
                assert current == [(f"weights {one}", one) for one in declared], (settings, step)
                if segments == 1:
                    refills = online.refill_weights(stage, state)
                    assert refills == (f"weights {declared[0]}", declared[0]), (settings, step)
                done += 1
                models = with_previous(models, f"weights {step}", step) if roles else models
                models = {**models, "policy": model(step + 1)}
                if draw.random() < 0.3:  # left and resumed: a checkpoint holds the draws under way by their names
                    saved = dict(zip(records.waiting_names(records.draws_ahead(config, done)), waiting, strict=True))
                    waiting = [saved[name] for name in records.waiting_names(records.draws_ahead(config, done))]
            assert len(waiting) == (0 if settings is not config.stages[-1] else settings.lag + segments - 1)


def test_a_guide_that_is_the_policy_refills_with_the_version_that_drew_the_batch():
    """With lag 2 the policy at version 5 learns from rows of version 3, those of refills too."""
    config, _ = load_config("configs/tiny.gin", ["Online.lag = 2", "GRPO.importance = @TruncatedImportance()"])
    stage = stage_of(config.stages[0], segments=1)
    stage.sampler.strategy = ConfiguredStrategy(roll_in.STRATEGY, roll_in.RollIn(guide="policy", tokens=1))
    models = {"policy": model(5), "previous": model(4), "previous_2": model(3)}
    weights, version = online.refill_weights(stage, SimpleNamespace(models=models))
    assert (weights, version) == ({"policy": "weights 3"}, 3)


@pytest.mark.parametrize("segments", [1, 2])
def test_a_steps_tokens_are_handed_out_before_the_next_ones_are_drawn(segments, monkeypatch):
    """Devices run programs in order: handed out after them, they would be scored when the next ones are there."""
    order = []
    monkeypatch.setattr(online, "draw", lambda *_: order.append("draw") or "new")
    monkeypatch.setattr(online, "draw_further", lambda sampler, begun, *_: order.append(f"further {begun}") or begun)
    monkeypatch.setattr(online, "hand_out", lambda drawn: order.append(f"hand out {drawn}") or drawn)
    config, _ = load_config("configs/tiny.gin", ["Online.lag=2", "GRPO.importance=@TruncatedImportance()"])
    stage, state = stage_of(config.stages[0], segments), SimpleNamespace(models={"policy": model(3)})
    online.draws(stage, state, ["first", "second"], 3)
    further = ["further first", "further second"] if segments > 1 else []
    assert order == [*further, "hand out first", "draw"]
    # Devices of their own do nothing else: there the host waits for the draw before it publishes weights.
    stage.sampler.devices, order[:] = object(), []
    online.draws(stage, state, ["first", "second"], 3)
    assert order == [*further, "draw"]


def test_what_was_gathered_of_a_step_goes_once_the_host_has_it():
    """On every device it would take 640 MiB of 8,192 rows of 16,384 tokens until the updates ended."""
    rollout, _ = jax.tree.map(jnp.asarray, sequences())
    sampler = SimpleNamespace(samples=2, devices=None, strategy=PLAIN, processes=ONE, decodes_all=True, tokenizer=None)
    scorer = SimpleNamespace(submit=lambda texts, examples, keys: None)
    drawn = hand_out(Draw(rollout, [], {}))
    assert drawn.gathered is not None
    submitted = submit(drawn, sampler, scorer, [], None)
    assert submitted.drawn.gathered is None
    np.testing.assert_array_equal(submitted.host["tokens"], rollout.tokens)


def test_two_attempts_with_the_same_text_have_two_entries_in_the_journal():
    """With one, a resume would replay the verdict of the attempt that was not scored for the other one too."""
    mask = np.array([[0, 1, 0, 1, 0], [0, 1, 1, 0, 0]], bool)  # the second row has no second attempt
    host = {"tokens": np.full((2, 5), ord("4")), "length": np.array([4, 3]), "action_mask": mask}
    strategy = ConfiguredStrategy(self_correction.STRATEGY, self_correction.SelfCorrection())
    sampler = SimpleNamespace(
        samples=2, devices=None, strategy=strategy, processes=ONE, decodes_all=True, tokenizer=ByteTokenizer()
    )
    sent = []
    scorer = SimpleNamespace(submit=lambda texts, examples, keys: sent.extend(zip(texts, keys, strict=True)))
    visit = Visit(Example("a", (Message("user", "?"),)), (7, 9), (1,))
    submit(Draw(SimpleNamespace(**host), [visit], {}), sampler, scorer, [], None)
    # The last attempts first.
    assert sent == [("4", ((7, 9), 2)), ("", ((7, 9), 3)), ("4", ((7, 9), 0)), ("44", ((7, 9), 1))]


def test_the_progress_of_scoring_counts_attempts_from_its_start(monkeypatch):
    class Packing(Exception):
        pass

    def pack(*_):
        raise Packing

    drawn, phases = Draw(SimpleNamespace(length=None), [], {}), []
    ticket = SimpleNamespace(rows=[(0,)] * 4)  # of two rows with two attempts each, as `Scorer.collect` counts them
    monkeypatch.setattr(online, "draws", lambda *_: [drawn])
    monkeypatch.setattr(online, "send", lambda *_: Submitted(drawn, {}, ["a", "b"], ticket, others=[]))
    monkeypatch.setattr(online, "pack_and_prepare", pack)
    clock = SimpleNamespace(on=lambda part: contextlib.nullcontext(), wait_for=lambda x: 0.0, drawn=[],
                            dispatched=lambda *_: None)  # fmt: skip
    stage = SimpleNamespace(sampler=SimpleNamespace(devices=None))
    with pytest.raises(Packing):
        online.step(
            stage, None, (), 0, lambda *args, **counts: phases.append((args, counts)), None, clock, warms_up=False
        )
    assert phases[-1] == (("scoring",), {"done": 0, "total": 4})


def test_a_completion_that_another_process_scores_is_shown_too():
    """Without a store of rollouts its text is not decoded with the batch; it was shown as an empty completion."""
    shown = []
    job = SimpleNamespace(
        config=SimpleNamespace(stages=[SimpleNamespace(steps=5)], log=SimpleNamespace(samples=2)),
        display=SimpleNamespace(sample=lambda *args: shown.append(args)),
        tokenizer=ByteTokenizer(),
    )
    batch = SimpleNamespace(
        host={
            "tokens": np.array([[1, 2, ord("4"), ord("2"), 0], [1, 2, ord("7"), 0, 0]]),
            "length": np.array([4, 3]),
            "action_mask": np.array([[0, 0, 1, 1, 0], [0, 0, 1, 0, 0]], bool),
        },
        host_scores=SimpleNamespace(reward=np.array([0.5, 1.0]), valid=np.array([True, False]), details=["", "late"]),
        visits=[Visit(Example("a", (Message("user", "?"),)), (7, 9), (1, 2))],
        samples=2,
        texts=["", ""],
    )
    job.display.note = lambda text: None
    records.show_samples(job, SimpleNamespace(step=1, batch=batch, texts=records.sequence_texts(batch)))
    assert shown == [("?", "42", 0.5), ("?", "7", None)]


def test_prompts_that_fill_up_a_mesh_are_no_completions_that_were_not_scored():
    notes = []
    job = SimpleNamespace(
        config=SimpleNamespace(stages=[SimpleNamespace(steps=5)], log=SimpleNamespace(samples=0)),
        display=SimpleNamespace(note=notes.append),
    )

    def show(valid, details):
        batch = SimpleNamespace(
            host={"action_mask": np.array([[True], [True], [False]])},
            host_scores=SimpleNamespace(reward=np.zeros(3), valid=np.array(valid), details=details),
        )
        records.show_samples(job, SimpleNamespace(step=1, batch=batch, texts=[("a", "b")] * 3))
        return notes

    assert show([True, True, False], ["", "", ""]) == []
    assert show([True, False, False], ["", "it raised", ""]) == [
        "  1 of 2 completions were not scored; the first said: it raised"
    ]
