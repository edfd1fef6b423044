"""The order in which a program without a wrapper reports the points of its steps."""

from __future__ import annotations

from ..algorithms.base import Algorithm, Point, Rounds
from ..algorithms.combinators import Every
from ..errors import ArrayError


def needed_points(algorithm: Algorithm) -> tuple[Point, ...]:
    """The points of a step on which `algorithm` depends, in order.

    >>> from bagua_comm import ByteGrad, DiLoCo
    >>> [point.name for point in needed_points(DiLoCo(10))]
    ['FORWARD', 'STEP']
    >>> [point.name for point in needed_points(ByteGrad())]
    ['BACKWARD']
    """
    phases = algorithm.phases
    needed: set[Point] = set()
    for phase in phases:
        window = phase.window
        needed |= {Point.STEP} if isinstance(window, Rounds) else {window.opens, window.closes}
        if phase.lends is not None or phase.payload == "weight":
            needed.add(Point.STEP)
    if len(phases) > 1 or isinstance(algorithm, Every):
        needed |= {Point.FORWARD, Point.STEP}
    if Point.GRADIENT in needed:
        needed.add(Point.BACKWARD)
    return tuple(point for point in Point if point in needed and point is not Point.GRADIENT)


class PointOrder:
    """Checks that no point is left out on which the algorithm depends.

    Several passes may come before a `STEP`, as for microbatches.

    Args:
        algorithm: The algorithm of the engine.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._needed = needed = needed_points(algorithm)
        self._before = dict(zip(needed, (*needed[-1:], *needed[:-1]), strict=True))
        self._last = needed[-1]
        """The last of these points."""
        self._passes = 0
        self._has_step = Point.STEP not in needed

    @property
    def lacks_step(self) -> bool:
        """Whether there were several passes, but no `STEP`, on which the algorithm depends."""
        return self._passes > 1 and not self._has_step

    def restart(self) -> None:
        """Expect the first point next."""
        self._last = self._needed[-1]

    def check(self, point: Point, step: int) -> None:
        """Raise if a point was left out before this one.

        Raises:
            ArrayError: It was.
        """
        missing = self._before.get(point, self._last)
        if self._last is not missing and point is not self._needed[0]:
            raise ArrayError(
                f"at(Point.{point.name}): the last point was Point.{self._last.name}, expected "
                f"Point.{missing.name} before, in step {step}; call engine.at(Point.{missing.name}) in every step"
            )

    def reach(self, point: Point) -> None:
        """Record that the engine's work at `point` has ended."""
        self._passes += point is Point.BACKWARD
        self._has_step |= point is Point.STEP
        if point in self._before:
            self._last = point
