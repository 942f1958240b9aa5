"""What crosses the network between slices: counted apart from the links, by arithmetic and in compiled programs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from jrl.device.sharding import TRAIN, MeshShape
from jrl.resolve import load_config
from jrl.tools.plan import cheaper, counted, cycles, estimate, planning, search
from jrl.tools.plan.chips import CHIPS, parse_topology
from jrl.tools.plan.collectives import axes_of
from jrl.tools.plan.frequency import frequency

TWO = ("MeshShape.data=4", "MeshShape.slices=2", "MeshShape.tensor=2", "Online.prompts=8")


def test_gradients_are_summed_within_a_slice_before_they_cross_to_the_other(small):
    # 4 copies, 2 on each slice. The two of a slice leave each other halves of the sum: 2 x 1/2 of the gradient over
    # links. Of its half a device receives the other slice's: 2 x 1/2 of 1/2.
    case = small(*TWO, devices=8)
    gradient = estimate.trained_bytes(case, TRAIN) * case.micro_batches
    traffic = estimate.update_traffic(case)
    assert case.micro_batches > 1 and traffic.links["data"] == gradient and traffic.network == gradient / 2
    # On one slice nothing crosses, and the sum of 4 is 2 x 3/4 of the gradient over links.
    one = small(*TWO, "MeshShape.slices=1", devices=8)
    assert estimate.update_traffic(one).network == 0
    assert estimate.update_traffic(one).links["data"] == 1.5 * gradient
    # Three slices of one copy: 2 x 2/3.
    three = small("MeshShape.data=3", "MeshShape.slices=3", "Online.prompts=6", devices=3)
    gradient = estimate.trained_bytes(three, TRAIN) * three.micro_batches
    assert estimate.update_traffic(three).network == pytest.approx(gradient * 4 / 3)
    assert estimate.update_traffic(three).links["data"] == 0
    # Sampling and scoring cross no slice.
    moved = estimate.of_programs(case)
    assert {name for name, traffic in moved.items() if traffic.network} == {"rl.update"}


def test_a_program_takes_as_long_as_its_network_where_that_is_the_slowest():
    chip = CHIPS["v5p"]  # 50 Gb/s a chip
    case = SimpleNamespace(devices=2, cfg=SimpleNamespace(dtype="bfloat16"))
    count = estimate.Flops(weights=2 * chip.matrix_rate, attention=0)
    of = estimate.estimate(count, estimate.Traffic(hbm=0, links={"fsdp": 1.0}, network=6.25e9 * 3), case, chip)
    assert (of.compute, of.network, of.bound, of.seconds) == (1.0, 3.0, "network", 3.0)
    assert estimate.estimate(count, estimate.Traffic(hbm=0, links={}), case, chip).bound == "compute"


def test_weights_for_a_slice_that_samples_come_over_the_network(small):
    chip, published = CHIPS["v5p"], SimpleNamespace(received=12.5e9)
    case = small()
    assert estimate.publication_seconds(published, case, chip) == 12.5e9 / chip.ring_rate
    assert estimate.publication_seconds(published, dataclasses.replace(case, slices=2), chip) == 2.0


SENT = """HloModule jit_f

%body (p: (s32[])) -> (s32[]) {
  %recv = (f32[1000,50]{1,0}, u32[]{:S(2)}, token[]) recv(%after), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
  %done = (f32[1000,50]{1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  ROOT %t = (s32[]) tuple(%i)
}

%condition (p: (s32[])) -> pred[] {
  ROOT %or = pred[] or(%a, %b)
}

ENTRY %main (p0: s32[]) -> (s32[]) {
  %other = (f32[1000]{0}, u32[], token[]) recv(%after), channel_id=3, is_host_transfer=true
  %gathered = (bf16[5000]{0}, u32[], token[]) recv(%after), channel_id=2, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_GATHER"}
  %moved = (f32[100]{0}, u32[], token[]) recv(%after), channel_id=4, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ONE_TO_ONE"}
  %unnamed = (f32[25]{0}, u32[], token[]) recv(%after), channel_id=5, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  ROOT %w = (s32[]) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
}
"""  # noqa: E501


@pytest.mark.parametrize("slices, factor", [(2, 1.0), (4, 1.5)])
def test_the_compilers_transfers_between_slices_are_counted(small, slices, factor):
    # 4 times a sum of 200,000 bytes, of which 2 x (S - 1) / S are received; once (S - 1) / S of 10,000 bytes, and 400
    # and 100 bytes, the second of a kind that has no name, at 6.25 GB/s. A transfer to the host is none.
    case = small(*TWO, devices=8)
    runs = cycles.runs(cycles.parse(SENT), frequency("update", case))
    seconds = (4 * factor * 200_000 + factor / 2 * 10_000 + 400 + 100) / 6.25e9
    assert counted.network_seconds(runs, CHIPS["v5p"], slices) == pytest.approx(seconds)
    count = counted.hlo_cost(SENT, "update", case, CHIPS["v5p"], kernels=0.0, memory=1e-6, times=1)
    assert count.network == pytest.approx((4 * 200_000 + 5_000 + 400 + 100) / 6.25e9) and count.seconds == count.network
    assert dataclasses.replace(count, memory=1.0).seconds == 1.0  # it runs beside other work


def test_one_slice_is_counted_where_no_rate_of_the_network_is_published(small):
    program = SENT.replace("xla_megascale_runtime", "a host")
    count = counted.hlo_cost(program, "update", small(devices=1), CHIPS["v4"], kernels=0.0, memory=1e-6, times=1)
    assert CHIPS["v4"].network_gbit_per_second is None and count.network == 0.0


def test_groups_across_slices_are_named(small):
    sizes = small(*TWO, devices=8).network_sizes
    assert sizes[:2] == [("slices", 2), ("data", 2)] and dict(sizes)["tensor"] == 2
    assert axes_of([[0, 4]], sizes) == "slices" and axes_of([[0, 2]], sizes) == "data"
    assert axes_of([[0, 2, 4, 6]], sizes) == "slices+data"
    assert small(devices=1).network_sizes[0] == ("data", 1)


@pytest.mark.parametrize(
    "mesh, sampler, topology, message",
    [
        (
            MeshShape(data=2),
            None,
            "2xv5e:2x2",
            "MeshShape.slices is 1, and 2xv5e:2x2 has 2 slices; set MeshShape",
        ),
        (MeshShape(data=2, slices=2), None, "v5e:2x2", r"MeshShape.slices is 2, and v5e:2x2 has 1 slice; set"),
        (
            MeshShape(data=4),
            MeshShape(data=2),
            "2xv5e:2x2",
            r"Config.sampler_mesh 2 on 1, and the slices here have 4 \+ 4",
        ),
        (MeshShape(data=2), MeshShape(data=2, slices=2), "v5e:2x2", "MeshShape.slices is 2, and v5e:2x2 has 1 slice"),
    ],
)
def test_a_topology_has_the_slices_that_the_run_asks_for(mesh, sampler, topology, message):
    config = SimpleNamespace(mesh=mesh, sampler_mesh=sampler)
    with pytest.raises(ValueError, match=message):
        planning.check_slices(config, parse_topology(topology))


def test_a_slice_may_sample_for_another():
    apart = SimpleNamespace(mesh=MeshShape(data=4), sampler_mesh=MeshShape(data=2, tensor=2))
    planning.check_slices(apart, parse_topology("2xv5e:2x2"))
    planning.check_slices(SimpleNamespace(mesh=MeshShape(data=-1, slices=2), sampler_mesh=None),
                          parse_topology("2xv5e:2x2"))  # fmt: skip


def test_a_search_says_that_it_lays_out_one_slice():
    config, parts = load_config("configs/plan/8b_two_slices.gin")
    for topology in ("v5p:4x4x4", "2xv5p:4x4x4"):
        with pytest.raises(ValueError, match=r"--search lays out one slice, and there are 2: .*MeshShape.slices=1"):
            search.search(config, parts, parse_topology(topology), [], lambda line: None)
    apart = dataclasses.replace(config, mesh=MeshShape(), sampler_mesh=MeshShape(data=2, slices=2))
    with pytest.raises(ValueError, match="--search lays out one slice, and there are 2"):
        search.search(apart, parts, parse_topology("v5p:4x4x4"), [], lambda line: None)


def test_cheaper_layouts_keep_the_slices(small):
    case = small(*TWO, devices=8)
    changes = [change for change in cheaper.candidates(case) if "MeshShape.data" in change]
    assert changes[0] == {"MeshShape.data": 2, "MeshShape.fsdp": 2, "MeshShape.tensor": 2}
    assert cheaper.applied(case.config, changes[0]).mesh == MeshShape(data=2, fsdp=2, tensor=2, slices=2)
