"""Rows divided over the mesh axis `sequence`: what a device holds and receives, by hand, and what a search tries."""

import dataclasses
import math

import pytest
from small_model import Bigram

from jrl.models.shape import Decoder
from jrl.resolve import load_config
from jrl.run.checks import check_sequence
from jrl.tools.plan import budget, cheaper, estimate, flops, search
from jrl.tools.plan.case import abstract_mesh, make_case
from jrl.tools.plan.chips import parse_topology

# Two rows of 32 tokens a micro-batch, four of them; eight sequences of at most 32 tokens.
TWO = ("MeshShape.sequence=2",)


def test_a_device_holds_its_shares(small):
    remat = "Decoder.remat='layer'"
    alone, divided = small(remat), small(*TWO, remat, devices=2)
    assert (divided.rows, divided.share_length, divided.tokens, alone.tokens) == (2, 16, 32, 64)
    assert divided.micro_batches == alone.micro_batches == 4
    assert (divided.shards, divided.shape.shards) == (2, 1)  # that sample, and of packed rows
    assert budget.update(divided).activations == budget.update(alone).activations // 2
    # Matrices and moments are divided too, and norms are not: 2 * (2 * 64 + 2 * 16) + 64 of them.
    resident, norms = (budget.resident_memory(case).weights for case in (divided, alone)), 4 * 384
    one, whole = resident
    assert one - norms == (whole - norms) // 2
    assert flops.update(divided) == flops.update(alone)


def test_links_of_rows_by_hand(small):
    """A layer's keys and values of a row: 2 * 32 tokens * 32 entries * 4 bytes, of which half is there."""
    divided = small(*TWO, devices=2)
    once = 2 * 32 * 32 * 4 // 2 * (2 * 2 * 4)  # layers, rows, micro-batches
    assert estimate.logprobs_traffic(divided).links["sequence"] == once
    # An update gathers on the way forward, and on the way back if they are not kept; and it sums their gradients.
    assert estimate.update_traffic(divided).links["sequence"] == 2 * once
    again = small(*TWO, "Decoder.remat='layer'", devices=2)
    assert estimate.update_traffic(again).links["sequence"] == 3 * once
    assert estimate.update_traffic(small()).links["sequence"] == 0
    assert budget.gathered_kv_bytes(divided) == 2 * (2 * 32 * 32 * 4) and budget.gathered_kv_bytes(small()) == 0


def test_rows_of_one_are_offered_in_shares(small):
    one_row = small("MeshShape.fsdp=2", "Learner.micro_batch_tokens=64", devices=2)
    change = {"MeshShape.data": 1, "MeshShape.fsdp": 1, "MeshShape.sequence": 2}
    assert change in list(cheaper.candidates(one_row))
    assert cheaper.applied(one_row.config, change).mesh.sequence == 2
    two_rows = small("MeshShape.fsdp=2", "Learner.micro_batch_tokens=128", devices=2)
    assert change not in list(cheaper.candidates(two_rows))


def test_cheaper_meshes_keep_the_axis_of_experts(small):
    case = small("Decoder.experts=@Experts()", "Experts.count=4", "Experts.per_token=2", "Experts.width=32",
                 "MeshShape.data=2", "MeshShape.fsdp=2", "MeshShape.expert=2", devices=8)  # fmt: skip
    meshes = [change for change in cheaper.candidates(case) if "MeshShape.fsdp" in change]
    assert len(meshes) >= 2
    for change in meshes:
        assert math.prod(cheaper.applied(case.config, change).mesh.sizes(8)) == 8 and change["MeshShape.expert"] == 2


def test_cheaper_meshes_keep_the_shards_over_tensor(small):
    case = small("MeshShape.data=2", "MeshShape.fsdp=2", "MeshShape.tensor=2", devices=8)
    changes = [change for change in cheaper.candidates(case) if "MeshShape.fsdp" in change]
    assert changes[0] == {"MeshShape.data": 1, "MeshShape.fsdp": 4, "MeshShape.tensor": 2}
    for change in changes:
        assert math.prod(cheaper.applied(case.config, change).mesh.sizes(8)) == 8


def test_a_search_divides_long_rows():
    config, parts = load_config("configs/plan/1.7b_long.gin")
    shares = {over.get("MeshShape.sequence", 1) for over in search.layouts(config, parts, parse_topology("v5e:4x4"))}
    assert shares == {1, 2, 4, 8}
    config, parts = load_config("configs/plan/1.7b.gin")
    layouts = search.layouts(config, parts, parse_topology("v5e:4x4"))
    assert not any("MeshShape.sequence" in over for over in layouts)


def test_models_that_see_no_shares_are_refused():
    divided = abstract_mesh({"data": 1, "fsdp": 1, "tensor": 1, "sequence": 2, "expert": 1})
    with pytest.raises(ValueError, match=r"MeshShape.sequence = 2 .* Config.teacher is a model of your own"):
        check_sequence("teacher", Bigram(), divided)
    with pytest.raises(ValueError, match=r"fewer queries than keys .* use attention='reference'"):
        check_sequence("model", dataclasses.replace(Decoder(), dtype="bfloat16", attention="cudnn"), divided)
    check_sequence("model", Bigram(), abstract_mesh({**divided.shape, "sequence": 1}))


def test_what_cannot_be_divided_is_refused(small):
    with pytest.raises(ValueError, match=r"MeshShape.sequence = 2 divides rows, and linear attention of Config.model"):
        small(*TWO, "Decoder.linear=@Linear()", "Linear.key_heads=2", "Linear.value_heads=2", "Linear.key_dim=16",
              "Linear.value_dim=16", devices=2)  # fmt: skip
    with pytest.raises(ValueError, match=r"row_length=34 does not divide into two blocks for each .* use 36"):
        small(*TWO, "Learner.row_length=34", devices=2)
    with pytest.raises(ValueError, match=r"Decoder.width = 64 does not divide over MeshShape.sequence = 3"):
        small("MeshShape.sequence=3", "Decoder.mlp_width=96", devices=3)
    with pytest.raises(ValueError, match=r"sequences a step do not divide into 4 batch shards, of which MeshShape.seq"):
        make_case(*load_config("configs/tiny.gin", ["Decoder.vocab_size=512", "Config.stages=[@Offline()]",
                                                    "Offline.source=@Demonstrations()", "Offline.objective=@SFT()",
                                                    "Offline.batch_size=6", "MeshShape.data=2",
                                                    "MeshShape.sequence=2"]), 4)  # fmt: skip
