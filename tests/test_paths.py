from __future__ import annotations

import os

import pytest

from jrl import paths


def test_bucket_addresses_are_refused_naming_what_would_be_needed():
    for call in (paths.read_bytes, paths.exists, paths.list_dir, paths.make_dir, paths.remove_tree):
        with pytest.raises(ValueError, match=r"'gs://bucket/run' is a gs:// address.*local files only"):
            call("gs://bucket/run")
    with pytest.raises(ValueError, match="s3://"):
        paths.write_bytes_atomic("s3://bucket/a", b"")
    with pytest.raises(ValueError, match="empty"):
        paths.local("")


def test_a_path_that_lost_a_slash_is_still_a_bucket():
    with pytest.raises(ValueError, match="gs://"):
        paths.local("gs:/bucket/run")


def test_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "a.json"
    paths.write_bytes_atomic(target, b"old")
    paths.write_bytes_atomic(target, b"new and longer")
    assert paths.read_bytes(target) == b"new and longer"
    assert paths.list_dir(tmp_path) == ["a.json"]


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
