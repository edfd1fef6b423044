"""Collective calls with their count, by which ranks can tell which call each of them has reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .call_state import CallState


class CountedCalls(CallState):
    """The calls of one rank of a group: how many collective ones it has completed, and their names."""

    def __init__(self) -> None:
        super().__init__()
        self.completed = [0]
        """How many collective calls this rank has completed: a list of one number, which the world shares."""
        self.begun_by_rank: memoryview | None = None
        """How many collective calls each rank has begun; None unless all share memory."""
        self._history: deque[str] = deque(maxlen=64)
        """Names of the latest collective calls."""
        self._groups_made = 0
        self.making: list[str] = []
        """The name of the group that the call in progress makes, if it makes one."""

    def begin_call(self, name: str, *, collective: bool, describe: Callable[[], str] | None = None) -> None:
        """See `CallState.begin_call`."""
        self._call, self._in_collective, self._deadline_s = name, collective, None
        if collective:
            self._history.append(name)
            if self.begun_by_rank is not None:
                self.begun_by_rank[self.rank] = self.completed[0] + 1

    def end_call(self) -> None:
        """See `CallState.end_call`."""
        if self._in_collective and self.broken is None:
            self.completed[0] += 1
        self._call, self._in_collective = None, False
        if self.making:
            self.making = []

    def cancel_call(self) -> None:
        """See `CallState.cancel_call`."""
        if self._in_collective:
            self._history.pop()
        super().cancel_call()

    @property
    def in_collective(self) -> bool:
        """Whether a collective call is in progress."""
        return self._in_collective

    def publish(self, begun_by_rank: memoryview | None) -> None:
        """Count the calls of this rank in memory that all ranks see, from now on; in none if None."""
        self.begun_by_rank = begun_by_rank

    def name_new_group(self, group: str, end: str = "") -> str:
        """The name of a group that the call in progress makes of `group`; an abort of `group` includes it."""
        self._groups_made += 1
        made = f"{group}.{self._groups_made}{end}"
        self.making = [made]
        return made

    def has_begun(self, rank: int) -> bool | None:
        """Whether `rank` has begun the collective call in progress; None if that cannot be known."""
        if self.begun_by_rank is None or not self._in_collective:
            return None
        return self.begun_by_rank[rank] > self.completed[0]

    def last_call_of(self, rank: int) -> str:
        """A clause about the last collective call that `rank` has begun; empty unless all ranks share memory."""
        if self.begun_by_rank is None:
            return ""
        begun = self.begun_by_rank[rank]
        number = self.completed[0] + self._in_collective  # of the last call in the history
        behind = number - begun
        if begun == 0:
            return ", which has begun no collective call yet (a call refused for its arguments does not count)"
        if behind < 0:
            return ""
        before = {0: "", 1: ", the one before this"}.get(behind, f", {behind} collective calls before this one")
        if behind >= len(self._history):
            return f", whose last collective call was{before.removeprefix(',')}"
        return f", whose last collective call was {self._history[-1 - behind]}{before}"
