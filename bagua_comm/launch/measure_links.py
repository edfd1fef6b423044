"""`bagua run --links auto`: measures the best number of TCP connections between two ranks.

Before the program, mpirun starts short trials on its hosts, one for each number of links, since MPI reads the
number when it starts. In a trial the ranks average arrays, as training does. The result is the least number of
links that is almost as fast as the fastest. If one connection saturates the network, two trials are enough: with
one link, and with the most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from ..bootstrap import connect
from .cli import CommandError, count
from .hosts import Placement, Ranks, is_here, named_hosts, ranks_of
from .plan import Plan

NUMBERS = (1, 3, 5, 9, 17)
"""The numbers of links to try; see `tcp_links.odd`."""

AS_FAST = 1.08
"""Two times count as equal up to this ratio."""

MOST_HOSTS = 8
"""The most hosts of a trial."""

NBYTES = 8 << 20
"""The size of the array that the ranks of a trial average, in bytes."""

WARM_UP_S, MEASURED_S = 0.5, 1.5
"""The duration of the warm-up of a trial, since networks let bursts pass at first, and of the measurement."""

TRIAL = "bagua_comm.launch.measure_links"
"""The module that a rank of a trial runs: this one."""

TRIAL_S = 60.0
"""The time limit of a trial, with the start of its ranks."""


AUTO = "auto"
"""The value of `--links` that asks for a measurement."""

ENDS_S = 10.0
"""The time that mpirun has to end the ranks of a trial that took too long."""


def number_or_auto(text: str) -> int | str:
    """Parse the value of `--links`: a whole number from 1 on, or "auto"."""
    if text == AUTO:
        return text
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of links; expected e.g. 4, or auto")
    return int(text)


def choose(seconds: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """Return the best number of links, and the seconds of each trial.

    Args:
        seconds: Returns the time of a trial with a number of links; infinite if it fails.

    >>> choose({1: 0.42, 3: 0.12, 5: 0.11, 9: 0.11, 17: 0.11}.__getitem__)
    (5, {1: 0.42, 17: 0.11, 3: 0.12, 5: 0.11})
    """
    tried = {number: seconds(number) for number in (NUMBERS[0], NUMBERS[-1])}
    if tried[NUMBERS[0]] > AS_FAST * tried[NUMBERS[-1]]:
        for number in NUMBERS[1:-1]:
            tried[number] = seconds(number)
            if tried[number] <= AS_FAST * tried[NUMBERS[-1]]:
                break
    best = min(tried.values())
    return min(number for number, time_s in tried.items() if time_s <= AS_FAST * best), tried


def measure(
    options: argparse.Namespace, is_alone: bool, plan: Callable[[argparse.Namespace, Placement | None], Plan]
) -> int | None:
    """Return the best number of links for a job; None if they have no effect, since it runs on this host only.

    Args:
        options: The arguments of `run`.
        is_alone: Whether mpirun, without a list of hosts, starts ranks on this host only.
        plan: Returns the plan of a trial, from the arguments of `run` and the placement; with None, mpirun itself
            finds hosts.

    Raises:
        CommandError: No trial succeeds.
    """
    hosts = named_hosts(options)
    if all(is_here(host.name) for host in hosts) if hosts else is_alone:
        print("--links auto: on one host, ranks use shared memory, and links have no effect", file=sys.stderr)
        return None
    ranks, chosen = ranks_of(options, hosts).started, hosts[:MOST_HOSTS]
    room = sum(host.slots or -(-ranks // len(hosts)) for host in chosen)
    placement = Placement(Ranks(min(ranks, room)), chosen) if chosen else None
    failures: list[str] = []

    def seconds(number: int) -> float:
        try:
            return _trial(plan(_trial_options(options, number), placement))
        except CommandError as exc:
            failures.append(f"{count(number, 'link')}: {exc}")
            return float("inf")

    number, tried = choose(seconds)
    if min(tried.values()) == float("inf"):
        raise CommandError(f"--links auto: no trial succeeded; {failures[0]}")
    times = ", ".join(f"{links}: {time_s * 1e3:.0f} ms" for links, time_s in sorted(tried.items()))
    print(f"--links auto: {number}; {NBYTES >> 20} MiB averaged by links: {times}", file=sys.stderr)
    return number


def _trial_options(options: argparse.Namespace, links: int) -> argparse.Namespace:
    """The arguments of `run` for a trial: those of the job, with another program and no supervision."""
    trial = argparse.Namespace(**vars(options))
    trial.spares = trial.restarts = trial.min_ranks = trial.record = trial.write = None
    trial.ulfm, trial.links, trial.module, trial.script, trial.args = False, links, True, TRIAL, []
    return trial


def _trial(plan: Plan) -> float:
    """Run a trial; returns the seconds that it prints.

    Raises:
        CommandError: The trial fails, or does not end in time.
    """
    process = subprocess.Popen(
        plan.command,
        env={**os.environ, **plan.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)
        raise CommandError(f"the trial did not end within {TRIAL_S:g} s") from None
    finally:
        process.kill()
        process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        output = (err.strip() or out.strip() or "without output").splitlines()[-5:]
        raise CommandError(f"the trial ended with exit code {process.returncode}: {' / '.join(output)}")
    seconds: float = json.loads(lines[-1])["seconds"]
    return seconds


def main() -> None:
    """Run a rank of a trial. Rank 0 prints the time of an average.

    Collective.
    """
    with connect(timeout_s=TRIAL_S / 2, gpu="none", trace=False) as comm:
        x = np.ones(NBYTES // 4, np.float32)
        times: list[float] = []
        for limit_s in (WARM_UP_S, MEASURED_S):
            times, spent = [], 0.0
            while spent < limit_s:
                comm.barrier()
                start = time.perf_counter()
                comm.allreduce(x, out=x, op="avg")
                mine = np.array([time.perf_counter() - start])
                times.append(float(comm.allreduce(mine, op="max")[0]))
                spent += times[-1]
        if comm.rank == 0:
            print(json.dumps({"seconds": statistics.median(times)}), flush=True)


if __name__ == "__main__":
    main()
