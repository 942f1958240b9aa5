"""The commands that take a run take a published folder too, and doctor says what of one is recognized."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import published_forms as forms
import pytest
from drawn_params import drawn_params
from families import golden
from safetensors.numpy import load_file, save_file

from jrl import cli, exit_codes
from jrl.commands import start
from jrl.device.sharding import MeshShape, make_mesh
from jrl.models import decoder
from jrl.models.families import FAMILIES
from jrl.models.pretrained.published import GENERATION, export
from jrl.models.shape import Decoder
from jrl.run.trained import generation_defaults, open_trained, unsupported_generation_options, without_tokenizer
from jrl.tasks.tokenizers.published import HuggingFace, build, read_files
from jrl.tools.inspect_model import recognized

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

QWEN = dict(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=32, qk_norm=None, qkv_bias=True)
ASKED = """
Config.task = @Jsonl()
Jsonl.path = 'PATH'
Jsonl.columns = {'prompt': 'question'}
Jsonl.answer_in = 'hash'
Scoring.verifiers = [@Numeric()]
Scoring.workers = 1
Numeric.extract = 'hash'
Data:
  prompt_length = 64
  held_out_every = 1
Sampler.completion_length = 4
Config.stages = [@Online()]
Online.objective = @GRPO()
Config.eval = @Eval()
Eval:
  prompts = 6
  batch = 4
"""


@pytest.fixture(scope="module", autouse=True)
def mesh_of_one():
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
        yield


@pytest.fixture(autouse=True)
def devices_as_they_are(monkeypatch):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)


@pytest.fixture(scope="module")
def published_model(tmp_path_factory):
    """A random Qwen2 with a tokenizer, a chat template, and a word on sampling."""
    files = read_files(forms.byte_level("qwen", tmp_path_factory.mktemp("tokenizer") / "qwen"))
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    files[GENERATION] = json.dumps(generation).encode()
    cfg = Decoder(vocab_size=576, **QWEN)
    folder = tmp_path_factory.mktemp("model") / "qwen"
    params = drawn_params(decoder.spec(cfg))
    export(params, cfg, folder, dtype="float32", max_bytes=1 << 30, family=FAMILIES["Qwen2"], companions=files)
    return folder


@pytest.fixture
def folder(published_model, tmp_path):
    return shutil.copytree(published_model, tmp_path / "model")


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def report_of(folder):
    findings = list(recognized(folder))
    return "\n".join(("ok " if line.good else "!! ") + line.text for line in findings)


def test_sample_draws_as_generation_config_tells_and_a_binding_goes_before(folder, tmp_path):
    sampler = open_trained(folder).policy.config.sampler
    assert (sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p) == (0.7, 20, 0.8, None)
    sampler = open_trained(folder, ["Sampler.top_k=None", "Sampler.min_p=0.1"]).policy.config.sampler
    assert (sampler.temperature, sampler.top_k, sampler.min_p) == (0.7, None, 0.1)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("hello\nagain\n")
    args = ["sample", str(folder), "--prompts", str(prompts), "--out", str(out), "--max-tokens", "3", "--n", "2"]
    assert cli.main(args) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["hello", "hello", "again", "again"]


@pytest.mark.parametrize(
    ("generation", "bindings"),
    [
        ({}, []),
        ({"do_sample": False, "temperature": 0.7}, ["Sampler.temperature=None"]),
        ({"do_sample": True, "temperature": 0.0}, ["Sampler.temperature=None"]),
        ({"top_k": 0, "top_p": 1.0, "temperature": 1.0, "min_p": 0.0}, ["Sampler.temperature=1.0"]),
        ({"top_k": 50, "top_p": None}, ["Sampler.top_k=50"]),
        ({"top_k": -1, "temperature": 0.7}, ["Sampler.temperature=0.7"]),
    ],
)
def test_what_is_told_of_sampling(generation, bindings, tmp_path):
    (tmp_path / GENERATION).write_text(json.dumps(generation))
    assert generation_defaults(tmp_path) == bindings


def test_what_is_told_and_cannot_be_drawn(tmp_path):
    assert generation_defaults(tmp_path) == unsupported_generation_options(tmp_path) == []
    generation = {
        "repetition_penalty": 1.05,
        "num_beams": 1,
        "typical_p": 1.0,
        "suppress_tokens": [3],
        "bad_words_ids": [],
    }
    (tmp_path / GENERATION).write_text(json.dumps(generation))
    assert unsupported_generation_options(tmp_path) == ["repetition_penalty = 1.05", "suppress_tokens = [3]"]
    for wrong in ({"temperature": -1}, {"top_p": 1.5}, {"top_k": 2.5}, {"top_k": -2}, {"min_p": "0.1"},
                  {"top_k": True}):  # fmt: skip
        (tmp_path / GENERATION).write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=f"generation_config.json: {next(iter(wrong))} is "):
            generation_defaults(tmp_path)
    for text in ("[]", "{", "[" * 100_000):
        (tmp_path / GENERATION).write_text(text)
        with pytest.raises(ValueError, match=r"generation_config\.json"):
            generation_defaults(tmp_path)


def test_eval_takes_a_published_folder_and_says_what_a_run_of_the_same_weights_would(folder, tmp_path, capsys):
    rows = tmp_path / "test.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{i}+1=", "answer": f"#### {i + 1}"}) + "\n" for i in range(6)))
    gin, out = tmp_path / "asked.gin", tmp_path / "out.json"
    gin.write_text(ASKED.replace("PATH", str(rows)))
    assert cli.main(["eval", str(folder), "--config", str(gin), "--out", str(out), "Eval.samples=2"]) == 0
    printed = json.loads(out.read_text())
    assert (printed["step"], printed["n"], printed["samples"], printed["unscorable"]) == (0, 6, 2, 0)
    assert "6 held-out prompts of Jsonl, 2 samples each" in capsys.readouterr().out
    assert cli.main(["eval", str(folder)]) == exit_codes.REFUSED
    assert "--config FILE.gin" in capsys.readouterr().err


def test_the_configuration_of_a_run_is_its_own(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="its own configuration"):
        open_trained(tmp_path, config="configs/tiny.gin")


def test_doctor_lists_what_is_recognized(folder):
    (folder / "README.md").write_text("read me")
    text = report_of(folder)
    assert "!!" not in text
    for part in (
        "family Qwen2: Qwen2ForCausalLM",
        "hidden_size",
        "keys that change nothing here",
        "1 layers of width 16, 2 heads of 8 over 1 of keys and values, 576 rows",
        "14 tensors hold 11,600 parameters (14 F32), all accounted for",
        "an answer ends with '<|im_end|>'",
        "the chat template rewrites turn",
        "temperature = 0.7, top_k = 20, top_p = 0.8",
        "repetition_penalty = 1.1, which this version does not support",
        "not read: README.md",
    ):
        assert part in text, part


def test_doctor_lists_what_is_not_recognized(folder):
    change(folder / "config.json", twist=3)
    assert "!! config.json: 1 unknown keys (twist)" in report_of(folder)
    assert "!! the model is refused:" in report_of(folder)
    change(folder / "config.json", twist=None, vocab_size=200)
    text = report_of(folder)
    assert "!! the tensors in" in text and "model.embed_tokens.weight is [576, 16], expected [200, 16]" in text
    assert "!! the tokenizer's largest id is" in text
    change(folder / GENERATION, temperature="hot")
    assert "!! " + str(folder / GENERATION) in report_of(folder)
    change(folder / "config.json", architectures=["MambaForCausalLM"], model_type="mamba")
    assert report_of(folder).startswith("!! ") and "MambaForCausalLM" in report_of(folder)


def test_doctor_names_a_missing_tensor_and_a_folder_without_a_tokenizer(folder, capsys):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = np.zeros(2, np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").unlink()
    assert cli.main(["doctor", str(folder)]) == exit_codes.STOPPED
    text = capsys.readouterr().out
    assert "missing (1): model.norm.weight; unexpected (1): model.extra.weight" in text
    assert "no tokenizer (tokenizer.json or tokenizer.model): token ids only" in text
    (folder / "vocab.json").write_text("{}")
    assert "!! HuggingFace.path" in report_of(folder) and "does not read vocab.json" in report_of(folder)
    (folder / "vocab.json").rename(folder / "tekken.json")
    assert "!! HuggingFace.path" in report_of(folder) and "does not read tekken.json" in report_of(folder)


def test_end_tokens_come_from_every_file_that_names_them(folder, capsys):
    tokenizer = build(HuggingFace(path=str(folder)), ())
    (other,) = [i for i, name in tokenizer.names.items() if name == "<|endoftext|>"]
    assert other not in tokenizer.end_ids
    change(folder / GENERATION, eos_token_id=[*tokenizer.end_ids, other])
    assert open_trained(folder).policy.tokenizer.end_ids == (*tokenizer.end_ids, other)
    change(folder / GENERATION, eos_token_id=tokenizer.encode("(")[0])
    assert cli.main(["sample", str(folder)]) == exit_codes.REFUSED
    assert "is ordinary text" in capsys.readouterr().err


def test_without_a_tokenizer_the_end_of_a_text_is_the_first_that_the_files_name(tmp_path):
    cfg = Decoder(vocab_size=96)
    of = lambda name, **values: (tmp_path / name).write_text(json.dumps(values))
    of("config.json", text_config={"eos_token_id": 5})
    assert without_tokenizer(tmp_path, cfg).end_ids == (5,)
    of("config.json", text_config={"eos_token_id": 5}, eos_token_id=6)
    assert without_tokenizer(tmp_path, cfg).end_ids == (6,)
    of(GENERATION, eos_token_id=[7, 8])
    assert without_tokenizer(tmp_path, cfg).end_ids == (7, 8)
    of("config.json", text_config={})
    of(GENERATION, eos_token_id=96)
    with pytest.raises(ValueError, match="names the eos_token_id 96; the model's ids are 0 to 95"):
        without_tokenizer(tmp_path, cfg)


def test_a_folder_that_cannot_be_used_is_refused_by_every_command(folder, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"tokens": [1, 2]}\n')
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-8])
    for command in (["score", str(folder), str(rows), "--out", str(tmp_path / "o")], ["sample", str(folder)],
                    ["export", str(folder), "--to", str(tmp_path / "to")]):  # fmt: skip
        assert cli.main(command) == exit_codes.REFUSED
        assert "model.safetensors is damaged or cut short" in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


def test_a_run_of_a_damaged_folder_is_refused_before_it_creates_or_compiles_anything(folder, tmp_path, capsys):
    run = ["Config.model=@Published()", f"Published.path={str(folder)!r}", "--run", str(tmp_path / "run")]
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-8])
    assert cli.main(["train", "tiny", *run]) == exit_codes.REFUSED
    (folder / "model.safetensors").write_bytes(weights)
    change(folder / "config.json", num_hidden_layers=2)
    assert cli.main(["train", "tiny", *run]) == exit_codes.REFUSED
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert cli.main(["train", "tiny", *run]) == exit_codes.REFUSED
    told = capsys.readouterr()
    assert "model.safetensors is damaged or cut short" in told.err and "do not match its config.json" in told.err
    assert "has no 'hidden_size'" in told.err and told.out == ""  # no phase was shown
    assert not (tmp_path / "run").exists()


def test_a_template_that_does_not_end_is_refused(folder, capsys):
    (folder / "chat_template.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    assert cli.main(["sample", str(folder)]) == exit_codes.REFUSED
    assert "chat template" in capsys.readouterr().err
    assert "!! " in report_of(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused_before_weights_are_read(folder, capsys):
    change(folder / "config.json", vocab_size=200)
    assert cli.main(["sample", str(folder)]) == exit_codes.REFUSED
    assert "has 200 rows, and the tokenizer has ids up to" in capsys.readouterr().err


def test_a_model_with_fewer_learned_positions_than_the_usual_lengths_is_opened(tmp_path):
    folder = golden.write(tmp_path / "model", "GPT2")  # 80 positions; usual are 128 tokens of prompt and 256 of answer
    config = open_trained(folder).policy.config
    assert (config.data.prompt_length, config.sampler.completion_length) == (26, 54)  # 80 / 3, and the rest
    asked = open_trained(folder, ["Data.prompt_length=40", "Sampler.completion_length=40"]).policy.config
    assert (asked.data.prompt_length, asked.sampler.completion_length) == (40, 40)
    with pytest.raises(ValueError, match="80 positions"):
        open_trained(folder, ["Data.prompt_length=40"])
