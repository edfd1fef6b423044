"""What happened to the ranks of a training: who died, who came, and how long it took to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from .fleet import Death, Process


@dataclass(frozen=True)
class Change:
    """One change of the ranks, after which training went on."""

    number: int
    """The number of the meeting at which it was agreed on."""
    time_s: float
    """When this process noticed it, in seconds since 1970."""
    cause: str
    """What this process noticed, as text."""
    dead: tuple[Death, ...]
    """Who has died since the change before, those that stood by included."""
    before: tuple[Process, ...]
    """Who trained before, by rank."""
    after: tuple[Process, ...]
    """Who trains from now on, by rank."""
    commit: int
    """The number of the commit that training goes on from."""
    recovery_s: float | None = None
    """Seconds from noticing it to the first commit after it, or to the end of training; None until then."""

    @property
    def joined(self) -> tuple[Process, ...]:
        """Who trains from now on and did not before."""
        return tuple(each for each in self.after if each not in self.before)

    def __str__(self) -> str:
        who = ", ".join(map(str, self.dead)) or "nobody died"
        return f"{who}; {len(self.before)} ranks before, {len(self.after)} from now on, from commit {self.commit}"


Callback = Callable[[Change], object]


class History:
    """The changes of one training, the oldest first."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def add(self, change: Change) -> None:
        """Note a change, from which this process has not recovered yet."""
        self._changes.append(change)

    def recovered(self, now_s: float) -> Change | None:
        """Training goes on since `now_s`; returns the change that it has recovered from, if that is news."""
        if not self._changes or self._changes[-1].recovery_s is not None:
            return None
        last = self._changes[-1]
        self._changes[-1] = replace(last, recovery_s=now_s - last.time_s)
        return self._changes[-1]

    def as_list(self) -> list[Change]:
        """The changes so far."""
        return list(self._changes)


def names_of(dead: Iterable[Death]) -> str:
    """The names of the dead, for a message."""
    return "; ".join(map(str, dead)) or "nobody known"
