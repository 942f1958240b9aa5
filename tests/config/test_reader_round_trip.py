"""What is written beside a run reads back as an equal object, from gin and from JSON."""

from __future__ import annotations

import json
import random

import pytest
from reader_tree import (
    DAPO,
    GRPO,
    SFT,
    TABLES,
    AdamW,
    Config,
    Exact,
    Length,
    Loop,
    Mixture,
    Run,
    Schedule,
    Scoring,
    Sum,
)  # fmt: skip

from jrl.config import ConfigError, from_json, identity, load, to_gin, to_json

WORDS = ["", "plain", "it's", '"both\' kinds"', "line\nbreak", "back\\slash", "%MACRO @Ref()", "é ☃ \u2028", "# no"]


def drawn_config(draw: random.Random) -> Config:
    """A configuration with every kind of field filled at random, the same class with several values among them."""
    number = lambda: draw.choice([0.0, -0.0, 1e-300, 1.0, -2.5e17, 0.1, draw.random(), draw.uniform(-9, 9)])
    maybe = lambda value: draw.choice([None, value])
    total = lambda: Sum(digits=tuple(draw.randrange(-3, 9) for _ in range(draw.randrange(4))))
    verifier = lambda: draw.choice(
        [Exact(weight=number(), strip=draw.random() < 0.5), Length(target=draw.choice([3, 3.0, number()]))]
    )
    mixture = lambda inner: Mixture(
        parts={draw.choice(WORDS): inner() for _ in range(3)},
        weights={draw.choice(WORDS): draw.choice([1, 1.0, "1"]) for _ in range(3)},
    )
    return Config(
        task=draw.choice([total(), mixture(total), mixture(lambda: mixture(total))]),
        algo=draw.choice([GRPO(kl_coefficient=maybe(number())), DAPO(clip_high=number(), refill=maybe(2))]),
        run=Run(seed=draw.randrange(-(2**70), 2**70), name=draw.choice(WORDS), parts=tuple(draw.sample(WORDS, 2))),
        loop=Loop(steps=3, lag=draw.randrange(2), eval_every=maybe(4), stop_at=maybe(number())),
        optimizer=AdamW(
            learning_rate=number(),
            betas=(number(), number()),
            schedule=Schedule(kind="cosine", warmup=draw.randrange(9)),
        ),
        sft=maybe(SFT(steps=draw.randrange(5))),
        scoring=Scoring(verifiers=tuple(verifier() for _ in range(draw.randrange(5))), workers=draw.randrange(9)),
    )


@pytest.mark.parametrize("seed", range(100))
def test_gin_and_json_read_back_equal(seed, tmp_path):
    config = drawn_config(random.Random(seed))
    (tmp_path / "resolved.gin").write_text(to_gin(config, TABLES), encoding="utf-8")
    again = load(str(tmp_path / "resolved.gin"), [], Config, TABLES)
    assert again == config
    assert identity(again) == identity(config)  # also tells 3 from 3.0 and 0.0 from -0.0
    assert to_gin(again, TABLES) == to_gin(config, TABLES)
    from_text = from_json(json.loads(json.dumps(to_json(config), allow_nan=False)), Config, TABLES)
    assert from_text == config
    assert identity(from_text) == identity(config)


def test_gin_names_every_field_and_scopes_what_differs():
    config = load(
        None,
        ["Config.task = @Sum()", "Config.algo = @GRPO()", "Loop.steps = 3", "a/Length.target = 5",
         "Scoring.verifiers = [@Length(), @a/Length(), @Length()]"],
        Config, TABLES,
    )  # fmt: skip
    text = to_gin(config, TABLES)
    assert "Scoring.verifiers = [@Length(), @verifiers/Length(), @Length()]" in text
    assert "verifiers/Length.target = 5\n" in text
    assert "GRPO.kl_coefficient = None\n" in text


def test_json_names_the_class_only_where_the_table_is_open():
    config = load(None, ["Config.task = @Sum()", "Config.algo = @GRPO()", "Loop.steps = 3"], Config, TABLES)
    data = to_json(config)
    assert data["algo"] == {"class": "GRPO", "clip_low": 0.2, "kl_coefficient": None}
    assert data["loop"] == {"steps": 3, "lag": 0, "eval_every": None, "stop_at": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"laag": 1}, r"^JSON at loop: Loop has no field 'laag'; did you mean lag\?"),
        ({"steps": "3"}, r"^JSON at loop\.steps: Loop\.steps expects int, got '3' \(str\)"),
        ({"lag": 7}, r"^JSON at loop: Loop: lag must be 0 or 1, not 7"),
        ({"stop_at": float("nan")}, r"^JSON at loop\.stop_at: Loop\.stop_at expects"),
    ],
)
def test_json_is_checked_like_gin(change, message):
    data = to_json(drawn_config(random.Random(0)))
    data["loop"].update(change)
    with pytest.raises(ConfigError, match=message):
        from_json(data, Config, TABLES)


def test_json_with_an_unknown_class_names_the_nearest():
    data = to_json(drawn_config(random.Random(0)))
    with pytest.raises(ConfigError, match=r'expects "class" to be one of GRPO, DAPO, got .DAPPO.*did you mean DAPO\?'):
        from_json({**data, "algo": {"class": "DAPPO"}}, Config, TABLES)
    with pytest.raises(ConfigError, match=r"JSON at algo: Config\.algo expects an object, got 'GRPO'"):
        from_json({**data, "algo": "GRPO"}, Config, TABLES)
    with pytest.raises(ConfigError, match=r"JSON: Config expects an object, got \[\]"):
        from_json([], Config, TABLES)
