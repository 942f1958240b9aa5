"""Joins the processes of a run, by JAX's coordination service."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

import jax

from jrl.device.placement import set_joined
from jrl.device.processes import START_SECONDS, Cluster, HostLost, Processes, StoreLost

TRY_SECONDS, PAUSE_SECONDS = 5.0, 0.2  # of a try to connect, which a firewall may drop, and before the next
LEAST_SECONDS = 5  # to wait for the others if process 0 came late


def join(cluster: Cluster, *, start_seconds: int = START_SECONDS, began: float | None = None) -> Processes:
    """Returns the processes of a run once all of them have joined. Call it before JAX has initialized its devices.

    Args:
      start_seconds: how long to wait for them. For a listener at the address: until this long after `began`.
      began: when this process started, by the monotonic clock; None: now.

    Raises: HostLost if nobody listens at the address, or too few processes join.
    """
    seconds = start_seconds
    if cluster.address is not None and cluster.index != 0:
        end = (time.monotonic() if began is None else began) + start_seconds
        if not wait_for_listener(cluster.address, end):
            raise HostLost(not_joined(cluster, start_seconds))
        seconds = max(LEAST_SECONDS, round(end - time.monotonic()))
    # JAX's handler would replace jrl's handler of SIGTERM, which saves and stops all processes at the same step.
    jax.config.update("jax_enable_preemption_service", False)
    called = time.monotonic()
    try:
        address = {} if cluster.address is None else dict(
            coordinator_address=cluster.address,
            num_processes=cluster.count,
            process_id=cluster.index,
            cluster_detection_method="deactivate",
        )  # fmt: skip
        jax.distributed.initialize(initialization_timeout=seconds, shutdown_timeout_seconds=start_seconds, **address)
    except (RuntimeError, ValueError) as error:
        if time.monotonic() - called < seconds / 2 and "ALREADY_EXISTS" not in str(error):
            raise
        raise HostLost(not_joined(cluster, start_seconds, str(error))) from error
    processes = Processes(cluster.index, cluster.count, _ServiceStore(jax_client()))
    name = f"process {cluster.index} ({socket.gethostname()}, pid {os.getpid()})"
    processes.names = tuple(processes.exchange("names", name))
    set_joined(processes)
    return processes


def wait_for_listener(address: str, end: float) -> bool:
    """Returns whether a process listens at HOST:PORT before the time `end` of the monotonic clock. Without a listener,
    JAX's client aborts its process with a native stack trace."""
    while True:
        seconds = min(TRY_SECONDS, max(PAUSE_SECONDS, end - time.monotonic()))
        with (
            contextlib.suppress(OSError),  # process 0 may start later
            socket.create_connection(host_and_port(address), timeout=seconds) as connection,
        ):
            if connection.getsockname() != connection.getpeername():  # else, by chance, with itself
                return True
        if time.monotonic() + PAUSE_SECONDS > end:
            return False
        time.sleep(PAUSE_SECONDS)


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the parts of HOST:PORT. An IPv6 address has brackets: [::1]:8476."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def not_joined(cluster: Cluster, seconds: int, error: str = "") -> str:
    """Returns the message of a process whose wait for the others has timed out. error: JAX's message."""
    address = cluster.address or "the first host of the slice"
    if "ALREADY_EXISTS" in error:
        return f"another process has joined {address} as number {cluster.index}; give each its own"
    if cluster.index == 0:
        return (
            f"fewer than {cluster.count} processes came to {address} in {seconds} s; start all of them within "
            "that time, each with its own --process-index, and let them reach this address"
        )
    return (
        f"no run of {cluster.count} processes began at {address} in {seconds} s: process 0 must listen there, "
        "this machine must reach it, and all processes must come within that time"
    )


def jax_client() -> Any:
    """Returns JAX's client of the coordination service, which has no public name."""
    from jax._src import distributed

    return distributed.global_state.client


PIECE_SECONDS = 60.0
PIECE_BYTES = 1 << 20  # of a value in one message; gRPC rejects messages above 4 MiB
_IN_PIECES = b"\0pieces "  # prefix of the entry for a value in pieces; other values begin with JSON


class _ServiceStore:
    """JAX's coordination service as a Store. A long value is in pieces KEY#0, KEY#1 ..., and KEY holds their number."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._pieces: dict[str, int] = {}  # of the long values that this process has put

    def put(self, key: str, value: bytes) -> None:
        if len(value) > PIECE_BYTES:
            starts = range(0, len(value), PIECE_BYTES)
            for number, start in enumerate(starts):
                self._set(f"{key}#{number}", value[start : start + PIECE_BYTES])
            self._pieces[key] = len(starts)
            value = _IN_PIECES + str(len(starts)).encode()
        self._set(key, value)

    def _set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(f"jrl/{key}", value, allow_overwrite=True)

    def wait(self, key: str, seconds: float) -> bytes | None:
        value = self._get(key, seconds)
        if value is None or not value.startswith(_IN_PIECES):
            return value
        pieces = [self._get(f"{key}#{number}", PIECE_SECONDS) for number in range(int(value[len(_IN_PIECES) :]))]
        if None in pieces:  # they were there before KEY
            raise StoreLost(f"the coordination service of process 0 has lost a part of {key}")
        return b"".join(pieces)

    def _get(self, key: str, seconds: float) -> bytes | None:
        try:
            return self._client.blocking_key_value_get_bytes(f"jrl/{key}", max(1, int(1000 * seconds)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise no_answer(error) from error

    def list(self, folder: str) -> dict[str, bytes]:
        try:
            entries = self._client.key_value_dir_get_bytes(f"jrl/{folder}/")
        except jax.errors.JaxRuntimeError as error:
            raise no_answer(error) from error
        return {key.removeprefix("jrl/"): value for key, value in entries}

    def delete(self, key: str) -> None:
        for number in range(self._pieces.pop(key, 0)):
            self._client.key_value_delete(f"jrl/{key}#{number}")
        self._client.key_value_delete(f"jrl/{key}")


def no_answer(error: Exception) -> StoreLost:
    """Returns the exception for an error of the coordination service other than a missing key."""
    reason = str(error).split("\n", 1)[0]
    return StoreLost(f"the coordination service of process 0 does not answer: {reason}")
