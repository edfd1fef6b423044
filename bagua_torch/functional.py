"""Differentiable collectives on tensors, for use inside a model.

Each of them is linear. Its gradient is that of the sum of all ranks' losses, which `backward()` on all ranks
computes together: the contribution of a rank's tensor to the loss of another rank flows back to it. Divide by the
number of ranks to get the mean of the losses.

A backward pass communicates as well, so the ranks must agree on it:

* All ranks call these functions in the same order, with tensors that either all need a gradient or all do not.
* All ranks run backward through the same calls: each uses the result in its loss, even an empty one
  (`result.sum()` is enough). Autograd runs the calls of equal graphs in the same order, the last one first.
* Calls are numbered, and a backward call has the number of its forward call. On the host, ranks compare these
  numbers in each call, and raise `CommMismatch`. On a device the host would have to wait for the comparison, so
  it is made only with `connect(check=True)`.
* `backward()` runs on the calling thread, and for CUDA tensors on a thread of autograd while the caller waits. So
  `comm` is in use until `backward()` returns; concurrent calls need another communicator (`dup`, `lane`), as
  `DistributedDataParallel` has.

Second derivatives use the same calls: `create_graph=True` works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bagua_comm import ArrayError, Codec, Communicator, UnsupportedError
from bagua_comm.arrays import Array, LinearOp, empty
from bagua_comm.averages.coded import next_draws
from bagua_comm.codecs.base import check_codec_argument
from bagua_comm.comm.agreement import compare_calls
from bagua_comm.comm.arguments import EMPTY

from .arrays import as_array, dtype_name, torch_stream


def allreduce(comm: Communicator, x: torch.Tensor, *, op: LinearOp = "sum") -> torch.Tensor:
    """Add or average `x` over all ranks; every rank gets the same bytes.

    Collective. `x` has the same shape and dtype on every rank. The gradient of `x` is the sum of all ranks'
    gradients of the result; with "avg", their average.

    Args:
        comm: The ranks.
        x: The tensor of this rank.
        op: "sum" or "avg".

    Raises:
        ArrayError: `op` is something else.
        CommMismatch: The ranks' calls do not fit together.
        UnsupportedError: `x` is not a tensor that `comm` carries.

    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     x = torch.tensor([1.0, 2.0], requires_grad=True)
    ...     (allreduce(comm, x) * (comm.rank + 1)).sum().backward()
    ...     return x.grad
    >>> run_ranks(2, body)
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    _check_op("allreduce", op)
    return _call(x, _allreduce(comm, _number(comm, "allreduce"), op))


def allgather(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Collect `x` of every rank: row r of the result, `(p, *x.shape)`, is rank r's.

    Collective. `x` has the same shape and dtype on every rank. The gradient of `x` is the sum over all ranks of
    their gradients of row `rank`.

    Raises:
        CommMismatch: The ranks' calls do not fit together.
        UnsupportedError: `x` is not a tensor that `comm` carries.
    """
    return _call(x, _allgather(comm, _number(comm, "allgather")))


def reduce_scatter(comm: Communicator, x: torch.Tensor, *, op: LinearOp = "sum") -> torch.Tensor:
    """Add or average `x`, (p * m, ...), over all ranks and keep this rank's chunk, (m, ...).

    Collective. `x` has the same shape and dtype on every rank. The gradient of chunk r of `x` is rank r's
    gradient of the result; with "avg", divided by the number of ranks.

    Args:
        comm: The ranks.
        x: The tensor of this rank.
        op: "sum" or "avg".

    Raises:
        ArrayError: `x` does not split evenly, or `op` is something else.
        CommMismatch: The ranks' calls do not fit together.
        UnsupportedError: `x` is not a tensor that `comm` carries.
    """
    _check_op("reduce_scatter", op)
    m = _even_chunk("reduce_scatter", x, comm.size)
    rows = x.reshape(comm.size, m, *x.shape[1:])
    return _call(rows, _reduce_scatter(comm, _number(comm, "reduce_scatter"), op))


def alltoall(
    comm: Communicator,
    x: torch.Tensor,
    *,
    counts: Sequence[int] | None = None,
    out_counts: Sequence[int] | None = None,
    codec: Codec | None = None,
) -> torch.Tensor:
    """Send chunk j of `x`, (p * m, ...), to rank j; chunk i of the result, of the same shape, is from rank i.

    Collective. With `counts`, counts[j] rows of `x` go to rank j, and out_counts[i] rows of the result come from
    rank i. Rows are along the first dimension, in the order of the ranks. They have the same shape and dtype on
    every rank. The gradient of a row is the gradient of the received row: the same exchange, of gradients.

    Args:
        comm: The ranks.
        x: The tensor of this rank, (p * m, ...) or (sum(counts), ...).
        counts: The numbers of rows sent to each rank, (p,); m for each if None, on all ranks.
        out_counts: The numbers of rows received from each rank, (p,); if it is None and `counts` is not, ranks
            exchange them in one small message.
        codec: The encoding of each row, also of rows to this rank itself. The gradient ignores it and is sent
            exactly (a straight-through estimator).

    Raises:
        ArrayError: `x` does not split evenly, or the counts do not fit the ranks or `x`.
        CommMismatch: The counts of two ranks, or the ranks' calls, do not fit together.
        UnsupportedError: `x` is not a tensor that `comm` carries or the codec accepts.

    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     return alltoall(comm, torch.full((3, 1), comm.rank), counts=[1, 2])
    >>> [rows.flatten().tolist() for rows in run_ranks(2, body)]
    [[0, 1], [0, 0, 1, 1]]
    """
    name = "alltoall"
    _check_tensor(name, x)
    if codec is not None:
        check_codec_argument(name, codec, dtype_name(x))
    if counts is None:
        if out_counts is not None:
            raise ArrayError(f"{name}: out_counts is given, but counts is None; give both, or counts alone")
        _even_chunk(name, x, comm.size)
        return _call(x, _alltoall(comm, _number(comm, name), codec=codec))
    rows = x.shape[0] if x.dim() else -1
    sends = _check_counts(name, "counts", counts, comm.size)
    if rows != sum(sends):
        raise ArrayError(
            f"{name}: x has shape {tuple(x.shape)}, expected ({sum(sends)}, ...), the sum of counts, as rows"
        )
    number = f"{_number(comm, name)} with counts"
    if out_counts is None:
        recvs: list[int] = comm.alltoall(np.array(sends, np.int64)).tolist()
    else:
        recvs = _check_counts(name, "out_counts", out_counts, comm.size)
    return _call(x, _alltoall(comm, number, sends, recvs, codec))


def broadcast(comm: Communicator, x: torch.Tensor, *, root: int) -> torch.Tensor:
    """Copy `x` of `root` to every rank, as a new tensor.

    Collective. `x` has the same shape and dtype on every rank; only root's values matter. The gradient of root's
    `x` is the sum of all ranks' gradients of the result; that of the others is zero.

    Raises:
        ArrayError: `root` is not a rank.
        CommMismatch: The ranks' calls do not fit together.
        UnsupportedError: `x` is not a tensor that `comm` carries.
    """
    if not isinstance(root, int) or not 0 <= root < comm.size:
        raise ArrayError(f"broadcast: root is {root!r}, expected a rank from 0 to {comm.size - 1}")
    return _call(x, _broadcast(comm, _number(comm, "broadcast"), root))


# ---------------------------------------------------------------------------------------------------
# Linear maps and their adjoints
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Map:
    """A linear map of all ranks' tensors; its adjoint maps gradients."""

    comm: Communicator
    name: str
    """The call that it makes."""
    number: str
    """Name and number of the user's call."""
    run: Callable[[torch.Tensor], torch.Tensor]
    """Map a contiguous tensor to a new one. Collective."""
    adjoint_as: Callable[[str], _Map]
    """Make the adjoint for a call of this name and number."""

    def adjoint(self) -> _Map:
        """The adjoint, as the backward of this call."""
        return self.adjoint_as(f"backward of {self.number}")


def _allreduce(comm: Communicator, number: str, op: LinearOp) -> _Map:
    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        comm.allreduce(as_array(x), out=as_array(out), op=op)
        return out

    return _Map(comm, "allreduce", number, run, lambda number: _allreduce(comm, number, op))


def _allgather(comm: Communicator, number: str, *, mean: bool = False) -> _Map:
    """From (...) to (p, ...); the result is divided by p if `mean`."""

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((comm.size, *x.shape))
        comm.allgather(as_array(x), out=as_array(out))
        return out.div_(comm.size) if mean else out

    op: LinearOp = "avg" if mean else "sum"
    return _Map(comm, "allgather", number, run, lambda number: _reduce_scatter(comm, number, op))


def _reduce_scatter(comm: Communicator, number: str, op: LinearOp) -> _Map:
    """From (p, ...) to (...)."""

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((1, *x.shape[1:]))
        comm.reduce_scatter(as_array(x), out=as_array(out), op=op)
        return out.squeeze(0)

    return _Map(comm, "reducescatter", number, run, lambda number: _allgather(comm, number, mean=op == "avg"))


def _alltoall(
    comm: Communicator,
    number: str,
    counts: list[int] | None = None,
    out_counts: list[int] | None = None,
    codec: Codec | None = None,
) -> _Map:
    def exchange(x: Array, out: Array, width: int) -> None:
        if counts is None or out_counts is None:
            comm.alltoall(x, out)
        else:
            sends, recvs = ([width * n for n in each] for each in (counts, out_counts))
            comm.alltoall(x, out, counts=sends, out_counts=recvs)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((len(x) if out_counts is None else sum(out_counts), *x.shape[1:]))
        width = math.prod(x.shape[1:])
        source, target = as_array(x), as_array(out)
        if codec is None:
            exchange(source, target, width)
            return out
        draws = next_draws(comm, codec.random_seed)
        wire = codec.encode(source.reshape(len(x), width), draws=draws)  # (rows, w)
        w = wire.shape[1]
        received = empty((len(out), w), wire.dtype, like=wire)
        exchange(wire, received, w)
        codec.decode(received, target.reshape(len(out), width))
        return out

    return _Map(comm, "alltoall", number, run, lambda number: _alltoall(comm, number, out_counts, counts))


def _broadcast(comm: Communicator, number: str, root: int) -> _Map:
    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        comm.broadcast(as_array(out), root=root)
        return out

    return _Map(comm, "broadcast", number, run, lambda number: _reduce(comm, number, root))


def _reduce(comm: Communicator, number: str, root: int) -> _Map:
    """The sum of all ranks on `root`, and zero elsewhere."""

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        comm.reduce(as_array(x), out=as_array(out), root=root)
        return out

    return _Map(comm, "reduce", number, run, lambda number: _broadcast(comm, number, root))


# ---------------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------------


class _Apply(torch.autograd.Function):
    """A linear map in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: _Map, tracked: bool) -> torch.Tensor:
        comm, ctx.collective = collective.comm, collective
        x = x.detach().resolve_conj().resolve_neg().contiguous()
        described = f"{collective.number} ({x.dtype}, {'with' if tracked else 'without'} a gradient)"

        def run() -> torch.Tensor:
            if comm.check:
                compare_calls(comm.host, described)
            elif x.device.type == "cpu":
                comm.host.agree_on_call(described, EMPTY)
            with torch_stream(x.device):
                return collective.run(x)

        return comm.guard.run(collective.name, lambda: described, run)  # compared for all messages of the call

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _call(gradient, ctx.collective.adjoint()), None, None


_apply: Any = torch.compiler.disable(_Apply.apply)  # type: ignore[no-untyped-call]


def _call(x: torch.Tensor, collective: _Map) -> torch.Tensor:
    _check_tensor(collective.number, x)
    tracked = torch.is_grad_enabled() and x.requires_grad
    result: torch.Tensor = _apply(x, collective, tracked)
    return result


def _number(comm: Communicator, name: str) -> str:
    """The name of a call with its number on this communicator, the same on all ranks."""
    return f"functional.{name} #{comm.next_id('functional')}"


def _check_tensor(call: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise UnsupportedError(f"{call}: x is a {type(x).__name__}, expected a tensor")
    if x.layout is not torch.strided:
        raise UnsupportedError(f"{call}: x has layout {x.layout}, expected a dense tensor")
    dtype_name(x)


def _check_op(call: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise ArrayError(f'{call}: op is {op!r}, expected "sum" or "avg", through which gradients flow')


def _even_chunk(call: str, x: torch.Tensor, size: int) -> int:
    _check_tensor(call, x)
    if x.dim() == 0 or x.shape[0] % size:
        raise ArrayError(
            f"{call}: x has shape {tuple(x.shape)}, expected a first dimension divisible by {size} ranks"
        )
    return x.shape[0] // size


def _check_counts(call: str, name: str, counts: Sequence[int], size: int) -> list[int]:
    found = [int(n) for n in counts]
    if len(found) != size or any(n < 0 for n in found):
        raise ArrayError(f"{call}: {name} is {found}, expected {size} numbers of rows")
    return found
