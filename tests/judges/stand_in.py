"""A judge for tests and examples: a local HTTP server that speaks the OpenAI API, fails on purpose, and gives the same
text the same score. What goes wrong is drawn from a seed, the request and how often it was asked.

    python tests/judges/stand_in.py --port 8123 --errors 0.2 --timeouts 0.05
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable

PAGE = b"<!doctype html><html><body>Welcome to nginx!</body></html>"


def draw(*names: object) -> float:
    """Returns a number in [0, 1) that the names decide."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:6]) / 2**48


def digits(text: str) -> float:
    """Returns 1 where a text holds a digit, else the share that a hash of it draws, below one half."""
    return 1.0 if re.search("[0-9]", text) else draw(text) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """Shares of the requests that go wrong. At most `most` times each, but for `broken`, which always do."""

    errors: float = 0.0  # status 500 or 503
    timeouts: float = 0.0  # no answer for `hang_seconds`
    pages: float = 0.0  # HTML with status 200
    halves: float = 0.0  # half of the JSON
    out_of_range: float = 0.0
    chatter: float = 0.0  # text around the answer
    broken: float = 0.0  # requests whose every answer is out of range
    most: int = 3
    hang_seconds: float = 3.0
    requests_per_second: float | None = None  # above it: 429 with Retry-After
    latency_seconds: float = 0.0


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # connections that come at once

    def handle_error(self, request, client_address) -> None:
        """A client that has waited long enough hangs up. Anything else is an error of ours, and is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class StandIn:
    """The server. `address` is what Judge.address takes. Must be closed."""

    def __init__(
        self,
        faults: Faults = Faults(),
        *,
        seed: int = 0,
        grade: Callable[[str], float] = digits,
        key: str | None = None,
        port: int = 0,
    ):
        self.faults, self.seed, self.grade, self.key = faults, seed, grade, key
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.asked: collections.Counter[bytes] = collections.Counter()  # by body
        self.answered: collections.Counter[bytes] = collections.Counter()  # with a valid answer
        self.said: collections.Counter[str] = collections.Counter()  # what, by kind
        self.bodies: list[dict] = []
        self.under_way = self.most_under_way = 0
        self.busy_seconds = 0.0  # of all requests, as if one after another
        self._tokens, self._at = 0.0, time.monotonic()
        self.server = Server(("127.0.0.1", port), self._handler())
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                length = int(self.headers["Content-Length"])
                body = self.rfile.read(length)
                if len(body) < length:  # whoever asked was killed
                    self.close_connection = True
                    return
                with contextlib.suppress(OSError):
                    stand_in.answer(self, body)

            def log_message(self, *_: object) -> None:
                pass

            def reply(self, status: int, data: bytes, kind: str = "application/json", **headers: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(data)

        return Handler

    def answer(self, handler, body: bytes) -> None:
        began = time.monotonic()
        with self.lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            wait = self._limited()
            if wait is None:
                times = self.asked[body]
                self.asked[body] += 1
                self.bodies.append(json.loads(body))
        try:
            if handler.path != "/v1/chat/completions":
                return self._say("missing", handler, 404, PAGE, "text/html")
            if self.key is not None and handler.headers["Authorization"] != f"Bearer {self.key}":
                said = {"error": {"message": f"Incorrect API key: {handler.headers['Authorization']}"}}
                return self._say("key", handler, 401, json.dumps(said).encode())
            if wait is not None:
                return self._say("limited", handler, 429, b"{}", Retry_After=f"{wait:.3f}")
            self.closing.wait(self.faults.latency_seconds)
            self._judge(handler, body, times)
        finally:
            with self.lock:
                self.under_way -= 1
                self.busy_seconds += time.monotonic() - began

    def _judge(self, handler, body: bytes, times: int) -> None:
        f = self.faults
        u = draw(self.seed, body, times) if times < f.most else 1.0
        kinds = ("errors", "timeouts", "pages", "halves", "out_of_range", "chatter")
        kind = "answer"
        for name in kinds:
            if u < getattr(f, name):
                kind = name
                break
            u -= getattr(f, name)
        if draw(self.seed, body, "broken") < f.broken:
            kind = "out_of_range"
        content = self.content(json.loads(body), out_of_range=kind == "out_of_range")
        if kind == "chatter":
            content = f"Sure! Here is my verdict:\n{content}"
        message = {"role": "assistant", "content": content}
        usage = {"prompt_tokens": len(body) // 4, "completion_tokens": len(content) // 4}
        data = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}).encode()
        if kind == "errors":
            return self._say(kind, handler, 503 if u < f.errors / 2 else 500, b'{"error": "overloaded"}')
        if kind == "timeouts":
            with self.lock:
                self.said[kind] += 1
            self.closing.wait(f.hang_seconds)
            handler.close_connection = True
            return None
        if kind == "pages":
            return self._say(kind, handler, 200, PAGE, "text/html")
        if kind == "halves":
            return self._say(kind, handler, 200, data[: len(data) // 2])
        with self.lock:
            self.answered[body] += kind == "answer"
        return self._say(kind, handler, 200, data)

    def _say(
        self, what: str, handler, status: int, data: bytes, kind: str = "application/json", **headers: str
    ) -> None:
        with self.lock:
            self.said[what] += 1
        handler.reply(status, data, kind, **headers)

    def _limited(self) -> float | None:
        """Returns the seconds to wait where this request is one too many, else None."""
        rate = self.faults.requests_per_second
        if rate is None:
            return None
        now = time.monotonic()
        self._tokens = min(rate, self._tokens + (now - self._at) * rate)
        self._at = now
        if self._tokens < 1:
            return (1 - self._tokens) / rate
        self._tokens -= 1
        return None

    def content(self, request: dict, *, out_of_range: bool = False) -> str:
        """Returns the answer to a question, as JSON: it reads the question as a judge is to, by its markers."""
        system, user = (message["content"] for message in request["messages"])
        asked = system.rsplit("Reply with one JSON object", 1)[1]
        if '"winner"' in asked:
            first, second = (self.grade(quoted(system, user, name)) for name in ("first", "second"))
            winner = "first" if first > second else "second" if second > first else "tie"
            return json.dumps({"reason": "compared", "winner": "both" if out_of_range else winner})
        answer = quoted(system, user, "answer")
        if '"score"' in asked:
            low, high = map(float, re.search(r"<number from (\S+) to (\S+)>", asked).groups())
            score = high + 1 if out_of_range else low + (high - low) * self.grade(answer)
            return json.dumps({"reason": "graded", "score": score})
        items = re.findall(r"^(item_\d+): (.*)$", system, re.MULTILINE)
        said = {key: draw(text, answer) < 0.5 for key, text in items}
        return json.dumps({"reason": "checked", **({key: "maybe" for key in said} if out_of_range else said)})


def quoted(system: str, user: str, name: str) -> str:
    """Returns what is quoted under a name, by the marker that the first message gives."""
    mark = re.search("such as <user ([0-9a-f]{16})>", system)[1]
    opening, closing = f"<{name} {mark}>\n", f"\n</{name} {mark}>"
    assert user.count(opening) == user.count(closing) == 1, "a marker was forged"
    return user.split(opening, 1)[1].split(closing, 1)[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--errors", type=float, default=0.0)
    parser.add_argument("--timeouts", type=float, default=0.0)
    parser.add_argument("--requests-per-second", type=float, default=None)
    parser.add_argument("--latency-seconds", type=float, default=0.05)
    given = vars(parser.parse_args())
    port, seed = given.pop("port"), given.pop("seed")
    with StandIn(Faults(**given), seed=seed, port=port) as server:
        print(f"listening on {server.address}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
