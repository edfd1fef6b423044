"""Collectives on a network, side by side in one run: ours, gloo's, MPI's own, and textbook algorithms.

    python benchmarks/netlab.py run --hosts 4 --rate 1gbit benchmarks/network.py -b 1M -e 64M -f 8
    python benchmarks/netlab.py run --hosts 4 --rate 1gbit benchmarks/network.py --operations quantized_allreduce

Every contender gets the same float32 arrays; calls are timed in turn, and every result is checked. Bandwidth is
bus bandwidth, as nccl-tests define it: what each link carried, had the algorithm been bandwidth-optimal. That
of a quantized allreduce counts the float32 elements, not the bytes sent, and so may pass the link's. Where
ranks of several hosts meet gloo by MASTER_ADDR, as `netlab.py` and torchrun arrange it, gloo is there.

`ring`, `halving_doubling` and `mpi` are what the algorithms of transports/mpi.py were chosen over.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bagua_comm
from bagua_comm import Communicator, quantized_allreduce
from bagua_comm.arrays import Array

sys.path.insert(0, str(Path(__file__).parent))

from common import (
    ERROR,
    Call,
    Spread,
    add_sweep_arguments,
    allreduce_factor,
    begin_record,
    chunks_factor,
    header_lines,
    in_us,
    measure,
    poison,
    sweep,
    write_json,
)

CONTENDERS = ("ours", "gloo", "mpi", "ring", "halving_doubling")

Contender = Callable[[Array, Array], object]
"""Fills the second array from the first, on all ranks."""


@dataclass(frozen=True)
class Operation:
    """A collective on p ranks: how long its arrays are, what must come out, and its bus bandwidth.

    Args:
        given: Elements that go in, for a size in elements.
        wanted: Elements that come out.
        expected: This rank's result, from the inputs of all ranks.
        factor: Bus bandwidth / algorithm bandwidth.
        tolerance: The relative error that is right.
    """

    given: Callable[[int, int], int]
    wanted: Callable[[int, int], int]
    expected: Callable[[Sequence[Array], int], Array]
    factor: Callable[[int], float]
    tolerance: float = 1e-6


def _whole(count: int, p: int) -> int:
    return count


def _chunk(count: int, p: int) -> int:
    return count // p


def _sum(inputs: Sequence[Array], rank: int) -> Array:
    return np.sum(inputs, axis=0, dtype=np.float64)


OPERATIONS = {
    "allreduce": Operation(_whole, _whole, _sum, allreduce_factor),
    "quantized_allreduce": Operation(_whole, _whole, _sum, allreduce_factor, tolerance=0.02),
    "reduce_scatter": Operation(
        _whole, _chunk, lambda inputs, rank: np.split(_sum(inputs, rank), len(inputs))[rank], chunks_factor
    ),
    "allgather": Operation(_chunk, _whole, lambda inputs, rank: np.concatenate(inputs), chunks_factor),
    "alltoall": Operation(
        _whole,
        _whole,
        lambda inputs, rank: np.concatenate([np.split(x, len(inputs))[rank] for x in inputs]),
        chunks_factor,
    ),
}

# ---------------------------------------------------------------------------------------------------
# Contenders
# ---------------------------------------------------------------------------------------------------


def ours(comm: Communicator) -> dict[str, Contender]:
    """Our calls."""
    return {
        "allreduce": lambda x, out: comm.allreduce(x, out),
        "quantized_allreduce": lambda x, out: quantized_allreduce(comm, x, out),
        "reduce_scatter": lambda x, out: comm.reduce_scatter(x, out),
        "allgather": lambda x, out: comm.allgather(x, out),
        "alltoall": lambda x, out: comm.alltoall(x, out),
    }


def gloo() -> dict[str, Contender]:
    """torch.distributed's, over gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)

    def allreduce(x: Array, out: Array) -> None:
        out[...] = x
        dist.all_reduce(torch.from_numpy(out))

    def reduce_scatter(x: Array, out: Array) -> None:
        dist.reduce_scatter_single(torch.from_numpy(out), torch.from_numpy(x))

    def allgather(x: Array, out: Array) -> None:
        dist.all_gather_single(torch.from_numpy(out), torch.from_numpy(x))

    def alltoall(x: Array, out: Array) -> None:
        dist.all_to_all_single(torch.from_numpy(out), torch.from_numpy(x))

    return {
        "allreduce": allreduce,
        "quantized_allreduce": allreduce,
        "reduce_scatter": reduce_scatter,
        "allgather": allgather,
        "alltoall": alltoall,
    }


def mpi(world: Any) -> dict[str, Contender]:
    """MPI's own."""
    return {
        "allreduce": lambda x, out: world.Allreduce(x, out),
        "reduce_scatter": lambda x, out: world.Reduce_scatter_block(x, out),
        "allgather": lambda x, out: world.Allgather(x, out),
        "alltoall": lambda x, out: world.Alltoall(x, out),
    }


def ring(world: Any) -> dict[str, Contender]:
    """Each rank talks to its neighbours alone: p - 1 steps round the ring for each half of an allreduce."""
    p, rank = world.size, world.rank
    right, left = (rank + 1) % p, (rank - 1) % p

    def allgather(chunks: Array, first: int) -> None:
        """Chunk `first` is complete on this rank, and the one before it on the left neighbour."""
        for step in range(p - 1):
            world.Sendrecv(chunks[(first - step) % p], right, 0, chunks[(first - step - 1) % p], left, 0)

    def allreduce(x: Array, out: Array) -> None:
        out[...] = x
        chunks = out.reshape(p, -1)
        received = np.empty_like(chunks[0])
        for step in range(p - 1):
            world.Sendrecv(chunks[(rank - step) % p], right, 0, received, left, 0)
            chunks[(rank - step - 1) % p] += received
        allgather(chunks, (rank + 1) % p)

    def allgather_apart(x: Array, out: Array) -> None:
        chunks = out.reshape(p, -1)
        chunks[rank] = x
        allgather(chunks, rank)

    return {"allreduce": allreduce, "allgather": allgather_apart}


def halving_doubling(world: Any) -> dict[str, Contender]:
    """Halve what is added with a partner twice as near each time; double it back. For p a power of two.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """
    p, rank = world.size, world.rank

    def allreduce(x: Array, out: Array) -> None:
        out[...] = x
        received = np.empty(-(-out.size // 2), out.dtype)
        start, stop, hop, spans = 0, out.size, p // 2, []
        while hop:
            middle = (start + stop) // 2
            low, high = slice(start, middle), slice(middle, stop)
            keep, give = (high, low) if rank & hop else (low, high)
            part = received[: keep.stop - keep.start]
            world.Sendrecv(out[give], rank ^ hop, 0, part, rank ^ hop, 0)
            out[keep] += part
            spans.append((keep, give, hop))
            start, stop, hop = keep.start, keep.stop, hop // 2
        for keep, give, hop in reversed(spans):
            world.Sendrecv(out[keep], rank ^ hop, 0, out[give], rank ^ hop, 0)

    return {"allreduce": allreduce} if p & (p - 1) == 0 else {}


# ---------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_sweep_arguments(parser)
    parser.add_argument("--operations", type=_listed(OPERATIONS), default=list(OPERATIONS), metavar="A,B")
    parser.add_argument("--contenders", type=_listed(CONTENDERS), default=list(CONTENDERS), metavar="A,B")
    parser.add_argument("--label", default="", help="kept in the record: what network this is")
    options = parser.parse_args()
    with bagua_comm.connect(gpu="none") as comm, ExitStack() as rest:
        from mpi4py import MPI  # not before `connect`, which tells Open MPI how to start

        contenders: dict[str, dict[str, Contender]] = {"ours": ours(comm)}
        if "MASTER_ADDR" in os.environ:
            import torch_world

            rest.enter_context(torch_world.gloo(comm))
            contenders["gloo"] = gloo()
        world = MPI.COMM_WORLD.Dup()
        contenders |= {"mpi": mpi(world), "ring": ring(world), "halving_doubling": halving_doubling(world)}
        contenders = {name: calls for name, calls in contenders.items() if name in options.contenders}
        record = begin_record("network", options, ranks=comm.size, mpi=MPI)
        if comm.rank == 0:
            print("\n".join(header_lines(record)))
        record["results"] = []
        for operation in options.operations:
            for nbytes in sweep(options.minbytes, options.maxbytes, options.stepfactor):
                rows = time_operation(comm, world, operation, nbytes, contenders, options)
                record["results"] += rows
                if comm.rank == 0 and rows:
                    print(describe(rows), flush=True)
        if comm.rank == 0 and options.json:
            write_json(options.json, record)
        world.Free()


def _listed(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)} not among {', '.join(known)}")
        return names

    return parse


def time_operation(
    comm: Communicator,
    world: Any,
    name: str,
    nbytes: int,
    contenders: dict[str, dict[str, Contender]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Time all contenders of one operation at one size, in turn; a row for each. Collective."""
    operation, p = OPERATIONS[name], comm.size
    count = max(1, nbytes // 4 // p) * p
    given = operation.given(count, p)
    inputs = [np.random.default_rng(rank).standard_normal(given, dtype=np.float32) for rank in range(p)]
    expected = operation.expected(inputs, comm.rank)
    x = inputs[comm.rank]
    out = np.empty(operation.wanted(count, p), np.float32)
    there = {who: calls[name] for who, calls in contenders.items() if name in calls}
    if not there:
        return []
    calls = [Call(_run(call, x, out), lambda: poison(out), expected, ERROR) for call in there.values()]
    measured = measure(comm, calls, barrier=world.Barrier, warmup=options.warmup_iters, iterations=options.iters)
    rows = []
    for who, result in zip(there, measured, strict=True):
        spread = Spread.of(result.seconds)
        rows.append(
            {
                "operation": name,
                "bytes": 4 * count,
                "contender": who,
                "time_us": in_us(spread),
                "busbw_gbs": 4 * count * operation.factor(p) / spread.median / 1e9,
                "error": result.fault,
                "right": result.fault <= operation.tolerance,
                "wire_bytes": result.wire_bytes if who == "ours" else None,
            }
        )
    return rows


def _run(call: Contender, x: Array, out: Array) -> Callable[[], Array]:
    def run() -> Array:
        call(x, out)
        return out

    return run


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One line for the rows of one operation at one size."""
    parts = [
        f"{row['contender']} {row['time_us']['median']:.0f} us {row['busbw_gbs']:.4f} GB/s"
        + ("" if row["right"] else f" WRONG ({row['error']:.2g})")
        for row in rows
    ]
    return f"{rows[0]['operation']} {rows[0]['bytes']}: " + ", ".join(parts)


if __name__ == "__main__":
    main()
