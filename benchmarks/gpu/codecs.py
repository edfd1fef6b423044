"""How fast codecs and element-wise steps are on a GPU, beside a copy and beside plain array operations.

A part of benchmarks.gpu; alone:

    python -m benchmarks.gpu.codecs --out codecs.jsonl

GB/s count the bytes that a call must read and write, in 10**9:

    encode    elements + wire; blocks longer than a CTA holds take two passes: 2 x elements + wire
    decode    wire + elements
    combine   p rows of the wire + one row; in two passes 2 x p rows + one row
    top-k     encode: elements + wire; subtract: wire + what is sent, twice; sum p: p records + elements
    steps     each array once for every time that it is read or written

`of_copy` is the time of a device-to-device copy that reads half as many bytes and writes them, over that of the
call. The two are timed in turn, and neither finds its data in the cache. With `--shrink` it means nothing: arrays
fit into the cache, and launches take longer than the work. `beside` has the same formula in plain operations of
CuPy and PyTorch, which pack nothing into one message: its `slower` is how many times longer they take. `wrong`
counts bytes that differ from those of host.py; `plain_agrees` does so for plain operations. Arrays repeat a few
numbers, so that the host has to draw and encode only these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from bagua_comm import BFloat16, Codec, Float16, Int4, MinMaxUInt8, TopK, arrays, kernels
from bagua_comm.arrays import Array, DType, dtype_named
from bagua_comm.kernels import host

from ..bench.checking import count_wrong
from ..bench.timing import Spread, in_us
from .device import Stopwatch
from .part import Results, part_parser
from .plain import ADAM, ADAM_STEP, BLOCK, SGD, rivals

NBYTES = 128 << 20
"""Bytes of the elements that a call encodes or decodes, and of each array of a step."""

ROW = 32 << 20
"""Bytes of codes in a row that a call combines: even two rows of the wire are larger than the cache."""

CHUNKS = 8
DRAWN = 1 << 17
"""Numbers that are drawn for a row, and then repeat: whole blocks of every codec, without padding at the ends."""

DTYPES = ("float32", "float16", "bfloat16")

CODECS: dict[str, tuple[Codec, tuple[int, ...]]] = {
    "minmax": (MinMaxUInt8(BLOCK), (2, 4, 8)),
    "int4": (Int4(), (2, 4, 8)),
    "int4 stochastic": (Int4(rounding="stochastic"), (8,)),
    "int4 256": (Int4(256, 256), (8,)),
    "minmax 128": (MinMaxUInt8(128), (8,)),
    "minmax 4096": (MinMaxUInt8(4096), (8,)),
    "bagua": (MinMaxUInt8.bagua(), (8,)),
    "float16": (Float16(), (8,)),
    "bfloat16": (BFloat16(), (8,)),
}
"""Codecs, and numbers of rows that they combine."""

# ---------------------------------------------------------------------------------------------------
# Codecs
# ---------------------------------------------------------------------------------------------------


class Bench:
    """Makes arrays on the device, and times calls beside copies."""

    def __init__(self, shrink: int, iterations: int) -> None:
        import cupy

        self.cupy, self.iterations, self.nbytes, self.row = cupy, iterations, NBYTES // shrink, ROW // shrink
        self.watch = Stopwatch()
        self.rivals = rivals(cupy)
        self._numbers = np.random.default_rng(0).standard_normal((CHUNKS, DRAWN), np.float32)
        self._source = self._target = cupy.empty(0, np.uint8)

    def drawn(self, rows: int, count: int, dtype: DType) -> Array:
        """On the host, normally distributed numbers: rows of `count`, or of the `DRAWN` that will repeat."""
        return self._numbers[:rows, : min(count, DRAWN)].astype(dtype)

    def up(self, x: Array) -> Array:
        """A copy of a host array on the device."""
        array = self.cupy.empty(x.shape, x.dtype)
        array.set(np.ascontiguousarray(x))
        return array

    def repeated(self, x: Array, count: int) -> Array:
        """On the device, rows of `count` elements that repeat those of host rows `x`."""
        out = self.cupy.empty((len(x), count), x.dtype)
        target, source = out.view(np.uint8), self.up(x).view(np.uint8)  # CuPy copies no bfloat16 that is in parts
        period = source.shape[1]
        for start in range(0, target.shape[1], period):
            part = target[:, start : start + period]
            part[...] = source[:, : part.shape[1]]
        return out

    def copy(self) -> dict[str, Any]:
        """How fast a device-to-device copy is."""
        nbytes = 2 * self.nbytes
        seconds = self.watch.seconds({"copy": self.copier(nbytes)}, iterations=self.iterations)["copy"]
        return {"bytes": nbytes, "us": in_us(seconds), "gb_per_s": asdict(Spread.of(nbytes / seconds / 1e9))}

    def copier(self, nbytes: int) -> Callable[[], None]:
        """A copy that reads and writes `nbytes` together."""
        half = nbytes // 2
        if self._source.nbytes < half:
            self._source, self._target = (self.cupy.empty(half, np.uint8) for _ in range(2))
            self._source[...] = self.repeated(self._numbers.view(np.uint8).reshape(1, -1), half)[0]
        runtime, stream = self.cupy.cuda.runtime, self.cupy.cuda.get_current_stream().ptr
        target, source, kind = self._target.data.ptr, self._source.data.ptr, runtime.memcpyDeviceToDevice
        return lambda: runtime.memcpyAsync(target, source, half, kind, stream)

    def measured(
        self, run: Callable[[], object], nbytes: int, wrong: int, plain: Mapping[str, Callable[[], object]]
    ) -> dict[str, Any]:
        """The row of one call, which reads and writes `nbytes`."""
        calls = {"copy": self.copier(nbytes), "ours": run}
        seconds = self.watch.seconds(calls, iterations=self.iterations)
        ours = seconds["ours"]
        return {
            "bytes": nbytes,
            "us": in_us(ours),
            "gb_per_s": asdict(Spread.of(nbytes / ours / 1e9)),
            "copy_gb_per_s": asdict(Spread.of(nbytes / seconds["copy"] / 1e9)),
            "of_copy": asdict(Spread.of(seconds["copy"] / ours)),
            "wrong": wrong,
            "beside": {name: self._beside(run, rival) for name, rival in plain.items()},
        }

    def _beside(self, run: Callable[[], object], rival: Callable[[], object]) -> dict[str, Any]:
        try:
            # Fewer times: each takes several passes.
            seconds = self.watch.seconds({"ours": run, "rival": rival}, iterations=max(3, self.iterations // 4))
        except Exception as exc:
            return {"left_out": f"{type(exc).__name__}: {exc}"}
        return {"us": in_us(seconds["rival"]), "slower": asdict(Spread.of(seconds["rival"] / seconds["ours"]))}


def codec_rows(bench: Bench, name: str, dtype: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Encode, decode and combine of one codec and dtype."""
    codec, summands = CODECS[name]
    kind = dtype_named(dtype)
    count = whole_blocks(bench.nbytes // kind.itemsize // CHUNKS)
    x = bench.drawn(CHUNKS, count, kind)
    shape = (CHUNKS, codec.wire_nbytes(count, kind))
    chunks, wire = bench.repeated(x, count), bench.cupy.empty(shape, np.uint8)
    decoded = bench.cupy.empty(chunks.shape, kind)
    encode, decode = partial(codec.encode, chunks, wire), partial(codec.decode, wire, decoded)
    with_plain = (name, dtype) in (("minmax", "float32"), ("float16", "float32"))
    plain = plain_codecs(bench, chunks) if with_plain else {}

    passes = _passes(encode)
    encoded = np.concatenate([codec.encode(row[None]) for row in x])  # as those of `combine` below
    wrong = wrong_on_wire(codec, wire[:1].get(), encoded[:1], count, x)
    nbytes = passes * chunks.nbytes + wire.nbytes
    yield "encode", bench.measured(encode, nbytes, wrong, _of(plain, name, "encode"))

    decode()
    expected = codec.decode(encoded[:1], np.empty_like(x[:1]))
    checked = _repeating(codec, count, x)
    wrong = _different_bytes(decoded[:1, :checked].get(), resized(expected, checked))
    yield "decode", bench.measured(decode, chunks.nbytes + wire.nbytes, wrong, _of(plain, name, "decode"))

    del chunks, wire, decoded, encode, decode, plain
    count = row_elements(codec, bench.row)
    wire = bench.cupy.empty((max(summands), codec.wire_nbytes(count, kind)), np.uint8)
    for row in range(len(wire)):  # one by one, which takes less memory
        codec.encode(bench.repeated(x[row : row + 1], count), wire[row : row + 1])
    for p in summands:
        out = bench.cupy.empty((1, wire.shape[1]), np.uint8)
        combine = partial(codec.combine, wire[:p], out, op="avg", count=count, dtype=kind)
        passes = _passes(combine)
        expected = codec.combine(encoded[:p], op="avg", count=x.shape[1], dtype=kind)
        wrong = wrong_on_wire(codec, out.get(), expected, count, x)
        beside = plain_combine(bench, x, count) if with_plain and name == "minmax" and p == CHUNKS else {}
        yield f"combine {p}", bench.measured(combine, passes * wire[:p].nbytes + out.nbytes, wrong, beside)


def row_elements(codec: Codec, nbytes: int) -> int:
    """Whole blocks of about as many elements as have `nbytes` of codes in eight or four bits."""
    return whole_blocks(2 * nbytes if isinstance(codec, Int4) else nbytes)


def whole_blocks(count: int) -> int:
    """About `count` elements: whole blocks of every codec and, if they repeat, whole repetitions."""
    size = DRAWN if count >= DRAWN else 4096
    return max(1, count // size) * size


def resized(x: Array, count: int) -> Array:
    """Host rows that repeat those of `x`, or begin as they do, with `count` elements."""
    return np.stack([np.resize(row, count) for row in x])


def wrong_on_wire(codec: Codec, actual: Array, expected: Array, count: int, x: Array) -> int:
    """Number of bytes that differ from the host's, which has encoded only the numbers that repeat, `x`.

    On the wire, the header of blocks repeats, and so do the codes after it.
    """
    header, header_of_drawn = (_header_nbytes(codec, n, x.dtype) for n in (count, x.shape[1]))
    checked = _repeating(codec, count, x)
    parts = actual[:, :header], actual[:, header:]
    wanted = expected[:, :header_of_drawn], expected[:, header_of_drawn:]
    return sum(
        count_wrong(part[:, :length], resized(repeating, length))
        for part, repeating in zip(parts, wanted, strict=True)
        for length in [part.shape[1] * checked // count]
    )


def _header_nbytes(codec: Codec, count: int, kind: DType) -> int:
    """Bytes of a chunk of whole blocks before its codes."""
    nbytes = codec.wire_nbytes(count, kind)
    if isinstance(codec, MinMaxUInt8):
        return nbytes - count
    return nbytes - count // 2 if isinstance(codec, Int4) else 0


def _repeating(codec: Codec, count: int, x: Array) -> int:
    """The elements of a row that are encoded as the host's numbers are: one repetition if codes are random."""
    return count if codec.random_seed is None else min(count, x.shape[1])


def _passes(call: Callable[[], object]) -> int:
    """Make a call, and count its kernels: each of them reads the elements once."""
    device = import_module("bagua_comm.kernels.device")
    launched: list[str] = []
    with device.before_launch(launched.append):
        call()
    return len(launched)


def _different_bytes(actual: Array, expected: Array) -> int:
    return count_wrong(*(np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (actual, expected)))


def plain_codecs(bench: Bench, chunks: Array) -> dict[str, dict[str, Callable[[], object]]]:
    """Calls of plain operations, by what they do and library."""
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    for library, (plain, view) in bench.rivals.items():
        x = view(chunks)
        calls.setdefault("float16 encode", {})[library] = partial(plain.cast_encode, x)
        calls.setdefault("minmax encode", {})[library] = partial(plain.minmax_encode, x)
        encoded = plain.minmax_encode(x)
        calls.setdefault("minmax decode", {})[library] = partial(plain.minmax_decode, *encoded)
    return calls


def plain_combine(bench: Bench, x: Array, count: int) -> dict[str, Callable[[], object]]:
    """Averages of rows of `count` elements by plain operations, by library."""
    rows = bench.repeated(x, count)
    return {
        library: partial(plain.minmax_combine, *plain.minmax_encode(view(rows)))
        for library, (plain, view) in bench.rivals.items()
    }


def _of(
    plain: dict[str, dict[str, Callable[[], object]]], codec: str, verb: str
) -> dict[str, Callable[[], object]]:
    return plain.get(f"{codec} {verb}", {})


def plain_agrees(bench: Bench) -> dict[str, Any]:
    """Numbers of codes, ends and elements in which plain operations differ from our bytes, by library."""
    count = 64 * BLOCK
    x = np.random.default_rng(1).standard_normal((CHUNKS, count), np.float32)
    codec, chunks = MinMaxUInt8(BLOCK), bench.up(x)
    wire = codec.encode(x)
    mean = codec.combine(wire, op="avg", count=count, dtype=x.dtype)
    found: dict[str, Any] = {}
    for library, (plain, view) in bench.rivals.items():
        try:
            encoded = plain.minmax_encode(view(chunks))
            found[library] = {
                "encode": different_from_wire(encoded, wire, count),
                "decode": _different_bytes(
                    on_host(plain.minmax_decode(*encoded)), codec.decode(wire, np.empty_like(x))
                ),
                "combine": different_from_wire(plain.minmax_combine(*encoded), mean, count),
            }
        except Exception as exc:
            found[library] = {"left_out": f"{type(exc).__name__}: {exc}"}
    return found


def different_from_wire(encoded: tuple[Any, Any, Any], wire: Array, count: int) -> int:
    """Number of bytes that differ between rows of the wire and the encoding by plain operations."""
    low, high, codes = map(on_host, encoded)
    n, header = len(wire), 2 * 4 * count // BLOCK
    ends = np.concatenate([low.reshape(n, -1, 1), high.reshape(n, -1, 1)], axis=2)
    start = wire.shape[1] - count
    return count_wrong(codes.reshape(n, -1), wire[:, start:]) + _different_bytes(ends, wire[:, :header])


def on_host(x: Any) -> Array:
    """A NumPy array of an array of any of the libraries."""
    if isinstance(x, np.ndarray):
        return x
    return x.get() if hasattr(x, "get") else x.cpu().numpy()


# ---------------------------------------------------------------------------------------------------
# The largest elements
# ---------------------------------------------------------------------------------------------------


def top_k_rows(bench: Bench, dtype: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Encode, subtract and sum of `TopK()`.

    Bytes are compared for few numbers, of which the last chunk is short: the host adds all that are sent.
    """
    kind, mean = dtype_named(dtype), TopK()
    settings = mean.chunk, mean.keep, mean.bits
    few = [row[:-1000] for row in bench.drawn(CHUNKS, bench.nbytes // kind.itemsize, kind)]
    device = kernels.of(bench.cupy.empty(0))
    expected = top_k_results(host, [row.copy() for row in few], settings)
    wrong = {
        verb: sum(_different_bytes(x.get(), y) for x, y in zip(actual, expected[verb], strict=True))
        for verb, actual in top_k_results(device, [bench.up(row) for row in few], settings).items()
    }

    x = bench.repeated(bench.drawn(1, bench.nbytes // kind.itemsize, kind), bench.nbytes // kind.itemsize)[0]
    wires = bench.cupy.empty((CHUNKS, mean.wire_nbytes(x.size)), np.uint8)
    for wire in wires:
        device.top_k_encode(x, wire, *settings)
    record = wires.shape[1]
    encode = partial(device.top_k_encode, x, wires[0], *settings)
    yield "encode", bench.measured(encode, x.nbytes + record, wrong["encode"], {})
    for p in (2, CHUNKS):
        add = partial(device.top_k_sum, wires[:p], bench.cupy.empty(x.shape, kind), *settings, "avg")
        yield f"sum {p}", bench.measured(add, p * record + x.nbytes, wrong["sum"], {})
    subtract = partial(device.top_k_subtract, x, wires[0], *settings)
    sent = 2 * x.nbytes * mean.keep // mean.chunk
    yield "subtract", bench.measured(subtract, record + sent, wrong["subtract"], {})


def top_k_results(run: Any, rows: Sequence[Array], settings: tuple[int, int, int]) -> dict[str, list[Array]]:
    """The records of rows, what is left of the rows, and the mean of the records, by verb."""
    shape = (len(rows), TopK(*settings).wire_nbytes(rows[0].size))
    wires, mean = arrays.empty(shape, np.uint8, like=rows[0]), arrays.zeros_like(rows[0])
    for row, wire in zip(rows, wires, strict=True):
        run.top_k_encode(row, wire, *settings)
        run.top_k_subtract(row, wire, *settings)
    run.top_k_sum(wires, mean, *settings, "avg")
    return {"encode": [wires], "subtract": [*rows], "sum": [mean]}


# ---------------------------------------------------------------------------------------------------
# Element-wise steps
# ---------------------------------------------------------------------------------------------------

STEPS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "scale": (1, 2, {"factor": 1.0001}),
    "add": (3, 3, {}),
    "subtract": (3, 3, {}),
    "loss": (2, 3, {"factor": 3, "out": None}),
    "decayed_loss": (2, 4, {"decay": 0.8, "out": None}),
    "midpoint": (3, 3, {}),
    "blend": (2, 3, {"weight": 0.9, "out": None}),
    "ring_difference": (5, 5, {}),
    "move_half": (4, 4, {}),
    "advance": (3, 4, {}),
    "add_scaled": (2, 3, {"factor": -0.7}),
    "sgd_step": (3, 5, SGD),
    "adam_moments": (4, 6, ADAM),
    "adam_step": (3, 4, ADAM_STEP),
}
"""For each step: how many arrays precede the settings, how often arrays are read or written, and the settings."""

CHECKED = 1 << 20
"""Elements of a step that are compared with the host's."""


class Operands:
    """Arrays of a step on the device, and on the host the numbers that repeat in them."""

    def __init__(self, bench: Bench, arrays: int, dtype: DType) -> None:
        count = bench.nbytes // dtype.itemsize
        drawn = np.abs(bench.drawn(arrays, count, dtype))
        self.device = [bench.repeated(row[None], count)[0] for row in drawn]
        self._host = list(drawn)

    def wrong(self, step: Callable[..., None]) -> int:
        """Number of bytes that differ from the host's after one step on either side."""
        step(host, *self._host)
        return sum(
            _different_bytes(x[:CHECKED].get(), np.resize(expected, min(CHECKED, x.size)))
            for x, expected in zip(self.device, self._host, strict=True)
        )


def step_row(bench: Bench, name: str, dtype: str) -> dict[str, Any]:
    """One element-wise step."""
    taken, moves, settings = STEPS[name]
    operands = Operands(bench, taken + ("out" in settings), dtype_named(dtype))

    def step(run: Any, *arrays: Array) -> None:
        options = settings | ({"out": arrays[-1]} if "out" in settings else {})
        getattr(run, name)(*arrays[:taken], **options)

    plain = {}
    if name == "sgd_step" and dtype == "float32":
        plain = {
            library: partial(rival.sgd_step, *map(view, operands.device))
            for library, (rival, view) in bench.rivals.items()
        }
    return measured_step(bench, operands, step, moves, plain)


def adam_row(bench: Bench) -> dict[str, Any]:
    """Both kernels of a step of Adam together, in float32."""
    operands = Operands(bench, 4, np.dtype(np.float32))

    def step(run: Any, x: Array, g: Array, m: Array, v: Array) -> None:
        run.adam_moments(x, g, m, v, **ADAM)
        run.adam_step(x, m, v, **ADAM_STEP)

    plain = {
        library: partial(rival.adam, *map(view, operands.device))
        for library, (rival, view) in bench.rivals.items()
    }
    return measured_step(bench, operands, step, 10, plain)


def measured_step(
    bench: Bench,
    operands: Operands,
    step: Callable[..., None],
    moves: int,
    plain: Mapping[str, Callable[[], object]],
) -> dict[str, Any]:
    """Check and time a step, which reads or writes arrays `moves` times."""
    run = partial(step, kernels.of(operands.device[0]), *operands.device)
    run()
    return bench.measured(run, moves * operands.device[0].nbytes, operands.wrong(step), plain)


def main() -> None:
    """Measure everything, the most important figures first; after an error, continue with the rest."""
    parser = part_parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    options = parser.parse_args()
    bench, results = Bench(options.shrink, options.iterations), Results.of(options)
    results["copy"] = bench.copy()
    for name in CODECS:
        for dtype in options.dtypes:
            with results.going_on(f"{name} {dtype}"):
                for verb, row in codec_rows(bench, name, dtype):
                    results[f"{name} {verb} {dtype}"] = row
    for dtype in options.dtypes:
        with results.going_on(f"top-k {dtype}"):
            for verb, row in top_k_rows(bench, dtype):
                results[f"top-k {verb} {dtype}"] = row
    results["plain_agrees"] = plain_agrees(bench)
    for name in STEPS:
        for dtype in options.dtypes:
            with results.going_on(f"{name} {dtype}"):
                results[f"{name} {dtype}"] = step_row(bench, name, dtype)
    with results.going_on("adam float32"):
        results["adam float32"] = adam_row(bench)
    results.end()


if __name__ == "__main__":
    main()
