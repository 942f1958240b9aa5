from __future__ import annotations

import os

import pytest

from jrl import paths


def test_bucket_addresses_are_refused_naming_what_would_be_needed():
    for call in (paths.read_bytes, paths.exists, paths.list_dir, paths.make_dir, paths.remove_tree):
        with pytest.raises(ValueError, match=r"'gs://bucket/run' is a gs:// address.*only local files"):
            call("gs://bucket/run")
    with pytest.raises(ValueError, match="s3://"):
        paths.write_bytes_atomic("s3://bucket/a", b"")
    with pytest.raises(ValueError, match="empty"):
        paths.local("")


def test_a_path_that_lost_a_slash_is_still_a_bucket():
    with pytest.raises(ValueError, match="gs://"):
        paths.local("gs:/bucket/run")


def test_a_normal_path_is_absolute_and_has_no_dots(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    for text in ("../run", "run/../../run", "./../a/../run", str(tmp_path / "a" / ".." / "run")):
        assert paths.normalize(text) == tmp_path / "run"
    assert paths.normalize("run") == tmp_path / "a" / "run"
    assert paths.normalize(paths.normalize("../run")) == paths.normalize("../run")
    with pytest.raises(ValueError, match="gs://"):
        paths.normalize("gs://bucket/run")


def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"r\\udcff' is not UTF-8; choose another"):
        paths.normalize(tmp_path / os.fsdecode(b"r\xff"))
    assert paths.normalize(tmp_path / "\u00fc") == tmp_path / "\u00fc"


def test_what_is_above_a_link_is_above_the_folder_it_leads_to(tmp_path, monkeypatch):
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "runs")
    assert paths.normalize(tmp_path / "link" / ".." / "run") == tmp_path / "disk" / "run"
    assert paths.normalize(tmp_path / "link" / "run") == tmp_path / "link" / "run"


def test_pipes_and_devices_are_special_and_files_folders_and_links_to_them_are_not(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link-to-pipe").symlink_to(tmp_path / "pipe")
    for name in ("file", "link", "."):
        paths.check_not_special(tmp_path / name)
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (tmp_path / "link-to-pipe", "a named pipe"),
                       ("/dev/null", "a device")):  # fmt: skip
        with pytest.raises(ValueError, match=f"is {kind}, not a file"):
            paths.check_not_special(path)
    with pytest.raises(FileNotFoundError):
        paths.check_not_special(tmp_path / "none")


def test_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "a.json"
    paths.write_bytes_atomic(target, b"old")
    paths.write_bytes_atomic(target, b"new and longer")
    assert paths.read_bytes(target) == b"new and longer"
    assert paths.list_dir(tmp_path) == ["a.json"]


def test_an_atomic_write_is_on_the_disk_under_its_name(tmp_path, synced):
    paths.write_bytes_atomic(tmp_path / "a.json", b"bytes")
    assert synced(tmp_path / "a.json") and synced(tmp_path)


def test_a_failed_atomic_write_keeps_the_old_bytes(tmp_path, monkeypatch):
    target = tmp_path / "a.json"
    paths.write_bytes_atomic(target, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"could not write 3 bytes: No space left on device.*a.json"):
        paths.write_bytes_atomic(target, b"new")
    assert target.read_bytes() == b"old" and paths.list_dir(tmp_path) == ["a.json"]


def test_append_cuts_to_the_committed_length_first(tmp_path):
    target = tmp_path / "rows"
    with paths.open_append(target, 0) as handle:
        handle.write(b"one\ntwo\nhal")
    with paths.open_append(target, 4) as handle:
        handle.write(b"2\n")
    assert target.read_bytes() == b"one\n2\n"


def test_append_refuses_a_file_that_lost_committed_bytes(tmp_path):
    (tmp_path / "rows").write_bytes(b"one\n")
    with pytest.raises(ValueError, match="holds 4 bytes but the checkpoint committed 8"):
        paths.open_append(tmp_path / "rows", 8)
    assert (tmp_path / "rows").read_bytes() == b"one\n"


def test_missing_folders_list_as_empty_and_remove_as_nothing(tmp_path):
    assert paths.list_dir(tmp_path / "none") == []
    paths.remove_tree(tmp_path / "none")


def test_files_below_names_links_and_does_not_follow_them(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_bytes(b"")
    (tmp_path / "in" / "deep" / "file").write_bytes(b"")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    assert list(paths.files_below(tmp_path / "in")) == ["link", "deep/file"]


def test_an_error_of_an_open_file_is_given_its_name_once():
    with pytest.raises(OSError, match=r"No space left on device: 'rows\.jsonl'") as error, paths.naming("rows.jsonl"):
        raise OSError(28, "No space left on device")
    assert error.value.errno == 28
    with pytest.raises(OSError, match="other"), paths.naming("rows.jsonl"):
        raise OSError(28, "No space left on device", "other")


def test_a_full_disk_is_said_in_the_systems_words():
    wrapped = ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [tensorstore_spec='{...}']")
    assert paths.cause(wrapped) == "No space left on device"
    assert paths.cause(ValueError("bad\nand more")) == "ValueError: bad" and paths.cause(KeyError()) == "KeyError"


def test_files_are_written_with_the_folders_above_them(tmp_path):
    paths.write_files(tmp_path / "new", {"a": b"1", "b/c/d": b"2"})
    paths.write_files(tmp_path / "new", {"b/c/d": b"3"})
    assert {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == {
        "new/a": b"1", "new/b/c/d": b"3",
    }  # fmt: skip
