"""The platform's own credentials for Google Cloud Storage. A token is held in memory, and never printed or stored.

In this order: GOOGLE_OAUTH_ACCESS_TOKEN or GOOGLE_AUTH_TOKEN_FOR_TESTING; the file GOOGLE_APPLICATION_CREDENTIALS, or
that of `gcloud auth application-default login`; the account of the machine, from its metadata server. An endpoint that
is not Google's gets the token of the environment or none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
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
EARLY_SECONDS = 300.0  # before its end a token is renewed
SECONDS = 5.0


class NoCredentials(OSError):
    """No account could be found."""

    def __str__(self) -> str:
        return str(self.args[-1])


def token_source(environment: Mapping[str, str], *, is_google: bool) -> Callable[..., str | None]:
    """Returns what gives a valid token, or None where requests carry none; `renew=True` asks for a new one.

    What it returns raises NoCredentials where there is no account.
    """
    given = next((environment[name] for name in TOKENS if environment.get(name)), None)
    if given is not None or not is_google:
        return lambda renew=False: given
    lock, held, ends = threading.Lock(), None, 0.0

    def token(renew: bool = False) -> str:
        nonlocal held, ends
        with lock:
            if held is None or renew or time.monotonic() > ends:
                held, lasts = _new_token(environment)
                ends = time.monotonic() + max(lasts - EARLY_SECONDS, 0.0)
            return held

    return token


def _new_token(environment: Mapping[str, str]) -> tuple[str, float]:
    """Returns a token and how many seconds it lasts."""
    named = environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    home = environment.get("CLOUDSDK_CONFIG") or os.path.join(os.path.expanduser("~"), ".config", "gcloud")
    path = named or os.path.join(home, "application_default_credentials.json")
    if named or os.path.exists(path):
        return _from_file(path)
    request = urllib.request.Request(METADATA, headers={"Metadata-Flavor": "Google"})
    try:
        answer = _ask(request, urllib.request.build_opener(urllib.request.ProxyHandler({})))
    except (OSError, ValueError, KeyError):
        raise NoCredentials(
            errno.EACCES,
            "no account for gs:// was found: this machine has no metadata server of Google's, and "
            "GOOGLE_APPLICATION_CREDENTIALS is not set. Run `gcloud auth application-default login`, or set it to a "
            "file of credentials",
        ) from None
    return answer


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
    except (OSError, ValueError, KeyError) as error:
        reason = f"{error.code} {error.reason}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__
        raise NoCredentials(errno.EACCES, f"{path}: Google gave no token for this account ({reason}); run `gcloud auth "
                            "application-default login` again") from None  # fmt: skip


def _by_google_auth(path: str, kind: str) -> tuple[str, float]:
    """Returns a token of a service account or a federated one, whose requests are signed."""
    try:
        import google.auth
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
        raise NoCredentials(errno.EACCES, f"{path}: google-auth got no token ({type(error).__name__})") from None
    return credentials.token, 3600.0


def _ask(request: urllib.request.Request, opener: Any) -> tuple[str, float]:
    with contextlib.closing(opener.open(request, timeout=SECONDS)) as response:
        answer = json.loads(response.read(1 << 20))
    return str(answer["access_token"]), float(answer.get("expires_in", 3600))
