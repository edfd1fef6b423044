"""Changes of the ranks of a training: deaths, replacements, and the time that recovery took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .fleet import Death, Process


@dataclass(frozen=True)
class Change:
    """One change of the ranks, after which training has resumed."""

    number: int
    """The round of the rendezvous that agreed on it."""
    time_s: float
    """When this process noticed it, in seconds since 1970."""
    cause: str
    """The failure that this process noticed, as text."""
    dead: tuple[Death, ...]
    """Deaths since the previous change, of spares as well."""
    before: tuple[Process, ...]
    """The previous trainers, by rank."""
    after: tuple[Process, ...]
    """The present trainers, by rank."""
    commit: int
    """The number of the commit from which training has resumed."""
    recovery_s: float | None = None
    """Seconds from noticing it to the first commit after it, or to the end of training; None until then."""

    @property
    def joined(self) -> tuple[Process, ...]:
        """The present trainers that did not train before."""
        return tuple(each for each in self.after if each not in self.before)

    def __str__(self) -> str:
        deaths = ", ".join(map(str, self.dead)) or "nobody died"
        return (
            f"{deaths}; {len(self.before)} ranks before, {len(self.after)} from now on, from commit {self.commit}"
        )


Callback = Callable[[Change], object]


def describe_dead(dead: Iterable[Death]) -> str:
    """The dead processes, as text."""
    return "; ".join(map(str, dead)) or "nobody known"
