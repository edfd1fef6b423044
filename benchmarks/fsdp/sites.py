r"""Replicas of a sharded transformer at sites with slow links: averages of gradients beside local steps.

    torchrun --nproc-per-node 4 -m benchmarks.fsdp.sites --steps 20 --seeds 0
    python -m benchmarks.netlab run --hosts 2 --ranks-per-host 2 --rate 200mbit --latency 50ms \
        --launcher torchrun -m benchmarks.fsdp.sites --json benchmarks/results/fsdp-sites.json

Each half of the ranks, by default, is a site that shards the model, on a mesh of (sites, shards). Text, batches
and losses are those of `benchmarks.fsdp.loss`, with AdamW, or with Muon for the matrices of blocks: all methods
see the same tokens. PyTorch averages gradients over the sites in each step (HSDP). `link` is what the busiest
host has sent in a step, headers included, and `fewer` how many times less than with PyTorch's; it is counted
where GLOO_SOCKET_IFNAME names an interface. `wire` is what a rank sends to other sites in a step, by this
library's counters. `exposed` is the part of the time in which steps waited for exchanges of local steps, of the
rank that waited most. The record is written after every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

import bagua_torch

from ..bench.arguments import at_least, one_of
from ..bench.table import Column, Table, number
from ..convergence.tasks import Data
from .loss import parser_of, run_all, run_once
from .methods import BETWEEN_SITES, Method

TABLE = Table(
    (
        Column("method", width=32),
        Column("loss", "(mean)", 9),
        Column("to PyTorch", "(%)", 11),
        Column("step", "(ms)", 9),
        Column("link", "(B)", 11),
        Column("fewer", width=7),
        Column("wire", "(B)", 11),
        Column("exposed", "(%)", 8),
    )
)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, print the table, and write the record. Collective."""
    parser = parser_of(__doc__)
    parser.add_argument("--sites", type=at_least(1), default=2, help="replicas of the model")
    method = one_of(BETWEEN_SITES, "method")
    parser.add_argument("--method", type=method, action="append", help="only this one, and others given alike")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with bagua_torch.connect(process_group=True) as comm:
        if comm.size % options.sites:
            parser.error(f"--sites is {options.sites}, which does not divide {comm.size} ranks")
        shape = options.sites, comm.size // options.sites
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("sites", "shards"))
        methods = {name: BETWEEN_SITES[name] for name in options.method or BETWEEN_SITES}

        def run(data: Data, method: Method, seed: int) -> dict[str, Any]:
            found = run_once(comm, options, data, method, seed, mesh=mesh, adam=torch.optim.AdamW)
            rows = comm.allgather_object(found)
            of = {"replicas": repr(method.replicas), "muon": method.muon}
            return of | {key: largest([row[key] for row in rows]) for key in found}

        results = run_all(comm, "FSDP2 between sites", options, methods, run)
        if comm.rank == 0:
            print(*TABLE.header(), *map(TABLE.row, summarize(results)), sep="\n")


def largest(values: Sequence[float | None]) -> float | None:
    """The largest of the values of all ranks; None if they have none."""
    found = [value for value in values if value is not None]
    return max(found) if found else None


def summarize(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each method: the means over the seeds, and their ratios to those of the first method."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for each in results:
        by_method.setdefault(each["method"], []).append(each)
    keys = ("held_out", "step_s", "link_bytes", "exchanged_bytes", "waited_s")
    means = {
        name: {key: None if None in (values := [each[key] for each in of]) else np.mean(values) for key in keys}
        for name, of in by_method.items()
    }
    base = next(iter(means.values()))
    rows = []
    for name, each in means.items():
        counted = each["link_bytes"] is not None
        rows.append(
            [
                name,
                f"{each['held_out']:.4f}",
                f"{100 * (each['held_out'] / base['held_out'] - 1):+.2f}",
                number(1e3 * each["step_s"]),
                f"{each['link_bytes']:.0f}" if counted else "-",
                number(base["link_bytes"] / each["link_bytes"]) if counted else "-",
                f"{each['exchanged_bytes']:.0f}",
                f"{100 * each['waited_s'] / each['step_s']:.2f}",
            ]
        )
    return rows


if __name__ == "__main__":
    main()
