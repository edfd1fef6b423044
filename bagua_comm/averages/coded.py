"""The collectives of encoded arrays, in stages: what each rank encodes, combines and decodes, piece by piece.

An array has p chunks, one for each rank:

    reduce-scatter    encode p chunks -> alltoall -> decode p, add them in float32 in rank order
    allgather         encode one chunk -> allgather -> decode p
    allreduce         encode p chunks -> alltoall -> combine: decode p, add, encode one -> allgather -> decode p

So an allreduce is a reduce-scatter and an allgather, whose steps in the middle are one step of the codec. A
`Coding` is what can be prepared for all arrays of one size: the elements and the bytes of each piece.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from .. import arrays, kernels
from ..arrays import Array, Scratch
from ..codecs import Codec, Draws
from ..codecs.base import Steps, check_aligned
from ..comm.arguments import as_argument, check_writable
from ..comm.base import CommBase
from ..comm.call import Call
from ..comm.prepared import PreparedCall
from ..errors import ArrayError, BaguaError, CommError
from ..execution.cuda import enter
from ..execution.recording import recorded
from ..transports.base import Transport
from ..transports.flow import Flow, Rows
from ..transports.pipeline import LAG, Stages, cut, reduce_through


class Part(NamedTuple):
    """The part of one rank's chunk that is in a piece."""

    elements: slice
    """In the array of all chunks."""
    local: slice
    """In the chunk."""
    wire: slice
    """In the encoded bytes of the piece."""
    nbytes: int
    """Number of encoded bytes; 0 if the part is empty."""
    steps: Steps


class Coding:
    """How arrays of one library, dtype and size are cut into pieces and encoded.

    Args:
        comm: The ranks.
        transport: The transport that moves the arrays.
        codec: The encoding.
        counts: Numbers of elements of the chunks, (p,).
        like: An array of all chunks, perhaps without the padding of the last one.
        text: The call, with all arguments that must be the same on all ranks.
    """

    def __init__(
        self,
        comm: CommBase,
        transport: Transport,
        codec: Codec,
        counts: Sequence[int],
        like: Array,
        text: str,
    ) -> None:
        self.transport, self.dtype, self.text = transport, like.dtype, text
        self.random_seed = codec.random_seed
        self.rank, self.p, self.size = comm.rank, comm.size, sum(counts)
        self._kernels, self._nbytes = kernels.of(like), like.nbytes
        self._piece_bytes = transport.coded_piece_bytes(like.nbytes)
        self.pieces: list[list[Part]] = []
        """The parts of all ranks, by piece."""
        self.at_once = False
        """Whether a single piece holds all chunks, of equal size, so that they are encoded at once."""
        self.in_rows = False
        """Whether pieces hold equal parts of all chunks, which the codec takes in one call."""
        self.is_trivial = comm.size == 1 or self.size == 0
        """Whether nothing is encoded."""
        self._prepared: PreparedCall | None = None
        """A call on shards in host memory; see `keep`."""
        self._is_recorded = False
        """Whether calls are recorded, so that later ones on arrays at the same addresses replay them."""
        if self.is_trivial:
            return
        longest, dtype = max(counts), like.dtype
        piece_bytes = None if codec.granule is None else self._piece_bytes
        cuts = cut(longest, codec.wire_nbytes(longest, dtype), piece_bytes, codec.granule or 1)
        starts = np.cumsum([0, *counts]).tolist()
        steps: dict[int, Steps] = {}
        for piece in cuts:
            parts, at = [], 0
            for start, count in zip(starts, counts, strict=False):
                begin, end = min(piece.start, count), min(piece.stop, count)
                length = end - begin
                nbytes = codec.wire_nbytes(length, dtype) if length else 0
                if length not in steps:
                    steps[length] = codec.steps(length, like)
                elements = slice(start + begin, start + end)
                parts.append(Part(elements, slice(begin, end), slice(at, at + nbytes), nbytes, steps[length]))
                at += nbytes
            self.pieces.append(parts)
        self.at_once = len(cuts) == 1 and min(counts) == longest
        self.in_rows = min(counts) == longest and all(each.takes_rows_apart for each in steps.values())
        self.wires = [[part.wire for part in parts] for parts in self.pieces]
        self.sent_nbytes = max(parts[-1].wire.stop for parts in self.pieces)
        """Size of the encoded parts of all ranks, in the largest piece."""
        self.received_nbytes = self.p * max(parts[self.rank].nbytes for parts in self.pieces)
        """Size of all ranks' encoded parts for this rank, in the largest piece."""
        self._is_recorded = (
            not isinstance(like, np.ndarray)
            and transport.is_recorded
            and self.at_once
            and like.size == self.size  # no chunk is padded by a copy
            and codec.random_seed is None  # each call draws other random numbers
            and all(map(kernels.only_launches, steps[longest].all()))
        )

    def is_current(self, x: Array) -> bool:
        """Whether it was made for the present kernels and size of pieces of arrays like `x`."""
        return kernels.of(x) is self._kernels and self._piece_bytes == self.transport.coded_piece_bytes(
            self._nbytes
        )

    def through(self, flow: Flow, stages: Coded, *, scatter: bool = True, gather: bool = True) -> None:
        """Run the stages. An error of a step of the codec ends the call on all ranks. Collective."""
        try:
            reduce_through(flow, stages, scatter=scatter, gather=gather)
        except BaguaError as exc:
            if not isinstance(exc, CommError):  # else the transport has ended the call
                self.transport.interrupted(exc, stages)
            raise

    def through_recorded(self, flow: Flow, stages: Coded, call: Call, x: Array, target: Array) -> None:
        """Run the stages, and record their steps for `replay` if they do nothing else. Collective."""
        if not self._is_recorded or call.output.out is None:
            self.through(flow, stages)
            return
        recording = recorded(lambda: self.through(flow, stages))
        if not recording.is_complete:
            return
        name, scratch = call.name, call.comm.scratch  # the call holds its arrays

        def again(x: Array, target: Array) -> None:  # these two, whose addresses are in the steps
            enter(name, "x", x)
            scratch.follow()
            recording.replay()

        scratch.keep(self._addresses(x, target), call.prepared(again))

    def replay(self, comm: CommBase, x: Array, out: Array | None) -> bool:
        """Replay an earlier call on arrays at the addresses of `x` and `out`, if one was recorded.

        Collective. Returns whether it did; otherwise nothing was done.
        """
        if not self._is_recorded or out is None or type(out) is not type(x) or not x.flags.c_contiguous:
            return False
        if out is not x and (out.dtype != self.dtype or out.shape != x.shape or not out.flags.c_contiguous):
            return False
        prepared: PreparedCall | None = comm.scratch.kept(self._addresses(x, out))
        if prepared is None:
            return False
        prepared.run(comm, x, out)
        return True

    def keep(self, call: Call, move: Callable[..., object]) -> None:
        """Keep the first call on shards that was run, for `run_again`; `move(comm, x, out)` sends flat arrays."""
        if self._prepared is None:
            comm = weakref.ref(call.comm)  # which keeps this coding
            self._prepared = call.prepared(lambda x, out: move(comm(), x, out))

    def run_again(self, comm: CommBase, whole: object, chunk: object, *, gathers: bool) -> bool:
        """Run the call that was kept, if these arrays need neither another check nor a copy.

        Collective. Returns whether it did; otherwise nothing was done.

        Args:
            comm: The ranks.
            whole: The array of all chunks, of this coding's library, dtype and size.
            chunk: That of one chunk, which does not overlap `whole`, or this rank's chunk of it.
            gathers: Whether `chunk` is sent and `whole` filled, not the other way round.
        """
        prepared = self._prepared
        if prepared is None or type(whole) is not np.ndarray or type(chunk) is not np.ndarray:
            return False
        if (chunk.dtype, chunk.ndim, whole.ndim, chunk.size * self.p) != (self.dtype, 1, 1, self.size):
            return False
        if not (whole.flags.carray and chunk.flags.carray):  # contiguous, aligned, and can be written to
            return False
        if np.may_share_memory(whole, chunk):
            own = whole[self.rank * chunk.size :]
            if own.__array_interface__["data"] != chunk.__array_interface__["data"]:
                return False
        x, out = (chunk, whole) if gathers else (whole, chunk)
        prepared.run(comm, x, out)
        return True

    def forget_calls(self) -> None:
        """Record no calls, since no later one finds this coding."""
        self._is_recorded = False

    def _addresses(self, x: Array, out: Array) -> Hashable:
        return self, x.shape, x.data.ptr, out.data.ptr

    def check_aligned(self, call: Call, **named: Array | None) -> None:
        """Raise unless kernels can read the arrays in place."""
        if isinstance(call.x, np.ndarray) or self.is_trivial:
            return
        for name, x in named.items():
            if x is not None:
                check_aligned(call.name, name, x)

    def copy(self, call: Call, x: Array) -> Array:
        """Copy `x` to the target, where nothing is encoded, and return the result. Collective.

        Among several ranks, it compares the call: the array of another rank may not be empty.
        """
        if call.comm.size > 1:
            call.run(lambda x, _: self._compare_empty(x))
        if not arrays.same_memory(x, call.target):
            call.target[...] = x.reshape(call.target.shape)
        return call.result

    def _compare_empty(self, x: Array) -> None:
        """Raise `CommMismatch` if the array of another rank is not empty, as `x` is. Collective."""
        self.transport.agree_on_call(self.text, x)
        self.transport.barrier()  # where the ranks agree on nothing before messages differ


def next_draws(comm: CommBase, seed: int | None) -> Draws | None:
    """The random numbers of this rank for the next array that it encodes.

    In an engine they depend on the seed, the rank, the bucket and the training step, which checkpoints restore;
    elsewhere on the number of arrays that the communicator has encoded so, in place of bucket and step.

    Args:
        comm: The communicator that sends the array.
        seed: The `random_seed` of the codec; if it is None, so is the result.
    """
    if seed is None:
        return None
    rank, context = comm.flight.groups[comm.group][comm.rank], comm.context
    if context.bucket_step is None:
        return Draws.of(seed, rank, comm.group, context.count_draws())
    return Draws.of(seed, rank, *context.bucket_step, context.count_draws())


def as_like(call: Call, name: str, value: object, x: Array, *, written: bool = True) -> Array:
    """View argument `name` as an array, and raise unless it is a contiguous one like `x`.

    Raises:
        ArrayError: It is not, or is `written` to and cannot be.
        UnsupportedError: It is not an array.
    """
    found: Array = value if type(value) is type(x) else as_argument(call.name, name, value)
    if found.shape != x.shape or found.dtype != x.dtype or not arrays.is_contiguous(found):
        raise ArrayError(
            f"{call.name}: {name} is {found.dtype}{found.shape}, expected a contiguous {x.dtype}{x.shape}"
        )
    if written:
        check_writable(call.name, name, value, found)
    return found


def coding_for(call: Call, codec: Codec, counts: tuple[int, ...] | None, x: Array) -> Coding:
    """Return the `Coding` of arrays of all chunks like `x`: the cached one, or a new one, which is cached.

    `counts` is None for equal chunks, the last of which may be padded.
    """
    op = call.detail.get("op")
    return cached_coding(call.comm, call.name, codec, op, counts, x) or new_coding(call, codec, counts, x)


def new_coding(call: Call, codec: Codec, counts: tuple[int, ...] | None, x: Array) -> Coding:
    """Make and cache the `Coding` of arrays of all chunks like `x`; see `coding_for`."""
    comm, op = call.comm, call.detail.get("op")
    p, text = comm.size, ", ".join(f"{name}={value}" for name, value in call.detail.items())
    chunks = [-(-x.size // p)] * p if counts is None else counts
    made = Coding(comm, call.transport, codec, chunks, x, f"{call.name}({text})")
    try:
        comm.call_cache[call.name, codec, op, counts, type(x), x.dtype, x.size] = made
    except TypeError:  # a codec that cannot be hashed may change
        made.forget_calls()
    return made


def cached_coding(
    comm: CommBase, name: str, codec: Codec, op: str | None, counts: tuple[int, ...] | None, x: Any
) -> Coding | None:
    """Return the cached `Coding` of arrays like `x` in calls of this name, if there is one that is up to date."""
    try:
        key = name, codec, op, counts, type(x), x.dtype, x.size
        found: Coding | None = comm.call_cache.get(key)
    except (AttributeError, TypeError):  # not an array, or a codec that cannot be hashed
        return None
    return found if found is not None and found.is_current(x) else None


class Coded(Stages):
    """The stages of a collective of encoded arrays. A subclass combines.

    Args:
        coding: The pieces.
        comm: The ranks.
        x: This rank's chunks for all ranks, flat; None if they are not sent.
        results: The array that is decoded into, flat; None if nothing is.
        op: "sum" or "avg".
        residual: The error of encoding is stored here, flat; None to store none.
        decay: The part of `residual` that stays in it; see `ErrorFeedback`.
    """

    def __init__(
        self,
        coding: Coding,
        comm: CommBase,
        x: Array | None,
        results: Array | None,
        *,
        op: str = "sum",
        residual: Array | None = None,
        decay: float = 0.0,
    ) -> None:
        self._coding, self._scratch, self._op = coding, comm.scratch, op
        self._draws = None if coding.random_seed is None else next_draws(comm, coding.random_seed)
        """The random numbers of stochastic rounding; None for a codec that draws none."""
        self._x, self._results, self._residual, self._decay = x, results, residual, decay
        self.count = count = len(coding.pieces)
        # In an allreduce, results overwrite the encoded chunks of their piece, which is in use for two lags.
        slots = LAG + 1 if x is None or results is None else 2 * LAG + 1
        like = results if x is None else x
        assert like is not None
        sent = min(slots, count), coding.sent_nbytes
        self._sent = comm.scratch.take("sent", sent, np.uint8, like=like)
        if x is not None:
            shape = min(LAG + 1, count), coding.received_nbytes
            self._received = comm.scratch.take("received", shape, np.uint8, like=like)
        self._in_flight: dict[int, tuple[Rows, Array]] = {}
        """The encoded parts for or of all ranks, and those received from all ranks, by piece."""

    def encode(self, i: int) -> tuple[Rows, Rows]:
        """See `Stages.encode`: encode this rank's chunks for all ranks."""
        c, x, residual = self._coding, self._x, self._residual
        assert x is not None
        parts = c.pieces[i]
        mine = parts[c.rank]
        sent, received = self._slot(i), self._received[i % len(self._received), : c.p * mine.nbytes]
        into = received.reshape(c.p, mine.nbytes)
        self._in_flight[i] = sent, into
        if c.at_once:
            chunks = x.reshape(c.p, -1)
            self._encode(mine, chunks, sent, 0)
            if residual is not None:
                self._store_error(chunks, sent, residual, mine.steps)
            return sent, into
        rows, own = list(sent), list(into)
        if c.in_rows:
            chunks, table = x.reshape(c.p, -1)[:, mine.local], self._table(i)
            self._encode(mine, chunks, table, mine.local.start)
        else:
            rows[c.rank] = own[c.rank]  # encodes this rank's own chunk directly into the received ones
            for part, row in zip(parts, rows, strict=True):
                if part.nbytes:
                    self._encode(part, x[None, part.elements], row[None], part.elements.start)
        if residual is not None:
            for part, row in zip(parts, rows, strict=True):
                if part.nbytes:
                    self._store_error(x[None, part.elements], row[None], residual[part.elements], part.steps)
        return rows, own

    def _encode(self, part: Part, chunks: Array, wire: Array, start: int) -> None:
        """Encode chunks like a part; `start` is their position in the array of all chunks."""
        if self._draws is None:
            part.steps.encode(chunks, wire)
        else:
            part.steps.encode(chunks, wire, draws=self._draws.after(start))

    def decode(self, i: int) -> None:
        """See `Stages.decode`: decode the results of all ranks."""
        c, results = self._coding, self._results
        assert results is not None
        parts, (rows, _) = c.pieces[i], self._in_flight.pop(i)
        if c.at_once:
            parts[0].steps.decode(rows, results.reshape(c.p, -1))
            return
        if c.in_rows:
            parts[0].steps.decode(self._table(i), results.reshape(c.p, -1)[:, parts[0].local])
            return
        for part, row in zip(parts, rows, strict=True):
            if part.nbytes:
                part.steps.decode(row[None], results[None, part.elements])

    def _slot(self, i: int) -> Rows:
        """Return the memory of the encoded parts of piece i, one row for each rank."""
        c, memory = self._coding, self._sent[i % len(self._sent)]
        return memory.reshape(c.p, -1) if c.at_once else [*map(memory.__getitem__, c.wires[i])]

    def _table(self, i: int) -> Array:
        """Return the memory of the encoded parts of piece i, which are of one size, (p, m)."""
        c, memory = self._coding, self._sent[i % len(self._sent)]
        return memory[: c.pieces[i][-1].wire.stop].reshape(c.p, -1)

    def _store_error(self, chunks: Array, wire: Array, error: Array, steps: Steps) -> None:
        """Store the error of encoding these chunks; `error` is shorter if the last chunk is padded."""
        decoded = self._scratch.take("decoded", chunks.shape, chunks.dtype, like=chunks)
        steps.decode(wire, decoded)
        size, run = error.size, kernels.of(chunks)
        x, kept = chunks.reshape(-1)[:size], decoded.reshape(-1)[:size]
        if self._decay:
            run.decayed_loss(x, kept, self._decay, out=error)
        else:
            run.loss(x, kept, 1, out=error)


def check_decay(call: str, decay: object) -> None:
    """Raise `ArrayError` unless `decay` is a number of at least 0 and below 1."""
    if not isinstance(decay, (int, float)) or isinstance(decay, bool) or not 0 <= decay < 1:
        raise ArrayError(f"{call}: decay is {decay!r}, expected a number of at least 0 and below 1")


def with_residual(scratch: Scratch, x: Array, residual: Array | None, size: int, decay: float = 0.0) -> Array:
    """Return `x` + (1 - `decay`) `residual`, flat and padded with zeros to `size` elements.

    It is `x` itself if that is the same.
    """
    flat = x.reshape(-1)
    if residual is None and flat.size == size:
        return flat
    padded = scratch.take("padded", (size,), x.dtype, like=x)
    if residual is None:
        padded[: flat.size] = flat
    elif decay:
        kernels.of(x).add_scaled(flat, residual.reshape(-1), 1 - decay, out=padded[: flat.size])
    else:
        kernels.of(x).add(flat, residual.reshape(-1), out=padded[: flat.size])
    padded[flat.size :] = 0
    return cast(Array, padded)
