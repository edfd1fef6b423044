"""The cost of committing a state in every step: under `run`, on this machine or on emulated hosts.

    python -m bagua_comm run -n 2 --restarts 0 -m benchmarks.faults.commits --megabytes 100 --step-s 1

A step waits, as for a device that computes, and commits. The state is the same on all ranks; `--own-megabytes`
more differ, and go to the buddy too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bagua_comm import elastic

from ..bench import ROOT
from ..bench.arguments import at_least
from ..bench.timing import Spread
from ..netlab import build
from .leftovers import TrialFolder

SAYS = "commits: "


def main(argv: Sequence[str] | None = None) -> int:
    """Take the steps on one rank."""
    options = parse_arguments(argv)
    count = int(options.megabytes * 1e6 / 4)
    weights = np.arange(count, dtype=np.float32)
    own = np.zeros(int(options.own_megabytes * 1e6 / 4), np.float32)
    state = elastic.State(weights=weights, own=own, step=0)

    @elastic.run(state)
    def found(comm: Any) -> dict[str, Any]:
        took_ms = []
        while state.step < options.steps + options.warmup:
            time.sleep(options.step_s)
            weights[:: 1 << 10] += 1  # no two commits are the same
            own[:: 1 << 10] += comm.rank + 1
            state.step += 1
            comm.barrier()
            start = time.perf_counter()
            state.commit()
            took_ms.append((time.perf_counter() - start) * 1e3)
        slowest = np.max(comm.allgather_object(took_ms), axis=0)[options.warmup :]
        last = state.commits
        return {
            "rank": comm.rank,
            "ranks": comm.size,
            "ms": asdict(Spread.of(slowest)),
            "of_a_step": float(np.median(slowest)) / (options.step_s * 1e3),
            "bytes": last.nbytes,
            "sent_bytes": last.sent_bytes,
        }

    if found is not None and found["rank"] == 0:
        print(SAYS + json.dumps(found), flush=True)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--megabytes", type=float, default=100.0, help="of the state, the same on all ranks (100)"
    )
    parser.add_argument("--own-megabytes", type=float, default=0.0, help="that differ between ranks (0)")
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds of a step (1)")
    parser.add_argument("--steps", type=at_least(1), default=10)
    parser.add_argument("--warmup", type=at_least(0), default=2)
    return parser.parse_args(argv)


# As a benchmark ---------------------------------------------------------------------------------------------


def measured(hosts: int, rate: str, *arguments: str) -> dict[str, Any]:
    """The cost on emulated hosts of one rank each, or of two ranks on this machine if `hosts` is 1.

    Raises:
        LabError: This machine cannot emulate hosts.
    """
    program = ["--restarts", "0", "-m", "benchmarks.faults.commits", *arguments]
    with TrialFolder("commits") as folder:
        if hosts == 1:
            said = _output(
                folder, folder.inside([sys.executable, "-m", "bagua_comm", "run", "-n", "2", *program])
            )
        else:
            with build(hosts, rate) as lab:
                said = _output(folder, lab.inside(0, *lab.run_command(), *program))
    (line,) = [line for line in said.splitlines() if line.startswith(SAYS)]
    where = "one host" if hosts == 1 else f"{hosts} hosts at {rate}"
    return {"where": where, **json.loads(line.removeprefix(SAYS))}


def _output(folder: TrialFolder, command: list[str]) -> str:
    """Run a command and return its output.

    Raises:
        subprocess.CalledProcessError: It fails.
    """
    environment = {**folder.environment(), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return result.stdout


if __name__ == "__main__":
    sys.exit(main())
