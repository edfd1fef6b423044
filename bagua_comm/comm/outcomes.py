"""Work that each rank does alone, and that may fail on some: its error is raised on all ranks.

Raised on one rank alone, the others would wait for it in their next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from .. import errors
from ..errors import BaguaError
from .communicator import Communicator

T = TypeVar("T")

NamedError = tuple[str, str]
"""The name of a class in `errors`, and a text: other classes may not be made from a text, or not be pickled."""

Others = Callable[[str], BaguaError]
"""Makes the error to raise for one of another library, from its text: a class of this library's errors, say."""


def text_of(error: BaseException) -> str:
    """The text of an error; with its type, unless it says enough by itself."""
    return str(error) if isinstance(error, (BaguaError, OSError)) else f"{type(error).__name__}: {error}"


def named_error(error: Exception | None, others: Others) -> NamedError | None:
    """What a rank sends of its error: of one of a class in `errors`, or of what `others` makes of another one."""
    if error is None:
        return None
    if getattr(errors, type(error).__name__, None) is not type(error):
        error = others(text_of(error))
    return type(error).__name__, str(error)


def on_all_ranks(comm: Communicator, call: str, body: Callable[[], T], others: Others) -> list[T]:
    """Return the results of `body` on all ranks; an error of one rank is raised on all. Collective."""
    result, error = _outcome_of(body)
    rows: list[Any] = comm.allgather_object((result, named_error(error, others)))
    if any(each is not None for _, each in rows):
        raise_first(call, [each for _, each in rows], error)
    return [value for value, _ in rows]


def on_root(comm: Communicator, body: Callable[[], T], others: Others) -> T:
    """Return the result of `body`, which rank 0 alone calls; its error is raised on all ranks. Collective."""
    result, error = _outcome_of(body) if comm.rank == 0 else (None, None)
    outcome: Any = comm.broadcast_object((result, named_error(error, others)), root=0)
    found: T = outcome[0]
    if outcome[1] is not None:
        raise _error_of(*outcome[1]) from error
    return found


def raise_first(
    call: str, rows: Sequence[NamedError | None], mine: Exception | None = None, end: str = ""
) -> NoReturn:
    """Raise the error of the first rank that has one, from that of this rank.

    Args:
        call: The call, with which the message begins.
        rows: The errors by rank; some rank has one.
        mine: The error of this rank itself.
        end: The end of the message.
    """
    rank, (name, text) = next((rank, row) for rank, row in enumerate(rows) if row is not None)
    raise _error_of(name, f"{call}: rank {rank}: {text}{end}") from mine


def _error_of(name: str, text: str) -> BaguaError:
    error: BaguaError = getattr(errors, name)(text)
    return error


def _outcome_of(body: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return body(), None
    except Exception as exc:
        return None, exc
