"""One of two processes that exchange, place and fetch arrays, and save a step: `two_processes.py PORT INDEX FOLDER`."""

import json
import sys

import numpy as np

from jrl.device.joining import join
from jrl.device.placement import fetch, place_on_mesh
from jrl.device.processes import Cluster, ProcessesDisagree


def main(port, index, folder):
    processes = join(Cluster(f"127.0.0.1:{port}", 2, int(index)), start_seconds=200)
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jrl.device.replicas import differing_replica
    from jrl.device.sharding import MeshShape, batch_sharding, make_mesh, replicated, split_meshes
    from jrl.device.transfer import copied_cuts, transfer
    from jrl.run.checkpoints.run_state import open_run_state
    from jrl.run.checkpoints.unchanged import LEAST_BYTES

    mesh = make_mesh(MeshShape(data=2, fsdp=2))
    jax.set_mesh(mesh)
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    by_row = place_on_mesh(rows, batch_sharding(mesh, 2))
    across = place_on_mesh(rows.T.copy(), NamedSharding(mesh, PartitionSpec(None, "data")))
    key = place_on_mesh(jax.random.key(3), replicated(mesh))
    state = {"by_row": by_row, "across": across, "key": key, "nothing": None}
    np.testing.assert_array_equal(fetch({"x": by_row})["x"], rows)
    assert not by_row.is_fully_addressable and differing_replica(state) is None

    learner, sampler = split_meshes(MeshShape(fsdp=2), MeshShape(fsdp=2))
    across = PartitionSpec("fsdp")
    with jax.set_mesh(learner):
        everywhere = replicated(learner)
        host = {"rows": rows, "all": rows, "key": jax.random.key(3)}
        published = place_on_mesh(host, {"rows": NamedSharding(learner, across), "all": everywhere, "key": everywhere})
        moved = transfer(published, sampler)
        assert moved["rows"].sharding == NamedSharding(sampler, across)
        assert not {*moved["rows"].sharding.device_set} & {*learner.devices.flat}
        np.testing.assert_array_equal(fetch(moved["rows"]), rows)
        np.testing.assert_array_equal(moved["all"].addressable_shards[0].data, rows)
        assert jax.random.key_data(moved["key"]).addressable_shards[0].data.tolist() == [0, 3]
        np.testing.assert_array_equal(fetch(transfer(moved["rows"], learner)), rows)
        # The process that needs the first shard has the second one: all are gathered.
        crossed = Mesh(sampler.devices[:, ::-1], sampler.axis_names, axis_types=sampler.axis_types)
        assert copied_cuts(rows.shape, across, learner, sampler) == across
        assert copied_cuts(rows.shape, across, learner, crossed) == PartitionSpec()
        np.testing.assert_array_equal(fetch(transfer(published["rows"], crossed)), rows)

    refused = ""
    try:
        processes.agree("configuration", {"rate": index, "seed": 3})
    except ProcessesDisagree as error:
        refused = str(error)
    long = np.arange(1_000_000, dtype=np.float32)  # in four pieces
    for of, found in enumerate(processes.exchange("long", long + processes.index)):
        np.testing.assert_array_equal(found, long + of)
    stops = [processes.any("stop", asked) for asked in (False, index == "1")]

    saves = open_run_state(folder, keep=2, processes=processes)
    saves.save(1, state, {"done": 1})
    saves.save(2, state, {"done": 2})
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    step, restored, host = saves.restore(abstract)
    np.testing.assert_array_equal(fetch(restored["across"]), rows.T)
    # One array apart from the others: the processes do not read back the same number of arrays.
    large = place_on_mesh(np.ones(LEAST_BYTES // 4, np.float32), batch_sharding(mesh, 1))
    linked = open_run_state(f"{folder}/linked", keep=2, processes=processes)
    for done in (1, 2, 3):
        linked.save(done, {"large": large, "by_row": by_row}, {"done": done})
    own = open_run_state(f"{folder}/own-{index}", keep=2, processes=processes, shared=False)
    own.save(1, state, {"done": int(index)})
    print(json.dumps({"refused": refused, "stops": stops, "steps": saves.steps(), "step": step, "host": host,
                      "share": list(processes.share(5))}))  # fmt: skip
    processes.barrier("done")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
