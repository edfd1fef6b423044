"""What benchmarks/gpu.py makes of its record: what was aimed at, what was right, and what was left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Results = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """Something aimed at.

    Args:
        name: What is measured, with its unit.
        path: Where the figure is in the record's sections.
        wanted: The bound, or what the figure should be.
        met: Of the figure and `wanted`.
    """

    name: str
    path: tuple[str, ...]
    wanted: Any
    met: Callable[[Any, Any], bool]

    def row(self, sections: Results) -> Results:
        """The target beside what was measured; None for what was not."""
        figure: Any = sections
        for key in self.path:
            figure = figure.get(key) if isinstance(figure, dict) else None
        met = None if figure is None else self.met(figure, self.wanted)
        return {"target": self.name, "wanted": self.wanted, "measured": figure, "met": met}


def at_least(figure: float, wanted: float) -> bool:
    """Whether a figure is high enough."""
    return figure >= wanted


def at_most(figure: float, wanted: float) -> bool:
    """Whether a figure is low enough."""
    return figure <= wanted


def is_equal(figure: Any, wanted: Any) -> bool:
    """Whether a figure is what it should be."""
    return bool(figure == wanted)


_ENQUEUED = ("costs", "results", "enqueued, 1024 KiB")

TARGETS = [
    *(
        Target(
            f"{verb} of float32 in blocks of 512: bandwidth as a share of a copy's, at least",
            ("codecs", "results", f"minmax {call} float32", "of_copy", "median"),
            share,
            at_least,
        )
        for verb, call, share in (
            ("encode", "encode", 0.85),
            ("decode", "decode", 0.85),
            ("combine, p = 8,", "combine 8", 0.8),
        )
    ),
    Target("kernels per quantized_allreduce", (*_ENQUEUED, "kernels"), ["encode", "combine", "decode"], is_equal),
    Target(
        "collectives per quantized_allreduce",
        (*_ENQUEUED, "collectives"),
        {"alltoall": 1, "allgather": 1},
        is_equal,
    ),
    Target(
        "microseconds of the host to enqueue one quantized_allreduce, at most",
        ("costs", "results", "host time, 1024 KiB", "us", "whole", "median"),
        80.0,
        at_most,
    ),
]


def left_out(sections: Results) -> list[str]:
    """What was not done, and why."""
    whole = [f"{name}: {entry['reason']}" for name, entry in sections.items() if "reason" in entry]
    return whole + [f"{path}: {reason}" for path, key, reason in leaves(sections) if key == "left_out"]


CHECKS: dict[str, Callable[[Any], bool]] = {
    "wrong": lambda count: count == 0,
    "error": lambda error: error < 0.02,
    "ahead": bool,
    "differs_from_other_values": bool,
    "same_bytes_on_all_ranks": bool,
    "host_waits_for_nothing": bool,
    "exact losses differ by": lambda difference: difference < 1e-3,
    "bytegrad losses differ by": lambda difference: difference < 0.05,
}
"""What results have to be, by their name."""


def checks(sections: Results) -> Results:
    """How many results were right, and which were not."""
    found = [
        (f"{path}, {key}: {value}", CHECKS[key](value)) for path, key, value in leaves(sections) if key in CHECKS
    ]
    return {"right": sum(right for _, right in found), "wrong": [name for name, right in found if not right]}


def leaves(sections: Results) -> Iterator[tuple[str, str, Any]]:
    """All that sections have found: where it is, its name, and the value."""

    def walk(path: str, found: Results) -> Iterator[tuple[str, str, Any]]:
        for key, value in found.items():
            if isinstance(value, dict):
                yield from walk(f"{path}, {key}", value)
            else:
                yield path, key, value

    for name, entry in sections.items():
        yield from walk(name, entry.get("results") or {})


def summary(record: Results) -> Iterator[str]:
    """The end of what is printed."""
    for row in record["targets"]:
        verdict = {True: "met", False: "missed", None: "not measured"}[row["met"]]
        yield f"{row['target']} {row['wanted']}: {row['measured']} ({verdict})"
    yield f"{record['checks']['right']} results right; wrong: {record['checks']['wrong'] or 'none'}"
    yield from (f"left out: {reason}" for reason in record["left_out"])
