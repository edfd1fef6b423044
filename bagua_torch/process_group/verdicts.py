"""Descriptions of mismatched calls, and a way to give the error of one rank to all through the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import numpy as np

from bagua_comm import CommAborted, CommMismatch, CommTimeout, RankFailed
from bagua_comm.arrays import Array

from .store import Store
from .waiter import run_watched

ANSWER_S = 5.0
"""How long the store may take to answer; its process may have been stopped or killed."""

_KEY = "verdict"

T = TypeVar("T")


SharedError = CommAborted | CommMismatch | CommTimeout | RankFailed
"""The errors that a rank gives to all."""


class Verdict:
    """Why one rank has closed all its connections, so that its peers do not count it as dead.

    Args:
        store: The part of the store that belongs to one transport.
        server: The rank whose process serves the store, if it is a rank of the transport.
    """

    def __init__(self, store: Store, server: int | None = None) -> None:
        self._store, self.server = store, server
        self.own: SharedError | None = None
        """The error after which this rank has closed its connections."""

    def post(self, error: SharedError) -> None:
        """Store `error` for the peers, unless another rank has stored one: the first is the cause."""
        lost = error.ranks if isinstance(error, RankFailed) else ()
        entry = {"error": type(error).__name__, "text": str(error), "lost": lost}
        with suppress(ConnectionError):
            self._ask(lambda: self._store.compare_set(_KEY, "", json.dumps(entry)))

    def read(self) -> SharedError | None:
        """The error that a rank has stored; None if there is none.

        Raises:
            ConnectionError: The store does not answer.
        """
        found = self._ask(lambda: self._store.get(_KEY) if self._store.check([_KEY]) else None)
        if found is None:
            return None
        entry = json.loads(found)
        return of_same_kind(entry["error"], entry["text"], entry["lost"])

    def _ask(self, request: Callable[[], T]) -> T:
        """The result of `request`. Waits at most `ANSWER_S`."""

        def give_up() -> None:
            raise ConnectionError("the store does not answer")

        try:
            return run_watched(request, give_up, ANSWER_S)
        except RuntimeError as exc:
            raise ConnectionError("the store went with its process") from exc


def of_same_kind(kind: str, text: str, ranks: Iterable[int]) -> SharedError:
    """An error of the class named `kind`."""
    if kind == RankFailed.__name__:
        return RankFailed(text, ranks)
    return {each.__name__: each for each in (CommAborted, CommMismatch, CommTimeout)}[kind](text)


def messages_that_differ(table: Array) -> str | None:
    """The error message for messages of one call that do not match; None if all do.

    Args:
        table: For each rank the bytes that it sends to each rank, and the bytes that it expects from each,
            (p, 2, p); -1 where there is no message.
    """
    sent, expected = table[:, 0], table[:, 1].T  # (p, p): from row to column
    for source, dest in np.argwhere(sent != expected).tolist():
        sizes = [f"{n} bytes" if n >= 0 else "nothing" for n in (sent[source, dest], expected[source, dest])]
        return f"rank {source} sends {sizes[0]} to rank {dest}, which expects {sizes[1]}"
    return None
