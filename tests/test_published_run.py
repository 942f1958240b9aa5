"""A run with a published folder's tokenizer: what it is asked is what the chat template writes, from training on."""

from __future__ import annotations

import json

import jax
import published_forms as forms
import pytest

import jrl
from jrl import cli
from jrl.commands import start
from jrl.device.sharding import MeshShape, make_mesh
from jrl.run.trained import open_trained
from jrl.tasks.example import Message
from jrl.tasks.tokenizers.published import HuggingFace, build
from jrl.tools import chat, doctor
from jrl.types import Finish

pytestmark = pytest.mark.usefixtures("frozen_before_the_first_step")

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


def test_a_text_cut_at_its_limit_ends_with_a_whole_character():
    pieces = [bytes([i]) for i in range(256)]
    ids = [0x61, 0xF0, 0x9F, 0x8E]
    assert chat.decoded_text(ids, pieces, False, Finish.LENGTH) == "a"
    assert chat.decoded_text(ids, pieces, False, Finish.STOP_TOKEN) == "a\ufffd"


def test_a_run_asks_by_the_chat_template_and_stops_with_every_end_token(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
        _run_one(tmp_path)


def _run_one(tmp_path):
    folder = forms.byte_level("llama3", tmp_path / "model", template=forms.PHI.replace("<|end|>", "<|eot_id|>"))
    run = tmp_path / "run"
    overrides = ["Config.tokenizer=@HuggingFace()", f"HuggingFace.path={str(folder)!r}", "Data.prompt_length=48",
                 "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
                 "Decoder.mlp_width=32", "Online.prompts=8", "Online.samples=2", "Online.steps=1"]  # fmt: skip
    jrl.train("configs/tiny.gin", overrides, run=run)
    tokenizer = build(HuggingFace(path=str(folder)), [])
    trained = open_trained(run)
    assert trained.policy.tokenizer.fingerprint == tokenizer.fingerprint
    assert "leaves earlier turns unchanged" in "\n".join(line.text for line in doctor.run_lines(run))
    assert trained.policy.cfg.vocab_size == tokenizer.vocab_size
    asked = chat.ask(chat.open_chat(trained, max_tokens=3, seed=1), ["<|eot_id|> 1+1"])
    assert asked[0][0].finish in ("stop_token", "length")
    greedy = chat.open_chat(trained, max_tokens=3, temperature=0.0)
    assert chat.ask(greedy, ["1+1"]) == chat.ask(greedy, [(Message("user", "1+1"),)])
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        chat.ask(greedy, ["1+1", (Message("system", "Add."), Message("user", " "))])
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "1+1 <|eot_id|>"}, {"role": "assistant", "content": "2"}]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    assert cli.main(["score", str(run), str(rows), "--out", str(out)]) == 0
    tokens = json.loads(out.read_text())["tokens"]
    assert tokenizer.spelled(tokens) == "<|user|>\n1+1 <|eot_id|><|eot_id|>\n<|assistant|>\n2<|eot_id|>"
    assert tokens.count(tokenizer.end_id) == 2  # one ends the user's turn, one the answer; the typed one is text
