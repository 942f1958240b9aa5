"""Every layout has a time or a reason; the winner is a configuration that trains."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from jrl import cli
from jrl.commands import start
from jrl.device.sharding import MeshShape
from jrl.models.pretrained.published import decoder_of
from jrl.resolve import load_config
from jrl.tools.plan import assigned, budget, compiled, every, libtpu, planning, search, shapes
from jrl.tools.plan.case import vocab_size_of, with_known_shape
from jrl.tools.plan.chips import CHIPS, parse_topology
from jrl.tools.plan.compiled import Compiled

GIB = 2**30


@pytest.fixture
def without_libtpu(monkeypatch):
    monkeypatch.setattr(compiled, "libtpu_version", lambda: None)


@pytest.fixture
def few_choices(monkeypatch):
    """A search that tries every mesh, and on each 2 of 4 micro-batches and 2 of 9 numbers of slots."""
    monkeypatch.setattr(search, "ROWS", (1, 4))
    monkeypatch.setattr(search, "SLOTS", (8, 64))


PROGRAM = """HloModule m

ENTRY %main (p: f32[1]) -> f32[1] {
  %p = f32[1]{0} parameter(0)
  ROOT %copy = f32[1]{0} copy(%p), backend_config={"estimated_cycles":"CYCLES"}
}
"""


@pytest.fixture
def fake_compiler(monkeypatch):
    """A compiler whose first layout takes 4e13 cycles a program, the second 3e13 and so on; returns what it saw."""
    seen = []

    def compile_all(lowered, topology, announce, announce_wait):
        seen.append(set(lowered))
        text = PROGRAM.replace("CYCLES", str(10**13 * (5 - len(seen))))
        return dict.fromkeys(lowered, Compiled(text=text))

    monkeypatch.setattr(compiled, "libtpu_version", lambda: "a version")
    monkeypatch.setattr(compiled, "topology_devices", lambda topology: [])
    monkeypatch.setattr(compiled, "compile_all", compile_all)
    monkeypatch.setattr(shapes, "topology_meshes", lambda config, topology: (None, None))
    monkeypatch.setattr(shapes, "lower", lambda *_: dict.fromkeys(("init", "rl.sample", "rl.update")))
    return seen


def test_meshes_use_every_device_once():
    # 8 = 2^3: the ways to share out three factors of 2 among three axes are (3 + 2)! / (3! 2!) = 10.
    actual = list(search.meshes(8))
    assert len(actual) == len({tuple(mesh.values()) for mesh in actual}) == 10
    assert all(math.prod(mesh.values()) == 8 for mesh in actual)


def test_meshes_of_a_mixture_have_an_axis_for_its_experts():
    # Four experts over 1, 2 or 4: of 8, 4 or 2 devices among the other three axes there are 10, 6 and 3 meshes.
    config, _ = load_config("configs/plan/30b_moe.gin", ["Experts.count=4", "Experts.per_token=2"])
    assert search.expert_shards(config) == (1, 2, 4)
    actual = list(search.meshes(8, (1, 2, 4)))
    assert len(actual) == len({tuple(mesh.values()) for mesh in actual}) == 19
    assert all(math.prod(mesh.values()) == 8 and tuple(mesh) == ("data", "fsdp", "tensor", "expert") for mesh in actual)
    assert search.expert_shards(load_config("configs/plan/0.6b.gin", [])[0]) == ()
    config, _ = load_config("configs/plan/30b_moe.gin", ["Sampler.completion_length=8192"])
    tried = [mesh for mesh, _ in search.in_turn(config, 4)]
    assert {"data": 1, "fsdp": 1, "tensor": 1, "expert": 2, "sequence": 2} in tried


def test_the_best_beats_the_configured_layout_and_every_refusal_says_why(without_libtpu, few_choices):
    config, parts = load_config("configs/plan/8b.gin")
    done = search.search(config, parts, parse_topology("v6e:16x16"), [], lambda line: None)
    assert done.fitting[0].step_seconds < done.default.step_seconds
    assert [c.step_seconds for c in done.fitting] == sorted(c.step_seconds for c in done.fitting)
    assert all(c.refused is None and c.gib <= 31.75 for c in done.fitting)
    assert done.refused and all(c.refused for c in done.refused)
    reasons = search.why_refused(done.refused)
    assert any("GiB a device, by arithmetic" in line for line in reasons)
    assert any("does not divide" in line for line in reasons)
    assert len(done.fitting) + len(done.refused) == len(list(search.layouts(config, parts, done.topology)))


def test_a_kernel_of_other_devices_is_no_plan(without_libtpu):
    config, parts = load_config("configs/plan/8b.gin", ["Decoder.attention='cudnn'"])
    topology = parse_topology("v6e:16x16")
    for planned in (search.search, functools.partial(planning.make_plan, count=False)):
        with pytest.raises(ValueError, match="attention='cudnn' is a kernel for GPUs, and these devices are TPUs"):
            planned(config, parts, topology, [], lambda line: None)


def test_what_the_compiler_refuses_is_refused(few_choices, monkeypatch, fake_compiler):
    config, parts = load_config("configs/plan/0.6b.gin")
    topology = parse_topology("v5e:2x4")
    asked = []

    def ask(source, topology, names):
        asked.append((source[:2], names))
        return {
            "rl.sample": Compiled(temporary=GIB),
            "rl.update": Compiled(needed=99 * GIB if len(asked) == 1 else GIB),
        }

    monkeypatch.setattr(assigned, "ask", ask)
    source = ["0.6b.gin", "Online.samples=16", "Sampler.slots=4"]
    done = search.search(config, parts, topology, source, lambda line: None)
    # What was given goes along, but for what the layout itself binds.
    assert asked == [(["0.6b.gin", "Online.samples=16"], ["rl.sample", "rl.update"])] * (1 + search.COMPILED)
    assert [c.compiled for c in done.fitting if c.bindings][:4] == [True, True, True, False]
    as_compiled = [c for c in done.refused if c.refused.endswith("as compiled")]
    assert {c.refused for c in as_compiled} == {"update takes 99.00 of 15.75 GiB a device, as compiled"}
    # What differs in slots alone has the same update, and is refused without being compiled.
    assert len({search.depends_on("rl.update", c.bindings) for c in as_compiled}) == 1
    assert not {search.depends_on("rl.update", c.bindings) for c in done.fitting[:3]} & {
        search.depends_on("rl.update", c.bindings) for c in as_compiled
    }


def test_finalists_are_ranked_by_the_count_of_their_cycles(few_choices, monkeypatch, fake_compiler):
    config, parts = load_config("configs/plan/0.6b.gin")
    topology, said = parse_topology("v5e:2x4"), []
    fits = {name: Compiled(temporary=GIB) for name in ("rl.sample", "rl.update")}
    monkeypatch.setattr(assigned, "ask", lambda *_: fits)
    done = search.search(config, parts, topology, ["0.6b.gin"], said.append)
    # The finalists and the configuration's own layout; no other is compiled to the end.
    assert fake_compiler == [{"rl.sample", "rl.update"}] * (search.COMPILED + 1)
    own, finalists, others = done.fitting[0], done.fitting[1:][: search.COMPILED], done.fitting[1 + search.COMPILED :]
    # At 1.5 GHz, of every program 2e13, 3e13 and 4e13 cycles: the fastest by arithmetic, compiled first, is the last.
    assert [c.counted_seconds for c in finalists] == pytest.approx([4e13 / 1.5e9, 6e13 / 1.5e9, 8e13 / 1.5e9], rel=1e-3)
    # As configured, 1e13: slowest by arithmetic, fastest by the count. No other layout is proposed in its place.
    assert own == done.default and own.bindings == {} and own.counted_seconds == pytest.approx(2e13 / 1.5e9, rel=1e-3)
    assert own.step_seconds > finalists[-1].step_seconds
    assert search.text(done).splitlines()[3].endswith("as configured  (compiled)")
    assert "MeshShape" not in search.gin_text(done, "0.6b.gin", [])
    done = done._replace(fitting=done.fitting[1:])
    assert finalists[-1].step_seconds == min(c.step_seconds for c in done.fitting)
    assert all(c.counted_seconds is None for c in others)
    assert [c.step_seconds for c in others] == sorted(c.step_seconds for c in others)
    winner = search.words(finalists[0].bindings)
    assert search.to_json(done)["best"][0]["bindings"] == winner
    text = search.gin_text(done, "0.6b.gin", [])
    assert "2.67e+04 s a step by the compiler's count" in text
    assert all(line.replace("=", " = ", 1) in text for line in winner)
    assert "2.67e+04 s" in search.text(done).splitlines()[3]


def test_a_finalist_that_does_not_compile_to_the_end_is_refused(few_choices, monkeypatch, fake_compiler):
    config, parts = load_config("configs/plan/0.6b.gin")
    topology, compile_all = parse_topology("v5e:2x4"), compiled.compile_all
    monkeypatch.setattr(assigned, "ask", lambda *_: {name: Compiled() for name in ("rl.sample", "rl.update")})

    def first_refused(refused):
        def run(lowered, topology, announce, announce_wait):
            programs = compile_all(lowered, topology, announce, announce_wait)
            return programs | ({"rl.update": Compiled(needed=17 * GIB)} if len(fake_compiler) <= refused else {})

        fake_compiler.clear()
        monkeypatch.setattr(compiled, "compile_all", run)
        return search.search(config, parts, topology, ["0.6b.gin"], lambda line: None)

    done = first_refused(1)
    why = "update takes 17.00 of 15.75 GiB a device, as compiled to the end"
    assert [c.refused for c in done.refused].count(why) == 1
    # The two that are left took 3e13 and 2e13 cycles a program, the configuration's own layout 1e13.
    counted = [2e13 / 1.5e9, 4e13 / 1.5e9, 6e13 / 1.5e9]
    assert [c.counted_seconds for c in done.fitting[:3]] == pytest.approx(counted, rel=1e-3)
    assert not any(c.compiled for c in done.fitting[3:])
    done = first_refused(search.COMPILED)
    assert done.fitting == [done.default]
    done = first_refused(search.COMPILED + 1)
    assert done.fitting == [] and done.default.refused == why and why in search.text(done).splitlines()[3]


def test_what_a_split_gains_is_by_the_count_where_both_have_one():
    candidate = lambda apart, least, counted: search.Candidate(
        {search.SAMPLER_MESH: MeshShape() if apart else None}, 1.0, least, None, True, counted
    )
    gain = lambda *fitting: search.gain(search.Search(None, None, fitting, []))[-1]
    assert "4 s a step by the compiler's count, in turn 6 s; x 1.50" in gain(
        candidate(True, 1.0, 4.0), candidate(False, 2.0, 6.0), candidate(False, 1.0, None)
    )
    assert "1 s a step at least, in turn 2 s; x 2.00" in gain(candidate(True, 1.0, 4.0), candidate(False, 2.0, None))
    # As configured, which may be a split too.
    own = search.Candidate({}, 1.0, 1.0, None, True, 3.0)
    assert search.gain(search.Search(None, own, [own, candidate(True, 1.0, 4.0)], [])) == []


def test_prompts_apart_are_tried_in_micro_batches_of_a_whole_group():
    # Rows of 25 tokens, of which the configuration's own micro-batch holds one: no mesh is given up for that.
    bindings = ["Learner.prefix_sharing='cross_row'", "Learner.row_length=25", "Learner.micro_batch_tokens=25",
                "Online.samples=4",
                "Online.prompts=4", "Data.prompt_length=8", "Sampler.completion_length=24"]  # fmt: skip
    config, parts = load_config("configs/tiny.gin", bindings)
    tried = list(search.layouts(config, parts, parse_topology("v5e:1x1")))
    assert {actual["Learner.micro_batch_tokens"] // 25 for actual in tried} == {1, 2, 4, 5, 8}


def test_the_smallest_slice_that_fits_is_found(without_libtpu, few_choices):
    config, parts = load_config("configs/plan/8b.gin")
    tried = []
    done = search.smallest(config, parts, CHIPS["v5p"], [], tried.append)
    slices = CHIPS["v5p"].slices
    place = slices.index("x".join(map(str, done.topology.grid)))
    assert done.fitting
    assert [line for line in tried if "searching" in line] == [
        f"searching layouts for v5p:{s}" for s in slices[: place + 1]
    ]


def test_nothing_fits_where_the_compiler_refuses_all_it_was_asked_about(few_choices, monkeypatch):
    config, parts = load_config("configs/plan/0.6b.gin")
    monkeypatch.setattr(compiled, "libtpu_version", lambda: "a version")
    limit = parse_topology("v5e:2x4").chip.limit_bytes
    monkeypatch.setattr(assigned, "ask", lambda *_: {"rl.sample": Compiled(needed=limit + 1), "rl.update": Compiled()})
    done = search.search(config, parts, parse_topology("v5e:2x4"), ["0.6b.gin"], lambda line: None)
    assert done.fitting == [] and not search.to_json(done)["fits"]
    unasked = [c.refused for c in done.refused if "was not asked about" in c.refused]
    message = f"the compiler refused all {search.TRIES} that it was asked about, and was not asked about this one"
    assert set(unasked) == {message}


def test_what_the_compiler_said_of_one_program_is_not_held_against_another(few_choices, monkeypatch):
    """The first layout's sampling takes twice the limit: the next that is asked about is the fastest whose own, by
    arithmetic, is at most half of that one's, however large its update is."""
    config, parts = load_config("configs/plan/0.6b.gin", ["Decoder.attention='reference'"])
    topology = parse_topology("v5e:2x4")
    limit, asked = topology.chip.limit_bytes, []

    def ask(source, *_):
        asked.append(source[1:])
        return {"rl.sample": Compiled(needed=2 * limit if len(asked) == 1 else 1), "rl.update": Compiled()}

    monkeypatch.setattr(compiled, "libtpu_version", lambda: None)
    actual = search.search(config, parts, topology, [], lambda line: None).fitting
    monkeypatch.setattr(assigned, "ask", ask)
    good, _ = search.confirmed(config, parts, topology, actual, ["0.6b.gin"], lambda line: None, max_layouts=1)
    case = lambda c: search.case_of_layout(config, parts, topology, c.bindings)
    sampling = lambda c: budget.of_programs(case(c))["rl.sample"].total
    expected = next(c for c in actual if 2 * sampling(c) <= sampling(actual[0]))
    assert asked == [search.words(c.bindings) for c in (actual[0], expected)]
    assert good[0].bindings == expected.bindings
    assert 2 * expected.gib > actual[0].gib  # its update would be too much by the factor of sampling


def test_a_stage_is_not_charged_for_the_reference_of_a_later_one(small, two_stages):
    case = small(*two_stages, "GRPO.kl=0.01")
    warm = small(*two_stages, "GRPO.kl=0.01", stage="sft")
    assert budget.resident_memory(case).weights == 2 * budget.resident_memory(warm).weights
    compiled = {"sft.update": Compiled(temporary=1)}
    assert search.largest(compiled, case) == ("sft.update", budget.resident_memory(warm).total + 1)


def test_the_winner_is_written_as_a_configuration(without_libtpu, few_choices, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    monkeypatch.setattr(libtpu, "set_environment", lambda: None)
    out = tmp_path / "winner.gin"
    given = ["configs/plan/0.6b.gin", "Online.samples=16", "MeshShape.fsdp=4", "--topology", "v5e:2x4"]
    assert cli.main(["plan", *given, "--search", "--json", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["fits"] and len(printed["best"]) == 5
    config, _ = load_config(str(out))
    expected, _ = load_config("configs/plan/0.6b.gin", ["Online.samples=16", *printed["best"][0]["bindings"]])
    assert config == expected
    assert every.topology_of(out.read_text()) == "v5e:2x4"


def test_a_layout_replaces_the_meshes_that_were_given():
    given = ["sampler_mesh = @its/MeshShape()", "its/MeshShape.data = 2", "Sampler.slots = 4", "Online.lag = 1"]
    layout = {"MeshShape.data": 4, search.SAMPLER_MESH: None, "Sampler.slots": 8}
    taken = search.bound(given, layout)
    assert taken == ["Online.lag = 1", "MeshShape.data=4", "Config.sampler_mesh=None", "Sampler.slots=8"]
    config, _ = load_config("configs/tiny.gin", taken)
    assert config.sampler_mesh is None and config.mesh == MeshShape(data=4)
    assert search.bound(given, {}) == given  # as configured


def test_a_search_that_finds_nothing_says_where_to_go_on(without_libtpu, few_choices, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    monkeypatch.setattr(libtpu, "set_environment", lambda: None)
    out = tmp_path / "winner.gin"
    assert cli.main(["plan", "configs/plan/8b.gin", "--topology", "v5e:1x1", "--search", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "no layout fits" in printed.out and not out.exists()
    assert "--topology v5e --search finds the smallest slice that fits" in printed.err


def test_every_recipe_is_checked_against_its_header(without_libtpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    monkeypatch.setattr(libtpu, "set_environment", lambda: None)
    text = open("configs/plan/0.6b.gin").read()
    (tmp_path / "good.gin").write_text(text)
    large = "Decoder.attention = 'reference'\n"  # whose scores are stored
    (tmp_path / "small.gin").write_text(text.replace("v5e:2x4", "v5e:1x1").replace("fsdp = 8", "fsdp = 1") + large)
    (tmp_path / "wrong.gin").write_text(text.replace("v5e:2x4", "v9:2x4"))
    (tmp_path / "silent.gin").write_text(text.replace("Topology:", "Hardware:"))
    out = tmp_path / "table.md"
    assert cli.main(["plan", "--all", str(tmp_path), "--out", str(out)]) == 2
    rows = [line for line in out.read_text().splitlines() if ".gin" in line]
    good, small, wrong = [line.rsplit("|", 2)[1].strip() for line in rows]
    assert (good, small) == ("fits", "does not fit")
    assert wrong.startswith("not planned: --topology 'v9:2x4': unknown chip 'v9'")
    with pytest.raises(ValueError, match="Topology"):
        every.check_all(tmp_path / "nothing", print)


def test_a_recipe_that_cannot_be_read_is_a_line_of_the_table(tmp_path):
    (tmp_path / "latin.gin").write_bytes("# caf\u00e9\n# Topology: v5e:2x4\n".encode("latin-1"))
    (line,) = every.check_all(tmp_path, lambda said: None)
    assert line.verdict.startswith("not planned: ") and line.verdict.endswith("is not UTF-8 text") and not line.good


@pytest.mark.parametrize("rest", [["configs/plan/8b.gin"], ["--topology", "v5e:2x4"], ["--search"], ["--json"]])
def test_a_check_of_all_recipes_refuses_what_it_would_not_read(rest, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    monkeypatch.setattr(libtpu, "set_environment", lambda: None)
    assert cli.main(["plan", "--all", str(tmp_path), *rest]) == 2
    assert "leave CONFIG, NAME=VALUE, --topology, --search and --json out" in capsys.readouterr().err


def test_a_check_of_all_recipes_prints_its_table_where_no_page_can_be_written(
    without_libtpu, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    monkeypatch.setattr(libtpu, "set_environment", lambda: None)
    (tmp_path / "mine.gin").write_text(Path("configs/plan/0.6b.gin").read_text())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "--all", "."]) == 0
    assert "mine.gin  v5e:2x4  fsdp 8" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mine.gin"]
    (tmp_path / "docs").mkdir()
    assert cli.main(["plan", "--all", "."]) == 0
    assert "mine.gin" in (tmp_path / "docs" / "topologies.md").read_text()


def test_a_plan_of_nothing_says_what_to_give(monkeypatch, capsys):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    monkeypatch.setattr(libtpu, "set_environment", lambda: None)
    assert cli.main(["plan"]) == 2
    assert "--topology" in capsys.readouterr().err


def test_every_recipe_fits_the_topology_in_its_header(without_libtpu):
    lines = every.check_all(Path("configs"), lambda line: None)
    assert len(lines) >= 39
    assert [line for line in lines if not line.good] == []


def test_a_known_shape_stands_in_only_where_the_model_is_not_here(tmp_path):
    config, _ = load_config("configs/gsm8k/qwen3-0.6b.gin")
    actual, note = with_known_shape(config)
    assert note == "models/Qwen3-0.6B does not exist; the plan uses the shape of Qwen3-0.6B as published"
    assert vocab_size_of(actual) == 151936
    (tmp_path / "config.json").write_text("{}")
    here = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(tmp_path)))
    assert with_known_shape(here) == (here, None)
    taught = dataclasses.replace(here, teacher=config.model)
    actual, note = with_known_shape(taught)
    assert note.startswith("models/Qwen3-0.6B does not exist") and actual.model == here.model
    assert decoder_of(actual.teacher)[1].vocab_size == 151936
    strange = dataclasses.replace(config, model=dataclasses.replace(config.model, path="models/nobody-s"))
    assert with_known_shape(strange) == (strange, None)


BUFFERS = """allocation 0: size 1000, parameter 2, shape |f32[250]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=1000,offset=0): f32[250]
allocation 1: size 200, maybe-live-out:
allocation 2: size 30, preallocated-temp:
allocation 3: size 4, thread-local:
allocation 4: size 5000, color 1, preallocated-temp:
"""
REPORT = "Memory Space: default (color=0)\nTotal bytes: 1234 (1.2KiB)\nMemory Space: vmem (color=1)\nTotal bytes: 5000"


class FakeLowered:
    """A program whose compiler writes what it assigned."""

    buffers, report = BUFFERS, REPORT

    def compile(self, compiler_options):
        folder = Path(compiler_options["xla_dump_to"])
        (folder / "m.after_optimizations-buffer-assignment.txt").write_text(self.buffers)
        (folder / "m.after_optimizations-memory-usage-report.txt").write_text(self.report)
        return self

    def memory_analysis(self):
        return SimpleNamespace(generated_code_size_in_bytes=5, temp_size_in_bytes=1234)


def test_memory_is_what_the_compiler_assigned_counted_once():
    """JAX's own number of temporary bytes holds donated arguments a second time."""
    actual = compiled.compile_now(FakeLowered())
    assert (actual.arguments, actual.outputs, actual.temporary, actual.code) == (1000, 200, 34, 5)
    assert actual.total == 1239
    early = assigned.assign_now(FakeLowered())
    assert (early.arguments, early.outputs, early.temporary, early.code) == (1000, 200, 34, 0)


def test_a_compiler_that_writes_nothing_whole_is_not_believed(monkeypatch):
    monkeypatch.setattr(FakeLowered, "buffers", BUFFERS.replace("size 200", "size 20"))
    with pytest.raises(RuntimeError, match="no buffer assignment"):
        compiled.compile_now(FakeLowered())
    with pytest.raises(RuntimeError, match="no buffer assignment"):
        assigned.assign_now(FakeLowered())


def test_a_search_tries_devices_of_their_own_for_sampling_where_there_is_a_lag(few_choices):
    assert not list(search.splits(load_config("configs/plan/0.6b.gin", [])[0], 8))
    config, parts = load_config("configs/plan/0.6b.gin", ["Online.lag=1"])
    # An eighth, a quarter, a half and three quarters of 8 devices; the rest learns, over all axes.
    pairs = list(search.splits(config, 8))
    assert {sampler.data * sampler.tensor for _, sampler in pairs} == {1, 2, 4, 6}
    assert all(math.prod(mesh.values()) + sampler.data * sampler.tensor == 8 for mesh, sampler in pairs)
    assert all(mesh["tensor"] == sampler.tensor for mesh, sampler in pairs)
    done = search.search(config, parts, parse_topology("v5e:2x4"), ["configs/plan/0.6b.gin"], lambda line: None)
    apart = [c for c in done.fitting if c.bindings.get("Config.sampler_mesh") is not None]
    together = [c for c in done.fitting if c.bindings.get("Config.sampler_mesh") is None]
    gain = together[0].step_seconds / apart[0].step_seconds
    assert f"x {gain:.2f}" in search.text(done)
    winner = apart[0]
    again, _ = load_config("configs/plan/0.6b.gin", ["Online.lag=1", *search.words(winner.bindings)])
    assert again.sampler_mesh == winner.bindings["Config.sampler_mesh"]
    assert again.mesh == MeshShape(
        **{axis: winner.bindings[f"MeshShape.{axis}"] for axis in ("data", "fsdp", "tensor")}
    )
