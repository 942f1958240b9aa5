"""One request to an OpenAI-compatible API, and strict parsing of the reply. Standard library only."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jrl.tasks.judges.answers import shown
from jrl.tasks.judges.failures import Failure, JudgeError, ServerClosed

MOST_REPLY_BYTES = 4 << 20
MOST_TOKENS = 1 << 31  # largest token count of a request that is believed
COMPRESSED = ("br", "deflate", "gzip", "x-gzip", "zstd")
CLOSED = (ConnectionError, ssl.SSLEOFError)  # what a request over a connection raises that the server has closed
AGAIN = (408, 409, 425)  # statuses below 500 worth a retry; 429 is a rate limit


class Completion(NamedTuple):
    """The parsed reply to a chat completion request."""

    content: str  # of the one message
    prompt_tokens: int
    completion_tokens: int


class Endpoint:
    """The endpoint for chat completions. Its key is never shown.

    Args:
      address: the base URL of the API, such as "http://localhost:8000/v1".
      key: sent as a bearer token; None: no key is sent.

    Raises: ValueError if the address is not a valid base URL or contains a user, password, query or fragment,
      or if the key is empty or cannot be sent in a header.
    """

    def __init__(self, address: str, key: str | None):
        try:
            url = urllib.parse.urlsplit(address)
            port = url.port
        except ValueError as error:
            raise ValueError(f"Judge.address is not a URL: {error}") from error
        if url.username or url.password or url.query or url.fragment:
            raise ValueError("Judge.address must hold no user, password or query: the configuration is written to the "
                             "run folder. Name a key's variable in Judge.api_key_env")  # fmt: skip
        if url.scheme not in ("http", "https") or not _is_host(url.hostname) or not address.isascii() or " " in address:
            raise ValueError(f"Judge.address is {address!r}; it is the base URL of an API, such as "
                             "'http://localhost:8000/v1'")  # fmt: skip
        if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
            raise ValueError("the API key has characters that a header cannot hold, or is empty")
        self.address = address
        self._key = key
        self._secure = url.scheme == "https"
        self._host, self._port = url.hostname, port
        self._path = f"{url.path.rstrip('/')}/chat/completions"
        self._url = f"{address.rstrip('/')}/chat/completions"
        self._context = ssl.create_default_context() if self._secure else None

    def __repr__(self) -> str:
        return f"Endpoint({self.address!r})"

    def without_key(self, text: str) -> str:
        """Returns a server's text with the key replaced, as servers may repeat it in their errors."""
        return text if self._key is None else text.replace(self._key, "***")

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._secure:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._context)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def post(self, connection: http.client.HTTPConnection, body: bytes, timeout: float) -> Completion:
        """Sends a request body and returns the API's completion, within `timeout` seconds.

        Raises: JudgeError on any failure; ServerClosed is one. A connection that can no longer be used is closed.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        expired, replied = threading.Event(), False
        try:
            with _cut_after(timeout, connection, expired):
                connection.request("POST", self._path, body, headers)
                with connection.getresponse() as response:
                    replied = True
                    data = _read(response)
            if expired.is_set():  # a reply without a length ends when its connection is closed
                raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if expired.is_set() or isinstance(error, TimeoutError):
                raise JudgeError(Failure.TIMEOUT, f"no answer within {timeout:g} s") from error
            reason = self.without_key(f"{type(error).__name__}: {error}")
            kind = ServerClosed if isinstance(error, CLOSED) and not replied else JudgeError
            raise kind(Failure.CONNECTION, f"{self.address}: {reason}") from error
        if len(data) > MOST_REPLY_BYTES:
            connection.close()
            raise JudgeError(Failure.MALFORMED_REPLY, f"its reply is longer than {MOST_REPLY_BYTES} bytes")
        return self._completion(response, data)

    def _completion(self, response: http.client.HTTPResponse, data: bytes) -> Completion:
        text = self.without_key(data.decode("utf-8", "replace"))
        kind = response.headers.get_content_type()
        is_page = kind == "text/html" or text.lstrip()[:1] == "<"
        status = response.status
        if status == 200 and (coding := response.headers.get("Content-Encoding", "").lower()) in COMPRESSED:
            raise JudgeError(Failure.MALFORMED_REPLY, f"its reply is compressed ({coding}), which was not asked for")
        if status == 200 and not is_page:
            return read_completion(text)
        detail = f"status {status}, a web page" if is_page else f"status {status}: {shown(text)}"
        wait = retry_after(response.headers.get("Retry-After"), time.time())
        if status == 429:
            raise JudgeError(Failure.RATE_LIMIT, detail, wait)
        if status >= 500 or status in AGAIN:
            raise JudgeError(Failure.SERVER_ERROR, detail, wait)
        if status == 200:
            raise JudgeError(Failure.HTML, f"{detail}, not a chat completion: {shown(text)}")
        moved = f" (redirect to {shown(response.headers['Location'])})" if response.headers["Location"] else ""
        raise JudgeError(Failure.REJECTED, f"POST {self._url}: {detail}{moved}")


def read_completion(text: str) -> Completion:
    """Returns the message of a reply's only choice, with the token counts.

    Raises: JudgeError if the reply is not the JSON of a chat completion, or the answer was truncated. A gateway may
      report an error of the server behind it with the status 200.
    """
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JudgeError(Failure.MALFORMED_REPLY, f"its reply is not JSON ({error}): {shown(text)}") from error
    status = _status_within(reply)
    if status == 429:
        raise JudgeError(Failure.RATE_LIMIT, f"status 200 with an error {status}: {shown(text)}")
    if status >= 500:
        raise JudgeError(Failure.SERVER_ERROR, f"status 200 with an error {status}: {shown(text)}")
    try:
        (choice,) = reply["choices"]
        message, reason = choice["message"], choice.get("finish_reason")
        content = _text_of(message["content"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JudgeError(Failure.MALFORMED_REPLY, f"its reply is not a chat completion: {shown(text)}") from error
    if reason == "length":
        detail = "its answer was truncated; raise Judge.max_tokens, or what Judge.extra_body has in its place"
        raise JudgeError(Failure.TRUNCATED, detail)
    if reason == "error":
        raise JudgeError(Failure.SERVER_ERROR, f"status 200 with an error in its answer: {shown(text)}")
    if not isinstance(content, str):
        detail = f"its message has no text (finish_reason {reason!r}): {shown(json.dumps(message))}"
        raise JudgeError(Failure.MALFORMED_REPLY, detail)
    used = reply.get("usage")
    return Completion(content, _count(used, "prompt_tokens"), _count(used, "completion_tokens"))


def _text_of(content: Any) -> Any:
    """Returns the text of a message that is a list of parts, without thoughts and images; other content as it is."""
    if not isinstance(content, list):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def _status_within(reply: Any) -> int:
    """Returns the status of an error in a reply's JSON; 0 if there is none."""
    error = reply.get("error") if isinstance(reply, Mapping) else None
    status = error.get("code") if isinstance(error, Mapping) else None
    return int(status) if isinstance(status, int | str) and re.fullmatch("[0-9]{3}", str(status)) else 0


def retry_after(value: str | None, now: float) -> float | None:
    """Returns the seconds that a Retry-After header asks to wait; None if it is missing or cannot be parsed.

    Args:
      value: seconds, or an HTTP date. now: seconds since the epoch.
    """
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value)) if float(value) < float("inf") else None
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    return None


def _count(used: Any, name: str) -> int:
    """Returns a token count from the usage; 0 if it is missing or implausible."""
    value = used.get(name) if isinstance(used, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS else 0


def _is_host(name: str | None) -> bool:
    """Returns whether a URL's host is a valid name: labels of 1 to 63 characters."""
    try:
        return bool(name) and bool(name.encode("idna"))
    except UnicodeError:
        return False


@contextlib.contextmanager
def _cut_after(seconds: float, connection: http.client.HTTPConnection, expired: threading.Event) -> Iterator[None]:
    """Connects if needed, and shuts the connection down after `seconds`, setting `expired`. This bounds the whole
    request, even if a server keeps sending slowly."""
    opened = time.monotonic()
    connection.timeout = seconds
    if connection.sock is None:
        connection.connect()
    sock = connection.sock  # the connection drops its reference if the server will close it
    sock.settimeout(seconds)

    def cut() -> None:
        expired.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # for TLS too: SSLSocket.shutdown would write

    timer = threading.Timer(max(opened + seconds - time.monotonic(), 0), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read(response: http.client.HTTPResponse) -> bytes:
    """Returns the body, or only its beginning if it is longer than MOST_REPLY_BYTES.

    Raises: http.client.IncompleteRead if the connection ends before Content-Length bytes.
    """
    data = bytearray()
    while len(data) <= MOST_REPLY_BYTES:
        chunk = response.read1(1 << 16)
        if not chunk:
            if response.length:  # the bytes of Content-Length that are missing
                raise http.client.IncompleteRead(bytes(data), response.length)
            break
        data += chunk
    return bytes(data)


class Connections:
    """The connections of a client's threads, which another thread can shut down."""

    def __init__(self, connect: Callable[[float], http.client.HTTPConnection]):
        self._connect = connect
        self._lock = threading.Lock()
        self._open: list[http.client.HTTPConnection] = []

    def new(self, timeout: float) -> http.client.HTTPConnection:
        connection = self._connect(timeout)
        with self._lock:
            self._open.append(connection)
        return connection

    def cut(self) -> None:
        """Ends every request in flight: threads that wait for a reply get an OSError."""
        with self._lock:
            for connection in self._open:
                if (sock := connection.sock) is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
