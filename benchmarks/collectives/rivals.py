"""The competitors of our collectives: mpi4py's calls, PyTorch's gloo, and two textbook algorithms.

The textbook algorithms are the alternatives to those that transports/mpi uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bagua_comm import Communicator
from bagua_comm.arrays import INTEGERS, UFUNCS, Array

from .cases import Case, Setting

RIVALS = ("mpi4py", "gloo", "ring", "halving_doubling")


class Rival:
    """Another implementation: one method for each operation that it has, with the same name.

    A method takes the setting, `x` and `out` of a call, and returns the result. In place, `x` is the part of
    `out` that our in-place call takes.
    """

    dtypes = INTEGERS | {"float32", "float64"}
    """The dtypes whose elements it can add up."""

    only_apart: frozenset[str] = frozenset()
    """Operations that it does not have in place."""

    def call(self, case: Case, s: Setting) -> Callable[[Setting, Array, Any], Any] | None:
        """The method for this case and setting; None if there is none."""
        if s.in_place and case.exact in self.only_apart:
            return None
        if case.reduces and s.dtype.name not in self.dtypes:
            return None
        method: Callable[[Setting, Array, Any], Any] | None = getattr(self, case.exact, None)
        return method


@contextlib.contextmanager
def gathered(names: Sequence[str], comm: Communicator) -> Iterator[dict[str, Rival]]:
    """The named rivals that can run here, ready to be called in the body of `with`.

    Collective. All but gloo need MPI, and halving_doubling a number of ranks that is a power of two.
    """
    with contextlib.ExitStack() as stack:
        rivals: dict[str, Rival] = {}
        if comm.transports[0].name == "mpi":
            from mpi4py import MPI  # not before `connect`, which tells Open MPI how to start

            world = MPI.COMM_WORLD.Dup()
            stack.callback(world.Free)
            rivals = {"mpi4py": Mpi4py(world), "ring": Ring(world)}
            if comm.size & (comm.size - 1) == 0:
                rivals["halving_doubling"] = HalvingDoubling(world)
        if "gloo" in names:
            from ..bench import torch_world

            stack.enter_context(torch_world.gloo(comm))
            rivals["gloo"] = Gloo()
        yield {name: rivals[name] for name in names if name in rivals}


def averaged(s: Setting, out: Array) -> Array:
    """The sum divided, if an average is asked for: neither MPI nor gloo has one for every dtype."""
    if s.op != "avg":
        return out
    divide = np.divide if s.is_float else np.floor_divide
    result: Array = divide(out, s.size, out=out)
    return result


# ---------------------------------------------------------------------------------------------------
# Over MPI
# ---------------------------------------------------------------------------------------------------


class OverMpi(Rival):
    """A rival that calls mpi4py's communicator `comm`."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def movable(self, s: Setting, x: Array) -> Array:
        """`x`, or its bytes if MPI does not know the dtype."""
        return x if s.dtype.name in self.dtypes else x.view(np.uint8)


class Mpi4py(OverMpi):
    """mpi4py's own calls."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(comm)
        self.in_place = MPI.IN_PLACE
        self._ops = {
            "sum": MPI.SUM,
            "avg": MPI.SUM,
            "prod": MPI.PROD,
            "min": MPI.MIN,
            "max": MPI.MAX,
            "band": MPI.BAND,
            "bor": MPI.BOR,
            "bxor": MPI.BXOR,
        }

    def allreduce(self, s: Setting, x: Array, out: Array) -> Array:
        """Allreduce."""
        self.comm.Allreduce(self.in_place if s.in_place else x, out, self._ops[s.op])
        return averaged(s, out)

    def reduce(self, s: Setting, x: Array, out: Array | None) -> Array | None:
        """Reduce."""
        if out is None or s.rank != s.root:
            self.comm.Reduce(x, None, self._ops[s.op], s.root)
            return None
        self.comm.Reduce(self.in_place if s.in_place else x, out, self._ops[s.op], s.root)
        return averaged(s, out)

    def reduce_scatter(self, s: Setting, x: Array, out: Array) -> Array:
        """Reduce_scatter_block, which in place leaves its result at the start of `x`."""
        if not s.in_place:
            self.comm.Reduce_scatter_block(x, out, self._ops[s.op])
            return averaged(s, out)
        self.comm.Reduce_scatter_block(self.in_place, x, self._ops[s.op])
        return averaged(s, x[: s.count])

    def allgather(self, s: Setting, x: Array, out: Array) -> Array:
        """Allgather."""
        self.comm.Allgather(self.in_place if s.in_place else self.movable(s, x), self.movable(s, out))
        return out

    def alltoall(self, s: Setting, x: Array, out: Array) -> Array:
        """Alltoall."""
        self.comm.Alltoall(self.in_place if s.in_place else self.movable(s, x), self.movable(s, out))
        return out

    def broadcast(self, s: Setting, x: Array, out: Array) -> Array:
        """Bcast."""
        self.comm.Bcast(self.movable(s, out), s.root)
        return out


class Ring(OverMpi):
    """Each rank exchanges with its neighbours only: p - 1 steps round the ring for each half of an allreduce."""

    def allreduce(self, s: Setting, x: Array, out: Array) -> Array:
        """The chunks are added up on their way round the ring, and then sent round once more."""
        if not s.in_place:
            out[...] = x
        chunks, p = np.array_split(out, s.size), s.size
        room = np.empty_like(chunks[0])  # none is longer
        for step in range(p - 1):
            mine = chunks[(s.rank - step - 1) % p]
            received = room[: mine.size]
            self._pass_on(s, chunks[(s.rank - step) % p], received)
            UFUNCS[s.op](mine, received, out=mine)
        self._go_round(s, chunks, (s.rank + 1) % p)
        return averaged(s, out)

    def allgather(self, s: Setting, x: Array, out: Array) -> Array:
        """Each rank's chunk is sent round the ring."""
        if not s.in_place:
            s.chunk(out)[...] = x
        self._go_round(s, np.split(self.movable(s, out), s.size), s.rank)
        return out

    def _go_round(self, s: Setting, chunks: list[Array], first: int) -> None:
        """Chunk `first` is complete on this rank, and the one before it on the left neighbour."""
        for step in range(s.size - 1):
            self._pass_on(s, chunks[(first - step) % s.size], chunks[(first - step - 1) % s.size])

    def _pass_on(self, s: Setting, sent: Array, received: Array) -> None:
        self.comm.Sendrecv(sent, (s.rank + 1) % s.size, 0, received, (s.rank - 1) % s.size, 0)


class HalvingDoubling(OverMpi):
    """Halve the part that is added up, each time with a partner at half the distance; then double it.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """

    def allreduce(self, s: Setting, x: Array, out: Array) -> Array:
        """For a number of ranks that is a power of two."""
        if not s.in_place:
            out[...] = x
        room = np.empty(-(-out.size // 2), out.dtype)
        start, stop, hop, spans = 0, out.size, s.size // 2, []
        while hop:
            middle = (start + stop) // 2
            low, high = out[start:middle], out[middle:stop]
            keep, give = (high, low) if s.rank & hop else (low, high)
            received = room[: keep.size]
            self.comm.Sendrecv(give, s.rank ^ hop, 0, received, s.rank ^ hop, 0)
            UFUNCS[s.op](keep, received, out=keep)
            spans.append((keep, give, hop))
            start, stop = (middle, stop) if s.rank & hop else (start, middle)
            hop //= 2
        for keep, give, hop in reversed(spans):
            self.comm.Sendrecv(keep, s.rank ^ hop, 0, give, s.rank ^ hop, 0)
        return averaged(s, out)


# ---------------------------------------------------------------------------------------------------
# Over gloo
# ---------------------------------------------------------------------------------------------------


class Gloo(Rival):
    """PyTorch's gloo, over the same ranks. Its allreduce is in place: out of place it includes a copy."""

    dtypes = frozenset({"float32", "float64"})
    only_apart = frozenset({"reduce_scatter", "allgather", "alltoall"})

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._tensor, self._dist = torch.from_numpy, dist

    def allreduce(self, s: Setting, x: Array, out: Array) -> Array:
        """all_reduce."""
        if not s.in_place:
            out[...] = x
        self._dist.all_reduce(self._tensor(out), self._op(s))
        return averaged(s, out)

    def reduce_scatter(self, s: Setting, x: Array, out: Array) -> Array:
        """reduce_scatter_single."""
        self._dist.reduce_scatter_single(self._tensor(out), self._tensor(x), self._op(s))
        return averaged(s, out)

    def allgather(self, s: Setting, x: Array, out: Array) -> Array:
        """all_gather_single."""
        self._dist.all_gather_single(self._tensor(out), self._tensor(x))
        return out

    def alltoall(self, s: Setting, x: Array, out: Array) -> Array:
        """all_to_all_single."""
        self._dist.all_to_all_single(self._tensor(out), self._tensor(x))
        return out

    def _op(self, s: Setting) -> Any:
        return getattr(self._dist.ReduceOp, "SUM" if s.op == "avg" else s.op.upper())
