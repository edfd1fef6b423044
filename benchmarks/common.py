"""What the benchmarks share: sizes, the header, timing, checking, the table, the JSON record.

The form is that of NVIDIA's nccl-tests: a line that begins with `#` says what ran and where; every
other line is a row of columns. Whatever is compared is timed call by call in turn, so that a slow
moment of the machine falls on both; whatever is timed is checked, element by element.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bagua_comm
from bagua_comm import Communicator
from bagua_comm.arrays import Array
from bagua_comm.trace import Span

# ---------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """A positive number of bytes, with a binary suffix as in nccl-tests.

    Raises:
        argparse.ArgumentTypeError: It is something else.

    >>> [parse_size(text) for text in ("8", "4K", "64M", "1G")]
    [8, 4096, 67108864, 1073741824]
    """
    unit = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected for example 8, 4K, 64M or 1G")
    return int(digits) * unit


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is an integer >= `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {least}")
        return int(text)

    return parse


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every sweep over sizes takes, with the letters of nccl-tests."""
    positive = at_least(1)
    parser.add_argument("-b", "--minbytes", type=parse_size, default="8", help="smallest size")
    parser.add_argument("-e", "--maxbytes", type=parse_size, default="64M", help="largest size")
    parser.add_argument("-f", "--stepfactor", type=at_least(2), default=4, help="between two sizes")
    parser.add_argument("-n", "--iters", type=positive, default=20, help="timed calls per size")
    parser.add_argument("-w", "--warmup_iters", type=at_least(0), default=5, help="untimed ones before")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")


def sweep(first: int, last: int, factor: int) -> list[int]:
    """The sizes from `first` to `last`, each `factor` times the one before.

    >>> sweep(8, 1024, 4)
    [8, 32, 128, 512]
    """
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= factor
    return sizes


# ---------------------------------------------------------------------------------------------------
# Machine and record
# ---------------------------------------------------------------------------------------------------


def collect_machine() -> dict[str, Any]:
    """The processor, its cores, and how many of them this rank may use (mpirun may bind it)."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return {"cpu": _cpu(), "cores": cores, "cores_per_rank": usable}


def collect_versions(mpi: Any = None) -> dict[str, str]:
    """Versions of Python, this library and NumPy; of mpi4py and MPI too if `mpi`, mpi4py.MPI, is given."""
    versions = {
        "python": platform.python_version(),
        "bagua_comm": bagua_comm.__version__,
        "numpy": np.__version__,
    }
    if mpi is None:
        return versions
    import mpi4py

    library = mpi.Get_library_version().split(",")[0].strip("\0 \n")
    return {**versions, "mpi4py": mpi4py.__version__, "MPI": library}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def begin_record(benchmark: str, options: argparse.Namespace, *, ranks: int, mpi: Any = None) -> dict[str, Any]:
    """What a JSON file says beside its `results`: the benchmark, machine, versions, ranks, arguments."""
    arguments = {key: value for key, value in vars(options).items() if key not in ("json", "output")}
    return {
        "benchmark": benchmark,
        "machine": collect_machine(),
        "versions": collect_versions(mpi),
        "ranks": ranks,
        "arguments": arguments,
    }


def header_lines(record: dict[str, Any]) -> list[str]:
    """The same for people, above the first table."""
    machine = record["machine"]
    return [
        f"# {record['benchmark']}",
        f"# machine   : {machine['cpu']}, {machine['cores']} cores, {machine['cores_per_rank']} for each rank",
        f"# versions  : {_listed(record['versions'])}",
        f"# ranks     : {record['ranks']}",
        f"# arguments : {_listed(record['arguments'])}",
    ]


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record, as JSON."""
    path.write_text(json.dumps(record, indent=1) + "\n")


def _listed(entries: dict[str, Any]) -> str:
    def plain(value: object) -> str:
        return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

    return ", ".join(f"{name} {plain(value)}" for name, value in entries.items() if value is not None)


# ---------------------------------------------------------------------------------------------------
# Checking
# ---------------------------------------------------------------------------------------------------


def count_wrong(actual: Array | None, expected: Array) -> int:
    """How many elements differ; all of them, where the result is missing or of another size.

    >>> count_wrong(np.array([1.0, 2.0, np.nan]), np.array([1.0, 3.0, 4.0]))
    2
    """
    if actual is None or actual.size != expected.size:
        return int(expected.size)
    return int(np.count_nonzero(actual.reshape(-1) != expected.reshape(-1)))


def relative_error(actual: Array | None, expected: Array) -> float:
    """|actual - expected| / |expected| in the L2 norm; infinite where the result is missing.

    >>> relative_error(np.array([3.0, 5.0]), np.array([3.0, 4.0]))
    0.2
    """
    if actual is None or actual.size != expected.size:
        return float("inf")
    # No BLAS: its threads spin for a while when they are done, beside the call that is timed next.
    distance = np.square(np.subtract(actual, expected.reshape(actual.shape), dtype=np.float64)).sum()
    return float(np.sqrt(distance / np.square(expected).sum())) if distance else 0.0


@dataclass(frozen=True)
class Check:
    """How a result is judged: one number per call and rank, 0 if all is well, and its column."""

    title: str
    judge: Callable[[Array | None, Array], float]
    over_ranks: Callable[..., Any]

    def total(self, faults: Array) -> float:
        """The number for the worst call, from (p, iterations)."""
        return float(self.over_ranks(faults, axis=0).max())


WRONG = Check("#wrong", count_wrong, np.sum)
ERROR = Check("error", relative_error, np.max)


def poison(x: Array) -> None:
    """Fill a contiguous array with bytes 0xFF (NaN, -1), so that nobody finds an old result there."""
    x.reshape(-1).view(np.uint8).fill(0xFF)


# ---------------------------------------------------------------------------------------------------
# Timing
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


@dataclass(frozen=True)
class Call:
    """Something to time.

    Args:
        run: What is timed; returns the result.
        prepare: Called before each `run`: puts the input there, poisons the output.
        expected: What the result should be; None if this rank gets none.
        check: How the two are compared.
    """

    run: Callable[[], Array | None]
    prepare: Callable[[], object]
    expected: Array | None
    check: Check = WRONG


@dataclass(frozen=True)
class Measurement:
    """What `measure` found out about one call."""

    seconds: Array
    """(iterations,): the slowest rank's time of every call."""
    fault: float
    """What the check says of the worst call; 0 if all is well."""
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

    Collective. Each call is preceded by a barrier; a call has ended when its slowest rank has.
    """
    seconds = np.zeros((len(calls), iterations))
    faults = np.zeros((len(calls), iterations))
    wire_bytes = np.zeros((len(calls), iterations))
    for i in range(-warmup, iterations):
        for c, call in enumerate(calls):
            call.prepare()
            sent = comm.counters.total().wire_bytes
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
# Overlap
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """How exchanges and backward passes lie in time; sums over some steps, in nanoseconds."""

    exchanges: int
    exchange_ns: int
    backward_ns: int
    both_ns: int
    """Time of exchanges within a backward pass."""

    @classmethod
    def of(cls, spans: Sequence[Span], steps: int) -> Overlap:
        """Those of the latest `steps`, from what `bagua_torch.DistributedDataParallel` and its engine trace.

        A backward pass lasts from its first gradient to its last: the wait for exchanges that follows is no part
        of it. Exchanges of a lane follow each other.

        >>> def span(name, start, end):
        ...     return Span(name, "", start, end, {})
        >>> found = Overlap.of([span("backward", 0, 60), span("exchange", 30, 70), span("exchange", 70, 90)], 1)
        >>> found.exchange_ns, found.backward_ns, found.both_ns, found.fraction
        (60, 60, 30, 0.5)
        """
        passes = [span for span in spans if span.name == "backward"][-steps:]
        since = passes[0].start_ns if passes else 0
        exchanges = [span for span in spans if span.name == "exchange" and span.start_ns >= since]
        both = sum(
            max(0, min(e.end_ns, b.end_ns) - max(e.start_ns, b.start_ns)) for e in exchanges for b in passes
        )
        return cls(len(exchanges), _total_ns(exchanges), _total_ns(passes), both)

    @property
    def fraction(self) -> float:
        """Of what could be hidden, the shorter of the two, the part that was: from 0 to 1."""
        possible = min(self.exchange_ns, self.backward_ns)
        return self.both_ns / possible if possible else 0.0


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


# ---------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column: what stands above it, and the group that it belongs to."""

    title: str
    unit: str = ""
    width: int = 6
    group: str = ""


SIZE_COLUMNS = (
    Column("size", "(B)", 12),
    Column("count", "(elements)", 12),
    Column("type", width=8),
    Column("redop"),
    Column("root"),
)


def time_columns(group: str, check: Check) -> tuple[Column, ...]:
    """Time, the two bandwidths and the check, as in nccl-tests."""
    return (
        Column("time", "(us)", 7, group),
        Column("algbw", "(GB/s)", 6, group),
        Column("busbw", "(GB/s)", 6, group),
        Column(check.title, "", 7, group),
    )


@dataclass(frozen=True)
class Table:
    """Rows of cells, right-aligned under their columns; lines above the rows begin with `#`."""

    columns: tuple[Column, ...]

    def header(self) -> list[str]:
        """The groups, the titles and the units."""
        lines = [
            self._groups(),
            self.row([column.title for column in self.columns]),
            self.row([column.unit for column in self.columns]),
        ]
        return ["#", *(f"#{line[1:]}".rstrip() for line in lines)]

    def row(self, cells: Sequence[str]) -> str:
        """One line."""
        pairs = zip(self.columns, cells, strict=True)
        return "  ".join(f"{cell:>{column.width}}" for column, cell in pairs)

    def _groups(self) -> str:
        parts: list[tuple[str, int]] = []
        for column in self.columns:
            if parts and parts[-1][0] == column.group:
                parts[-1] = (column.group, parts[-1][1] + 2 + column.width)
            else:
                parts.append((column.group, column.width))
        return "  ".join(f"{name:^{width}}" for name, width in parts)


def number(value: float) -> str:
    """With as many decimals as seven characters hold, at most two.

    >>> number(3.14159), number(31415.9), number(3141592.6)
    ('3.14', '31415.9', '3141593')
    """
    decimals = 2 if value < 1e4 else 1 if value < 1e5 else 0
    return f"{value:.{decimals}f}"


def in_us(spread: Spread) -> dict[str, float]:
    """A spread of seconds, in microseconds, for JSON."""
    return {name: value * 1e6 for name, value in asdict(spread).items()}


def trailer(wrong: int, bandwidths: Sequence[float]) -> list[str]:
    """The last lines of a table of collectives, as in nccl-tests.

    >>> trailer(0, [1.0, 2.0])
    ['# Out of bounds values : 0 OK', '# Avg bus bandwidth    : 1.5', '#']
    """
    average = sum(bandwidths) / len(bandwidths)
    return [out_of_bounds(wrong), f"# Avg bus bandwidth    : {average:g}", "#"]


def out_of_bounds(wrong: int) -> str:
    """The line that says whether everything was right."""
    return f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"
