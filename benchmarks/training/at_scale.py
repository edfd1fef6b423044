"""Simulated steps and goodput of all algorithms on 8 to 4,096 ranks of three clusters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from bagua_comm.planning.advise import payload
from bagua_comm.planning.costmodel import METHODS, Cluster, Job, Rates, predict
from bagua_comm.planning.costmodel.comparison import applies
from bagua_comm.planning.models import MODELS
from bagua_comm.planning.simulator import Failures, Variation, goodput, simulate

from ..bench.report import markdown_table

RANKS = (8, 64, 512, 4096)
VARIATION = Variation(compute=0.03, rare=0.0005, rare_factor=3.0, links=0.05)
SEED = 0


class Scenario(NamedTuple):
    """A cluster and a job."""

    name: str
    job: Job
    cluster: Cluster
    """Its number of nodes is that of the smallest number of ranks."""
    rates: Rates


def scenarios(rates: Rates) -> list[Scenario]:
    """Fast and slow networks of nodes with 8 GPUs, and hosts without GPUs, by the calibrated rates."""
    layers = MODELS["bert-large"]
    job = Job(sum(layer.nbytes for layer in layers), 0.1, 0.2, 0.02, layers=layers)
    gpus = Cluster(1, 8, 100.0, 20e-6, intra_gbs=200.0, transport="nccl")
    slower = dataclasses.replace(job, forward_s=1.0, backward_s=2.0, optimizer_s=0.2)
    return [
        Scenario("nodes of 8 GPUs, 100 Gbit/s", job, gpus, Rates.gpu()),
        Scenario("nodes of 8 GPUs, 10 Gbit/s", job, dataclasses.replace(gpus, bandwidth_gbit=10.0), Rates.gpu()),
        Scenario("hosts of one rank, 1 Gbit/s", slower, Cluster(8, 1, 1.0, 100e-6, cores_per_rank=8.0), rates),
    ]


def simulate_scale(rates: Rates) -> list[dict[str, Any]]:
    """The steps of each algorithm in each scenario, on each number of ranks."""
    found = []
    for scenario in scenarios(rates):
        rows = []
        for ranks in RANKS:
            nodes = ranks // scenario.cluster.ranks_per_node
            cluster = dataclasses.replace(scenario.cluster, nodes=nodes)
            failures = Failures(spares=-(-nodes // 64))
            for name, method in METHODS.items():
                if applies(method, scenario.job, cluster):
                    rows.append(_row(name, scenario, cluster, failures))
        found.append(
            {
                "scenario": scenario.name,
                "job": {"model": "bert-large", "compute_s": scenario.job.compute_s},
                "variation": dataclasses.asdict(VARIATION),
                "failures": dataclasses.asdict(Failures()),
                "seed": SEED,
                "results": rows,
            }
        )
    return found


def _row(name: str, scenario: Scenario, cluster: Cluster, failures: Failures) -> dict[str, Any]:
    method, job, rates = METHODS[name], scenario.job, scenario.rates
    alike = simulate(method, job, cluster, rates)
    varied = simulate(method, job, cluster, rates, variation=VARIATION, seed=SEED)
    counts = goodput(varied, method, job, cluster, failures, rates, seed=SEED)
    return {
        "algorithm": name,
        "averages": payload(method),
        "ranks": cluster.size,
        "step_s": alike.step_s,
        "costmodel_s": predict(method, job, cluster, rates).step_s,
        "varied_s": varied.step_s,
        "longest_s": varied.longest_s,
        "node_bytes": alike.node_bytes,
        "goodput": counts.share,
        "speed": counts.share * job.compute_s / varied.step_s,
    }


def draw_scale(axes: Any, scale: dict[str, Any]) -> None:
    """Draw the speed of a rank against the number of ranks, of the algorithms that are fastest somewhere."""
    rows = scale["results"]
    fastest = {
        max((row for row in rows if row["ranks"] == ranks and _averages(row) == what), key=lambda r: r["speed"])[
            "algorithm"
        ]
        for ranks in RANKS
        for what in PAYLOADS
    }
    for name in sorted(fastest | {"exact"}):
        mine = [row for row in rows if row["algorithm"] == name]
        axes.plot([row["ranks"] for row in mine], [row["speed"] for row in mine], ".-", label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 1)
    axes.set_xlabel("ranks (simulated)")
    axes.set_title(scale["scenario"], fontsize=9)
    axes.grid(color="0.92")
    axes.legend(frameon=False, fontsize=7)


# The page "At scale" ---------------------------------------------------------------------------------------

DIFFERS = 0.1
"""The cost model disagrees if its step differs by more than this share."""


def heading(scale: dict[str, Any]) -> str:
    """The heading of the section of a scenario."""
    name: str = scale["scenario"]
    return f"{name[0].upper()}{name[1:]} (simulated)"


def table(scale: dict[str, Any]) -> list[str]:
    """The lines of the table of a scenario: `exact`, and the fastest algorithms, with the speed of a rank."""
    titles = ["ranks", "`exact`", *(f"fastest with {what}" for what in PAYLOADS)]
    cells = []
    for ranks in RANKS:
        here = [row for row in scale["results"] if row["ranks"] == ranks]
        exact = next(row for row in here if row["algorithm"] == "exact")
        best = [
            max((row for row in here if _averages(row) == what), key=lambda row: row["speed"])
            for what in PAYLOADS
        ]
        cells.append([f"{ranks:,}", _cell(exact), *(f"`{row['algorithm']}`: {_cell(row)}" for row in best)])
    return markdown_table(titles, cells, "rllll")


PAYLOADS = ("gradients", "weights in every step", "weights now and then")


def _averages(row: dict[str, Any]) -> str:
    if row["averages"] == "gradients":
        return "gradients"
    rarely = (
        row["algorithm"].startswith(("async", "diloco", "sparseloco", "streaming")) or "every" in row["algorithm"]
    )
    return "weights now and then" if rarely else "weights in every step"


def _cell(row: dict[str, Any]) -> str:
    return f"{row['varied_s']:.2f} s, {row['speed']:.0%}"


def disagreements(scales: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the table of steps about which the cost model and the simulator disagree."""
    cells = []
    for scale in scales:
        for name in dict.fromkeys(row["algorithm"] for row in scale["results"]):
            mine = [row for row in scale["results"] if row["algorithm"] == name]
            differ = [f"{row['costmodel_s'] / row['step_s'] - 1:+.0%}" for row in mine]
            if any(abs(row["costmodel_s"] / row["step_s"] - 1) > DIFFERS for row in mine):
                of_ranks = dict(zip([row["ranks"] for row in mine], differ, strict=True))
                cells.append([scale["scenario"], f"`{name}`", *(of_ranks.get(ranks, "-") for ranks in RANKS)])
    return markdown_table(["cluster", "algorithm", *(f"{ranks:,}" for ranks in RANKS)], cells, "llrrrr")
