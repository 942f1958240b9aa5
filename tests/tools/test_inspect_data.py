"""`jrl data inspect`: tokens and what is learned of them, by hand."""

from __future__ import annotations

import json

import pytest

from jrl import cli
from jrl.commands.rows import START_OF_LINE
from jrl.tools import inspect_data

pytestmark = pytest.mark.fast

ROWS = [
    {"id": "a", "prompt": "1+1=", "answer": "2", "rejected": "3", "label": 1},
    {"id": "b", "prompt": "1+2=", "answer": "3", "rejected": "33\x1b", "label": 0},
    {"id": "c", "prompt": "1+1=", "answer": "2", "rejected": "2", "label": 1},
    {"id": "d", "prompt": "2+2=", "answer": "4"},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def output(capsys, *arguments):
    code = cli.main(["data", "inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


def test_pairs_token_by_token(file, capsys):
    code, out, _ = output(capsys, file, "--as", "Preferences", "--rows", "4")
    assert code == 0
    first = out[: out.index("b")]
    assert first[0] == "a" and first[1].startswith("  label 1: ") and first[3].startswith("  label 0: ")
    # role markers and the prompt are read, the answer and the end token are learned
    assert "1|+|1|=|" in first[2] and "[2][" in first[2] and "[3][" in first[4]
    assert "[3][3][\\x1b][" in "".join(out) and "\x1b" not in "".join(out)
    assert "c: left out, same_answers" in out and "d: left out, no_rejected" in out
    tail = out[out.index("") + 1 :]
    assert tail[0] == "4 of 4 rows, 1 of them with a repeated prompt"
    assert "left out, no_rejected: 1" in tail and "left out, same_answers: 1" in tail
    assert any(line.startswith("learned tokens: 2 to 4, half up to 2") for line in tail)


def test_prompts_alone_and_fewer_rows(file, capsys):
    code, out, _ = output(capsys, file, "--rows", "1")
    assert code == 0 and out[0] == "a" and "prompt: " in out[1] and ", 0 learned from" in out[1]
    assert "b" not in out and "[" not in out[2]


def test_rows_are_counted_on_a_terminal_while_files_are_opened(file, monkeypatch, capsys):
    monkeypatch.setattr("jrl.commands.rows.REDRAW_SECONDS", 0.0)
    monkeypatch.setattr("jrl.run.data.SHOWN_EVERY", 2)
    quiet = output(capsys, file, "--against", file)[2]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    shown = output(capsys, file, "--against", file)[2]
    # each file is polled once for each of its 4 rows and once more
    assert quiet == "" and [text for text in shown.split(START_OF_LINE) if text] == [
        f"reading data: {count} rows" for count in (2, 4, 6, 8, 10)
    ]
    assert shown.endswith(START_OF_LINE)


def test_the_lengths_of_a_configuration(file, capsys):
    code, out, _ = output(capsys, file, "--config", "tiny", "--as", "Demonstrations", "Data.prompt_length=4",
                          "Data.on_bad_prompt='drop'")  # fmt: skip
    assert code == 0 and any("left out, too_long" in line for line in out)


def test_rows_that_repeat_a_text_are_not_taken_for_too_long(tmp_path, capsys):
    # A correction may hold the better answer twice, other pairs are lists of objects, and a template adds text.
    path, long = tmp_path / "rows.jsonl", "x" * 500
    others = [{"prompt": long, "chosen": long, "rejected": "d"}]
    rows = [{"id": str(i), "prompt": "a", "answer": long, "rejected": "y", "others": others} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wide = ["Data.prompt_length=2000", "Sampler.completion_length=2000", f"Preferences.chosen='{long} {{answer}}'"]
    for arguments in (["Corrections"], ["UserPreferences"], ["Preferences", "--config", "algos/dpo", *wide]):
        code, out, _ = output(capsys, path, "--rows", "0", "--as", *arguments)
        assert code == 0 and not any("left out" in line for line in out)


def test_the_settings_of_a_configurations_stage(file, capsys):
    wide = ["Data.prompt_length=64", "Sampler.completion_length=64", "--rows", "1"]
    code, out, _ = output(capsys, file, "--config", "algos/dpo", "--as", "Preferences",
                          "Preferences.chosen='so {answer}'", *wide)  # fmt: skip
    assert code == 0 and "[s][o][ ][2][" in out[2] and "[3][" in out[4]
    # the twin of an answer alone, by which a baseline is measured, is not learned from
    code, out, _ = output(capsys, file, "--config", "algos/kto", "--as", "Labeled", *wide)
    assert code == 0 and out[3] == ""


def test_what_is_not_there_is_said(file, tmp_path, capsys):
    code, _, err = output(capsys, file, "--as", "Preference")
    assert code == 2 and "did you mean Preferences?" in err
    code, _, err = output(capsys, tmp_path / "none.jsonl")
    assert code == 2 and err == f"jrl: {tmp_path / 'none.jsonl'} does not exist\n"
    assert inspect_data.file_config("gs://bucket/none.jsonl", inspect_data.BY_COLUMNS).path == "gs://bucket/none.jsonl"
    file.write_text('{"prompt": "1"}\n{"prompt": 2}\n')
    code, _, err = output(capsys, file)
    assert code == 2 and "rows.jsonl, line 2" in err and "Traceback" not in err


@pytest.mark.parametrize("config", [[], ["--config", "tiny"]])
def test_a_stage_beside_a_file_is_refused(file, capsys, config):
    code, _, err = output(capsys, file, *config, "--stage", "nope")
    assert code == 2 and "--stage nope shows the task of a stage of --config, and" in err


def test_a_refused_file_without_a_layout_names_those_that_read_it(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"instruction": "Name a prime.", "input": "", "output": "7"}) + "\n")
    code, _, err = output(capsys, path)
    assert code == 2 and "line 1" in err and "these read the first row: --layout alpaca" in err
    assert output(capsys, path, "--layout", "alpaca")[0] == 0
    against = [path, "--layout", "alpaca", "--against", str(path)]
    code, _, err = output(capsys, *against)
    assert code == 2 and "Without --against-layout rows" in err and "first row: --against-layout alpaca" in err
    assert output(capsys, *against, "--against-layout", "alpaca")[0] == 0
    code, _, err = output(capsys, path, "--config", "tiny")
    assert code == 2 and "--layout alpaca" in err
    path.write_text("nothing\n")
    code, _, err = output(capsys, path)
    assert code == 2 and "--layout" not in err


def test_other_ways_to_read_a_file_are_named_where_no_example_becomes_a_row(tmp_path, file, capsys):
    path = tmp_path / "ratings.jsonl"
    ratings = dict.fromkeys(("helpfulness", "correctness", "coherence", "complexity", "verbosity"), 3)
    rows = [
        {"prompt": "A prime?", "response": "2", **ratings},
        {"prompt": "A prime?", "response": "4", **ratings, "helpfulness": 0},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = lambda *options: output(capsys, path, "--as", "Rated", *options)[1]
    assert out()[-1] == "no example gives a row to Rated; try --layout helpsteer2"
    takes = "best_and_random or all_pairs or best or each"
    assert out("--layout", "helpsteer2")[-1] == f"no example gives a row to Rated; try --take {takes}"
    assert "no example" not in "".join(out("--layout", "helpsteer2", "--take", "each"))
    assert "no example" not in "".join(output(capsys, file, "--as", "Preferences")[1])  # one of its rows is none


def test_what_a_refusal_advises_can_be_bound_without_a_configuration(file, capsys):
    gsm8k = [{"question": "1+1?", "answer": "1+1=2\n#### 2"}, {"question": "2+2?", "answer": "It is 4."}]
    file.write_text("".join(json.dumps(row) + "\n" for row in gsm8k))
    code, _, err = output(capsys, file)
    assert code == 2 and "Jsonl.columns = {'prompt': NAME} says which column it is" in err
    as_gsm8k = [file, "Jsonl.columns={'prompt': 'question'}", "Jsonl.answer_in='hash'", "--as", "Demonstrations"]
    code, out, _ = output(capsys, *as_gsm8k)
    assert code == 0 and out[0] == "rows.jsonl/1" and "|?|" in out[2] and "[2][" in out[2]
    assert "rows.jsonl/2: left out, no_answer" in out
    code, _, err = output(capsys, *as_gsm8k, "Jsonl.needs_answer=True")
    assert code == 2 and "line 2: the row has no answer" in err

    pairs = [{"prompt": "1", "chosen": "2", "rejected": rejected} for rejected in ("3", "2")]
    file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    as_pairs = [file, "--layout", "preference"]
    code, _, err = output(capsys, *as_pairs)
    assert code == 2 and "Dataset.on_bad_row = 'drop' drops" in err
    code, out, _ = output(capsys, *as_pairs, "Dataset.on_bad_row='drop'", "Dataset.max_dropped=0.5")
    assert code == 0 and "noticed in the file, equal_sides: 1" in out
    for wrong, message in (
        ("Jsonl.on_bad_row='drop'", "without --config, only fields of Dataset can be bound"),
        ("Data.prompt_length=8", "without --config, only fields of Dataset can be bound"),
        ("Dataset.on_bad_rows='drop'", "Dataset has no field 'on_bad_rows'; did you mean on_bad_row?"),
        ("Dataset.layout='messages'", "Dataset.layout is bound twice"),
    ):
        code, _, err = output(capsys, *as_pairs, wrong)
        assert code == 2 and message in err
