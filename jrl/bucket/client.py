"""A Google Cloud Storage client over the JSON API, with the standard library.

A write stores one object atomically, and may be conditional on the generation that it replaces (0: the object must not
exist). Reads are checked against the service's hash. Transient failures are retried, with jitter, until a deadline. If
a retried write conflicts, the stored object is compared with the data first: the answer to an earlier attempt may have
been lost.

Endpoint: STORAGE_EMULATOR_HOST or TENSORSTORE_GCS_HTTP_URL, else Google's. Source: the JSON API's reference, "Objects"
and "Request preconditions", and "Retry strategy".
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import email.utils
import errno
import hashlib
import http.client
import json
import os
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jrl.bucket.crc32c import crc32c
from jrl.bucket.credentials import TOKENS, TRANSIENT, NoCredentials, token_source

GOOGLE = "https://storage.googleapis.com"
ENDPOINTS = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
DEADLINE_SECONDS = 120.0  # for one request and its retries; JRL_BUCKET_SECONDS overrides it
SOCKET_SECONDS = 30.0
PIECE_BYTES = 64 << 20  # read at a time from a large object
LONGEST_WAIT_SECONDS = 16.0

_ADDRESS = re.compile(r"(gs|s3):/{1,2}([^/]*)/*(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9._-]+")
_NOT_IN_NAMES = re.compile("[\r\n\ud800-\udfff]")


class BucketError(OSError):
    """A request to a bucket failed. The message is for the user; `errno` is the kind of failure."""

    def __str__(self) -> str:
        return str(self.args[-1])


class Missing(BucketError):
    """The object or the bucket does not exist."""


class Conflict(BucketError):
    """The object does not have the generation that the request requires: another writer has written it."""


class Object(NamedTuple):
    """The metadata of an object, as the service reports it."""

    name: str
    generation: int
    bytes: int
    md5: str | None  # base64; None: composed of other objects, or not reported
    crc32c: str | None  # base64; None: not reported
    updated: float  # seconds since 1970, by the service's clock
    now: float  # when the service answered, by the same clock
    encoding: str | None = None  # Content-Encoding


def split_address(address: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Returns (bucket, name) of gs://BUCKET/NAME, without trailing slashes; None for a local path.

    gs:/BUCKET/NAME is accepted too: pathlib turns the two slashes into one.

    Raises: ValueError for an address without a bucket or a name, characters that these cannot have, a name with an
      empty part, '.' or '..', and s3://.
    """
    match = _ADDRESS.fullmatch(os.fspath(address))
    if match is None:
        return None
    scheme, bucket, name = match.groups()
    name = name.rstrip("/")
    if scheme == "s3":
        raise ValueError(
            f"{shown(address)} is in S3, which jrl does not support: its requests are signed differently, and a run "
            "needs writes that are conditional on a generation. Use gs://, or a local folder"
        )
    if not bucket or not name:
        raise ValueError(f"{shown(address)} names no {'folder in the bucket' if bucket else 'bucket'}; it is "
                         "gs://BUCKET/NAME")  # fmt: skip
    if _BUCKET.fullmatch(bucket) is None:
        raise ValueError(f"{shown(address)!r}: a bucket's name has letters, digits, '.', '_' and '-' only")
    if _NOT_IN_NAMES.search(name):
        raise ValueError(f"{shown(address)!r}: a name in a bucket is UTF-8, without line breaks")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{shown(address)}: a name in a bucket has no empty part, '.' or '..'")
    return bucket, name


def shown(address: str | os.PathLike[str]) -> str:
    """Returns an address with the slash that pathlib removes."""
    return re.sub(r"^(gs|s3):/(?!/)", r"\1://", os.fspath(address))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the token to another server."""

    def redirect_request(self, *args: Any) -> None:
        return None


class Bucket:
    """A client of one bucket. Threads may share it."""

    def __init__(
        self,
        name: str,
        *,
        endpoint: str | None = None,
        deadline_seconds: float | None = None,
        environment: Mapping[str, str] = os.environ,
        sleep: Callable[[float], None] = time.sleep,
        request: Callable[..., tuple[bytes, Mapping[str, str]]] | None = None,
    ):
        """Args: request: a function that sends one request, for tests; None: HTTP."""
        self.name = name
        from_environment = next((environment[variable] for variable in ENDPOINTS if environment.get(variable)), None)
        chosen = endpoint or from_environment or GOOGLE
        self.endpoint = (chosen if "://" in chosen else f"http://{chosen}").rstrip("/")
        self._deadline = _deadline_in(environment) if deadline_seconds is None else deadline_seconds
        self._sleep = sleep
        self._token = token_source(environment, is_google=self.endpoint == GOOGLE)
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._request = request or self._over_http

    def __repr__(self) -> str:
        return f"gs://{self.name}"

    def put(self, name: str, data: bytes, *, if_generation: int | None = None) -> Object:
        """Writes an object, and returns its metadata once the service has stored all of it.

        Args:
          if_generation: the generation to replace; 0: the object must not exist; None: replace any. With a condition,
            no other writer may put the same data under the name: a retry recognizes its own write by the data.

        Raises: Conflict if the object has another generation; BucketError if the stored bytes differ from the data.
        """
        condition = {} if if_generation is None else {"ifGenerationMatch": if_generation}
        query = urllib.parse.urlencode({"uploadType": "media", "name": name, **condition})
        url = f"/upload/storage/v1/b/{self.name}/o?{query}"
        repeated = False

        def again() -> None:
            nonlocal repeated
            repeated = True

        try:
            written = self._send("POST", url, name, data, again=again, read=_read_object)
            if written.md5 is None and written.crc32c is None:
                written = self._with_hash(written)
        except Conflict:
            # An earlier attempt may have written it, and its answer was lost.
            if not repeated or (written := self.stat(name)) is None or not _same(written, data):
                raise
        if not _same(written, data):
            raise BucketError(errno.EIO, f"gs://{self.name}/{name} was stored with other bytes than were sent")
        return written

    def get(self, name: str, *, generation: int | None = None) -> tuple[bytes, int]:
        """Returns the bytes of an object and its generation.

        Raises: Missing if there is none; BucketError if four attempts do not match the service's hash.
        """
        for attempt in range(4):
            query = {"alt": "media"} | ({} if generation is None else {"generation": generation})
            url = f"/storage/v1/b/{self.name}/o/{_quoted(name)}?{urllib.parse.urlencode(query)}"
            body, of_generation, is_intact = self._send("GET", url, name, read=_read_media)
            if is_intact:
                return body, of_generation
            self._sleep(0.5 * attempt)
        raise BucketError(errno.EIO, f"gs://{self.name}/{name} arrives with other bytes than its hash says")

    def download(self, stored: Object, path: str | os.PathLike[str]) -> None:
        """Downloads one generation of an object to a file, in pieces, syncs the file, and checks its hash.

        Raises: BucketError for one with Content-Encoding gzip: the service decompresses it as it sends it, and its size
          and hash are of other bytes.
        """
        if stored.encoding == "gzip":
            raise BucketError(errno.EINVAL, f"gs://{self.name}/{stored.name} is stored compressed (Content-Encoding: "
                              "gzip), which jrl does not read; upload it without compression")  # fmt: skip
        if stored.md5 is None and stored.crc32c is None:
            stored = self._with_hash(stored)
        md5, crc, url = hashlib.md5(usedforsecurity=False), 0, f"/storage/v1/b/{self.name}/o/{_quoted(stored.name)}"
        url += f"?{urllib.parse.urlencode({'alt': 'media', 'generation': stored.generation})}"
        with open(path, "wb") as file:
            for start in range(0, stored.bytes, PIECE_BYTES):
                last = min(start + PIECE_BYTES, stored.bytes) - 1
                piece = {"Range": f"bytes={start}-{last}"}
                body = self._send("GET", url, stored.name, extra_headers=piece, read=_read_bytes(last + 1 - start))
                file.write(body)
                if stored.md5 is None:
                    crc = crc32c(body, crc)
                else:
                    md5.update(body)
            file.flush()
            os.fsync(file.fileno())
        got = _base64(crc.to_bytes(4, "big")) if stored.md5 is None else _base64(md5.digest())
        if got != (stored.crc32c if stored.md5 is None else stored.md5):
            raise BucketError(errno.EIO, f"gs://{self.name}/{stored.name} arrived with other bytes than its hash says")

    def _with_hash(self, listed: Object) -> Object:
        """Returns the metadata, with a hash, of an object that was listed without one, such as one encrypted with a
        customer's key.

        Raises: Missing if that generation is gone; BucketError if the service reports no hash.
        """
        current = self.stat(listed.name)
        if current is None or current.generation != listed.generation:
            raise Missing(errno.ENOENT, f"gs://{self.name}/{listed.name} was replaced while it was read; try again")
        if current.md5 is None and current.crc32c is None:
            raise BucketError(errno.EIO, f"gs://{self.name}/{listed.name}: the service gives no hash of it")
        return current

    def stat(self, name: str) -> Object | None:
        """Returns the metadata of an object; None if it does not exist."""
        try:
            url = f"/storage/v1/b/{self.name}/o/{_quoted(name)}"
            return self._send("GET", url, name, read=_read_object)
        except Missing:
            return None

    def list(self, prefix: str) -> Iterator[Object]:
        """Yields the objects whose names start with `prefix`, in the order of their names. Raises Missing if the bucket
        does not exist."""
        token = None
        while True:
            query = {"prefix": prefix} | ({} if token is None else {"pageToken": token})
            url = f"/storage/v1/b/{self.name}/o?{urllib.parse.urlencode(query)}"
            objects, token = self._send("GET", url, prefix, read=_read_page)
            yield from objects
            if token is None:
                return

    def delete(self, name: str) -> None:
        """Deletes an object, if it exists."""
        with contextlib.suppress(Missing):
            self._send("DELETE", f"/storage/v1/b/{self.name}/o/{_quoted(name)}", name)

    def _send(
        self,
        method: str,
        url: str,
        name: str,
        data: bytes | None = None,
        *,
        extra_headers: Mapping[str, str] = {},
        again: Callable[[], None] = lambda: None,
        read: Callable[[bytes, Mapping[str, str]], Any] = lambda body, headers: body,
    ) -> Any:
        """Sends a request, retries transient failures until the deadline, and returns `read(body, headers)`.

        Args:
          again: called before each retry, except the one that only renews the token (401).
          read: reads the answer. It raises ValueError for one that was cut short or is a proxy's page; the request is
            then retried.
        """
        where, end = f"gs://{self.name}/{name}", time.monotonic() + self._deadline
        wait, renew, renewed = 0.25, False, False
        while True:
            try:
                token, renew = self._token(renew=renew), False
                signed = {"Authorization": f"Bearer {token}"} if token else {}
                body, headers = self._request(method, url, data, {**extra_headers, **signed})
                try:
                    return read(body, headers)
                except ValueError as error:
                    reason = f"its answer cannot be read: {error}"
            except urllib.error.HTTPError as error:
                with error:
                    text = _reason(error)
                if error.code == 401 and not renewed:
                    renew = renewed = True
                    continue
                if error.code not in TRANSIENT:
                    raise _refusal(error.code, where, text) from None
                reason = f"{error.code} {text}"
            except NoCredentials:
                raise
            except (OSError, http.client.HTTPException) as error:
                cause = getattr(error, "reason", error)
                reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            pause = wait * random.uniform(0.5, 1.0)
            if time.monotonic() + pause > end:
                raise BucketError(
                    errno.ETIMEDOUT,
                    f"{where}: {self.endpoint} did not do {method} within {self._deadline:.0f} s ({reason})",
                ) from None
            again()
            self._sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _over_http(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[bytes, Mapping[str, str]]:
        content = {} if data is None else {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(self.endpoint + url, data, {**headers, **content}, method=method)
        with self._opener.open(request, timeout=min(SOCKET_SECONDS, self._deadline)) as response:
            return response.read(), response.headers


def _deadline_in(environment: Mapping[str, str]) -> float:
    """Returns the deadline of a request in seconds. Raises ValueError if JRL_BUCKET_SECONDS is not above 0."""
    text = environment.get("JRL_BUCKET_SECONDS") or str(DEADLINE_SECONDS)
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise ValueError(f"JRL_BUCKET_SECONDS is {text!r}; it must be a number of seconds above 0")


def _refusal(code: int, where: str, text: str) -> BucketError:
    if code == 404:
        return Missing(errno.ENOENT, f"{where} is not there: {text}")
    if code == 412:
        return Conflict(errno.EBUSY, f"{where} was written by somebody else meanwhile")
    if code == 401:
        return BucketError(
            errno.EACCES,
            f"{where}: the service does not accept the token ({code} {text}). One in {' or '.join(TOKENS)} expires, "
            "and jrl cannot renew it; without one, jrl uses the account of the machine or of `gcloud auth "
            "application-default login`",
        )
    if code == 403:
        return BucketError(
            errno.EACCES,
            f"{where}: no permission ({code} {text}). The account needs roles/storage.objectUser on the bucket to "
            "train, and roles/storage.objectViewer to read",
        )
    return BucketError(errno.EIO, f"{where}: the service refused the request ({code} {text})")


def _reason(error: urllib.error.HTTPError) -> str:
    """Returns the service's error message on one line."""
    try:
        text = error.read(1 << 16).decode(errors="replace")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            text = json.loads(text)["error"]["message"]
    except (OSError, http.client.HTTPException):
        text = ""
    return " ".join(str(text).split())[:300] or str(error.reason)


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _read_media(body: bytes, headers: Mapping[str, str]) -> tuple[bytes, int, bool]:
    """Returns an object's bytes, its generation, and whether the bytes match the service's hash. Raises ValueError for
    any other answer."""
    generation = headers.get("x-goog-generation")
    if generation is None:
        raise ValueError("it has no x-goog-generation")
    return body, int(generation), _intact(body, headers)


def _read_bytes(count: int) -> Callable[[bytes, Mapping[str, str]], bytes]:
    """Returns a reader of exactly `count` bytes. It raises ValueError for any other number."""

    def read(body: bytes, headers: Mapping[str, str]) -> bytes:
        if len(body) != count:
            raise ValueError(f"it has {len(body)} bytes, not {count}")
        return body

    return read


def _read_page(body: bytes, headers: Mapping[str, str]) -> tuple[list[Object], str | None]:
    """Returns the objects on one page of a listing, and the token of the next page (None: it is the last). Raises
    ValueError for any other answer."""
    page = _json_object(body)
    if page.get("kind") != "storage#objects":
        raise ValueError("it is not a listing")
    if not isinstance(items := page.get("items", []), list):
        raise ValueError("its items are not a list")
    return [_object(item, headers) for item in items], page.get("nextPageToken")


def _read_object(body: bytes, headers: Mapping[str, str]) -> Object:
    """Returns the metadata of an object. Raises ValueError for any other answer."""
    return _object(_json_object(body), headers)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _object(item: Mapping[str, Any], headers: Mapping[str, str]) -> Object:
    try:
        return Object(
            name=item["name"],
            generation=int(item["generation"]),
            bytes=int(item["size"]),
            md5=item.get("md5Hash"),
            crc32c=item.get("crc32c"),
            updated=datetime.datetime.fromisoformat(item["updated"]).timestamp(),
            now=email.utils.parsedate_to_datetime(headers["Date"]).timestamp(),
            encoding=item.get("contentEncoding"),
        )
    except KeyError as error:
        raise ValueError(f"it has no {error.args[0]}") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"it does not describe an object ({error})") from error


def _md5(data: bytes) -> str:
    return _base64(hashlib.md5(data, usedforsecurity=False).digest())


def _crc32c(data: bytes) -> str:
    return _base64(crc32c(data).to_bytes(4, "big"))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _same(stored: Object, data: bytes) -> bool:
    if stored.bytes != len(data):
        return False
    if stored.md5 is not None:
        return stored.md5 == _md5(data)
    return stored.crc32c is not None and stored.crc32c == _crc32c(data)


def _intact(data: bytes, headers: Mapping[str, str]) -> bool:
    """Whether bytes match the service's MD5, or else its CRC-32C: a composed object has no MD5. True without either."""
    values = headers.get_all("x-goog-hash") if hasattr(headers, "get_all") else [headers.get("x-goog-hash", "")]
    hashes = dict(part.strip().split("=", 1) for value in values or () for part in value.split(",") if "=" in part)
    if "md5" in hashes:
        return hashes["md5"] == _md5(data)
    return "crc32c" not in hashes or hashes["crc32c"] == _crc32c(data)
