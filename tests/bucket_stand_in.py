"""A stand-in for Google Cloud Storage: its JSON API over HTTP, with generations, and failures and delays by a seed."""

from __future__ import annotations

import base64
import contextlib
import datetime
import email.utils
import hashlib
import http.server
import io
import json
import random
import re
import threading
import time
import urllib.error
import urllib.parse
from collections.abc import Callable

from jrl.bucket.client import Bucket
from jrl.device.processes import ONE
from jrl.run import bucket_run
from jrl.run.lease import NO_LEASE

PAGE = 50
ADDRESS = "gs://bucket/run"


class Store:
    """Objects by (bucket, name). `fails` of all requests fail or are late; some of those are done first."""

    def __init__(
        self, *, buckets=("bucket",), fails=0.0, seed=0, delay_seconds=0.02, now: Callable[[], float] = time.time
    ):
        self.buckets, self.fails, self.delay_seconds, self.now = set(buckets), fails, delay_seconds, now
        self.forbidden: set[str] = set()
        self.objects: dict[tuple[str, str], tuple[int, bytes, float]] = {}
        self.composed: set[str] = set()  # names whose objects have no MD5
        self.listed_without_hash = False  # as where the bucket's owner holds the key
        self.stale = False  # listings then show what was there when this was set
        self.requests: list[tuple[str, str]] = []  # method and name
        self.tokens: set[str | None] = set()
        self._listed = None
        self._serial, self._random, self._lock = 1000, random.Random(seed), threading.Lock()

    def freeze_listing(self):
        self._listed = dict(self.objects)

    def answer(self, method: str, url: str, data: bytes | None, headers) -> tuple[int, bytes, dict[str, str]]:
        """Returns (status, body, headers); status 0: the connection is cut without an answer."""
        with self._lock:
            chance, way = self._random.random(), self._random.random()
            if chance < self.fails and way < 0.25:
                return 503, b"try again", {}
            if chance < self.fails and way < 0.5:
                return 0, b"", {}
            result = self._done(method, url, data, headers)
        if chance < self.fails:
            if way < 0.75:
                return 0, b"", {}  # done, but its answer is lost
            time.sleep(self.delay_seconds)
        return result

    def _done(self, method, url, data, headers):
        place = urllib.parse.urlsplit(url)
        query = dict(urllib.parse.parse_qsl(place.query))
        match = re.fullmatch(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?", place.path)
        bucket, name = match[1], urllib.parse.unquote(match[2] or query.get("name", query.get("prefix", "")))
        self.requests.append((method if match[2] or method == "POST" else "LIST", name))
        self.tokens.add(headers.get("Authorization"))
        date = {"Date": email.utils.formatdate(self.now(), usegmt=True)}
        failed = lambda code, text: (code, json.dumps({"error": {"message": text}}).encode(), date)
        if bucket in self.forbidden:
            return failed(403, "somebody does not have storage.objects.access")
        if bucket not in self.buckets:
            return failed(404, "The specified bucket does not exist.")
        present = self.objects.get((bucket, name))
        if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != (present[0] if present else 0):
            return failed(412, "At least one of the pre-conditions you specified did not hold.")
        if method == "POST":
            self._serial += self._random.randint(1, 5)
            self.objects[bucket, name] = (self._serial, data, self.now())
            return 200, json.dumps(self._item(bucket, name)).encode(), date
        if match[2] is None:
            listed = self.objects if self._listed is None else self._listed
            after = query.get("pageToken", "")  # the name that the page before it ended with
            names = sorted(n for b, n in listed if b == bucket and n.startswith(name) and n > after)
            items = [self._item(bucket, n, listed) for n in names[:PAGE]]
            page = {"kind": "storage#objects", "items": items}
            for item in page["items"] if self.listed_without_hash else ():
                item.pop("md5Hash", None), item.pop("crc32c")
            if len(names) > PAGE:
                page["nextPageToken"] = names[PAGE - 1]
            return 200, json.dumps(page).encode(), date
        if present is None or query.get("generation", str(present[0])) != str(present[0]):
            return failed(404, f"No such object: {bucket}/{name}")
        if method == "DELETE":
            del self.objects[bucket, name]
            return 204, b"", date
        if query.get("alt") != "media":
            return 200, json.dumps(self._item(bucket, name)).encode(), date
        body, hashes = present[1], ["crc32c=" + self._crc(present[1])]
        if name not in self.composed:
            hashes.append("md5=" + self._md5(body))
        found = {**date, "x-goog-generation": str(present[0]), "x-goog-hash": ",".join(hashes)}
        if span := re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range") or ""):
            return 206, body[int(span[1]) : int(span[2]) + 1], found
        return 200, body, found

    def _item(self, bucket, name, objects=None):
        generation, data, updated = (self.objects if objects is None else objects)[bucket, name]
        text = datetime.datetime.fromtimestamp(updated, datetime.UTC).isoformat(timespec="milliseconds")
        item = {"name": name, "generation": str(generation), "size": str(len(data)), "crc32c": self._crc(data),
                "updated": text.replace("+00:00", "Z")}  # fmt: skip
        return item if name in self.composed else {**item, "md5Hash": self._md5(data)}

    @staticmethod
    def _md5(data):
        return base64.b64encode(hashlib.md5(data).digest()).decode()

    @staticmethod
    def _crc(data):
        value = 0xFFFFFFFF
        for byte in data if len(data) < 1 << 12 else b"":  # of long ones nothing looks at it
            value ^= byte
            for _ in range(8):
                value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        return base64.b64encode((value ^ 0xFFFFFFFF).to_bytes(4, "big")).decode()


@contextlib.contextmanager
def serving(store: Store):
    """Yields the address at which a store answers over HTTP."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self):
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0)) if self.command == "POST" else None
            status, body, headers = store.answer(self.command, self.path, data, self.headers)
            if status == 0:
                self.close_connection = True
                return
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = handle_one

        def log_message(self, *args):
            pass

        def handle(self):
            with contextlib.suppress(ConnectionError):
                super().handle()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def addressed(copies, monkeypatch):
    """Yields a store that addresses lead to, with the local copies of this machine in a folder."""
    monkeypatch.setenv("JRL_BUCKET_COPIES", str(copies))
    store = Store()
    with serving(store) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        yield store


class Died(BaseException):
    """The process is dead: no request is sent any more."""


def client(store, after=None, deadline_seconds=5.0):
    """Returns a client of a store; the process dies before request number `after`."""
    sent, lock = [0], threading.Lock()

    def request(method, url, data, headers):
        with lock:
            if after is not None and sent[0] >= after:
                raise Died
            sent[0] += 1
        status, body, answered = store.answer(method, url, data, headers)
        if status == 0:
            raise ConnectionResetError("cut")
        if status >= 300:
            raise urllib.error.HTTPError(url, status, "failed", None, io.BytesIO(body))
        return body, answered

    bucket = Bucket("bucket", endpoint="http://stand-in", deadline_seconds=deadline_seconds, environment={},
                    sleep=lambda seconds: None, request=request)  # fmt: skip
    bucket.sent = sent
    return bucket


def contents(folder):
    """Returns the bytes by name of the files of a run folder that are committed."""
    return {name: (folder / name).read_bytes() for name in bucket_run.committed_files(folder)}


def opened(bucket, folder, processes=ONE):
    """Returns what publishes the folder of a process, which then holds what is committed."""
    commit, generation = bucket_run.claim_together(bucket, "run", processes)
    lost = bucket_run.sweep(bucket, "run", commit) if processes.writer else set()
    folder.mkdir(exist_ok=True)
    damaged = bucket_run.fetch_sound(bucket, "run", commit, folder)
    lost |= {part.object for parts in damaged.values() for part in parts}
    lost = {part for found in processes.exchange("fetched", sorted(lost)) for part in found}
    losses = bucket_run.Losses(damaged, frozenset(lost))
    return bucket_run.Publisher(bucket, "run", folder, NO_LEASE, commit, generation, processes, losses)
