"""Gather and scatter: the parts of an array of one rank."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

from .. import arrays
from ..arrays import A, AnyArray, Array, Counts, Elements, S, parts
from ..errors import ArrayError, shown_as
from ..transports.flow import COLLECTIVE
from .agreement import compare_calls, compare_counts
from .arguments import GIVEN, check_counts
from .base import CommBase
from .call import Call


@shown_as("Communicator")
class GatherScatter(CommBase):
    """Gather and scatter, with parts of equal or different sizes, which the root alone needs to know."""

    @overload
    def gather(
        self, x: AnyArray, out: A, *, root: int, counts: Counts = None, timeout_s: float | None = None
    ) -> A | None: ...

    @overload
    def gather(
        self,
        x: Elements[S],
        out: None = None,
        *,
        root: int,
        counts: Counts = None,
        timeout_s: float | None = None,
    ) -> npt.NDArray[S] | None: ...

    @overload
    def gather(
        self, x: A, out: A | None = None, *, root: int, counts: Counts = None, timeout_s: float | None = None
    ) -> A | None: ...

    def gather(
        self, x: Any, out: Any = None, *, root: int, counts: Counts = None, timeout_s: float | None = None
    ) -> Any:
        """Gather `x` of all ranks on `root`, where row r of the result is that of rank r; return None elsewhere.

        Collective. `x` has the same shape and dtype on every rank; the result has shape `(p, *x.shape)`. With
        `counts` on `root`, rank r sends counts[r] elements, in any shape, and the result, (sum(counts),), has
        them in rank order.

        Args:
            x: The array of this rank; may be its row or its part of `out`.
            out: Where to put the result, of any shape with that many elements; only `root` uses it.
            root: The rank that gets the result.
            counts: Numbers of elements that the ranks send, (p,), equal ones if None; only `root` uses it.
            timeout_s: See `allreduce`.

        Raises:
            ArrayError: `counts` does not fit the ranks or `x`, `out` does not fit, or `root` is not a rank.
            CommMismatch: A rank does not send as many elements as `root` expects.
            UnsupportedError: No transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.gather(np.full(comm.rank, comm.rank), counts=[0, 1, 2], root=0))[0]
        array([1, 2, 2])
        """
        call = Call(self, "gather", x, root=root, timeout_s=timeout_s).unchecked()
        self._check_peer("gather", "root", root)
        given, at_root = call.x, self.rank == root
        call.contiguous()
        sizes = [given.size] * self.size
        if at_root:
            if counts is not None:
                sizes = check_counts("gather", "counts", counts, self.size, given, own=root)
                call.detail["counts"] = GIVEN
            shape = (self.size, *given.shape) if counts is None else (sum(sizes),)
            call.writes_to(out, shape, any_shape=True)
            chunks = parts(call.target, sizes)
            call.check_overlap(chunks[root])

        def move(x: Array, target: Array) -> None:
            if self.check:
                self._compare(call, root, self._only(root, given.size), sizes if at_root else None)
            if not at_root:
                call.transport.exchange([(root, x)], [], tag=COLLECTIVE)
                return
            if not arrays.same_memory(x, chunks[root]):
                chunks[root][...] = x.reshape(-1)
            call.transport.exchange([], [(r, chunks[r]) for r in self._others], tag=COLLECTIVE)

        call.run(move)
        return call.result if at_root else None

    @overload
    def scatter(
        self, x: AnyArray | None, out: A, *, root: int, counts: Counts = None, timeout_s: float | None = None
    ) -> A: ...

    @overload
    def scatter(
        self,
        x: Elements[S],
        out: None = None,
        *,
        root: int,
        counts: Counts = None,
        timeout_s: float | None = None,
    ) -> npt.NDArray[S]: ...

    @overload
    def scatter(
        self, x: A, out: None = None, *, root: int, counts: Counts = None, timeout_s: float | None = None
    ) -> A: ...

    def scatter(
        self, x: Any, out: Any = None, *, root: int, counts: Counts = None, timeout_s: float | None = None
    ) -> Any:
        """Scatter the rows of `x` of `root`: the result is row `rank`.

        Collective. `x`, (p, ...), is None on ranks other than `root`, whose `out` has the shape and dtype to
        expect. With `counts` on `root`, rank r gets counts[r] elements: the parts are consecutive in `x`, in rank
        order, and `out` may have any shape with that many elements.

        Args:
            x: The array of `root`; other ranks do not use it.
            out: Where to put the result. On `root` it may be None, or this rank's row or part of `x`.
            root: The rank that sends.
            counts: Numbers of elements that the ranks get, (p,), equal ones if None; only `root` uses it.
            timeout_s: See `allreduce`.

        Raises:
            ArrayError: `x` does not have p rows or sum(counts) elements; `counts` does not fit the ranks; `x` or
                `out` is missing, or `out` does not fit; `root` is not a rank.
            CommMismatch: A rank does not expect as many elements as `root` sends.
            UnsupportedError: No transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     x, counts = (np.arange(3), [1, 2]) if comm.rank == 0 else (None, None)
        ...     return comm.scatter(x, np.empty(1 + comm.rank, int), root=0, counts=counts)
        >>> run_ranks(2, body)
        [array([0]), array([1, 2])]
        """
        name = "scatter"
        self._check_peer(name, "root", root)
        at_root = self.rank == root
        if not at_root and out is None:
            raise ArrayError(f"{name}: out is None; ranks other than root must give it")
        if at_root and x is None:
            raise ArrayError(f"{name}: x is None; root must give it")
        array, argument = (x, "x") if at_root else (out, "out")
        call = Call(self, name, array, argument, root=root, timeout_s=timeout_s).unchecked()
        given = call.x
        if not at_root:
            call.writes_to(out, given.shape)
        elif counts is None:
            if given.ndim == 0 or given.shape[0] != self.size:
                even = f"x.reshape({self.size}, -1), or " if given.size % self.size == 0 else ""
                cure = f"pass {even}counts= for parts that differ"
                raise ArrayError(f"{name}: x has shape {given.shape}, expected ({self.size}, ...); {cure}")
            sizes = [given.size // self.size] * self.size
            call.writes_to(out, given.shape[1:])
        else:
            sizes = check_counts(name, "counts", counts, self.size, given)
            call.detail["counts"] = GIVEN
            call.writes_to(out, (sizes[root],), any_shape=True)
        if at_root:
            call.contiguous()
            chunks, mine = parts(call.x, sizes), call.target.reshape(-1)
            call.check_overlap(chunks[root])
        call.sends(call.x if at_root else None)
        call.x = call.target  # ranks compare and count their parts

        def move(x: Array, target: Array) -> None:
            if self.check:
                self._compare(call, root, sizes if at_root else None, self._only(root, target.size))
            if not at_root:
                call.transport.exchange([], [(root, target)], tag=COLLECTIVE)
            else:
                if not arrays.same_memory(chunks[root], mine):
                    mine[...] = chunks[root]
                call.transport.exchange([(r, chunks[r]) for r in self._others], [], tag=COLLECTIVE)

        call.run(move)
        return call.result

    def _compare(self, call: Call, root: int, sends: list[int] | None, recvs: list[int] | None) -> None:
        """Compare a call: with counts, the sizes of its messages, else the shapes. Collective.

        `sends` and `recvs` are numbers of elements for and from each rank, (p,); None stands for zeros.
        """
        compare_calls(self.host, call.signature())
        by_counts = np.array(["counts" in call.detail], np.uint8)
        self.host.broadcast(by_counts, root)  # no other rank knows
        if by_counts[0]:
            nothing = [0] * self.size
            compare_counts(self.host, sends or nothing, recvs or nothing)
        else:
            call.compare()

    def _only(self, rank: int, count: int) -> list[int]:
        """Return `count` for one rank and zero for the others, (p,)."""
        return [count if r == rank else 0 for r in range(self.size)]
