"""How fast a model trains with one and with several TCP connections between two ranks, each held to a rate.

    python -m benchmarks.training.links                          # VGG16, ten minutes; as root
    python -m benchmarks.training.links --links 1,9 --model resnet50 --rounds 1

Four emulated hosts (see ../netlab/) have links of `--rate`, and every flow `--flow-bandwidth`. On them
`python -m bagua_comm run --links N` starts benchmarks.training, once for each number of links, and so on in turn
for several rounds; `auto` has `run` measure how many to take. Writes STEM.json and STEM.md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from .. import netlab
from ..bench import RESULTS
from ..bench.arguments import add_out_argument, at_least, comma_list, one_of
from ..bench.record import Record, write_json
from ..bench.report import machine_of, markdown_table, or_dash, write_report
from ..bench.timing import Spread
from .models import MODELS
from .run import ALONE, NAMES

LINKS = ("1", "3", "5", "9", "17", "auto")
TIMEOUT_S = 1800.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the record and the table."""
    options = parse_arguments(argv)
    runs: dict[str, list[tuple[Record, int]]] = {links: [] for links in options.links}
    try:
        with netlab.build(options.hosts, options.rate, options.flow_bandwidth) as lab:
            for links in options.links * options.rounds:
                runs[links].append(train(lab, links, options))
    except netlab.LabError as exc:
        print(f"links: {exc}", file=sys.stderr)
        return 1
    record = merged(runs, options)
    write_json(options.out.with_suffix(".json"), record)
    print(write_report(options.out, lambda _: markdown(record)))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--links", type=comma_list(one_of(LINKS, "number of links")), default=["1", "auto"])
    parser.add_argument("--model", choices=[*MODELS], default="vgg16")
    parser.add_argument(
        "--algorithms", type=comma_list(one_of(NAMES, "algorithm")), default=[ALONE, "exact", "bytegrad"]
    )
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--hosts", type=at_least(2), default=4)
    parser.add_argument("--rate", default="1gbit", help="rate of each host's link, as tc writes it")
    parser.add_argument("--flow-bandwidth", default="100mbit", help="rate of each flow")
    add_out_argument(parser, RESULTS / "links", "json", "md")
    return parser.parse_args(argv)


def train(lab: netlab.Lab, links: str, options: argparse.Namespace) -> tuple[Record, int]:
    """The record of a training with a number of links, and that number.

    Raises:
        subprocess.CalledProcessError: It fails.
        subprocess.TimeoutExpired: It takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record.json")
        variables = [part for pair in lab.variables().items() for part in ("--env", "=".join(pair))]
        program = ["-m", "benchmarks.training", "--model", options.model, "--json", str(path)]
        program += ["--algorithms", ",".join(options.algorithms)]
        program += ["--rounds", "1", "--steps", "1", "--warmup", "1"]
        command = lab.inside(0, *lab.run_command(), *variables, "--links", links, *program)
        done = subprocess.run(
            command, env=lab.environment(), stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            done.check_returncode()
        return json.loads(path.read_text()), chosen(links, done.stderr)


def chosen(links: str, said: str) -> int:
    """The number of links that `run` took, from its arguments and its output.

    >>> chosen("5", ""), chosen("auto", "--links auto: 9; 8 MiB averaged by links: 1: 355 ms, 9: 114 ms")
    (5, 9)
    """
    if links != "auto":
        return int(links)
    found = re.search(r"--links auto: (\d+);", said)
    if found is None:
        raise RuntimeError(f"run --links auto did not say how many links it took:\n{said}")
    return int(found[1])


def merged(runs: dict[str, list[tuple[Record, int]]], options: argparse.Namespace) -> Record:
    """One record of all runs: a result for each number of links and algorithm."""
    (first, _), *_ = next(iter(runs.values()))
    results = []
    for links, made in runs.items():
        for name in options.algorithms:
            rows = [row for record, _ in made for row in record["results"] if row["algorithm"] == name]
            seconds = [second for row in rows for second in row["seconds"]]
            results.append(
                {
                    "links": links,
                    "taken": [count for _, count in made],
                    "algorithm": name,
                    "settings": rows[0]["settings"],
                    "wire_bytes": rows[0]["wire_bytes"],
                    "seconds": seconds,
                    "step_s": asdict(Spread.of(np.array(seconds))),
                }
            )
    about = {key: value for key, value in vars(options).items() if key != "out"}
    return {**first, "benchmark": "links", "arguments": about, "results": results}


def markdown(record: Record) -> str:
    """The table."""
    about = record["arguments"]
    lines = [
        "# Training over several TCP connections between two ranks",
        "",
        f"{about['model']} on {about['hosts']} emulated hosts of one rank each; links of {about['rate']}, and "
        f"each flow {about['flow_bandwidth']}.",
        "Steps are the slowest rank's: median and quartiles over the rounds. Numbers of links took turns.",
        "",
        f"{machine_of(record)}.",
        "",
    ]
    titles = ["links", "taken", "algorithm", "step (s)", "quartiles (s)", "to one link", "MB sent a step"]
    return "\n".join([*lines, *markdown_table(titles, _cells(record["results"]), "lllrrrr")]) + "\n"


def _cells(results: Sequence[Record]) -> Iterator[list[str]]:
    with_one = {row["algorithm"]: row["step_s"]["median"] for row in results if row["links"] == "1"}
    for row in results:
        step, one = row["step_s"], with_one.get(row["algorithm"])
        yield [
            row["links"],
            ", ".join(map(str, row["taken"])),
            row["algorithm"],
            f"{step['median']:.3g}",
            f"{step['q1']:.3g} to {step['q3']:.3g}",
            or_dash(one and one / step["median"], "{:.2f}"),
            or_dash(row["wire_bytes"] and row["wire_bytes"] / 1e6, "{:,.1f}"),
        ]


if __name__ == "__main__":
    sys.exit(main())
