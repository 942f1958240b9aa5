"""A run becomes a published folder, a published folder becomes a run, and both say the same."""

from __future__ import annotations

import json
import shutil
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jrl
from jrl.models.pretrained.published import length_of
from jrl.rollout.rewards import conversation_ids
from jrl.run.identity import RefusedIdentity
from jrl.run.trained import open_trained
from jrl.tasks.example import Message
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.tools.chat import ask, open_chat
from jrl.tools.export import export_policy, note_other_models, save_tokenizer, size_of
from jrl.tools.inspect_model import recognized
from jrl.tools.score import judge_conversations, score, score_rewards

pytestmark = pytest.mark.usefixtures("mesh_of_the_runs")

TINY = ("Online.steps=2", "Online.prompts=4", "Online.samples=2", "Checkpoint.every=1", "Log.writers=()",
        "Decoder.layers=2", "Decoder.width=16", "Decoder.head_dim=8", "Decoder.mlp_width=32")  # fmt: skip
ROWS = [[1, 2, 3, 40], [9], [5, 6] * 20]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    jrl.train("configs/tiny.gin", TINY, run=folder)
    return folder


@pytest.fixture(scope="module")
def published(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "model"
    step, files = export_policy(run, folder, max_shard="4KB")
    assert step == 2 and "model.safetensors.index.json" in files
    return folder


def test_an_exported_run_scores_as_the_run(run, published):
    expected = score(open_trained(run), ROWS)
    actual = score(open_trained(published), ROWS)
    for a, b in zip(actual, expected):
        np.testing.assert_array_equal(a, b)
    assert json.loads((published / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    # Whoever serves the model may read all of it, or none.
    assert len({path.stat().st_mode for path in published.iterdir() if path.is_file()}) == 1


def test_a_reward_model_that_a_run_has_trained_is_exported_as_a_classifier_and_rewards_another_run(tmp_path, caplog):
    steps = ["warm/Offline.steps=1", "judge/Offline.steps=1", "warm/Offline.batch_size=4", "judge/Offline.batch_size=4"]
    jrl.train("configs/rlhf-tiny.gin", [*TINY, *steps], run=tmp_path / "run")
    export_policy(tmp_path / "run", tmp_path / "model", role="reward")
    assert "reward head" not in caplog.text
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["architectures"], config["num_labels"]) == (["Qwen3ForSequenceClassification"], 1)
    messages = [[Message("user", "1+2="), Message("assistant", text)] for text in ("3", "12")]
    theirs = judge_conversations(tmp_path / "model", messages)["LABEL_0"]
    trained = open_trained(tmp_path / "run", role="reward")
    rows = [conversation_ids(trained.policy.tokenizer, each, answer_end=True) for each in messages]
    np.testing.assert_allclose(theirs, score_rewards(trained, rows), rtol=1e-5)
    assert theirs[0] != theirs[1]
    # As what rewards another run, with the tokenizer that was exported with it.
    reward = ["Config.reward=@RewardModel()", f"RewardModel.path='{tmp_path / 'model'}'", "RewardModel.length=32"]
    batch = next(jrl.steps("configs/tiny.gin", [*TINY, *reward], run=tmp_path / "other")).batch
    asked = [visit.example.messages for visit in batch.visits for _ in range(2)]
    answered = [[*question, Message("assistant", text)] for question, text in zip(asked, batch.texts)]
    expected = judge_conversations(tmp_path / "model", answered)["LABEL_0"]
    np.testing.assert_allclose(batch.host_scores.components["RewardModel"], expected, rtol=1e-5)
    # Its policy is written without it.
    export_policy(tmp_path / "run", tmp_path / "policy")
    assert f"the reward head of the role reward is not written: it stays in {tmp_path / 'run'}" in caplog.text


def test_a_saved_step_is_exported(run, tmp_path):
    assert export_policy(run, tmp_path / "one", step=1, dtype="bfloat16")[0] == 1
    first, last = open_trained(run, step=1).params, open_trained(tmp_path / "one").params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), last, first)
    with pytest.raises(ValueError, match="no checkpoint of step 7"):
        export_policy(run, tmp_path / "seven", step=7)


def test_a_folder_that_holds_something_is_not_written_to(run, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        export_policy(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_training_starts_from_published_weights_and_needs_the_folder_no_more(run, published, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(published, folder)
    gin = published_gin(tmp_path, folder)
    few = ("Online.prompts=4", "Online.samples=2", "Checkpoint.every=1", "Log.writers=()", "AdamW.learning_rate=1e-9")
    jrl.train(str(gin), [*few, "Online.steps=1"], run=tmp_path / "run")
    # One update of 1e-9 moves no weight by more than that: the run began where the folder was.
    was, now = open_trained(run).params, open_trained(tmp_path / "run").params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-9, rtol=1e-7), now, was)
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(config + b" ")
    with pytest.raises(RefusedIdentity, match="differs from what"):
        jrl.train(str(gin), [*few, "Online.steps=2"], run=tmp_path / "run")
    shutil.rmtree(folder)
    jrl.train(str(gin), [*few, "Online.steps=2"], run=tmp_path / "run")
    assert export_policy(tmp_path / "run", tmp_path / "out")[0] == 2


def before_its_first_save(run):
    """Leaves of a run what a kill before its first save does."""
    shutil.rmtree(run / "checkpoints")
    for name in ("metrics.jsonl", "summary.json"):
        (run / name).unlink()


def test_a_run_that_begins_anew_finds_the_weights_it_began_with(published, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(published, folder)
    gin = published_gin(tmp_path, folder)
    few = ("Online.prompts=4", "Online.samples=2", "Log.writers=()", "Online.steps=1")
    jrl.train(str(gin), few, run=tmp_path / "run")
    before_its_first_save(tmp_path / "run")
    jrl.train(str(gin), few, run=tmp_path / "run")
    before_its_first_save(tmp_path / "run")
    tensors = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(tensors.read_bytes())
    data[-2] ^= 1  # a bit of the last number
    tensors.write_bytes(data)
    with pytest.raises(RefusedIdentity, match="not those that"):
        jrl.train(str(gin), few, run=tmp_path / "run")


def test_what_an_attempt_left_is_not_taken_for_the_run_s(published, tmp_path):
    (tmp_path / "run" / "published").mkdir(parents=True)
    (tmp_path / "run" / "lock").touch()
    (tmp_path / "run" / "published" / "config.json").write_text("{}")
    few = ("Online.prompts=4", "Online.samples=2", "Log.writers=()", "Online.steps=1")
    jrl.train(str(published_gin(tmp_path, published)), few, run=tmp_path / "run")
    config_json = (tmp_path / "run" / "published" / "config.json").read_bytes()
    assert config_json == (published / "config.json").read_bytes()


def test_a_run_has_a_copy_of_the_template_for_tools_of_its_model(published, tmp_path):
    template = shutil.copytree(published, tmp_path / "model") / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    few = ("Online.prompts=4", "Online.samples=2", "Log.writers=()", "Online.steps=1")
    jrl.train(str(published_gin(tmp_path, tmp_path / "model")), few, run=tmp_path / "run")
    copy = tmp_path / "run" / "published" / "additional_chat_templates" / "tool_use.jinja"
    assert copy.read_text() == "{{ tools }}"


@pytest.mark.parametrize("length", [777, None])
def test_an_export_keeps_the_length_that_others_serve(published, tmp_path, length):
    """Llama's class has a default of 2,048, which vLLM takes for the model's longest text."""
    folder = shutil.copytree(published, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert "max_position_embeddings" not in config  # a decoder from a configuration has no such bound
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length}))
    export_policy(folder, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.get("max_position_embeddings") == length
    assert length_of({"text_config": {"max_position_embeddings": 5}, "max_position_embeddings": 6}) == 5
    assert length_of({"text_config": {}}) is None and length_of({"max_position_embeddings": None}) is None


def test_a_tokenizer_of_another_folder_goes_along(run, tmp_path):
    """The run's own tokenizer is trained or published; what the model's folder holds beside it is not the run's."""
    _, files = export_policy(run, tmp_path / "out")
    assert "tokenizer.json" not in files  # tiny.gin reads bytes


def published_gin(tmp_path, folder):
    """Writes tiny.gin with a published model in its decoder's place."""
    start, rest = open("configs/tiny.gin").read().split("Decoder:\n")
    gin = tmp_path / "from.gin"
    gin.write_text(f"{start}Config.model = @Published()\nPublished.path = '{folder}'\n{rest.split(chr(10) * 2, 1)[1]}")
    return gin


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_with_its_own_tokenizer_is_sampled_from_its_export_as_from_itself(run, published, temperature):
    its, theirs = open_trained(run), open_trained(published)
    assert theirs.policy.tokenizer == its.policy.tokenizer
    talk = lambda trained: open_chat(trained, samples=2, temperature=temperature, max_tokens=4, seed=3)
    assert ask(talk(theirs), ["3+4=", "55+5="]) == ask(talk(its), ["3+4=", "55+5="])


def test_a_trained_vocabulary_is_exported_with_its_model_file(tmp_path):
    row = TOKENIZERS["SentencePiece"]
    trained = row.build(row.config(vocab_size=400), [f"word {i} and word {i + 1}" for i in range(200)])
    files = save_tokenizer(trained, tmp_path / "jrl_tokenizer")
    assert files == ["jrl_tokenizer/tokenizer.json", "jrl_tokenizer/tokenizer.model"]
    assert load_tokenizer(tmp_path / "jrl_tokenizer").encode("word 7") == trained.encode("word 7")


def test_other_tools_see_what_they_saw_and_doctor_names_the_tokenizer(published):
    names = {path.name for path in published.iterdir() if not path.name.endswith(".safetensors")}
    assert names == {"config.json", "generation_config.json", "model.safetensors.index.json", "jrl_tokenizer"}
    assert any("jrl_tokenizer/ holds a tokenizer in jrl's form" in text for _, text in recognized(published))


def test_text_without_a_tokenizer_is_refused(published, tmp_path):
    from jrl.tools.score import score_file

    published = shutil.copytree(published, tmp_path / "model", ignore=shutil.ignore_patterns("jrl_tokenizer"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "hello"}\n')
    with pytest.raises(ValueError, match="holds no tokenizer"):
        score_file(open_trained(published), rows, tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="no steps"):
        open_trained(published, step=3)


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 32}))
    of_vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    for path in folder.glob("*.safetensors"):
        cut = {name: x[:32].copy() if name in of_vocabulary else x for name, x in load_file(path).items()}
        save_file(cut, path, {"format": "pt"})
    gin = published_gin(tmp_path, folder)
    with pytest.raises(ValueError, match="32 rows"):
        jrl.train(str(gin), run=tmp_path / "run")


@pytest.mark.parametrize("text, expected", [("5GB", 5 * 10**9), ("20kb", 20_000), ("7", 7)])
def test_sizes(text, expected):
    assert size_of(text) == expected


@pytest.mark.parametrize("text", ["", "0GB", "-1GB", "5 apples", "1.5GB"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="max-shard-size"):
        size_of(text)


def test_a_head_that_two_stages_train_is_warned_of_once(tmp_path, caplog):
    stages = ["Config.stages=[@Online(), @Online()]", "Online.objective=@PPO()"]
    config, parts = jrl.load_config("configs/tiny.gin", stages)
    policy = types.SimpleNamespace(config=config, parts=parts)
    note_other_models(types.SimpleNamespace(policy=policy), tmp_path)
    assert caplog.text.count("the value head of the role policy is not written") == 1
