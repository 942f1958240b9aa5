"""The process that first opens an untrusted vocabulary: it can be killed without ending the run.

A file may crash the library that reads it, take all memory, or contain a pattern that does not terminate on some text.
Every trial runs in a fork of this process with its own limits. It opens the file and encodes a few texts that are hard
for patterns and normalizers. The caller then opens a file that passes.
Run as a file (`python -P jrl/tasks/tokenizers/trial.py SECONDS MEGABYTES`); it imports nothing from jrl.
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
    """Returns a function that encodes a text. Raises the library's exception for a file that it cannot read."""
    if form == "model":
        return sentencepiece.SentencePieceProcessor(model_proto=data).encode
    tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def confine(seconds, megabytes, size):
    with open("/proc/self/statm") if sys.platform == "linux" else open("/dev/null") as file:
        used = int((file.read().split() or ["0"])[0]) * resource.getpagesize()
    bounds = {resource.RLIMIT_AS: used + (megabytes << 20) + 64 * size, resource.RLIMIT_FSIZE: 0}
    for kind, bound in (bounds | {resource.RLIMIT_CPU: math.ceil(seconds), resource.RLIMIT_CORE: 0}).items():
        try:
            resource.setrlimit(kind, (bound, bound))
        except (ValueError, OSError):  # macOS has no bound on address space
            pass


def attempt(form, data):
    """Returns the problem with a file, "" if there is none. If the library rejects the file, the result is "" too: the
    caller then gets the library's error when it opens the file."""
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
    """Returns the result of `attempt` in a fork, or how the fork died."""
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
