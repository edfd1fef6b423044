"""Work that each rank does alone, and that may fail on some: its error is raised on all ranks.

Raised on one rank alone, the others would wait for it in their next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from ..errors import BaguaError
from .communicator import Communicator

T = TypeVar("T")

Others = Callable[[str], BaguaError]
"""Makes the error to raise for one of another library, from its text: a class of this library's errors, say."""


def text_of(error: BaseException) -> str:
    """The text of an error; with its type, unless it says enough by itself."""
    return str(error) if isinstance(error, (BaguaError, OSError)) else f"{type(error).__name__}: {error}"


def as_ours(error: Exception, others: Others) -> BaguaError:
    """An error of this library, as it is, or one of another library as one of ours."""
    if isinstance(error, BaguaError):
        return error
    ours = others(text_of(error))
    ours.__cause__ = error
    return ours


def on_all_ranks(comm: Communicator, call: str, body: Callable[[], T], others: Others) -> list[T]:
    """Return the results of `body` on all ranks; an error of one rank is raised on all. Collective."""
    result, error = _outcome_of(body, others)
    rows: list[Any] = comm.allgather_object((result, error))
    if any(each is not None for _, each in rows):
        raise_first(call, [each for _, each in rows], error)
    return [value for value, _ in rows]


def on_root(comm: Communicator, body: Callable[[], T], others: Others) -> T:
    """Return the result of `body`, which rank 0 alone calls; its error is raised on all ranks. Collective."""
    outcome: Any = _outcome_of(body, others) if comm.rank == 0 else None
    result: T
    result, error = comm.broadcast_object(outcome, root=0)
    if error is not None:
        raise error
    found: T = result
    return found


def raise_first(
    call: str, errors: Sequence[BaguaError | None], mine: Exception | None = None, end: str = ""
) -> NoReturn:
    """Raise the error of the first rank that has one, from that of this rank.

    Args:
        call: The call, with which the message begins.
        errors: The errors by rank; some rank has one.
        mine: The error of this rank itself.
        end: The end of the message.
    """
    rank, error = next((rank, error) for rank, error in enumerate(errors) if error is not None)
    raise type(error)(f"{call}: rank {rank}: {error}{end}") from mine


def _outcome_of(body: Callable[[], T], others: Others) -> tuple[T | None, BaguaError | None]:
    try:
        return body(), None
    except Exception as exc:
        return None, as_ours(exc, others)
