"""`jrl score` of rows longer than 16,384 tokens, in small: with the limit at 128 tokens."""

from __future__ import annotations

import types

import jax
import numpy as np

from jrl.device.sharding import MeshShape, make_mesh
from jrl.learning.layout import Learner
from jrl.models.contract import init
from jrl.models.decoder import MODEL, spec
from jrl.models.shape import Decoder
from jrl.tools import score

CFG = Decoder(vocab_size=32, layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16)


def test_rows_beyond_the_first_widths_are_a_multiple_of_a_step():
    assert [score._width(n) for n in (1, 129, 16_384, 16_385, 24_577)] == [128, 256, 16_384, 24_576, 32_768]


def test_only_long_rows_are_attended_to_in_blocks():
    # 2^28 bytes are 64 queries of 2 heads with 2^19 columns, 4 bytes each.
    assert score._in_blocks(CFG, 16_384) is CFG
    assert score._in_blocks(CFG, 2**19).attention_block == 64


def test_a_long_row_has_the_logprobs_that_it_has_at_once(monkeypatch):
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    stage = types.SimpleNamespace(learner=Learner(micro_batch_tokens=256))
    policy = types.SimpleNamespace(mesh=mesh, cfg=CFG, model=MODEL, config=types.SimpleNamespace(stages=[stage]))
    rows = [list(np.random.default_rng(0).integers(0, 32, n)) for n in (150, 40)]
    with jax.set_mesh(mesh):
        trained = types.SimpleNamespace(policy=policy, params=init(jax.random.key(0), spec(CFG)))
        expected = score.score(trained, rows)
        monkeypatch.setattr(score, "WIDTH_STEP", 64)
        monkeypatch.setattr(score, "SCORES_BYTES", 4 * CFG.heads * 192 * 25)
        laid = score._packed_layout(trained, rows)
        assert laid.shape.width == 192 and laid.cfg.attention_block == 25
        for actual, due in zip(score.score(trained, rows), expected, strict=True):
            np.testing.assert_allclose(actual, due, rtol=1e-6)  # log-probs of 3 to 5 round by 5e-7
