r"""A training step of a sharded model (FSDP2): by PyTorch's communication, and by this library's.

    torchrun --nproc-per-node 4 -m benchmarks.fsdp
    python -m benchmarks.netlab run --hosts 4 --rate 200mbit --launcher torchrun -m benchmarks.fsdp
    python -m benchmarks.netlab run --rate 1gbit --launcher torchrun -m benchmarks.fsdp --model gpt --gbit 1
    python -m benchmarks.netlab run --hosts 2 --ranks-per-host 2 --rate 1gbit --launcher torchrun \
        -m benchmarks.fsdp --model gpt --gbit 1

The same model is trained by each method, in turn in each step: by PyTorch's all-gather and reduce-scatter over
gloo, by ours exactly, and by ours with gradients, or gradients and parameters, in eight bits. With several ranks
on each host, also sharded inside each host, with gradients averaged between hosts: by PyTorch, and by ours in
eight bits. A step is a forward and a backward pass on a small batch, so that communication takes most of it. The
ratio to PyTorch's median is the figure to compare. `wire` is what a rank sends in a step; PyTorch does not count
its own. `link` is what the kernel has sent through the network interface of the busiest host in a step, headers
included; it is counted where GLOO_SOCKET_IFNAME names one. `share` is the time in which a link of `--gbit` sends
these bytes, divided by that of the step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import bagua_torch
import bagua_torch.fsdp
from bagua_comm import Average, Communicator, Exact, Quantized

from .bench.arguments import add_json_argument, at_least
from .bench.record import begin_record, header_lines, write_json
from .bench.table import Column, Table, number
from .bench.timing import Call, measure

EIGHT_BITS = Quantized(min_bytes=0)


@dataclass(frozen=True)
class Method:
    """How gradients are reduced, and parameters gathered; None for PyTorch's own."""

    reduce: Average | None = None
    gather: Exact | Quantized | None = None
    by_host: bool = False
    """Whether each host keeps the whole model in its shards."""
    replicas: Average | None = None


METHODS = {
    "PyTorch": Method(),
    "exact": Method(Exact(), Exact()),
    "gradients in eight bits": Method(EIGHT_BITS, Exact()),
    "eight bits": Method(EIGHT_BITS, EIGHT_BITS),
    "PyTorch, replicas": Method(by_host=True),
    "eight bits, replicas": Method(Exact(), Exact(), by_host=True, replicas=EIGHT_BITS),
}

TABLE = Table(
    (
        Column("method", width=23),
        Column("step", "(ms)", 9),
        Column("ratio", width=6),
        Column("wire", "(B)", 11),
        Column("link", "(B)", 11),
        Column("share", width=6),
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
                print(TABLE.row([result["method"], *times, *sizes, share]))
            if options.json is not None:
                write_json(options.json, record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    positive = at_least(1)
    parser.add_argument("--model", choices=["linear", "gpt"], default="linear", help="linear layers, or GPT's")
    parser.add_argument("--width", type=positive, help="inputs and outputs of a layer; 1024, or 512 of GPT")
    parser.add_argument("--layers", type=positive, help="layers, each sharded by a call of its own; 4, or 8")
    parser.add_argument("--gbit", type=float, help="rate of the links in Gbit/s, for their share")
    parser.add_argument("--batch-size", type=positive, default=4, help="samples of a rank in a step")
    parser.add_argument("-n", "--iters", type=positive, default=12, help="timed steps of each method")
    parser.add_argument("-w", "--warmup_iters", type=at_least(0), default=2, help="untimed steps before them")
    add_json_argument(parser)
    options = parser.parse_args(argv)
    options.width = options.width or {"linear": 1024, "gpt": 512}[options.model]
    options.layers = options.layers or {"linear": 4, "gpt": 8}[options.model]
    return options


def steps(comm: Communicator, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The median time of a step by each method, and the bytes that are sent in it. Collective."""
    methods = {
        name: each for name, each in METHODS.items() if not each.by_host or 1 < comm.local_size < comm.size
    }
    by_host = None
    if len(methods) == len(METHODS):
        shape = comm.size // comm.local_size, comm.local_size
        by_host = init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "shards"))
    models = {name: sharded(options, by_host if each.by_host else None) for name, each in methods.items()}
    handles = {
        name: bagua_torch.fsdp.attach(models[name], each.reduce, each.gather, comm, replicas=each.replicas)
        for name, each in methods.items()
        if each.reduce is not None
    }
    before = {name: handle.counters.total().wire_bytes for name, handle in handles.items()}
    links = {name: Link(comm) for name in methods}
    loss = MODELS[options.model].batch(comm.rank, options)
    calls = [
        Call(run=partial(step, model, loss), prepare=model.zero_grad, expected=None, within=links[name].counted)
        for name, model in models.items()
    ]
    found = measure(comm, calls, barrier=comm.barrier, warmup=options.warmup_iters, iterations=options.iters)
    medians = [float(np.median(each.seconds)) for each in found]
    made = options.iters + options.warmup_iters
    sent = {name: (handle.counters.total().wire_bytes - before[name]) // made for name, handle in handles.items()}
    for handle in handles.values():
        handle.close()
    return [
        {
            "method": name,
            "median_s": median,
            "ratio": median / medians[0],
            "wire_bytes": sent.get(name),
            "link_bytes": (link := links[name].median()),
            "share": link * 8e-9 / options.gbit / median if link and options.gbit else None,
        }
        for name, median in zip(models, medians, strict=True)
    ]


class Link:
    """Counts the bytes that this host sends in steps.

    Args:
        comm: All ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._found = comm, list[int]()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the bytes of one step of all ranks. Collective."""
        self._comm.barrier()
        before = sent_bytes()
        yield
        self._comm.barrier()
        if before is not None:
            self._found.append((sent_bytes() or 0) - before)

    def median(self) -> int | None:
        """The median of all steps, of the busiest host; None if they are not counted. Collective."""
        rows = self._comm.allgather_object(int(np.median(self._found)) if self._found else None)
        return None if None in rows else max(rows)


def sent_bytes(devices: Path = Path("/proc/self/net/dev")) -> int | None:
    """Bytes that the interface which GLOO_SOCKET_IFNAME names has sent; None without that."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name in (None, "lo") or not devices.exists():
        return None
    rows = dict(line.split(":") for line in devices.read_text().splitlines() if ":" in line)
    counts = {each.strip(): row.split() for each, row in rows.items()}
    return int(counts[name][8]) if name in counts else None


def sharded(options: argparse.Namespace, mesh: DeviceMesh | None) -> nn.Module:
    """A model with each layer sharded."""
    model = MODELS[options.model](options.width, options.layers)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """A forward and a backward pass. Collective."""
    loss(model).backward()


class Linear(nn.Module):
    """A stack of linear layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        """From (n, width) to (n, width)."""
        result: Tensor = self.layers(x)
        return result

    @staticmethod
    def batch(rank: int, options: argparse.Namespace) -> Callable[[nn.Module], Tensor]:
        """The loss of a model on a batch of this rank."""
        x = torch.randn(options.batch_size, options.width, generator=torch.Generator().manual_seed(rank))
        return lambda model: model(x).square().mean()


class GPT(nn.Module):
    """The decoder of Radford et al., "Language Models are Unsupervised Multitask Learners", 2019."""

    VOCABULARY, CONTEXT = 8192, 32

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(self.VOCABULARY, width), nn.Embedding(self.CONTEXT, width)
        make = partial(nn.TransformerEncoderLayer, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(make(width, width // 64, 4 * width, 0.0) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """From (n, context) tokens to (n, context, vocabulary) logits of the next ones."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @classmethod
    def batch(cls, rank: int, options: argparse.Namespace) -> Callable[[nn.Module], Tensor]:
        """The loss of a model on a batch of this rank."""
        shape, generator = (options.batch_size, cls.CONTEXT + 1), torch.Generator().manual_seed(rank)
        rows = torch.randint(cls.VOCABULARY, shape, generator=generator)
        return lambda model: cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


MODELS: dict[str, Any] = {"linear": Linear, "gpt": GPT}


if __name__ == "__main__":
    main()
