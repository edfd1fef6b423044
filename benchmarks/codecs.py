"""How fast codecs encode, decode and combine on this machine, beside a plain copy in the same run.

    python -m benchmarks.codecs -b 1M -e 64M -f 8 -n 20 -d float32 bfloat16 --codec minmax bagua float16 bfloat16

One process works on one core. GB/s count the bytes of the elements (of the p chunks together for combine), in
10**9 a second; compare the figure of a codec with that of the copy beside it. The kernels of NumPy ("host") and,
where Numba is installed, the compiled ones take turns. Every result is checked: decoded elements must be as close
as the codec promises.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import numpy as np

from bagua_comm import Codec, kernels
from bagua_comm.arrays import Array, dtype_named
from bagua_comm.testing import run_ranks

from .bench.arguments import add_sweep_arguments, sweep
from .bench.checking import ERROR, relative_error
from .bench.named import CODECS
from .bench.record import begin_record, header_lines, write_json
from .bench.table import Column, Table, number
from .bench.timing import Call, Measurement, Spread, measure

MODULES: list[Literal["host", "compiled"]] = ["host"]
"""The kernels of NumPy, and the compiled ones if Numba is installed."""
if kernels.numba_is_installed():
    MODULES.append("compiled")

CHUNKS = 4
"""Chunks that are encoded, decoded and combined."""

TABLE = Table(
    (
        Column("size", "(B)", 12),
        Column("type", width=8),
        Column("codec", width=9),
        Column("kernels", width=9),
        *(Column(title, "(GB/s)", 8) for title in ("copy", "encode", "decode", "combine")),
        *(Column(title, "of copy", 8) for title in ("encode", "decode", "combine")),
        Column("wire", "/element", 8),
        Column("error", "rel. L2", 8),
    )
)


@dataclass(frozen=True)
class Buffers:
    """The arrays of one codec at one size."""

    chunks: Array
    wire: Array
    decoded: Array
    combined: Array

    @classmethod
    def of(cls, codec: Codec, nbytes: int, dtype: str) -> Buffers:
        """Normally distributed chunks, of `nbytes` together, and room for the results."""
        kind = dtype_named(dtype)
        count = max(1, nbytes // kind.itemsize // CHUNKS)
        chunks = np.random.default_rng(0).standard_normal((CHUNKS, count), np.float32).astype(kind)
        wire = np.zeros((CHUNKS, codec.wire_nbytes(count, kind)), np.uint8)
        return cls(chunks, wire, np.zeros_like(chunks), np.zeros_like(wire[:1]))


def main() -> None:
    """Run the benchmark."""
    options = parse_arguments()
    if hasattr(os, "sched_setaffinity"):  # one core, and the same one throughout
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    record = begin_record("codecs", options, packages=("numba", "llvmlite") if "compiled" in MODULES else ())
    print(*header_lines(record), sep="\n")
    print(f"# chunks    : {CHUNKS}; figures are medians, calls in turn: copy; encode, decode, combine of each")
    print(*TABLE.header(), sep="\n")
    record["results"] = []
    sizes = sweep(options.minbytes, options.maxbytes, options.stepfactor)
    for nbytes, datatype, name in itertools.product(sizes, options.datatype, options.codec):
        for result in measured(name, nbytes, datatype, options):
            record["results"].append(result)
            print(TABLE.row(cells(result)), flush=True)
    if options.json:
        write_json(options.json, record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_sweep_arguments(parser)
    datatypes = ["float32", "float16", "bfloat16"]
    parser.add_argument("-d", "--datatype", nargs="+", choices=datatypes, default=datatypes)
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=list(CODECS))
    return parser.parse_args(argv)


def measured(name: str, nbytes: int, datatype: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Time one codec at one size, with the kernels of each module."""
    codec = CODECS[name]
    buffers = Buffers.of(codec, nbytes, datatype)
    chunks, wire, decoded, combined = buffers.chunks, buffers.wire, buffers.decoded, buffers.combined
    copy = np.empty_like(chunks)

    def combine() -> Array:
        return codec.combine(wire, combined, op="avg", count=chunks.shape[1], dtype=chunks.dtype)

    mean = chunks.mean(axis=0, dtype=np.float64, keepdims=True)
    steps: dict[str, tuple[Callable[[], object], Array | None]] = {
        "encode": (lambda: codec.encode(chunks, wire), None),
        "decode": (lambda: codec.decode(wire, decoded), chunks.astype(np.float64)),
        "combine": (combine, None),
    }
    calls = [Call(run=_returning(lambda: np.copyto(copy, chunks), copy), prepare=lambda: None, expected=None)]
    calls += [
        Call(
            run=_returning(run, decoded),
            prepare=lambda: None,
            expected=expected,
            check=ERROR,
            within=partial(kernels.use, module),
        )
        for module in MODULES
        for run, expected in steps.values()
    ]
    (timings,) = run_ranks(
        1,
        lambda comm: measure(
            comm, calls, barrier=lambda: None, warmup=options.warmup_iters, iterations=options.iters
        ),
    )
    results = []
    for index, module in enumerate(MODULES):
        own = timings[1 + index * len(steps) :][: len(steps)]
        rates = {
            step: _gbs(chunks.nbytes, timing)
            for step, timing in zip(["copy", *steps], [timings[0], *own], strict=True)
        }
        with kernels.use(module):
            error_of_mean = relative_error(codec.decode(combine(), copy[:1]), mean)
        results.append(
            {
                "codec": repr(codec),
                "name": name,
                "kernels": module,
                "datatype": datatype,
                "bytes": chunks.nbytes,
                "gb_per_s": {step: asdict(rate) for step, rate in rates.items()},
                "of_copy": {step: rates[step].median / rates["copy"].median for step in steps},
                "wire_bytes_per_element": wire.size / chunks.size,
                "error": own[list(steps).index("decode")].fault,
                "error_of_mean": error_of_mean,
            }
        )
    return results


def _returning(run: Callable[[], object], result: Array) -> Callable[[], Array]:
    def call() -> Array:
        run()
        return result

    return call


def _gbs(nbytes: int, timing: Measurement) -> Spread:
    return Spread.of(nbytes / timing.seconds / 1e9)


def cells(result: dict[str, object]) -> list[str]:
    """One row of the table."""
    rates, shares = result["gb_per_s"], result["of_copy"]
    assert isinstance(rates, dict)
    assert isinstance(shares, dict)
    return [
        str(result["bytes"]),
        str(result["datatype"]),
        str(result["name"]),
        str(result["kernels"]),
        *(number(rate["median"]) for rate in rates.values()),
        *(number(share) for share in shares.values()),
        f"{result['wire_bytes_per_element']:.3f}",
        f"{result['error']:.1e}",
    ]


if __name__ == "__main__":
    main()
