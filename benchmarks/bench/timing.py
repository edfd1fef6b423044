"""Times: calls timed in turn, the spread of their samples, and bandwidths."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bagua_comm import Communicator
from bagua_comm.arrays import Array
from bagua_comm.timeline.intervals import Interval, intersection, length, union
from bagua_comm.trace import Span

from .checking import WRONG, Check

# ---------------------------------------------------------------------------------------------------
# Samples
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """The median of some samples, and the quartiles around it."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, samples: Array) -> Spread:
        """The spread of these samples.

        >>> Spread.of(np.arange(5.0))
        Spread(median=2.0, q1=1.0, q3=3.0)
        """
        q1, median, q3 = np.percentile(samples, [25, 50, 75])
        return cls(float(median), float(q1), float(q3))


def in_us(seconds: Array) -> dict[str, float]:
    """Median and quartiles of some seconds, in microseconds.

    >>> in_us(np.array([1e-6]))
    {'median': 1.0, 'q1': 1.0, 'q3': 1.0}
    """
    return asdict(Spread.of(np.asarray(seconds) * 1e6))


# ---------------------------------------------------------------------------------------------------
# Calls in turn
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call to time.

    Args:
        run: The timed function; returns the result.
        prepare: Called before each `run`: writes the input, and poisons the output.
        expected: The expected result; None if this rank gets none.
        check: The comparison of the two.
        within: Returns a context manager in which `run` is called; entering and leaving it are not timed.
    """

    run: Callable[[], Array | None]
    prepare: Callable[[], object]
    expected: Array | None
    check: Check = WRONG
    within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True)
class Measurement:
    """The times of one call, and whether its result is right."""

    seconds: Array
    """(iterations,): the slowest rank's time of every call."""
    fault: float
    """The result of the check for the worst call; 0 if all results are right."""
    wire_bytes: int
    """Bytes that rank 0 sent in the last call, from the communicator's counters."""


def measure(
    comm: Communicator,
    calls: Sequence[Call],
    *,
    barrier: Callable[[], object],
    warmup: int,
    iterations: int,
) -> list[Measurement]:
    """Time and check calls in turn (first, second, ..., first, second, ...), `iterations` times each.

    Collective. A barrier precedes each call. A call has ended when its slowest rank has.
    """
    seconds = np.zeros((len(calls), iterations))
    faults = np.zeros((len(calls), iterations))
    wire_bytes = np.zeros((len(calls), iterations))
    for i in range(-warmup, iterations):
        for c, call in enumerate(calls):
            call.prepare()
            sent = comm.counters.total().wire_bytes
            with call.within():
                barrier()
                start = time.perf_counter()
                result = call.run()
                elapsed = time.perf_counter() - start
            sent = comm.counters.total().wire_bytes - sent
            if i >= 0:
                seconds[c, i], wire_bytes[c, i] = elapsed, sent
                if call.expected is not None:
                    faults[c, i] = call.check.judge(result, call.expected)
    table = comm.allgather(np.stack([seconds, faults, wire_bytes]))  # (p, 3, calls, iterations)
    slowest = table[:, 0].max(axis=0)
    return [
        Measurement(slowest[c], call.check.total(table[:, 1, c]), int(table[0, 2, c, -1]))
        for c, call in enumerate(calls)
    ]


# ---------------------------------------------------------------------------------------------------
# Processors
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Processors:
    """Clock ticks that the processors of this machine have spent since it started, for all processes."""

    worked: int
    idle: int

    @classmethod
    def now(cls, stat: Path = Path("/proc/stat")) -> Processors | None:
        """The ticks so far; None without Linux's /proc.

        Time that a hypervisor gave to other machines counts neither as work nor as idle.
        """
        try:
            ticks = [int(number) for number in stat.read_text().split("\n")[0].split()[1:8]]
        except OSError:
            return None
        user, nice, system, idle, waiting, irq, softirq = ticks
        return cls(user + nice + system + irq + softirq, idle + waiting)

    def busy_since(self, before: Processors) -> float | None:
        """The fraction of the time since then in which they worked, 0 to 1; None if no tick has passed.

        >>> Processors(worked=130, idle=70).busy_since(Processors(100, 60))
        0.75
        """
        worked, idle = self.worked - before.worked, self.idle - before.idle
        return worked / (worked + idle) if worked + idle else None


# ---------------------------------------------------------------------------------------------------
# Overlap
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """The overlap of exchanges and backward passes: sums over some steps, in nanoseconds."""

    exchanges: int
    exchange_ns: int
    backward_ns: int
    both_ns: int
    """Time of exchanges within a backward pass."""

    @classmethod
    def of(cls, spans: Sequence[Span], steps: int, exchange: Collection[str] = ("exchange",)) -> Overlap:
        """The overlap of the last `steps`, from what `bagua_torch.DistributedDataParallel` and its engine trace.

        A backward pass lasts from its first gradient to its last; the wait for exchanges after it does not count.
        The exchanges of a lane follow each other. Exchanges are spans of the names in `exchange`.

        >>> def span(name, start, end):
        ...     return Span(name, "", start, end, {})
        >>> found = Overlap.of([span("backward", 0, 60), span("exchange", 30, 70), span("exchange", 70, 90)], 1)
        >>> found.exchange_ns, found.backward_ns, found.both_ns, found.fraction
        (60, 60, 30, 0.5)
        """
        passes = [span for span in spans if span.name == "backward"][-steps:]
        since = passes[0].start_ns if passes else 0
        exchanges = [span for span in spans if span.name in exchange and span.start_ns >= since]
        both = length(intersection(_times(exchanges), _times(passes)))
        return cls(len(exchanges), _total_ns(exchanges), _total_ns(passes), both)

    @property
    def fraction(self) -> float:
        """The time of both at once, as a fraction of the shorter of the two, which bounds it: 0 to 1."""
        possible = min(self.exchange_ns, self.backward_ns)
        return self.both_ns / possible if possible else 0.0


def _times(spans: Sequence[Span]) -> list[Interval]:
    return union((span.start_ns, span.end_ns) for span in spans)


def _total_ns(spans: Sequence[Span]) -> int:
    return sum(span.end_ns - span.start_ns for span in spans)


# ---------------------------------------------------------------------------------------------------
# Bandwidth
# ---------------------------------------------------------------------------------------------------


def bandwidth_gbs(nbytes: int, seconds: float) -> float:
    """Algorithm bandwidth, S / t, in 10**9 bytes a second."""
    return nbytes / seconds / 1e9


def allreduce_factor(p: int) -> float:
    """Bus bandwidth / algorithm bandwidth of allreduce.

    A chunk of S / p must leave p - 1 ranks to be added up, and reach p - 1 ranks again: over p chunks
    2 (p - 1) S bytes, through p links of bandwidth B at once, so B = S / t * 2 (p - 1) / p.
    """
    return 2 * (p - 1) / p


def chunks_factor(p: int) -> float:
    """Bus bandwidth / algorithm bandwidth of reduce_scatter, allgather and alltoall; S is all p chunks.

    Of the p chunks of S / p that a rank sends or receives, p - 1 cross its link and one stays:
    S (p - 1) / p bytes through each link of bandwidth B, so B = S / t * (p - 1) / p.
    """
    return (p - 1) / p


def root_factor(p: int) -> float:
    """Bus bandwidth / algorithm bandwidth of broadcast and reduce.

    All S bytes leave the root's one link (broadcast), or come in through it (reduce), whatever p:
    S bytes through a link of bandwidth B, so B = S / t.
    """
    return 1.0
