"""What ranks did differently, for those of them that cannot see it: told through the store."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from bagua_comm.arrays import Array

ANSWER_S = 5.0
"""How long the store may take to answer: its process may have been stopped or killed."""

TEXT_BYTES = 256
"""The size of the text of a call that ranks send each other when their calls differ."""

_KEY = "calls-differ"


class Verdict:
    """Why one rank closed all its connections. A peer that lost it, and looks here, knows that it did not die.

    Args:
        store: The part of the store that belongs to one transport.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def tell(self, text: str) -> None:
        """Leave `text` for the peers."""
        self._ask(lambda: self._store.set(_KEY, text))

    def heard(self) -> str | None:
        """What a rank has told; None if none has, or the store does not answer."""
        found = self._ask(lambda: self._store.get(_KEY) if self._store.check([_KEY]) else None)
        return None if found is None else str(found.decode(errors="replace"))

    def _ask(self, question: Any) -> Any:
        """The answer to `question`; None if the store is gone. Waits no longer than `ANSWER_S`."""
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError:
                return  # the store went with its process

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWER_S)
        return answers[0] if answers else None


def as_row(text: str) -> Array:
    """The beginning of `text` in `TEXT_BYTES` bytes."""
    row, data = np.zeros(TEXT_BYTES, np.uint8), text.encode()[:TEXT_BYTES]
    row[: len(data)] = np.frombuffer(data, np.uint8)
    return row


def calls_that_differ(rows: Array) -> str:
    """The message of the error that all ranks raise, from the texts of their calls, (p, TEXT_BYTES)."""
    calls = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), 0)
    return f"ranks made different calls: rank 0 called {calls[0]}, but rank {other} called {calls[other]}"


def messages_that_differ(table: Array) -> str | None:
    """What does not fit in the messages of one call; None if all do.

    Args:
        table: For each rank the bytes that it sends to each rank, and those that it expects from each,
            (p, 2, p); -1 where there is no message.
    """
    sent, expected = table[:, 0], table[:, 1].T  # (p, p): from row to column
    for source, dest in np.argwhere(sent != expected).tolist():
        what = [f"{n} bytes" if n >= 0 else "nothing" for n in (sent[source, dest], expected[source, dest])]
        return f"rank {source} sends {what[0]} to rank {dest}, which expects {what[1]}"
    return None
