from __future__ import annotations

import copy
import json

import pytest

from jrl.run.report.manifest import compare, dashboard_id, make_manifest, read_manifest, write_manifest


def manifest(**changes):
    values = {
        "config_identity": "c0",
        "config": {"Run": {"seed": 0}, "AdamW": {"learning_rate": 1e-3, "betas": (0.9, 0.95)}},
        "tokenizer": "t0",
        "data": "d0",
        "parts": {"my_parts.py": "p0"},
        "seed": 0,
        "mesh": {"data": 8},
    }
    return make_manifest(**{**values, **changes})


def test_a_manifest_reads_back_and_equals_itself(tmp_path):
    written = manifest()
    write_manifest(tmp_path / "manifest.json", written)
    assert read_manifest(tmp_path / "manifest.json") == written
    assert compare(read_manifest(tmp_path / "manifest.json"), manifest()) == ([], [])
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jrl-jax"} <= set(
        written["environment"]["packages"]
    )
    assert written["environment"]["devices"] >= 1 and written["environment"]["device_kind"]
    assert "per-device shape" in written["promise"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tokenizer": "t1"}, 'tokenizer: "t0", now "t1"'),
        ({"data": "d1"}, 'data: "d0", now "d1"'),
        ({"seed": 1}, "seed: 0, now 1"),
        ({"parts": {"my_parts.py": "p1"}}, 'parts.my_parts.py: "p0", now "p1"'),
        ({"parts": {}}, 'parts.my_parts.py: "p0", now not there'),
        ({"config_identity": "c1"}, 'config: "c0", now "c1"'),
    ],
)
def test_another_identity_is_a_refusal_that_names_it(changes, line):
    assert compare(manifest(), manifest(**changes)) == ([line], [])


def test_the_folder_of_a_parts_file_is_not_its_identity(tmp_path):
    here, elsewhere = manifest(parts={"mine/my_parts.py": "p0"}), manifest(parts={"/home/me/mine/my_parts.py": "p0"})
    assert here == elsewhere == manifest()
    of_an_earlier_version = copy.deepcopy(here)
    of_an_earlier_version["identity"]["parts"] = {"mine/my_parts.py": "p0"}
    write_manifest(tmp_path / "manifest.json", of_an_earlier_version)
    assert read_manifest(tmp_path / "manifest.json") == elsewhere
    two = manifest(parts={"a/p.py": "0", "b/p.py": "1"})
    assert compare(two, manifest(parts={"a/p.py": "0", "b/p.py": "2"})) == (['parts.b/p.py: "1", now "2"'], [])


def test_a_changed_configuration_is_explained_field_by_field():
    changed = {"Run": {"seed": 0}, "AdamW": {"learning_rate": 3e-3, "betas": (0.9, 0.95)}}
    identity, environment = compare(manifest(), manifest(config_identity="c1", config=changed))
    assert identity == ["AdamW.learning_rate: 0.001, now 0.003"] and environment == []


def test_items_of_a_list_are_explained_by_their_place():
    begun = {"stages": [{"class": "Offline", "steps": 2}, {"class": "Online", "steps": 3, "lag": 0}]}
    changed = {"stages": [{"class": "Offline", "steps": 2}, {"class": "Online", "steps": 9, "lag": 1}]}
    compared = lambda config, free=(): compare(
        manifest(config=begun), manifest(config_identity="c1", config=config), free
    )[0]
    assert compared(changed) == ["stages.1.lag: 0, now 1", "stages.1.steps: 3, now 9"]
    assert compared(changed, ["stages.1.steps"]) == ["stages.1.lag: 0, now 1"]
    assert compared({"stages": begun["stages"][:1]})[0].startswith("stages: [")  # of another length: as a whole


def test_free_fields_of_the_configuration_do_not_refuse():
    assert compare(manifest(), manifest(config={"Loop": {"steps": 60}})) == ([], [])


def test_another_machine_is_a_warning():
    other = copy.deepcopy(manifest(mesh={"data": 4}))
    other["environment"]["packages"]["jax"] = "0.0.1"
    identity, environment = compare(manifest(), other)
    assert identity == [] and len(environment) == 2
    assert environment[0] == "mesh.data: 8, now 4" and environment[1].endswith('now "0.0.1"')


def test_another_kernel_is_a_warning_and_a_field_that_was_not_there_is_none():
    old, new = (
        {"identity": {}, "environment": {}, "config": {"sampler": s}} for s in ({"a": 1, "b": 1}, {"a": 2, "b": 2})
    )
    assert compare(old, new, ["sampler.a"], ["sampler.a"]) == ([], ["sampler.a: 1, now 2"])
    del old["config"]["sampler"]["a"]
    assert compare(old, new, ["sampler.a"], ["sampler.a"]) == ([], [])


def test_a_damaged_manifest_is_refused_by_name(tmp_path):
    path = tmp_path / "manifest.json"
    for text in ("{", "[]", json.dumps({"format": 99}), json.dumps({"format": 1, "identity": 3})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json is not the manifest of a run"):
            read_manifest(path)


def test_runs_in_folders_of_one_name_are_two_on_a_dashboard(tmp_path):
    ids = []
    for place in ("a", "b"):
        folder = tmp_path / place / "seed=0"
        folder.mkdir(parents=True)
        write_manifest(folder / "manifest.json", {**manifest(), "id": f"1234567{place}"})
        ids += [dashboard_id(folder), dashboard_id(folder)]  # as a resumed run asks
    assert ids == ["seed=0-1234567a"] * 2 + ["seed=0-1234567b"] * 2
    write_manifest(folder / "manifest.json", manifest())
    assert dashboard_id(folder) == "seed=0"  # of a run that an earlier version began
