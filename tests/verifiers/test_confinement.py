"""What a worker may not do to the trainer, to later items, or leave behind: attacks from inside a user's verifier."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import resource
import signal
import sys
import tempfile
from types import SimpleNamespace

import pytest
from verifier_fakes import example, row

from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import confine
from jrl.tasks.verifiers import pool as pool_module
from jrl.tasks.verifiers.pool import Item, Pool
from jrl.tasks.verifiers.source import PartSource

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")

# Each returns 1 where it had its way. {pid} is the trainer, {address} and {path} hold a secret of it. Where nothing
# denies them they do no harm: limits, priorities and schedules are set to what they are, and of the trainer alone.
ATTACKS = """
import ctypes, fcntl, json, os, resource, signal, socket, stat, struct, sys, time

libc = ctypes.CDLL(None, use_errno=True)
PID, ADDRESS, PATH, SECRET = {pid}, {address}, {path!r}, {secret!r}


def _called(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return 1.0


def _pipe():
    return next(int(fd) for fd in os.listdir("/proc/self/fd") if "socket:" in os.path.realpath("/proc/self/fd/" + fd))


def good(completion, example): return 1.0
def owns_descriptor(completion, example): fcntl.fcntl(_pipe(), fcntl.F_SETOWN, PID); return 1.0
def owns_descriptor_by_struct(completion, example):
    fcntl.fcntl(_pipe(), 15, struct.pack("ii", 1, PID)); return 1.0
def chooses_signal(completion, example): fcntl.fcntl(_pipe(), 10, int(signal.SIGUSR1)); return 1.0
def owns_socket(completion, example): fcntl.ioctl(_pipe(), 0x8901, struct.pack("i", PID)); return 1.0
def locks_file(completion, example):
    fcntl.flock(os.open(sys.executable, os.O_RDONLY), fcntl.LOCK_SH); return 1.0
def locks_record(completion, example):
    fcntl.lockf(os.open(sys.executable, os.O_RDONLY), fcntl.LOCK_SH); return 1.0
def reads_memory(completion, example):
    with open("/proc/%d/mem" % PID, "rb", buffering=0) as memory:
        memory.seek(ADDRESS)
        return float(memory.read(len(SECRET)) == SECRET.encode())
def reads_environment(completion, example): return float(len(open("/proc/%d/environ" % PID, "rb").read()) > 0)
def reads_run_file(completion, example): return float(open(PATH).read() == SECRET)
def reads_passwords(completion, example): return float(len(open("/etc/shadow").read()) > 0)
def reads_descriptors(completion, example): return float(len(os.listdir("/proc/%d/fd" % PID)) > 0)
def reads_keys(completion, example): return float(os.listdir("/etc/ssl/private") is not None)
def reads_disks(completion, example):
    for name in os.listdir("/dev"):
        node = os.path.join("/dev", name)
        if stat.S_ISBLK(os.stat(node).st_mode):
            try:
                return float(len(open(node, "rb", buffering=0).read(16)) > 0)
            except OSError:
                pass
    raise PermissionError("no disk can be read")
def limits_parent(completion, example): resource.prlimit(PID, resource.RLIMIT_NOFILE, {files}); return 1.0
def limits_template(completion, example):
    resource.prlimit(os.getppid(), resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)); return 1.0
def raises_own_limits(completion, example):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); return 1.0
def slows_parent(completion, example): os.setpriority(os.PRIO_PROCESS, PID, {priority}); return 1.0
def pins_parent(completion, example): os.sched_setaffinity(PID, {processors}); return 1.0
def schedules_parent(completion, example):
    os.sched_setscheduler(PID, {schedule}, os.sched_param(0)); return 1.0
def starves_disk(completion, example): return _called(libc.syscall({ioprio_set}, 1, PID, 0))
def shares_memory(completion, example): return _called(libc.shmget(0x6A726C, 4096, 0o1600))
def shares_semaphore(completion, example): return _called(libc.semget(0x6A726C, 1, 0o1600))
def opens_system_v_queue(completion, example): return _called(libc.msgget(0x6A726C, 0o1600))
def opens_queue(completion, example):
    return _called(libc.mq_open(b"/jrl-worker", os.O_CREAT | os.O_RDWR, 0o600, None))
def opens_shared_memory(completion, example):
    return _called(libc.shm_open(b"/jrl-worker", os.O_CREAT | os.O_RDWR, 0o600))
def changes_times(completion, example): os.utime(PATH, (0, 0)); return 1.0
def counts_events(completion, example):
    counter = ctypes.create_string_buffer(struct.pack("II", 1, 112), 112)
    return _called(libc.syscall({perf_event_open}, counter, 0, -1, -1, 0))


def _answer(**fields):
    item = sys._getframe(1)
    while "item" not in item.f_locals:
        item = item.f_back
    frame = dict(token=item.f_locals["item"]["token"], status=0, reward=1.0, detail="", spans=[], changed=False)
    body = json.dumps(frame | fields).encode()
    os.write(_pipe(), len(body).to_bytes(4, "big") + body)
    time.sleep(100)
def forges_large(completion, example): _answer(reward=1e29)
def forges_nan(completion, example): _answer(reward=float("nan"))
def forges_infinity(completion, example): _answer(reward=float("inf"))
def forges_padding(completion, example): _answer(status=10, reward=None)
def forges_infra_error(completion, example): _answer(status=9, reward=None)
def forges_truth(completion, example): _answer(status=True)
def forges_text(completion, example): _answer(detail="x" * 2000)
def forges_spans(completion, example): _answer(spans=[[1, 5.0]])


def replaces_judge(completion, example):
    from jrl.tasks.verdict import Status, Verdict
    import jrl.tasks.verifiers.fork_server as server
    main = sys.modules["__main__"]
    for module in (server, main):
        module.judge = lambda *a: Verdict(Status.CORRECT, 0.75)
    return 0.0
def replaces_code(completion, example):
    from jrl.tasks.verifiers import judge
    judge.to_verdict.__code__ = (lambda *a: __import__("jrl.tasks.verdict").tasks.verdict.Verdict(0, 0.75)).__code__
    return 0.0
def replaces_builtin(completion, example):
    import builtins
    builtins.float = lambda x: 0.75
    return 0.0
def sets_trace(completion, example): sys.settrace(lambda *a: None); return 0.0
def sets_alarm(completion, example):
    signal.signal(signal.SIGALRM, lambda *a: os._exit(3)); signal.setitimer(signal.ITIMER_REAL, 0.05); return 0.0
def sets_environment(completion, example): os.environ["LEFT"] = "1"; return 0.0
def changes_folder(completion, example): os.chdir("/"); return 0.0
seen = 0
def counts(completion, example):
    global seen
    seen += 1
    return float(os.getpid())


def _functions():
    return {{name: thing for name, thing in list(globals().items()) if callable(thing) and not name.startswith("_")}}
VERIFIERS = _functions()
"""
NUMBERS = {"x86_64": {"ioprio_set": 251, "perf_event_open": 298}, "aarch64": {"ioprio_set": 30, "perf_event_open": 241}}
SECRET = "a secret of the trainer's"
NEEDS_OWN_USER = ("reads_run_file", "reads_descriptors")  # a worker of the trainer's user reads that user's files


def part(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(SECRET)
    path.chmod(0o600)
    held = ctypes.create_string_buffer(SECRET.encode())
    numbers = NUMBERS.get(os.uname().machine)
    if numbers is None:
        pytest.skip("no filter on this machine")
    source = ATTACKS.format(
        pid=os.getpid(), address=ctypes.addressof(held), path=str(path), secret=SECRET,
        files=resource.getrlimit(resource.RLIMIT_NOFILE), priority=os.getpriority(os.PRIO_PROCESS, 0),
        processors=os.sched_getaffinity(0), schedule=os.sched_getscheduler(0), **numbers
    )  # fmt: skip
    return PartSource("attacks.py", source), held


def names_of(prefixes):
    lines = [line.removeprefix("def ").split("(")[0] for line in ATTACKS.splitlines() if line.startswith("def ")]
    return [name for name in lines if name.startswith(prefixes)]


def verdicts_of(source, rows, items, *, workers=1, **limits):
    limits = {"cpu_seconds": 2.0, "wall_seconds": 10.0, "memory_mb": 512} | limits
    with Pool([row(name) for name in rows], (source,), workers=workers, **limits) as pool:
        verdicts = pool.collect(pool.submit([Item("4", example(), (place,)) for place in items]))
        return [verdict for (verdict,) in verdicts], pool.layers, pool.counts


@pytest.fixture
def surroundings():
    """The trainer's limits, priorities and signals, and what is shared, are afterwards what they were."""
    heard = []
    handlers = {
        number: signal.signal(number, lambda n, _: heard.append(n)) for number in (signal.SIGUSR1, signal.SIGIO)
    }

    def state():
        shared = [open(f"/proc/sysvipc/{kind}").read() for kind in ("shm", "sem", "msg")]
        limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)]
        return limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), os.sched_getscheduler(0), [
            [line.split()[0] for line in table.splitlines()] for table in shared
        ]  # fmt: skip

    before = state()
    yield
    after = state()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert heard == []
    assert not os.path.exists("/dev/shm/jrl-worker")
    assert after == before


def test_a_worker_reaches_neither_the_trainer_nor_what_outlives_it(tmp_path, surroundings, trials):
    source, _held = part(tmp_path)
    names = [name for name in names_of(("owns", "chooses", "locks", "reads", "limits", "raises", "slows", "pins"))]
    names += names_of(("schedules", "starves", "shares", "opens", "changes_times", "counts_events"))
    trials(len(names))
    verdicts, layers, _ = verdicts_of(source, names, range(len(names)))
    if "seccomp" not in layers:
        pytest.skip(f"this machine confines workers by {layers} only")
    if "own user" not in layers:
        verdicts = [verdict for name, verdict in zip(names, verdicts) if name not in NEEDS_OWN_USER]
    had_its_way = {n: v for n, v in zip(names, verdicts) if v.status is not Status.VERIFIER_ERROR}
    assert not had_its_way
    assert all("PermissionError" in v.detail or "ValueError" in v.detail or "OSError" in v.detail for v in verdicts)


def test_a_worker_of_root_is_a_user_of_its_own_that_owns_no_process(tmp_path):
    if os.getuid() != 0:
        pytest.skip("the trainer is not root")
    look = PartSource(
        "look.py",
        """
import json, os
from jrl.tasks.verdict import Status, Verdict
def look(completion, example):
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    ids = [os.getresuid(), os.getresgid(), os.getgroups(), int(status["CapEff"], 16), int(status["CapPrm"], 16)]
    return Verdict(Status.CORRECT, 1.0, json.dumps(ids))
VERIFIERS = {"look": look}
""",
    )
    verdicts, layers, _ = verdicts_of(look, ["look"], [0] * 2)
    if "own user" not in layers:
        pytest.skip(f"this machine confines workers by {layers} only")
    users, groups, others, *capabilities = json.loads(verdicts[0].detail)
    assert len(set(users)) == 1 and users[0] not in (0, 65534) and groups == users and others == []
    private = not all(confine._readable_by_others(pathlib.Path(folder)) for folder in sys.path if os.path.isabs(folder))
    assert capabilities == ([confine.CAP_DAC_READ_SEARCH] * 2 if private else [0, 0])


@pytest.fixture
def reachable():
    """A folder that everybody can reach, which pytest's are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield pathlib.Path(folder)


LOOK = """
import json, os, sys
from jrl.tasks.verdict import Status, Verdict
def tried(call):
    try:
        call()
        return "read"
    except OSError as error:
        return type(error).__name__
def look(completion, example):
    import imported_late, zoneinfo, pwd, ssl, hashlib, random, decimal, multiprocessing
    zoneinfo.ZoneInfo("Europe/Paris"), pwd.getpwuid(0), ssl.create_default_context(), hashlib.sha256(b"")
    found = {path: tried(lambda: open(path).read()) for path in PATHS}
    found["status"] = tried(lambda: open("/proc/self/status").read())
    return Verdict(Status.CORRECT, 1.0, json.dumps(list(found.values())))
VERIFIERS = {"look": look}
"""


@pytest.mark.parametrize("layout", ["run", "runs/mine"])
def test_a_worker_of_root_imports_what_only_root_can_and_reads_no_run(tmp_path, monkeypatch, layout):
    if os.getuid() != 0 or not confine._landlock_version():
        pytest.skip("the trainer is not root, or the kernel has no Landlock")
    project = tmp_path / "project"  # a folder of root's on sys.path, with the run in it
    project.mkdir(mode=0o700)
    (project / "package").mkdir()
    monkeypatch.syspath_prepend(project)
    paths = {
        "package/data.txt": "read", "notes.txt": "read", ".ssh": "PermissionError",
        f"{layout}/config.json": "PermissionError", f"{layout}/checkpoints/1": "PermissionError",
        "runs/other/config.json": "PermissionError" if layout != "run" else "read",
    }  # fmt: skip
    for name in paths:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("a text")
    (project / "imported_late.py").write_text("")
    source = PartSource("look.py", LOOK.replace("PATHS", repr([str(project / name) for name in paths])))
    limits = {"cpu_seconds": 4.0, "wall_seconds": 20.0, "memory_mb": 512}
    with Pool([row("look")], (source,), workers=1, private=[project / layout], **limits) as pool:
        ((verdict,),) = pool.collect(pool.submit([Item("4", example(), (0,))]))
    assert {"own user", "landlock"} <= {*pool.layers}
    assert json.loads(verdict.detail) == [*paths.values(), "read"]


def test_what_workers_may_read_is_found_once_and_before_they_are_forked(monkeypatch):
    if os.getuid() != 0 or not confine._landlock_version():
        pytest.skip("the trainer is not root, or the kernel has no Landlock")
    source = PartSource(
        "look.py",
        """
import json, os
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import confine
from jrl.tasks.verifiers.contract import Verifier
import dataclasses
FOUND, find = [], confine.readable_paths
confine._readable_by_others = lambda path: False
confine.readable_paths = lambda *given: FOUND.append(os.getpid()) or find(*given)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    weight: float = 1.0
def look(config, completion, example):
    own = [os.getpid(), os.getppid(), len(os.listdir("/proc/self/fd")) > 0]
    return Verdict(Status.CORRECT, 1.0, json.dumps([FOUND, *own]))
VERIFIERS = {"look": Verifier(Look, look, single_use=True)}
""",
    )
    verdicts, layers, _ = verdicts_of(source, ["look"], [0] * 3)
    assert "own user" in layers
    found = [json.loads(verdict.detail) for verdict in verdicts]
    assert len({worker for _, worker, _, _ in found}) == 3  # each has a process, and its own /proc, for itself
    assert all(finders == [template] and reads for finders, _, template, reads in found)


def test_what_may_be_read_leaves_out_keys_disks_and_processes(reachable, monkeypatch):
    (reachable / "lib" / "inside").mkdir(parents=True)
    (reachable / "lib" / ".hidden").mkdir()
    (reachable / "run").mkdir()
    (reachable / "link").symlink_to("/etc")
    own = {*map(os.path.realpath, confine.SYSTEM)}
    places = dict(confine.readable_paths([str(reachable)], [str(reachable / "run")]))
    assert places[str(reachable)] == confine.READ_FOLDER  # names, and no file
    assert "/usr/local/share" in confine.SYSTEM
    later = dict(confine.readable_paths([str(reachable)], [str(reachable / "later")]))  # it is not there yet
    assert later[str(reachable)] == confine.READ_FOLDER
    assert places[str(reachable / "lib")] == confine.LANDLOCK_READ  # a dot is looked for in folders of modules alone
    assert not {str(reachable / "run"), str(reachable / "link"), "/etc", "/proc", "/dev", "/usr"} & places.keys()
    every = dict(confine.readable_paths(["/"], []))
    assert every["/"] == confine.READ_FOLDER and not {"/etc", "/proc", "/dev", "/sys"} & every.keys()
    assert {path for path in every if path.startswith(("/etc/", "/proc/", "/dev/"))} <= own


def test_others_can_import_where_every_folder_on_the_way_lets_them(reachable):
    top, readable = reachable / "top", confine._readable_by_others
    (top / "lib").mkdir(parents=True, mode=0o755)
    archive = top / "lib" / "modules.zip"
    archive.write_bytes(b"")
    archive.chmod(0o644)
    link = reachable / "link"
    link.symlink_to(top / "lib")
    for mode, reached in ((0o755, True), (0o700, False), (0o754, False), (0o711, True)):
        top.chmod(mode)
        assert [readable(place) for place in (top / "lib", link, archive)] == [reached] * 3, oct(mode)
    top.chmod(0o755)
    archive.chmod(0o600)
    assert not readable(archive) and readable(top / "nowhere")
    (top / "lib").chmod(0o711)
    assert not readable(top / "lib")


@pytest.mark.parametrize(
    ("layers", "root", "missing"),
    [
        (["rlimits", "own user", "landlock", "seccomp"], True, []),
        (["rlimits", "seccomp"], False, []),
        (["rlimits", "no capabilities", "landlock", "seccomp"], True, ["a user of their own"]),
        (["rlimits", "landlock"], False, ["a filter on system calls"]),
        (["rlimits"], True, ["a filter on system calls", "a user of their own"]),
    ],
)
def test_a_layer_that_is_missing_is_named(layers, root, missing):
    assert confine.missing_layers(layers, root=root) == missing


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("landlock", [0, 1, 7])  # versions of the kernel's; 0: it has none
@pytest.mark.parametrize("private", [True, False])  # Python is where only root can read
@pytest.mark.parametrize("refused", ["nothing", "users", "capabilities", "calls", "restriction", "everything"])
def test_what_a_kernel_refuses_is_a_layer_less_and_named(monkeypatch, root, landlock, private, refused):
    """Every kernel is simulated: nothing here confines the process of the tests."""
    refuses, rights, readable = lambda what: refused in (what, "everything"), [], []

    def set_capabilities(header, data):
        if refuses("capabilities"):
            return -1
        rights.append(any(data))
        return 0

    def set_user(*ids):
        if refuses("users"):
            raise PermissionError(1, "Operation not permitted")

    def restrict(folders):
        readable.append(folders)
        return landlock > 0 and not refuses("restriction")

    libc = SimpleNamespace(
        prctl=lambda *_: 0, capset=set_capabilities, syscall=lambda number, *_: landlock or -1
    )  # the version is asked for by the one call that is made
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    for name in ("setresuid", "setresgid", "setgroups"):
        monkeypatch.setattr(os, name, set_user)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(confine, "filter_calls", lambda: not refuses("calls"))
    monkeypatch.setattr(confine, "_readable_by_others", lambda path: not private)
    monkeypatch.setattr(confine, "_restrict_by_landlock", restrict)

    layers = confine.confine(512, confine.read_access([]))
    restricted = landlock > 0 and not refuses("restriction")
    own_user = root and refused in ("nothing", "calls", "restriction") and (landlock > 0 or not private)
    assert ("own user" in layers, "landlock" in layers) == (own_user, restricted)
    missing = ["a filter on system calls"] * refuses("calls") + ["a user of their own"] * (root and not own_user)
    assert confine.missing_layers(layers, root=root) == missing
    # The right to read what only root can is kept where Landlock bounds it, and nowhere else.
    assert (readable[0] is not None) == (root and private and landlock > 0)
    if own_user:
        assert rights[-1] == (private and restricted)


def test_workers_without_a_layer_are_warned_of_once(caplog):
    pool_module._warn_of([])
    assert not caplog.records
    pool_module._warn_of(["a filter on system calls", "a user of their own"])
    assert "run without a filter on system calls and a user of their own on this machine" in caplog.text


def test_the_trainer_takes_no_verdict_that_no_judge_gives(tmp_path, trials):
    source, _held = part(tmp_path)
    names = names_of("forges")
    trials(len(names))
    verdicts, *_ = verdicts_of(source, ["good", *names], [0, *range(1, len(names) + 1), 0])
    assert [verdicts[0].reward, verdicts[-1].reward] == [1.0, 1.0]
    assert {n: v.status for n, v in zip(names, verdicts[1:])} == dict.fromkeys(names, Status.CRASH)
    assert all(v.reward is None and v.spans == () for v in verdicts[1:-1])


@pytest.mark.parametrize(
    "name",
    [
        "replaces_judge",
        "replaces_code",
        "replaces_builtin",
        "sets_trace",
        "sets_alarm",
        "sets_environment",
        "changes_folder",
    ],
)
def test_a_worker_that_is_not_what_it_was_scores_nothing_more(tmp_path, name):
    source, _held = part(tmp_path)
    verdicts, _, counts = verdicts_of(source, ["good", name], [0, 1, 0, 0])
    assert [v.reward for v in (verdicts[0], *verdicts[2:])] == [1.0] * 3
    assert (counts["workers_changed"], counts["workers_started"]) == (1, 2)


def test_a_worker_that_only_counts_is_used_again(tmp_path):
    source, _held = part(tmp_path)
    verdicts, _, counts = verdicts_of(source, ["counts"], [0] * 5)
    assert len({v.reward for v in verdicts}) == 1 and counts["workers_started"] == 1


def test_a_verifier_that_runs_programs_gets_a_new_worker_for_each_completion(tmp_path):
    source = PartSource(
        "programs.py",
        """
import dataclasses, os
from jrl.tasks.verifiers.contract import Verifier
@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    weight: float = 1.0
VERIFIERS = {"Programs": Verifier(Programs, lambda config, completion, example: float(os.getpid()), single_use=True)}
""",
    )
    verdicts, *_ = verdicts_of(source, ["Programs"], [0] * 5, workers=2)
    assert len({v.reward for v in verdicts}) == 5
