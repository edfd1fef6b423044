"""Collectives on many small arrays, sent as one message for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from .. import arrays
from ..arrays import A, Array, Op, as_real
from ..errors import ArrayError, shown, shown_as
from ..transports.base import Transport
from .arguments import check_apart, check_mutable, check_writable, is_same, resolve_output
from .base import CommBase
from .call import Call


@shown_as("Communicator")
class CoalescedCollectives(CommBase):
    """Collectives on many small arrays, sent as one message for each dtype."""

    def allreduce_many(
        self,
        xs: Sequence[A],
        outs: Sequence[A | None] | None = None,
        *,
        op: Op = "sum",
        timeout_s: float | None = None,
    ) -> list[A]:
        """Reduce each of `xs` over all ranks, in one message for all arrays of a dtype.

        Collective. For many small arrays, which are copied to the message and back. The results have the bytes of
        an `allreduce` of each array. Only over NCCL, whose order of addition depends on the size, may sums of
        floats be rounded differently, though equally on all ranks.

        Args:
            xs: Arrays of the same shapes and dtypes, in the same order, on every rank. They may have several
                dtypes, and some may be host arrays and some device arrays.
            outs: Where to put the results, in the order of `xs`; may be `xs`.
            op: See `allreduce`.
            timeout_s: See `allreduce`.

        Raises:
            ArrayError: The numbers of `outs` and `xs` differ, an output does not fit or overlaps an array other
                than its own input, or `op` is unknown.
            UnsupportedError: No such reduction for a dtype, or no transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.allreduce_many([np.ones(2), np.array(comm.rank)]))[0]
        [array([2., 2.]), array(1)]
        """
        name = "allreduce_many"
        _check_list(name, xs)
        sends = [Call(self, name, x, f"xs[{i}]", op=op, timeout_s=timeout_s) for i, x in enumerate(xs)]
        for send in sends:
            send.check_reduction(op)
        wanted = list(outs) if outs is not None else [None] * len(sends)
        if len(wanted) != len(sends):
            raise ArrayError(f"{name}: there are {len(wanted)} outs, expected {len(sends)}, one for each of xs")
        for i, (out, send) in enumerate(zip(wanted, sends, strict=True)):
            send.output = resolve_output(name, f"outs[{i}]", out, send.x.shape, send.x)
        written = [send.output.value for send in sends]
        read = [send.x for send, out in zip(sends, written, strict=True) if not is_same(send.x, out)]
        check_apart(name, written, read)
        for members in _group(sends):
            _run_as_one(
                [sends[i] for i in members],
                lambda transport, x: transport.allreduce(as_real(x, op), as_real(x, op), op),
                [sends[i].output.target for i in members],
            )
        return [send.result for send in sends]

    def broadcast_many(self, xs: Sequence[A], *, root: int, timeout_s: float | None = None) -> list[A]:
        """Copy each of root's `xs` to every other rank, in one message for all arrays of a dtype.

        Collective. For many small arrays, which are copied to the message and back. Returns `xs`. They have the
        same shapes and dtypes, in the same order, on every rank. They may have several dtypes, and some may be
        host arrays and some device arrays.

        Raises:
            ArrayError: `root` is not a rank, or an array cannot be written to or overlaps another one.
            UnsupportedError: No transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     return comm.broadcast_many([np.array(comm.rank), np.full(2, 0.5 * comm.rank)], root=1)
        >>> run_ranks(2, body)[0]
        [array(1), array([0.5, 0.5])]
        """
        name = "broadcast_many"
        self._check_peer(name, "root", root)
        _check_list(name, xs)
        sends = [Call(self, name, x, f"xs[{i}]", root=root, timeout_s=timeout_s) for i, x in enumerate(xs)]
        check = check_mutable if self.rank == root else check_writable
        for i, send in enumerate(sends):
            check(name, f"xs[{i}]", xs[i], send.x)
        values = [send.x for send in sends]
        check_apart(name, values, [])
        for members in _group(sends):
            _run_as_one(
                [sends[i] for i in members],
                lambda transport, x: transport.broadcast(x, root),
                [values[i] for i in members] if self.rank != root else [],
            )
        return list(xs)


def _check_list(call: str, xs: object) -> None:
    """Raise `ArrayError` if `xs` is no list, or a mapping, of which only the keys would be seen."""
    if not np.iterable(xs):
        raise ArrayError(f"{call}: xs is {shown(xs)}, expected a list of arrays")
    if isinstance(xs, Mapping):
        what = f"a {type(xs).__name__}, expected a list of arrays: pass list(xs.values())"
        raise ArrayError(f"{call}: xs is {what}")


def _group(calls: Sequence[Call]) -> list[list[int]]:
    """Return the indices of the calls whose arrays go in one message: of one library and dtype."""
    groups: dict[Hashable, list[int]] = {}
    for i, call in enumerate(calls):
        groups.setdefault((id(call.transport), arrays.library(call.x), call.x.dtype), []).append(i)
    return list(groups.values())


def _run_as_one(calls: Sequence[Call], move: Callable[[Transport, Array], None], outs: Sequence[Array]) -> None:
    """Run several calls as one: copy their arrays, of one dtype, into one array, and the result to `outs`."""
    call, xs = calls[0], [call.x for call in calls]
    comm, sizes = call.comm, [x.size for x in xs]

    def move_one(x: Array, _: Array) -> None:
        move(call.transport, x)
        for out, part in zip(outs, arrays.parts(x, sizes) if outs else (), strict=True):
            out[...] = part.reshape(out.shape)

    def copy_and_move() -> None:  # under the guard, since scratch memory is in use
        call.x = comm.scratch.take("many", (sum(sizes),), xs[0].dtype, like=xs[0])
        call.detail["shapes"] = [list(x.shape) for x in xs]
        for x, part in zip(xs, arrays.parts(call.x, sizes), strict=True):
            part.reshape(x.shape)[...] = x
        call.target = call.x
        call.run(move_one)

    comm.guard.run(call.name, call.signature, copy_and_move, call.timeout_s)
