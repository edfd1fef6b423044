"""The contract of a codec.

A codec turns chunks of floating-point numbers, (n, m), into chunks of wire bytes, (n, w) uint8, and
back. It is a frozen dataclass of its settings, and `eval(repr(codec)) == codec`. Each chunk is coded
independently of its neighbours. A codec writes all of a chunk's w bytes, and zeros to unused ones, so that no old
memory is sent.

A NaN or an infinity decodes to a value that is not finite, and a finite value to a finite value.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from .. import arrays, kernels
from ..arrays import Array, DType
from ..errors import ArrayError, UnsupportedError, how_to_call, shown
from ..kernels.host import Draws

ALIGNMENT = 32
"""The parts of an encoded chunk start at multiples of this number of bytes in this package's codecs."""

_HEADER_BYTES = 4
"""Bytes of the widest number in a header; a device reads it only at multiples of this number."""

_LONG = 1 << 14
"""Elements of a chunk for which a codec with one block per chunk uses its kernels for long blocks."""


class Steps(NamedTuple):
    """The steps of a codec for chunks of one length and dtype, without checks of arguments."""

    encode: Callable[..., object]
    """encode(chunks, wire), or encode(chunks, wire, draws=draws) if the codec has a `random_seed`"""

    decode: Callable[[Array, Array], object]
    """decode(wire, out)"""

    combine: Callable[..., object]
    """combine(wire, out, op=op), or combine(wire, out, op=op, draws=draws) if the codec has a `random_seed`"""

    takes_rows_apart: bool = False
    """Whether `encode` and `decode` take chunks that are contiguous each, but not adjacent."""

    def all(self) -> tuple[Callable[..., object], ...]:
        """Return the three steps."""
        return self.encode, self.decode, self.combine


class Codec(ABC):
    """A lossy coder of chunks.

    A subclass defines `wire_nbytes`, `_encode` and `_decode`; it may define `_combine` and `granule` for
    speed. Collectives call the methods with an underscore, with checked arguments.
    """

    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "float16", "bfloat16"})
    """Names of the element dtypes that can be encoded."""

    @abstractmethod
    def wire_nbytes(self, count: int, dtype: DType) -> int:
        """Bytes on the wire of a chunk of `count` elements; depends only on the arguments and the settings."""

    @property
    def granule(self) -> int | None:
        """A chunk may be cut at multiples of this many elements without changing what it decodes to.

        Each piece is encoded as a chunk of its own, with its own header and padding; so this is the length of a
        block where blocks are coded independently. None if a chunk may not be cut.
        """
        return None

    @property
    def random_seed(self) -> int | None:
        """The seed of the random numbers of stochastic rounding; None for a codec that draws none.

        With a seed, `_encode` and an own `_combine` get one more argument, `draws`: random numbers that differ
        between ranks and between calls, and that a rerun of the same training gets again.
        """
        return None

    def encode(self, chunks: Array, out: Array | None = None, *, draws: Draws | None = None) -> Array:
        """Encode `chunks`, (n, m), into `out`, (n, w) uint8; a new array if None.

        With a `random_seed`, `draws` gives the random numbers of the elements; None for those of the seed alone.

        Raises:
            ArrayError: `chunks` is not two-dimensional and contiguous, or `out` does not fit, cannot be written
                to or overlaps `chunks`.
            UnsupportedError: The dtype of `chunks` is not in `dtypes`, or an argument is not an array.
        """
        n, m = self._check_chunks("encode", "chunks", chunks)
        w = self.wire_nbytes(m, chunks.dtype)
        if out is None:
            out = arrays.empty((n, w), np.uint8, like=chunks)
        self._check_wire("encode", "out", out, (n, w))
        _check_target("encode", "out", out, "chunks", chunks)
        encode: Callable[..., None] = self._encode  # with a `random_seed` it takes draws
        encode(chunks, out, **self._random(draws))
        return out

    def decode(self, wire: Array, out: Array) -> Array:
        """Decode `wire`, (n, w) uint8, into `out`, (n, m), whose dtype and m are those of the encoded chunks.

        Any bytes are safe: only `out` is written to.

        Raises:
            ArrayError: The shapes do not fit together, or `out` cannot be written to or overlaps `wire`.
            UnsupportedError: The dtype of `out` is not in `dtypes`, or an argument is not an array.
        """
        n, m = self._check_chunks("decode", "out", out)
        self._check_wire("decode", "wire", wire, (n, self.wire_nbytes(m, out.dtype)))
        _check_target("decode", "out", out, "wire", wire)
        self._decode(wire, out)
        return out

    def combine(
        self,
        wire: Array,
        out: Array | None = None,
        *,
        op: str,
        count: int,
        dtype: DType,
        draws: Draws | None = None,
    ) -> Array:
        """Decode n chunks of `count` elements, reduce them, and encode the result as one chunk.

        The chunks are added in float32 in row order, divided by n for "avg", and rounded to `dtype`.

        Args:
            wire: The encoded chunks, (n, w) uint8.
            out: The array for the result, (1, w) uint8; a new array if None.
            op: "sum" or "avg".
            count: Elements of a chunk.
            dtype: The dtype of the elements.
            draws: See `encode`.

        Raises:
            ArrayError: The shapes do not fit, `count` is not a number of elements, `op` is neither "sum" nor
                "avg", or `out` cannot be written to or overlaps `wire`.
            UnsupportedError: `dtype` is not in `dtypes`, or an argument is not an array.
        """
        if op not in ("sum", "avg"):
            raise ArrayError(f'combine: op is {op!r}, expected "sum" or "avg"')
        try:
            dtype = np.dtype(dtype)
        except TypeError as exc:
            raise UnsupportedError(f"combine: dtype is {shown(dtype)}, expected a dtype such as float32") from exc
        self._check_dtype("combine", dtype)
        count = check_count("combine", count)
        arrays.library(wire)
        if wire.ndim != 2 or len(wire) == 0:
            raise ArrayError(f"combine: wire has shape {wire.shape}, expected (chunks, wire bytes)")
        w = self.wire_nbytes(count, dtype)
        self._check_wire("combine", "wire", wire, (len(wire), w))
        if out is None:
            out = arrays.empty((1, w), np.uint8, like=wire)
        self._check_wire("combine", "out", out, (1, w))
        _check_target("combine", "out", out, "wire", wire)
        self._combine_with(self._random(draws), wire, out, op, count, dtype)
        return out

    def steps(self, count: int, like: Array) -> Steps:
        """The three steps for chunks of `count` elements, of the dtype and device of `like`.

        All that does not depend on the arrays themselves is computed now. The steps check no arguments.
        """
        return self._steps(count, like)

    def _steps(self, count: int, like: Array) -> Steps:
        """Return the steps by the methods with an underscore."""
        dtype = like.dtype

        def combine(wire: Array, out: Array, op: str, **random: Draws) -> None:
            self._combine_with(random, wire, out, op, count, dtype)

        return Steps(self._encode, self._decode, combine)

    def prepare(self, like: Array) -> None:
        """Load all kernels for arrays such as `like`, on the host or on its device, if they are ready."""
        run = arrays.namespace(like)
        for count in (1, _LONG):
            chunk = run.zeros((1, count), like.dtype)
            wire = self.combine(self.encode(chunk), op="avg", count=count, dtype=like.dtype)
            self.decode(wire, chunk)

    @abstractmethod
    def _encode(self, chunks: Array, wire: Array) -> None:
        """Encode `chunks`, (n, m), into all bytes of `wire`, (n, w)."""

    @abstractmethod
    def _decode(self, wire: Array, out: Array) -> None:
        """Decode `wire`, (n, w), into `out`, (n, m)."""

    def _combine(self, wire: Array, out: Array, op: str, count: int, dtype: DType) -> None:
        """Decode `wire`, (n, w), add the rows or average them, and encode the result into `out`, (1, w).

        This default rounds decoded values to `dtype` before it adds them. A codec's own `_combine` need not do
        so, and needs no memory for the decoded rows.
        """
        self._encode(self._total(wire, op, count, dtype), out)

    def _combine_with(
        self, random: dict[str, Draws], wire: Array, out: Array, op: str, count: int, dtype: DType
    ) -> None:
        """Call `_combine` with the random numbers of `_random`; if it takes none, encode the sum with them."""
        encode: Callable[..., None] = self._encode
        combine: Callable[..., None] = self._combine
        if random and not _takes_draws(combine):
            encode(self._total(wire, op, count, dtype), out, **random)
        else:
            combine(wire, out, op, count, dtype, **random)

    def _total(self, wire: Array, op: str, count: int, dtype: DType) -> Array:
        """Decode the rows of `wire`, and return their sum or mean, (1, count)."""
        rows = arrays.empty((len(wire), count), dtype, like=wire)
        total = arrays.empty((1, count), dtype, like=wire)
        self._decode(wire, rows)
        kernels.of(rows).reduce_rows(rows, total[0], op)
        return total

    def _random(self, draws: Draws | None) -> dict[str, Draws]:
        """The argument of `_encode` and `_combine` for stochastic rounding, if they take it.

        Raises:
            ArrayError: `draws` is not a Draws.
        """
        if draws is not None and not isinstance(draws, Draws):
            raise ArrayError(f"{type(self).__name__}: draws is {shown(draws)}, expected None or a Draws")
        if self.random_seed is None:
            return {}
        return {"draws": Draws.of(self.random_seed) if draws is None else draws}

    def _check_chunks(self, call: str, name: str, x: Array) -> tuple[int, int]:
        arrays.library(x)
        if x.ndim != 2 or not x.flags.c_contiguous:
            raise ArrayError(f"{call}: {name} has shape {x.shape}, expected C-contiguous (chunks, elements)")
        self._check_dtype(call, x.dtype)
        check_aligned(call, name, x)
        n, m = x.shape
        return n, m

    def _check_dtype(self, call: str, dtype: DType) -> None:
        if arrays.dtype_name(dtype) not in self.dtypes or not dtype.isnative:
            wanted = ", ".join(sorted(self.dtypes))
            raise UnsupportedError(f"{call}: {self} cannot code {dtype}, only {wanted} in native byte order")

    def _check_wire(self, call: str, name: str, wire: Array, shape: tuple[int, int]) -> None:
        arrays.library(wire)
        if wire.shape != shape or wire.dtype != np.uint8 or not wire.flags.c_contiguous:
            raise ArrayError(f"{call}: {name} is {wire.dtype}{wire.shape}, expected C-contiguous uint8{shape}")
        arrays.check_device(call, name, wire)
        if not isinstance(wire, np.ndarray) and arrays.address(wire) % _HEADER_BYTES:
            raise ArrayError(f"{call}: {name} begins at an address that is not a multiple of {_HEADER_BYTES}")


def _takes_draws(function: Callable[..., object]) -> bool:
    taken = inspect.signature(function).parameters.values()
    return any(each.name == "draws" or each.kind is each.VAR_KEYWORD for each in taken)


class KernelCodec(Codec):
    """Base of this package's codecs, whose steps are functions of `kernels`."""

    family: ClassVar[str]
    """The prefix of the functions: "int4" for `int4_encode`, `int4_decode` and `int4_combine`."""

    rows_apart: ClassVar[bool] = True
    """Whether the functions of the host take chunks that are not adjacent."""

    @abstractmethod
    def _layout(self, count: int, dtype: DType) -> Mapping[str, object]:
        """Further arguments of the functions, for chunks of `count` elements of this dtype."""

    def _steps(self, count: int, like: Array) -> Steps:
        own = ("_encode", "_decode", "_combine")
        if any(getattr(type(self), name) is not getattr(KernelCodec, name) for name in own):
            return super()._steps(count, like)  # a subclass has steps of its own
        layout = self._layout(count, like.dtype)
        return Steps(
            functools.partial(self._kernel("encode", like), **layout),
            functools.partial(self._kernel("decode", like), **layout),
            functools.partial(self._kernel("combine", like), count=count, dtype=like.dtype, **layout),
            takes_rows_apart=self.rows_apart and isinstance(like, np.ndarray),
        )

    def _kernel(self, step: str, like: Array) -> Callable[..., None]:
        function: Callable[..., None] = getattr(kernels.of(like), f"{self.family}_{step}")
        return function

    def _encode(self, chunks: Array, wire: Array, **random: Draws) -> None:
        layout = self._layout(chunks.shape[1], chunks.dtype)
        self._kernel("encode", chunks)(chunks, wire, **layout, **random)

    def _decode(self, wire: Array, out: Array) -> None:
        self._kernel("decode", out)(wire, out, **self._layout(out.shape[1], out.dtype))

    def _combine(self, wire: Array, out: Array, op: str, count: int, dtype: DType, **random: Draws) -> None:
        layout = self._layout(count, dtype)
        self._kernel("combine", wire)(wire, out, op=op, count=count, dtype=dtype, **layout, **random)


def check_aligned(call: str, name: str, x: Array) -> None:
    """Check that kernels can read the elements of `x` in place, on this device; raise `ArrayError` if not."""
    arrays.check_device(call, name, x)
    if not isinstance(x, np.ndarray) and arrays.address(x) % x.itemsize:
        raise ArrayError(
            f"{call}: {name} begins at an address that is not a multiple of {x.itemsize}, the size of an "
            "element, so a device cannot read it; copy it first"
        )


def _check_target(call: str, name: str, target: Array, source_name: str, source: Array) -> None:
    """Check that a kernel can write to `target` while it reads `source`."""
    if arrays.library(target) != arrays.library(source):
        raise ArrayError(f"{call}: {name} and {source_name} are not both on the host, or both on the device")
    if not isinstance(target, np.ndarray):
        return
    if not target.flags.writeable:
        raise ArrayError(f"{call}: {name} is read-only")
    if np.may_share_memory(target, source):
        raise ArrayError(f"{call}: {name} overlaps {source_name}")


def check_count(call: str, count: object) -> int:
    """`count` as an int.

    Raises:
        ArrayError: It is not an integer, or negative.
    """
    if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or not 0 <= count < 2**63:
        raise ArrayError(
            f"{call}: count is {shown(count)}, expected a number of elements, an integer of at least 0"
        )
    return int(count)


def codecs_in(settings: object) -> Iterator[Codec]:
    """All codecs in the settings of an algorithm or an average, which are dataclasses."""
    if isinstance(settings, Codec):
        yield settings
    elif is_dataclass(settings):
        for field in fields(settings):
            yield from codecs_in(getattr(settings, field.name))


def check_codec_argument(owner: str, codec: object, dtype: str | None = None) -> None:
    """Check that `codec` is a Codec, and takes `dtype` if one is given.

    Raises:
        ArrayError: It is not a Codec.
        UnsupportedError: It does not take the dtype.
    """
    if not isinstance(codec, Codec):
        raise ArrayError(
            f"{owner}: codec is {codec!r}, expected a Codec such as MinMaxUInt8(){how_to_call(codec)}"
        )
    if dtype is not None and dtype not in codec.dtypes:
        wanted = ", ".join(sorted(codec.dtypes))
        cure = "; pass x.astype('float32')" if dtype == "float64" and "float32" in codec.dtypes else ""
        raise UnsupportedError(f"{owner}: {codec} cannot code {dtype}, only {wanted}{cure}")


def padded(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of `ALIGNMENT`, where the next part of a chunk may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
