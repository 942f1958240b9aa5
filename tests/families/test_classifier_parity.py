"""Classifiers against transformers, live: every family that has one; rows padded, whole, and with the pad id in the
text. `pytest -m slow -s`, extra `reference`."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from families.published import one_device
from families.shapes import CLASSES, SHAPES, weight

from jrl.models.pretrained.published import Published, classifier_of, export, load_classifier
from jrl.rollout.rewards import RewardModel, classify, open_classifier

pytestmark = pytest.mark.slow
LABELS = {"Llama": 1, "Qwen2": 1, "Mistral": 3}  # others: 2, which a config.json leaves out


@pytest.mark.parametrize("name", SHAPES)
def test_rewards_are_those_of_transformers(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    classifier = getattr(transformers, f"{CLASSES[name]}ForSequenceClassification", None)
    if classifier is None:
        pytest.skip(f"transformers {transformers.__version__} has no classifier of {name}")
    count = LABELS.get(name, 2)
    config = getattr(transformers, f"{CLASSES[name]}Config")(
        **{**SHAPES[name][0], "num_labels": count, "pad_token_id": 0}
    )
    config._attn_implementation = "eager"
    model = classifier(config).eval().float()
    with torch.no_grad():
        for label, tensor in model.named_parameters():
            tensor.copy_(torch.tensor(weight(label, tuple(tensor.shape), 0)))
    model.save_pretrained(tmp_path / "model")
    lengths = [20, 7, 1, 20]
    tokens = np.random.default_rng(1).integers(1, config.vocab_size, (4, 20))
    given = np.arange(20)[None] < np.array(lengths)[:, None]
    tokens = np.where(given, tokens, 0)
    tokens[3, [5, 18, 19]] = 0  # the pad id as a token of the text: the labels are read before the last two
    with torch.no_grad():
        mask = torch.tensor(given).long()
        theirs = model(torch.tensor(tokens), attention_mask=mask).logits.double().numpy()
    settings = RewardModel(path=str(tmp_path / "model"), weights=(1.0,) * count, length=24, batch=2)
    opened = open_classifier(settings, one_device(), lambda name, fn: jax.jit(fn), tokenizer=SimpleNamespace(filled=0))
    ours = classify(opened, [row[:length].tolist() for row, length in zip(tokens, lengths)])
    absolute = np.abs(ours - theirs).max()
    print(f"FIGURE {name} classifier of {count}: abs {absolute:.2e} of {np.abs(theirs).max():.2f}")
    assert ours.shape == theirs.shape and absolute <= 2e-4
    published = Published(path=str(tmp_path / "model"))
    params = load_classifier(published, one_device())
    assert params["reward"].shape[2] == count
    # What is exported of it transformers reads as it reads its own.
    family, cfg, _, pad_id, _ = classifier_of(published)
    given = dict(dtype="float32", max_bytes=1 << 30, family=family, head=params["reward"], ids={"pad_token_id": pad_id})
    export(params, cfg, tmp_path / "out", **given)
    again, report = classifier.from_pretrained(tmp_path / "out", output_loading_info=True, attn_implementation="eager")
    assert not report["missing_keys"] and not report["unexpected_keys"] and again.config.num_labels == count
    with torch.no_grad():
        logits = again.eval().float()(torch.tensor(tokens), attention_mask=mask).logits.double().numpy()
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-6)
