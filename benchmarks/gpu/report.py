"""The record of benchmarks.gpu, made of its lines: targets, checks of results, and sections that are missing.

How fast a codec's kernel can be follows from arithmetic: each lane of a GPU issues one instruction a cycle, and a
kernel cannot be faster than a copy of as many bytes. `python -m benchmarks.gpu.report` prints the result for some
GPUs, which is a table of docs/guides/gpus.md. It is arithmetic, and was not measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..bench import RESULTS

Results = dict[str, Any]

# ---------------------------------------------------------------------------------------------------
# What arithmetic expects of the codecs
# ---------------------------------------------------------------------------------------------------

LANES = 128
"""Lanes of a multiprocessor: each issues one instruction a cycle."""

ISSUED, REACHED = 0.62, 0.9
"""Measured on an H100 SXM: the share of all cycles in which `combine` issues an instruction, and the share of a
copy's speed that the kernels with few instructions reach."""


@dataclass(frozen=True)
class Gpu:
    """The facts of a GPU on which the expectation rests.

    Args:
        architecture: The architecture that the kernels are compiled for.
        multiprocessors: How many it has.
        clock_hz: Its clock while all of them work.
        copy_bytes_per_s: Bytes that a device-to-device copy reads and writes in a second.
        memory_bytes_per_s: The memory's bandwidth according to the data sheet.
    """

    architecture: str
    multiprocessors: int
    clock_hz: float
    copy_bytes_per_s: float
    memory_bytes_per_s: float


GPUS = {
    "H100 SXM": Gpu("sm_90", 132, 1.755e9, 2.95e12, 3.35e12),
    "H100 PCIe": Gpu("sm_90", 114, 1.755e9, 1.8e12, 2.04e12),
    "H200": Gpu("sm_90", 132, 1.755e9, 4.2e12, 4.8e12),
}

_DEVICE_NAMES = {"NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H200": "H200"}
"""The names of `GPUS`, by those that CUDA gives them."""


def issue_cap(instructions: float, nbytes: float, gpu: Gpu) -> float:
    """The share of a copy's speed at which a kernel would use every cycle; arguments are those of an element.

    >>> round(issue_cap(40, 5.02, GPUS["H100 SXM"]), 2), round(issue_cap(146, 9.14, GPUS["H100 PCIe"]), 2)
    (1.26, 0.89)
    """
    elements_per_s = gpu.multiprocessors * LANES * gpu.clock_hz / instructions
    return elements_per_s * nbytes / gpu.copy_bytes_per_s


def expected_share(instructions: float, nbytes: float, gpu: Gpu) -> float:
    """The share of a copy's speed that is expected of a kernel; see `issue_cap`.

    >>> round(expected_share(38, 3.01, GPUS["H100 SXM"]), 2), expected_share(29, 5.02, GPUS["H100 SXM"])
    (0.49, 0.9)
    """
    return min(REACHED, ISSUED * issue_cap(instructions, nbytes, gpu))


def instruction_counts(architecture: str) -> dict[str, float]:
    """Instructions of each step for an element, counted by `instructions`."""
    counts: dict[str, dict[str, float]] = json.loads((RESULTS / "kernel_instructions.json").read_text())
    return counts.get(architecture, {})


BLOCKS = {"minmax": 512, "int4": 32}
"""Elements of a block of each codec."""

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
AIMED = {"encode": 0.85, "decode": 0.85, "combine": 0.6}
"""The share of a copy's speed aimed at, where the GPU can issue that many instructions."""


@dataclass(frozen=True)
class Step:
    """A step of a codec.

    Args:
        verb: "encode", "decode" or "combine".
        dtype: The dtype of the elements.
        rows: Rows of the wire; 1 except for "combine".
        codec: One of `BLOCKS`.
    """

    verb: str
    dtype: str
    rows: int = 1
    codec: str = "minmax"

    @property
    def name(self) -> str:
        """Its name in benchmarks/results/kernel_instructions.json."""
        step = f"{self.verb} {self.dtype}" + (f" p={self.rows}" if self.verb == "combine" else "")
        return step if self.codec == "minmax" else f"{self.codec} {step}"

    @property
    def result(self) -> str:
        """Its name in the section `codecs`."""
        verb = f"{self.verb} {self.rows}" if self.rows > 1 else self.verb
        return f"{self.codec} {verb} {self.dtype}"

    @property
    def nbytes(self) -> float:
        """Bytes that are read and written for an element of the result.

        On the wire, MinMaxUInt8 has two numbers for each block, and Int4 a scale of two bytes.

        >>> round(Step("encode", "float32").nbytes, 2), round(Step("combine", "float32", 8).nbytes, 2)
        (5.02, 9.14)
        >>> round(Step("encode", "float32", codec="int4").nbytes, 2)
        4.56
        """
        if self.codec == "minmax":
            wire = 1 + 2 * ITEMSIZE[self.dtype] / BLOCKS[self.codec]
        else:
            wire = 0.5 + 2 / BLOCKS[self.codec]
        return (self.rows + 1) * wire if self.verb == "combine" else ITEMSIZE[self.dtype] + wire

    def expected(self, gpu: Gpu) -> float | None:
        """The share of a copy that arithmetic expects; None if the instructions have not been counted."""
        instructions = instruction_counts(gpu.architecture).get(self.name)
        return None if instructions is None else round(expected_share(instructions, self.nbytes, gpu), 2)

    def target(self, gpu: Gpu | None) -> float:
        """The share of a copy aimed at: at most what is expected, since a GPU cannot issue more."""
        expected = None if gpu is None else self.expected(gpu)
        return AIMED[self.verb] if expected is None else min(AIMED[self.verb], expected)


_SUMS = {"minmax": tuple(ITEMSIZE), "int4": ("float32",)}
"""The dtypes whose sums are listed: those of Int4 are the same for each."""

STEPS = [
    step
    for codec in BLOCKS
    for step in (
        *(Step(verb, dtype, codec=codec) for verb in ("encode", "decode") for dtype in ITEMSIZE),
        *(Step("combine", dtype, rows, codec) for dtype in _SUMS[codec] for rows in (2, 4, 8)),
    )
]


def steps(sections: Results, shrink: int) -> list[Results]:
    """The share of a copy that each step reached, what is expected, and what is aimed at; None if not known.

    Arrays that were made smaller fit into the cache, so that their shares neither meet nor miss the target.
    """
    gpu = gpu_of(sections)
    rows = []
    for step in STEPS:
        measured = at(sections, "codecs", "results", step.result, "of_copy", "median")
        target = step.target(gpu)
        rows.append(
            {
                "step": step.name,
                "measured": measured,
                "expected": None if gpu is None else step.expected(gpu),
                "target": target,
                "met": None if measured is None or shrink > 1 else measured >= target,
            }
        )
    return rows


def gpu_of(sections: Results) -> Gpu | None:
    """The GPU that was measured, if it is in the table."""
    name = at(sections, "device", "results", "name")
    return GPUS.get(_DEVICE_NAMES.get(name, ""))


def copy(sections: Results) -> Results:
    """The speed of a copy, beside that assumed for this GPU and the memory bandwidth of its data sheet."""
    gpu = gpu_of(sections)
    return {
        "gb_per_s": at(sections, "codecs", "results", "copy", "gb_per_s", "median"),
        "assumed_gb_per_s": None if gpu is None else gpu.copy_bytes_per_s / 1e9,
        "data_sheet_gb_per_s": None if gpu is None else gpu.memory_bytes_per_s / 1e9,
    }


def table() -> Iterator[str]:
    """The expected figures, for docs/guides/gpus.md."""
    yield f"| expected share of a copy | {' | '.join(GPUS)} |"
    yield "| --- |" + " --- |" * len(GPUS)
    for step in STEPS:
        shares = [step.expected(gpu) for gpu in GPUS.values()]
        cells = [f"{share:.2f}" for share in shares if share is not None]
        if len(cells) == len(GPUS):
            yield f"| {step.name} | {' | '.join(cells)} |"


# ---------------------------------------------------------------------------------------------------
# Other targets
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A figure that has a target.

    Args:
        name: What is measured, with its unit.
        path: Where the figure is in the record's sections.
        wanted: The bound, or the right value.
        met: From the figure and `wanted`: whether the target is met.
    """

    name: str
    path: tuple[str, ...]
    wanted: Any
    met: Callable[[Any, Any], bool]

    def row(self, sections: Results) -> Results:
        """The target beside the figure; None if that was not measured."""
        figure = at(sections, *self.path)
        met = None if figure is None else self.met(figure, self.wanted)
        return {"target": self.name, "wanted": self.wanted, "measured": figure, "met": met}


def at(found: Any, *path: str) -> Any:
    """The value at a place of the record; None if there is none."""
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def at_most(figure: float, wanted: float) -> bool:
    """Whether a figure is low enough."""
    return figure <= wanted


def is_equal(figure: Any, wanted: Any) -> bool:
    """Whether a figure has the expected value."""
    return bool(figure == wanted)


_ENQUEUED = ("costs", "results", "enqueued, 1024 KiB")

TARGETS = [
    Target("kernels per quantized_allreduce", (*_ENQUEUED, "kernels"), ["encode", "combine", "decode"], is_equal),
    Target(
        "calls per quantized_allreduce",
        (*_ENQUEUED, "collectives"),
        {"quantized_allreduce": 1},
        is_equal,
    ),
    *(
        Target(
            f"microseconds of the host to enqueue one quantized_allreduce of {size}, at most",
            ("costs", "results", f"host time, {size}", "us", "whole", "median"),
            80.0,
            at_most,
        )
        for size in ("64 KiB", "1024 KiB")
    ),
]

# ---------------------------------------------------------------------------------------------------
# The record
# ---------------------------------------------------------------------------------------------------


def report(lines: Results) -> Results:
    """The whole record, from that of the lines."""
    sections = {
        name: {**entry, "results": counted(entry.get("results", {}))} for name, entry in lines["sections"].items()
    }
    return {
        **lines,
        "stand_in": at(sections, "device", "results", "stand_in"),
        "copy": copy(sections),
        "steps": steps(sections, at(lines, "arguments", "shrink") or 1),
        "targets": [target.row(sections) for target in TARGETS],
        "checks": checks(sections),
        "not_done": not_done(sections),
        "sections": sections,
    }


def counted(results: Results) -> Results:
    """The same results with counts in place of lists of tests, and the details of tests that did not pass."""
    found: Results = {}
    for key, value in results.items():
        if key == "tests":
            found |= _count(value)
        else:
            found[key] = counted(value) if isinstance(value, dict) else value
    return found


SLOWEST = 5


def _count(tests: Results) -> Results:
    by: dict[str, list[str]] = {}
    for name, test in tests.items():
        by.setdefault(test["outcome"], []).append(name)
    seconds = sorted(((test.get("seconds", 0.0), name) for name, test in tests.items()), reverse=True)
    return {
        "passed": len(by.get("passed", [])),
        "skipped": len(by.get("skipped", [])),
        "failures": [{"test": name, "message": tests[name]["message"]} for name in by.get("failed", [])],
        "unfinished": by.get("begun", []),
        "slowest": {name: spent for spent, name in seconds[:SLOWEST]},
    }


def not_done(sections: Results) -> list[str]:
    """Sections that did not run or did not finish, and why."""
    whole = [
        f"{name}: {entry['outcome']}: {(entry['reason'].splitlines() or ['no reason given'])[0]}"
        for name, entry in sections.items()
        if entry["outcome"] in ("left out", "out of time")
    ]
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
    "sharded exact losses differ by": lambda difference: difference < 1e-3,
    "sharded bytes losses differ by": lambda difference: difference < 0.05,
}
"""Whether a result is right, by its name."""


def checks(sections: Results) -> Results:
    """The number of right results, and the wrong ones."""
    found = [
        (f"{path}, {key}: {value}", CHECKS[key](value)) for path, key, value in leaves(sections) if key in CHECKS
    ]
    return {"right": sum(right for _, right in found), "wrong": [name for name, right in found if not right]}


def leaves(sections: Results) -> Iterator[tuple[str, str, Any]]:
    """All values that sections have found: where each is, its name, and the value."""

    def walk(path: str, found: Results) -> Iterator[tuple[str, str, Any]]:
        for key, value in found.items():
            if isinstance(value, dict):
                yield from walk(f"{path}, {key}", value)
            else:
                yield path, key, value

    for name, entry in sections.items():
        yield from walk(name, entry.get("results") or {})


def summary(record: Results) -> Iterator[str]:
    """The lines that the command prints at its end."""
    verdicts = {True: "met", False: "missed", None: "not measured"}
    speed = record["copy"]
    yield "a copy: {gb_per_s} GB/s; assumed {assumed_gb_per_s}, data sheet {data_sheet_gb_per_s}".format(**speed)
    for row in (row for row in record["steps"] if row["measured"] is not None):
        share = "{step}, share of a copy: {measured}; expected {expected}, target {target}".format(**row)
        yield f"{share} ({verdicts[row['met']]})"
    for row in record["targets"]:
        yield f"{row['target']} {row['wanted']}: {row['measured']} ({verdicts[row['met']]})"
    yield f"{record['checks']['right']} results right; wrong: {record['checks']['wrong'] or 'none'}"
    yield from (f"not done: {reason}" for reason in record["not_done"])


if __name__ == "__main__":
    print(*table(), sep="\n")
