"""`bagua run --links auto`: how many TCP connections between two ranks carry most, measured where the job runs.

Before the program starts, mpirun starts short trials on its hosts, one for each number of links, since MPI reads
it when it starts. In a trial the ranks average arrays, as training does. The fewest links win that are almost as
fast as the fastest. Where one flow is as fast as the link, two trials show it: one link, and the most.
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
from .hosts import Host, Placement, Ranks, is_here, named_hosts, ranks_of
from .plan import Plan

NUMBERS = (1, 3, 5, 9, 17)
"""The numbers of links that are tried; see `links.odd`."""

AS_FAST = 1.08
"""Of two times, the longer counts as equally fast up to this ratio."""

MOST_HOSTS = 8
"""On how many of the named hosts trials run."""

NBYTES = 8 << 20
"""Bytes of the array that the ranks of a trial average."""

WARM_UP_S, MEASURED_S = 0.5, 1.5
"""How long a trial averages before it counts, since links let bursts pass at first, and while it counts."""

TRIAL = "bagua_comm.launch.measure_links"
"""The module that a rank of a trial runs: this one."""

TRIAL_S = 60.0
"""How long a trial may take, with the start of its ranks."""


AUTO = "auto"
"""What asks for a measurement, in place of a number."""

ENDS_S = 10.0
"""How long mpirun may take to end the ranks of a trial that took too long."""


def number_or_auto(text: str) -> int | str:
    """What `--links` takes: a whole number from 1 on, or "auto"."""
    if text == AUTO:
        return text
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of links; expected e.g. 4, or auto")
    return int(text)


def choose(seconds: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """The number of links to take, and the seconds of those that were tried.

    Args:
        seconds: The time of a trial with so many links; infinite if it fails.

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
    """The number of links for a job; None if they do nothing, since it runs on this host alone.

    Args:
        options: The arguments of `run`.
        is_alone: Whether mpirun, which was not told of hosts, starts ranks on this host alone.
        plan: What starts a trial with these arguments of `run`, in this place; without one, where mpirun itself
            finds hosts.

    Raises:
        CommandError: No trial succeeds.
    """
    hosts = named_hosts(options)
    if all(is_here(host.name) for host in hosts) if hosts else is_alone:
        print(
            "--links auto: one host, where ranks talk through shared memory and links do nothing", file=sys.stderr
        )
        return None
    placement = _placement(ranks_of(options, hosts).started, hosts)
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


def _placement(ranks: int, hosts: tuple[Host, ...]) -> Placement | None:
    """Where trials run: on the first of the named hosts."""
    if not hosts:
        return None
    chosen = hosts[:MOST_HOSTS]
    room = sum(host.slots or -(-ranks // len(hosts)) for host in chosen)
    return Placement(Ranks(min(ranks, room)), chosen)


def _trial_options(options: argparse.Namespace, links: int) -> argparse.Namespace:
    """The arguments of `run` for a trial: those of the job, but for the program, and nothing is supervised."""
    trial = argparse.Namespace(**vars(options))
    trial.spares = trial.restarts = trial.min_ranks = trial.record = trial.write = None
    trial.ulfm, trial.links, trial.module, trial.script, trial.args = False, links, True, TRIAL, []
    return trial


def _trial(plan: Plan) -> float:
    """The seconds that a trial prints.

    Raises:
        CommandError: It fails, or does not end in time.
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
        said = (err.strip() or out.strip() or "it said nothing").splitlines()[-5:]
        raise CommandError(f"the trial ended with exit code {process.returncode}: {' / '.join(said)}")
    seconds: float = json.loads(lines[-1])["seconds"]
    return seconds


def main() -> None:
    """A rank of a trial. Rank 0 prints how long an average takes.

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
