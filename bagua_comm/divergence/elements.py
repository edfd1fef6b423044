"""Elements of two arrays: the first one whose bits differ, and the distance in units in the last place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import arrays
from ..arrays import Array


@dataclass(frozen=True)
class ElementDifference:
    """The first element in which two arrays of one shape and dtype differ.

    Attributes:
        index: Its index, one number for each dimension.
        values: The two values, as text from which the bits can be read again.
        ulps: Their distance in units in the last place: how many numbers of the dtype lie between them, plus one;
            0 between 0.0 and -0.0. For integers and bool, the difference. Of a complex number, the larger one
            of its parts. None if a value is NaN.
        count: How many elements differ.
        size: How many elements the arrays have.
        largest_ulps: The largest distance of any two elements that differ; None if each of these pairs has a NaN.
    """

    index: tuple[int, ...]
    values: tuple[str, str]
    ulps: int | None
    count: int
    size: int
    largest_ulps: int | None

    def __str__(self) -> str:
        first, second = self.values
        text = f"element {list(self.index)} is {first} against {second}, {_apart(self.ulps)}"
        if self.count == 1:
            return f"{text}; the other {self.size - 1} elements are equal" if self.size > 1 else text
        return f"{text}; {self.count} of {self.size} elements differ, by at most {_units(self.largest_ulps)}"


def _apart(ulps: int | None) -> str:
    if ulps == 0:
        return "equal as numbers"
    return "with a NaN" if ulps is None else f"{_units(ulps)} apart"


def _units(ulps: int | None) -> str:
    if ulps is None:
        return "an unknown distance, with NaN"
    return "1 unit in the last place" if ulps == 1 else f"{ulps} units in the last place"


def first_difference(a: Array, b: Array) -> ElementDifference | None:
    """The first element, in C order, whose bits differ in two host arrays; None if all are equal.

    Args:
        a: A NumPy array of numbers or bool.
        b: One of the same shape and dtype.
    """
    size, width = a.size, a.dtype.itemsize
    rows_a, rows_b = (arrays.as_bytes(arrays.contiguous(x)).reshape(size, width) for x in (a, b))
    differ = np.flatnonzero((rows_a != rows_b).any(axis=1))
    if not len(differ):
        return None
    theirs, others = a.reshape(-1)[differ], b.reshape(-1)[differ]
    distances, known = _distances(theirs, others)
    return ElementDifference(
        tuple(int(i) for i in np.unravel_index(int(differ[0]), a.shape)),
        (_text(theirs[0]), _text(others[0])),
        int(distances[0]) if known[0] else None,
        len(differ),
        size,
        int(distances[known].max()) if known.any() else None,
    )


def _text(value: np.generic) -> str:
    """The shortest text that names this value among those of its dtype; of a NaN also its bits."""
    bits = f" (0x{value.tobytes()[::-1].hex()})" if value != value else ""
    return str(value) + bits


def _distances(a: Array, b: Array) -> tuple[Array, Array]:
    """The distances of pairs of elements in units in the last place, as uint64, and where neither is NaN."""
    if a.dtype.kind == "c":
        (real, known), (imaginary, also) = _distances(a.real, b.real), _distances(a.imag, b.imag)
        return np.maximum(real, imaginary), known & also
    if a.dtype.kind in "biu":  # of signed numbers too, the difference modulo 2^64 is the distance
        larger, smaller = np.maximum(a, b).astype(np.uint64), np.minimum(a, b).astype(np.uint64)
        return larger - smaller, np.ones(a.shape, bool)
    # The bits of floats of one sign are in the order of their magnitudes.
    (below, sign), (above, other) = _magnitude(a), _magnitude(b)
    within = np.maximum(below, above) - np.minimum(below, above)
    return np.where(sign == other, within, below + above), ~((a != a) | (b != b))


def _magnitude(x: Array) -> tuple[Array, Array]:
    """How many floats lie between zero and each element, as uint64, and which elements have a sign."""
    bits = arrays.contiguous(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)
    sign = np.uint64(1 << (8 * x.dtype.itemsize - 1))
    return bits & ~sign, (bits & sign) != 0
