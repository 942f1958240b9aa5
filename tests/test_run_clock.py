"""Where a run's time goes: the loop's parts, the device's work, and what both come to."""

import gc
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device.chips import CHIPS, Peak, peak_of
from jrl.learning.layout import Learner
from jrl.models import decoder, flops
from jrl.models.shape import Decoder
from jrl.run import job
from jrl.run.clock import RunClock, StepWork, split_wait
from jrl.run.throughput import (
    Speed,
    TokenCount,
    computed_epochs,
    count_packed,
    count_rows,
    decode_bytes,
    decode_steps,
    figures,
    forward_flops,
    update_flops,
)

CFG = Decoder(layers=2, width=4, heads=2, kv_heads=1, head_dim=2, mlp_width=5, vocab_size=7)


def speed(**changes):
    peak = Peak(matrix_rate=1000.0, hbm_rate=100.0)
    known = Speed(
        devices=2,
        sampler_devices=2,
        all_devices=2,
        shards=1,
        peak=peak,
        cfg=CFG,
        spec=decoder.spec(CFG),
        adapters=0,
        slots=2,
    )
    return known._replace(**changes)


def test_a_wait_is_the_time_of_what_ended_meanwhile():
    # From 10 to 20 s: an update ended at 14, a draw at 19, and the draw that was waited for at 20. What ended at 9 is
    # of the time before, what ended at 25 was not waited for.
    ended = [("update", 14.0), ("sample", 19.0), ("prepare", 9.0), ("save", 25.0)]
    assert split_wait(10.0, 20.0, ended, "sample") == {"update": 4.0, "sample": 5.0 + 1.0}
    assert split_wait(10.0, 20.0, [], "sample") == {"sample": 10.0}


def test_seconds_of_a_stage_are_without_those_of_an_evaluation_inside(monkeypatch):
    # A step from 0 to 10 s, evaluated from 4 to 7; a second one from 10 to 12.
    now = iter([0.0, 4.0, 7.0, 10.0, 10.0, 12.0])
    monkeypatch.setattr(job.time, "monotonic", lambda: next(now))
    run = SimpleNamespace(seconds={"total": 100.0})  # of earlier lives
    with job.Job.timed(run, "rl"), job.Job.timed(run, "eval"):
        pass
    with job.Job.timed(run, "rl"):
        pass
    assert run.seconds == {"total": 100.0, "eval": 3.0, "rl": 9.0}


def test_parts_add_up_and_what_is_nested_counts_once():
    times = iter([0.0, 2.0, 3.0, 7.0, 8.0, 10.0])
    clock = RunClock(lambda: next(times))
    clock.switch("other")  # from 0 to 2: start
    with clock.on("sample"):  # 3
        with clock.on("compile"):  # 7
            pass  # 8
    # 10
    assert clock.seconds == {"start": 2.0, "other": 1.0, "sample": 4.0 + 2.0, "compile": 1.0}
    clock.close()


def test_the_device_is_at_one_piece_of_work_after_another():
    times = iter([0.0, 1.0, 2.0, 5.0, 6.0, 6.5, 9.0, 9.5])
    clock = RunClock(lambda: next(times))
    results = [jnp.zeros(()), jnp.ones(())]
    with clock.on("update"):  # 1
        clock.dispatched("update", results[0])
        while not clock._work[0].done.done():  # ended at 2
            pass
    # 5
    with clock.on("sample"):  # 6
        clock.dispatched("sample", results[1])
        while not clock._work[1].done.done():  # ended at 6.5
            pass
    # 9
    update, sample = clock._work
    assert clock.device_seconds([update]) == 1.0 and clock.device_seconds([sample]) == 0.5
    assert clock.device_seconds([update, sample]) == 1.5 and clock.device_seconds([]) is None
    clock.close()


def test_work_whose_result_was_donated_is_not_timed():
    clock = RunClock()
    result = jnp.zeros(3)
    result.delete()
    clock.dispatched("prepare", result)
    assert clock._work[0].done.result() is None
    clock.close()


def test_a_result_whose_work_is_done_is_not_held():
    """What prepares a minibatch gives arrays as large as the batch; 256 pieces of work are remembered."""
    clock = RunClock()
    result = jnp.zeros(3)
    alive = weakref.ref(result)
    clock.dispatched("prepare", result)
    assert clock._work[0].done.result() is not None
    clock.dispatched("update", jnp.zeros(()))  # the thread that waited takes up what is next
    assert clock._work[1].done.result() is not None
    del result
    gc.collect()
    assert alive() is None and clock.device_seconds([clock._work[0]]) is not None
    clock.close()


def test_tokens_of_rows_and_what_they_see():
    # Lengths 4 and 6 with prompts of 3: 10 tokens, which see 1+2+3+4 and 1+...+6; 1 and 3 of them are drawn.
    mask = np.zeros((2, 8), bool)
    mask[0, 3:4] = mask[1, 3:6] = True
    assert count_rows(np.array([4, 6]), mask) == TokenCount(10, 10 + 21, 4)
    # The prompt but for its last token, 2 tokens that see 1 + 2, is computed once.
    assert count_rows(np.array([4, 6]), mask, samples=2) == TokenCount(8, 31 - 3, 4)
    packed = np.full((1, 1, 10), -1)
    packed[0, 0, :4], packed[0, 0, 4:10] = np.arange(4), 8 + np.arange(6)
    assert count_packed([packed], mask) == TokenCount(10, 31, 4)


def test_the_models_operations_by_hand():
    # A layer: queries 4x4, keys and values 4x2 each, attention's output 4x4, three matrices of 4x5: 108 entries.
    assert flops.layer_weights(decoder.spec(CFG)) == 2 * 108
    # 10 tokens through 216 entries, 4 through the head of 28; scores and values of 31 pairs: 2 layers x 2 x 2 x 4.
    forward = 2 * 10 * 216 + 2 * 4 * 28 + 2 * 2 * 2 * 4 * 31
    assert forward_flops(speed(), TokenCount(10, 31, 4)) == forward
    assert update_flops(speed(), TokenCount(10, 31, 4)) == 3 * forward
    # With 8 entries of adapters the frozen matrices and the head have no gradient.
    adapted = forward + 2 * 10 * 8
    assert update_flops(speed(adapters=8), TokenCount(10, 31, 4)) == 3 * adapted - 2 * (10 * 216 + 4 * 28)


def test_decode_steps_and_the_bytes_that_they_read():
    assert decode_steps([5, 1, 2, 3], 2) == 6  # one slot 5, the other 1 + 2 + 3
    assert decode_steps([5, 1], 8) == 5
    mask = np.zeros((2, 8), bool)
    mask[0, 3:4] = mask[1, 3:6] = True
    # 3 steps read 216 + 28 entries of 4 bytes; tokens 4 and 4, 5, 6 see as many keys and values of 2, in 2 layers.
    assert CFG.dtype == "float32"
    assert decode_bytes(speed(), {"length": np.array([4, 6]), "action_mask": mask}) == 4 * (3 * 244 + 2 * 2 * 2 * 19)


def test_an_update_that_finds_the_kl_limit_reached_is_computed_and_those_after_it_are_not():
    computed = lambda kl_reached: computed_epochs(Learner(epochs=3, minibatches=2), kl_reached)
    # of 6 updates: 6; 6, of which the last was not applied; 5; 2, of which the second was not applied
    assert [computed(n) for n in (0, 1.0, 2.0, 5.0)] == [3, 3, 2.5, 1]


def test_figures_leave_out_shares_of_an_unknown_peak():
    class Clock:
        device_seconds = staticmethod(lambda work: sum(work) if work else None)

    class Done(float):
        part = property(lambda self: "sample" if self == 2.0 else "update")

    mask = np.zeros((2, 8), bool)
    mask[0, 3:4] = mask[1, 3:6] = True
    host = {"length": np.array([4, 6]), "action_mask": mask}
    step = StepWork({"sample": 3.0, "update": 5.0}, [Done(2.0), Done(4.0)], [host], TokenCount(10, 31, 4))
    found = figures(speed(), Clock, step, epochs=2)
    assert found["time/sample_seconds"] == 3.0 and found["time/update_device_seconds"] == 4.0
    assert found["time/sample_tokens_per_second"] == 4 / 2.0
    assert found["time/sample_tokens_per_second_per_device"] == 4 / 2.0 / 2
    assert found["time/update_tokens_per_second"] == 2 * 10 / 4.0
    forward = 2 * 10 * 216 + 2 * 4 * 28 + 2 * 2 * 2 * 4 * 31
    assert found["time/update_mfu"] == pytest.approx(2 * 3 * forward / 4.0 / (2 * 1000))
    assert found["time/step_mfu"] == pytest.approx((2 * 3 + 1) * forward / 8.0 / (2 * 1000))
    assert found["time/decode_bandwidth"] == pytest.approx(4 * (3 * 244 + 8 * 19) / 2.0 / 2 / 100)
    unknown = figures(speed(peak=None), Clock, step, epochs=2)
    assert found.keys() - unknown.keys() == {"time/update_mfu", "time/step_mfu", "time/decode_bandwidth"}
    own = figures(speed(cfg=None, spec=None), Clock, step, epochs=2)
    assert own == unknown


def test_peaks_are_known_of_tpus_and_some_gpus():
    assert peak_of("TPU v5 lite") == Peak(197e12, 819e9)
    assert peak_of("TPU7x") == Peak(CHIPS["tpu7x"].bf16_tflops / 2 * 1e12, 3690e9)  # two devices a chip
    assert peak_of("NVIDIA H100 80GB HBM3").hbm_rate == 3.35e12
    assert peak_of(jax.devices("cpu")[0].device_kind) is None
