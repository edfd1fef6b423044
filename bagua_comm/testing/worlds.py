"""Worlds of ranks in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

from ..comm import Communicator
from ..errors import CommAborted, CommTimeout
from ..execution.futures import end_lanes
from ..flight.stacks import Position, current_stacks
from ..transports import LocalTransport, Transport
from ..transports.call_state import check_timeout
from ..transports.local import Hub

T = TypeVar("T")


def run_ranks(
    size: int,
    body: Callable[[Communicator], T],
    *,
    nodes: Sequence[object] | None = None,
    wrap: Callable[[Transport], Transport] | None = None,
    timeout_s: float = 30.0,
    check: bool = False,
) -> list[T]:
    """Run `body(comm)` on ranks that are threads with the local transport; return their results.

    An exception in one rank aborts the others, and is raised here with the rank in a note; so is the error of a
    lane's task that `body` has not asked for.

    Args:
        size: Number of ranks.
        body: The function of each rank.
        nodes: A label for every rank's node; None for one node.
        wrap: Called with every rank's transport; returns the transport to use, for example `Recording`.
        timeout_s: The longest wait of a call for its peers, in seconds.
        check: See `Communicator`.

    >>> run_ranks(3, lambda comm: comm.rank * 10)
    [0, 10, 20]
    """
    timeout_s = check_timeout("run_ranks", timeout_s)
    hub = Hub(size)
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    ended: list[int] = []
    settled = threading.Event()
    """Set when all ranks have ended, or one has failed."""

    def run(rank: int) -> None:
        transport: Transport = LocalTransport(hub, rank, timeout_s=timeout_s)
        try:
            if wrap is not None:
                transport = wrap(transport)
            comm = Communicator([transport], nodes=nodes, check=check)
            results[rank] = body(comm)
            for problem in end_lanes(comm.flight.lanes, comm.flight.unretrieved, comm.group):
                if problem.has_ended:
                    raise problem.error
        except BaseException as exc:
            failures.append((rank, exc))
            hub.abort(f"rank {rank} failed: {type(exc).__name__}: {exc}")
        ended.append(rank)
        if failures or len(ended) == size:
            settled.set()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    if threads:
        settled.wait()
    if running := still_running(threads, timeout_s):
        text = f"{timeout_s:g} s after another rank failed still run: {running}"
        raise CommTimeout(text) from (failures[0][1] if failures else None)
    if failures:
        # Other ranks raise CommAborted because one failed; raise the error of that one.
        first = next((f for f in failures if not isinstance(f[1], CommAborted)), failures[0])
        rank, error = first
        if hasattr(error, "add_note"):
            error.add_note(f"in rank {rank} of {size}")
        raise error
    return results


def still_running(threads: Sequence[threading.Thread], limit_s: float) -> str:
    """Wait for threads, for at most `limit_s`; return the names of those that still run, and their last calls."""
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = [thread for thread in threads if thread.is_alive()]
    stacks = current_stacks() if alive else {}
    running = [(thread.name, stacks.get(thread.ident or 0, [])) for thread in alive]
    return ", ".join(f"{name} (in {' < '.join(map(_text_of, stack[:8]))})" for name, stack in running)


def _text_of(call: Position) -> str:
    return f"{call.code.co_name} {PurePath(call.code.co_filename).name}:{call.line}"
