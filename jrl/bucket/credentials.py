"""Credentials for Google Cloud Storage. A token is held in memory, and never printed or stored.

Sources, in order: GOOGLE_OAUTH_ACCESS_TOKEN or GOOGLE_AUTH_TOKEN_FOR_TESTING; the file GOOGLE_APPLICATION_CREDENTIALS,
or that of `gcloud auth application-default login`; the machine's service account, from the metadata server. An endpoint
other than Google's gets the token in the environment, or none.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import math
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

TOKENS = ("GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_AUTH_TOKEN_FOR_TESTING")
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token"
REFRESH = "https://oauth2.googleapis.com/token"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
RENEW_BEFORE_SECONDS = 300.0  # a token is renewed this long before it expires
RETRY_SECONDS = 10.0  # from a failed renewal to the next, while the token is valid
SECONDS = 5.0  # timeout of a request for a token
TRANSIENT = (408, 429, 500, 502, 503, 504)  # HTTP statuses that are worth a retry

_TOKEN = re.compile(r"[!-~]+")


class NoCredentials(OSError):
    """There is no account, or it gives no token."""

    def __str__(self) -> str:
        return str(self.args[-1])


class NoTokenYet(OSError):
    """A token could not be fetched; a retry may succeed."""

    def __str__(self) -> str:
        return str(self.args[-1])


class UnreadableAnswer(ValueError):
    """The answer is not a token: it is a proxy's page, or was cut short."""


def token_source(environment: Mapping[str, str], *, is_google: bool) -> Callable[..., str | None]:
    """Returns a function that returns a valid token, or None if requests carry none. `renew=True` fetches a new one.

    That function raises NoCredentials if there is no account, and NoTokenYet for a transient failure. If a token cannot
    be renewed early, it is used until it expires.

    Raises: NoCredentials for a malformed token in the environment.
    """
    fixed = next((_checked(environment[name], name) for name in TOKENS if environment.get(name)), None)
    if fixed is not None or not is_google:
        return lambda renew=False: fixed
    lock, current, renew_at, expires_at = threading.Lock(), None, 0.0, 0.0

    def token(renew: bool = False) -> str:
        nonlocal current, renew_at, expires_at
        with lock:
            now = time.monotonic()
            if current is None or renew or now > renew_at:
                try:
                    current, lifetime = _new_token(environment, is_first=current is None)
                    renew_at, expires_at = now + max(lifetime - RENEW_BEFORE_SECONDS, 0.0), now + lifetime
                except OSError:
                    if current is None or renew or now > expires_at:
                        raise
                    renew_at = now + RETRY_SECONDS
            return current

    return token


def _checked(token: str, source: str) -> str:
    """Returns a token without surrounding whitespace. Raises NoCredentials for a text that cannot be a
    token, without quoting it: the error of sending it would quote it."""
    if _TOKEN.fullmatch(token.strip()) is None:
        raise NoCredentials(
            errno.EACCES, f"{source} holds no token: one is of visible ASCII characters, without blanks and line breaks"
        )
    return token.strip()


def _is_transient(error: Exception, is_first: bool) -> bool:
    """Whether a retry may succeed. Before the first token (`is_first`), an unknown host name or an unreadable answer
    means that the machine has no Google account, and is not transient."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in TRANSIENT
    if isinstance(error, UnreadableAnswer) or isinstance(getattr(error, "reason", error), socket.gaierror):
        return not is_first
    return isinstance(error, (OSError, http.client.HTTPException)) and not isinstance(error, http.client.InvalidURL)


def _kind(error: Exception) -> str:
    """Returns the HTTP status of an error, or its type, without its message."""
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} {error.reason}"
    return type(error.reason if isinstance(getattr(error, "reason", None), Exception) else error).__name__


def _new_token(environment: Mapping[str, str], *, is_first: bool) -> tuple[str, float]:
    """Returns a token and its lifetime in seconds. is_first: there was no token before."""
    named = environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    home = environment.get("CLOUDSDK_CONFIG") or os.path.join(os.path.expanduser("~"), ".config", "gcloud")
    path = named or os.path.join(home, "application_default_credentials.json")
    if named or os.path.exists(path):
        return _from_file(path)
    request = urllib.request.Request(METADATA, headers={"Metadata-Flavor": "Google"})
    try:
        return _ask(request, urllib.request.build_opener(urllib.request.ProxyHandler({})))
    except (OSError, ValueError, http.client.HTTPException) as error:
        if _is_transient(error, is_first):
            raise NoTokenYet(errno.EAGAIN, f"the metadata server gave no token ({_kind(error)})") from None
        raise NoCredentials(
            errno.EACCES,
            "no account for gs:// was found: this machine has no Google metadata server, and "
            "GOOGLE_APPLICATION_CREDENTIALS is not set. Run `gcloud auth application-default login`, or set it to a "
            "file of credentials",
        ) from None


def _from_file(path: str) -> tuple[str, float]:
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(1 << 20))
        kind = content["type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        # The file's text is not quoted: it is a secret.
        raise NoCredentials(errno.EACCES, f"{path} is not a file of credentials ({type(error).__name__})") from None
    if kind != "authorized_user":
        return _by_google_auth(path, kind)
    fields = {name: content.get(name, "") for name in ("client_id", "client_secret", "refresh_token")}
    body = urllib.parse.urlencode({**fields, "grant_type": "refresh_token"}).encode()
    try:
        return _ask(urllib.request.Request(REFRESH, body), urllib.request.build_opener())
    except (OSError, ValueError, http.client.HTTPException) as error:
        if _is_transient(error, is_first=False):
            raise NoTokenYet(errno.EAGAIN, f"{path}: Google gave no token ({_kind(error)})") from None
        raise NoCredentials(errno.EACCES, f"{path}: Google gave no token for this account ({_kind(error)}); run "
                            "`gcloud auth application-default login` again") from None  # fmt: skip


def _by_google_auth(path: str, kind: str) -> tuple[str, float]:
    """Returns a token of a service account or a federated one, which need signed requests; its lifetime is 3600 s."""
    try:
        import google.auth
        import google.auth.exceptions
        import google.auth.transport.urllib3
        import urllib3
    except ImportError:
        raise NoCredentials(
            errno.EACCES,
            f"{path} holds credentials of the kind {kind!r}, whose requests must be signed: pip install google-auth "
            "urllib3, or use the account of the machine, or `gcloud auth application-default login`",
        ) from None
    try:
        credentials, _ = google.auth.load_credentials_from_file(path, scopes=[SCOPE])
        credentials.refresh(google.auth.transport.urllib3.Request(urllib3.PoolManager()))
    except Exception as error:  # a foreign library, whose message may quote the file
        if isinstance(error, google.auth.exceptions.TransportError) or getattr(error, "retryable", False):
            raise NoTokenYet(errno.EAGAIN, f"{path}: google-auth got no token ({type(error).__name__})") from None
        raise NoCredentials(errno.EACCES, f"{path}: google-auth got no token ({type(error).__name__})") from None
    return _checked(str(credentials.token), "google-auth's answer"), 3600.0


def _ask(request: urllib.request.Request, opener: Any) -> tuple[str, float]:
    with contextlib.closing(opener.open(request, timeout=SECONDS)) as response:
        body = response.read(1 << 20)
    try:
        answer = json.loads(body)
        token, seconds = answer["access_token"], float(answer.get("expires_in", 3600))
        if _TOKEN.fullmatch(token) is None or not math.isfinite(seconds):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UnreadableAnswer from None  # without the text, which may hold a secret
    return token, seconds
