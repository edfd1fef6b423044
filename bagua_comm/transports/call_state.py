"""The state of a transport's calls: the call in progress, its time limit, and the reason to refuse calls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from numbers import Real
from typing import ClassVar

from ..errors import BaguaError, BootstrapError, CommAborted, shown_as

MAX_TIMEOUT_S = 1e9
"""The longest wait, about 30 years, which stands for math.inf: more overflows clocks of the libraries below."""


@shown_as("Transport")
class CallState:
    """The call in progress on one rank of a transport, and the bytes that its calls have sent."""

    name: ClassVar[str]
    rank: int
    size: int
    sent_bytes: int = 0
    """Bytes sent to other ranks so far. Where the library below chooses the algorithm, these are the bytes that a
    bandwidth-optimal algorithm sends."""

    _limit_s: float | None = None

    def __init__(self) -> None:
        self._call: str | None = None
        self._describe: Callable[[], str] | None = None
        self._in_collective = False
        self._deadline_s: float | None = None
        self.broken: str | None = None
        """Why no call can be made any more; None as long as calls can."""
        self._has_refused = False

    def begin_call(self, name: str, *, collective: bool, describe: Callable[[], str] | None = None) -> None:
        """Begin a call of the user: from its first wait on, all its waits together may take `timeout_s`.

        Args:
            name: The name of the call.
            collective: Whether all ranks make it, in the same order.
            describe: Returns the arguments that must be the same on all ranks, such as dtype, op and root.
        """
        self._call, self._in_collective, self._deadline_s = name, collective, None
        self._describe = describe

    def begin_call_within(self, other: CallState) -> None:
        """Begin a part of the call of another transport: the waits of both together take at most its limit."""
        self._call, self._in_collective = other._call, False
        self._deadline_s = other.deadline_s() if other._call is not None else None

    def end_call(self) -> None:
        """End the call. Outside of calls, each wait may take `timeout_s`."""
        self._call, self._in_collective = None, False
        self._describe = None  # it may hold the arrays of the call

    def cancel_call(self) -> None:
        """End the call before it has moved anything: it does not count as made."""
        self._in_collective = False
        self.end_call()

    def stop(self, reason: str) -> None:
        """Let the call in progress fail soon, and refuse all later ones; any thread may call it."""
        self.refuse_calls(reason)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time limit of calls, in seconds, from the next one on."""
        self.timeout_s = timeout_s

    def limit_call(self, timeout_s: float | None) -> None:
        """Set the time limit of the call in progress; None for the transport's own."""
        self._limit_s = timeout_s

    @property
    def limit_s(self) -> float:
        """The time limit of the call in progress."""
        return self._timeout_s if self._limit_s is None else self._limit_s

    def signature(self) -> str:
        """The name and common arguments of the collective call in progress; empty outside of one."""
        if not self._in_collective or self._describe is None:
            return ""
        return self._describe()

    def waited(self) -> str:
        """A clause that says how long the call in progress may wait, as errors show it."""
        call = f" in {self._call}" if self._call is not None else ""
        return f"waited {self.limit_s:g} s for its peers{call}"

    def deadline_s(self) -> float:
        """The time by `time.monotonic` at which a wait that begins now must end."""
        if self._call is None:
            return time.monotonic() + self.timeout_s
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self.limit_s
        return self._deadline_s

    @property
    def timeout_s(self) -> float:
        """How long a call may wait for a peer before it raises `CommTimeout`."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._timeout_s = check_timeout(self.name, value)

    def others(self) -> list[int]:
        """The other ranks, each rank starting behind itself so that not all send to rank 0 first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def check_usable(self) -> None:
        """Raise `CommAborted` if no call can be made any more."""
        if self.broken is not None:
            self._has_refused = True
            raise CommAborted(f"rank {self.rank}: this communicator cannot be used: {self.broken}")

    def refuse_calls(self, reason: str) -> None:
        """Refuse all calls from now on; the first reason stays."""
        self.broken = self.broken or reason

    def name_failure(self, failure: str) -> None:
        """Name the failed call in the errors of later ones, unless one of these has failed already."""
        if self.broken is not None and not self._has_refused:
            self._has_refused, self.broken = True, f"a call failed earlier: {failure}"


def check_timeout(call: str, timeout_s: object, error: type[BaguaError] = BootstrapError) -> float:
    """Return `timeout_s` if it is a positive number of seconds; otherwise raise an `error` that names `call`.

    math.inf becomes `MAX_TIMEOUT_S`.
    """
    # NaN fails every comparison, so it is refused as well.
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    limit_s = float(timeout_s) if is_number else math.nan  # type: ignore[arg-type]
    if not 0 < limit_s <= MAX_TIMEOUT_S and limit_s != math.inf:
        raise error(
            f"{call}: timeout_s is {timeout_s!r}, expected seconds, above 0 and at most {MAX_TIMEOUT_S:g}, or "
            "math.inf for no limit"
        )
    return min(limit_s, MAX_TIMEOUT_S)
