"""One of several processes of a run: it joins the others, watches them, and ends as they do."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax

from jrl.device.compile_cache import leave_cache_of_processes
from jrl.device.errors import is_of_device, is_of_file
from jrl.device.joining import host_and_port, join, not_joined
from jrl.device.processes import ONE, START_SECONDS, Cluster, HostLost, OtherProcessFailed, Processes
from jrl.device.watchdog import BEAT_SECONDS, GRACE_SECONDS, LOST_SECONDS, at_abort, leave, watching
from jrl.exit_codes import INTERRUPTED, LOST
from jrl.run.signals import write_past_streams

_log = logging.getLogger(__name__)

TOLD_SECONDS = 3 * BEAT_SECONDS  # time for the others to read why this process ends, and to end
ALL_SECONDS = GRACE_SECONDS + TOLD_SECONDS  # how long process 0 waits until all have read why the run ends


@contextlib.contextmanager
def joined(
    address: str | None,
    count: int | None,
    index: int | None,
    outcome: Callable[[Exception], tuple[str, int]],
    *,
    began: float,
) -> Iterator[Processes]:
    """Joins the other processes of a run, if there are any, and ends this process when they fail.

    Args:
      address, count, index: where they meet, as the command line has them; None: as a Cloud TPU slice says, else alone.
      outcome: (error) -> the message and exit code to tell the others.
      began: when this process started, in monotonic seconds. The others have START_SECONDS from then.

    Ends the process with exit code 76 if the others do not join. Raises: ValueError for arguments that do not go
    together.
    """
    cluster = cluster_of(address, count, index)
    if cluster is None or cluster.count == 1:
        yield ONE
        return
    processes = join_or_leave(cluster, int(os.environ.get("JRL_START_SECONDS", START_SECONDS)), began)
    if not processes.writer:
        logging.getLogger().setLevel(logging.ERROR)  # process 0 logs for all
    with watching(processes, write_past_streams):
        try:
            leave_cache_of_processes()
            yield processes
            processes.barrier("done")
        except BaseException as error:
            tell(processes, error, outcome)
            raise
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()


def join_or_leave(cluster: Cluster, seconds: int, began: float) -> Processes:
    """Returns the processes of a run. If they do not join, JAX's client aborts the process before the error can be
    handled, so the process ends here."""

    def give_up(why: str) -> NoReturn:
        write_past_streams(why)
        leave(LOST)

    with at_abort(lambda: give_up(not_joined(cluster, seconds))):
        try:
            return join(cluster, start_seconds=seconds, began=began)
        except HostLost as error:
            give_up(str(error))


def tell(processes: Processes, error: BaseException, outcome: Callable[[Exception], tuple[str, int]]) -> None:
    """Tells the others why this process ends, and waits until they have read it. Process 0 leaves last: without the
    coordination service, which it holds, JAX's clients abort their processes.

    An error of a device or of the coordination service, even if it was wrapped in others, is mostly the first sign that
    a process is gone. The watchdog then says which one, and ends this process.
    """
    if any(is_of_device(cause) and not is_of_file(cause) for cause in causes(error)):
        time.sleep(LOST_SECONDS + 3 * BEAT_SECONDS)
    is_told = isinstance(error, OtherProcessFailed)
    message_and_code = type(error).__name__, INTERRUPTED
    if isinstance(error, Exception):
        message_and_code = f"{type(error).__name__}: {error}", 1  # as Python ends
        with contextlib.suppress(Exception):  # it looks for the last checkpoint, on a disk that may have failed
            message_and_code = outcome(error)
    with contextlib.suppress(Exception):
        if is_told:
            processes.acknowledge()
        else:
            processes.fail(*message_and_code)
        end = time.monotonic() + ALL_SECONDS
        while processes.writer and not processes.all_end() and time.monotonic() < end:
            time.sleep(0.1)
    if processes.writer or not is_told:
        time.sleep(TOLD_SECONDS)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes and contexts, back to the first one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def cluster_of(address: str | None, count: int | None, index: int | None) -> Cluster | None:
    """Returns where the processes of the run meet; None: this one is alone."""
    options = {"--coordinator": address, "--process-count": count, "--process-index": index}
    missing = [name for name, value in options.items() if value is None]
    if len(missing) == len(options):
        return tpu_cluster()
    if missing:
        given = [name for name in options if name not in missing]
        needs = "needs" if len(given) == 1 else "need"
        raise ValueError(f"{' and '.join(given)} {needs} {' and '.join(missing)} as well")
    if count < 1 or not 0 <= index < count:
        raise ValueError(f"--process-index is {index} of --process-count {count}; it counts from 0 to {count - 1}")
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal():
        raise ValueError(f"--coordinator is {address!r}; it is HOST:PORT, the same for all processes")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"--coordinator is {address!r}; its port must be from 1 to 65535")
    try:
        socket.getaddrinfo(*host_and_port(address), type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        if getattr(error, "errno", None) != socket.EAI_AGAIN:  # the name server does not answer now
            raise ValueError(f"--coordinator is {address!r}; this machine knows no host {host!r}: {error}") from error
    return Cluster(address, count, index)


def tpu_cluster() -> Cluster | None:
    """Returns the hosts of a Cloud TPU slice, as its own environment says; None elsewhere, and for one host."""
    from jax._src.clusters import cloud_tpu_cluster

    try:
        for kind in (cloud_tpu_cluster.GkeTpuCluster, cloud_tpu_cluster.GceTpuCluster):
            if kind.is_env_present():
                count = kind.get_process_count()
                return Cluster(None, count, kind.get_process_id()) if count > 1 else None
    except (ImportError, OSError, RuntimeError) as error:  # from the request to the metadata server
        _log.warning("the hosts of this TPU slice could not be found (%s): training on this one alone; give "
                     "--coordinator, --process-count and --process-index where there are more", error)  # fmt: skip
    return None
