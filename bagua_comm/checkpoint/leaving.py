"""The end of a save in progress when its rank leaves because of an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, wait

from ..comm import Communicator
from ..errors import BaguaError
from .texts import shortened

LEAVE_S = 10.0
"""How long a rank that leaves after an error waits for its save in progress, in seconds."""

QUIET_S = 1.0
"""How long it waits before it prints why, in seconds."""

STOP_S = 1.0
"""How long a save that was given up may take to end, in seconds."""

LEFT = "it left after an error"
"""The reason of a save that was given up."""


def end_save(
    save: Future[str | None], what: str, comm: Communicator, error: BaseException, give_up: Callable[[], None]
) -> None:
    """Complete a save if the other ranks still take part in time; else give it up, and print that.

    Not collective: other ranks may go on, or have left.

    Args:
        save: The reason why the save failed, or None.
        what: The name of the checkpoint.
        comm: The ranks that save.
        error: The error after which this rank leaves.
        give_up: Has the save fail on all ranks.
    """
    who, limit_s = f"rank {comm.rank} of {comm.size}", min(LEAVE_S, comm.timeout_s)
    try:
        if wait([save], min(QUIET_S, limit_s)).not_done and limit_s > QUIET_S:
            reason = f"{type(error).__name__}: {shortened(str(error))}".rstrip(": ")
            say(f"{who} leaves after {reason}; it waits up to {limit_s:g} s for {what}")
            wait([save], limit_s - QUIET_S)
    finally:  # Ctrl-C ends the wait
        if not save.done():
            give_up()
            if wait([save], STOP_S).not_done:  # another rank does not answer
                comm.stop_calls(LEFT)
                wait([save], STOP_S)
        if not is_complete(save):
            say(f"{who}: {what} was not completed{_why(save)}")


def say(text: str) -> None:
    """Print a line to stderr."""
    print(f"bagua_comm: {text}", file=sys.stderr, flush=True)


def is_complete(save: Future[str | None]) -> bool:
    """Whether a checkpoint is complete."""
    return save.done() and not save.cancelled() and save.exception() is None and save.result() is None


def text_of(exc: BaseException) -> str:
    """The text of an error; with its type, unless it says enough by itself."""
    if isinstance(exc, (BaguaError, OSError)):
        return str(exc)
    return f"{type(exc).__name__}: {exc}"


def _why(save: Future[str | None]) -> str:
    """The reason why a save failed, after a colon; empty if it has not ended."""
    if not save.done() or save.cancelled():
        return ""
    error = save.exception()
    return f": {save.result() if error is None else text_of(error)}"
