"""Variants of the codec's kernels, timed in turn: other numbers of registers, and another formula.

    python -m benchmarks.gpu.variants --out variants.json

A variant is the text of minmax.cu with other words in a few places. Each is compiled by NVRTC, and timed on the
arrays of `codecs`, beside a copy: `of_copy` is its share of the copy's speed. The formula `reciprocal` multiplies
by 1 / scale instead of dividing by the scale, so that its bytes differ: it would be a new version of the wire
format.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bagua_comm import MinMaxUInt8
from bagua_comm.arrays import Array, dtype_named

from ..bench.record import write_json
from .codecs import CHUNKS, DTYPES, Bench, whole_blocks
from .device import collect_device
from .plain import BLOCK

Change = tuple[str, str]
"""Words of minmax.cu, and the words in their place."""

_BOUNDS, _AHEAD = "__launch_bounds__(usual_cta, 3)", "usual_ahead = 2"
_RECIPROCAL = (
    "        float32 quotient = level * inverse;\n"
    "        return fmaf(fmaf(-scale, quotient, level), inverse, quotient);",
    "        return level * inverse;",
)
VARIANTS: dict[str, tuple[Change, ...]] = {
    "as it is": (),
    "2 CTAs, 4 loads ahead": ((_BOUNDS, "__launch_bounds__(largest_cta)"), (_AHEAD, "usual_ahead = 4")),
    "2 CTAs, 2 loads ahead": ((_BOUNDS, "__launch_bounds__(largest_cta)"),),
    "3 CTAs, 4 loads ahead": ((_AHEAD, "usual_ahead = 4"),),
    "4 CTAs, 4 loads ahead": ((_BOUNDS, "__launch_bounds__(usual_cta, 4)"), (_AHEAD, "usual_ahead = 4")),
    "streaming accesses": (("__ldcg(", "__ldcs("), ("__stcg(", "__stcs(")),
    "reciprocal": (_RECIPROCAL,),
}


def changed(text: str, changes: Sequence[Change]) -> str:
    """The text of minmax.cu with these changes.

    Raises:
        ValueError: Words that a change replaces are not in it.
    """
    for old, new in changes:
        if old not in text:
            raise ValueError(f"minmax.cu has no {old!r} any more; correct VARIANTS in benchmarks/gpu/variants.py")
        text = text.replace(old, new)
    return text


def functions(name: str, dtype: str, folder: Path) -> dict[str, Any]:
    """The kernels of a variant, compiled for the current device."""
    import cupy

    from bagua_comm.kernels import device

    text = changed(device.source("minmax.cu"), VARIANTS[name])
    binary, _ = cupy.cuda.compiler.compile_using_nvrtc(text, device.compile_options(dtype), filename="minmax.cu")
    path = folder / f"{name.replace(' ', '-')}-{dtype}.cubin"
    path.write_bytes(binary + b"\0")  # CuPy takes the last byte off
    module = cupy.RawModule(path=str(path))
    return {verb: module.get_function(verb) for verb in ("encode", "decode", "combine")}


class Data:
    """The arrays of one dtype, and how the codec launches its kernels on them."""

    def __init__(self, bench: Bench, dtype: str) -> None:
        from bagua_comm.kernels.device import minmax

        kind, codec, empty = dtype_named(dtype), MinMaxUInt8(BLOCK), bench.cupy.empty
        count, row = whole_blocks(bench.nbytes // kind.itemsize // CHUNKS), whole_blocks(bench.row)
        x = bench.drawn(CHUNKS, count, kind)
        self.chunks, self.decoded = bench.repeated(x, count), empty((CHUNKS, count), kind)
        self.wire = codec.encode(self.chunks)
        self.rows = empty((CHUNKS, codec.wire_nbytes(row, kind)), np.uint8)
        for i in range(CHUNKS):
            codec.encode(bench.repeated(x[i : i + 1], row), self.rows[i : i + 1])
        self.mean = empty((1, self.rows.shape[1]), np.uint8)
        self._parts = [
            minmax.partition_of(n, m, BLOCK, wire.shape[1] - m, wire.shape[1], 0.0)
            for n, m, wire in ((CHUNKS, count, self.wire), (1, row, self.mean))
        ]

    def calls(self, kernels: dict[str, Any]) -> Iterator[tuple[str, int, Callable[[], object]]]:
        """Launches: their name, the bytes that they read and write, and the call."""
        whole, one = self._parts
        nbytes = self.chunks.nbytes + self.wire.nbytes
        for verb, arrays in (("encode", (self.chunks, self.wire)), ("decode", (self.wire, self.decoded))):
            yield verb, nbytes, partial(kernels[verb], whole.grid, whole.cta, (*arrays, whole.layout))
        for p in (2, 4, 8):
            arguments: tuple[Array | int, ...] = (self.rows, p, 1, self.mean, one.layout)
            call = partial(kernels["combine"], one.grid, one.cta, arguments)
            yield f"combine {p}", (p + 1) * self.mean.nbytes, call


def measured(bench: Bench, dtype: str, folder: Path) -> dict[str, Any]:
    """For each call and variant, microseconds and the share of a copy's speed."""
    data = Data(bench, dtype)
    nbytes = {"copy": data.chunks.nbytes + data.wire.nbytes}
    calls: dict[str, Callable[[], object]] = {"copy": bench.copier(nbytes["copy"])}
    for name in VARIANTS:
        for verb, moved, call in data.calls(functions(name, dtype, folder)):
            calls[f"{verb}: {name}"], nbytes[f"{verb}: {name}"] = call, moved
    seconds = bench.watch.seconds(calls, iterations=bench.iterations)
    speed = {name: nbytes[name] / float(np.median(each)) for name, each in seconds.items()}
    return {
        name: {"us": round(1e6 * float(np.median(each)), 1), "of_copy": round(speed[name] / speed["copy"], 3)}
        for name, each in seconds.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all variants, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="make all arrays N times smaller")
    parser.add_argument("--iterations", type=int, default=8, metavar="N", help="how often each call is timed")
    options = parser.parse_args(argv)
    bench = Bench(options.shrink, options.iterations)
    with tempfile.TemporaryDirectory() as folder:
        results = {dtype: measured(bench, dtype, Path(folder)) for dtype in DTYPES}
    write_json(options.out, {"device": collect_device(), "results": results})


if __name__ == "__main__":
    main()
