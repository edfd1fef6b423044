"""The first lines of functions that users call: their communicator, and errors that all ranks raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bagua_comm import ArrayError, BaguaError, Communicator
from bagua_comm.bootstrap.world import current
from bagua_comm.errors import shown

from .process_group import default


def communicator_of(
    owner: str, comm: Communicator | None, default: Callable[[], Communicator] = default
) -> Communicator:
    """Return the communicator that a user has given to `owner`; the default one if it is None.

    Collective if it connects. Call `errors_on_all` or `raise_on_all` next, on all ranks: a rank with a wrong
    argument does so on the default communicator.

    Raises:
        ArrayError: `comm` is no communicator. Raised on all ranks if they communicate by the default one.
    """
    if comm is None:
        return default()
    try:
        check_comm(owner, comm)
    except ArrayError as error:
        ranks = current()
        if ranks is not None:
            raise_on_all(ranks, error)
        raise
    return comm


def check_comm(owner: str, comm: object) -> None:
    """Raise `ArrayError` unless `comm` is a communicator."""
    if not isinstance(comm, Communicator):
        raise ArrayError(
            f"{owner}: comm is {shown(comm)}, expected a Communicator, as bagua_torch.connect() returns it, or "
            "None for the default one"
        )


@contextmanager
def errors_on_all(comm: Communicator) -> Iterator[None]:
    """Check arguments in a `with` block: the first error of any rank is raised on all ranks. Collective."""
    error: BaseException | None = None
    try:
        yield
    except Exception as exc:
        error = exc
    raise_on_all(comm, error)


def raise_on_all(comm: Communicator, error: BaseException | None) -> None:
    """Raise the first error of any rank, on all ranks. Collective."""
    sent = error
    if error is not None and not isinstance(error, BaguaError):  # perhaps it cannot be pickled
        sent = ArrayError(f"{type(error).__name__}: {error}")
    rows: list[BaseException | None] = comm.allgather_object(sent)
    for rank, found in enumerate(rows):
        if found is not None:
            raise error or type(found)(f"rank {rank}: {found}")
