"""`bagua advise`: which algorithm would train fastest on a cluster, by the cost model.

Predict which algorithm trains fastest on a cluster.

The input is the numbers of a cluster and of a training step; the output is tables, advice and a figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..algorithms import DiLoCo, StreamingDiLoCo
from ..bucket import DEFAULT_BUCKET_BYTES
from ..launch.cli import CommandError, count, positive
from ..planning.advise import (
    AS_FAST,
    attachment,
    best,
    best_of_replicas,
    best_of_shards,
    enough_flows,
    expression,
    kind_of,
    payload,
    steps_of_an_exchange,
)
from ..planning.costmodel import METHODS, Advice, Cluster, Job, Rates, TorchDDP, advise, advise_sharded, predict
from ..planning.models import MODELS, layers_of
from ..planning.sites import LEAST_WAITING, between_replicas, exposed_share, most_communication
from . import advise_simulated, figures
from .quantities import (
    bandwidth,
    duration,
    latency,
    layers,
    model_bytes,
    model_parameters,
    number,
    seconds,
    size_in_bytes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "predict which algorithm trains fastest on a cluster"

COLUMNS = {
    "algorithm": "a short name; the Python expressions follow the table",
    "once in": "the number of steps in which everything is averaged once",
    "step": "predicted time of a step; a mean, if not every step communicates",
    "speed-up": "of such a step over one with exact averages",
    "hidden": "the share of the communication that adds no time to the step, since it runs beside computation",
    "MB a rank": "megabytes that a rank sends in a step, to ranks of its own node too",
    "MB a node": "megabytes that a node sends to other nodes in a step",
}
"""The columns of the first table, with their meanings."""

GROUPS = (
    "gradients in every step",
    "weights in every step; may need more steps to the same loss",
    "weights now and then; the fewer steps communicate, the worse training may end",
)
"""The groups of the first table, in which the fastest is first; see `kind_of`."""


# Arguments -------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `advise`."""
    columns = [
        textwrap.fill(meaning, 79, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13)
        for name, meaning in COLUMNS.items()
    ]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["columns of the first table:", *columns])
    parser.add_argument("--nodes", type=positive, required=True, metavar="N")
    parser.add_argument("--ranks-per-node", type=positive, default=1, metavar="L")
    parser.add_argument("--bandwidth", type=bandwidth, required=True, help="of a node's link: 10gbit, 500mbit")
    parser.add_argument("--latency", type=latency, default=50e-6, help="between nodes: 50us (the default), 1ms")
    parser.add_argument(
        "--flow-bandwidth",
        type=bandwidth,
        default=math.inf,
        help="limit of one flow (TCP connection): 5gbit, 100mbit; by default that of the link",
    )
    parser.add_argument(
        "--flows", type=positive, default=1, metavar="N", help="flows between two ranks on different nodes (1)"
    )
    parser.add_argument("--intra-gbs", type=number, help="GB/s between ranks of a node (10; 200 on GPUs)")
    parser.add_argument(
        "--device", choices=("gpu", "cpu"), default="gpu", help="the device that ranks compute on (gpu)"
    )
    parser.add_argument(
        "--cores-per-rank",
        type=number,
        default=math.inf,
        metavar="C",
        help="cores that computation and communication of a rank share, on a CPU; unlimited by default",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--model", type=str.lower, choices=MODELS, help="a model whose layers are known")
    size.add_argument(
        "--parameters",
        type=model_parameters,
        metavar="N",
        help="of a model in float32 whose layers are alike: 124M, 1.5B",
    )
    size.add_argument("--model-bytes", type=model_bytes, help="of all its gradients: 553M, 1.2G, 512KiB")
    size.add_argument(
        "--layers",
        type=layers,
        metavar="LAYERS",
        help="its layers in float32, in the order of the forward pass, as COUNTxPARAMETERS:WORK, separated by "
        "commas: gpt2 is 39.4M:0,12x7.1M,1536:38.6M. The work of a layer, in any unit, decides when its gradient "
        "is complete; by default it is its number of parameters",
    )
    parser.add_argument("--step-time", type=seconds, help="of a step without communication: 1.2s, 300ms")
    for part in ("forward", "backward", "optimizer"):
        parser.add_argument(f"--{part}", type=seconds, help=f"of the {part} part of it, instead")
    parser.add_argument("--bucket-bytes", type=size_in_bytes, default=DEFAULT_BUCKET_BYTES)
    parser.add_argument(
        "--rates", type=Path, metavar="FILE", help="calibrated rates, from benchmarks.training.costmodel"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed-ups over bandwidths")
    parser.add_argument(
        "--sharded",
        action="store_true",
        help="compare how a sharded model (PyTorch's fully_shard, FSDP2) may communicate, instead of algorithms",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    advise_simulated.add_arguments(parser)


def read_rates(path: Path) -> Rates:
    """Rates from a JSON file: a dictionary of rates, or a record that has one under "rates".

    Raises:
        CommandError: The file cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text())
        return Rates.from_dict(data["rates"] if isinstance(data, dict) and "rates" in data else data)
    except (OSError, ValueError, TypeError, RecursionError) as exc:
        raise CommandError(f"--rates {path}: {exc}") from exc


def _inputs(options: argparse.Namespace) -> tuple[Job, Cluster, Rates]:
    parts = {part: getattr(options, part) for part in ("forward", "backward", "optimizer")}
    given = {f"{part}_s": value for part, value in parts.items() if value is not None}
    if (options.step_time is None) == (not given):
        raise CommandError("give --step-time, or --forward, --backward and --optimizer")
    if not given:  # a backward pass takes about twice as long as a forward pass
        given = {"forward_s": options.step_time / 3, "backward_s": options.step_time * 2 / 3}
    known = layers_of(*options.layers) if options.layers else MODELS.get(options.model, ())
    nbytes = sum(layer.nbytes for layer in known) or options.model_bytes or 4 * options.parameters
    job = Job(nbytes, **given, bucket_bytes=options.bucket_bytes, layers=known)
    gpu = options.device == "gpu"
    cluster = Cluster(
        options.nodes,
        options.ranks_per_node,
        options.bandwidth,
        options.latency,
        intra_gbs=options.intra_gbs if options.intra_gbs is not None else 200.0 if gpu else 10.0,
        cores_per_rank=options.cores_per_rank,
        transport="nccl" if gpu else "mpi",
        flows=options.flows,
        flow_bandwidth_gbit=options.flow_bandwidth,
    )
    rates = read_rates(options.rates) if options.rates else Rates.gpu() if gpu else Rates()
    return job, cluster, rates


def run(options: argparse.Namespace) -> int:
    """Print the advice; returns the exit code.

    Raises:
        CommandError: The arguments do not go together, or the figure cannot be drawn.
        ArrayError: An argument is out of range.
    """
    job, cluster, rates = _inputs(options)
    if options.sharded and (options.simulate or options.plot):
        flag = "--simulate" if options.simulate else "--plot"
        raise CommandError(f"{flag} knows no sharded models; leave --sharded out")
    with figures.figure_in(options.plot) if options.plot else nullcontext() as figure:
        lines, found = _answer(options, figure, job, cluster, rates)
    if options.plot:
        lines += ["", f"{options.plot} shows it."]
    if options.json:
        print(json.dumps({**_given(job, cluster, rates), **found}, indent=1))
    else:
        print(*lines, sep="\n")
    return 0


def _answer(
    options: argparse.Namespace, figure: Figure | None, job: Job, cluster: Cluster, rates: Rates
) -> tuple[list[str], dict[str, object]]:
    """The answer as lines and as data for JSON; draws it, too, if there is a figure."""
    if options.simulate:
        asked = advise_simulated.settings(options, cluster)
        rows = advise_simulated.simulate_all(job, cluster, rates, asked)
        if figure is not None:
            figures.plot_ranks(figure, job, rows)
        return advise_simulated.report(job, cluster, rows, asked), advise_simulated.record(rows, asked)
    advise_simulated.check_unused(options)
    if options.sharded:
        return report_sharded(job, cluster, rates), _sharded_record(job, cluster, rates)
    if figure is not None:
        figures.plot_bandwidths(figure, job, cluster, rates)
    return report(job, cluster, rates), _record(job, cluster, rates)


def report(job: Job, cluster: Cluster, rates: Rates) -> list[str]:
    """Tables and advice, as lines."""
    c = cluster
    rows = advise(job, c, rates)
    lines = [
        _heading(job, c),
        *_flows(job, c, rates),
        "",
        "{:<24}{:>7}{:>14}{:>10}{:>8}{:>11}{:>11}".format(*COLUMNS),
    ]
    exact = predict(METHODS["exact"], job, c, rates).step_s
    for kind, head in enumerate(GROUPS):
        group = [row for row in rows if kind_of(row.method) == kind]
        lines += [f"-- {head}"] * bool(group)
        for each in group:
            name, _, prediction = each
            lines.append(
                f"{name:<24}{steps_of_an_exchange(each, rows):>7,.0f}{duration(prediction.step_s):>14}"
                f"{_ratio(exact, prediction.step_s):>10}{prediction.hidden:>8.0%}"
                f"{prediction.wire_bytes / 1e6:>11,.1f}{prediction.node_bytes / 1e6:>11,.1f}"
            )
    lines += [
        "",
        *_advice(job, rows, exact),
        *_for_sites(job, c, rates),
        _limits(guessed=rates == Rates.gpu()),
        "",
        "In Python, after `from bagua_comm import *`:",
        *(
            f"  {name:<24}{expression(method)}"
            for name, method, _ in sorted(rows, key=lambda row: kind_of(row.method))
            if not isinstance(method, TorchDDP)
        ),
    ]
    return lines


def _heading(job: Job, cluster: Cluster) -> str:
    c = cluster
    nodes = f"{count(c.nodes, 'node')} of {count(c.ranks_per_node, 'rank')}"
    return (
        f"{job.model_bytes / 1e6:,.0f} MB, {duration(job.compute_s)} a step alone; {nodes}, "
        f"{c.bandwidth_gbit:g} Gbit/s, {duration(c.latency_s)}"
    )


def report_sharded(job: Job, cluster: Cluster, rates: Rates) -> list[str]:
    """The table and the advice for a sharded model, as lines."""
    rows = advise_sharded(job, cluster, rates)
    exact_s = next(row.prediction.step_s for row in rows if row.name == "exact")
    lines = [
        _heading(job, cluster),
        "",
        f"{'way':<24}{'step':>10}{'speed-up':>10}{'MB a rank':>12}{'MB a node':>12}{'state':>12}",
    ]
    for name, _, prediction, state_bytes in rows:
        sizes = (prediction.wire_bytes, prediction.node_bytes, state_bytes)
        lines.append(
            f"{name:<24}{duration(prediction.step_s):>10}{_ratio(exact_s, prediction.step_s):>10}"
            + "".join(f"{size / 1e6:>12,.1f}" for size in sizes)
        )
    lines += [
        "",
        "Speed-ups are over exact. State: MB of parameters, gradients and Adam's moments on a rank.",
        "",
    ]
    found = {"Shards over all ranks": best_of_shards(rows), "Shards inside nodes": best_of_replicas(rows)}
    for where, row in found.items():
        if row is not None:
            lines.append(f"{where}: {row.name}, {_ratio(exact_s, row.prediction.step_s)}.")
            lines += [f"  {line}" for line in attachment(row.method, cluster)]
    if (choice := between_replicas(job, cluster, rates)) is not None:
        sharded = next(row.method for row in rows if row.name == "exact-replicas")
        lines.append(f"Local steps between nodes; exchanges take {exposed_share(choice[1]):.1%} of the time:")
        lines += [f"  {line}" for line in attachment(sharded, cluster, choice[0])]
    lines += ["", "In Python, after fully_shard, with a mesh for replicas:"]
    attached = [row for row in rows if row.method.reduce is not None]
    lines += [f"  {row.name:<24}{attachment(row.method, cluster)[-1]}" for row in attached]
    return [*lines, "", _limits(guessed=rates == Rates.gpu())]


def _sharded_record(job: Job, cluster: Cluster, rates: Rates) -> dict[str, object]:
    """The report for a sharded model as plain data for JSON."""
    rows = advise_sharded(job, cluster, rates)
    replicas, choice = best_of_replicas(rows), between_replicas(job, cluster, rates)
    return {
        "ways": [
            {
                "name": name,
                "python": attachment(method, cluster),
                **dataclasses.asdict(prediction),
                "hidden": prediction.hidden,
                "state_bytes": state_bytes,
            }
            for name, method, prediction, state_bytes in rows
        ],
        "shards_over_all_ranks": best_of_shards(rows).name,
        "shards_inside_nodes": None if replicas is None else replicas.name,
        "local_steps_between_nodes": None if choice is None else expression(choice[0]),
    }


def _flows(job: Job, cluster: Cluster, rates: Rates) -> list[str]:
    """A line about flows, if they may limit the step."""
    c = cluster
    if c.flow_bandwidth_gbit >= c.bandwidth_gbit:
        return []
    asked = f"{count(c.flows, 'flow')} of {c.flow_bandwidth_gbit:g} Gbit/s between two ranks"
    if c.nodes == 1:
        return [f"{asked}: on one node there are no flows, so --links and the plugin for NCCL do nothing"]
    enough = enough_flows(job, c, rates)
    exact_s, faster_s = (
        predict(METHODS["exact"], job, dataclasses.replace(c, flows=n), rates).step_s for n in (c.flows, enough)
    )
    if enough <= c.flows:
        return [f"{asked}: more would gain nothing"]
    means = (
        "the plugin for NCCL, run --net bagua, pays" if c.transport == "nccl" else f"run --links {enough} pays"
    )
    return [
        f"{asked}: exact takes {duration(exact_s)} a step, and with {enough} flows {duration(faster_s)}: {means}"
    ]


def _for_sites(job: Job, cluster: Cluster, rates: Rates) -> list[str]:
    """A line about the algorithm that communicates most among those that hardly wait."""
    found = most_communication(job, cluster, rates)
    if found is None:
        return [f"Every algorithm for links between sites waits {LEAST_WAITING:.0%} of the time or more."]
    algorithm, prediction = found
    return [
        f"Waits less than {LEAST_WAITING:.0%} of the time, and communicates most: {expression(algorithm)}, "
        f"{exposed_share(prediction):.1%}."
    ]


def _advice(job: Job, rows: Sequence[Advice], exact_s: float) -> list[str]:
    """The advice about the algorithms in the table."""
    gradients, four_bits, weights, rarely = best(rows)
    times = _ratio(exact_s, gradients.prediction.step_s)
    lines = ["Speed-ups are over exact, per step.", ""]
    if gradients.name == "exact":
        lines.append(f"Gradients in every step: {expression(gradients.method)}; fewer bytes would gain nothing.")
    else:
        lines.append(f"Gradients in every step: {expression(gradients.method)}, {times}, about as many steps.")
    if four_bits is not None:
        lines.append(
            f"In four bits: {expression(four_bits.method)}, {_ratio(exact_s, four_bits.prediction.step_s)}; "
            "compare the loss on your own model first."
        )
    for when, row in (("in every step", weights), ("now and then", rarely)):
        if row is not None:
            steps = steps_of_an_exchange(row, rows)
            once = f"once in {steps:,.0f} steps, " if steps > 1 else ""
            gain = gradients.prediction.step_s / row.prediction.step_s
            lines.append(
                f"Weights {when}: {expression(row.method)}, {_ratio(exact_s, row.prediction.step_s)}, "
                f"{once}pays if it needs fewer than {gain:.2f} times as many steps."
            )
        else:
            other = "gradients" if weights is None else "weights in every step"
            faster = f"more than {100 * (AS_FAST - 1):.0f} % faster"
            lines.append(f"Weights {when}: none is {faster} than the best with {other}.")
    if rarely is not None:
        lines.append(
            "The fewer steps communicate, the worse training may end. Compare it on your own model first."
        )
    if rarely is not None and isinstance(rarely.method, (DiLoCo, StreamingDiLoCo)):
        begun = f"after(500, GradientAllReduce(), {expression(rarely.method)})"
        lines.append(f"DiLoCo is for models that have been trained for a while; begin exactly: {begun}.")
    return lines


def _limits(*, guessed: bool) -> str:
    return "Not known here: how many steps an algorithm needs to the same loss, slow ranks, other traffic" + (
        ".\nOf the rates of GPUs, those of codecs of eight and sixteen bits, sums and copies are of one H200, "
        "the others are guesses; --rates takes measured ones."
        if guessed
        else "."
    )


def _record(job: Job, cluster: Cluster, rates: Rates) -> dict[str, object]:
    """The report as plain data for JSON."""
    sites = most_communication(job, cluster, rates)
    return {
        "sites": None if sites is None else {"python": expression(sites[0]), **dataclasses.asdict(sites[1])},
        "enough_flows": enough_flows(job, cluster, rates),
        "algorithms": [_row(advice) for advice in advise(job, cluster, rates)],
    }


def _given(job: Job, cluster: Cluster, rates: Rates) -> dict[str, object]:
    """The input as plain data for JSON, with null for infinity."""
    return {
        "job": dataclasses.asdict(job),
        "cluster": {k: None if v == math.inf else v for k, v in dataclasses.asdict(cluster).items()},
        "rates": dataclasses.asdict(rates),
    }


def _row(advice: Advice) -> dict[str, object]:
    return {
        "name": advice.name,
        "algorithm": repr(advice.method),
        "python": None if isinstance(advice.method, TorchDDP) else expression(advice.method),
        "averages": payload(advice.method),
        **dataclasses.asdict(advice.prediction),
        "hidden": advice.prediction.hidden,
    }


def _ratio(exact: float, step: float) -> str:
    return f"{exact / step:.2f}x" if step else "-"
