"""Collectives on arrays that differ in size among ranks: gather, scatter, and the calls with counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy.typing as npt

from .. import arrays
from ..arrays import A, AnyArray, Array, Elements, S, parts
from ..errors import ArrayError, shown_as
from ..transports.base import COLLECTIVE
from .agreement import compare_calls, compare_counts
from .base import CommBase
from .call import Call


@shown_as("Communicator")
class UnevenCollectives(CommBase):
    """Collectives on arrays that differ in size among ranks."""

    @overload
    def gather(self, x: AnyArray, out: A, *, root: int, timeout_s: float | None = None) -> A | None: ...

    @overload
    def gather(
        self, x: Elements[S], out: None = None, *, root: int, timeout_s: float | None = None
    ) -> npt.NDArray[S] | None: ...

    @overload
    def gather(self, x: A, out: A | None = None, *, root: int, timeout_s: float | None = None) -> A | None: ...

    def gather(self, x: Any, out: Any = None, *, root: int, timeout_s: float | None = None) -> Any:
        """Gather `x` of all ranks on `root`, where row r of the result is that of rank r; return None elsewhere.

        Collective. `x` has the same shape and dtype on every rank; the result has shape `(p, *x.shape)`.
        Only `root` uses `out`, of any shape with that many elements. `x` may be its row of `out`.

        Raises:
            ArrayError: `out` does not fit, or `root` is not a rank.
            UnsupportedError: No transport takes such an array.
        """
        call = Call(self, "gather", x, root=root, timeout_s=timeout_s)
        return self._gather(call, out, [call.x.size] * self.size, root)

    @overload
    def gatherv(
        self,
        x: AnyArray,
        out: A,
        counts: Sequence[int] | None = None,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> A | None: ...

    @overload
    def gatherv(
        self,
        x: Elements[S],
        out: None = None,
        counts: Sequence[int] | None = None,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> npt.NDArray[S] | None: ...

    @overload
    def gatherv(
        self,
        x: A,
        out: A | None = None,
        counts: Sequence[int] | None = None,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> A | None: ...

    def gatherv(
        self,
        x: Any,
        out: Any = None,
        counts: Sequence[int] | None = None,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> Any:
        """Concatenate arrays of different lengths on `root`, in rank order; return None elsewhere.

        Collective. Rank r sends counts[r] elements, in any shape; the result has shape (sum(counts),). Only
        `root` uses `counts`, which it must give, and `out`, of any shape with that many elements. `x` may be this
        rank's part of `out`.

        Raises:
            ArrayError: `counts` is missing or does not fit the ranks, `x` or `out`, or `root` is not a rank.
            CommMismatch: The number of elements of a rank differs from `counts`.
            UnsupportedError: No transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.gatherv(np.full(comm.rank, comm.rank), counts=[0, 1, 2], root=0))[0]
        array([1, 2, 2])
        """
        call = Call(self, "gatherv", x, root=root, timeout_s=timeout_s).unchecked()
        if self.rank != root:
            return self._gather(call, None, [], root)
        if counts is None:
            raise ArrayError("gatherv: counts is None; root must give it")
        return self._gather(call, out, self._check_counts("gatherv", "counts", counts, call.x, own=True), root)

    def _gather(self, call: Call, out: Any, counts: Sequence[int], root: int) -> Any:
        """The body of `gather` and `gatherv`; `counts` matter on `root` alone."""
        self._check_peer(call.name, "root", root)
        is_even, given = call.name == "gather", call.x
        call.contiguous()
        if self.rank == root:
            call.writes_to(out, (self.size, *given.shape) if is_even else (sum(counts),), any_shape=True)
            chunks = parts(call.target, counts)
            call.check_overlap(chunks[root])

        def move(x: Array, target: Array) -> None:
            if not is_even:
                self._compare_counts(call, self._only(root, given.size), counts)
            if self.rank != root:
                call.transport.exchange([(root, x)], [], tag=COLLECTIVE)
                return
            if not arrays.same_memory(x, chunks[root]):
                chunks[root][...] = x.reshape(-1)
            call.transport.exchange([], [(r, chunks[r]) for r in self._others()], tag=COLLECTIVE)

        call.run(move)
        return call.result if self.rank == root else None

    @overload
    def scatter(self, x: AnyArray | None, out: A, *, root: int, timeout_s: float | None = None) -> A: ...

    @overload
    def scatter(
        self, x: Elements[S], out: None = None, *, root: int, timeout_s: float | None = None
    ) -> npt.NDArray[S]: ...

    @overload
    def scatter(self, x: A, out: None = None, *, root: int, timeout_s: float | None = None) -> A: ...

    def scatter(self, x: Any, out: Any = None, *, root: int, timeout_s: float | None = None) -> Any:
        """Scatter the rows of `x` of `root`: the result is row `rank`.

        Collective. `x`, (p, ...), is None on ranks other than `root`, whose `out` has the shape and dtype to
        expect. On `root`, `out` may be None or this rank's row of `x`.

        Raises:
            ArrayError: `x` does not have p rows, `out` is missing or does not fit, `root` is not a rank.
            UnsupportedError: No transport takes such an array.
        """
        return self._scatter("scatter", x, None, out, root, timeout_s)

    @overload
    def scatterv(
        self,
        x: AnyArray | None,
        counts: Sequence[int] | None,
        out: A,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> A: ...

    @overload
    def scatterv(
        self,
        x: Elements[S],
        counts: Sequence[int] | None,
        out: None = None,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> npt.NDArray[S]: ...

    @overload
    def scatterv(
        self, x: A, counts: Sequence[int] | None, out: None = None, *, root: int, timeout_s: float | None = None
    ) -> A: ...

    def scatterv(
        self, x: Any, counts: Sequence[int] | None, out: Any = None, *, root: int, timeout_s: float | None = None
    ) -> Any:
        """Scatter parts of `x` of `root`, counts[r] elements to rank r.

        Collective. The parts are consecutive in `x`, in rank order. `x` and `counts` are None on ranks other than
        `root`, whose `out` has the number of elements and the dtype to expect. On `root`, `out` may be None or
        this rank's part of `x`. `out` may have any shape.

        Raises:
            ArrayError: `counts` is missing or does not fit the ranks, `x` or `out`; `x` or `out` is missing;
                `root` is not a rank.
            CommMismatch: The number of elements that a rank expects differs from `counts`.
            UnsupportedError: No transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     x, counts = (np.arange(3), [1, 2]) if comm.rank == 0 else (None, None)
        ...     return comm.scatterv(x, counts, np.empty(1 + comm.rank, int), root=0)
        >>> run_ranks(2, body)
        [array([0]), array([1, 2])]
        """
        return self._scatter("scatterv", x, counts, out, root, timeout_s)

    def _scatter(
        self, name: str, x: Any, counts: Sequence[int] | None, out: Any, root: int, timeout_s: float | None
    ) -> Any:
        """The body of `scatter` and `scatterv`."""
        self._check_peer(name, "root", root)
        is_even, at_root = name == "scatter", self.rank == root
        if not at_root and out is None:
            raise ArrayError(f"{name}: out is None; ranks other than root must give it")
        if at_root and x is None:
            raise ArrayError(f"{name}: x is None; root must give it")
        call = (
            Call(self, name, x, root=root, timeout_s=timeout_s)
            if at_root
            else Call(self, name, out, "out", root=root, timeout_s=timeout_s)
        )
        given = call.x
        if not at_root:
            call.writes_to(out, given.shape)
        elif is_even:
            if given.ndim == 0 or given.shape[0] != self.size:
                cure = f"; pass x.reshape({self.size}, -1)" if given.size % self.size == 0 else ""
                raise ArrayError(f"{name}: x has shape {given.shape}, expected ({self.size}, ...){cure}")
            counts = [given.size // self.size] * self.size
            call.writes_to(out, given.shape[1:])
        elif counts is None:
            raise ArrayError(f"{name}: counts is None; root must give it")
        else:
            counts = self._check_counts(name, "counts", counts, given)
            call.writes_to(out, (counts[root],), any_shape=True)
        if at_root:
            call.contiguous()
            chunks, mine = parts(call.x, counts or []), call.target.reshape(-1)
            call.check_overlap(chunks[root])
        call.sends(call.x if at_root else None)
        call.x = call.target  # ranks compare and count their parts

        def move(x: Array, target: Array) -> None:
            if not is_even:
                self._compare_counts(call, (counts or []) if at_root else [], self._only(root, target.size))
            if not at_root:
                call.transport.exchange([], [(root, target)], tag=COLLECTIVE)
            else:
                if not arrays.same_memory(chunks[root], mine):
                    mine[...] = chunks[root]
                call.transport.exchange([(r, chunks[r]) for r in self._others()], [], tag=COLLECTIVE)

        (call if is_even else call.unchecked()).run(move)
        return call.result

    def allgatherv(self, x: AnyArray, out: A, counts: Sequence[int], *, timeout_s: float | None = None) -> A:
        """Concatenate arrays of different lengths on every rank, in rank order.

        Collective. Rank r sends counts[r] elements; `out` has sum(counts) elements, and `counts` is the same on
        every rank. `x` may be this rank's part of `out`.

        Raises:
            ArrayError: `counts` does not fit the ranks, `x` or `out`.
            UnsupportedError: No transport takes such an array.
        """
        name = "allgatherv"
        call = Call(self, name, x, timeout_s=timeout_s)
        counts = call.detail["counts"] = self._check_counts(name, "counts", counts, call.x, own=True)
        call.writes_to(out, (sum(counts),), any_shape=True)
        call.contiguous()
        send, whole = call.x.reshape(-1), call.target.reshape(-1)
        chunks = parts(whole, counts)
        call.check_overlap(chunks[self.rank])
        call.sends(send)
        call.x, call.payload = whole, send.nbytes  # inputs differ among ranks; the outputs are alike
        others = self._others()

        def move(x: Array, target: Array) -> None:
            if not arrays.same_memory(send, chunks[self.rank]):
                chunks[self.rank][...] = send
            call.transport.exchange([(r, send) for r in others], [(r, chunks[r]) for r in others], tag=COLLECTIVE)

        call.run(move)
        result: A = call.result
        return result

    def alltoallv(
        self,
        x: AnyArray,
        counts: Sequence[int],
        out: A,
        out_counts: Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> A:
        """Send counts[j] elements of `x` to rank j; out_counts[i] elements come from rank i.

        Collective. The parts are consecutive in `x` and in `out`, in rank order. counts[j] of rank i must equal
        out_counts[i] of rank j.

        Raises:
            ArrayError: The counts do not fit the ranks, `x` or `out`.
            CommMismatch: The counts of two ranks do not fit together.
            UnsupportedError: No transport takes such an array.
        """
        name = "alltoallv"
        call = Call(self, name, x, timeout_s=timeout_s).unchecked()
        counts = self._check_counts(name, "counts", counts, call.x)
        out_counts = self._check_counts(name, "out_counts", out_counts)
        if counts[self.rank] != out_counts[self.rank]:
            raise ArrayError(
                f"{name}: counts[{self.rank}] is {counts[self.rank]}, but out_counts[{self.rank}] is "
                f"{out_counts[self.rank]}; both are this rank's own part"
            )
        call.writes_to(out, (sum(out_counts),), any_shape=True)
        call.contiguous()
        if arrays.overlap(call.x, call.target):
            raise ArrayError(f"{name}: out overlaps x")
        source, chunks = parts(call.x, counts), parts(call.target, out_counts)
        others = self._others()

        def move(x: Array, target: Array) -> None:
            self._compare_counts(call, counts, out_counts)
            chunks[self.rank][...] = source[self.rank]
            call.transport.exchange(
                [(r, source[r]) for r in others], [(r, chunks[r]) for r in others], tag=COLLECTIVE
            )

        call.run(move)
        result: A = call.result
        return result

    def _compare_counts(self, call: Call, sends: Sequence[int], recvs: Sequence[int]) -> None:
        """With `check`, compare a call whose arrays differ among ranks, and its message sizes. Collective.

        `sends` and `recvs` are numbers of elements for and from each rank, (p,); empty lists stand for zeros.
        """
        if not self.check:
            return
        root = call.detail.get("root")
        at = "" if root is None else f", root={root}"
        compare_calls(self.host, f"{call.name}({arrays.dtype_name(call.x.dtype)}{at})")
        nothing = [0] * self.size
        compare_counts(self.host, sends or nothing, recvs or nothing)

    def _others(self) -> list[int]:
        """Return all ranks but this one."""
        return [r for r in range(self.size) if r != self.rank]

    def _only(self, rank: int, count: int) -> list[int]:
        """Return `count` for one rank and zero for the others, (p,)."""
        return [count if r == rank else 0 for r in range(self.size)]
