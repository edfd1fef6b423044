"""Agreement between the ranks of an MPI communicator, before a call, on the call and on its message sizes."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ...arrays import Array, Scratch, dtype_name, text_row, texts_of
from ...errors import CommMismatch
from .. import derived
from ..flow import Flow, Message, Wait
from ..notices import different_calls
from . import tuning
from .endpoint import Endpoint
from .messages import Messages
from .paced_messages import PacedMessages


class Agreement:
    """Checks that all ranks make the same call, and chooses the sizes of its messages.

    Args:
        endpoint: Waits for MPI.
        messages: Makes the exchanges of calls.
        scratch: Memory for arrays that must be copied first.
    """

    def __init__(self, endpoint: Endpoint, messages: Messages, scratch: Scratch) -> None:
        self._endpoint, self._comm, self._calls = endpoint, endpoint.comm, endpoint.calls
        self._messages, self._scratch = messages, scratch
        self.rank, self.size = endpoint.rank, endpoint.size
        self._speeds: deque[float] = deque([0.0], maxlen=tuning.FAST_CALLS)
        """Bytes per second that this rank sent in its latest large calls."""
        self._coded_piece_bytes: int | None = tuning.PIECE_BYTES
        """None on slow networks, where the size of the array decides; see `tuning.paced_bytes`."""

    def expect_slow_network(self) -> None:
        """Choose messages for a slow network until a call has shown that it is fast."""
        self._coded_piece_bytes = None

    def agree(self, call: str, x: Array) -> Flow:
        """See `Transport.agree_on_call`. The ranks also agree on the size of pieces, from this call on."""
        window = self._endpoint.window
        if window is not None:
            number = zlib.crc32(f"{call} {dtype_name(x.dtype)} {x.nbytes}".encode())
            if not self._endpoint.run_in_window(0, window.agree, number):
                raise self.mismatch(call, x)
            return self.flow(tuning.FAST_PIECE_BYTES)
        number = zlib.crc32(f"{call} {dtype_name(x.dtype)}".encode())
        is_fast = max(self._speeds) > tuning.FAST_BYTES_S
        smallest, largest = self._bounds(np.array([number, x.nbytes, is_fast], np.int64))
        if (smallest[:2] != largest[:2]).any():
            raise self.mismatch(call, x)
        if smallest[2]:
            self._coded_piece_bytes = tuning.FAST_CODED_PIECE_BYTES
            return self.flow(tuning.FAST_PIECE_BYTES)
        self._coded_piece_bytes = None
        sleeping = x.nbytes > tuning.LONG_BYTES
        paced = PacedMessages(self._comm, tuning.MAX_MESSAGES_AHEAD, sleeping_wait=sleeping)
        return self._flow(tuning.paced_bytes(x.nbytes, tuning.PACED_BYTES), paced)

    def coded_piece_bytes(self, nbytes: int) -> int:
        """See `Transport.coded_piece_bytes`."""
        return self._coded_piece_bytes or tuning.paced_bytes(nbytes, tuning.PACED_CODED_BYTES)

    def flow(self, piece_bytes: int) -> Flow:
        """The exchanges of a call whose messages are sent at once."""
        return self._flow(piece_bytes, PacedMessages(self._comm, None))

    def _flow(self, piece_bytes: int, paced: PacedMessages) -> Flow:
        return _AgreedFlow(self._messages, piece_bytes, paced, self._scratch)

    def watch_speed(self, call: Callable[[], object]) -> None:
        """Make a call, and measure the speed of the network."""
        sent, start = self._calls.sent_bytes, time.monotonic()
        call()
        sent, elapsed_s = self._calls.sent_bytes - sent, time.monotonic() - start
        if sent >= tuning.PIECE_BYTES:
            self._speeds.append(sent / max(elapsed_s, 1e-9))

    def _bounds(self, values: Array) -> tuple[Array, Array]:
        """The smallest and the largest of all ranks' values, element by element. Collective.

        The first value is the number of the call: a rank may take the small array of another call for values.
        """
        if self.size > tuning.FEW_RANKS and isinstance(self._comm, MPI.Comm):
            both = np.concatenate([values, -values])
            self._endpoint.complete(lambda: self._comm.Iallreduce(MPI.IN_PLACE, both, MPI.MIN), both)
            return both[: values.size], -both[values.size :]
        table = np.zeros((self.size, values.size), values.dtype)
        table[self.rank] = values
        self._allgather_in_place(table)
        return table.min(axis=0), table.max(axis=0)

    def mismatch(self, call: str, x: Array) -> CommMismatch:
        """The error to raise when all ranks know that their calls differ. Collective."""
        table = np.zeros((self.size, 256), np.uint8)
        table[self.rank] = text_row(f"{call} of {x.size} x {dtype_name(x.dtype)} ({x.nbytes} bytes)", 256)
        self._allgather_in_place(table)
        return CommMismatch(different_calls(texts_of(table)))

    def _allgather_in_place(self, table: Array) -> None:
        self._endpoint.complete(lambda: self._comm.Iallgather(MPI.IN_PLACE, [table, MPI.BYTE]), table)


class _AgreedFlow(Flow):
    """Exchanges whose sizes are agreed on: receivers wait for them without asking for the sizes."""

    def __init__(self, messages: Messages, piece_bytes: int, paced: PacedMessages, scratch: Scratch) -> None:
        super().__init__(messages, piece_bytes)
        self._messages, self._paced, self._scratch = messages, paced, scratch

    def begin(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Wait:
        """See `Flow.begin`."""
        return self._messages.start(self._paced, sends, recvs)

    # The calls of the transport would have the ranks agree once more.

    def alltoall_at_once(self, table: Array, into: Array) -> None:
        """See `Flow.alltoall_at_once`."""
        derived.alltoall(self, table, into, self._scratch)

    def allgather_at_once(self, mine: Array, into: Array) -> None:
        """See `Flow.allgather_at_once`."""
        derived.allgather(self, mine, into)


def call_name(name: str, op: str = "", root: int | None = None) -> str:
    """A call with all that must be the same on all ranks, except dtype and size."""
    words = [name, op] if op else [name]
    if root is not None:
        words += ["from" if name == "broadcast" else "to", str(root)]
    return " ".join(words)
