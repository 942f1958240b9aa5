"""What the verifier tests share: an example, and verifiers that misbehave in every way there is."""

from __future__ import annotations

from jrl.tasks.example import Example, Message
from jrl.tasks.verifiers import VerifierSpec
from jrl.tasks.verifiers.source import PartSource


def example(answer: str | None = "4", **fields) -> Example:
    return Example(**{"id": "e", "messages": (Message("user", "2 + 2?"),), "answer": answer, **fields})


HOSTILE = PartSource(
    "hostile.py",
    """
import ctypes, os, random, signal, socket, sys, threading, time

def good(completion, example): return float(completion == example.answer)
def draws(completion, example): return 1 + random.random()
def sleeps(completion, example): time.sleep(1000)
def busy(completion, example):
    while True: pass
def ignores_signals(completion, example):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 30))
    while True: pass
def stops_itself(completion, example): os.kill(os.getpid(), signal.SIGSTOP)
def big_integer(completion, example): return float(3 ** (10 ** 9) > 0)
def exits(completion, example): os._exit(0)
def leaves(completion, example): sys.exit(0)
def segfaults(completion, example): ctypes.string_at(0)
def aborts(completion, example): os.abort()
def recurses(completion, example): return recurses(completion, example)
def grows(completion, example): return float(len(bytearray(10 << 30)))
def forks(completion, example):
    while True: os.fork()
def threads(completion, example): threading.Thread(target=time.sleep, args=(100,)).start()
def connects(completion, example): socket.socket()
def writes(completion, example): open("/tmp/jrl-verifier-wrote", "w").write("x")
def kills_parent(completion, example): os.kill(os.getppid(), signal.SIGKILL)
def prints(completion, example):
    print("x" * (1 << 24)); sys.stderr.write("y" * (1 << 24)); os.write(1, b"z" * (1 << 24))
    return 1.0
def prints_for_ever(completion, example):
    while True: print("x" * (1 << 20))
def _pipe():
    return next(int(fd) for fd in os.listdir("/proc/self/fd") if "socket:" in os.path.realpath("/proc/self/fd/" + fd))
def garbage(completion, example):
    os.write(_pipe(), b"\\x00\\x00\\x00\\x05hello"); return 1.0
def floods(completion, example):
    os.write(_pipe(), b"\\xff" * 4096); time.sleep(100)
def closes(completion, example):
    os.close(_pipe()); time.sleep(100)
def forges(completion, example):
    import json
    body = json.dumps({"token": 1, "status": 0, "reward": 1.0, "detail": ""}).encode()
    os.write(_pipe(), len(body).to_bytes(4, "big") + body); return 0.0
def raises(completion, example): raise RuntimeError("on purpose")
def interrupts(completion, example): raise KeyboardInterrupt
def says_nan(completion, example): return float("nan")
def says_nothing(completion, example): return None
def says_text(completion, example): return "1.0"
def says_true(completion, example): return True
def says_complex(completion, example): return 1 + 0j

VERIFIERS = {name: thing for name, thing in list(globals().items()) if callable(thing) and not name.startswith("_")}
""",
)


def row(name: str, **fields) -> VerifierSpec:
    return VerifierSpec(name, fields)
