"""The commit of a run to a bucket: the lease, and a death after every single request."""

import contextlib
import errno
import fcntl
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
import types
import urllib.error

import numpy as np
import pytest
from bucket_stand_in import Died, Store, addressed, client, contents, opened, serving
from safetensors.numpy import save
from sweep.run_folders import rewards, write_run

from jrl import api, cli, paths
from jrl.bucket import credentials, local_copies
from jrl.bucket.client import Bucket, BucketError, Conflict, Missing, split_address
from jrl.bucket.crc32c import crc32c
from jrl.commands import exits
from jrl.models.pretrained import peft, published
from jrl.rollout.reward_gate import Gate, load_gate
from jrl.run import begin_from, bucket_run, fault, identity, records, teacher
from jrl.run.checkpoints.lock import RunIsHeld
from jrl.run.lease import take_lease
from jrl.tasks.tokenizers import pieces
from jrl.tools import inspect_data
from jrl.tools.sweep.runs import COMPARED


def write_step(folder, step):
    """Writes what a run has after a step: metrics grow, the checkpoint before is removed."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    place = folder / "checkpoints" / f"{step:08d}"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(f"manifest {step}")
    (place / "state").write_bytes(bytes([step]) * 1000)
    (folder / "manifest.json").write_text("the run")
    (folder / "empty").write_bytes(b"")
    (folder / "metrics.jsonl").write_text("".join(f"row {i}\n" for i in range(step)))


def after_step(tmp_path, step):
    folder = tmp_path / f"expected{step}"
    folder.mkdir()
    write_step(folder, step)
    return contents(folder)


def test_a_process_that_dies_after_any_request_leaves_the_step_before_or_the_new_one(tmp_path, trials):
    expected = {step: after_step(tmp_path, step) for step in (1, 2)}
    seen, after = [], 0
    while True:
        store, folder = Store(), tmp_path / f"run{after}"
        publisher = opened(client(store), folder)
        write_step(folder, 1)
        publisher.publish()
        dying = client(store, after)
        try:
            publisher = opened(dying, folder)
            write_step(folder, 2)
            publisher.publish()
            ended = True
        except Died:
            ended = False
        again = tmp_path / f"again{after}"
        opened(client(store), again)
        step = 2 if contents(again) == expected[2] else 1
        assert contents(again) == expected[step], f"half a commit after {after} requests"
        committed = bucket_run.read_commit(client(store), "run")[0]
        assert {f"run/files/{name}" for name in committed.objects()} == {
            name for _, name in store.objects if "/files/" in name
        }, "the sweep left something, or took too much"
        seen.append(step)
        if ended:
            break
        after += 1
    trials(after)
    assert after > 8 and seen == sorted(seen) and set(seen) == {1, 2}


def test_processes_that_die_while_requests_fail_leave_a_whole_step_that_is_no_older(tmp_path, trials):
    """Lives one after the other, on one machine or another, each of which finds a step and writes further ones."""
    expected = {step: after_step(tmp_path, step) for step in range(1, 13)}
    for trial in range(trials(10, 300)):
        draw, begun, ended = random.Random(trial), 0, 0
        store = Store(fails=draw.choice([0, 0.1, 0.3]), seed=trial, delay_seconds=0)
        for _ in range(draw.randrange(2, 5)):
            folder = tmp_path / f"run{trial}{draw.choice('ab')}"
            dying = client(store, draw.choice([None, draw.randrange(40)]), deadline_seconds=1e9)
            with contextlib.suppress(Died):
                publisher = opened(dying, folder)
                held = contents(folder)
                found = next((step for step, files in expected.items() if files == held), 0)
                assert (held == {} or found) and ended <= found <= begun, trial
                for begun in range(found + 1, found + draw.randrange(2, 4)):
                    write_step(folder, begun)
                    publisher.publish()
                    ended = begun
        store.fails = 0.0
        opened(client(store), tmp_path / f"again{trial}")
        last = contents(tmp_path / f"again{trial}")
        assert last in ([expected[step] for step in range(max(ended, 1), begun + 1)] + [{}] * (ended == 0)), trial


@pytest.mark.parametrize("seed", range(10))
def test_failing_delayed_and_lost_answers_change_nothing(tmp_path, seed):
    store = Store(fails=0.3, seed=seed, delay_seconds=0)
    folder = tmp_path / "run"
    publisher = opened(client(store, deadline_seconds=1e9), folder)
    for step in (1, 2, 3):
        write_step(folder, step)
        publisher.publish()
    store.fails = 0.0
    opened(client(store), tmp_path / "again")
    assert contents(tmp_path / "again") == after_step(tmp_path, 3)


def test_a_stale_listing_sweeps_nothing_that_is_committed(tmp_path):
    store = Store()
    publisher = opened(client(store), tmp_path / "run")
    write_step(tmp_path / "run", 1)
    publisher.publish()
    store.freeze_listing()
    for step in (2, 3):
        write_step(tmp_path / "run", step)
        publisher.publish()
    opened(client(store), tmp_path / "again")
    assert contents(tmp_path / "again") == after_step(tmp_path, 3)


def test_a_process_that_lost_the_run_cannot_commit(tmp_path):
    store = Store()
    first = opened(client(store), tmp_path / "first")
    write_step(tmp_path / "first", 1)
    first.publish()
    second = opened(client(store), tmp_path / "second")
    write_step(tmp_path / "first", 2)
    with pytest.raises(bucket_run.LeaseLost, match="another process has taken gs://bucket/run"):
        first.publish()
    write_step(tmp_path / "second", 3)
    second.publish()
    opened(client(store), tmp_path / "again")
    assert contents(tmp_path / "again") == after_step(tmp_path, 3)


def test_a_file_of_rows_keeps_its_large_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_run, "MERGED_BYTES", 10)
    store, folder = Store(), tmp_path / "run"
    publisher = opened(client(store), folder)
    (folder / "manifest.json").write_text("the run")
    counts = []
    for text in ("0123456789ab", "0123456789abcd", "0123456789abcdefghijklmn", "0123456789abcdefghijklmno"):
        (folder / "metrics.jsonl").write_text(text)
        publisher.publish()
        counts.append([part.bytes for part in publisher._commit.files["metrics.jsonl"]])
    # A last part below 10 bytes is written anew with what follows.
    assert counts == [[12], [12, 2], [12, 12], [12, 12, 1]]


def test_a_file_with_several_names_is_sent_and_fetched_once(tmp_path):
    """As large arrays that checkpoints have in common. The file stays when its first name goes."""
    store, folder = Store(), tmp_path / "run"
    publisher = opened(client(store), folder)
    (folder / "manifest.json").write_text("the run")
    names = [f"checkpoints/{step:08d}/unchanged" for step in range(1, 6)]
    place = folder / names[0]
    place.parent.mkdir(parents=True)
    place.write_bytes(b"base" * 1000)
    for before, name in zip([None, *names], names):
        if before is not None:
            (folder / name).parent.mkdir()
            os.link(folder / before, folder / name)
        if name == names[3]:
            shutil.rmtree((folder / names[0]).parent)
        store.requests.clear()
        publisher.publish()
        assert [sent for method, sent in store.requests if method == "POST" and "unchanged" in sent] == (
            [sent for _, sent in store.requests if f"{names[0]}/" in sent] if before is None else []
        )
    assert len({parts for file, parts in publisher._commit.files.items() if "unchanged" in file}) == 1
    store.requests.clear()
    opened(client(store), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder) and len(contents(folder)) == 5
    assert sum("unchanged" in name for method, name in store.requests if method == "GET") == 1
    assert len({(tmp_path / "again" / name).stat().st_ino for name in names[1:]}) == 1
    for key in [key for key in store.objects if "unchanged" in key[1]]:
        del store.objects[key]
    shutil.rmtree((tmp_path / "again" / names[1]).parent)
    opened(client(store), tmp_path / "again")  # the bucket has lost it, and the machine has it under another name
    assert contents(tmp_path / "again") == contents(folder)


def test_overwritten_bytes_are_refused(tmp_path):
    store = Store()
    publisher = opened(client(store), tmp_path / "run")
    write_step(tmp_path / "run", 1)
    publisher.publish()
    key = next(key for key in store.objects if "/files/metrics" in key[1])
    store.objects[key] = (store.objects[key][0], b"other", 0.0)
    with pytest.raises(BucketError, match="other bytes than were committed"):
        opened(client(store), tmp_path / "again")


def write_steps(folder, *steps):
    """Writes a run of which several checkpoints are kept."""
    write_step(folder, max(steps))
    for step in steps:
        place = folder / "checkpoints" / f"{step:08d}"
        place.mkdir(exist_ok=True)
        (place / "manifest.json").write_text(f"manifest {step}")
        (place / "state").write_bytes(bytes([step]) * 1000)


@pytest.mark.parametrize("lost", ["state", "manifest.json"])
@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("how", ["removed", "overwritten"])
def test_a_damaged_object_of_a_checkpoint_damages_that_step_alone(tmp_path, caplog, lost, step, how):
    store = Store()
    publisher = opened(client(store), tmp_path / "run")
    write_steps(tmp_path / "run", 2, 4)
    publisher.publish()
    file = f"checkpoints/{step:08d}/{lost}"
    key = next(key for key in store.objects if f"/files/{file}" in key[1])
    if how == "removed":
        object_before = store.objects.pop(key)
    else:
        object_before, store.objects[key] = store.objects[key], (store.objects[key][0], b"other", 0.0)
    again = opened(client(store), tmp_path / "again")
    assert contents(tmp_path / "again") == {n: b for n, b in contents(tmp_path / "run").items() if n != file}
    assert f"gs://bucket/run: {file} is damaged and left out" in caplog.text
    (tmp_path / "again" / "metrics.jsonl").write_text("another row")
    again.publish()  # what it was is still committed: the object may be brought back
    store.objects[key] = object_before
    opened(client(store), tmp_path / "third")
    assert (tmp_path / "third" / file).read_bytes() == (tmp_path / "run" / file).read_bytes()


def test_a_step_that_was_damaged_and_is_saved_again_is_committed_as_it_is_now(tmp_path):
    store = Store()
    publisher = opened(client(store), tmp_path / "run")
    write_steps(tmp_path / "run", 2, 4)
    (tmp_path / "run" / "checkpoints" / "00000004" / "more").write_text("of this save alone")
    publisher.publish()
    for key in [key for key in store.objects if "/files/checkpoints/00000004/" in key[1]]:
        del store.objects[key]
    again = opened(client(store), tmp_path / "again")
    place = tmp_path / "again" / "checkpoints" / "00000004"
    assert list(place.iterdir()) == []  # it is a step, of which nothing is left
    place.rename(tmp_path / "aside")  # as a save replaces one: both are there for a moment, so they differ in inode
    write_steps(tmp_path / "again", 2, 4)
    again.publish()
    assert not any(name.endswith("/more") for name in again._commit.files)
    opened(client(store), tmp_path / "third")
    assert contents(tmp_path / "third") == contents(tmp_path / "again")


def test_a_machine_that_has_what_the_bucket_has_lost_uploads_it_again(tmp_path):
    store = Store()
    publisher = opened(client(store), tmp_path / "run")
    write_steps(tmp_path / "run", 2, 4)
    publisher.publish()
    for key in [key for key in store.objects if "/files/checkpoints/00000004/" in key[1]]:
        del store.objects[key]
    opened(client(store), tmp_path / "run").publish()
    opened(client(store), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "run")


def test_another_damaged_file_is_named_and_nothing_is_changed(tmp_path):
    store = Store()
    publisher = opened(client(store), tmp_path / "run")
    write_steps(tmp_path / "run", 2, 4)
    publisher.publish()
    del store.objects[next(key for key in store.objects if "/files/metrics.jsonl" in key[1])]
    with pytest.raises(Missing, match=r"gs://bucket/run is damaged: metrics\.jsonl of the run cannot be read"):
        opened(client(store), tmp_path / "again")


@pytest.mark.parametrize("file", ["metrics.jsonl", "checkpoints/00000004/state", "rollouts/index.json"])
def test_a_file_that_was_written_on_after_its_commit_is_cut_and_stands_in_for_a_lost_object(tmp_path, file):
    store, run = Store(), tmp_path / "run"
    publisher = opened(client(store), run)
    write_steps(run, 2, 4)
    (run / "rollouts").mkdir()
    (run / "rollouts" / "index.json").write_text("rows")
    publisher.publish()
    before = contents(run)
    del store.objects[next(key for key in store.objects if f"/files/{file}" in key[1])]
    with open(run / file, "ab") as target:
        target.write(b"what a killed process wrote behind it")
    opened(client(store), run).publish()
    assert contents(run) == before
    opened(client(store), tmp_path / "again")
    assert contents(tmp_path / "again") == before


def test_a_copy_with_other_bytes_stays_where_nothing_goes_on_without_the_file(tmp_path):
    store, run = Store(), tmp_path / "run"
    publisher = opened(client(store), run)
    write_steps(run, 2, 4)
    publisher.publish()
    del store.objects[next(key for key in store.objects if "/files/metrics.jsonl" in key[1])]
    (run / "metrics.jsonl").write_text("Row 0, by hand")
    with pytest.raises(Missing, match="Nothing was changed"):
        opened(client(store), run)
    assert (run / "metrics.jsonl").read_text() == "Row 0, by hand"


def test_a_run_whose_commit_was_removed_is_refused_at_its_start(served):
    with bucket_run.open_run_folder("gs://bucket/run") as folder:
        write_step(folder.path, 1)
    del served.objects["bucket", "run/run.json"]
    before = {key for key in served.objects if "lock" not in key[1]}
    with (
        pytest.raises(bucket_run.ForeignFolder, match=r"holds files of a run, and run\.json.* was removed"),
        bucket_run.open_run_folder("gs://bucket/run"),
    ):
        raise AssertionError("the run was opened as a new one")
    assert {key for key in served.objects if "lock" not in key[1]} == before
    with pytest.raises(bucket_run.ForeignFolder, match=r"run\.json.* was removed"):
        bucket_run.readable("gs://bucket/run")


def test_the_lease_is_exclusive_until_it_stands_still(caplog):
    clock = [1000.0]
    store = Store(now=lambda: clock[0])
    bucket = client(store)
    sleep = lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    first = take_lease(bucket, "lock", "gs://bucket/run", "copy a", seconds=1000, sleep=sleep)

    def beats(seconds):  # the first holder lives
        sleep(seconds)
        data = store.objects["bucket", "lock"][1]
        bucket.put("lock", data + b" ")

    with pytest.raises(RunIsHeld, match="gs://bucket/run is held by process"):
        take_lease(bucket, "lock", "gs://bucket/run", "copy b", seconds=1000, sleep=beats)
    second = take_lease(bucket, "lock", "gs://bucket/run", "copy b", seconds=1000, sleep=sleep)  # it stands still
    assert clock[0] > 2000
    third = take_lease(bucket, "lock", "gs://bucket/run", "copy b", seconds=1000, sleep=None)  # the same local copy
    third.release()
    take_lease(bucket, "lock", "gs://bucket/run", "copy c", seconds=1000, sleep=None).release()  # given back
    for lease in (first, second):
        lease.release()


def test_a_conditional_write_whose_answer_is_lost_is_no_conflict():
    store = Store()
    bucket = client(store)
    lose = [True]
    answer = store.answer

    def losing(*args):
        result = answer(*args)
        if args[0] == "POST" and lose:
            lose.clear()
            return 0, b"", {}
        return result

    store.answer = losing
    assert bucket.put("a", b"mine", if_generation=0).bytes == 4
    with pytest.raises(Conflict):
        bucket.put("a", b"other", if_generation=0)


@pytest.mark.parametrize("size", [0, 9, 1 << 14, 50_001])
def test_crc32c_of_a_bit_by_bit_register(size):
    data = bytes((7 * i + i // 256) % 256 for i in range(size))
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    assert crc32c(data) == value ^ 0xFFFFFFFF
    assert crc32c(data[size // 3 :], crc32c(data[: size // 3])) == crc32c(data)
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32/ISCSI


@pytest.mark.parametrize("bucket", ["my bucket", "b\u00fccket", "b?alt=media", "b#x", "b\n", "b%2F"])
def test_an_address_of_no_bucket_is_refused_without_a_request(bucket):
    with pytest.raises(ValueError, match="a bucket's name has letters, digits"):
        paths.readable(f"gs://{bucket}/run")


@pytest.mark.parametrize("name", ["a\nb", "a\n", "a\r", "\udcff"])
def test_an_address_of_no_object_is_refused_without_a_request(name):
    with pytest.raises(ValueError, match="a name in a bucket is UTF-8, without line breaks"):
        paths.readable(f"gs://bucket/{name}")
    assert split_address("gs:/b-1_c.d/a b?c#d%/\u00fc/") == ("b-1_c.d", "a b?c#d%/\u00fc")


@pytest.mark.parametrize("text", ["two minutes", "0", "-1", "nan"])
def test_a_deadline_that_is_no_number_of_seconds_is_refused_by_name(text):
    with pytest.raises(ValueError, match=f"JRL_BUCKET_SECONDS is '{text}'; it must be a number of seconds above 0"):
        Bucket("b", environment={"JRL_BUCKET_SECONDS": text})
    Bucket("b", environment={"JRL_BUCKET_SECONDS": ""})


def test_refusals_name_the_permission_the_bucket_and_the_endpoint():
    store = Store()
    store.forbidden.add("bucket")
    with pytest.raises(BucketError, match=r"gs://bucket/run: no permission \(403"):
        client(store).get("run")
    store = Store(buckets=())
    with pytest.raises(BucketError, match="bucket does not exist"):
        list(client(store).list("run/"))
    silent = Store()
    silent.answer = lambda *request: (0, b"", {})
    with pytest.raises(BucketError, match=r"http://stand-in did not do GET within 0 s .ConnectionResetError"):
        client(silent, deadline_seconds=0).get("run")


def test_a_token_that_has_expired_is_not_taken_for_a_missing_role():
    expired = Store()
    expired.answer = lambda *request: (401, b'{"error": {"message": "Invalid Credentials"}}', {})
    with pytest.raises(BucketError, match=r"accept the token \(401 Invalid Credentials\).*OAUTH_ACCESS_TOKEN") as error:
        client(expired).get("run")
    assert "roles/" not in str(error.value)


def test_files_and_folders_are_copied_once_for_each_generation(tmp_path, monkeypatch):
    store = Store()
    monkeypatch.setenv("JRL_BUCKET_COPIES", str(tmp_path / "copies"))
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "a-secret")
    put = client(store).put
    put("data/rows.jsonl", b"a row")
    put("model/config.json", b"{}")
    put("model/sub/part", b"x" * 3000)
    store.composed.add("model/sub/part")  # without MD5
    with serving(store) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        rows = paths.readable("gs:/bucket/data/rows.jsonl")  # as pathlib writes it
        assert (rows.name, rows.read_bytes()) == ("rows.jsonl", b"a row")
        model = paths.readable("gs://bucket/model")
        assert {name: (model / name).stat().st_size for name in paths.files_below(model)} == {
            "config.json": 2,
            "sub/part": 3000,
        }
        assert store.tokens == {None, "Bearer a-secret"}
        assert not [f for f in (tmp_path / "copies").rglob("*") if f.is_file() and b"a-secret" in f.read_bytes()]
        local_copies.forget_copies()
        put("data/rows.jsonl", b"another")
        assert paths.readable("gs://bucket/data/rows.jsonl").read_bytes() == b"another"
        local_copies.forget_copies()
        key = ("bucket", "data/rows.jsonl")
        store.objects[key] = (9999, b"rotten", 0.0)
        store._md5 = lambda data: "bm90IGl0"
        with pytest.raises(BucketError, match="other bytes than its hash says"):
            paths.readable("gs://bucket/data/rows.jsonl")
        with pytest.raises(BucketError, match="no such file"):
            paths.readable("gs://bucket/nothing")
        with pytest.raises(BucketError, match=r"no such file.*; a \* stands for files on this machine only"):
            paths.readable("gs://bucket/data/*.jsonl")
    with pytest.raises(ValueError, match="S3"):
        paths.readable("s3://bucket/a")


def test_a_complete_copy_is_read_by_several_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("JRL_BUCKET_COPIES", str(tmp_path))
    monkeypatch.setattr(local_copies, "_in_use", {})
    blocked = fcntl.flock

    def flock(lock, kind):  # a lock that would be awaited forever
        blocked(lock, kind | fcntl.LOCK_NB)

    monkeypatch.setattr(fcntl, "flock", flock)
    filled = []
    copy = lambda state, endpoint="http://a": local_copies.complete_copy(
        Bucket("b", endpoint=endpoint, environment={}), "x", state, lambda folder: filled.append(folder)
    )
    place = copy("1")
    other_process, local_copies._in_use = local_copies._in_use, {}
    assert copy("1") == copy("1") == place and len(filled) == 1
    assert list(local_copies._in_use) == [place]  # one descriptor, however often it is asked for
    os.close(local_copies._in_use.pop(place))
    copy("2")
    assert place.exists()  # the other one reads it
    os.close(other_process.pop(place))
    copy("2")
    assert not place.exists() and len(filled) == 2
    copy("2", "http://another")  # of the same name, and not the same bucket
    assert len(filled) == 3
    halves = [place.with_name("of another.filling"), place.with_name(f"{local_copies.key_of('3')}.filling")]
    for half in halves:  # left by processes that were killed
        half.mkdir()
        (half / "part").write_bytes(b"half")
    assert list(copy("3").iterdir()) == [] and not any(half.exists() for half in halves)


@pytest.mark.parametrize("secret", ["ya29.se\ncret", "ya29 secret", "ya29.secr\u00e9t", " "])
def test_what_is_no_token_is_refused_and_not_quoted(secret):
    with pytest.raises(credentials.NoCredentials, match="GOOGLE_OAUTH_ACCESS_TOKEN holds no token") as raised:
        credentials.token_source({"GOOGLE_OAUTH_ACCESS_TOKEN": secret}, is_google=True)
    assert "ya29" not in str(raised.value)


def test_blanks_around_a_token_are_taken_away():
    assert credentials.token_source({"GOOGLE_OAUTH_ACCESS_TOKEN": " ya29.a\n"}, is_google=True)() == "ya29.a"


class MetadataServer:
    """Answers what `answers` holds, one by one: an error, bytes, or a token and its seconds."""

    def __init__(self, answers):
        self.answers = answers

    def open(self, request, timeout):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, bytes):
            return io.BytesIO(answer)
        return io.BytesIO(json.dumps({"access_token": answer[0], "expires_in": answer[1]}).encode())


NO_TOKENS = (
    b"<html>log in</html>", b"{}", b"[]", b"null", b'{"access_token": ""}', b'{"access_token": null}',
    b'{"access_token": "ya29 a"}', b'{"access_token": "ya29", "expires_in": NaN}', b"[" * 100_000,
)  # fmt: skip


@pytest.fixture
def metadata(monkeypatch, tmp_path):
    """Yields (answers, clock, token source) of a machine with a metadata server."""
    answers, clock = [], [0.0]
    monkeypatch.setattr(credentials.urllib.request, "build_opener", lambda *_: MetadataServer(answers))
    monkeypatch.setattr(credentials, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    return answers, clock, credentials.token_source({"CLOUDSDK_CONFIG": str(tmp_path)}, is_google=True)


def test_a_token_that_cannot_be_renewed_serves_until_its_end(metadata):
    answers, clock, token = metadata
    answers += [("first", 3600)]
    assert token() == "first"
    clock[0] = 3400.0  # less than 300 s before its end
    answers += [TimeoutError()]
    assert token() == "first"
    clock[0] += 9.0
    assert token() == "first"  # nobody is asked again so soon
    clock[0] += 2.0
    answers += [urllib.error.HTTPError("", 503, "unavailable", None, None)]
    assert token() == "first"
    clock[0] = 3601.0
    answers += [urllib.error.URLError(ConnectionResetError())]
    with pytest.raises(credentials.NoTokenYet, match="ConnectionResetError"):
        token()
    for unreadable in NO_TOKENS:
        answers += [unreadable]
        with pytest.raises(credentials.NoTokenYet, match=r"^the metadata server gave no token \(UnreadableAnswer\)$"):
            token()
    answers += [("second", 3600)]
    assert token() == "second" and not answers


def test_a_machine_without_an_account_is_told_so_at_once(metadata):
    answers, _, token = metadata
    not_found = urllib.error.HTTPError("", 404, "none", None, None)
    wrong_address = ValueError("unknown url type")  # of a proxy, say
    for answer in (urllib.error.URLError(socket.gaierror()), not_found, wrong_address, *NO_TOKENS):
        answers += [answer]
        with pytest.raises(credentials.NoCredentials, match="no account"):
            token()


def test_a_request_waits_for_its_token(metadata):
    answers, _, token = metadata
    store = Store()
    bucket = client(store)
    bucket._token = token
    answers += [TimeoutError(), ("first", 3600)]
    bucket.put("a", b"1")
    request, seen = bucket._request, []

    def unauthorized_once(method, url, data, headers):
        seen.append(headers["Authorization"])
        if len(seen) == 1:
            raise urllib.error.HTTPError(url, 401, "expired", None, io.BytesIO())
        return request(method, url, data, headers)

    bucket._request = unauthorized_once
    answers += [TimeoutError(), ("second", 3600)]
    assert bucket.get("a")[0] == b"1"
    assert seen == ["Bearer first", "Bearer second"] and not answers


def test_every_run_works_in_a_folder_of_its_own_name(tmp_path, monkeypatch):
    monkeypatch.setenv("JRL_BUCKET_COPIES", str(tmp_path))
    store, names = Store(), []
    with serving(store) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        for address in ("gs://bucket/a/my run", "gs://bucket/b/my run", "gs:/bucket/a/my run/"):
            with bucket_run.open_run_folder(address) as folder:
                names.append(folder.path.name)
    assert names[0] == names[2] != names[1]
    assert all(re.fullmatch(r"my_run-[0-9a-f]{12}", name) for name in names)


def test_links_pipes_and_files_that_vanish_do_not_end_a_run(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    publisher = opened(client(Store()), folder)
    write_step(folder, 1)
    plain = bucket_run.committed_files(folder)
    (tmp_path / "elsewhere").write_text("not of the run")
    (folder / "wandb").mkdir()
    (folder / "wandb" / "latest-run").symlink_to(folder / "checkpoints")
    (folder / "wandb" / "debug.log").symlink_to(tmp_path / "elsewhere")
    (folder / "wandb" / "gone.log").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / "pipe")
    assert bucket_run.committed_files(folder) == plain
    every = lambda folder: [*plain, "wandb/vanished", "wandb/debug.log"]  # as another thread may change them
    monkeypatch.setattr(bucket_run, "committed_files", every)
    publisher.publish()
    assert set(publisher._commit.files) == set(plain)
    monkeypatch.setattr(bucket_run, "committed_files", lambda folder: [*plain, "checkpoints/00000001/vanished"])
    with pytest.raises(FileNotFoundError):
        publisher.publish()


@pytest.mark.parametrize("name", [b"p\xff.txt", b"two\nlines"])
def test_a_file_whose_name_no_object_can_have_is_left_out_with_a_warning(tmp_path, caplog, name):
    folder = tmp_path / "run"
    publisher = opened(client(Store()), folder)
    write_step(folder, 1)
    plain = bucket_run.committed_files(folder)
    (folder / "wandb").mkdir()
    (folder / "wandb" / os.fsdecode(name)).write_text("")
    for _ in range(2):
        publisher.publish()
    assert set(publisher._commit.files) == set(plain)
    said = f"{os.fsdecode(b'wandb/' + name)!a} is not committed: an object in a bucket cannot have"
    assert [text for text in caplog.messages if text.startswith(said)] == caplog.messages != []


def test_a_run_that_is_refused_for_what_is_there_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("JRL_BUCKET_COPIES", str(tmp_path))
    store = Store()
    client(store).put("model/config.json", b"{}")
    with serving(store) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        with (
            pytest.raises(bucket_run.ForeignFolder, match=r"already contains config\.json"),
            bucket_run.open_run_folder("gs://bucket/model"),
        ):
            raise AssertionError("the folder of a model was opened as a run")
        assert list(store.objects) == [("bucket", "model/config.json")]
        client(store).put("model/lock", b"left by an earlier version")
        assert (bucket_run.readable("gs://bucket/model") / "config.json").read_bytes() == b"{}"
        client(store).put("begun/lock", b"")
        with pytest.raises(ValueError, match="has committed nothing"):
            bucket_run.readable("gs://bucket/begun")


@pytest.fixture
def served(tmp_path, monkeypatch):
    with addressed(tmp_path / "copies", monkeypatch) as store:
        yield store


def test_a_teacher_in_a_bucket_is_read_from_its_copy(served, monkeypatch):
    put = client(served).put
    put("run/manifest.json", b"{}")
    put("bare/config.json", b"{}")
    config = lambda path: types.SimpleNamespace(teacher=types.SimpleNamespace(path=path))
    with pytest.raises(ValueError, match="gs://bucket/run is a run"):
        teacher.teacher_shape(config("gs://bucket/run"))
    for check in ("check_folder", "check_length", "teacher_shape"):
        monkeypatch.setattr(teacher, check, lambda *_: None)
    bare = config("gs://bucket/bare")
    bare.data, bare.sampler = types.SimpleNamespace(prompt_length=1), types.SimpleNamespace(completion_length=1)
    with pytest.raises(ValueError, match="gs://bucket/bare holds no tokenizer"):
        teacher.check_teacher(bare, None, {"tokenizers": {}})


def test_a_resume_reads_the_shape_of_its_published_model_and_not_the_weights(served, tmp_path):
    put = client(served).put
    put("model/config.json", b"{}")
    put("model/weights", b"x" * 1000)
    begun = tmp_path / "run" / identity.PUBLISHED
    begun.mkdir(parents=True)
    (begun / "config.json").write_text("{}")
    identity.refuse_another_model(tmp_path / "run", "gs://bucket/model")
    assert ("GET", "model/weights") not in served.requests
    identity.refuse_another_model(tmp_path / "run", "gs://bucket/gone")  # as a local folder that is gone
    (begun / "config.json").write_text("another")
    with pytest.raises(identity.RefusedIdentity, match=r"gs://bucket/model/config\.json differs"):
        identity.refuse_another_model(tmp_path / "run", "gs://bucket/model")


def test_objects_that_are_listed_without_a_hash_are_compared_all_the_same(served, tmp_path):
    bucket = client(served)
    bucket.put("model/a", b"with md5")
    bucket.put("model/b", b"composed")
    served.composed.add("model/b")
    served.listed_without_hash = True
    folder = paths.readable("gs://bucket/model")
    assert {name: (folder / name).read_bytes() for name in "ab"} == {"a": b"with md5", "b": b"composed"}
    listed = list(bucket.list("model/"))
    served.objects["bucket", "model/b"] = (listed[1].generation, b"otherone", 0.0)
    served._crc = lambda data: "AAAAAA=="
    with pytest.raises(BucketError, match="other bytes than its hash says"):
        bucket.download(listed[1], tmp_path / "b")
    bucket.put("model/a", b"replaced")
    with pytest.raises(Missing, match="was replaced while it was read"):
        bucket.download(listed[0], tmp_path / "a")


def test_a_write_is_compared_by_crc32c_where_it_has_no_md5():
    store = Store()
    store.composed.add("a")
    assert client(store).put("a", b"mine").md5 is None
    store._crc = lambda data: "AAAAAA=="
    with pytest.raises(BucketError, match="stored with other bytes"):
        client(store).put("a", b"mine")


def test_a_commit_whose_answer_was_lost_is_gone_on_from(tmp_path):
    store, folder = Store(), tmp_path / "run"
    publisher = opened(client(store, deadline_seconds=0.0), folder)
    write_step(folder, 1)
    publisher.publish()
    answer = store.answer

    def lost(method, url, *rest):  # a commit is written, and nobody hears of it
        result = answer(method, url, *rest)
        return (0, b"", {}) if method == "POST" and "run.json" in url else result

    store.answer = lost
    write_step(folder, 2)
    with pytest.raises(BucketError, match="did not do POST"):
        publisher.publish()
    store.answer = answer
    write_step(folder, 3)
    publisher.publish()
    used = {f"run/files/{name}" for name in publisher._commit.objects()}
    assert {name for _, name in store.objects if "/files/" in name} == used
    second = opened(client(store), tmp_path / "again")
    assert contents(tmp_path / "again") == after_step(tmp_path, 3)
    write_step(folder, 4)
    with pytest.raises(bucket_run.LeaseLost):
        publisher.publish()
    assert second._commit.life == 2


def test_signals_are_watched_while_the_folder_is_opened(monkeypatch):
    before, seen = signal.getsignal(signal.SIGTERM), []

    @contextlib.contextmanager
    def opening(address, processes):  # which may wait for a lock for a minute
        seen.append(signal.getsignal(signal.SIGTERM))
        raise RuntimeError("as far as needed")
        yield

    monkeypatch.setattr(api, "open_run_folder", opening)
    monkeypatch.setattr(api, "load_config", lambda *_: (None, None))
    monkeypatch.setattr(api, "refuse_overflow", lambda *_: None)
    monkeypatch.setattr(api, "use_compile_cache", lambda: None)
    for start in (api.train, lambda *args, **named: next(api.steps(*args, **named))):
        with pytest.raises(RuntimeError, match="as far"):
            start("tiny", run="gs://bucket/run")
    assert len(seen) == 2 and before not in seen and signal.getsignal(signal.SIGTERM) == before


def test_a_clone_of_the_local_copies_has_another_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "lock").touch()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first, again, clone = (bucket_run._name_of_copy(tmp_path / folder / "lock") for folder in "aab")
    assert first == again != clone
    if os.path.exists("/proc/sys/kernel/random/boot_id"):  # of another machine, and of another start of this one
        assert first.startswith(open("/proc/sys/kernel/random/boot_id").read().strip())


def test_a_lock_that_was_removed_is_written_again(caplog):
    store = Store()
    lease = take_lease(client(store), "lock", "gs://bucket/run", "a copy", seconds=0.08)
    before = store.objects.pop(("bucket", "lock"))
    end = time.monotonic() + 20
    while ("bucket", "lock") not in store.objects and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(RunIsHeld):  # as before
        take_lease(client(store), "lock", "gs://bucket/run", "another", seconds=1.0)
    assert not lease.lost() and "was removed; it is written again" in caplog.text
    owner = lambda stored: json.loads(stored[1])["owner"]
    assert owner(store.objects["bucket", "lock"]) == owner(before)
    lease.release()


def test_a_reader_keeps_what_it_has_of_a_run_that_goes_on(tmp_path):
    store, folder, steps = Store(), tmp_path / "run", iter(range(2, 6))
    publisher = opened(client(store), folder)
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "large").write_bytes(b"x" * 100)
    write_step(folder, 1)
    publisher.publish()
    reader = client(store)
    commit, generation = bucket_run.read_commit(reader, "run")
    request, lock = reader._request, threading.Lock()

    def meanwhile(method, url, data, headers):  # a step is done whenever the state of one is asked for
        with lock:
            if "state" in url and (step := next(steps, None)) is not None:
                write_step(folder, step)
                publisher.publish()
        return request(method, url, data, headers)

    reader._request = meanwhile
    (tmp_path / "read").mkdir()
    store.requests.clear()
    bucket_run.fetch_newest(reader, "run", tmp_path / "read", commit, generation)
    expected = after_step(tmp_path, 5) | {"rollouts/large": b"x" * 100}
    assert contents(tmp_path / "read") == expected
    fetched = [name for method, name in store.requests if method == "GET"]
    assert sum("rollouts/large" in name for name in fetched) == 1 and sum("state" in name for name in fetched) == 5


def test_a_commit_that_failed_is_not_tried_again_at_the_end(served):
    with pytest.raises(BucketError, match="no permission"), bucket_run.open_run_folder("gs://bucket/run") as folder:
        (folder.path / "manifest.json").write_text("the run")
        served.forbidden.add("bucket")
        folder.publish()
    assert sum(method == "POST" and "/files/" in name for method, name in served.requests) == 1
    served.forbidden.clear()
    with pytest.raises(KeyError), bucket_run.open_run_folder("gs://bucket/run") as folder:
        (folder.path / "manifest.json").write_text("the run")
        raise KeyError("of the run itself")
    assert "manifest.json" in bucket_run.read_commit(client(served), "run")[0].files


def test_what_needs_no_weights_fetches_none(served):
    put = client(served).put
    put("model/config.json", b'{"model_type": "gpt2"}')
    put("model/tokenizer.model", b"pieces")
    put("model/model.safetensors", b"x" * 1000)
    assert published.read_config("gs://bucket/model") == {"model_type": "gpt2"}
    assert published.companions_of("gs://bucket/model") == {"tokenizer.model": b"pieces"}
    assert ("GET", "model/model.safetensors") not in served.requests
    put("model/model.safetensors", b"y" * 1000)
    with pytest.raises(Missing, match=r"was replaced|No such object"):  # weights are those that the config came with
        paths.readable("gs://bucket/model")


def test_a_later_process_that_reads_the_config_first_keeps_the_copy_of_the_weights(served, monkeypatch):
    put = client(served).put
    put("model/config.json", b"{}")
    put("model/model.safetensors", b"x" * 1000)

    def read_in_a_process():
        monkeypatch.setattr(local_copies, "_in_use", {})
        local_copies.forget_copies()
        paths.readable_without_weights("gs://bucket/model")
        assert (paths.readable("gs://bucket/model") / "model.safetensors").read_bytes() == b"x" * 1000
        for lock in local_copies._in_use.values():
            os.close(lock)

    for _ in range(3):
        read_in_a_process()
    assert served.requests.count(("GET", "model/model.safetensors")) == 1


def test_a_death_while_a_copy_is_removed_leaves_none_that_looks_complete(tmp_path, monkeypatch):
    monkeypatch.setenv("JRL_BUCKET_COPIES", str(tmp_path))
    monkeypatch.setattr(local_copies, "_in_use", {})
    fill = lambda folder: [(folder / name).write_bytes(b"whole") for name in ("a", "b")]
    copy = lambda state: local_copies.complete_copy(Bucket("b", endpoint="http://a", environment={}), "x", state, fill)
    os.close(local_copies._in_use.pop(copy("1")))
    rmtree = shutil.rmtree

    def dies_in(folder, **options):
        if os.path.exists(folder):
            os.remove(os.path.join(folder, "a"))
            raise Died
        rmtree(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", dies_in)
    with pytest.raises(Died):
        copy("2")
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert {file.name for file in copy("1").iterdir()} == {"a", "b"}


def test_a_copy_that_another_process_has_removed_meanwhile_is_passed_over(tmp_path, monkeypatch):
    for name in ("used", "removed", "unused"):
        (tmp_path / name).mkdir()
    flock = fcntl.flock

    def after_another_process(lock, operation):
        flock(lock, operation)
        shutil.rmtree(tmp_path / "removed", ignore_errors=True)

    monkeypatch.setattr(fcntl, "flock", after_another_process)
    local_copies._remove_unused(tmp_path, tmp_path / "used")
    assert [folder.name for folder in tmp_path.iterdir() if folder.is_dir()] == ["used"]


def test_a_full_disk_of_local_copies_is_named_with_what_chooses_another(served, tmp_path, monkeypatch):
    client(served).put("model/config.json", b"{}")
    with bucket_run.open_run_folder("gs://bucket/run") as folder:
        (folder.path / "manifest.json").write_text("the run")
    shutil.rmtree(tmp_path / "copies")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said = f"No space left on device for local copies .* JRL_BUCKET_COPIES .*{re.escape(str(tmp_path / 'copies'))}"
    with pytest.raises(OSError, match=said):
        paths.readable("gs://bucket/model")
    with pytest.raises(OSError, match=said), bucket_run.open_run_folder("gs://bucket/run"):
        pass
    assert {file.name.rpartition(".")[2] for file in (tmp_path / "copies").rglob("*") if file.is_file()} == {"lock"}


def test_bytes_and_names_of_a_copy_are_durable_before_it_is_there(served, monkeypatch):
    client(served).put("model/sub/config.json", b"{}")
    done = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    paths.readable("gs://bucket/model")
    synced = done[: done.index("rename")]
    assert [sum(path.endswith(end) for path in synced) for end in ("/config.json", "/sub", ".filling")] == [1, 1, 1]


def test_a_run_in_a_bucket_is_begun_from(served, tmp_path):
    with bucket_run.open_run_folder("gs://bucket/run") as folder:
        for step in (1, 2):
            write_step(folder.path, step)
            folder.publish()
    origin = begin_from.origin_of(tmp_path, begin_from.Request("gs:/bucket/run/"))
    assert (origin.run, origin.step) == ("gs://bucket/run", 2)
    assert begin_from.origin_of(tmp_path, begin_from.Request("gs:/bucket/run/", 2))[:2] == ("gs://bucket/run", 2)
    with pytest.raises(ValueError, match=r"^gs://bucket/run has no checkpoint of step 1; there are 2"):
        begin_from.origin_of(tmp_path, begin_from.Request("gs:/bucket/run/", 1))
    assert (origin.folder / "checkpoints" / "00000002" / "state").read_bytes() == bytes([2]) * 1000
    manifest = {"format": 1, "identity": {}, "environment": {}, **begin_from.manifest_entry(origin)}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    again = begin_from.origin_of(tmp_path, None)
    assert again[:2] == origin[:2] and again.folder == origin.folder
    assert begin_from.origin_of(tmp_path, begin_from.Request("gs://bucket/run"))[:2] == origin[:2]
    with pytest.raises(identity.RefusedIdentity, match="did not begin with the weights of"):
        begin_from.origin_of(tmp_path, begin_from.Request("gs://bucket/other"))


def test_an_object_that_the_service_would_decompress_is_refused_at_once(served, monkeypatch):
    client(served).put("data/rows.jsonl", b"as it is compressed")
    item = served._item
    monkeypatch.setattr(served, "_item", lambda *place: {**item(*place), "contentEncoding": "gzip"})
    with pytest.raises(BucketError, match=r"data/rows.jsonl is stored compressed \(Content-Encoding: gzip\)"):
        paths.readable("gs://bucket/data/rows.jsonl")
    with pytest.raises(BucketError, match="upload it without compression"):
        paths.readable("gs://bucket/data")


def test_adapters_gates_pieces_and_inspected_rows_may_be_in_a_bucket(served):
    put = client(served).put
    put("adapter/adapter_config.json", b'{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        peft.read("gs://bucket/adapter")
    put("gate.safetensors", save({"layers.0.weight": np.ones((1, 3), np.float32), "layers.0.bias": np.ones(1)}))
    gate = Gate(path="gs://bucket/gate.safetensors")
    assert [weight.shape for weight, _ in load_gate(gate, ["good"], 3)] == [(1, 3)]
    put("pieces.model", b"no model")
    with pytest.raises(ValueError, match=r"gs://bucket/pieces\.model"):
        pieces.build(pieces.SentencePiece(path="gs://bucket/pieces.model"), ())
    put("rows.jsonl", b'{"prompt": "1 + 1 =", "answer": "2"}\n')
    assert len(inspect_data.open_file("gs:/bucket/rows.jsonl", None, None, None).source) == 1


def test_runs_in_a_bucket_are_compared_by_what_is_small_of_them(served, tmp_path, capsys):
    for seed in (0, 1):
        with bucket_run.open_run_folder(f"gs://bucket/run{seed}") as folder:
            written = write_run(tmp_path / f"run{seed}", rows=rewards(0.5, 0.25 + seed), seed=seed)
            write_step(folder.path, 1)
            for name in COMPARED:
                shutil.copy(written / name, folder.path / name)
    assert cli.main(["compare", "gs://bucket/run0", "gs://bucket/run1", "--json", "--out", str(tmp_path / "out")]) == 0
    (row,) = json.loads(capsys.readouterr().out)["metrics"]["reward/mean"]
    assert [(run["run"], run["score"]) for run in row["runs"]] == [
        ("gs://bucket/run0", 0.25),
        ("gs://bucket/run1", 1.25),
    ]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<tr><td>run0</td>" in page and "buckets" not in page
    read = {
        name.split("/files/")[1].split("/")[0]
        for method, name in served.requests
        if "/files/" in name and method == "GET"
    }
    assert read == {*COMPARED}
    assert cli.main(["compare", "gs://bucket/run0", "gs://bucket/run0"]) == 2
    assert "a run is given twice: gs://bucket/run0" in capsys.readouterr().err
    client(served).put("model/config.json", b"{}")
    assert cli.main(["compare", "gs://bucket/run0", "gs://bucket/model"]) == 2
    assert "gs://bucket/model is not a run: there is no run.json" in capsys.readouterr().err


def test_a_bundle_in_a_bucket_is_read_alone(served):
    with bucket_run.open_run_folder("gs://bucket/run") as folder:
        write_step(folder.path, 1)
        (folder.path / "fault").mkdir()
        (folder.path / "fault" / "fault.json").write_text("{}")
    place = fault.readable_bundle("gs://bucket/run/fault")
    assert contents(place.parent) == {"fault/fault.json": b"{}"}
    with pytest.raises(ValueError, match="gs://bucket/run is not the bundle of a run; give gs://BUCKET/NAME/fault"):
        fault.readable_bundle("gs://bucket/run")


def test_messages_name_the_address_and_what_is_committed(served, tmp_path, capsys):
    with pytest.raises(identity.RefusedIdentity, match=r"^gs://bucket/run did not begin with the weights of other"):
        (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "identity": {}, "environment": {}}))
        begin_from.origin_of(tmp_path, begin_from.Request("other"), "gs://bucket/run")
    job = types.SimpleNamespace(address="gs://bucket/run", location="gs://bucket/run", folder=tmp_path)
    assert records.to_bring_back(job).startswith("bring back an earlier version of gs://bucket/run/run.json and the ob")
    job.address = None
    assert records.to_bring_back(job) == f"put a good copy of one back under {tmp_path / 'checkpoints'}"
    args = cli.parser_of("train").parse_args(["tiny", "--run", "gs://bucket/run"])
    assert exits.last_checkpoint(args) == ""
    with bucket_run.open_run_folder("gs://bucket/run") as folder:
        args.run, args.committed = folder.path, folder.committed
        assert exits.last_checkpoint(args) == "Nothing was committed."
        write_step(folder.path, 1)
        assert exits.last_checkpoint(args) == "Nothing was committed."  # it is on this machine only
        folder.publish()
        assert exits.last_checkpoint(args) == "Last checkpoint: step 1."


@pytest.mark.parametrize(
    "cut",
    [
        b'{"name": "a", "gen', b"<html>try later</html>", b"\xff", b"null", b"[]", b"{}", b'{"error": "log in"}',
        b'{"kind": "storage#objects", "items": null}', b'{"kind": "storage#objects", "items": [{"name": "a"}]}',
        b'{"name": "a", "generation": null, "size": "1", "updated": "2026-01-01T00:00:00Z"}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_request_whose_answer_is_not_what_was_asked_for_is_repeated(cut):
    bucket, asked = client(Store()), []
    whole = bucket._request

    def request(*given):
        body, headers = whole(*given)
        asked.append(given)
        return (cut if len(asked) % 2 else body), headers

    bucket._request = request
    assert bucket.put("a", b"x", if_generation=0).bytes == 1
    assert bucket.stat("a").name == "a" and [one.name for one in bucket.list("")] == ["a"]
    assert len(asked) >= 6


def test_a_page_in_place_of_an_objects_bytes_is_not_taken_for_them():
    bucket, asked = client(Store()), []
    bucket.put("a", b"x")
    whole = bucket._request

    def request(*given):
        asked.append(given)
        return whole(*given) if len(asked) > 1 else (b"<html>log in</html>", {"Date": "Sun, 29 Nov 2026 02:00:00 GMT"})

    bucket._request = request
    assert bucket.get("a")[0] == b"x" and len(asked) == 2


def test_a_service_that_never_answers_in_json_is_named():
    store = Store()
    client(store).put("a", b"x")
    bucket = client(store, deadline_seconds=0.1)
    whole = bucket._request
    bucket._request = lambda *given: (b"<html>", whole(*given)[1])
    with pytest.raises(BucketError, match=r"did not do GET within 0 s \(its answer cannot be read: Expecting"):
        bucket.stat("a")
