"""Agreement between the ranks of an MPI communicator, before a call, on the call and on its message sizes.

Between hosts, calls by messages that follow a plan (`transports.plan`) begin without a comparison. A rank that
leaves the plan sends nothing of its call before it has notified all others and has compared it with theirs.
Those that follow look for its notice before a call and while they wait. Calls by MPI's own collectives are always
compared: a rank may take the data of another collective for those of its own.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident

import numpy as np
from mpi4py import MPI

from ...arrays import Array, Scratch, dtype_name, text_row, texts_of
from ...errors import CommMismatch
from .. import derived
from ..flow import Flow, Message, Wait
from ..notices import different_calls
from ..plan import Plan
from . import tuning
from .endpoint import Endpoint
from .messages import Messages
from .paced_messages import PacedMessages

_LEFT_TAG = 15
"""Of the notice that a rank leaves the plan: the number of the call in which it does."""


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
        self.plan: Plan | None = None
        """The plan of calls; None unless `learn_plans`."""
        self._text = ""
        """The latest call that was noted, as errors show it."""
        self._values = 0, 0
        """Its number, made of the call, and the bytes of its array."""
        self._serial = 0
        """How many calls were noted before it, and with it."""
        self._user_call = -1
        """The number of the user's call that it belongs to."""
        self._has_left = False
        """Whether it has left the plan."""
        self._uncompared_on: int | None = None
        """The thread that makes it, if it follows the plan without a comparison."""
        self._is_fast, self._uncompared = False, 0
        """Whether the network is fast, as the ranks agreed last; and how many calls were not compared since."""
        self._notices: set[int] = set()
        """The numbers of calls, this one or later ones, in which other ranks have left the plan."""

    def expect_slow_network(self) -> None:
        """Choose messages for a slow network until a call has shown that it is fast."""
        self._coded_piece_bytes = None

    def learn_plans(self) -> Plan | None:
        """Let calls follow plans from now on, if MPI has collectives of its own here; return the plan.

        Those of a channel go by messages, and would match messages of other calls.
        """
        if isinstance(self._comm, MPI.Comm):
            self.plan, self._endpoint.on_listen = Plan(), self._compare_late
        return self.plan

    def end_plan(self) -> None:
        """Compare all calls until a plan is learned again. Collective."""
        if self.plan is not None:
            self.plan.end()

    def agree(self, call: str, x: Array, *, by_messages: bool = False) -> Flow:
        """See `Transport.agree_on_call`. The ranks also agree on the size of pieces, from this call on."""
        window = self._endpoint.window
        if window is not None:
            number = zlib.crc32(f"{call} {dtype_name(x.dtype)} {x.nbytes}".encode())
            if not self._endpoint.run_in_window(0, window.agree, number):
                raise self.mismatch(call, x)
            return self.flow(tuning.FAST_PIECE_BYTES)
        follows = self._note(call, x, kind="by messages" if by_messages else "agreed")
        if follows and by_messages and self._uncompared < tuning.CALLS_UNCOMPARED:
            self._uncompared_on = get_ident()
            self._uncompared += 1
            self._compare_late()
        else:
            self._compare()
        if self._is_fast:
            self._coded_piece_bytes = tuning.FAST_CODED_PIECE_BYTES
            return self.flow(tuning.FAST_PIECE_BYTES)
        self._coded_piece_bytes = None
        sleeping = x.nbytes > tuning.LONG_BYTES
        paced = PacedMessages(self._comm, tuning.MAX_MESSAGES_AHEAD, sleeping_wait=sleeping)
        return self._flow(tuning.paced_bytes(x.nbytes, tuning.PACED_BYTES), paced)

    def note(self, call: str, x: Array, kind: str = "small") -> None:
        """Note a call that is compared in another way, or not at all; if it leaves the plan, compare it now."""
        if self.plan is not None:
            self._note(call, x, kind)
            if self._has_left:
                self._compare()

    def note_messages(self, call: str) -> None:
        """`note` for messages of a collective call of the user, unless it was noted before."""
        if not self._calls.in_collective or self._user_call != self._calls.completed[0]:
            self.note(call, np.empty(0, np.uint8), "messages")

    def _note(self, call: str, x: Array, kind: str) -> bool:
        """Note a call; return whether it follows the plan.

        If it leaves the plan, the other ranks are notified, unless they compare the call that follows it anyway.
        They compare a small one by its own number, and so is this one if it is small, too.
        """
        self._text = _described(call, x)
        self._values = zlib.crc32(f"{call} {dtype_name(x.dtype)}".encode()), x.nbytes
        self._user_call = self._calls.completed[0] if self._calls.in_collective else -1
        self._uncompared_on, self._has_left = None, False
        if self.plan is None:
            return False
        planned = self.plan.calls[self.plan.cursor] if self.plan.in_force else ""
        self._serial += 1
        follows = self.plan.note(f"{kind} {self._text}")
        self._has_left = bool(planned) and not follows and not planned.startswith("small ")
        if self._has_left and planned.startswith("by messages ") and self._uncompared < tuning.CALLS_UNCOMPARED:
            number = np.array([self._serial], np.int64)
            for peer in self._calls.others():
                self._endpoint.complete(functools.partial(self._comm.Isend, number, peer, _LEFT_TAG), number)
            self._receive_notices()
        return follows

    def _compare_late(self) -> None:
        """Compare the call that goes uncompared after all, if another rank has left the plan in it.

        Other threads may wait for messages between two ranks meanwhile.
        """
        if self._uncompared_on != get_ident():
            return
        self._receive_notices()
        if self._serial in self._notices:
            self._uncompared_on, self._has_left = None, True
            begun, self._endpoint.begun = self._endpoint.begun, {}
            try:
                self._compare()
            finally:
                self._endpoint.begun = begun

    def _receive_notices(self) -> None:
        """Receive the notices that have come, and forget those of earlier calls."""
        number = np.zeros(1, np.int64)
        try:
            while (message := self._comm.Improbe(MPI.ANY_SOURCE, _LEFT_TAG)) is not None:
                request = message.Irecv(number)
                if not request.Test():
                    self._endpoint.poll(request.Test)
                self._notices.add(int(number[0]))
        except MPI.Exception as exc:
            raise self._endpoint.abort_after(exc, None) from exc
        self._notices = {each for each in self._notices if each >= self._serial}

    def _compare(self) -> None:
        """Raise on all ranks unless all make the call that was noted last; settle on a plan. Collective."""
        is_fast = max(self._speeds) > tuning.FAST_BYTES_S
        offer = 0 if self.plan is None else self.plan.offer()
        found = self._bounds(np.array([*self._values, is_fast, offer], np.int64))
        if found is None:
            raise self._endpoint.abort_after(self._calls_differ(self._text), None)
        smallest, largest = found
        if (smallest[:2] != largest[:2]).any():
            error = self._calls_differ(self._text)
            raise self._endpoint.abort_after(error, None) if self._has_left else error
        self._is_fast, self._uncompared = bool(smallest[2]), 0
        if self.plan is not None:
            self.plan.settle((int(smallest[3]), int(largest[3])))

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

    def _bounds(self, values: Array) -> tuple[Array, Array] | None:
        """The smallest and the largest of all ranks' values, element by element; None if they are no values.

        Collective. The first value is the number of the call: a rank may take the small array of another call for
        values, if it is no longer.
        """
        if self.size > tuning.FEW_RANKS and isinstance(self._comm, MPI.Comm):
            both = np.concatenate([values, -values])
            self._endpoint.complete(lambda: self._comm.Iallreduce(MPI.IN_PLACE, both, MPI.MIN), both)
            return both[: values.size], -both[values.size :]
        table = np.zeros((self.size, values.size), values.dtype)
        table[self.rank] = values
        if not self._endpoint.gather_rows([table, MPI.BYTE]):
            return None
        return table.min(axis=0), table.max(axis=0)

    def mismatch(self, call: str, x: Array) -> CommMismatch:
        """The error to raise when all ranks know that their calls differ. Collective."""
        return self._calls_differ(_described(call, x))

    def _calls_differ(self, text: str) -> CommMismatch:
        table = np.zeros((self.size, 256), np.uint8)
        table[self.rank] = text_row(text, 256)
        wire = [table, MPI.BYTE]
        self._endpoint.complete(lambda: self._comm.Iallgather(MPI.IN_PLACE, wire), wire)
        return CommMismatch(different_calls(texts_of(table)))


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


def _described(call: str, x: Array) -> str:
    return f"{call} of {x.size} x {dtype_name(x.dtype)} ({x.nbytes} bytes)"


def call_name(name: str, op: str = "", root: int | None = None) -> str:
    """A call with all that must be the same on all ranks, except dtype and size."""
    words = [name, op] if op else [name]
    if root is not None:
        words += ["from" if name == "broadcast" else "to", str(root)]
    return " ".join(words)
