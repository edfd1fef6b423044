"""How soon a slow rank and a slow link are named, false alarms, and the cost of finding them.

    python -m benchmarks.health rank --runs 100 --json a.json
    python -m benchmarks.health link --runs 30 --json b.json
    python -m benchmarks.health quiet --steps 10000 --json c.json
    python -m benchmarks.health cost --json d.json
    python -m benchmarks.health --report benchmarks/results/health-*.json

`rank` trains on 2 to 4 ranks of this machine, in turn; one of them, chosen by the seed, needs 1.5 times as long
from a step on that is chosen by the seed. `link` trains on four emulated hosts (`benchmarks.netlab`); one of them
then sends at half its rate. `quiet` counts what is called slow though nothing is: other processes of the machine
make noise. `cost` compares steps with and without rows, in turn. Steps sleep in the place of computing, so that
ranks need no cores of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bagua_comm
from bagua_comm import Communicator, Engine, GradientAllReduce, Plan, Point, TensorSpec

from .bench import RESULTS
from .bench.arguments import add_json_argument, at_least
from .bench.record import begin_record, write_json
from .bench.report import markdown_table
from .netlab import build

SLOWED = 1.5
"""How many times as long a slowed rank needs, of its own time."""

WITHIN = 20
"""The number of steps within which it should be named."""

STEP_S = 0.04
"""The own time of a step."""

ELEMENTS = 2**17
"""Of each of the four tensors, float32: 2 MB a step."""

RATE, SLOW_RATE = "200mbit", "100mbit"
HOSTS = 4

MARK = "slow from here on"
"""A line of the program of `link`, at which its parent slows a link."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start trials, run in one, or write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trial", nargs="?", choices=[*TRIALS])
    parser.add_argument("--runs", type=at_least(1), default=100)
    parser.add_argument("--steps", type=at_least(100), default=10_000)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=at_least(0), default=0, help="of link: the seed of the first run")
    parser.add_argument("--report", nargs="+", type=Path, help="write results/health.md from these records")
    add_json_argument(parser)
    options = parser.parse_args(argv)
    if options.report:
        (RESULTS / "health.md").write_text(markdown([json.loads(path.read_text()) for path in options.report]))
        return 0
    if options.trial is None:
        parser.error("expected rank, link, quiet or cost, or --report")
    if options.inside:
        with bagua_comm.connect(gpu="none") as comm:
            for result in TRIALS[options.trial](comm, options):
                if comm.rank == 0:
                    print("RESULT", json.dumps(result), flush=True)
        return 0
    record = begin_record("health", options, comm=None)
    record["results"] = []
    for row in outside(options):
        print(row, flush=True)
        record["results"].append(row)
        if options.json:
            write_json(options.json, record)
    return 0


# Outside: starts the ranks -------------------------------------------------------------------------


def outside(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start the ranks of the trial; yield its results."""
    if options.trial == "link":
        for seed in range(options.first, options.first + options.runs):
            with build(HOSTS, RATE) as lab:
                host = random.Random(seed).randrange(HOSTS)
                command = lab.mpirun(["-m", "benchmarks.health", "link", "--inside", "--first", str(seed)])
                slow_down = partial(lab.limit, host, SLOW_RATE, "out")
                for result in results_of(command, lab.environment(), at_mark=slow_down):
                    yield {**result, "slowed": f"what node {host} (rank {host}) sends"}
        return
    sizes = (2, 3, 4) if options.trial == "rank" else (2,)
    for index, size in enumerate(sizes):
        runs = len(range(index, options.runs, len(sizes)))
        inside = ["-m", "benchmarks.health", options.trial, "--inside", "--runs", str(runs)]
        inside += ["--steps", str(options.steps), "--first", str(1000 * size)]
        yield from results_of([sys.executable, "-m", "bagua_comm", "run", "-n", str(size), *inside])


def results_of(
    command: Sequence[str], environment: dict[str, str] | None = None, at_mark: Callable[[], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Run a command; yield the results that it prints.

    Raises:
        RuntimeError: It has failed.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                yield json.loads(line.removeprefix("RESULT "))
            elif at_mark is not None and line.startswith(MARK):
                at_mark()
    if process.returncode:
        raise RuntimeError(f"{command} ended with exit code {process.returncode}")


# Inside: the ranks ---------------------------------------------------------------------------------


def train(
    comm: Communicator, steps: int, own_s: Callable[[int], float], *, rows: bool = True
) -> Iterator[tuple[int, float]]:
    """Train with steps of `own_s(step)` seconds; yield the step and its time. Collective."""
    specs = [TensorSpec(f"x{i}", (ELEMENTS,), "float32") for i in range(4)]
    plan = Plan.pack(specs, bucket_bytes=4 * ELEMENTS, alignment=32 * comm.size)
    with Engine(comm, GradientAllReduce(), plan, plan.allocate()) as engine:
        if not rows:
            engine.health.is_on = False
        for step in range(steps):
            began = time.perf_counter()
            engine.at(Point.FORWARD)
            for name in ("x0", "x1", "x2", "x3"):
                time.sleep(own_s(step) / 4)
                engine.ready(name)
            engine.at(Point.BACKWARD)
            engine.at(Point.STEP)
            yield step, time.perf_counter() - began


def slow_rank(comm: Communicator, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Name a slow rank, once for each seed. Collective."""
    for seed in range(options.first, options.first + options.runs):
        rng = random.Random(seed)
        slow, begin = rng.randrange(comm.size), rng.randrange(60, 80)

        def own_s(step: int, slow: int = slow, begin: int = begin) -> float:
            return STEP_S * (SLOWED if comm.rank == slow and step >= begin else 1)

        yield {
            "trial": "rank",
            "ranks": comm.size,
            "seed": seed,
            "slowed": f"rank {slow}",
            **named(comm, train(comm, begin + 2 * WITHIN, own_s), begin),
        }


def named(comm: Communicator, steps: Iterator[tuple[int, float]], begin: int) -> dict[str, Any]:
    """What was called slow: before `begin`, and after it, with the number of steps that this took."""
    before, after = set[str](), dict[str, int]()
    for step, _ in steps:
        for each in comm.health().slow:
            if step < begin:
                before.add(each.what)
            elif each.what not in before:
                after.setdefault(each.what, step - begin + 1)
    return {"before": sorted(before), "named": after}


def slow_link(comm: Communicator, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Name a slow link; the parent slows it at the mark. Collective."""
    begin = random.Random(options.first).randrange(60, 80)

    def own_s(step: int) -> float:
        if step == begin and comm.rank == 0:
            print(MARK, flush=True)
        return STEP_S

    found = named(comm, train(comm, begin + 2 * WITHIN, own_s), begin)
    yield {"trial": "link", "ranks": comm.size, "seed": options.first, **found}


def quiet(comm: Communicator, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train quietly; what is called slow is a false alarm, unless other processes explain it. Collective."""
    alarms: dict[str, str] = {}
    for _ in train(comm, options.steps, lambda step: STEP_S):
        for each in comm.health().slow:
            alarms.setdefault(f"{each.what}, step {each.since}", each.cause)
    yield {"trial": "quiet", "ranks": comm.size, "steps": options.steps, "alarms": alarms}


def cost(comm: Communicator, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare steps without and with rows, in turn. Collective."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for block in range(20):
        rows = block % 2 == 0
        times[rows] += [
            seconds for step, seconds in train(comm, 120, lambda step: STEP_S / 4, rows=rows) if step >= 20
        ]
    with_s, without_s = (
        statistics.fmean(sorted(times[rows])[: len(times[rows]) * 9 // 10]) for rows in (True, False)
    )
    yield {"trial": "cost", "ranks": comm.size, "with_s": with_s, "without_s": without_s}


TRIALS = {"rank": slow_rank, "link": slow_link, "quiet": quiet, "cost": cost}


# The report ----------------------------------------------------------------------------------------


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """The report of the records."""
    rows, results = [], [each for record in records for each in record["results"]]
    for trial, goal in (("rank", ">= 95 %"), ("link", ">= 95 %")):
        runs = [each for each in results if each["trial"] == trial]
        steps = [each["named"].get(each["slowed"], math.inf) for each in runs]
        if runs:
            share = sum(count <= WITHIN for count in steps) / len(runs)
            rows.append([f"a slow {trial} named within {WITHIN} steps", goal, f"{share:.0%} of {len(runs)} runs"])
            rows.append([f"steps until a slow {trial} is named", "", f"median {statistics.median(steps):g}"])
            wrong = sum(bool(each["before"] or each["named"].keys() - {each["slowed"]}) for each in runs)
            rows.append(["something else named in such a run", "", f"{wrong} of {len(runs)} runs"])
    for each in results:
        if each["trial"] == "quiet":
            text = ", ".join(f"{what} ({cause or 'no cause'})" for what, cause in each["alarms"].items())
            rows.append([f"named in {each['steps']} quiet steps", "at most 1", text or "nothing"])
        elif each["trial"] == "cost":
            more = each["with_s"] / each["without_s"] - 1
            rows.append([f"cost, of a step of {1e3 * each['without_s']:.1f} ms", "at most 0.5 %", f"{more:.2%}"])
    lines = ["# Health: slow ranks and links", "", *markdown_table(["what", "goal", "seen"], rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
