"""The steps of an engine: a span for each, and what they were like, in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..algorithms.base import Algorithm, Point
from ..errors import warn
from ..logs import log_on_root, megabytes
from ..trace import ExchangeCounters, Tracer
from .points import PointOrder

INTERVAL_S = 60.0
"""Seconds between two lines in the log about the steps under way."""


FORWARD, BACKWARD, STEP = Point.FORWARD, Point.BACKWARD, Point.STEP  # looked up in every step


class Progress:
    """Times the steps of an engine on this rank.

    A step is a span "step" from `FORWARD` to the end of `STEP`; without `STEP`, as where a wrapper knows no
    optimizers, to the next `FORWARD` after a `BACKWARD`. In the log, a step lasts from the end of one to the end
    of the next, with all that the program does in between.

    Args:
        tracer: Receives the spans.
        logger: Receives a line every `INTERVAL_S` seconds.
        rank: This rank. Rank 0 logs at INFO, others at DEBUG.
        counters: The exchanges of the engine.
        on_device: Whether a device exchanges, for which the host does not wait.
        order: Checks the order of the points; None for a wrapper, which has its own spans of the stages of a
            step: "forward and backward", from `FORWARD` to `BACKWARD`, and "optimizer", from there to `STEP`.
        ended: Called with the number of each step, its begin and its end, by `time.perf_counter_ns`.
    """

    def __init__(
        self,
        tracer: Tracer,
        logger: logging.Logger,
        rank: int,
        counters: ExchangeCounters,
        *,
        on_device: bool,
        order: PointOrder | None,
        ended: Callable[[int, int, int], None],
    ) -> None:
        self._order, self._ended = order, ended
        self._tracer, self._logger, self._rank, self._counters = tracer, logger, rank, counters
        self._on_device = on_device
        self._began_ns = self._stage_ns = 0  # of this step, and of its present stage; 0: not begun
        self._passed = False  # whether this step has had a backward pass
        self._has_step = False  # whether STEP is reported
        self._steps = self._last_ns = 0  # steps that have ended, and when the last of them did
        self._warm = self._since = _Reading()  # after the first step, and when the last line was logged
        self._next_line_ns = time.perf_counter_ns() + round(INTERVAL_S * 1e9)

    def begin(self, point: Point, step: int) -> int:
        """Record that training has reached `point` after `step` steps; return the time by `time.perf_counter_ns`.

        Raises:
            ArrayError: A point was left out before.
        """
        if self._order is not None:
            self._order.check(point, step)
        return time.perf_counter_ns()

    def restart(self) -> None:
        """Expect the first point of a step next, as after a checkpoint was loaded."""
        if self._order is not None:
            self._order.restart()

    def reach(self, point: Point, began_ns: int, step: int) -> None:
        """Record that the engine's work at `point`, which began at `began_ns`, has ended.

        Args:
            point: The point that training has reached.
            began_ns: The result of `begin`.
            step: The number of steps that had ended by then.
        """
        if self._order is not None:
            self._order.reach(point)
            self._add_stage(point, began_ns)
        if point is BACKWARD:
            self._passed = True
        elif point is FORWARD:
            if not self._began_ns:
                self._began_ns = began_ns
            elif self._passed and not self._has_step:
                self._end(began_ns, self._steps)
                self._began_ns = began_ns
        else:
            self._has_step = True
            if self._began_ns:
                self._end(time.perf_counter_ns(), step)

    def _add_stage(self, point: Point, began_ns: int) -> None:
        """Add the stage that has ended, and begin the next one."""
        if self._stage_ns and point is not FORWARD:
            name = "forward and backward" if point is BACKWARD else "optimizer"
            self._tracer.add(name, self._stage_ns, began_ns, {})
        self._stage_ns = 0 if point is STEP else time.perf_counter_ns()

    def _end(self, end_ns: int, step: int) -> None:
        self._tracer.add("step", self._began_ns, end_ns, {"step": step})
        self._ended(step, self._began_ns, end_ns)
        self._began_ns, self._passed = 0, False
        self._steps, self._last_ns = self._steps + 1, end_ns
        if self._steps == 1:  # it compiles kernels and opens connections
            self._warm = self._since = self._read()
        elif end_ns > self._next_line_ns:
            self._next_line_ns = end_ns + round(INTERVAL_S * 1e9)
            log_on_root(self._logger, self._rank, "step %d: %s", step, self._describe(self._since))
            self._since = self._read()

    def report_alone(self, algorithm: Algorithm, steps: int) -> None:
        """Warn if the ranks have exchanged nothing at all; log the steps since the last exchange otherwise.

        Args:
            algorithm: The algorithm of the engine.
            steps: The number of steps that have ended since the ranks communicated last.
        """
        if self._steps and not self._counters.exchange.calls and self._rank == 0:
            warn(
                f"{algorithm} has exchanged nothing in {self._steps} "
                f"step{'s' * (self._steps > 1)}: each rank has trained alone, and the weights differ between "
                "ranks. Let it communicate more often, as by fewer local_steps, or train for longer",
            )
        elif steps > 0 and self._counters.exchange.calls:
            text = "%d step%s since the last exchange stay on each rank: the weights differ between ranks"
            log_on_root(self._logger, self._rank, text, steps, "s" * (steps > 1))

    def close(self) -> None:
        """Log all steps but the first, in one line, and warn if steps were not reported as such."""
        if self._order is not None and self._order.lacks_step:
            warn(
                "Engine: engine.at(Point.STEP) was never called, so all steps counted as one; call it after each "
                "step of the optimizer",
            )
        if self._steps > 1:
            text = self._describe(self._warm)
            log_on_root(self._logger, self._rank, "%d steps, %s", self._steps, text)
        self._steps = 0

    def _read(self) -> _Reading:
        return _Reading(self._steps, self._last_ns, self._counters + ExchangeCounters())  # a copy

    def _describe(self, since: _Reading) -> str:
        return describe(
            self._steps - since.steps,
            (self._last_ns - since.time_ns) / 1e9,
            self._counters - since.counters,
            on_device=self._on_device,
        )


@dataclass(frozen=True)
class _Reading:
    """The counts at one time."""

    steps: int = 0
    time_ns: int = 0
    counters: ExchangeCounters = field(default_factory=ExchangeCounters)


def describe(steps: int, seconds: float, counters: ExchangeCounters, *, on_device: bool = False) -> str:
    """Return what steps were like: their time, waits, and bytes.

    Args:
        steps: Their number.
        seconds: Their time.
        counters: Their exchanges.
        on_device: Whether a device exchanges: then the host's waits say nothing.

    >>> from bagua_comm.trace import Counter
    >>> exchange, wait = Counter(500, 10**9, 1_500_000_000, 10_000_000_000), Counter(500, time_ns=4_000_000_000)
    >>> describe(500, 19.0, ExchangeCounters(exchange, wait))
    '38 ms each; waiting 8 ms (21 %), 60 % of communication hidden; 3.0 MB a step sent'
    """
    parts = [f"{_milliseconds(seconds / steps)} each"]
    if counters.exchange.calls and not on_device:
        waited, exchanged = counters.wait.seconds, counters.exchange.seconds
        hidden = max(0.0, 1 - waited / exchanged) if exchanged else 0.0
        parts.append(
            f"waiting {_milliseconds(waited / steps)} ({waited / seconds:.0%}), {hidden:.0%} of communication "
            "hidden".replace("%", " %")
        )
    if counters.exchange.calls:
        parts.append(f"{megabytes(counters.exchange.wire_bytes / steps)} a step sent")
    return "; ".join(parts)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.0995 else f"{1e3 * seconds:.0f} ms"
