"""How many functions of this library a call crosses, once everything is prepared.

    python -m bagua_comm run -n 2 -m benchmarks.functions

A count has no noise: it compares two versions of the library on any machine. Functions are those in Python of
`bagua_comm` and `bagua_torch`, on the calling thread and on others, on rank 0; comprehensions count, too. Each
row is the median over the repetitions of its call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import bagua_comm
from bagua_comm import ByteGrad, Communicator, GradientAllReduce

from .bench.arguments import add_json_argument, at_least
from .bench.record import begin_record, header_lines, write_json
from .bench.table import Column, Table

ROOT = Path(bagua_comm.__file__).parents[1]
LIBRARY = str(ROOT / "bagua_comm"), str(ROOT / "bagua_torch")
TABLE = Table((Column("call", width=30), Column("functions", width=9), Column("of threads", width=10)))

Call = Callable[[], object]


class Counter:
    """Counts the functions of the library that are entered, by thread."""

    def __init__(self) -> None:
        self.here = self.elsewhere = 0
        self.caller = threading.get_ident()
        self.active = False

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """What `sys.setprofile` calls."""
        if self.active and event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            if threading.get_ident() == self.caller:
                self.here += 1
            else:
                self.elsewhere += 1

    def of(self, call: Call) -> tuple[int, int]:
        """The functions that `call` crosses on this thread, and on others until it returns."""
        self.here = self.elsewhere = 0
        self.active = True
        try:
            call()
        finally:
            self.active = False
        return self.here, self.elsewhere


def main(argv: Sequence[str] | None = None) -> int:
    """Count the functions of each call. Collective."""
    options = parse_arguments(argv)
    counter = Counter()
    threading.setprofile(counter.profile)  # for the threads of lanes, which begin below
    with bagua_comm.connect(gpu="none") as comm:
        record = begin_record("functions", options, comm=comm)
        if comm.rank == 0:
            print(*header_lines(record), *TABLE.header(), sep="\n", flush=True)
        record["results"] = []
        for road in ROADS:
            with road(comm) as (name, call):
                for _ in range(options.warmup):
                    call()
                sys.setprofile(counter.profile)
                counts = [counter.of(call) for _ in range(options.repetitions)]
                sys.setprofile(None)
            here, elsewhere = (int(statistics.median(column)) for column in zip(*counts, strict=True))
            record["results"].append({"call": name, "functions": here, "of_threads": elsewhere})
            if comm.rank == 0:
                print(TABLE.row([name, str(here), str(elsewhere)]), flush=True)
        if comm.rank == 0 and options.json:
            write_json(options.json, record)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--warmup", type=at_least(1), default=40, help="calls before the first that is counted")
    parser.add_argument("--repetitions", type=at_least(1), default=21)
    add_json_argument(parser)
    return parser.parse_args(argv)


@contextmanager
def small_allreduce(comm: Communicator) -> Iterator[tuple[str, Call]]:
    """The maximum of 8 bytes."""
    x = np.ones(1)
    yield "allreduce of 8 bytes", lambda: comm.allreduce(x, out=x, op="max")


@contextmanager
def exact_step(comm: Communicator) -> Iterator[tuple[str, Call]]:
    """A step of 20 parameters by `GradientAllReduce`."""
    yield "exact training step", training_step(comm, GradientAllReduce())


@contextmanager
def quantized_step(comm: Communicator) -> Iterator[tuple[str, Call]]:
    """A step of 20 parameters by `ByteGrad`."""
    yield "ByteGrad training step", training_step(comm, ByteGrad())


def training_step(comm: Communicator, algorithm: bagua_comm.Algorithm) -> Call:
    """A step of an MLP of ten linear layers. Collective."""
    import torch

    import bagua_torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    wrapper = bagua_torch.DistributedDataParallel(model, [optimizer], algorithm, comm=comm)
    batch = torch.randn(8, 32)

    def step() -> None:
        optimizer.zero_grad()
        wrapper(batch).sum().backward()
        optimizer.step()

    return step


@contextmanager
def sharded_gather(comm: Communicator) -> Iterator[tuple[str, Call]]:
    """A forward pass of a module of FSDP2 with one unit, in which it gathers its parameters."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from bagua_torch import fsdp

    torch.manual_seed(0)
    with process_group(comm):
        model = fully_shard(torch.nn.Linear(32, 32), mesh=dist.init_device_mesh("cpu", (comm.size,)))
        fsdp.attach(model, comm=comm)
        batch = torch.randn(8, 32)

        def gather() -> None:
            model(batch)
            model.reshard()

        with torch.no_grad():
            yield "FSDP2 gather", gather


@contextmanager
def backend_allreduce(comm: Communicator) -> Iterator[tuple[str, Call]]:
    """`dist.all_reduce` of 32 bytes by the backend."""
    import torch
    import torch.distributed as dist

    x = torch.ones(8)
    with process_group(comm):
        yield "dist.all_reduce of 32 bytes", lambda: dist.all_reduce(x)


@contextmanager
def process_group(comm: Communicator) -> Iterator[None]:
    """The default group of torch.distributed, by the backend "bagua", over the ranks of `comm`. Collective."""
    import torch.distributed as dist

    import bagua_torch  # noqa: F401 - registers the backend

    dist.init_process_group("bagua")
    try:
        yield
    finally:
        dist.destroy_process_group()
        comm.barrier()  # a rank that makes the next group must not find the store of this one


ROADS = small_allreduce, exact_step, quantized_step, sharded_gather, backend_allreduce

if __name__ == "__main__":
    sys.exit(main())
