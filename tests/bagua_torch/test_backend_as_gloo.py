"""Each signature of `torch.distributed.ProcessGroup`, on the backend "bagua" and on gloo: the same results."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bagua_comm.testing import run_ranks
from bagua_torch.backend.group import BaguaGroup
from bagua_torch.backend.start import lane_of

LIMIT = timedelta(seconds=20)
OTHERS = {"_end_coalescing", "recv_anysource", "send", "recv"}
"""Methods that return a work, and are not called here: gloo refuses the first."""


def signatures():
    """(method, [(parameter, type)]) of each overload that returns a work, from its docstring."""
    for method in sorted(set(dir(dist.ProcessGroup)) - OTHERS):
        text = re.sub(r" = <[^<>]*>", "", getattr(dist.ProcessGroup, method).__doc__ or "")
        for inside in re.findall(rf"\b{method}\(self: \S+?, (.*)\) -> c10d::Work", text):
            yield method, re.findall(r"(\w+): ([^<=]+?)(?= = |, \w+: |$)", inside)


def tensors_of(method, rank, size):
    """What a rank passes to a call: the tensors to fill, and those to read."""
    x, whole = torch.arange(2.0 * size) + 10 * rank, 2 * size * size

    def empty(n):
        return torch.zeros(n)

    each, parts = [empty(2 * size) for _ in range(size)], list(x.split(2))
    if method == "alltoall":
        return [empty(2) for _ in range(size)], parts
    if method.startswith(("all_to_all", "alltoall")):
        return empty(2 * size), x
    if method == "allgather_coalesced":
        return [[empty(2 * size), empty(1)] for _ in range(size)], [x, x[:1].clone()]
    if method == "allgather":
        return each, x
    if method == "gather":
        return each if rank == 1 else [], x
    if method == "scatter":
        return empty(2), parts if rank == 1 else []
    if method == "reduce_scatter":
        return empty(2), parts
    single = (empty(whole), x) if "gather" in method else (empty(2), x) if "scatter" in method else (None, x)
    if "coalesced" not in method:
        return single
    return [single[0], torch.zeros_like(single[0])] if single[0] is not None else None, [x, x + 1]


def arguments_of(method, parameters, rank, size):
    """The arguments of a call of this signature, by name."""
    out, given = tensors_of(method, rank, size)
    found = {}
    for name, kind in parameters:
        if "Tensor" in kind:
            value = out if name.startswith("out") else given
            deep = kind.count("Sequence[")
            # A list of lists has one list for each device of a process: here one, or none.
            if deep > _depth(value) and "coalesced" not in method:
                value = [value] if not isinstance(value, list) or value else []
            found[name] = value
        elif name.endswith("split_sizes"):
            found[name] = [2] * size if rank else []
        elif name == "opts":
            options = found[name] = getattr(torch._C._distributed_c10d, kind.split(".")[-1])()
            for option, value in (("rootRank", 1), ("reduceOp", dist.ReduceOp.MAX)):
                if hasattr(options, option):
                    setattr(options, option, value)
        else:
            found[name] = {"op": dist.ReduceOp.MAX, "root": 1, "timeout": LIMIT}[name]
    return found, (given if out is None else out)


def _depth(value):
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def flat(value):
    return [each for part in value for each in flat(part)] if isinstance(value, (list, tuple)) else [value]


def shape_of(value, places):
    """A value of a future, with tensors replaced by their places among those that the call fills."""
    if isinstance(value, list):
        return [shape_of(each, places) for each in value]
    return places.get(value.data_ptr(), "another")


def results(group):
    """By call: the tensors that it has filled, and the shape of its future's value; None if it has no future."""
    found = {}
    for number, (method, parameters) in enumerate(signatures()):
        for by_name in (False, True):
            named, filled = arguments_of(method, parameters, group.rank(), group.size())
            call = getattr(group, method)
            work = call(**named) if by_name else call(*named.values())
            work.wait()
            value = None
            if "reduce_scatter" not in method:  # gloo's has no future
                places = {x.data_ptr(): place for place, x in enumerate(flat(filled))}
                value = shape_of(work.get_future().wait(), places)
            tensors = [x.tolist() for x in flat(filled)]
            if method == "reduce" and group.rank() != 1:
                tensors = []  # gloo leaves parts of sums there
            if method in ("_allgather_base", "all_gather_single"):
                value = value[:1]  # gloo's has a copy of the input, too
            if "gather_into_tensor_coalesced" in method or method == "all_gather_single_coalesced":
                value = value[0] if isinstance(value[0], list) else value
            found[f"{number} {method}{[name for name, _ in parameters]} {by_name}"] = tensors, value
    return found


def on_gloo(size, body):
    store = dist.HashStore()

    def run(rank):
        gloo = dist.ProcessGroupGloo(store, rank, size, LIMIT)
        group = dist.ProcessGroup(store, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return body(group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_signature_fills_what_gloo_fills_and_has_its_future(size):

    def ours(comm):
        group = BaguaGroup(lane_of(comm.dup(), 20.0), comm)
        found = results(group)
        group.shutdown()
        return found

    assert len({method for method, _ in signatures()}) >= 18
    for rank, (mine, expected) in enumerate(zip(run_ranks(size, ours), on_gloo(size, results), strict=True)):
        for call, result in expected.items():
            assert mine[call] == result, (rank, call)


def test_unknown_options_are_refused():
    def body(comm):
        group, x = BaguaGroup(lane_of(comm.dup(), 20.0), comm), torch.ones(2)
        for call, named in [
            (group.broadcast, {"op": dist.ReduceOp.SUM}),
            (group.allreduce, {"opts": dist.AllreduceOptions(), "op": dist.ReduceOp.SUM}),
            (group.allreduce, {"other": 1}),
        ]:
            with pytest.raises(TypeError, match=r"unexpected argument .* expected .*, once"):
                call([x], **named)
        with pytest.raises(TypeError, match="unexpected argument root=1"):
            group.allreduce(x, 1)
        group.shutdown()

    run_ranks(2, body)
