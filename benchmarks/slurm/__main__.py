"""Trials of a real Slurm, one after the other: what was run, what should come out, and what did.

    python -m benchmarks.slurm --json benchmarks/results/slurm.json
    python -m benchmarks.slurm --only scancel
    python -m benchmarks.slurm --mpich ~/mpich/bin/python

Slurm runs here, with two emulated nodes (`cluster`); it needs root. MPICH is tried too if the Python of an
environment with the packages mpich and mpi4py is given. The exit code is the number of trials that came out
otherwise.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench.record import begin_record, header_lines, write_json
from .cluster import start
from .trials import OF_MPICH, TRIALS, run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials; returns how many came out otherwise."""
    options = parse_arguments(argv)
    record = begin_record("slurm", options, packages=("mpi4py", "openmpi"))
    record["arguments"]["mpich"] = options.mpich is not None
    record["versions"]["slurm"] = subprocess.check_output(["slurmctld", "-V"], text=True).split()[-1]
    print(*header_lines(record), sep="\n")
    trials = [*((trial, sys.executable) for trial in TRIALS)]
    trials += [(trial, options.mpich) for trial in OF_MPICH if options.mpich]
    record["results"] = []
    with start() as cluster:
        for trial, python in trials:
            if re.search(options.only, trial.name):
                record["results"].append(result := run(cluster, trial, python))
                print(f"{result['result']:>8} {result['seconds']:6.1f} s  {trial.name}", flush=True)
                if result["result"] != "equal":
                    print(*result["seen"], result["faults"], sep="\n")
    if options.json:
        write_json(options.json, record)
    return sum(result["result"] != "equal" or bool(result["faults"]) for result in record["results"])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="the trials with such a name")
    parser.add_argument("--mpich", metavar="PYTHON", help="the Python of an environment with MPICH")
    parser.add_argument("--json", type=Path, help="write a record to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
