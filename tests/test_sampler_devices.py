"""Sampling on devices of its own: the same tokens and metrics as in turn, stops, refusals, what publishing takes."""

import contextlib
import json
import random
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_runs
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jrl.config.errors import ConfigError
from jrl.device import program_cache
from jrl.device import transfer as transfers
from jrl.device.sharding import AXES, MeshShape, split_devices, split_meshes, split_sizes
from jrl.device.transfer import publication, replace_leaf, shared_cuts, transfer
from jrl.ops.fingerprint import fingerprint
from jrl.run import sampler_devices
from jrl.run.checks import check_split
from jrl.run.records import to_save

TINY = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=2", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=8", "Online.samples=4", "Online.steps=6", "Checkpoint.every=2",
    "Log.samples=0", "Scoring.workers=1", "GRPO.importance=@TruncatedImportance()",
    "Config.mesh=@MeshShape()", "MeshShape.data=4",
]  # fmt: skip
APART = ["Config.sampler_mesh=@sample/MeshShape()", "sample/MeshShape.data=4"]


def table(folder):
    """Returns the metrics table without what depends on the clock or the machine."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "host/"))} for row in rows]


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory):
    """Runs on one mesh of 4 devices, by lag."""
    folders = {lag: tmp_path_factory.mktemp(f"lag{lag}") / "run" for lag in (1, 4)}
    for lag, folder in folders.items():
        short_runs.run(TINY, folder, f"Online.lag={lag}")
    return folders


@pytest.mark.parametrize("lag", [1, 4])
def test_devices_of_their_own_change_no_bit(tmp_path, in_turn, lag):
    steps = short_runs.run(TINY, tmp_path / "run", *APART, f"Online.lag={lag}")
    assert table(tmp_path / "run") == table(in_turn[lag])
    versions = [set(np.unique(step.rollout["version"][step.rollout["action_mask"]])) for step in steps]
    assert versions == [{max(0, t - lag)} for t in range(6)]
    timed = {"time/sample_device_seconds", "time/sampler_idle_seconds", "time/wait_for_draw_seconds"}
    assert timed <= steps[-1].metrics.keys()


@pytest.mark.parametrize(("lag", "stop_after"), [(1, 1), (4, 3)])
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path, in_turn, lag, stop_after):
    short_runs.run(TINY, tmp_path, *APART, f"Online.lag={lag}", stop_after=stop_after)
    short_runs.run(TINY, tmp_path, *APART, f"Online.lag={lag}")
    assert table(tmp_path) == table(in_turn[lag])


def test_a_run_goes_on_with_another_split_and_in_turn(tmp_path, in_turn):
    """Of equal shapes a device: the learner's mesh stays, and the sampler's goes or shrinks to other shapes."""
    bindings = [*APART, "Online.lag=4"]
    short_runs.run(TINY, tmp_path, *bindings, stop_after=2)
    smaller = [*APART, "sample/MeshShape.data=1", "sample/MeshShape.tensor=2"]
    short_runs.run(TINY, tmp_path, *smaller, "Online.lag=4", stop_after=4)
    short_runs.run(TINY, tmp_path, "Online.lag=4")
    for row, expected in zip(table(tmp_path), table(in_turn[4]), strict=True):
        assert row.keys() == expected.keys()
        assert all(np.isclose(row[k], expected[k], rtol=1e-4, atol=1e-4) for k in ("loss", "reward/mean", "grad_norm"))
    # Draws of the first life were saved on their way, and are learned from on one mesh of 4.
    assert table(tmp_path)[:3] == table(in_turn[4])[:3]


def test_weights_that_differ_from_the_published_ones_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler_devices, "_fingerprint", jax.jit(lambda weights: fingerprint(weights) + jnp.uint32(1)))
    with pytest.raises(sampler_devices.WrongWeights, match="the learner published"):
        short_runs.run(TINY, tmp_path, *APART, "Online.lag=1")


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        ([*APART, "Online.lag=0"], "Config.sampler_mesh needs Online.lag of at least 1"),
        ([*APART, "Online.lag=1", "sample/MeshShape.data=5"], r"needs 4 \+ 5 devices"),
        ([*APART, "Online.lag=1", "sample/MeshShape.data=3", "MeshShape.data=2"], "use a multiple of 6"),
        (
            [*APART, "Online.lag=1", "sample/MeshShape.data=1", "sample/MeshShape.tensor=4"],
            r"heads = 2 does not divide over MeshShape.tensor = 4",
        ),
        (
            [*APART, "Online.strategy=@Partial()", "Partial.tokens=2"],
            r"does not go with Online.strategy = @Partial\(\)",
        ),
    ],
)
def test_what_cannot_sample_on_devices_of_its_own_is_refused(tmp_path, bindings, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        short_runs.run(TINY, tmp_path / "run", *bindings)
    assert not (tmp_path / "run").exists()


def test_meshes_have_no_device_in_common():
    learner, sampler = split_meshes(MeshShape(fsdp=-1), MeshShape(data=2), jax.devices())
    assert learner.shape["fsdp"] == 6 and sampler.shape["data"] == 2
    assert not {*learner.devices.flat} & {*sampler.devices.flat}
    assert split_sizes(MeshShape(data=2), MeshShape(data=-1, tensor=3), 8) == ((2, 1, 1, 1, 1), (2, 1, 3, 1, 1))
    with pytest.raises(ValueError, match="both have an axis of -1"):
        split_sizes(MeshShape(data=-1), MeshShape(data=-1), 8)
    with pytest.raises(ValueError, match=r"8 devices for .*, and a multiple of 1 for"):
        split_sizes(MeshShape(data=8), MeshShape(data=-1), 8)


def on_hosts(*counts, platform="cpu"):
    of = lambda host, n: SimpleNamespace(process_index=host, id=n, platform=platform)
    return [of(host, n) for host, count in enumerate(counts) for n in range(count)]


def test_every_process_has_devices_of_both_meshes():
    places = lambda part: [(device.process_index, device.id) for device in part]
    learn, sample = split_devices(on_hosts(4, 4), 4, 2)
    assert places(learn) == [(0, 0), (0, 1), (1, 0), (1, 1)] and places(sample) == [(0, 2), (1, 2)]
    learn, sample = split_devices(on_hosts(8), 5, 2)
    assert places(learn) == [(0, n) for n in range(5)] and places(sample) == [(0, 5), (0, 6)]
    # Chips of a host are next to each other in a torus: hosts learn, and others sample.
    learn, sample = split_devices(on_hosts(4, 4, platform="tpu"), 4, 4)
    assert {device.process_index for device in learn} == {0} and {device.process_index for device in sample} == {1}


def of_slices(*counts):
    """Returns TPUs, those of several slices in turn."""
    of = lambda index, n: SimpleNamespace(process_index=index, id=n, platform="tpu", slice_index=index)
    return [of(index, n) for n in range(max(counts)) for index, count in enumerate(counts) if n < count]


def test_slices_learn_and_the_slices_behind_them_sample():
    indices = lambda part: [device.slice_index for device in part]
    learn, sample = split_devices(of_slices(4, 4), 4, 4)
    assert indices(learn) == [0] * 4 and indices(sample) == [1] * 4
    learn, sample = split_devices(of_slices(2, 2, 2), 4, 2, (2, 1))
    assert indices(learn) == [0, 0, 1, 1] and indices(sample) == [2, 2]
    # Devices that know no slices stand in for them in order: the split of the same meshes without.
    first, second = split_devices(jax.devices()[:6], 4, 2, (2, 1))
    assert (first, second) == split_devices(jax.devices()[:6], 4, 2)
    assert split_devices(on_hosts(2, 2, 2), 4, 2, (2, 1))[1] == on_hosts(2, 2, 2)[4:]  # a process that only samples


@pytest.mark.parametrize(
    ("devices", "learn", "sample", "slices"),
    [
        (of_slices(4, 4), 4, 2, (1, 1)),  # a part of a slice
        (of_slices(4, 4), 6, 2, (1, 1)),  # across
        (of_slices(4, 4), 8, 4, (2, 1)),  # one more than there are
        (of_slices(4, 4), 4, 4, (2, 1)),
    ],
)
def test_a_mesh_that_crosses_slices_is_refused(devices, learn, sample, slices):
    with pytest.raises(ValueError, match=f"takes {learn} devices on {slices[0]} slices .* {sample} on {slices[1]}"):
        split_devices(devices, learn, sample, slices)


@pytest.mark.parametrize(
    ("learner", "sampler", "spec"),
    [
        (MeshShape(fsdp=2), MeshShape(fsdp=2), PartitionSpec("fsdp", None)),
        (MeshShape(data=2, tensor=2), MeshShape(tensor=2), PartitionSpec(None, "tensor")),
        (MeshShape(fsdp=2), MeshShape(data=2, fsdp=2), PartitionSpec("fsdp")),  # each shard to two devices: two rounds
        (MeshShape(data=2), MeshShape(data=5), PartitionSpec()),
    ],
)
def test_shards_are_sent_to_the_devices_of_other_processes(learner, sampler, spec):
    """The program that sends them, here between devices of one process."""
    learner, sampler = split_meshes(learner, sampler, jax.devices())
    for x in (np.arange(64, dtype=np.float32).reshape(8, 8), np.array([True, False]), np.int32(7)):
        own = spec if x.ndim == 2 else PartitionSpec()
        sent = transfers._sent(jax.device_put(x, NamedSharding(learner, own)), NamedSharding(sampler, own))
        assert sent.sharding == NamedSharding(sampler, own) and sent.dtype == x.dtype
        for shard in sent.addressable_shards:
            np.testing.assert_array_equal(shard.data, x[shard.index])


def test_a_process_without_devices_of_a_mesh_runs_its_programs_as_shapes(monkeypatch):
    learner, _ = split_meshes(MeshShape(fsdp=2), MeshShape(), jax.devices())
    x = jax.device_put(np.arange(4.0, dtype=np.float32), NamedSharding(learner, PartitionSpec("fsdp")))
    monkeypatch.setattr(program_cache, "is_here", lambda mesh: False)
    made = []
    monkeypatch.setattr(program_cache, "without_shards", lambda shape: made.append(shape) or shape)
    with jax.set_mesh(learner), contextlib.closing(program_cache.ProgramCache()) as cache:
        double = cache.program("double", jnp.negative)
        result = double.compile(x)
        assert double(x) == result and made == [result] and cache.size() == 0
    assert (result.shape, result.dtype, result.sharding) == (x.shape, x.dtype, x.sharding)


@pytest.mark.parametrize(("hosts", "learn", "sample"), [((4, 4), 3, 2), ((4, 4), 2, 3), ((4, 2), 4, 2)])
def test_meshes_that_cannot_be_divided_over_the_processes_are_refused(hosts, learn, sample):
    with pytest.raises(ValueError, match=f"takes {learn} devices and Config.sampler_mesh {sample}, and .* 2 processes"):
        split_devices(on_hosts(*hosts), learn, sample)


@pytest.mark.parametrize("shape", [MeshShape(fsdp=2, tensor=2), MeshShape(fsdp=4), MeshShape(tensor=2), MeshShape()])
def test_a_transfer_between_meshes_moves_every_bit_and_frees_what_it_replaces(shape):
    learner, sampler = split_meshes(MeshShape(fsdp=2, tensor=2), shape, jax.devices())
    assert learner.axis_types == sampler.axis_types == (AxisType.Explicit,) * len(AXES)
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    spec = PartitionSpec("fsdp", "tensor")
    tree = {
        "a": jax.device_put(x, NamedSharding(learner, spec)),
        "b": jax.device_put(x[0], learner_replicated(learner)),
    }
    moved = transfer(tree, sampler)
    assert moved["a"].sharding == NamedSharding(sampler, spec) and moved["b"].sharding.mesh == sampler
    np.testing.assert_array_equal(moved["a"], x)
    np.testing.assert_array_equal(moved["b"], x[0])
    assert transfer(moved["a"], sampler) is moved["a"]
    again = replace_leaf(moved["a"], tree["a"], sampler)
    assert moved["a"].is_deleted() and not tree["a"].is_deleted()
    np.testing.assert_array_equal(again, x)


def learner_replicated(mesh):
    return NamedSharding(mesh, PartitionSpec())


def leaves_between(learner, sampler, leaves):
    return [(size, spec, shared_cuts(spec, learner, sampler)) for size, spec in leaves]


def test_the_bytes_of_a_publication():
    leaves = [(800, PartitionSpec("fsdp", "tensor")), (80, PartitionSpec("tensor")), (8, PartitionSpec())]
    learner = {"fsdp": 4, "tensor": 2}
    stated = lambda sampler, held: publication(leaves_between(learner, sampler, leaves), sampler, held)
    # Over fsdp gathered on the learner, 800 / 2, and stored so: 400 + 80 / 2 + 8.
    assert stated({"fsdp": 1, "tensor": 2}, held=1) == (448, 448, 1, 400, 400)
    # The same cuts: nothing is gathered. 800 / 8 + 40 + 8, twice while a draw reads the old ones.
    equal = stated(learner, held=2)
    assert equal == (148, 148, 2, 0, 0) and equal.peak == 296
    # To other processes by a program: the largest leaf as often again.
    sent = publication(leaves_between(learner, learner, leaves), learner, 1, sent=True)
    assert sent == (148, 148, 1, 100, 100) and sent.peak == 248
    # Another tensor: whole leaves travel, and are cut at their destination: 800 / 4 + 80 / 4 + 8.
    other = stated({"fsdp": 1, "tensor": 4}, held=1)
    assert other == (228, 888, 1, 800, 800) and other.peak == 1028


@pytest.mark.parametrize(("copies", "peak"), [(1, 4 * 96 + 4 * 64), (2, 2 * 4 * 96 + 4 * 64)])
def test_a_publication_holds_no_more_than_it_states(monkeypatch, copies, peak):
    learner, sampler = split_meshes(MeshShape(fsdp=2), MeshShape(), jax.devices())
    host = {"a": np.arange(64, dtype=np.float32), "b": np.arange(32, dtype=np.float32)}
    sharding = NamedSharding(learner, PartitionSpec("fsdp"))
    weights = jax.device_put(host, sharding)
    leaves = [(4 * x.size, PartitionSpec("fsdp")) for x in host.values()]
    stated = publication(leaves_between(learner.shape, sampler.shape, leaves), sampler.shape, copies)
    assert stated.peak == peak
    held, usual, earlier = [], sampler_devices.replace_leaf, jax.live_arrays()  # those of other tests
    others = {id(x) for x in earlier}

    def measured(*args):
        leaf = usual(*args)
        there = [x for x in jax.live_arrays() if x.sharding.device_set == {*sampler.devices.flat}]
        held.append(sum(x.nbytes for x in there if id(x) not in others))
        return leaf

    monkeypatch.setattr(sampler_devices, "replace_leaf", measured)
    with contextlib.closing(sampler_devices.SamplerDevices(learner, sampler)) as devices:
        for _ in range(3):
            weights = jax.device_put({name: x + 1 for name, x in jax.device_get(weights).items()}, sharding)
            published = devices.publish(weights, weights, copies)
        np.testing.assert_array_equal(published["a"], host["a"] + 3)
        assert devices.publish(weights, weights, copies)["a"] is published["a"]  # they are there
    # All that lives on the sampling device after each leaf; the largest leaf is counted for the moment of its copy.
    assert max(held) <= peak - 4 * 64
    assert max(held) == copies * 4 * 96


def test_with_two_copies_a_publication_waits_for_draws_with_older_weights_than_the_last():
    learner, sampler = split_meshes(MeshShape(), MeshShape(), jax.devices())
    versions = [
        jax.device_put({"a": np.full(2, v, np.float32)}, NamedSharding(learner, PartitionSpec())) for v in range(3)
    ]
    with contextlib.closing(sampler_devices.SamplerDevices(learner, sampler)) as devices:
        first, second = Future(), Future()
        for weights, draw in zip(versions, (first, second)):
            devices.publish(weights, weights, 2)
            devices._last = draw  # as `watch` does
        third = threading.Thread(target=devices.publish, args=(versions[2], versions[2], 2))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        first.set_result({})
        third.join(30)
        assert not third.is_alive()
        second.set_result({})


class Drawn(NamedTuple):
    """What a draw reports of its weights."""

    weights_fingerprint: jax.Array


FAULTS = ("none", "a bit", "a stale leaf", "stale weights", "a stale shard", "zeros", "swapped leaves", "another sign")


def test_weights_that_arrive_otherwise_than_they_were_sent_are_noticed_by_the_draw(monkeypatch, trials):
    """Every second publication has a fault: a leaf is damaged on its way, or a copy does not take place."""
    learner, sampler = split_meshes(MeshShape(fsdp=2), MeshShape(data=1, tensor=2), jax.devices())
    cuts = {"a": PartitionSpec(), "b": PartitionSpec("fsdp"), "c": PartitionSpec(), "d": PartitionSpec()}
    draw, rng, published, fault, copy = random.Random(0), np.random.default_rng(0), [], ["none"], replace_leaf
    dtypes = {"a": np.float32, "b": np.float32, "c": np.float32, "d": jnp.bfloat16}
    new = lambda: {name: rng.normal(size=(4, 3)).astype(dtype) for name, dtype in dtypes.items()}

    def damaged(old, leaf, mesh):
        name = next(each for each, sent in published[-1].items() if np.array_equal(sent, leaf))
        arrived, kind = copy(old, leaf, mesh), fault[0]
        value, stale = np.array(arrived), published[-2][name]
        chosen = name == fault[1]
        words = value.view(f"u{value.dtype.itemsize}").reshape(-1)
        if kind == "stale weights" or (kind == "a stale leaf" and chosen):
            value = stale
        elif kind == "a stale shard" and chosen:
            value[2:] = stale[2:]
        elif kind == "a bit" and chosen:
            words[draw.randrange(words.size)] ^= words.dtype.type(1 << draw.randrange(8 * value.dtype.itemsize))
        elif kind == "another sign" and chosen:
            value[:] = -value
        elif kind == "zeros" and chosen:
            value[:] = 0
        elif kind == "swapped leaves" and name in "ac":
            value = published[-1]["c" if name == "a" else "a"]
        return jax.device_put(value, arrived.sharding)

    monkeypatch.setattr(sampler_devices, "replace_leaf", damaged)
    drawn_with = jax.jit(fingerprint)
    for trial in range(trials(16, 600)):
        if trial % 4 == 0:
            devices = sampler_devices.SamplerDevices(learner, sampler)
            fault[:], published[:] = ("none", "a"), [new(), new()]
            devices.publish(sent_by(learner, published[-1], cuts), sent_by(learner, published[-1], cuts), 1)
        kind = FAULTS[1 + trial // 2 % (len(FAULTS) - 1)] if trial % 2 else "none"
        fault[:] = kind, draw.choice("abcd")
        published.append(new())
        weights = sent_by(learner, published[-1], cuts)
        arrived = devices.publish(weights, weights, draw.choice([1, 2]))
        with jax.set_mesh(sampler):
            follow = devices.watch(Drawn(drawn_with(arrived)))
        if kind == "none":
            follow()
        else:
            with pytest.raises(sampler_devices.WrongWeights, match="the learner published"):
                follow()
        if trial % 4 == 3:
            devices.close()


def sent_by(mesh, weights, cuts):
    return {name: jax.device_put(value, NamedSharding(mesh, cuts[name])) for name, value in weights.items()}


def test_a_draw_with_wrong_weights_is_not_saved():
    under_way = Future()
    under_way.set_exception(sampler_devices.WrongWeights("of another fingerprint"))
    drawn = SimpleNamespace(under_way=under_way.result)
    with pytest.raises(sampler_devices.WrongWeights, match="another fingerprint"):
        to_save(SimpleNamespace(), [drawn])


def test_of_several_processes_that_sample_every_fingerprint_is_compared_and_the_slowest_counts():
    seconds = lambda value, **more: {"time/sample_device_seconds": value, **more}
    learner, first, second = {"published": 7}, seconds(2.0, drawn=7), seconds(1.0, drawn=7)
    assert sampler_devices.of_every_process([learner, first, second]) == seconds(2.0)
    with pytest.raises(sampler_devices.WrongWeights, match="the learner published"):
        sampler_devices.of_every_process([learner, {**first, "drawn": 8}, second])
    with pytest.raises(sampler_devices.WrongWeights, match="the learner published"):
        sampler_devices.of_every_process([learner, {"published": 8}, first, second])


def test_a_draw_that_fails_in_one_process_ends_all_with_its_cause():
    told = []

    def exchange(what, own):
        told.append(own)
        return [{"published": 7}, {"failed": "OSError: out of memory"}]

    devices = SimpleNamespace(_processes=SimpleNamespace(exchange=exchange))
    mine = Future()
    mine.set_result({"published": 7})
    with pytest.raises(RuntimeError, match="process 1: OSError: out of memory"):
        sampler_devices.SamplerDevices.wait_together(devices, mine)
    mine = Future()
    mine.set_exception(OSError("here"))
    with pytest.raises(OSError, match="here"):
        sampler_devices.SamplerDevices.wait_together(devices, mine)
    assert told[1] == {"failed": "OSError: here"}


@pytest.mark.parametrize("axis", ["expert", "sequence"])
def test_an_axis_that_the_learner_does_not_have_would_be_published_whole_and_is_refused(axis):
    config = SimpleNamespace(stages=())
    learner, sampler = split_meshes(MeshShape(fsdp=2), MeshShape(**{axis: 2}), jax.devices())
    with pytest.raises(ValueError, match=rf"Config\.sampler_mesh has MeshShape\.{axis} = 2 and Config\.mesh 1"):
        check_split(config, learner, sampler)
    check_split(config, *split_meshes(MeshShape(**{axis: 2}), MeshShape(**{axis: 2}), jax.devices()))
    check_split(config, *split_meshes(MeshShape(**{axis: 2}), MeshShape(fsdp=2), jax.devices()))
