"""Published classifiers: read, asked by `jrl score`, and part of a run's reward. Against transformers, live, in
tests/families/test_classifier_parity.py."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import published_forms as forms
import pytest
from safetensors.numpy import load_file, save_file
from small_model import PLAIN_DECODER

import jrl
from jrl import cli, paths
from jrl.commands import start
from jrl.device.sharding import MeshShape, make_mesh
from jrl.models import decoder
from jrl.models.contract import init
from jrl.models.families import FAMILIES, labels_of, pad_of
from jrl.models.heads import REWARD
from jrl.models.pretrained.published import Published, decoder_of, export, load_classifier
from jrl.models.rope import LongRope
from jrl.models.shape import Decoder, for_length
from jrl.rollout.ensembles import EnsembleMean, NominalWorstCase, VariancePenalty, WorstCase, aggregate
from jrl.rollout.reward_gate import Gate
from jrl.rollout.rewards import (
    CENTER,
    SCALE,
    RewardModel,
    check_alike,
    classify,
    encode,
    normalization,
    normalized,
    open_classifier,
    reward_model_source,
    tokenizer_of,
)
from jrl.rollout.scoring import HostScores
from jrl.rollout.sources import Completions, LearnedScores, add_scores
from jrl.run.identity import RefusedIdentity
from jrl.run.precompile import compile_reward
from jrl.run.reward_model import open_reward_model
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers.published import HuggingFace, build, read_files
from jrl.tasks.verdict import Status
from jrl.tools.inspect_model import recognized
from jrl.tools.score import judge_conversations, judge_file

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

QWEN = dict(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=32, qk_norm=None, qkv_bias=True)
LABELS = {"0": "helpful", "1": "honest"}


def one_device():
    return make_mesh(MeshShape(), jax.devices()[:1])


@pytest.fixture(scope="module", autouse=True)
def mesh_of_one():
    with jax.set_mesh(one_device()):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen2 classifier of two labels, with a tokenizer and a chat template."""
    there = tmp_path_factory.mktemp("made")
    words = forms.byte_level("llama3", there / "tokenizer", template=forms.PHI.replace("<|end|>", "<|eot_id|>"))
    tokenizer = build(HuggingFace(path=str(words)), ())
    cfg = Decoder(vocab_size=tokenizer.vocab_size, **QWEN)
    params = init(jax.random.key(3), decoder.spec(cfg))
    files = {name: data for name, data in read_files(words).items() if name != "config.json"}
    export(params, cfg, there / "model", dtype="float32", max_bytes=10**9, family=FAMILIES["Qwen2"], companions=files)
    tensors = load_file(there / "model" / "model.safetensors")
    tensors["score.weight"] = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    save_file(tensors, there / "model" / "model.safetensors", {"format": "pt"})
    change(there / "model", architectures=["Qwen2ForSequenceClassification"], id2label=LABELS,
           label2id={name: int(i) for i, name in LABELS.items()}, tie_word_embeddings=False)  # fmt: skip
    return there / "model"


def change(folder, **fields):
    place = folder / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **fields}))


def opened(folder, tokenizer=None, **fields):
    config = RewardModel(path=str(folder), **{"weights": (1.0, 0.5), "length": 32, "batch": 2, **fields})
    return open_classifier(config, one_device(), lambda name, fn: jax.jit(fn), tokenizer or tokenizer_of(str(folder)))


def judged(classifier, conversations):
    """Returns what the reward model says of conversations that end with an answer, each of one completion."""
    visits = [Visit(Example(str(i), tuple(talk[:-1])), (0, i), ()) for i, talk in enumerate(conversations)]
    source = reward_model_source(classifier)
    texts = [talk[-1].content for talk in conversations]
    return source.collect(source.submit(Completions(visits, texts, 1, host={}, packed=None, state=None)))


def test_labels_by_what_config_says():
    named = {"architectures": ["LlamaForSequenceClassification"]}
    assert labels_of({"architectures": ["LlamaForCausalLM"]}) is None
    assert labels_of(named) == ("LABEL_0", "LABEL_1")  # two are what a config.json leaves out
    assert labels_of({**named, "num_labels": 1}) == ("LABEL_0",)
    assert labels_of({**named, "id2label": {"1": "b", "0": "a"}}) == ("a", "b")
    for bad in ("3", 0, True):
        with pytest.raises(ValueError, match=f"num_labels is {bad!r}; it must be a whole number of at least 1"):
            labels_of({**named, "num_labels": bad})
    with pytest.raises(ValueError, match="architectures is 3; it must be a list of names"):
        labels_of({"architectures": 3})
    with pytest.raises(ValueError, match=r"id2label .* must name the labels 0, 1"):
        labels_of({**named, "id2label": {"1": "a"}})


def test_a_reward_model_of_a_run_reads_a_conversation_up_to_the_token_that_ends_its_answer(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    change(tmp_path / "model", jrl_score_at="answer_end")
    talk = [Message("user", "1+1?"), Message("assistant", "2")]
    templated, ended = (opened(there) for there in (folder, tmp_path / "model"))
    tokenizer = ended.tokenizer
    expected = [*tokenizer.encode_prompt(talk[:1]), *tokenizer.encode("2"), tokenizer.end_id]
    assert encode(ended, talk) == (expected, "")
    (whole, _) = encode(templated, talk)
    assert whole == tokenizer.encode_conversation(talk, add_generation_prompt=False) and len(whole) > len(expected)
    read = [judge_conversations(there, [talk])["helpful"] for there in (folder, tmp_path / "model")]
    assert read[0] != read[1]
    ending = "; a conversation ends with the token that ends its answer"
    assert [
        any(line.text.endswith(ending) for line in recognized(there)) for there in (folder, tmp_path / "model")
    ] == [False, True]
    with pytest.raises(ValueError, match="jrl_score_at differ; they are stacked"):
        check_alike(Published(path=str(folder)), Published(path=str(tmp_path / "model")))
    change(tmp_path / "model", jrl_score_at="everywhere")
    with pytest.raises(ValueError, match="jrl_score_at is 'everywhere'; it must be 'answer_end', or absent"):
        opened(tmp_path / "model")


def test_a_row_is_given_its_heads_numbers_at_its_last_token_whatever_lies_beside_it(folder):
    params = load_classifier(Published(path=str(folder)), one_device())
    w = load_file(folder / "model.safetensors")["score.weight"]
    np.testing.assert_array_equal(params[REWARD], w.T[None])
    classifier = opened(folder)
    rows = [[5, 6, 7], [9], list(range(30)), [5, 6, 7]]
    rewards = classify(classifier, rows)
    assert rewards.shape == (4, 2)
    for ids, values in zip(rows, rewards):
        tokens = np.array([ids], np.int32)
        hidden, _ = decoder.forward(params, tokens, np.arange(len(ids), dtype=np.int32)[None], None, classifier.cfg)
        np.testing.assert_allclose(values, np.asarray(hidden)[0, -1] @ w.T, atol=1e-5)
    np.testing.assert_array_equal(rewards[0], rewards[3])


def test_conversations_that_cannot_be_judged_are_named(folder):
    asked = [Message("user", "1+1?")]
    ids = opened(folder).tokenizer.encode_conversation([*asked, answer("2")], add_generation_prompt=False)
    exact = opened(folder, length=len(ids))
    learned = judged(exact, [[*asked, answer("2")], [*asked, answer("2" * 99)]])
    assert (learned.names, learned.weights) == (("RewardModel/helpful", "RewardModel/honest"), (1.0, 0.5))
    assert np.isfinite(learned.values[0]).all() and np.isnan(learned.values[1]).all()
    assert learned.problems[0] == "" and f"RewardModel.length is {len(ids)}" in learned.problems[1]
    np.testing.assert_allclose(classify(opened(folder), [ids])[0], learned.values[0], atol=1e-6)


def test_the_head_is_read_at_the_last_token_that_is_not_padding(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    w = load_file(folder / "model.safetensors")["score.weight"]
    tokenizer = opened(folder).tokenizer
    pad = tokenizer.end_id
    # (ids, column that is read): the last that is not the padding, or the first where all are.
    rows = [([5, pad, 6, pad, pad], 2), ([5, 6], 1), ([pad, pad], 0), ([pad, 5], 1)]
    for pad_id, columns in [(pad, [at for _, at in rows]), (None, [len(ids) - 1 for ids, _ in rows])]:
        change(tmp_path / "model", pad_token_id=pad_id)
        classifier = opened(tmp_path / "model", tokenizer=tokenizer)
        rewards = classify(classifier, [ids for ids, _ in rows])
        for (ids, _), at, values in zip(rows, columns, rewards):
            tokens = np.array([ids], np.int32)
            hidden, _ = decoder.forward(classifier.params, tokens, np.arange(len(ids))[None], None, classifier.cfg)
            np.testing.assert_allclose(values, np.asarray(hidden)[0, at] @ w.T, atol=1e-5)
    assert any("labels are read at the last token" in line.text for line in recognized(tmp_path / "model"))


def test_padding_that_config_leaves_out_is_its_familys():
    assert pad_of({}, FAMILIES["Llama"]) is None and pad_of({"pad_token_id": 3}, FAMILIES["Llama"]) == 3
    assert pad_of({}, FAMILIES["Gemma3"]) == 0 and pad_of({"pad_token_id": None}, FAMILIES["Gemma3"]) is None
    with pytest.raises(ValueError, match="pad_token_id is '0'; it must be a whole number, or null"):
        pad_of({"pad_token_id": "0"}, FAMILIES["Llama"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_labels_that_are_no_numbers_mask_their_row(folder, bad):
    classifier = opened(folder)._replace(program=lambda params, tokens, length: np.float32([[bad, 1], [2, 3]]))
    learned = judged(classifier, [[Message("user", "1+1?"), answer("2")]] * 2)
    assert learned.problems == [f"its labels are {bad}, 1.0, which are not numbers", ""]
    assert np.isnan(learned.values[0]).all()
    scores = HostScores(
        reward=np.float32([1, 1]), valid=np.ones(2, bool), verdict=np.int8([Status.CORRECT] * 2),
        outcome=np.float32([1, 1]), components={}, details=["", ""],
    )  # fmt: skip
    out = add_scores(scores, learned)
    np.testing.assert_array_equal(out.reward, [0, 1 + 2 + 0.5 * 3])
    np.testing.assert_array_equal(out.valid, [False, True])
    assert out.details[0] == f"RewardModel: its labels are {bad}, 1.0, which are not numbers"


def answer(text):
    return Message("assistant", text)


def test_rewards_are_added_by_hand():
    scores = HostScores(
        reward=np.float32([1, 0, 0, 1]), valid=np.array([True, True, False, True]),
        verdict=np.int8([Status.CORRECT, Status.WRONG, Status.CRASH, Status.CORRECT]),
        outcome=np.float32([1, 0, 0, 1]), components={"Exact": np.float32([1, 0, np.nan, 1])},
        details=["", "no", "", ""],
    )  # fmt: skip
    labels = np.float32([[2, 4], [-1, 2], [5, 5], [np.nan, np.nan]])
    names = ("RewardModel/helpful", "RewardModel/honest")
    out = add_scores(scores, LearnedScores(names, (1.0, 0.5), labels, ["", "", "", "too long"]))
    # 1 + 1*2 + 0.5*4 = 5; 0 - 1 + 0.5*2 = 0; a crash stays masked; what was not judged is masked.
    np.testing.assert_array_equal(out.reward, [5, 0, 0, 0])
    np.testing.assert_array_equal(out.valid, [True, True, False, False])
    np.testing.assert_array_equal(out.verdict, [Status.CORRECT, Status.WRONG, Status.CRASH, Status.FORBIDDEN])
    np.testing.assert_array_equal(out.outcome, [1, 0, 0, 0])
    np.testing.assert_array_equal(out.components["RewardModel/honest"], np.float32([4, 2, 5, np.nan]))
    assert out.details == ["", "no", "", "RewardModel: too long"] and out.counts["FORBIDDEN"] == 1


def test_a_classifier_is_no_policy_and_a_policy_no_classifier(folder, tmp_path):
    with pytest.raises(ValueError, match="is a classifier: it scores text and does not generate it"):
        decoder_of(Published(path=str(folder)))
    shutil.copytree(folder, tmp_path / "model")
    change(tmp_path / "model", architectures=["Qwen2ForCausalLM"])
    with pytest.raises(ValueError, match="is not a classifier"):
        opened(tmp_path / "model")
    with pytest.raises(ValueError, match=r"weights has 1 numbers; .* has the 2 labels helpful, honest"):
        opened(folder, weights=(1.0,))
    change(tmp_path / "model", architectures=["Qwen2ForSequenceClassification"], id2label={"0": "one"})
    with pytest.raises(ValueError, match=r"score.weight is \[2, 16\], expected \[1, 16\]"):
        load_classifier(Published(path=str(tmp_path / "model")), one_device())


def test_a_tokenizer_of_another_model_is_refused(folder):
    # jax would read another row of the embedding for an id that it has no row for, without a word.
    tokenizer = build(HuggingFace(path=str(folder)), ())
    larger = dataclasses.replace(tokenizer, pieces=(*tokenizer.pieces, *[b"new"] * 64))
    with pytest.raises(ValueError, match=r"RewardModel\.path: .*largest id is \d+ .*do not belong together"):
        opened(folder, tokenizer=larger)


def test_a_folder_that_is_not_there_is_named_by_what_asked_for_it(tmp_path):
    config = RewardModel(path=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"Config\.reward: '.*none' is not there; it must be the folder of a class"):
        open_reward_model(config, one_device(), None, tmp_path, print, None)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"Config\.reward: '.*none' has no config\.json; it must be the folder of a"):
        open_reward_model(config, one_device(), None, tmp_path, print, None)


def test_score_and_doctor_take_a_classifier(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows.write_text("".join(json.dumps(row) + "\n" for row in ({"tokens": [5, 6, 7]}, {"messages": talk})))
    assert cli.main(["score", str(folder), str(rows), "--out", str(out)]) == 0
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert scored[0]["rewards"].keys() == {"helpful", "honest"}
    # In the shape that the command computes: another one rounds otherwise, by 2e-6 on some machines.
    expected = classify(opened(folder, length=128, batch=64), [row["tokens"] for row in scored])
    np.testing.assert_allclose([list(row["rewards"].values()) for row in scored], expected, atol=1e-6)
    tokenizer = opened(folder).tokenizer
    assert tokenizer.spelled(scored[1]["tokens"]) == "<|user|>\n1+1?<|eot_id|>\n<|assistant|>\n2<|eot_id|>\n<|eot_id|>"
    findings = list(recognized(folder))
    assert all(line.good for line in findings)
    assert any("labels: helpful, honest" in line.text for line in findings)
    for more in (["--step", "3"], ["--stage", "rl"], ["--role", "reward"]):
        assert cli.main(["score", str(folder), str(rows), "--out", str(out), *more]) == 2
        assert "takes no bindings, and has no steps, stages or roles" in capsys.readouterr().err


def test_pairs_are_measured_by_each_label_of_a_classifier(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    file, out = tmp_path / "pairs.jsonl", tmp_path / "out.json"
    pairs = [("1+1?", "2", "3"), ("1+2?", "3", "12"), ("2+2?", "4", "5"), ("2+2?", "4", "five")]
    rows = [{"prompt": prompt, "answer": right, "rejected": wrong} for prompt, right, wrong in pairs]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["eval", str(folder), "--pairs", str(file), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(result["reward"], result["n_pairs"]) for result in found] == [("helpful", 4), ("honest", 4)]
    talk = lambda prompt, text: [Message("user", prompt), Message("assistant", text)]
    values = {}
    for text in ("2", "3", "12", "4", "5", "five"):
        for prompt in ("1+1?", "1+2?", "2+2?"):
            values[prompt, text] = judged(opened(folder), [talk(prompt, text)]).values[0]
    for k, result in enumerate(found):
        right = [float(values[prompt, a][k] > values[prompt, b][k]) for prompt, a, b in pairs]
        assert result["pairs"]["mean"] == pytest.approx(np.mean(right))
        assert result["best_of_many"]["mean"] == pytest.approx(np.mean([*right[:2], right[2] * right[3]]))
    assert {result["pairs"]["mean"] for result in found} - {0.0, 1.0}  # the labels order some pairs each way
    assert str(folder) in capsys.readouterr().out
    for more in (["--role", "reward"], ["--step", "3"], ["Eval.samples=1"]):
        assert cli.main(["eval", str(folder), *more[-1:], "--pairs", str(file)] if "=" in more[0] else
                        ["eval", str(folder), "--pairs", str(file), *more]) == 2  # fmt: skip
        assert "is a classifier: it takes no bindings" in capsys.readouterr().err
    assert cli.main(["eval", str(folder), "--pairs", str(file), "--reference", str(tmp_path / "none")]) == 2
    assert "every source has a reward of its own; leave it out" in capsys.readouterr().err


LONGROPE = LongRope(short=(1.0, 1.1), long=(3.0, 9.0), original_length=16, factor=4.0)
GPT2 = dict(norm="layer", qk_norm=None, qkv_bias=True, output_bias=True, mlp="plain", mlp_bias=True, rotary_dim=0,
            activation="gelu_tanh", learned_positions=24, norm_eps=1e-5)  # fmt: skip


@pytest.mark.parametrize("name, options", [
    ("GPT2", GPT2), ("Phi3", dict(qk_norm=None, rope=LONGROPE, norm_eps=1e-5)),
])  # fmt: skip
def test_score_judges_by_the_longest_row_and_not_by_its_columns(name, options, tmp_path):
    cfg = Decoder(vocab_size=48, layers=1, width=16, heads=4, kv_heads=4, head_dim=4, mlp_width=64, **options)
    params = init(jax.random.key(3), decoder.spec(cfg))
    export(params, cfg, tmp_path / "model", dtype="float32", max_bytes=10**9, family=FAMILIES[name])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    w = tensors["score.weight"] = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    change(tmp_path / "model", architectures=[f"{name}ForSequenceClassification"], pad_token_id=None)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in ([5, 6, 7], list(range(10)))))
    assert judge_file(tmp_path / "model", rows, out) == 2
    for line in map(json.loads, out.read_text().splitlines()):
        tokens = np.array([line["tokens"]], np.int32)
        hidden, _ = decoder.forward(params, tokens, np.arange(tokens.size)[None], None, for_length(cfg, 10))
        np.testing.assert_allclose(list(line["rewards"].values()), np.asarray(hidden)[0, -1] @ w.T, atol=1e-5)
    rows.write_text(json.dumps({"tokens": [1] * 25}) + "\n")
    if name == "GPT2":
        with pytest.raises(ValueError, match="25 tokens are more than the 24 positions"):
            judge_file(tmp_path / "model", rows, out)


@pytest.mark.usefixtures("frozen_before_the_first_step")
def test_a_run_learns_from_it_and_resumes_with_the_same_weights_only(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "judge")
    bindings = ["Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
                "Decoder.mlp_width=32", *PLAIN_DECODER, "Online.prompts=4", "Online.samples=2", "Online.steps=1",
                "Scoring.workers=1", "Log.samples=0", "Log.writers=()", "Config.reward=@RewardModel()",
                "RewardModel.weights=(0.5, -1.0)",
                "RewardModel.length=64", f"RewardModel.path={str(tmp_path / 'judge')!r}"]  # fmt: skip
    step = next(iter(list(jrl.steps("configs/tiny.gin", bindings, run=tmp_path / "run"))))
    conversations = [[Message("user", prompt), answer(text)] for prompt, text in step.texts]
    learned = judged(opened(folder, length=64), conversations)
    assert learned.problems == [""] * 8
    verified = [float(any(c in "0123456789" for c in text)) for _, text in step.texts]
    expected = verified + learned.values @ [0.5, -1.0]
    np.testing.assert_allclose(step.batch.host_scores.reward, expected, atol=1e-4)
    assert step.metrics["reward_component/RewardModel/honest"] == pytest.approx(learned.values[:, 1].mean(), abs=1e-4)
    tensors = load_file(tmp_path / "judge" / "model.safetensors")
    tensors["score.weight"] = tensors["score.weight"] * 2
    save_file(tensors, tmp_path / "judge" / "model.safetensors", {"format": "pt"})
    with pytest.raises(RefusedIdentity, match=r"are not those that .* began with"):
        more = [*(binding for binding in bindings if binding != "Online.steps=1"), "Online.steps=2"]
        jrl.train("configs/tiny.gin", more, run=tmp_path / "run")


def test_a_run_resumes_with_the_judge_it_began_with(folder, tmp_path, monkeypatch):
    at, run = tmp_path / "judge", tmp_path / "run"
    shutil.copytree(folder, at)
    run.mkdir()
    monkeypatch.setattr(paths, "local_copy", lambda address, without=(): at)  # of a judge in a bucket
    config = RewardModel(path="gs://bucket/judge", weights=(1.0, 0.5), length=32, batch=2)
    cache = SimpleNamespace(program=lambda name, fn: jax.jit(fn))
    opens = lambda: open_reward_model(config, one_device(), cache, run, lambda *value: None, lambda count: [])
    opens()
    began = json.loads((run / "reward.json").read_text())
    (run / "manifest.json").write_text("{}")
    template, words = (at / "chat_template.jinja").read_text(), (at / "config.json").read_text()
    (at / "chat_template.jinja").write_text(template + " ")
    with pytest.raises(RefusedIdentity, match=r"the tokenizer or chat template in .* are not those"):
        opens()
    (at / "chat_template.jinja").write_text(template)
    change(at, rope_theta=20000.0)
    with pytest.raises(RefusedIdentity, match=r"the config\.json and the tokenizer or chat template in"):
        opens()
    (at / "config.json").write_text(words)
    # The day that a template sees is the run's first.
    (run / "reward.json").write_text(json.dumps(began | {"date": "2001-02-03"}))
    assert opens().tokenizer.chat.date == "2001-02-03"
    (run / "reward.json").write_text(json.dumps(began | {"fingerprint": "0"}))
    with pytest.raises(RefusedIdentity, match="the weights in"):
        opens()
    for key in began:  # not the day of today, and no word of weights that would be others
        (run / "reward.json").write_text(json.dumps({name: value for name, value in began.items() if name != key}))
        with pytest.raises(RefusedIdentity, match=rf"reward\.json has no '{re.escape(key)}'; it records"):
            opens()
    (run / "reward.json").unlink()
    with pytest.raises(RefusedIdentity, match=r"reward\.json is missing"):
        opens()


def test_padding_of_the_batch_changes_nothing(folder):
    """Rows beside two of padding have the bits that they have beside two others. A batch of one is another program, and
    may round otherwise: its products add up in another order."""
    one, many = opened(folder, batch=1), opened(folder, batch=5)
    rows = [[1, 2, 3], [4, 5], [6]]
    padded = classify(many, rows)
    np.testing.assert_array_equal(padded, classify(many, [*rows, [7, 8, 9, 10], [11]])[:3])
    np.testing.assert_allclose(classify(one, rows), padded, rtol=1e-5)
    assert classify(one, []).shape == (0, 2)


@pytest.fixture(scope="module")
def ensemble(folder, tmp_path_factory):
    """Folders of three members: the first, and two with heads of their own."""
    at = [folder]
    for seed in (1, 2):
        at.append(tmp_path_factory.mktemp("member") / "model")
        shutil.copytree(folder, at[-1])
        tensors = load_file(at[-1] / "model.safetensors")
        tensors["score.weight"] = np.random.default_rng(seed).normal(size=(2, 16)).astype(np.float32)
        save_file(tensors, at[-1] / "model.safetensors", {"format": "pt"})
    return at


def together(folders, **fields):
    return opened(folders[0], members=tuple(map(str, folders[1:])), **fields)


ROWS = [[5, 6, 7], [9], [5, 6]]


def test_members_of_an_ensemble_are_read_along_a_leading_axis_and_say_what_each_says_alone(ensemble):
    alone = np.stack([classify(opened(folder), ROWS) for folder in ensemble])
    model = together(ensemble, ensemble=VariancePenalty(coefficient=0.5))
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(model.params))
    members = classify(model._replace(program=model.of_members), ROWS, rows=1)
    np.testing.assert_allclose(members, alone, atol=1e-6)
    np.testing.assert_allclose(classify(model, ROWS), alone.mean(0) - 0.5 * alone.var(0), atol=1e-5)
    by_hand = {
        EnsembleMean(): alone.mean(0),
        WorstCase(): alone.min(0),
        NominalWorstCase(share=0.25): 0.25 * alone[0] + 0.75 * alone.min(0),
    }
    for way, expected in by_hand.items():
        np.testing.assert_allclose(aggregate(way, members), expected, atol=1e-5)
    assert len({np.asarray(values).tobytes() for values in by_hand.values()}) == 3


def test_an_ensemble_says_the_same_on_every_mesh(ensemble):
    config = RewardModel(path=str(ensemble[0]), members=(str(ensemble[1]),), weights=(1.0, 0.5), length=32, batch=2)
    mesh = make_mesh(MeshShape(data=2, fsdp=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        spread = open_classifier(config, mesh, lambda name, fn: jax.jit(fn), tokenizer_of(config.path))
        found = classify(spread, ROWS)
    np.testing.assert_allclose(found, classify(together(ensemble[:2]), ROWS), atol=1e-5)


def test_an_ensemble_of_one_member_is_that_member(folder):
    expected = classify(opened(folder), ROWS)
    np.testing.assert_allclose(classify(opened(folder, ensemble=VariancePenalty()), ROWS), expected, atol=1e-6)


def test_members_that_are_not_alike_are_refused(folder, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(folder, other)
    change(other, id2label={"0": "one"}, label2id={"one": 0})
    with pytest.raises(ValueError, match=r"RewardModel.members: .* has 1 labels \(one\), and .* has 2 \(helpful, hon"):
        together([folder, other])
    change(other, id2label=LABELS, rope_theta=20000.0)
    with pytest.raises(ValueError, match=r"is not like .*: rope\w* differ; they are stacked"):
        together([folder, other])
    change(other, rope_theta=json.loads((folder / "config.json").read_text())["rope_theta"])
    (other / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text() + " ")
    with pytest.raises(ValueError, match="has another tokenizer or chat template than"):
        together([folder, other])


def test_demonstrations_score_zero_on_average_and_every_member_has_one_scale(ensemble):
    talks = [[Message("user", f"{i}+1?"), answer(str(i + 1))] for i in range(4)]
    model = together(ensemble, ensemble=EnsembleMean())
    ids = [model.tokenizer.encode_conversation(talk, add_generation_prompt=False) for talk in talks]
    raw = classify(model._replace(program=model.of_members), ids, rows=1)
    center, scale = normalization(model, talks, unit=True)
    np.testing.assert_allclose(center, raw.mean(1), rtol=1e-5)
    np.testing.assert_allclose(scale, raw.std(1), rtol=1e-4)  # divided by the count
    found = normalized(model, center, scale)
    scored = classify(found._replace(program=found.of_members), ids, rows=1)
    np.testing.assert_allclose(scored.mean(1), 0, atol=1e-5)
    np.testing.assert_allclose(scored.std(1), 1, rtol=1e-4)
    # Of one alone only the mean is taken away (N+).
    single = opened(ensemble[1])
    center, scale = normalization(single, talks, unit=False)
    np.testing.assert_array_equal(scale, np.ones((1, 2)))
    np.testing.assert_allclose(classify(normalized(single, center, scale), ids), raw[1] - raw[1].mean(0), atol=1e-5)
    with pytest.raises(
        ValueError, match="normalize_on: the reward model can judge 1 of 2 demonstrations, and at least"
    ):
        normalization(single, [talks[0], [Message("user", "?"), answer("9" * 99)]], unit=False)
    with pytest.raises(ValueError, match="0 demonstrations, and at least 2 are needed: there is no training example"):
        normalization(single, [], unit=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": (1.0, 1e39)}, r"RewardModel\.weights has 1e\+39; they must be finite, in float32 too"),
        ({"weights": (float("nan"), 1.0)}, r"RewardModel\.weights has nan"),
        ({"normalize_on": 1}, r"RewardModel\.normalize_on must be at least 2 examples"),
    ],
)
def test_numbers_of_a_reward_model_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RewardModel(path="model", **fields)
    with pytest.raises(ValueError, match=r"VariancePenalty\.coefficient is 0"):
        VariancePenalty(coefficient=0)
    with pytest.raises(ValueError, match=r"NominalWorstCase\.share is 2"):
        NominalWorstCase(share=2)


def test_a_reward_that_float32_cannot_hold_masks_its_row():
    scores = HostScores(
        reward=np.float32([1, 1]), valid=np.ones(2, bool), verdict=np.int8([Status.CORRECT] * 2),
        outcome=np.float32([1, 1]), components={}, details=["", ""],
    )  # fmt: skip
    out = add_scores(scores, LearnedScores(("role/a",), (1e38,), np.float32([[4], [2]]), ["", ""]))
    np.testing.assert_array_equal(out.valid, [False, True])
    np.testing.assert_array_equal(out.reward, np.float32([0, 2e38]))
    assert out.details == ["role: the reward 4e+38 is beyond float32", ""]


@pytest.mark.usefixtures("frozen_before_the_first_step")
def test_a_run_learns_from_an_ensemble_and_shapes_the_reward(ensemble, tmp_path):
    folders = [str(folder) for folder in ensemble]
    bindings = ["Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
                "Decoder.mlp_width=32", "Online.prompts=4", "Online.samples=2", "Online.steps=1", "Scoring.workers=1",
                "Log.samples=0", "Log.writers=()", "Config.reward=@RewardModel()", "RewardModel.weights=(0.5, -1.0)",
                "RewardModel.length=64", f"RewardModel.path={folders[0]!r}", f"RewardModel.members={folders[1:]!r}",
                "RewardModel.ensemble=@WorstCase()", "RewardModel.normalize_on=4", "Online.shaping=@Shaping()",
                "Shaping.missing_stop=@MissingStop()", "MissingStop.how='subtract'", "MissingStop.value=0.25",
                "Shaping.constraints=@Constraints()",
                "Constraints.components=['RewardModel/helpful']", "Constraints.least=-1e9"]  # fmt: skip
    step = next(iter(list(jrl.steps("configs/tiny.gin", bindings, run=tmp_path / "run"))))
    began = json.loads((tmp_path / "run" / "reward.json").read_text())
    model = normalized(
        together(ensemble, length=64, ensemble=WorstCase()), np.float32(began["center"]), np.float32(began["scale"])
    )
    assert model.params[CENTER].shape == model.params[SCALE].shape == (3, 2)
    learned = judged(model, [[Message("user", prompt), answer(text)] for prompt, text in step.texts])
    verified = [float(any(c in "0123456789" for c in text)) for _, text in step.texts]
    scored = verified + learned.values @ [0.5, -1.0]
    np.testing.assert_allclose(step.batch.host_scores.reward, scored, atol=1e-4)
    stopped = np.asarray(step.batch.rollout.finish) == 0
    assert step.metrics["reward/shaped"] == pytest.approx((scored - 0.25 * ~stopped).mean(), abs=1e-4)
    assert step.metrics["reward/mean"] == pytest.approx(scored.mean(), abs=1e-4) and not stopped.all()
    with pytest.raises(
        ValueError, match=r"reads the component 'RewardModel/help', which no source of rewards has\. Did"
    ):
        bindings[-2] = "Constraints.components=['RewardModel/help']"
        jrl.train("configs/tiny.gin", bindings, run=tmp_path / "b")


def gate_file(path, sizes, seed=5):
    """Writes a gate of layers of these sizes, and returns them as (weight, bias)."""
    draw = np.random.default_rng(seed)
    layers = [(draw.normal(size=(n, m)).astype(np.float32), draw.normal(size=n).astype(np.float32))
              for m, n in itertools.pairwise(sizes)]  # fmt: skip
    names = {f"layers.{i}.{name}": x for i, layer in enumerate(layers) for name, x in zip(("weight", "bias"), layer)}
    save_file(names, path)
    return layers


def test_a_gate_mixes_the_labels_by_the_prompt(folder, tmp_path):
    path = tmp_path / "gate.safetensors"
    (w0, b0), (w1, b1) = gate_file(path, [16, 8, 2])
    gate = Gate(path=str(path), temperature=2.0, verbosity="honest", coefficients=(0.5, 1.0))
    model = opened(folder, gate=gate, weights=(3.0,))
    asked = [Message("user", "1+1?")]
    talks = [[*asked, answer("2")], [*asked, answer("22")], [Message("user", "Say 7"), answer("7")]]
    learned = judged(model, talks)
    assert learned.names == ("RewardModel", "RewardModel/helpful", "RewardModel/honest")
    assert learned.weights == (3.0, 0.0, 0.0) and learned.problems == [""] * 3
    plain = judged(opened(folder), talks).values
    np.testing.assert_allclose(learned.values[:, 1:], plain, atol=1e-6)
    for talk, values, labels in zip(talks, learned.values, plain):
        ids = model.tokenizer.encode_conversation(talk[:-1], add_generation_prompt=True)
        assert model.tokenizer.encode_conversation(talk, add_generation_prompt=False)[: len(ids)] == ids
        tokens = np.array([ids], np.int32)
        hidden, _ = decoder.forward(model.params, tokens, np.arange(len(ids))[None], None, model.cfg)
        logits = (w1 @ np.maximum(w0 @ np.asarray(hidden)[0, -1] + b0, 0) + b1) / 2
        weights = np.exp(logits) / np.exp(logits).sum()
        freed = [labels[0] - 0.5 * labels[1], 0]
        np.testing.assert_allclose(values[0], weights @ freed, atol=1e-5)
        assert 0.05 < weights[0] < 0.95
    # What a run compiles ahead is called as what it runs.
    compiled = SimpleNamespace(compile=lambda *shapes: jax.eval_shape(model.program, *shapes))
    compile_reward(model._replace(program=compiled))


@pytest.mark.parametrize(
    ("sizes", "fields", "message"),
    [
        ([16, 3], {}, "the last layer has 3 outputs, and the reward model has 2 labels, helpful, honest"),
        ([12, 2], {}, r"layers.0.weight is \[2, 12\], and a bias \[out\] with a weight \[out, 16\] was expected"),
        (
            [16, 2],
            {"verbosity": "long", "coefficients": (1.0, 1.0)},
            "Gate.verbosity is 'long'; the labels are helpful",
        ),
        ([16, 2], {"verbosity": "honest", "coefficients": (1.0,)}, "Gate.coefficients has 1 numbers; the labels are 2"),
    ],
)
def test_a_gate_that_does_not_fit_is_refused(sizes, fields, message, folder, tmp_path):
    gate_file(tmp_path / "gate.safetensors", sizes)
    with pytest.raises(ValueError, match=message):
        opened(folder, gate=Gate(path=str(tmp_path / "gate.safetensors"), **fields), weights=(1.0,))


def test_options_of_a_gate_that_contradict_each_other_are_refused(folder):
    with pytest.raises(ValueError, match=r"leave RewardModel\.members out"):
        RewardModel(path="a", members=("b",), gate=Gate(path="c"))
    with pytest.raises(ValueError, match="a gated reward has one"):
        opened(folder, gate=Gate(path="c"))
    with pytest.raises(ValueError, match="belong together"):
        Gate(path="c", verbosity="honest")
    with pytest.raises(ValueError, match=r"Gate\.temperature is 0"):
        Gate(path="c", temperature=0)
