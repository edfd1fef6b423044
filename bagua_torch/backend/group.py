"""`BaguaGroup`: a process group of torch.distributed whose calls are those of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from bagua_comm import ArrayError, UnsupportedError
from bagua_comm.arrays import Array

from .base import GroupBase
from .tensors import (
    HOST,
    any_dtype,
    as_list,
    check_dtypes,
    check_filled,
    check_size,
    copying,
    dense,
    divided,
    elements,
    joined,
    one_of_each,
    only,
    pairs,
    reduction,
    root_of,
    row,
)
from .work import LaneWork


class BaguaGroup(GroupBase):
    """The ranks of a communicator as a process group.

    Collective. A collective call is submitted to the lane of the group, and runs there after the calls before
    it. So the calls of a group are in order, and those of several groups run at the same time. Errors are those
    of bagua_comm: they name the rank and the call, and no call waits longer than its time limit. What a call does
    not support, it refuses before it sends anything.

    Args:
        lane: The lane on whose communicator the calls run; the group owns it.
        parent: A communicator of the same ranks, of which `new_group` makes others.
        at_close: Called when the group has been shut down.
        options: See `BackendOptions`.
    """

    # Reductions -----------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> LaneWork:
        """Reduce each of `tensors` over all ranks, in place."""
        name = "allreduce"
        tensors = as_list(name, tensors)
        op, xs = reduction(name, opts, [dense(name, x) for x in tensors])
        if self._average.takes(op, xs):
            return self._submit(name, timeout or opts, tensors, self._average.allreduce, xs, op)
        if len(xs) == 1:
            return self._submit(name, timeout or opts, tensors, self.comm.allreduce, xs[0], xs[0], op=op)
        return self._submit(name, timeout or opts, tensors, self.comm.allreduce_many, xs, xs, op=op)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any, op: Any = None, timeout: timedelta | None = None) -> LaneWork:
        """Reduce a tensor over all ranks, in place on the root."""
        name = "reduce"
        tensor = only(name, tensors)
        op, (x,) = reduction(name, opts if op is None else op, [dense(name, tensor)])
        root = root_of(name, opts, self.size())
        fills = self.rank() == root
        check_filled(name, tensors)  # also where it is not filled, so that all ranks refuse the same call
        return self._submit(name, timeout or opts, tensors, self.comm.reduce, x, x, root=root, op=op, fills=fills)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> LaneWork:
        """Reduce a list of one tensor for each rank, and keep this rank's."""
        name = "reduce_scatter"
        parts = one_of_each(name, only(name, inputs), self.size(), dense)
        op, (out, *parts) = reduction(name, opts, [dense(name, only(name, outputs)), *parts])
        counts = [part.size for part in parts]
        check_size(name, out, counts[self.rank()])
        averaged = self._average.takes(op, [out]) and len(set(counts)) == 1

        def reduce_scatter(timeout_s: float | None) -> None:
            if averaged:
                self._average.reduce_scatter([(out, joined(parts))], op, timeout_s)
                return
            self.comm.reduce_scatter(joined(parts), out, op=op, counts=counts, timeout_s=timeout_s)

        return self._submit(name, opts, outputs, reduce_scatter)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> LaneWork:
        """Reduce a tensor of one chunk for each rank, and keep this rank's."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LaneWork:
        """`reduce_scatter_single` of each pair of tensors."""
        name = "reduce_scatter"
        work = []
        for output, tensor in pairs(name, outputs, inputs):
            op, (out, x) = reduction(name, opts, [dense(name, output), dense(name, tensor)])
            check_size(name, x, out.size * self.size())
            work.append((out, x))
        if self._average.takes(op, [x for _, x in work]):
            return self._submit(name, opts, outputs, self._average.reduce_scatter, work, op)

        def reduce_scatter(timeout_s: float | None) -> None:
            for out, x in work:
                counts = None if out.ndim == x.ndim == 1 else [out.size] * self.size()
                self.comm.reduce_scatter(x, out, op=op, counts=counts, timeout_s=timeout_s)

        return self._submit(name, opts, outputs, reduce_scatter)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Collectives that move elements -----------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any, timeout: timedelta | None = None) -> LaneWork:
        """Copy `tensors` of the root to all ranks."""
        name = "broadcast"
        tensors, root = as_list(name, tensors), root_of(name, opts, self.size())
        xs, fills, limit = [any_dtype(name, x) for x in tensors], self.rank() != root, timeout or opts
        if len(xs) == 1:
            return self._submit(name, limit, tensors, self.comm.broadcast, xs[0], root=root, fills=fills)
        return self._submit(name, limit, tensors, self.comm.broadcast_many, xs, root=root, fills=fills)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LaneWork:
        """Gather the tensor of each rank, in a list."""
        return self._gather_lists([only("all_gather", outputs)], [only("all_gather", inputs)], opts, outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LaneWork:
        """Gather several tensors of each rank: tensor i of rank r in outputs[r][i]."""
        inputs = as_list("all_gather_coalesced", inputs)
        by_tensor = [[per_rank[i] for per_rank in outputs] for i in range(len(inputs))]
        return self._gather_lists(by_tensor, inputs, opts, outputs)

    def _gather_lists(self, lists: Any, inputs: Any, opts: Any, outputs: Any) -> LaneWork:
        name = "all_gather"
        gathers = []
        for outs, tensor in zip(lists, inputs, strict=True):
            x, targets = any_dtype(name, tensor), one_of_each(name, outs, self.size(), any_dtype)
            check_dtypes(name, x, *targets)
            check_size(name, x, targets[self.rank()].size)
            gathers.append((x, targets, [target.size for target in targets]))

        def all_gather(timeout_s: float | None) -> None:
            for x, targets, counts in gathers:
                buffer = row(sum(counts), x)
                if len(set(counts)) == 1:
                    self.comm.allgather(x, buffer, timeout_s=timeout_s)
                else:
                    self.comm.allgatherv(x, buffer, counts, timeout_s=timeout_s)
                divided(buffer, targets)

        return self._submit(name, opts, outputs, all_gather)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> LaneWork:
        """Gather the tensor of each rank, in one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LaneWork:
        """`all_gather_single` of each pair of tensors."""
        name = "all_gather"
        work = []
        for output, tensor in pairs(name, outputs, inputs):
            out, x = any_dtype(name, output), any_dtype(name, tensor)
            check_dtypes(name, out, x)
            check_size(name, out, x.size * self.size())
            work.append((out, x))

        def all_gather(timeout_s: float | None) -> None:
            for out, x in work:
                self.comm.allgather(x, out, timeout_s=timeout_s)

        return self._submit(name, opts, outputs, all_gather)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> LaneWork:
        """Gather the tensor of each rank on the root, in a list."""
        name = "gather"
        x, root = any_dtype(name, only(name, inputs)), root_of(name, opts, self.size())
        targets = []
        if self.rank() == root:
            targets = one_of_each(name, only(name, outputs), self.size(), any_dtype)
            check_dtypes(name, x, *targets)
            check_size(name, x, targets[root].size)
        counts = [target.size for target in targets]

        def gather(timeout_s: float | None) -> None:
            buffer = row(sum(counts), x) if targets else None
            self.comm.gatherv(x, buffer, counts or None, root=root, timeout_s=timeout_s)
            if buffer is not None:
                divided(buffer, targets)

        return self._submit(name, opts, outputs or inputs, gather, fills=bool(targets))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> LaneWork:
        """Send one tensor of a list of the root to each rank."""
        name = "scatter"
        out, root = any_dtype(name, only(name, outputs)), root_of(name, opts, self.size())
        parts = []
        if self.rank() == root:
            parts = one_of_each(name, only(name, inputs), self.size(), any_dtype)
            check_dtypes(name, out, *parts)
            check_size(name, out, parts[root].size)
        counts = [part.size for part in parts] or None

        def scatter(timeout_s: float | None) -> None:
            buffer = joined(parts) if parts else None
            self.comm.scatterv(buffer, counts, out, root=root, timeout_s=timeout_s)

        return self._submit(name, opts, outputs, scatter)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> LaneWork:
        """Send rows of a tensor to each rank; without numbers of rows, equal ones."""
        name = "all_to_all"
        out, x = any_dtype(name, output), any_dtype(name, tensor)
        check_dtypes(name, out, x)
        sends = elements(name, "input_split_sizes", x, input_splits, self.size())
        recvs = elements(name, "output_split_sizes", out, output_splits, self.size())
        return self._all_to_all([x], sends, [out], recvs, opts, output, bool(input_splits or output_splits))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> LaneWork:
        """Send one tensor of a list to each rank."""
        name = "all_to_all"
        xs = one_of_each(name, inputs, self.size(), any_dtype)
        outs = one_of_each(name, outputs, self.size(), any_dtype)
        check_dtypes(name, *xs, *outs)
        sends, recvs = [x.size for x in xs], [out.size for out in outs]
        return self._all_to_all(xs, sends, outs, recvs, opts, outputs, True)

    def _all_to_all(
        self,
        xs: Sequence[Array],
        sends: list[int],
        outs: Sequence[Array],
        recvs: list[int],
        opts: Any,
        outputs: Any,
        uneven: bool,
    ) -> LaneWork:
        if sends[self.rank()] != recvs[self.rank()]:
            raise ArrayError(
                f"all_to_all: this rank sends {sends[self.rank()]} elements to itself, but expects "
                f"{recvs[self.rank()]}"
            )

        def all_to_all(timeout_s: float | None) -> None:
            x, buffer = joined(xs), row(sum(recvs), xs[0])
            if uneven:
                self.comm.alltoallv(x, sends, buffer, recvs, timeout_s=timeout_s)
            else:
                self.comm.alltoall(x, buffer, timeout_s=timeout_s)
            divided(buffer, outs)

        return self._submit("all_to_all", opts, outputs, all_to_all)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> LaneWork:
        """Wait until all ranks have called it."""
        return self._submit("barrier", timeout or opts, [], self.comm.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it, no longer than `timeout`; the error names the others."""
        self.barrier(timeout=timeout).wait()

    # Messages between two ranks ---------------------------------------------------------------------------

    def send(self, tensors: Any, peer: int, tag: int) -> LaneWork:
        """Send a tensor to another rank."""
        tensor = only("send", tensors)
        x = np.ascontiguousarray(any_dtype("send", tensor.detach().cpu()))
        return self._message("send", peer, tag, x, tensors)

    def recv(self, tensors: Any, peer: int, tag: int) -> LaneWork:
        """Receive a tensor from another rank."""
        tensor = only("recv", tensors)
        x = any_dtype("recv", tensor)
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return self._message("recv", peer, tag, x, tensors)
        buffer = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        into = any_dtype("recv", buffer)
        return self._message("recv", peer, tag, into, tensors, copying(tensor.detach(), buffer))

    def recv_anysource(self, tensors: Any, tag: int) -> LaneWork:
        """Refuse: name the rank to receive from."""
        raise UnsupportedError(
            "recv: the backend bagua receives from one rank; pass src=, the rank of the sender"
        )

    def _message(
        self,
        name: str,
        peer: int,
        tag: int,
        x: Array,
        tensors: Any,
        then: Callable[[], object] | None = None,
    ) -> LaneWork:
        self._check_open(name)
        future = self._messages.submit(name, peer, tag, x, then)
        source, limit_s = (
            (peer if name == "recv" else None),
            (self.comm.timeout_s if peer == self.rank() else None),
        )
        return LaneWork(name, future, tensors, HOST, self._callbacks, source, limit_s)


# torch.compile leaves the calls as they are: they need the memory of tensors, which it lacks as it traces.
for _name in [name for name, value in vars(BaguaGroup).items() if callable(value) and not name.startswith("__")]:
    setattr(BaguaGroup, _name, torch.compiler.disable(getattr(BaguaGroup, _name)))  # type: ignore[no-untyped-call]
