"""The health of a training: the latest row of each rank, and what was slow since when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from .rows import Row
from .shifting import Shares, equal


@dataclass(frozen=True)
class Slow:
    """A rank or a link that is slow, or was.

    Attributes:
        what: "rank 3", or "the link from node a to node b".
        ranks: The rank of the world; none for a link.
        since: The number of the first training step in which it was slow.
        until: The step in which it was no longer slow; None before.
        factor: How many times as long it takes: as the median of the other ranks, or as the link took at first.
        cause: The likely cause; "" if the machine shows none.
    """

    what: str
    ranks: tuple[int, ...]
    since: int
    factor: float
    cause: str = ""
    until: int | None = None

    def __str__(self) -> str:
        than = "the other ranks" if self.ranks else "at the start"
        when = f"since step {self.since}" if self.until is None else f"from step {self.since} to {self.until}"
        verb = "has been" if self.until is None else "was"
        cause = f": {self.cause}" if self.cause else ""
        return f"{self.what} {verb} slow {when}, {self.factor:.1f} times as long as {than}{cause}"


@dataclass(frozen=True)
class Health:
    """The report of `Communicator.health`.

    Attributes:
        rows: The latest row of each rank, by rank of the world; empty before the first.
        slow: What is slow now.
        past: What was slow, and is no longer; the last ones.
    """

    rows: Mapping[int, Row] = field(default_factory=dict)
    slow: tuple[Slow, ...] = ()
    past: tuple[Slow, ...] = ()

    def __str__(self) -> str:
        if not self.rows:
            return "health: no row yet; ranks exchange the first one after some training steps"
        step = max(row.step for row in self.rows.values())
        lines = [f"step {step:.0f}; milliseconds of the median step"]
        lines += ["rank    own  waiting  between"]
        lines += [
            f"{rank:4d} {1e3 * row.own_s:6.1f} {1e3 * row.waiting_s:8.1f} {1e3 * row.between_s:8.1f}"
            for rank, row in self.rows.items()
        ]
        return "\n".join([*lines, *map(str, self.slow or ["nothing is slow"]), *map(str, self.past)])

    def as_dict(self) -> dict[str, object]:
        """The report as JSON values."""
        return asdict(self)


PAST = 16
"""The number of ended `Slow` that are kept."""


class HealthLog:
    """What the ranks of one engine have found; the thread of its lane alone writes it, until it is closed.

    Args:
        members: The ranks, as those of the world.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members, self.shares = members, Shares(len(members))
        self.latest = Health()
        self.is_closed = False

    def add_rows(self, ranks: Sequence[int], rows: Sequence[Row]) -> None:
        """Replace the rows by the next ones."""
        self.latest = replace(self.latest, rows=dict(zip(ranks, rows, strict=True)))

    def begin(self, slow: Slow) -> None:
        """Add what has become slow."""
        self.latest = replace(self.latest, slow=(*self.latest.slow, slow))

    def end(self, what: str, step: int) -> Slow:
        """Move what is slow no longer to the past, and return it."""
        ended = replace(next(each for each in self.latest.slow if each.what == what), until=step)
        slow = tuple(each for each in self.latest.slow if each.what != what)
        self.latest = replace(self.latest, slow=slow, past=(*self.latest.past, ended)[-PAST:])
        return ended


class HealthLogs:
    """The logs of the engines of a world, by the names of their communicators; any thread may read them.

    Args:
        groups: The members of each communicator, as ranks of the world.
    """

    def __init__(self, groups: Mapping[str, tuple[int, ...]]) -> None:
        self._groups = groups
        self._logs: dict[str, HealthLog] = {}

    def open(self, group: str) -> HealthLog:
        """Begin the log of an engine, and forget those of closed ones."""
        log = HealthLog(self._groups[group])
        self._logs = {name: each for name, each in self._logs.items() if not each.is_closed} | {group: log}
        return log

    def shares(self, group: str) -> Shares:
        """The microbatches of the ranks of a communicator: by the last engine on them, or equal ones."""
        members, logs = self._groups[group], reversed(self._logs.values())
        found = (log.shares for log in logs if log.members == members and not log.is_closed)
        return next(found, Shares(len(members), is_weighed=False))

    def counts(self, group: str, microbatches: int) -> tuple[int, ...]:
        """The numbers of microbatches of ranks: those of the engine with this communicator, or equal ones."""
        log = self._logs.get(group)
        return equal(microbatches, len(self._groups[group])) if log is None else log.shares.counts(microbatches)

    @property
    def latest(self) -> Health:
        """The rows of the engine that was made last and has any, and what is slow in one of them."""
        found = [each.latest for each in reversed(self._logs.values())]
        slow = {each.what: each for health in found for each in health.slow}
        past = [each for health in found for each in health.past]
        return Health(next((each.rows for each in found if each.rows), {}), tuple(slow.values()), tuple(past))
