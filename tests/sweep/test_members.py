"""What a sweep would run is read, named and refused before anything runs."""

from __future__ import annotations

import pytest

from jrl.config import ConfigError
from jrl.config.sweep import Axis
from jrl.tools.sweep.manifest import describe
from jrl.tools.sweep.members import member_names, read_sweep, train_arguments
from jrl.tools.sweep.sweeping import notes_on

RATES, SEEDS = "AdamW.learning_rate=[1e-3, 3e-3]", "Run.seed=[0..1]"


def points(sweep):
    return [member.bindings for member in sweep.members]


def test_members_are_every_combination_named_by_their_bindings():
    sweep = read_sweep("tiny", [SEEDS, RATES, "Online.steps=4"])
    assert sweep.bindings == ("Online.steps=4",)
    assert [member.name for member in sweep.members] == [
        "learning_rate=0.001,seed=0", "learning_rate=0.001,seed=1",
        "learning_rate=0.003,seed=0", "learning_rate=0.003,seed=1",
    ]  # fmt: skip
    assert {member.steps for member in sweep.members} == {4}
    assert len({member.identity for member in sweep.members}) == 4
    assert train_arguments(sweep, sweep.members[1], "out/m", ["--devices", "2"]) == [
        "train", "tiny", "Online.steps=4", "AdamW.learning_rate=0.001", "Run.seed=1", "--run", "out/m",
        "--devices", "2",
    ]  # fmt: skip


def test_a_note_on_members_is_printed_once_with_whom_it_is_about():
    """In a population it stood in the log of the first member alone."""
    ends = "LinearDecay.decay_steps=[2, 30, 1000]"
    members = read_sweep("tiny", ["AdamW.schedule=@LinearDecay()", ends, SEEDS]).members
    note = "the learning rate of the role policy falls to 0 (LinearDecay) after 2 of the 30 updates of stage rl, and"
    assert [list(member.notes) for member in members[2:]] == [[]] * 4
    (line,) = notes_on(members)
    assert line.startswith(f"decay_steps=2,seed=0 and 1 more: {note}")
    (line,) = notes_on(members[:2])
    assert line.startswith(f"all members: {note}") and notes_on(members[2:]) == []
    (line,) = notes_on(members[:1])
    assert line.startswith(f"decay_steps=2,seed=0: {note}")


def test_every_combination_runs_with_every_seed_however_lists_are_combined():
    paired = read_sweep("tiny", [RATES, "Online.samples=[4, 8]", SEEDS], "pairs")
    assert points(paired) == [
        ("AdamW.learning_rate=0.001", "Online.samples=4", "Run.seed=0"),
        ("AdamW.learning_rate=0.001", "Online.samples=4", "Run.seed=1"),
        ("AdamW.learning_rate=0.003", "Online.samples=8", "Run.seed=0"),
        ("AdamW.learning_rate=0.003", "Online.samples=8", "Run.seed=1"),
    ]
    drawn = read_sweep("tiny", [RATES, "Online.samples=[4, 8]", SEEDS], "random", 3, seed=5)
    assert len(drawn.members) == 6
    assert drawn == read_sweep("tiny", [RATES, "Online.samples=[4, 8]", SEEDS], "random", 3, seed=5)
    assert len({bindings[:2] for bindings in points(drawn)}) == 3
    assert points(read_sweep("tiny", [SEEDS], "pairs")) == [("Run.seed=0",), ("Run.seed=1",)]


def test_lists_in_a_gin_file_are_swept(tmp_path):
    path = tmp_path / "lists.gin"
    path.write_text("include 'tiny.gin'\nAdamW.learning_rate = [1e-3, 3e-3]\n")
    (tmp_path / "tiny.gin").write_text(open("configs/tiny.gin").read().replace("AdamW.learning_rate = 3e-3\n", ""))
    assert points(read_sweep(str(path), [])) == [("AdamW.learning_rate=0.001",), ("AdamW.learning_rate=0.003",)]


def test_methods_are_swept_with_the_fields_that_they_share():
    sweep = read_sweep("tiny", ["Online.objective=[@GRPO(), @DrGRPO()]"])
    assert [member.name for member in sweep.members] == ["objective=GRPO", "objective=DrGRPO"]


METHODS = "Online.objective=[@GRPO(), @DAPO()]"


def test_fields_of_a_swept_method_apply_to_the_members_that_select_it():
    sweep = read_sweep("tiny", [METHODS, "GRPO.clip_low=[0.1, 0.3]", "DAPO.max_refills=3", "Online.steps=4"])
    assert [member.name for member in sweep.members] == [
        "objective=GRPO,clip_low=0.1", "objective=GRPO,clip_low=0.3", "objective=DAPO"
    ]  # fmt: skip
    assert [member.settings.get("GRPO.clip_low") for member in sweep.members] == ["0.1", "0.3", None]
    assert [member.settings.get("DAPO.max_refills") for member in sweep.members] == [None, None, "3"]
    assert [train_arguments(sweep, member, "m") for member in sweep.members] == [
        ["train", "tiny", "Online.steps=4", "Online.objective=@GRPO()", "GRPO.clip_low=0.1", "--run", "m"],
        ["train", "tiny", "Online.steps=4", "Online.objective=@GRPO()", "GRPO.clip_low=0.3", "--run", "m"],
        ["train", "tiny", "DAPO.max_refills=3", "Online.steps=4", "Online.objective=@DAPO()", "--run", "m"],
    ]


STAGES = "Config.stages=[[@Online()], [@Online(), @b/Online()]]"


@pytest.mark.parametrize(
    ("bindings", "names"),
    [
        # a field of an optimizer that is swept in a swept stage
        (
            [STAGES, "Online.optimizer=[@AdamW(), @Muon()]", "Muon.momentum=[0.8, 0.9]"],
            [f"stages=Online{more},optimizer={rest}" for more in ("", "-b-Online")
             for rest in ("AdamW", "Muon,momentum=0.8", "Muon,momentum=0.9")],
        ),
        ([STAGES, "Online.objective=@DAPO()", "DAPO.clip_high=0.3"], ["stages=Online", "stages=Online-b-Online"]),
        # a field without a default
        (
            ["AdamW.schedule=[@CosineDecay(), @ConstantRate()]", "CosineDecay.decay_steps=[100, 200]"],
            ["schedule=CosineDecay,decay_steps=100", "schedule=CosineDecay,decay_steps=200", "schedule=ConstantRate"],
        ),
        # one objective in two scopes
        (
            ["Online.objective=[@a/GRPO(), @b/GRPO()]", "a/GRPO.clip_low=0.1", "b/GRPO.clip_low=0.15"],
            ["objective=a-GRPO", "objective=b-GRPO"],
        ),
        # a macro that one objective reads, and a part of a part
        (
            [METHODS, "DAPO.clip_high=%C", "C=[0.3, 0.4]"],
            ["objective=GRPO", "objective=DAPO,C=0.3", "objective=DAPO,C=0.4"],
        ),
        (
            ["Online.optimizer=[@AdamW(), @Muon()]", "AdamW.schedule=@CosineDecay()", "CosineDecay.decay_steps=100"],
            ["optimizer=AdamW", "optimizer=Muon"],
        ),
    ],
)  # fmt: skip
def test_a_binding_applies_to_the_members_that_read_it(bindings, names):
    assert [member.name for member in read_sweep("tiny", bindings).members] == names


def test_lists_of_a_method_in_a_gin_file_apply_to_the_members_that_select_it(tmp_path):
    path = tmp_path / "lists.gin"
    path.write_text("include 'tiny.gin'\nOnline.objective = [@GRPO(), @DAPO()]\nDAPO.clip_high = [0.25, 0.28]\n")
    (tmp_path / "tiny.gin").write_text(open("configs/tiny.gin").read().replace("Online.objective = @GRPO()\n", ""))
    assert [member.name for member in read_sweep(str(path), []).members] == [
        "objective=GRPO", "objective=DAPO,clip_high=0.25", "objective=DAPO,clip_high=0.28"
    ]  # fmt: skip


def test_a_section_that_every_member_has_keeps_its_bindings():
    """The imitation before RL has the optimizer that RL is swept over."""
    sweep = read_sweep("quickstart", ["Online.optimizer=[@AdamW(), @Muon()]", "warm/AdamW.b1=0.8"])
    assert [member.fixed for member in sweep.members] == [("warm/AdamW.b1=0.8",), ("warm/AdamW.b1=0.8",)]


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        ([METHODS, "DAPO.max_refill=3"], r"DAPO has no field 'max_refill'; did you mean max_refills"),
        ([METHODS, "OPO.clip_low=0.1"], r"unused binding: OPO\.clip_low"),
        ([METHODS, "DAPO.max_refills=[3, 3]"], r"DAPO\.max_refills=3 is listed twice"),
        (["AdamW.learning_rat=[1e-3, 3e-3]"], "did you mean learning_rate"),
        (["AdamW.learning_rate=[1e-3, 'fast']"], r"AdamW\.learning_rate expects float, got 'fast' \(str\)"),
        (["AdamW.learning_rate=[1e-3, 0.001]"], r"same run: AdamW\.learning_rate=0\.001 is listed twice"),
        (["Online.lag=[0, 0]", RATES], "same run"),
        (["AdamW.learning_rate=[1, 1.0]"], r"same run: AdamW\.learning_rate=1 and AdamW\.learning_rate=1\.0"),
        (["Log.samples=[0, 2]"], "same run"),
        (["AdamW.learning_rate=[]"], "lists no value"),
        (["AdamW.learning_rate=1e-3"], "nothing is swept"),
        (["Online.samples=[8, 1]"], "sample"),
        (["parts=[['a.py'], ['b.py']]"], r"Config\.parts cannot be swept: the members of a sweep share their"),
        (["Online.prompts=[1..40]", "Online.samples=[2..41]"], "1600 members"),
        ([RATES, RATES], "bound twice"),
    ],
)
def test_what_a_member_would_refuse_is_refused_before_any_runs(bindings, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        read_sweep("tiny", bindings)


def test_data_files_are_swept_by_their_paths_and_a_file_that_was_moved_leaves_the_members_the_same():
    asked = ["Config.task=@Jsonl()", "Online.steps=1"]
    sweep = read_sweep("tiny", [*asked, "Jsonl.path=['a.jsonl', 'b.jsonl']"])
    assert [member.name for member in sweep.members] == ["path=a.jsonl", "path=b.jsonl"]
    assert [member.settings["Jsonl.path"] for member in sweep.members] == ["'a.jsonl'", "'b.jsonl'"]
    before, after = (read_sweep("tiny", [*asked, "Run.seed=[0,1]", f"Jsonl.path='{path}'"]) for path in ("a", "x/a"))
    assert [m.identity for m in before.members] == [m.identity for m in after.members]


def test_options_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="go with --how random"):
        read_sweep("tiny", [RATES], "grid", 3)
    with pytest.raises(ValueError, match="how many"):
        read_sweep("tiny", [RATES], "random")
    with pytest.raises(ValueError, match=r"only Run\.seed has one"):
        read_sweep("tiny", [SEEDS], "random", 1)
    with pytest.raises(ValueError, match="one length"):
        read_sweep("tiny", [RATES, "Online.lag=[0]"], "pairs")


def test_names_are_safe_for_paths_and_all_different():
    axes = [Axis("a/X.path", ("'../b c'", "'..-b-c'")), Axis("Y.path", ("None",)), Axis("X.low", ("-0.5", "[]"))]
    names = member_names(axes, [("a/X.path='../b c'", "Y.path=None", "X.low=-0.5"),
                                ("a/X.path='..-b-c'", "Y.path=None", "X.low=-0.5"),
                                ("a/X.path='d'", "Y.path=None", "X.low=[]")])  # fmt: skip
    assert names[2] == "a-X.path=d,Y.path=None,low=empty"
    assert all(name.startswith("a-X.path=b-c,Y.path=None,low=-0.5-") for name in names[:2])
    assert len(set(names)) == 3
    (long,) = member_names([Axis("X.text", ("'" + "a" * 400 + "'",))], [("X.text='" + "a" * 400 + "'",)])
    assert len(long) < 140


def test_the_manifest_names_the_common_bindings_that_a_member_reads():
    sweep = read_sweep("tiny", ["Online.objective=[@GRPO(), @DAPO()]", "DAPO.clip_high=0.3", "Online.steps=4"])
    assert [(member["bindings"], member["fixed"]) for member in describe(sweep)["members"]] == [
        (["Online.objective=@GRPO()"], ["Online.steps=4"]),
        (["Online.objective=@DAPO()"], ["DAPO.clip_high=0.3", "Online.steps=4"]),
    ]
