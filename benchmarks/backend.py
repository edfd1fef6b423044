"""The backend "bagua" of torch.distributed beside gloo, in one run.

    bagua run -n 4 -m benchmarks.backend --json backend-mpi.json
    torchrun --nproc-per-node 4 -m benchmarks.backend --json backend-torchrun.json

Both are groups of the same ranks, and take turns. A call has taken as long as on the slowest rank. `ratio` is the
median time of gloo divided by that of "bagua": above 1, "bagua" is faster. A step is a forward and a backward
pass.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import bagua_comm
import bagua_torch  # noqa: F401 - registers the backend

from .bench.arguments import add_json_argument, at_least, format_size, parse_size
from .bench.record import begin_record, header_lines, write_json
from .bench.timing import in_us

SIZES = ["1K", "64K", "1M", "16M"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=[parse_size(each) for each in SIZES])
    parser.add_argument("--iters", type=at_least(1), default=20, help="how often each call is timed")
    parser.add_argument("--width", type=at_least(8), default=512, help="of the layers of the models")
    add_json_argument(parser)
    return parser.parse_args(arguments)


def calls(group: Any, nbytes: int) -> dict[str, Callable[[], object]]:
    """The collectives on arrays of `nbytes`, the whole of what is gathered or reduced."""
    size = dist.get_world_size()
    x = torch.ones(-(-nbytes // 4 // size) * size)
    part = torch.ones(x.numel() // size)
    return {
        "allreduce": lambda: dist.all_reduce(x, group=group),
        "allgather": lambda: dist.all_gather_single(x, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, x, group=group),
    }


def steps(group: Any, width: int) -> dict[str, Callable[[], object]]:
    """A step of DistributedDataParallel, and one of FSDP2."""

    def model() -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])

    def step(module: nn.Module) -> Callable[[], object]:
        data = torch.ones(4, width)
        return lambda: module(data).sum().backward()

    sharded = model()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return {
        "ddp step": step(nn.parallel.DistributedDataParallel(model(), process_group=group)),
        "fsdp2 step": step(sharded),
    }


def seconds(ways: list[Callable[[], object]], iters: int) -> list[np.ndarray]:
    """The times of the slowest rank, (iters,), for each way; they take turns. Collective."""
    times = torch.zeros(len(ways), iters, dtype=torch.float64)
    for i in range(-2, iters):
        for number, call in enumerate(ways):
            dist.barrier()
            start = time.perf_counter()
            call()
            times[number, max(i, 0)] = time.perf_counter() - start
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return list(times.numpy())


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("bagua")
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    rank = dist.get_rank()
    record = begin_record("backend", options, comm=bagua_comm.default(), packages=["torch"])
    record["results"] = []
    if rank == 0:
        print(
            *header_lines(record),
            f"# {'call':15}{'bytes':>8}{'bagua us':>12}{'gloo us':>12}{'ratio':>8}",
            sep="\n",
        )
    rows = [(nbytes, [calls(group, nbytes) for group in groups]) for nbytes in options.sizes]
    for nbytes, made in [*rows, (0, [steps(group, options.width) for group in groups])]:
        for name in made[0]:
            ours, gloos = (in_us(each) for each in seconds([way[name] for way in made], options.iters))
            ratio = gloos["median"] / ours["median"]
            figures = {"bagua_us": ours, "gloo_us": gloos, "ratio": ratio}
            record["results"].append({"call": name, "bytes": nbytes, **figures})
            if rank == 0:
                size = format_size(nbytes) if nbytes else "-"
                print(
                    f"  {name:15}{size:>8}{ours['median']:12.1f}{gloos['median']:12.1f}{ratio:8.2f}", flush=True
                )
    if rank == 0 and options.json:
        write_json(Path(options.json), record)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
