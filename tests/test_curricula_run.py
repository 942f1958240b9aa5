"""Whole runs under a curriculum: what is visited follows from the table, which is kept and resumed."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import short_runs
from documented import write_part
from small_model import BIGRAM, PARTS, PLAIN_DECODER

from jrl import cli
from jrl.config import ConfigError
from jrl.plugins import load_parts
from jrl.resolve import load_config
from jrl.run import run_hash
from jrl.tasks.data import curricula
from jrl.tasks.data.curricula import CURRICULA, ConfiguredCurriculum, DifficultyBand, Prioritized

pytestmark = pytest.mark.usefixtures("frozen_before_the_first_step", "mesh_of_the_runs")

TINY = [
    BIGRAM, "Online.prompts=4", "Online.samples=4", "Online.steps=4", "Checkpoint.every=1",
    "Checkpoint.keep=9", "Log.samples=0", "Log.writers=()", "Scoring.workers=1", "Addition.size=24",
]  # fmt: skip
OPTIONS = {
    "prioritized": (["Online.curriculum=@Prioritized()"], Prioritized(), 0),
    "band": (["Online.curriculum=@DifficultyBand()", "DifficultyBand.low=0.01", "Online.lag=1",
              "Online.objective=@DAPO()", "DAPO.max_refills=1"], DifficultyBand(low=0.01), 1),
}  # fmt: skip


run = functools.partial(short_runs.run, TINY)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns name -> (folder, steps) of a run under each curriculum, made once."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("runs") / name
            made[name] = folder, run(folder, *OPTIONS[name][0])
        return made[name]

    return get


def test_a_curriculum_of_a_parts_file_chooses_prompts_and_a_run_resumes_with_its_table(tmp_path):
    part = write_part("A curriculum", tmp_path)
    own = [f"Config.parts=['{part}']", "Online.curriculum=@Uncertain()", "Uncertain.floor=0.01"]
    steps = run(tmp_path / "whole", *own)
    run(tmp_path / "cut", *own, stop_after=2)
    run(tmp_path / "cut", *own)
    assert run_hash.run_fingerprint(tmp_path / "cut", 4) == run_hash.run_fingerprint(tmp_path / "whole", 4)
    row = load_parts([part]).tables["curricula"]["Uncertain"]
    weights = curricula.weights_of(ConfiguredCurriculum(row, row.config(floor=0.01)), saved(tmp_path / "whole", 3))
    seed = run_hash.read_step(tmp_path / "whole", 4)[1]["data"]["train"]["seed"]
    visited = [visit.index for visit in steps[3].batch.visits]
    assert visited == curricula.draw_order(weights, seed, 12)[:4].tolist() and len(set(weights)) > 1


def test_a_wrong_weight_of_a_later_step_stops_the_run_at_the_users_line(tmp_path, capsys):
    """With code 4 and the last checkpoint: what was valid until then is no refused configuration."""
    path = tmp_path / "part.py"
    path.write_text(
        "import dataclasses, numpy as np\n"
        "from jrl.tasks.data.curricula import Curriculum, OutcomeMemory\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        "class Late(OutcomeMemory):\n"
        "    pass\n"
        "def weights(config, table):\n"
        "    return np.full(len(table.rate), -1.0 if table.step > 1 else 1.0)\n"
        "CURRICULA = {'Late': Curriculum(Late, weights)}\n"
    )
    bindings = [*PLAIN_DECODER, *TINY[1:], f"Config.parts=['{path}']", "Online.curriculum=@Late()"]
    assert cli.main(["train", "tiny", *bindings, "--run", str(tmp_path / "run")]) == 4
    said = capsys.readouterr().err
    assert "returns weights that are negative" in said and "part.py, line 6" in said
    assert "Last checkpoint: step 1. Fix it and rerun with --accept-change." in said


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_that_is_left_and_resumed_holds_the_same_bits(name, whole, tmp_path):
    run(tmp_path / "cut", *OPTIONS[name][0], stop_after=2)
    run(tmp_path / "cut", *OPTIONS[name][0])
    assert run_hash.run_fingerprint(tmp_path / "cut", 4) == run_hash.run_fingerprint(whole(name)[0], 4)


def configured(config):
    return ConfiguredCurriculum(CURRICULA[type(config).__name__], config)


def saved(folder, step):
    """Returns the table as it was saved."""
    return curricula.Outcomes(**run_hash.read_step(folder, step)[0]["outcomes"])


def test_what_a_step_visits_and_what_the_table_holds_follow_from_the_steps_before(whole):
    (folder, steps), curriculum = whole("prioritized"), configured(OPTIONS["prioritized"][1])
    seed, table = (
        run_hash.read_step(folder, 4)[1]["data"]["train"]["seed"],
        curricula.no_outcomes(np.zeros(24, np.int32)),
    )
    for i, step in enumerate(steps):
        index = [visit.index for visit in step.batch.visits]
        assert index == curricula.draw_order(curricula.weights_of(curriculum, table), seed, 4 * i)[:4].tolist()
        scores, by_prompt = step.batch.host_scores, lambda x: x[:16].reshape(4, 4)
        table = curricula.recorded(curriculum, table, index, by_prompt(scores.outcome), by_prompt(scores.valid))
        jax.tree.map(np.testing.assert_array_equal, saved(folder, i + 1), table)
        assert step.metrics["curriculum/seen"] == np.mean(table.judged > 0)
    assert 4 <= (table.judged > 0).sum() and table.judged.sum() == 16


def test_with_lag_a_draw_sees_the_table_of_a_step_earlier(whole):
    (folder, steps), curriculum = whole("band"), configured(OPTIONS["band"][1])
    host = run_hash.read_step(folder, 3)[1]["data"]
    # The draw that step 4 learns from was made in step 3, before its completions were scored: by the table of step 2.
    weights = curricula.weights_of(curriculum, saved(folder, 2))
    order = curricula.draw_order(weights, host["train"]["seed"], host["waiting"]["position"])
    assert host["waiting"]["chosen"] == [int(order[i % len(order)]) for i in range(4)]
    dropped = np.mean(curricula.weights_of(curriculum, saved(folder, 4)) == 0)
    assert steps[3].metrics["curriculum/dropped"] == dropped
    # All rounds of a step count, also groups that were refilled.
    drawn = [step.metrics["refill/groups_drawn"] for step in steps]
    assert saved(folder, 4).judged.sum() == sum(drawn)


def test_a_band_that_leaves_no_prompt_stops_the_run_and_says_why(tmp_path):
    nothing = ["Online.curriculum=@DifficultyBand()", "DifficultyBand.low=0.5", "DifficultyBand.high=0.5",
               "Addition.size=4", "Regex.pattern='no such answer'"]  # fmt: skip
    with pytest.raises(ValueError, match="DifficultyBand leaves no prompt after 1 steps: of 4 examples 4 were judged"):
        run(tmp_path / "run", *nothing)


def test_a_curriculum_and_dropped_prompts_are_refused():
    with pytest.raises(ConfigError, match=r"Online\.curriculum does not go with Data\.on_bad_prompt = 'drop'"):
        load_config("configs/tiny.gin", ["Online.curriculum=@Prioritized()", "Data.on_bad_prompt='drop'"])


HELD_OUT = ["Addition.verifiers=()", "Scoring.verifiers=[@Exact(), @Regex()]", "Regex.pattern='[0-9]+'",
            "Exact.weight=0.0"]  # fmt: skip


@pytest.mark.parametrize("name", ["prioritized", "difficulty_band", "hard_focus", "one_example"])
def test_a_curriculum_does_not_choose_by_a_verdict_that_is_held_out(name):
    load_config(f"configs/algos/{name}.gin", HELD_OUT[:-1])
    with pytest.raises(
        ConfigError, match=r"Online\.curriculum = @.* chooses prompts by .* learn from a held-out verdict"
    ):
        load_config(f"configs/algos/{name}.gin", HELD_OUT)


def test_sizes_are_no_verdict_and_a_reward_model_may_learn_from_one():
    load_config("configs/algos/mixing.gin", [b for b in HELD_OUT if not b.startswith("Addition")])
    reward_model = ["Online.objective=@OnlineBradleyTerry()", "OnlineBradleyTerry.ranks_by='outcome'",
                    "Online.trains='reward'"]  # fmt: skip
    load_config("configs/algos/prioritized.gin", [*HELD_OUT, *reward_model])


def test_a_choice_by_the_first_steps_needs_them():
    stages = [
        "Config.stages=[@one/Online(), @two/Online()]", "one/Online.curriculum=@Prioritized()", "one/Online.name='one'",
        "two/Online.name='two'", "two/Online.curriculum=@MostVaried()",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"MostVaried chooses by .* an earlier stage has Prioritized"):
        load_config("configs/tiny.gin", [*TINY, *stages], [PARTS])
