"""The order in which a program without a wrapper reports the points of its steps."""

from __future__ import annotations

from ..algorithms.base import Algorithm, Point, Rounds, phases_of, with_defaults
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
    phases = [with_defaults(phase) for phase in phases_of(algorithm)]
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
    """Checks that no point is left out on which the algorithm depends. A repeated `FORWARD` begins a step again.

    Args:
        algorithm: The algorithm of the engine.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        needed = needed_points(algorithm)
        self._before = dict(zip(needed, (*needed[-1:], *needed[:-1]), strict=True))
        self._last = self._any = needed[-1]
        """The last of these points, and the last of all points."""

    def check(self, point: Point, step: int) -> None:
        """Raise if a point was left out before this one.

        Raises:
            ArrayError: It was.
        """
        missing = self._before.get(point, self._last)
        if self._last is not missing and not (point is self._any is Point.FORWARD):
            raise ArrayError(
                f"at({point}): the last point was {self._last}, expected {missing} before, in step {step}; call "
                f"engine.at({missing}) in every step"
            )

    def reach(self, point: Point) -> None:
        """Note that the engine's work at `point` has ended."""
        self._any = point
        if point in self._before:
            self._last = point
