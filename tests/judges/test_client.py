"""Many requests at once against the stand-in: each is settled once, and each failure has a name."""

from __future__ import annotations

import collections
import http.client
import json
import logging
import re
import socket
import ssl
import struct
import threading
import time

import pytest
from stand_in import Faults, StandIn

from jrl.tasks.example import Example, Message
from jrl.tasks.judges import Grade, Judge, open_judges, preflight
from jrl.tasks.judges import client as client_module
from jrl.tasks.judges.api import Endpoint
from jrl.tasks.judges.cache import AnswerCache
from jrl.tasks.judges.client import Client
from jrl.tasks.judges.failures import Failure, JudgeError, ServerClosed
from jrl.tasks.judges.grade import questions
from jrl.tasks.judges.judge import body_of, limits_of, numbers_of
from jrl.tasks.judges.rate_limit import RateLimit
from jrl.tasks.stopping import StopRequested

EXAMPLE = Example("e", (Message("user", "Say something."),))


def config(address, **fields):
    quick = {"backoff_seconds": 0.01, "timeout_seconds": 1.0, "concurrency": 8}
    return Judge(address=address, model="stand-in", **{**quick, **fields})


def client_of(judge, key=None, cache=None):
    limit = RateLimit(judge.requests_per_second, judge.tokens_per_minute)
    return Client(Endpoint(judge.address, key), lambda text: numbers_of(judge, text), limits_of(judge), limit, cache)


def bodies(judge, texts):
    return [body_of(judge, question.chat) for question in questions(judge.grading, EXAMPLE, texts)]


def asked(server, texts, key=None, cache=None, **fields):
    """Returns (requests, counts) once all are settled."""
    judge = config(server.address, **fields)
    client = client_of(judge, key, cache)
    try:
        requests = client.ask(bodies(judge, texts))
        assert client.wait(requests, 60)
        return requests, client.counts
    finally:
        client.close()


def test_two_hundred_requests_with_errors_timeouts_and_rate_limits_lose_and_double_none(tmp_path):
    texts = [f"text {i}" for i in range(200)]
    faults = Faults(errors=0.2, timeouts=0.05, requests_per_second=300, hang_seconds=2.5)
    with StandIn(faults, seed=1) as server:
        cache = AnswerCache(tmp_path / "answers.jsonl")
        requests, counts = asked(server, texts, cache=cache, concurrency=32, timeout_seconds=2.0)
        assert all(request.settled for request in requests) and {request.problem for request in requests} == {""}
        scores = [json.loads(request.content)["score"] for request in requests]
        assert scores == [10 * server.grade(text) for text in texts]
        assert len(server.answered) == 200 and set(server.answered.values()) == {1}
        said = server.said
        assert min(said["errors"], said["timeouts"], said["limited"]) > 0
        # Every failure was counted, and every other attempt was the answer.
        assert counts[Failure.SERVER_ERROR] == said["errors"] and counts[Failure.TIMEOUT] == said["timeouts"]
        assert counts[Failure.RATE_LIMIT] == said["limited"]
        assert counts["attempts"] == 200 + counts["retries"] == sum(said.values())
        # The stand-in's own count: a quarter of the bytes of each request that it answered.
        assert counts["prompt_tokens"] == sum(len(body) // 4 for body in server.answered)
    cache = AnswerCache(tmp_path / "answers.jsonl")
    assert len(cache) == 200
    cache.close()


def test_answers_on_disk_are_not_asked_for_again_and_equal_requests_are_asked_once(tmp_path):
    with StandIn(Faults(latency_seconds=0.05)) as server:
        cache = AnswerCache(tmp_path / "answers.jsonl")
        requests, counts = asked(server, ["a", "b", "a"], cache=cache)
        assert requests[0] is requests[2] and counts["shared"] == 1 and counts["requests"] == 2
        requests, counts = asked(server, ["b", "a", "c"], cache=AnswerCache(tmp_path / "answers.jsonl"))
        assert counts["cached"] == 2 and counts["attempts"] == 1
        assert [json.loads(r.content)["score"] for r in requests] == [10 * server.grade(text) for text in "bac"]
        assert set(server.asked.values()) == {1}
        with StandIn() as other:  # the same request to another address is another one
            _, counts = asked(other, ["a"], cache=AnswerCache(tmp_path / "answers.jsonl"))
        assert counts["cached"] == 0


@pytest.mark.parametrize(
    ("faults", "failure", "said"),
    [
        (Faults(errors=1.0, most=99), Failure.SERVER_ERROR, "status 50"),
        (Faults(timeouts=1.0, most=99, hang_seconds=0.3), Failure.TIMEOUT, "no answer within 0.1 s"),
        (Faults(pages=1.0, most=99), Failure.HTML, "a web page, not a chat completion: '<!doctype html>"),
        (Faults(halves=1.0, most=99), Failure.MALFORMED_REPLY, "its reply is not JSON"),
        (Faults(out_of_range=1.0, most=99), Failure.OUT_OF_RANGE, "'score' is not in 0 to 10"),
        (Faults(broken=1.0), Failure.OUT_OF_RANGE, "'score' is not in 0 to 10"),
        (Faults(chatter=1.0, most=99), Failure.MALFORMED_ANSWER, "not one JSON object"),
    ],
)
def test_what_goes_wrong_every_time_is_tried_again_then_named_and_never_scored(faults, failure, said, tmp_path):
    with StandIn(faults) as server:
        cache = AnswerCache(tmp_path / "answers.jsonl")
        (request,), counts = asked(server, ["a"], cache=cache, attempts=3, timeout_seconds=0.1)
        assert request.settled and request.content is None
        assert said in request.problem and request.problem.endswith("(attempt 3 of 3)")
        assert counts[failure] == counts["attempts"] == 3 == counts["retries"] + 1
        assert AnswerCache(tmp_path / "answers.jsonl").recall(request.key) is None


@pytest.mark.parametrize("kind", ["errors", "pages", "halves", "out_of_range", "chatter"])
def test_what_goes_wrong_twice_is_asked_a_third_time(kind):
    with StandIn(Faults(**{kind: 1.0}, most=2)) as server:
        (request,), counts = asked(server, ["7"], attempts=3)
        assert json.loads(request.content)["score"] == 10 and counts["attempts"] == 3


def test_a_rejected_request_is_not_tried_again_and_the_key_is_shown_nowhere(caplog, capsys, monkeypatch):
    caplog.set_level(logging.DEBUG)
    secret = "sk-verysecret123"
    with StandIn(key="another") as server:
        (request,), counts = asked(server, ["a"], key=secret)
        assert counts[Failure.REJECTED] == counts["attempts"] == 1
        assert "status 401" in request.problem and "Bearer ***" in request.problem
        monkeypatch.setenv("JUDGE_KEY", secret)
        with pytest.raises(ValueError, match="status 401") as caught:
            preflight(config(server.address, api_key_env="JUDGE_KEY"))
    shown = "".join([request.problem, str(caught.value), caplog.text, *capsys.readouterr(), repr(vars(request))])
    assert secret not in shown and secret not in repr(Endpoint("http://x/v1", secret))
    with StandIn(key=secret) as server:
        (request,), _ = asked(server, ["a"], key=secret)
        assert request.content is not None and secret not in json.dumps(server.bodies)


def test_a_key_that_is_missing_or_no_header_is_refused_without_showing_it(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match=r"the environment variable JUDGE_KEY, which Judge.api_key_env names"):
        preflight(config("http://127.0.0.1:1/v1", api_key_env="JUDGE_KEY"))
    for key in ("", "sk-a b", "sk-\nHost: x", "sk-ü"):
        with pytest.raises(ValueError, match="characters that a header cannot hold") as caught:
            Endpoint("http://x/v1", key)
        assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "localhost:8000/v1",
        "ftp://x/v1",
        "http://",
        "http:///v1",
        "http://x:99999/v1",
        "http://a b/v1",
        "",
        "http://a..b/v1",
        f"http://{'a' * 64}.example/v1",
    ],
)
def test_an_address_that_is_no_url_is_refused(address):
    with pytest.raises(ValueError, match=r"Judge.address is"):
        Endpoint(address, None)


@pytest.mark.parametrize("address", ["http://me:pw@x/v1", "https://x/v1?key=secret", "https://x/v1#secret"])
def test_an_address_that_holds_a_secret_is_refused_without_showing_it(address):
    with pytest.raises(ValueError, match="no user, password or query") as caught:
        Endpoint(address, None)
    assert "secret" not in str(caught.value) and "pw" not in str(caught.value)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


ANSWER = json.dumps({"choices": [{"message": {"content": '{"score": 3}'}}]}).encode()
REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER


def read_request(lines):
    """Returns whether a request came. All of it is read: what is left resets the connection at its end."""
    headers = b"".join(iter(lines.readline, b"\r\n")) if lines.peek(1) else b""
    return bool(headers) and bool(lines.read(int(re.search(rb"(?i)content-length: (\d+)", headers)[1])))


class CountedLimit(RateLimit):
    def __init__(self):
        super().__init__(None, None)
        self.taken = []

    def take(self, now, tokens):
        self.taken.append(tokens)


def test_a_connection_that_the_server_closed_between_two_requests_costs_no_attempt(monkeypatch):
    """Some servers close a connection after every reply and do not say so. The rate limit counts what is sent."""

    def serve():
        for _ in range(4):
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as lines:
                assert read_request(lines)
                connection.sendall(REPLY)

    monkeypatch.setattr(client_module, "REUSE_SECONDS", 60.0)
    monkeypatch.setattr(client_module, "IDLE_CLOSED_SECONDS", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        judge = config(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", concurrency=1, backoff_seconds=60.0)
        limit = CountedLimit()
        client = Client(Endpoint(judge.address, None), json.loads, limits_of(judge), limit, None)
        for text in "abcd":
            (request,) = client.ask(bodies(judge, [text]))
            assert client.wait([request], 20) and request.problem == ""
        client.close()
    assert client.counts["attempts"] == 4 and client.counts["retries"] == client.counts[Failure.CONNECTION] == 0
    assert len(limit.taken) == 7 and set(limit.taken) == {limit.taken[0]}  # the first connection was new


@pytest.mark.parametrize("dies", ["at work", "in its reply"])
def test_a_request_whose_server_dies_at_work_is_a_failed_attempt(dies, monkeypatch):
    """It may be the request that kills it."""
    received = []

    def serve():
        for _ in range(2):
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as lines:
                assert read_request(lines)
                received.append("answered")
                connection.sendall(REPLY)
                if not read_request(lines):
                    return
                received.append("left")
                if dies == "in its reply":
                    connection.sendall(REPLY[:90])
                time.sleep(0.2)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset

    monkeypatch.setattr(client_module, "IDLE_CLOSED_SECONDS", 0.1 if dies == "at work" else 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        judge = config(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", concurrency=1)
        client = client_of(judge)
        for text in "ab":
            requests = client.ask(bodies(judge, [text]))
            assert client.wait(requests, 20) and requests[0].problem == ""
        client.close()
    assert received == ["answered", "left", "answered"]
    assert client.counts["attempts"] == 3 and client.counts["retries"] == client.counts[Failure.CONNECTION] == 1


def test_a_client_that_closes_sends_nothing_again():
    under_way = threading.Event()

    def serve():
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as lines:
            assert read_request(lines)
            connection.sendall(REPLY)
            assert read_request(lines)
            under_way.set()
            lines.read()  # until the client hangs up

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        judge = config(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", concurrency=1, timeout_seconds=30.0)
        client = client_of(judge)
        assert client.wait(client.ask(bodies(judge, ["a"])), 20)
        client.ask(bodies(judge, ["b"]))
        assert under_way.wait(20)
        client.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("jrl-judge")]
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):  # there is no other connection
            listening.accept()


@pytest.mark.parametrize(
    ("error", "is_closed"),
    [
        (ssl.SSLEOFError("EOF occurred in violation of protocol"), True),
        (BrokenPipeError(), True),
        (http.client.RemoteDisconnected(), True),
        (ssl.SSLCertVerificationError("unable to get local issuer certificate"), False),
        (http.client.BadStatusLine("SSH-2.0"), False),
        (OSError(113, "No route to host"), False),
    ],
)
def test_which_errors_say_that_the_server_closed_the_connection(error, is_closed, monkeypatch):
    def fail(*args):
        raise error

    endpoint = Endpoint("http://127.0.0.1:1/v1", None)
    connection = endpoint.connect(1.0)
    ours, _ = socket.socketpair()
    connection.sock = ours
    monkeypatch.setattr(connection, "request", fail)
    with pytest.raises(JudgeError) as caught:
        endpoint.post(connection, b"{}", 1.0)
    assert caught.value.failure is Failure.CONNECTION and isinstance(caught.value, ServerClosed) is is_closed


def test_addresses_that_cannot_be_used_are_refused_by_one_question():
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"the judge 'judge' \(Judge.model = 'stand-in' at http.*ConnectionRefused"):
        preflight(config(f"http://127.0.0.1:{free_port()}/v1"))
    with pytest.raises(
        ValueError, match=r"cannot be used: .*ame or service not known|cannot be used: .*ame resolution"
    ):
        preflight(config("http://no-such-host.invalid/v1"))
    with StandIn(Faults(pages=1.0, most=99)) as server, pytest.raises(ValueError, match="a web page, not a chat"):
        preflight(config(server.address))
    with StandIn() as server:
        base = server.address.removesuffix("/v1")
        with pytest.raises(
            ValueError, match=f"POST {base}/chat/completions: status 404, a web page.*often ends in /v1"
        ):
            preflight(config(base))
        preflight(config(server.address))
        assert len(server.bodies) == 2
    with StandIn(Faults(errors=1.0, most=2)) as server:
        preflight(config(server.address))
    assert time.monotonic() - began < 20


def test_a_judge_that_chats_is_refused_with_what_enforces_the_form():
    with StandIn(Faults(chatter=1.0, most=99)) as server:
        with pytest.raises(ValueError, match=r"asked to enforce the form: Judge.response_format = 'json_schema'"):
            preflight(config(server.address))
        with pytest.raises(ValueError, match=r"cannot be used: its answer is not one JSON object.*attempt 3 of 3\)$"):
            preflight(config(server.address, response_format="json_object"))


def test_a_judge_whose_thoughts_have_no_beginning_is_refused_with_what_removes_them():
    with StandIn() as server:
        known = server.content
        for format in (None, "json_schema"):
            server.content = lambda *given, **more: f"I add: 4.\n</think>\n\n{known(*given, **more)}"
            with pytest.raises(ValueError, match=r"a </think> without <think>: 'I add.*--reasoning-parser.*extra_body"):
                preflight(config(server.address, response_format=format))
            server.content = lambda *given, **more: f"<think>I add: 4.\n</think>\n\n{known(*given, **more)}"
            preflight(config(server.address, response_format=format))
        server.content = lambda *given, **more: "<think>4?</think>Sure!"
        with pytest.raises(ValueError, match=r"'<think>4\?</think>Sure!' .*Judge.response_format = 'json_schema'$"):
            preflight(config(server.address))


def test_a_judge_that_is_asked_no_more_needs_no_key(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    configs = [config("http://127.0.0.1:1/v1", name="a", api_key_env="JUDGE_KEY")]
    (opened,) = open_judges(configs, tmp_path, still_asked=())
    opened.close()
    with pytest.raises(ValueError, match="the environment variable JUDGE_KEY"):
        open_judges(configs, tmp_path, still_asked=("a",))


def test_a_run_opens_all_its_judges_or_none(tmp_path):
    with StandIn() as server, StandIn(Faults(halves=1.0, most=99)) as bad:
        configs = [config(server.address, name="a"), config(bad.address, name="b")]
        with pytest.raises(ValueError, match=r"the judge 'b'.*its reply is not JSON"):
            open_judges(configs, tmp_path, still_asked=("a", "b"))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("jrl-judge")]
        opened = open_judges(configs[:1], tmp_path, still_asked=("a", "b"))
        assert [judge.config.name for judge in opened] == ["a"]
        opened[0].close()


def test_a_stop_is_heard_while_the_first_question_hangs():
    with StandIn(Faults(timeouts=1.0, most=99, hang_seconds=30)) as server:
        began = time.monotonic()
        with pytest.raises(StopRequested, match="asked its first question"):
            preflight(config(server.address, timeout_seconds=30.0), lambda: time.monotonic() - began > 0.3)
        assert time.monotonic() - began < 5


def test_no_more_requests_are_under_way_than_allowed_nor_sent_faster():
    with StandIn(Faults(latency_seconds=0.02)) as server:
        asked(server, [f"{i} x" for i in range(40)], concurrency=3)
        assert server.most_under_way == 3
        began = time.monotonic()
        asked(server, [f"{i} y" for i in range(21)], requests_per_second=50.0)
        assert time.monotonic() - began >= 20 / 50


def test_a_rate_limit_costs_no_attempt_and_patience_ends():
    with StandIn(Faults(requests_per_second=40)) as server:
        requests, counts = asked(server, [f"{i} x" for i in range(60)], attempts=1, concurrency=32)
        assert all(request.content for request in requests) and counts[Failure.RATE_LIMIT] > 0
    with StandIn(Faults(requests_per_second=0.01)) as server:  # Retry-After is 100 s
        (request,), counts = asked(server, ["a"], patience_seconds=0.2)
        assert request.problem == "status 429: '{}' (given up after 0.2 s)" and counts["attempts"] == 1
    with StandIn(Faults(requests_per_second=0.001)) as server:
        (request,), _ = asked(server, ["a"], patience_seconds=1e6)
        assert request.problem == "status 429: '{}' (it asks to wait 1000 s)"


def test_a_rate_limit_on_the_way_makes_no_later_failure_wait_longer(monkeypatch):
    doublings = []
    known = client_module.backoff
    monkeypatch.setattr(client_module, "backoff", lambda *given: doublings.append(given[1]) or known(*given))
    with StandIn(Faults(errors=1.0, most=2)) as server:
        refusals = iter([0.001] * 10)
        monkeypatch.setattr(server, "_limited", lambda: next(refusals, None))
        (request,), _ = asked(server, ["a"], attempts=3)
    assert request.content is not None and doublings == [1] * 10 + [1, 2]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("begins", "drips"),
    [
        (HEAD + b"Content-Length: 9999\r\n\r\n", b" "),
        (HEAD + b"\r\n{", b" "),  # a body that ends with the connection
        (HEAD + b"X: ", b"x"),
        (HEAD, b"X: x\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: x\r\n"),
    ],
    ids=["body", "body without a length", "header", "headers", "continue", "trailers"],
)
def test_a_server_that_drips_is_cut_at_the_deadline(begins, drips):
    """A byte now and then restarts the timeout of a socket, not that of an attempt."""
    listening = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def drip():
        connection, _ = listening.accept()
        connection.recv(1 << 16)
        connection.sendall(begins)
        while not ended.wait(0.05):
            try:
                connection.sendall(drips)
            except OSError:
                return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    judge = config(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", timeout_seconds=0.4, attempts=1)
    client = client_of(judge)
    began = time.monotonic()
    (request,) = client.ask(bodies(judge, ["a"]))
    assert client.wait([request], 10) and "no answer within 0.4 s" in request.problem
    assert 0.4 <= time.monotonic() - began < 3
    client.close()
    ended.set()
    thread.join()
    listening.close()


@pytest.mark.parametrize("used", [10**400, 10**12, 2**20, None])
def test_what_an_api_says_of_its_tokens_neither_ends_nor_stalls_a_run(monkeypatch, used):
    known = StandIn.answer

    def count_wrongly(self, handler, body):
        reply = handler.reply
        usage = f'"usage": {{"prompt_tokens": {used}, "completion_tokens": 1}}'.encode()
        usage = b'"usage": null' if used is None else usage
        handler.reply = lambda status, data, *rest, **more: reply(
            status, re.sub(rb'"usage": \{[^}]*\}', usage, data), *rest, **more
        )
        known(self, handler, body)

    monkeypatch.setattr(StandIn, "answer", count_wrongly)
    with StandIn() as server:
        judge = config(server.address, tokens_per_minute=1e9)
        client = client_of(judge)
        for text in ("a", "b"):
            requests = client.ask(bodies(judge, [text]))
            assert client.wait(requests, 10) and requests[0].content is not None
        believed = used if used is not None and used <= 2**31 else 0
        assert client.counts["prompt_tokens"] == 2 * believed
        assert client.counts["uncounted"] == (2 if used is None else 0)
        client.close()


def serve_once(data):
    """A server that answers one request with given bytes. Returns its address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer():
        connection, _ = listening.accept()
        with connection.makefile("rb") as lines:
            read_request(lines)
        connection.sendall(data)
        connection.close()
        listening.close()

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "br", "zstd", "BR"])
def test_a_compressed_reply_is_named_as_one(coding):
    head = REPLY.replace(b"Content-Type", f"Content-Encoding: {coding}\r\nContent-Type".encode())
    judge = config(serve_once(head), attempts=1)
    client = client_of(judge)
    (request,) = client.ask(bodies(judge, ["a"]))
    assert client.wait([request], 10) and f"its reply is compressed ({coding.lower()})" in request.problem
    assert client.counts[Failure.MALFORMED_REPLY] == 1
    client.close()


@pytest.mark.parametrize(
    ("data", "failure", "said"),
    [
        (b"", Failure.CONNECTION, "RemoteDisconnected"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", Failure.CONNECTION, "BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}", Failure.CONNECTION, "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe", Failure.MALFORMED_REPLY, "not JSON"),
        (b"HTTP/1.1 302 Found\r\nLocation: https://login.example\r\nContent-Length: 0\r\n\r\n", Failure.REJECTED,
         "redirect to 'https://login.example'"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
         Failure.SERVER_ERROR, "status 502, a web page"),
    ],
)  # fmt: skip
def test_replies_that_are_no_http_or_not_a_completion(data, failure, said):
    judge = config(serve_once(data), attempts=1)
    client = client_of(judge)
    (request,) = client.ask(bodies(judge, ["a"]))
    assert client.wait([request], 10) and said in request.problem
    assert client.counts[failure] == 1
    client.close()


def test_a_client_that_is_closed_leaves_no_thread_and_takes_no_more():
    with StandIn(Faults(timeouts=1.0, most=99, hang_seconds=30)) as server:
        judge = config(server.address, timeout_seconds=60.0)
        client = client_of(judge)
        requests = client.ask(bodies(judge, [f"{i}" for i in range(20)]))
        assert not client.wait(requests, 0.3)
        began = time.monotonic()
        client.close()
        assert time.monotonic() - began < 2
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("jrl-judge")]
        assert not any(request.settled for request in requests)
        with pytest.raises(RuntimeError, match="the judge's client is closed"):
            client.ask([b"{}"])


def test_a_full_disk_of_the_answers_is_heard_as_one(tmp_path, monkeypatch):
    def full(self, key, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AnswerCache, "add", full)
    with StandIn() as server, pytest.raises(OSError, match="No space left"):
        asked(server, ["a"], cache=AnswerCache(tmp_path / "answers.jsonl"))


def test_an_error_of_ours_in_a_thread_is_heard_by_whoever_waits(tmp_path):
    with StandIn() as server:
        judge = config(server.address)
        limit = RateLimit(None, None)
        client = Client(Endpoint(server.address, None), lambda text: 1 / 0, limits_of(judge), limit, None)
        with pytest.raises(RuntimeError, match="the judge's client failed: ZeroDivisionError"):
            client.wait(client.ask(bodies(judge, ["a"])), 10)
        client.close()


def test_the_stand_in_fails_as_it_is_told_to():
    with StandIn(Faults(errors=0.5), seed=3) as server:
        asked(server, [f"{i} x" for i in range(100)], grading=Grade())
        share = server.said["errors"] / sum(server.said.values())
        assert 0.35 < share < 0.65
        assert collections.Counter(server.answered.values()) == {1: 100}
