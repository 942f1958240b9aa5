"""The process that renders chat templates. A template is a program that came with a model, so it is not trusted.

It runs in jinja2's immutable sandbox, without a loader, and this process can be killed: a request that exceeds its CPU
time or memory may end the process, not the run. Requests and replies are JSON, one per line.
Run as a file (`python -P jrl/tasks/tokenizers/render.py SECONDS MEGABYTES CHARACTERS`); it imports nothing from jrl.

In addition to the sandbox, templates get what published templates expect: `raise_exception`, `strftime_now`, a `tojson`
without HTML escaping, loop controls, and `generation` blocks, which are rendered as their body.
"""

import datetime
import functools
import json
import math
import resource
import sys

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class Broken(Exception):
    """The template does not compile, whatever the conversation."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text in training pipelines; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def raise_exception(message):
    raise Refused(str(message))


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals["raise_exception"] = raise_exception


@functools.lru_cache(maxsize=8)
def compiled(source):
    return ENVIRONMENT.from_string(source)


def render(source, context, date, most):
    """Returns the text, at most `most` characters. Raises Broken if the template does not compile, Refused if its text
    is longer or it calls raise_exception, and any exception that the template causes."""
    try:
        template = compiled(source)
    except jinja2.TemplateError as error:
        raise Broken(f"{type(error).__name__}: {error}") from error
    today = datetime.datetime.fromisoformat(date)
    pieces, length = [], 0
    for piece in template.generate({**context, "strftime_now": lambda form: today.strftime(form)}):
        length += len(piece)
        if length > most:
            raise Refused(f"its text is longer than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def answer(template, context, date, most):
    try:
        return {"text": render(template, context, date, most)}
    except Broken as error:
        return {"failed": str(error)[:2000], "broken": True}
    except Refused as error:
        return {"failed": str(error)}
    except MemoryError:
        return {"failed": "it needs more memory than a template may"}
    except RecursionError:
        return {"failed": "it calls itself without end"}
    except Exception as error:  # a faulty template can raise any exception
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}


def allow(seconds):
    """Limits this process to `seconds` more of CPU time; then the system kills it."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds), resource.RLIM_INFINITY))


def confine(megabytes):
    with open("/proc/self/statm") if sys.platform == "linux" else open("/dev/null") as file:
        used = int((file.read().split() or ["0"])[0]) * resource.getpagesize()
    bounds = {resource.RLIMIT_AS: used + (megabytes << 20), resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for kind, bound in (bounds | {resource.RLIMIT_NPROC: 0}).items():
        try:
            resource.setrlimit(kind, (bound, bound))
        except (ValueError, OSError):  # macOS has no bound on address space
            pass


def main():
    seconds, megabytes, most = (int(word) for word in sys.argv[1:])
    confine(megabytes)
    for line in sys.stdin.buffer:
        request, answers = json.loads(line), []
        for context in request["contexts"]:
            allow(seconds)
            answers.append(answer(request["template"], context, request["date"], most))
        sys.stdout.buffer.write(json.dumps({"answers": answers}).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
