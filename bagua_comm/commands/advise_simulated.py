"""`bagua advise --simulate`: steps and goodput of all algorithms, simulated on up to thousands of ranks."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ..errors import ArrayError, UnsupportedError
from ..launch.cli import CommandError, count, positive
from ..planning.advise import kind_of
from ..planning.costmodel import METHODS, Cluster, Job, Method, Rates, predict
from ..planning.costmodel.comparison import applies
from ..planning.simulator import Failures, Goodput, Simulation, Variation, goodput, simulate
from .quantities import duration

SIZES = (16, 64, 256, 1024, 4096)
"""The numbers of ranks that are simulated besides those of the cluster."""

_KINDS = {int: "an integer", float: "a number", str: "a word"}

S = TypeVar("S", Variation, Failures)


class Simulated(NamedTuple):
    """An algorithm on a number of ranks."""

    name: str
    cluster: Cluster
    simulation: Simulation
    predicted_s: float
    """The step by the cost model."""
    goodput: Goodput | None

    @property
    def samples_per_s(self) -> float:
        """Steps times ranks a second that count."""
        if self.goodput is not None:
            return self.goodput.samples_per_s
        return self.cluster.size / self.simulation.step_s if self.simulation.step_s else math.inf


class Settings(NamedTuple):
    """The simulated job."""

    methods: Mapping[str, Method]
    variation: Variation
    failures: Failures | None
    seed: int
    sizes: tuple[int, ...]


# Arguments -------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `advise --simulate`."""
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--simulate",
        action="store_true",
        help="simulate steps event by event, with the code that trains, on this cluster and on 16 to 4,096 ranks",
    )
    group.add_argument(
        "--variation",
        type=settings_of(Variation),
        metavar="NAME=VALUE,...",
        help="how much ranks and links differ: compute=0.05,rare=0.001,rare_factor=3,slow=0.01,links=0.05",
    )
    group.add_argument(
        "--failures",
        type=settings_of(Failures),
        metavar="NAME=VALUE,...",
        help="how often nodes die, and how training recovers: mtbf_hours=6300,recovery=elastic,spares=2",
    )
    group.add_argument("--algorithms", metavar="A,B", help="short names; all by default")
    group.add_argument("--most-ranks", type=positive, metavar="N", help="(4096)")
    group.add_argument("--seed", type=int, help="of what is drawn at random (0)")


def settings_of(kind: type[S]) -> Callable[[str], S]:
    """A parser of settings, such as "compute=0.1,rare=0.01"."""

    def parse(text: str) -> S:
        known: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(kind)}
        given: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if name not in known or not equals:
                wanted = ", ".join(f"{each}=..." for each in known)
                raise argparse.ArgumentTypeError(f"{part!r} is not a setting; expected {wanted}")
            try:
                given[name] = type(known[name])(value)
            except ValueError as exc:
                raise argparse.ArgumentTypeError(f"{part!r}: expected {_KINDS[type(known[name])]}") from exc
        try:
            return kind(**given)
        except ArrayError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return parse


def check_unused(options: argparse.Namespace) -> None:
    """Raise `CommandError` if an argument of the simulation was given without `--simulate`."""
    for name in ("variation", "failures", "algorithms", "most-ranks", "seed"):
        if getattr(options, name.replace("-", "_")) is not None:
            raise CommandError(f"--{name} is for a simulation; add --simulate")


def settings(options: argparse.Namespace, cluster: Cluster) -> Settings:
    """What these arguments ask for.

    Raises:
        CommandError: There is no such algorithm, or a number is out of range.
    """
    names = options.algorithms.split(",") if options.algorithms else list(METHODS)
    unknown = sorted(set(names) - METHODS.keys())
    if unknown:
        raise CommandError(f"--algorithms: there is no {unknown[0]!r}; expected some of {', '.join(METHODS)}")
    seed = 0 if options.seed is None else options.seed
    if not 0 <= seed < 2**63:
        raise CommandError(f"--seed is {seed}, expected an integer from 0 to below 2**63")
    k, most = cluster.ranks_per_node, SIZES[-1] if options.most_ranks is None else options.most_ranks
    sizes = sorted({cluster.size, *(n for n in SIZES if n <= most and n % k == 0 and n > k)})
    return Settings(
        {name: METHODS[name] for name in names},
        options.variation or Variation(),
        options.failures,
        seed,
        tuple(sizes),
    )


# Simulation ------------------------------------------------------------------------------------------------


def simulate_all(job: Job, cluster: Cluster, rates: Rates, asked: Settings) -> list[Simulated]:
    """Simulate each algorithm that applies, on each number of ranks.

    Raises:
        CommandError: None of the algorithms applies.
    """
    found = []
    for size in asked.sizes:
        grown = dataclasses.replace(cluster, nodes=size // cluster.ranks_per_node)
        text = f"simulating {count(len(asked.methods), 'algorithm')} on {size:,} ranks"
        print(text, file=sys.stderr, flush=True)
        for name, method in asked.methods.items():
            if not applies(method, job, grown):
                continue
            try:
                step = simulate(method, job, grown, rates, variation=asked.variation, seed=asked.seed)
            except (ArrayError, UnsupportedError) as exc:
                raise CommandError(f"{name} on {size} ranks: {exc}") from exc
            counts = None
            if asked.failures is not None:
                counts = goodput(step, method, job, grown, asked.failures, rates, seed=asked.seed)
            found.append(Simulated(name, grown, step, predict(method, job, grown, rates).step_s, counts))
    if not found:
        raise CommandError("no algorithm applies to this cluster and job")
    return found


def report(job: Job, cluster: Cluster, rows: Sequence[Simulated], asked: Settings) -> list[str]:
    """Tables, as lines."""
    here = [row for row in rows if row.cluster == cluster]
    here.sort(key=lambda row: (kind_of(asked.methods[row.name]), row.simulation.step_s))
    head = f"{'algorithm':<24}{'step':>10}{'95 % below':>12}{'cost model':>12}{'differs':>9}{'MB a node':>11}"
    lines = [
        f"Simulated, seed {asked.seed}: {job.model_bytes / 1e6:,.0f} MB, {duration(job.compute_s)} a step alone; "
        f"{cluster.nodes} x {cluster.ranks_per_node} ranks, {cluster.bandwidth_gbit:g} Gbit/s, "
        f"{duration(cluster.latency_s)}",
        "",
        head + (f"{'goodput':>9}" if asked.failures else ""),
    ]
    for row in here:
        step = row.simulation
        text = f"{row.name:<24}{duration(step.step_s):>10}{duration(step.longest_s):>12}"
        text += f"{duration(row.predicted_s):>12}{row.predicted_s / step.step_s - 1:>9.0%}" if step.step_s else ""
        text += f"{step.node_bytes / 1e6:>11,.1f}"
        lines.append(text + (f"{row.goodput.share:>9.1%}" if row.goodput else ""))
    lines += ["", *_by_size("Steps", rows, lambda row: duration(row.simulation.step_s))]
    if asked.failures is not None:
        lines += ["", *_by_size("Goodput", rows, lambda row: f"{row.goodput.share:.1%}" if row.goodput else "-")]
    lines += ["", "Goodput: the share of training that counts, beside one in which nothing fails."] * bool(
        asked.failures
    )
    return [*lines, "", "Simulated, not measured: see At scale in the documentation for how far it was checked."]


def _by_size(title: str, rows: Sequence[Simulated], cell: Callable[[Simulated], str]) -> list[str]:
    """A table with a column for each number of ranks."""
    sizes = sorted({row.cluster.size for row in rows})
    found = {(row.name, row.cluster.size): cell(row) for row in rows}
    names = dict.fromkeys(row.name for row in rows)
    lines = [f"{title + ' on ranks':<24}" + "".join(f"{size:>10,}" for size in sizes)]
    return lines + [
        f"{name:<24}" + "".join(f"{found.get((name, size), '-'):>10}" for size in sizes) for name in names
    ]


def record(rows: Sequence[Simulated], asked: Settings) -> dict[str, object]:
    """The simulation as plain data for JSON."""
    return {
        "variation": dataclasses.asdict(asked.variation),
        "failures": dataclasses.asdict(asked.failures) if asked.failures else None,
        "seed": asked.seed,
        "results": [
            {
                "algorithm": row.name,
                "ranks": row.cluster.size,
                "nodes": row.cluster.nodes,
                **row.simulation._asdict(),
                "costmodel_s": row.predicted_s,
                "goodput": row.goodput._asdict() if row.goodput else None,
            }
            for row in rows
        ],
    }
