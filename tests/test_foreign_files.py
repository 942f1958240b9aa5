"""Folders of somebody else: nothing in them hangs, exhausts the machine, or leads out of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import published_forms as forms
import pytest
from families import golden

from jrl import paths
from jrl.models.pretrained.published import Published, check_folder, decoder_of
from jrl.tasks.example import Message
from jrl.tasks.tokenizers import trial
from jrl.tasks.tokenizers.child import Child
from jrl.tasks.tokenizers.pieces import SentencePiece
from jrl.tasks.tokenizers.pieces import build as build_pieces
from jrl.tasks.tokenizers.published import HuggingFace, build
from jrl.tasks.tokenizers.spelling import MAX_EXPANSION, expansion
from jrl.tools import chat, inspect_model, score

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return forms.byte_level("gpt2", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def model(tmp_path):
    return golden.write(tmp_path / "model", files=2)


@pytest.fixture
def copied(tokenizer_folder, tmp_path):
    return shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")


def open_model(folder):
    check_folder(Published(path=str(folder)))


def open_tokenizer(folder):
    return build(HuggingFace(path=str(folder)), [])


def fifo(path, outside):
    os.mkfifo(path)


def device(path, outside):
    path.symlink_to("/dev/zero")


def link_out(path, outside):
    shutil.copy(outside, path.parents[1] / "outside")
    path.symlink_to(path.parents[1] / "outside")


def directory(path, outside):
    path.mkdir()


@pytest.mark.parametrize("put", [fifo, device, link_out, directory])
@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_only_plain_files_of_the_folder_are_read_as_a_model(model, tmp_path, put, name):
    (model / name).rename(tmp_path / "was")
    put(model / name, tmp_path / "was")
    with pytest.raises(ValueError, match=r"named pipe|device|outside of its folder|is a folder"):
        open_model(model)


@pytest.mark.parametrize("put", [fifo, device, link_out])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_only_plain_files_of_the_folder_are_read_as_a_tokenizer(copied, tmp_path, put, name):
    (tmp_path / "was").write_bytes((copied / name).read_bytes() if (copied / name).exists() else b"{}")
    (copied / name).unlink(missing_ok=True)
    put(copied / name, tmp_path / "was")
    with pytest.raises(ValueError, match=r"named pipe|device|outside of its folder"):
        open_tokenizer(copied)


def test_a_link_inside_the_folder_is_followed_and_so_is_the_cache_of_a_hub(model, tmp_path):
    (model / "config.json").rename(model / "real.json")
    (model / "config.json").symlink_to("real.json")
    open_model(model)
    cache = tmp_path / "models--mine"
    snapshot = cache / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, name in enumerate(sorted(set(os.listdir(model)) - {"real.json"})):
        shutil.copy(model / name, cache / "blobs" / str(i))
        (snapshot / name).symlink_to(f"../../blobs/{i}")
    open_model(snapshot)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "model" / "real.json")
    with pytest.raises(ValueError, match="outside of its folder"):
        open_model(snapshot)


def test_a_file_longer_than_may_be_read_is_refused_before_it_is(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="1099511627776 bytes; at most 16777216"):
        paths.read_object(tmp_path / "sparse")


@pytest.mark.parametrize("layers", [2**40, 2**12 + 1])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2"])
def test_a_number_of_layers_beyond_all_is_refused_before_they_are_counted_out(tmp_path, family, layers):
    key = "n_layer" if family == "GPT2" else "num_hidden_layers"
    folder = golden.write(tmp_path / "model", family, **{key: layers})
    with pytest.raises(ValueError, match=f"{key} is {layers}; at most 4096"):
        decoder_of(Published(path=str(folder)))


@pytest.mark.parametrize(("family", "changes"), [
    ("Gemma2", {"layer_types": [[]]}), ("SmolLM3", {"no_rope_layers": [{}]}),
    ("Gemma3", {"_sliding_window_pattern": 0, "layer_types": None}),
    ("GPTNeoX", {"layer_norm_eps": 1e400}), ("Llama", {"hidden_size": "x"}), ("Llama", {"rms_norm_eps": 1e400}),
])  # fmt: skip
def test_values_of_another_kind_are_refused_by_file(tmp_path, family, changes):
    folder = golden.write(tmp_path / "model", family, **changes)
    with pytest.raises(ValueError, match=r"config\.json"):
        decoder_of(Published(path=str(folder)))


STRANGE = (
    True, -1, 0, 1, 2**40, -(2**63), 1.5, 1e-30, float("inf"), float("nan"), "", "x", "\0", [], {}, [[]], [{}], [0],
    {"a": {}},
)  # fmt: skip


def test_any_value_of_a_config_is_taken_or_refused_by_file(tmp_path, trials):
    configs = {name: golden.golden_files(name)["config5"] for name in golden.NAMES}
    cases = [(name, key, value) for name, config in configs.items() for key in config for value in STRANGE]
    folder = tmp_path / "model"
    folder.mkdir()
    random.Random(0).shuffle(cases)
    raw = []
    for name, key, value in cases[: trials(500, len(cases))]:
        (folder / "config.json").write_text(json.dumps(configs[name] | {key: value}))
        try:
            assert decoder_of(Published(path=str(folder)))[1].layers <= 4096
        except ValueError as error:
            assert str(folder) in str(error), (name, key, value)
        except Exception as error:
            raw.append((name, key, value, error))
    assert raw == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_without_an_end_of_its_depth_is_refused(model, name):
    (model / name).write_text(DEEP)
    with pytest.raises(ValueError, match="model"):
        open_model(model)


def change(folder, name, edit):
    layout = json.loads((folder / name).read_text())
    edit(layout)
    (folder / name).write_text(json.dumps(layout))


TWO_BILLION = 2_000_000_000
TOKENIZER_FAULTS = [
    (lambda x: x["model"]["vocab"].update({"zzz": TWO_BILLION}), "the id 2000000000 is not one of"),
    (lambda x: x["added_tokens"][0].update(id=TWO_BILLION), "the id 2000000000 is not one of"),
    (lambda x: x["model"]["vocab"].update({"zzz": -1}), "the id -1 is not one of"),
    (lambda x: x["model"].update(vocab=[]), "vocabulary of a BPE model"),
    (lambda x: x.update(added_tokens=["x"]), "not a valid tokenizer.json"),
    (lambda x: x.update(normalizer={"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}] * 20}), "normalizer may make"),
    (lambda x: x.update(normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 999}),
     "normalizer may make 1000"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), TOKENIZER_FAULTS)
def test_vocabularies_that_would_exhaust_the_machine_are_refused(copied, edit, message):
    change(copied, "tokenizer.json", edit)
    with pytest.raises(ValueError, match=message):
        open_tokenizer(copied)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("added_tokens_decoder", {"3": "text"}, r"added_tokens_decoder\['3'\] is \"text\", a text; expected an object"),
    ("added_tokens_decoder", {"3": {"special": True}}, r"added_tokens_decoder\['3'\].content is null, null; expected"),
    ("added_tokens_decoder", {"x": {"content": "x"}}, r"added_tokens_decoder has the key 'x'; expected the id"),
    ("added_tokens_decoder", {str(TWO_BILLION): {"content": "<x>"}}, "tokenizer"),
    ("added_tokens_decoder", [1], r"added_tokens_decoder is \[1\], a list; expected an object"),
    ("chat_template", 7, r"chat_template is 7, a number; expected a text, or a list"),
    ("chat_template", True, r"chat_template is true, a truth value; expected a text"),
    ("chat_template", [1], r"chat_template\[0\] is 1, a number; expected an object with"),
    ("chat_template", [{"name": "default", "template": [1]}], r"chat_template\[0\].template is \[1\], a list"),
    ("chat_template", {"a": 1}, r"chat_template is {\"a\": 1}, an object; expected a text"),
])  # fmt: skip
def test_settings_of_another_kind_are_refused_by_file_and_key(copied, name, value, said):
    (copied / "chat_template.jinja").unlink(missing_ok=True)
    change(copied, "tokenizer_config.json", lambda config: config.update({name: value}))
    with pytest.raises(ValueError, match=said) as raised:
        open_tokenizer(copied)
    assert str(copied) in str(raised.value) and "tokenizer" in str(raised.value)


@pytest.mark.parametrize(
    "text", ["{{ 1 + }}", "{{ raise_exception('never') }}", "{% for m in messages %}{{ m.a.b.c }}"]
)
def test_a_template_that_does_not_render_is_a_finding_that_names_its_file(copied, text):
    (copied / "chat_template.jinja").write_text(text)
    findings = list(inspect_model.tokenizer(copied, SimpleNamespace(vocab_size=1 << 20)))
    bad = [finding.text for finding in findings if not finding.good]
    assert len(bad) == 1 and bad[0].startswith(f"{copied}/chat_template.jinja: the chat template does not render")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizers_json_without_an_end_of_its_depth_is_refused(copied, name):
    (copied / name).write_text(DEEP)
    with pytest.raises(ValueError, match=r"too deep|not a valid tokenizer"):
        open_tokenizer(copied)


def test_the_expansion_of_a_normalizer_is_that_of_all_its_steps():
    replace = lambda pattern, content: {"type": "Replace", "pattern": pattern, "content": content}
    steps = [replace({"String": "ab"}, "abcde"), {"type": "NFKC"}, replace({"Regex": " {2,}"}, "_")]
    assert expansion({"type": "Sequence", "normalizers": steps}) == 3 * 18 * 2  # ceil(5 / 2), 18, 1 + 1
    assert expansion(None) == 1 and expansion({"type": "Prepend", "prepend": "_"}) == 1
    assert expansion({"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 2}) > MAX_EXPANSION


def test_a_vocabulary_that_takes_all_memory_ends_its_own_process_only(tokenizer_folder):
    layout = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    grows = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
    layout["normalizer"] = {"type": "Sequence", "normalizers": [grows] * 20}
    trials = Child("trial.py", 5, 256)
    ask = lambda data: trials.ask({"form": "json", "bytes": len(data)}, 60, data)["problem"]
    try:
        assert ask(json.dumps(layout).encode()).startswith("opening it ")
        assert ask((tokenizer_folder / "tokenizer.json").read_bytes()) == ""  # and the next is tried as before
    finally:
        trials.close()


def test_prompts_are_read_from_rows_of_data(tmp_path):
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]
    rows = [{"prompt": "3 + 4", "answer": "7"}, {"messages": asked}, {"prompt": asked, "id": 3}, "{}", 12, ["a"]]
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    conversation = (Message("system", "Add."), Message("user", "1 + 1"))
    prompts = chat.read_prompts(tmp_path / "rows")
    assert prompts == ["3 + 4", conversation, conversation, "{}", "12", '["a"]']
    (tmp_path / "rows").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "rows").read_bytes())  # as some editors write it
    assert chat.read_prompts(tmp_path / "rows") == prompts
    (tmp_path / "rows").write_text('{"prompt": "3 + 4",}\n')  # a text: LaTeX may begin so
    assert chat.read_prompts(tmp_path / "rows") == ['{"prompt": "3 + 4",}']
    (tmp_path / "rows").rename(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: not JSON: "):
        chat.read_prompts(tmp_path / "rows.jsonl")
    problems = {
        "3 + 4": "not JSON: .*; plain text belongs in another file",
        '["3 + 4"': "not JSON",
        '["3 + 4"]': "a prompt in a .jsonl file is a JSON string or",
        "12": "a prompt in a .jsonl file",
    }
    for line, problem in problems.items():
        (tmp_path / "rows.jsonl").write_text(f'"1 + 1"\n{line}\n')
        with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: {problem}"):
            chat.read_prompts(tmp_path / "rows.jsonl")
    chat.write_completions(tmp_path / "out", prompts[:2], [[chat.Completion("2", "length")]] * 2)
    out = [json.loads(line)["prompt"] for line in (tmp_path / "out").read_text().splitlines()]
    assert out == ["3 + 4", asked]


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"question": "3 + 4", "answer": "7"}, "this one has 'question', 'answer'"),
        ({}, "this one has no key"),
        ({"prompt": "a", "messages": []}, "this one has 'prompt', 'messages'"),
        ({"prompt": None}, "'prompt' is not a list of messages"),
        ({"prompt": 5}, r"not a list of messages; a prompt as a JSON object is {\"prompt\": \"...\"} or {\"messages"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": [{"role": "user"}]}, "'messages' has an entry that is not {\"role\": text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "'messages' has an entry that"),
        ({"messages": [{"role": "human", "content": "a"}]}, "role 'human' is not one of system, user"),
        ({"messages": [{"role": "x" * 2000, "content": "a"}]}, f"role '{'x' * 39} is not one of system, user"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the last message is the assistant's"),
        ({"prompt": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_a_row_without_a_prompt_is_refused_and_not_asked_as_text(tmp_path, row, problem):
    (tmp_path / "rows").write_text("plain\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"rows, line 2: .*{problem}"):
        chat.read_prompts(tmp_path / "rows")


def test_rows_and_prompts_come_from_plain_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (chat.read_prompts, lambda path: score.read_rows(path, None, 8)):
        for name in (tmp_path / "pipe", "/dev/zero"):
            with pytest.raises(ValueError, match=r"named pipe|device"):
                read(name)
    (tmp_path / "deep").write_text(DEEP)
    assert chat.read_prompts(tmp_path / "deep") == [DEEP]
    # Only a line feed ends a line, after a carriage return or not: JSON strings may hold other breaks as they are.
    (tmp_path / "breaks").write_bytes('"one\u2028two"\r\na\x0cpage\n\n"\x85"\nlast'.encode())
    assert chat.read_prompts(tmp_path / "breaks") == ["one\u2028two", "a\x0cpage", "\x85", "last"]
    (tmp_path / "half").write_text('plain\n\n"a\\ud800"\n')
    with pytest.raises(ValueError, match=r"half, line 3: the prompt contains half a surrogate pair"):
        chat.read_prompts(tmp_path / "half")
    with pytest.raises(ValueError, match=r"nope: No such file or directory$"):
        chat.read_prompts(tmp_path / "nope")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        score.read_rows(tmp_path / "deep", None, 8)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty is empty; give it a row a line"):
        score.read_rows(tmp_path / "empty", None, 8)


def test_a_sentencepiece_model_that_is_none_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="named pipe"):
        build_pieces(SentencePiece(path=str(tmp_path / "pipe")), [])
    (tmp_path / "x.model").write_bytes(os.urandom(4096))
    with pytest.raises(ValueError, match=r"sentencepiece model|cannot be opened"):
        build_pieces(SentencePiece(path=str(tmp_path / "x.model")), [])


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("ids_of", "MemoryError", "it takes more memory than a vocabulary should"),
        ("confine", "OSError", "opening it could not be tried"),
    ],
)
def test_a_trial_that_did_not_take_place_finds_no_file_sound(name, error, message):
    program = (
        "import sys, runpy\nmodule = runpy.run_path(sys.argv[1])\nglobals_ = module['forked'].__globals__\n"
        f"def broken(*_): raise {error}\nglobals_[{name!r}] = broken\nprint(module['forked']('model', b'', 5, 4096))"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", program, trial.__file__], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == message
