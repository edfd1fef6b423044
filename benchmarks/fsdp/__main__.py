r"""A training step of a sharded model (FSDP2): by PyTorch's communication, and by this library's.

    torchrun --nproc-per-node 4 -m benchmarks.fsdp
    python -m benchmarks.netlab run --hosts 4 --rate 200mbit --launcher torchrun -m benchmarks.fsdp
    python -m benchmarks.netlab run --rate 1gbit --launcher torchrun -m benchmarks.fsdp --model gpt --gbit 1
    python -m benchmarks.netlab run --hosts 2 --ranks-per-host 2 --rate 1gbit --launcher torchrun \
        -m benchmarks.fsdp --model gpt --gbit 1

The same model is trained by each method, in turn in each step: by PyTorch's all-gather and reduce-scatter over
gloo, by ours exactly, and by ours with gradients, or gradients and parameters, in eight bits; with "overlap",
ours computes while it communicates. With several ranks on each host, also sharded inside each host, with
gradients averaged between hosts: by PyTorch, and by ours in eight bits. A step is a forward and a backward pass
on a small batch, so that communication takes most of it. The ratio to PyTorch's median is the figure to compare.
`wire` is what a rank sends in a step; PyTorch does not count its own. `link` is what the kernel has sent through
the network interface of the busiest host in a step, headers included; it is counted where GLOO_SOCKET_IFNAME
names one. `share` is the time in which a link of `--gbit` sends these bytes, divided by that of the step.
`processor` is the processor time of all ranks in a step: where emulated hosts share processors, it bounds the
step from below. With a single `--method`, the record has the most memory that a rank used, beyond that before
the model was made; `benchmarks.fsdp.memory` runs each method so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import bagua_torch
from bagua_comm import Communicator

from ..bench.arguments import add_json_argument, at_least, one_of
from ..bench.record import begin_record, header_lines, write_json
from ..bench.table import Column, Table, number
from ..bench.timing import Call, measure
from .methods import METHODS
from .models import MODELS, SIZES, sharded
from .use import Use

TABLE = Table(
    (
        Column("method", width=23),
        Column("step", "(ms)", 9),
        Column("ratio", width=6),
        Column("wire", "(B)", 11),
        Column("link", "(B)", 11),
        Column("share", width=6),
        Column("processor", "(s)", 9),
    )
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the record. Collective."""
    options = parse_arguments(argv)
    torch.set_num_threads(1)
    with bagua_torch.connect(process_group=True) as comm:
        record = begin_record("FSDP2", options, comm=comm, packages=("torch",))
        record["results"] = steps(comm, options)
        if comm.rank == 0:
            print(*header_lines(record), *TABLE.header(), sep="\n")
            for result in record["results"]:
                times = [number(1e3 * result["median_s"]), number(result["ratio"])]
                sizes = ["-" if result[key] is None else str(result[key]) for key in ("wire_bytes", "link_bytes")]
                share = "-" if result["share"] is None else number(result["share"])
                worked = number(result["processor_s"])
                print(TABLE.row([result["method"], *times, *sizes, share, worked]))
            if options.json is not None:
                write_json(options.json, record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    positive = at_least(1)
    parser.add_argument("--model", choices=MODELS, default="linear", help="linear layers, or a GPT")
    parser.add_argument("--width", type=positive, help="inputs and outputs of a layer")
    parser.add_argument("--layers", type=positive, help="layers, each sharded by a call of its own")
    method = one_of(METHODS, "method")
    parser.add_argument("--method", type=method, action="append", help="only this one, and others given alike")
    parser.add_argument("--gbit", type=float, help="rate of the links in Gbit/s, for their share")
    parser.add_argument("--batch-size", type=positive, default=4, help="samples of a rank in a step")
    parser.add_argument("-n", "--iters", type=positive, default=12, help="timed steps of each method")
    parser.add_argument("-w", "--warmup_iters", type=at_least(0), default=2, help="untimed steps before them")
    add_json_argument(parser)
    options = parser.parse_args(argv)
    width, layers = SIZES[options.model]
    options.width, options.layers = options.width or width, options.layers or layers
    return options


def steps(comm: Communicator, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The median time of a step by each method, and the bytes that are sent in it. Collective."""
    two_levels = 1 < comm.local_size < comm.size
    names = options.method or [name for name, each in METHODS.items() if two_levels or not each.by_host]
    methods = {name: METHODS[name] for name in names}
    by_host = None
    if any(each.by_host for each in methods.values()):
        shape = comm.size // comm.local_size, comm.local_size
        by_host = init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "shards"))
    at_rest = rss_bytes()
    models = {name: sharded(options, by_host if each.by_host else None) for name, each in methods.items()}
    attached = {name: each.attach(models[name], comm) for name, each in methods.items()}
    handles = {name: handle for name, handle in attached.items() if handle is not None}
    before = {name: handle.counters.total().wire_bytes for name, handle in handles.items()}
    uses = {name: Use(comm) for name in methods}
    loss = MODELS[options.model].batch(comm.rank, options)
    calls = [
        Call(run=partial(step, model, loss), prepare=model.zero_grad, expected=None, within=uses[name].counted)
        for name, model in models.items()
    ]
    found = measure(comm, calls, barrier=comm.barrier, warmup=options.warmup_iters, iterations=options.iters)
    medians = [float(np.median(each.seconds)) for each in found]
    made = options.iters + options.warmup_iters
    sent = {name: (handle.counters.total().wire_bytes - before[name]) // made for name, handle in handles.items()}
    for handle in handles.values():
        handle.close()
    memory = max(comm.allgather_object(rss_bytes("VmHWM") - at_rest)) if len(methods) == 1 else None
    return [
        {
            "method": name,
            "median_s": median,
            "ratio": median / medians[0],
            "wire_bytes": sent.get(name),
            "link_bytes": (link := uses[name].link_bytes()),
            "share": link * 8e-9 / options.gbit / median if link and options.gbit else None,
            "processor_s": uses[name].processor_s(),
            "peak_rss_bytes": memory,
        }
        for name, median in zip(models, medians, strict=True)
    ]


def rss_bytes(name: str = "VmRSS") -> int:
    """The memory of this process that is in use, or "VmHWM", the most that ever was."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(rows[name].split()[0])


def step(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """A forward and a backward pass. Collective."""
    loss(model).backward()


if __name__ == "__main__":
    main()
