"""`BaguaGroup`: a process group of torch.distributed whose calls are those of a communicator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import numpy as np
import torch

from bagua_comm import ArrayError, arrays
from bagua_comm.arrays import Array, Op
from bagua_comm.comm.prepared import begin_if_known

from .arguments import Options, in_any_form
from .base import GroupBase
from .tensors import (
    HOST,
    Given,
    Lists,
    Tensors,
    any_dtype,
    apart,
    as_list,
    check_dtypes,
    check_root,
    check_size,
    copying,
    dense,
    divided,
    elements,
    filled,
    flat,
    joined,
    one_of_each,
    only,
    pairs,
    reduction,
    row,
    with_list,
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

    @in_any_form("tensors|tensor", "op", "timeout")
    def allreduce(self, tensors: Given, options: Options) -> LaneWork:
        """Reduce a tensor over all ranks, in place."""
        return self._allreduce("allreduce", [only("allreduce", tensors)], options)

    @in_any_form("tensors")
    def allreduce_coalesced(self, tensors: Given, options: Options) -> LaneWork:
        """Reduce each of `tensors` over all ranks, in place."""
        return self._allreduce("allreduce_coalesced", as_list("allreduce_coalesced", tensors), options)

    def _allreduce(self, name: str, tensors: list[torch.Tensor], options: Options) -> LaneWork:
        op, xs = reduction(name, options.op, [filled(name, x, dense) for x in tensors])
        averaged = self._average.takes(op, xs)
        if len(xs) == 1 and not averaged:
            begin = functools.partial(begin_if_known, self.comm, xs[0], op)
            return self._submit(name, options, tensors, self.comm.allreduce, xs[0], xs[0], begin=begin, op=op)

        def allreduce_many(timeout_s: float | None) -> None:
            once = apart(xs)
            if averaged:
                self._average.allreduce(once, op)
            else:
                self.comm.allreduce_many(once, once, op=op, timeout_s=timeout_s)

        return self._submit(name, options, tensors, allreduce_many)

    @in_any_form("tensors|tensor", "root", "op", "timeout")
    def reduce(self, tensors: Given, options: Options) -> LaneWork:
        """Reduce a tensor over all ranks, in place on the root."""
        name, root = "reduce", options.root
        tensor = only(name, tensors)
        # Also where it is not filled, so that all ranks refuse the same call.
        op, (x,) = reduction(name, options.op, [filled(name, tensor, dense)])
        check_root(name, root, self.size())
        return self._submit(name, options, [tensor], self.comm.reduce, x, x, root=root, op=op)

    @in_any_form("output_tensors|output", "input_tensors|input", "op", "timeout")
    def reduce_scatter(self, outputs: Given, inputs: Lists, options: Options) -> LaneWork:
        """Reduce a list of one tensor for each rank, and keep this rank's."""
        name = "reduce_scatter"
        output, tensors = with_list(name, outputs, inputs)
        parts = one_of_each(name, tensors, self.size(), dense)
        op, (out, *parts) = reduction(name, options.op, [filled(name, output, dense), *parts])
        counts = [part.size for part in parts]
        check_size(name, out, counts[self.rank()])

        def reduce_scatter(timeout_s: float | None) -> None:
            if len(set(counts)) == 1:  # on all ranks, or the call is wrong
                self._reduce_scatter(joined(parts), out, op, timeout_s)
            else:
                self.comm.reduce_scatter(joined(parts), out, op=op, counts=counts, timeout_s=timeout_s)

        return self._submit(name, options, [output], reduce_scatter)

    @in_any_form("outputTensor", "inputTensor")
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Options) -> LaneWork:
        """Reduce a tensor of one chunk for each rank, and keep this rank's."""
        return self._reduce_scatter_each([output], [tensor], options)

    @in_any_form("outputs", "inputs")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Options) -> LaneWork:
        """`reduce_scatter_single` of each pair of tensors."""
        return self._reduce_scatter_each(outputs, inputs, options)

    def _reduce_scatter_each(self, outputs: Tensors, inputs: Tensors, options: Options) -> LaneWork:
        name = "reduce_scatter"
        work = []
        for output, tensor in pairs(name, outputs, inputs):
            op, (out, x) = reduction(name, options.op, [filled(name, output, dense), dense(name, tensor)])
            check_size(name, x, out.size * self.size())
            work.append((x, out, op))

        def reduce_scatter(timeout_s: float | None) -> None:
            for x, out, op in work:
                self._reduce_scatter(x, out, op, timeout_s)

        return self._submit(name, options, outputs, reduce_scatter)

    def _reduce_scatter(self, x: Array, out: Array, op: Op, timeout_s: float | None) -> None:
        """Reduce the elements of `x` over all ranks, whatever its shape on each, and keep a chunk in `out`."""
        target = flat(out)
        if self._average.takes(op, [x]):
            self._average.reduce_scatter(flat(x), target, op)
        else:
            self.comm.reduce_scatter(flat(x), target, op=op, timeout_s=timeout_s)
        if not arrays.is_contiguous(out):
            out[...] = target.reshape(out.shape)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Collectives that move elements -----------------------------------------------------------------------

    @in_any_form("tensors|tensor", "root", "timeout")
    def broadcast(self, tensors: Given, options: Options) -> LaneWork:
        """Copy a tensor of the root to all ranks."""
        name, root = "broadcast", options.root
        check_root(name, root, self.size())
        tensor = only(name, tensors)
        x = (any_dtype if self.rank() == root else filled)(name, tensor)
        return self._submit(name, options, [tensor], self.comm.broadcast, x, root=root)

    @in_any_form("output_tensors", "input_tensors|input_tensor", "timeout")
    def allgather(self, outputs: Lists, inputs: Given, options: Options) -> LaneWork:
        """Gather the tensor of each rank, in a list."""
        tensor, outs = with_list("all_gather", inputs, outputs)
        return self._gather_lists([outs], [tensor], options, outs)

    @in_any_form("output_lists", "input_list")
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Given, options: Options) -> LaneWork:
        """Gather several tensors of each rank: tensor i of rank r in outputs[r][i]."""
        name, inputs = "all_gather_coalesced", as_list("all_gather_coalesced", inputs)
        by_rank = [[out for out, _ in pairs(name, per_rank, inputs)] for per_rank in outputs]
        by_tensor = [[outs[i] for outs in by_rank] for i in range(len(inputs))]
        return self._gather_lists(by_tensor, inputs, options, outputs)

    def _gather_lists(
        self, lists: Iterable[Tensors], inputs: Tensors, options: Options, outputs: Sequence[object]
    ) -> LaneWork:
        name = "all_gather"
        gathers = []
        for outs, tensor in zip(lists, inputs, strict=True):
            x, targets = any_dtype(name, tensor), one_of_each(name, outs, self.size(), filled)
            check_dtypes(name, x, *targets)
            check_size(name, x, targets[self.rank()].size)
            gathers.append((x, targets, [target.size for target in targets]))

        def all_gather(timeout_s: float | None) -> None:
            for x, targets, counts in gathers:
                buffer = row(sum(counts), x)
                even = len(set(counts)) == 1  # on all ranks, or the call is wrong
                self.comm.allgather(x, buffer, counts=None if even else counts, timeout_s=timeout_s)
                divided(buffer, targets)

        return self._submit(name, options, outputs, all_gather)

    @in_any_form("output", "input")
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Options) -> LaneWork:
        """Gather the tensor of each rank, in one tensor."""
        return self._gather_each([output], [tensor], options)

    @in_any_form("outputs", "inputs")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Options) -> LaneWork:
        """`all_gather_single` of each pair of tensors."""
        return self._gather_each(outputs, inputs, options)

    def _gather_each(self, outputs: Tensors, inputs: Tensors, options: Options) -> LaneWork:
        name = "all_gather"
        work = []
        for output, tensor in pairs(name, outputs, inputs):
            out, x = filled(name, output), any_dtype(name, tensor)
            check_dtypes(name, out, x)
            check_size(name, out, x.size * self.size())
            work.append((out, x))

        def all_gather(timeout_s: float | None) -> None:
            for out, x in work:
                self.comm.allgather(x, out, timeout_s=timeout_s)

        return self._submit(name, options, outputs, all_gather)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @in_any_form("output_tensors", "input_tensors|input_tensor", "root", "timeout")
    def gather(self, outputs: Lists, inputs: Given, options: Options) -> LaneWork:
        """Gather the tensor of each rank on the root, in a list."""
        name, root, targets = "gather", options.root, []
        check_root(name, root, self.size())
        tensor, outs = with_list(name, inputs, outputs if self.rank() == root else [])
        if self.rank() == root:
            targets = one_of_each(name, outs, self.size(), filled)
        x = any_dtype(name, tensor)
        check_dtypes(name, x, *targets)
        counts = [target.size for target in targets]
        if targets:
            check_size(name, x, counts[root])

        def gather(timeout_s: float | None) -> None:
            buffer = row(sum(counts), x) if targets else None
            self.comm.gather(x, buffer, root=root, counts=counts, timeout_s=timeout_s)
            if buffer is not None:
                divided(buffer, targets)

        return self._submit(name, options, outs, gather, reads=[tensor])

    @in_any_form("output_tensors|output_tensor", "input_tensors", "root", "timeout")
    def scatter(self, outputs: Given, inputs: Lists, options: Options) -> LaneWork:
        """Send one tensor of a list of the root to each rank."""
        name, root, parts = "scatter", options.root, []
        check_root(name, root, self.size())
        output, tensors = with_list(name, outputs, inputs if self.rank() == root else [])
        out = filled(name, output)
        if self.rank() == root:
            parts = one_of_each(name, tensors, self.size(), any_dtype)
            check_dtypes(name, out, *parts)
            check_size(name, out, parts[root].size)
        counts = [part.size for part in parts]

        def scatter(timeout_s: float | None) -> None:
            buffer = joined(parts) if parts else None
            self.comm.scatter(buffer, out, root=root, counts=counts, timeout_s=timeout_s)

        return self._submit(name, options, [output], scatter)

    @in_any_form("output", "input", "output_split_sizes", "input_split_sizes", "timeout")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        options: Options,
    ) -> LaneWork:
        """Send rows of a tensor to each rank; without numbers of rows, equal ones."""
        name = "all_to_all"
        out, x = filled(name, output), any_dtype(name, tensor)
        check_dtypes(name, out, x)
        sends = elements(name, "input_split_sizes", x, input_splits, self.size())
        recvs = elements(name, "output_split_sizes", out, output_splits, self.size())
        return self._all_to_all([x], sends, [out], recvs, options, [output])

    alltoall_base = all_to_all_single

    @in_any_form("output_tensors", "input_tensors")
    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Options) -> LaneWork:
        """Send one tensor of a list to each rank."""
        name = "all_to_all"
        xs = one_of_each(name, inputs, self.size(), any_dtype)
        outs = one_of_each(name, outputs, self.size(), filled)
        check_dtypes(name, *xs, *outs)
        return self._all_to_all(xs, [x.size for x in xs], outs, [out.size for out in outs], options, outputs)

    def _all_to_all(
        self,
        xs: Sequence[Array],
        sends: list[int],
        outs: Sequence[Array],
        recvs: list[int],
        options: Options,
        outputs: Sequence[object],
    ) -> LaneWork:
        """Send `sends[r]` elements to rank r: by the same call, whether or not a rank's numbers are equal."""
        if sends[self.rank()] != recvs[self.rank()]:
            raise ArrayError(
                f"all_to_all: this rank sends {sends[self.rank()]} elements to itself, but expects "
                f"{recvs[self.rank()]}"
            )

        def all_to_all(timeout_s: float | None) -> None:
            if len(xs) == len(outs) == 1 and not arrays.overlap(xs[0], outs[0]):
                self.comm.alltoall(xs[0], outs[0], counts=sends, out_counts=recvs, timeout_s=timeout_s)
                return
            x, buffer = joined(xs), row(sum(recvs), xs[0])
            self.comm.alltoall(x, buffer, counts=sends, out_counts=recvs, timeout_s=timeout_s)
            divided(buffer, outs)

        return self._submit("all_to_all", options, outputs, all_to_all)

    @in_any_form("timeout")
    def barrier(self, options: Options) -> LaneWork:
        """Wait until all ranks have called it."""
        return self._submit("barrier", options, [], self.comm.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it, no longer than `timeout`; the error names the others."""
        self.barrier(timeout=timeout).wait()

    # Messages between two ranks ---------------------------------------------------------------------------

    def send(self, tensors: Given, dstRank: int, tag: int) -> LaneWork:  # noqa: N803 - PyTorch's name
        """Send a tensor to another rank."""
        tensor = only("send", tensors)
        x = np.ascontiguousarray(any_dtype("send", tensor.detach().cpu()))
        return self._message("send", [dstRank], tag, x, tensors)

    def recv(self, tensors: Given, srcRank: int, tag: int) -> LaneWork:  # noqa: N803 - PyTorch's name
        """Receive a tensor from another rank."""
        return self._recv(tensors, [srcRank], tag)

    def recv_anysource(self, tensors: Given, tag: int) -> LaneWork:
        """Receive a tensor from the first rank that sends one: the `source_rank` of the work, once it is done."""
        return self._recv(tensors, [rank for rank in range(self.size()) if rank != self.rank()], tag)

    def _recv(self, tensors: Given, peers: Sequence[int], tag: int) -> LaneWork:
        tensor = only("recv", tensors)
        x = any_dtype("recv", tensor)
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return self._message("recv", peers, tag, x, tensors)
        buffer = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        into = any_dtype("recv", buffer)
        return self._message("recv", peers, tag, into, tensors, copying(tensor.detach(), buffer))

    def _message(
        self,
        name: str,
        peers: Sequence[int],
        tag: int,
        x: Array,
        tensors: Given,
        then: Callable[[], object] | None = None,
    ) -> LaneWork:
        self._check_open(name)
        future, receive = self._messages.submit(name, peers, tag, x, then)
        return LaneWork(name, future, tensors, HOST, self._callbacks, receive if name == "recv" else None)


# torch.compile leaves the calls as they are: they need the memory of tensors, which it lacks as it traces.
for _name in [name for name, value in vars(BaguaGroup).items() if callable(value) and not name.startswith("__")]:
    setattr(BaguaGroup, _name, torch.compiler.disable(getattr(BaguaGroup, _name)))  # type: ignore[no-untyped-call]
