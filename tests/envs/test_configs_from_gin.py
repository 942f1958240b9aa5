from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jrl import config as gin
from jrl.tasks.data.prompts import Data
from jrl.tasks.envs import ENVS, open_source
from jrl.tasks.envs.jsonl import Jsonl
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers.pieces import SentencePiece


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    task: Any = dataclasses.field(metadata={"table": "envs"})
    tokenizer: Any = dataclasses.field(metadata={"table": "tokenizers"})
    data: Data


TABLES = {"envs": {n: r.config for n, r in ENVS.items()}, "tokenizers": {n: r.config for n, r in TOKENIZERS.items()}}
TEXT = """
Config.task = @Mixture()
Mixture.tasks = [@short/ReasoningGym(), @long/ReasoningGym(), @Addition()]
Mixture.weights = (2, 1, 0.5)
ReasoningGym.dataset = 'chain_sum'
ReasoningGym.size = 50
ReasoningGym.config = {'min_digits': 1, 'max_digits': 2}
long/ReasoningGym.level = 1
Addition.digits = 1
Config.tokenizer = @SentencePiece()
SentencePiece.model = 'unigram'
Data.prompt_length = 64
Data.held_out_every = None
"""


def read(tmp_path, text):
    (tmp_path / "c.gin").write_text(text)
    return gin.load(str(tmp_path / "c.gin"), [], Config, TABLES)


def test_mixtures_of_scoped_rows_read_open_and_write_back(tmp_path):
    config = read(tmp_path, TEXT)
    assert config.task.weights == (2.0, 1.0, 0.5)
    assert [getattr(task, "level", None) for task in config.task.tasks] == [None, 1, None]
    assert config.tokenizer == SentencePiece(model="unigram")
    source = open_source(config.task, ENVS)
    assert [source[i].task for i in range(7)].count("addition") == 1
    assert read(tmp_path, gin.to_gin(config, TABLES)) == config


def test_jsonl_columns_read_from_gin(tmp_path):
    text = """
Config.task = @Jsonl()
Jsonl.path = 'a.jsonl'
Jsonl.columns = {'prompt': 'question'}
Jsonl.verifiers = ['Exact']
Jsonl.on_bad_row = 'drop'
Config.tokenizer = @Bytes()
Data.prompt_length = 8
"""
    config = read(tmp_path, text)
    assert config.task == Jsonl(path="a.jsonl", columns={"prompt": "question"}, verifiers=("Exact",), on_bad_row="drop")
    with pytest.raises(gin.ConfigError, match="on_bad_row"):
        read(tmp_path, text.replace("'drop'", "'skip'"))
