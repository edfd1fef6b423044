"""Descriptions of mismatched calls, and a way to give the error of one rank to all through the store."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from bagua_comm import CommMismatch, RankFailed
from bagua_comm.arrays import Array

ANSWER_S = 5.0
"""How long the store may take to answer; its process may have been stopped or killed."""

TEXT_BYTES = 256
"""The size of the description of a call, which ranks exchange when their calls differ."""

_KEY = "verdict"


class Verdict:
    """Why one rank has closed all its connections, so that its peers do not count it as dead.

    Args:
        store: The part of the store that belongs to one transport.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def post(self, error: CommMismatch | RankFailed) -> None:
        """Store `error` for the peers."""
        lost = error.ranks if isinstance(error, RankFailed) else None
        self._ask(lambda: self._store.set(_KEY, json.dumps({"text": str(error), "lost": lost})))

    def read(self) -> CommMismatch | RankFailed | None:
        """The error that a rank has stored; None if there is none, or the store does not answer."""
        found = self._ask(lambda: self._store.get(_KEY) if self._store.check([_KEY]) else None)
        if found is None:
            return None
        error = json.loads(found)
        return CommMismatch(error["text"]) if error["lost"] is None else RankFailed(error["text"], error["lost"])

    def _ask(self, request: Any) -> Any:
        """The result of `request`; None if the store is gone. Waits at most `ANSWER_S`."""
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(request())
            except RuntimeError:
                return  # the store went with its process

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWER_S)
        return answers[0] if answers else None


def as_row(text: str) -> Array:
    """The first `TEXT_BYTES` bytes of `text`, zero-padded."""
    row, data = np.zeros(TEXT_BYTES, np.uint8), text.encode()[:TEXT_BYTES]
    row[: len(data)] = np.frombuffer(data, np.uint8)
    return row


def calls_that_differ(rows: Array) -> str:
    """The error message for different calls, from the descriptions of all ranks, (p, TEXT_BYTES)."""
    calls = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), 0)
    return f"ranks made different calls: rank 0 called {calls[0]}, but rank {other} called {calls[other]}"


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
