"""The process in which the vocabulary of somebody else is opened first: it can be killed, and a run cannot.

A file may crash the library that reads it, take all memory, or hold a pattern that never ends on some text. Every trial
is a fork of this process with bounds of its own, opens the file, and encodes a few texts that patterns and normalizers
find hard. What survives that is opened again by whoever asked.
Run as a file (`python -P jrl/tasks/tokenizers/trial.py SECONDS MEGABYTES`); it imports nothing of jrl.
"""

import json
import math
import os
import resource
import signal
import sys

try:
    import tokenizers
except ImportError:
    tokenizers = None
import sentencepiece

MAX_IDS_A_CHARACTER = 64
PROBES = (
    "x", "The quick brown fox, 1234567 times.\n", "\u00e9\u65e5\u672c\U0001f389\ufdfa", "a" * 4000, " " * 4000,
    "aA1 \n" * 800, "1" * 4000, "!" * 4000, "a" * 2000 + "!", " a" * 2000 + "\n",
)  # fmt: skip


def ids_of(form, data):
    """Returns what encodes a text. Raises whatever the library raises for a file that it does not read."""
    if form == "model":
        return sentencepiece.SentencePieceProcessor(model_proto=data).encode
    tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def confine(seconds, megabytes, size):
    with open("/proc/self/statm") if sys.platform == "linux" else open("/dev/null") as file:
        held = int((file.read().split() or ["0"])[0]) * resource.getpagesize()
    bounds = {resource.RLIMIT_AS: held + (megabytes << 20) + 64 * size, resource.RLIMIT_FSIZE: 0}
    for kind, bound in (bounds | {resource.RLIMIT_CPU: math.ceil(seconds), resource.RLIMIT_CORE: 0}).items():
        try:
            resource.setrlimit(kind, (bound, bound))
        except (ValueError, OSError):  # macOS has no bound on address space
            pass


def attempt(form, data):
    """Returns what is wrong with a file, "" for nothing. That a library refuses it in its own words is left to whoever
    opens it next."""
    try:
        encode = ids_of(form, data)
    except MemoryError:
        return "it takes more memory than a vocabulary should"
    except Exception:
        return ""
    except BaseException as error:  # a panic of the library
        return f"{type(error).__name__}: {error}"
    for probe in PROBES:
        try:
            count = len(encode(probe))
        except MemoryError:
            return f"it takes more memory than {len(probe)} characters should"
        except Exception:
            continue
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        if count > MAX_IDS_A_CHARACTER * (len(probe) + 1):
            return f"it makes {count} ids of {len(probe)} characters"
    return ""


def forked(form, data, seconds, megabytes):
    """Returns what `attempt` does in a fork of its own, or how that died."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            confine(seconds, megabytes, len(data))
            os.write(writing, attempt(form, data)[:2000].encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as answer:
        problem = answer.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        why = f"{seconds} seconds of processor time" if number in (signal.SIGXCPU, signal.SIGKILL) else None
        return f"opening it was stopped at {why}" if why else f"opening it ended in {signal.Signals(number).name}"
    return problem or ("opening it could not be tried" if status else "")


def main():
    seconds, megabytes = int(sys.argv[1]), int(sys.argv[2])
    for line in sys.stdin.buffer:
        request = json.loads(line)
        data = sys.stdin.buffer.read(request["bytes"])
        reply = {"problem": forked(request["form"], data, seconds, megabytes)}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
