"""Reductions, broadcast, allgather, alltoall, barrier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy.typing as npt

from .. import arrays
from ..arrays import A, AnyArray, Array, Counts, Elements, Op, S, as_real, parts
from ..errors import ArrayError, shown_as
from ..transports.flow import COLLECTIVE
from .agreement import compare_calls, compare_counts
from .arguments import EMPTY, GIVEN, check_counts, even_chunk
from .base import CommBase
from .call import Call
from .prepared import run_if_known
from .weighted import weighted_mean


@shown_as("Communicator")
class Collectives(CommBase):
    """Reductions, and collectives in which all ranks send."""

    def allreduce(
        self,
        x: A,
        out: A | None = None,
        *,
        op: Op = "sum",
        weight: float | None = None,
        timeout_s: float | None = None,
    ) -> A:
        """Reduce `x` over all ranks, to the same bytes on every rank.

        Collective. `x` has the same shape and dtype on every rank. `out` may be `x`.

        Args:
            x: The array of this rank.
            out: Where to put the result.
            op: "sum", "avg", "prod", "min", "max"; also "band", "bor", "bxor" for integers. Integers are averaged
                in 64 bits, and truncated towards zero. float16 and bfloat16 are reduced in float32. Complex
                numbers have "sum", "avg" and, in host arrays, "prod".
            weight: With "avg", the weight of `x` in the mean, a finite number of at least 0, given on all ranks:
                the result is (sum of weight x) / (sum of weights). A rank with weight 0 adds nothing, not even a
                NaN; if all have 0, the result is zero, with a warning once. Costs 8 bytes more from each rank.
            timeout_s: The time limit of this call, in seconds; the communicator's `timeout_s` if None.

        Raises:
            ArrayError: `out` does not fit `x`, `op` is unknown, or the weight of a rank is out of range, on all
                ranks.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.allreduce(np.array([1.0, comm.rank]), op="avg"))
        [array([1. , 0.5]), array([1. , 0.5])]
        >>> def body(comm):
        ...     return comm.allreduce(np.array([4.0 * comm.rank]), op="avg", weight=3 - 2 * comm.rank)
        >>> run_ranks(2, body)
        [array([1.]), array([1.])]
        """
        if weight is not None:
            call = Call(self, "allreduce", x, op=op)
            mean: A = weighted_mean(
                self, call, out, weight, lambda y: self.allreduce(y, out=y, op="avg", timeout_s=timeout_s)
            )
            return mean
        repeated: A | None = run_if_known(self, "allreduce", (op,), x, out, timeout_s)
        if repeated is not None:
            return repeated
        call = Call(self, "allreduce", x, op=op, timeout_s=timeout_s)
        call.reduces_to(out, op)
        call.contiguous()
        transport = call.transport
        call.run_and_cache(lambda x, out: transport.allreduce(as_real(x, op), as_real(out, op), op), op)
        result: A = call.result
        return result

    def reduce(
        self, x: A, out: A | None = None, *, root: int, op: Op = "sum", timeout_s: float | None = None
    ) -> A | None:
        """Reduce `x` over all ranks; return the result on `root`, and None on the others.

        Collective. `x` has the same shape and dtype on every rank. Only `root` uses `out`, which
        may be `x`. For `op` see `allreduce`.

        Raises:
            ArrayError: `out` does not fit `x`, `root` is not a rank, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.
        """
        root = self._check_peer("reduce", "root", root)
        at_root = self.rank == root
        repeated: A | None = run_if_known(self, "reduce", (op, root), x, out, timeout_s)
        if repeated is not None:
            return repeated if at_root else None
        call = Call(self, "reduce", x, op=op, root=root, timeout_s=timeout_s)
        call.check_reduction(op)
        transport = call.transport
        if not at_root:
            call.contiguous()
            call.run_and_cache(
                lambda x, _: transport.reduce(as_real(x, op), None, root, op), op, root, fills="nothing"
            )
            return None
        call.writes_to(out, call.x.shape)
        call.in_place()
        call.contiguous()
        call.run_and_cache(lambda x, out: transport.reduce(as_real(x, op), as_real(out, op), root, op), op, root)
        result: A = call.result
        return result

    def broadcast(self, x: A, *, root: int, timeout_s: float | None = None) -> A:
        """Copy `x` of `root` into `x` of every other rank, and return it.

        Collective. `x` has the same shape and dtype on every rank.

        Raises:
            ArrayError: `root` is not a rank, or `x` cannot be written to.
            UnsupportedError: No transport takes such an array.
        """
        root = self._check_peer("broadcast", "root", root)
        if run_if_known(self, "broadcast", (root,), x, None, timeout_s) is not None:
            return x
        call = Call(self, "broadcast", x, root=root, timeout_s=timeout_s)
        value = call.x
        call.broadcasts(root)
        call.contiguous()
        call.sends(call.x if self.rank == root else None)
        call.target, transport = call.x, call.transport
        call.run_and_cache(lambda x, _: transport.broadcast(x, root), root, fills="x")
        if call.x is not value and self.rank != root:
            value[...] = call.x
        return x

    @overload
    def allgather(self, x: AnyArray, out: A, *, counts: Counts = None, timeout_s: float | None = None) -> A: ...

    @overload
    def allgather(
        self, x: Elements[S], out: None = None, *, counts: Counts = None, timeout_s: float | None = None
    ) -> npt.NDArray[S]: ...

    @overload
    def allgather(
        self, x: A, out: None = None, *, counts: Counts = None, timeout_s: float | None = None
    ) -> A: ...

    def allgather(self, x: Any, out: Any = None, *, counts: Counts = None, timeout_s: float | None = None) -> Any:
        """Gather `x` of all ranks on every rank: row r of the result is that of rank r.

        Collective. `x` has the same shape and dtype on every rank; the result has shape `(p, *x.shape)`. With
        `counts`, rank r sends counts[r] elements, in any shape, and the result, (sum(counts),), has them in rank
        order.

        Args:
            x: The array of this rank; may be its row or its part of `out`.
            out: Where to put the result, of any shape with that many elements.
            counts: Numbers of elements that the ranks send, (p,), the same on every rank; equal ones if None.
            timeout_s: See `allreduce`.

        Raises:
            ArrayError: `counts` does not fit the ranks or `x`, or `out` does not fit.
            UnsupportedError: No transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.allgather(np.array([comm.rank, 7])))[0]
        array([[0, 7], [1, 7]])
        """
        if counts is not None:
            return self._allgather_parts(x, out, counts, timeout_s)
        shape = None if out is None else getattr(out, "shape", "unknown")
        result = run_if_known(self, "allgather", (shape,), x, out, timeout_s)
        if result is not None:
            return result
        call = Call(self, "allgather", x, timeout_s=timeout_s)
        call.writes_to(out, (self.size, *call.x.shape), any_shape=True)
        call.contiguous()
        call.check_overlap(arrays.rows(call.target, self.size)[self.rank])
        call.run_and_cache(call.transport.allgather, shape)
        return call.result

    def _allgather_parts(self, x: object, out: object, counts: Sequence[int], timeout_s: float | None) -> Any:
        """`allgather` with counts. Collective."""
        call = Call(self, "allgather", x, timeout_s=timeout_s)
        counts = call.detail["counts"] = check_counts(
            "allgather", "counts", counts, self.size, call.x, own=self.rank
        )
        call.writes_to(out, (sum(counts),), any_shape=True)
        call.contiguous()
        send, whole = call.x.reshape(-1), call.target.reshape(-1)
        chunks = parts(whole, counts)
        call.check_overlap(chunks[self.rank])
        call.sends(send)
        call.x, call.payload = whole, send.nbytes  # inputs differ among ranks; the outputs are alike
        others = self._others

        def move(x: Array, target: Array) -> None:
            if not arrays.same_memory(send, chunks[self.rank]):
                chunks[self.rank][...] = send
            call.transport.exchange([(r, send) for r in others], [(r, chunks[r]) for r in others], tag=COLLECTIVE)

        call.run(move)
        return call.result

    @overload
    def reduce_scatter(
        self, x: AnyArray, out: A, *, op: Op = "sum", counts: Counts = None, timeout_s: float | None = None
    ) -> A: ...

    @overload
    def reduce_scatter(
        self,
        x: Elements[S],
        out: None = None,
        *,
        op: Op = "sum",
        counts: Counts = None,
        timeout_s: float | None = None,
    ) -> npt.NDArray[S]: ...

    @overload
    def reduce_scatter(
        self, x: A, out: None = None, *, op: Op = "sum", counts: Counts = None, timeout_s: float | None = None
    ) -> A: ...

    def reduce_scatter(
        self, x: Any, out: Any = None, *, op: Op = "sum", counts: Counts = None, timeout_s: float | None = None
    ) -> Any:
        """Reduce `x` over all ranks and keep this rank's chunk.

        Collective. `x` has shape (p * m, ...) on every rank; the result, (m, ...), is chunk `rank`. With `counts`
        the chunks may differ: `x` has sum(counts) elements, and the result, (counts[rank],), is chunk `rank`.

        Args:
            x: The array of this rank.
            out: Where to put the result; may be this rank's chunk of `x`. With `counts`, it may have any shape
                with that many elements.
            op: See `allreduce`.
            counts: Numbers of elements that the ranks keep, (p,), the same on every rank; equal ones if None.
            timeout_s: See `allreduce`.

        Raises:
            ArrayError: `x` does not split evenly or has not sum(counts) elements, `out` does not fit, or `op`
                is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.reduce_scatter(np.arange(4.0)))
        [array([0., 2.]), array([4., 6.])]
        """
        if counts is None:
            result = run_if_known(self, "reduce_scatter", (op,), x, out, timeout_s)
            if result is not None:
                return result
        call = Call(self, "reduce_scatter", x, op=op, timeout_s=timeout_s)
        call.check_reduction(op)
        if counts is None:
            shape = (even_chunk("reduce_scatter", call.x, self.size), *call.x.shape[1:])
            chunks = [math.prod(shape)] * self.size
        else:
            chunks = call.detail["counts"] = check_counts("reduce_scatter", "counts", counts, self.size, call.x)
            shape = (chunks[self.rank],)
        call.writes_to(out, shape, any_shape=counts is not None)
        call.contiguous()
        call.check_overlap(parts(call.x, chunks)[self.rank])
        transport = call.transport
        if counts is None:
            call.run_and_cache(lambda x, out: transport.reduce_scatter(as_real(x, op), as_real(out, op), op), op)
            return call.result
        real, target = as_real(call.x, op), as_real(call.target, op)
        width = 1 if real is call.x else 2
        call.run(lambda *_: transport.reduce_scatterv(real, target, [width * count for count in chunks], op))
        return call.result

    def scan(self, x: A, out: A | None = None, *, op: Op = "sum", timeout_s: float | None = None) -> A:
        """Reduce `x` of ranks 0 to `rank`, this one included.

        Collective. `x` has the same shape and dtype on every rank. `out` may be `x`. For `op` see `allreduce`;
        "avg" is the average of rank + 1 arrays.

        Raises:
            ArrayError: `out` does not fit `x`, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.scan(np.array([1, comm.rank])))
        [array([1, 0]), array([2, 1]), array([3, 3])]
        """
        result: A = self._prefix("scan", x, out, op, timeout_s)
        return result

    def exscan(self, x: A, out: A | None = None, *, op: Op = "sum", timeout_s: float | None = None) -> A | None:
        """Reduce `x` of the ranks before this one, 0 to rank - 1.

        Collective. `x` has the same shape and dtype on every rank. `out` may be `x`. For `op` see `allreduce`;
        "avg" is the average of `rank` arrays. Rank 0 has no ranks before it: it returns `out` unchanged, or
        None. Pass zeros as `out` to get zero on rank 0.

        Raises:
            ArrayError: `out` does not fit `x`, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.exscan(np.array(10 + comm.rank), out=np.array(0)))   # where mine begin
        [array(0), array(10), array(21)]
        """
        result: A | None = self._prefix("exscan", x, out, op, timeout_s)
        return result

    def _prefix(self, name: str, x: object, out: object, op: Op, timeout_s: float | None) -> Any:
        """The body of `scan` and `exscan`."""
        call, exclusive = Call(self, name, x, op=op, timeout_s=timeout_s), name == "exscan"
        call.reduces_to(out, op)
        call.contiguous()
        scan = call.transport.scan
        call.run(lambda x, target: scan(as_real(x, op), as_real(target, op), op, exclusive=exclusive))
        return out if exclusive and self.rank == 0 else call.result

    def alltoall(
        self,
        x: A,
        out: A | None = None,
        *,
        counts: Counts = None,
        out_counts: Counts = None,
        timeout_s: float | None = None,
    ) -> A:
        """Send chunk j of `x` to rank j; chunk i of the result comes from rank i.

        Collective. `x` has shape (p * m, ...) on every rank, and so has the result. With `counts` and
        `out_counts`, chunks may differ: counts[j] elements of `x` go to rank j, and the result,
        (sum(out_counts),), has out_counts[i] elements of rank i. Chunks are consecutive, in rank order.

        Args:
            x: The array of this rank.
            out: Where to put the result; may be `x` without counts. With counts, it may have any shape with that
                many elements.
            counts: Numbers of elements for each rank, (p,); equal ones if None, on all ranks.
            out_counts: Numbers of elements from each rank, (p,), given with `counts`: out_counts[i] of rank j is
                counts[j] of rank i.
            timeout_s: See `allreduce`.

        Raises:
            ArrayError: `x` does not split evenly, the counts do not fit the ranks or `x`, or `out` does not fit.
            CommMismatch: The counts of two ranks do not fit together.
            UnsupportedError: No transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> sizes = [[0, 1], [1, 2]]  # sizes[i][j]: elements from rank i to rank j
        >>> def body(comm):
        ...     counts, out_counts = sizes[comm.rank], [row[comm.rank] for row in sizes]
        ...     return comm.alltoall(np.full(sum(counts), comm.rank), counts=counts, out_counts=out_counts)
        >>> run_ranks(2, body)
        [array([1]), array([0, 1, 1])]
        """
        if counts is not None or out_counts is not None:
            parted: A = self._alltoall_parts(x, out, counts, out_counts, timeout_s)
            return parted
        repeated: A | None = run_if_known(self, "alltoall", (), x, out, timeout_s)
        if repeated is not None:
            return repeated
        call = Call(self, "alltoall", x, timeout_s=timeout_s)
        even_chunk("alltoall", call.x, self.size)
        call.writes_to(out, call.x.shape)
        call.in_place()
        call.contiguous()
        call.run_and_cache(call.transport.alltoall)
        result: A = call.result
        return result

    def _alltoall_parts(
        self, x: object, out: object, counts: Counts, out_counts: Counts, timeout_s: float | None
    ) -> Any:
        """`alltoall` with counts. Collective."""
        name = "alltoall"
        call = Call(self, name, x, timeout_s=timeout_s).unchecked()
        if counts is None or out_counts is None:
            missing = "counts" if counts is None else "out_counts"
            raise ArrayError(f"{name}: {missing} is None, expected both counts and out_counts, or neither")
        sends = check_counts(name, "counts", counts, self.size, call.x)
        recvs = check_counts(name, "out_counts", out_counts, self.size)
        call.detail["counts"] = GIVEN
        if sends[self.rank] != recvs[self.rank]:
            raise ArrayError(
                f"{name}: counts[{self.rank}] is {sends[self.rank]}, but out_counts[{self.rank}] is "
                f"{recvs[self.rank]}; both are this rank's own part"
            )
        call.writes_to(out, (sum(recvs),), any_shape=True)
        call.contiguous()
        if arrays.overlap(call.x, call.target):
            raise ArrayError(f"{name}: out overlaps x")

        def move(x: Array, target: Array) -> None:
            if self.check:
                compare_calls(self.host, call.signature())
                compare_counts(self.host, sends, recvs)
            call.transport.alltoall_parts(x, target, sends, recvs)

        call.run(move)
        return call.result

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank has called it.

        Collective.
        """
        if run_if_known(self, "barrier", (), EMPTY, None, timeout_s) is None:
            call = Call(self, "barrier", timeout_s=timeout_s)
            host = self.host
            call.run_and_cache(lambda *_: host.barrier(), fills="nothing")
