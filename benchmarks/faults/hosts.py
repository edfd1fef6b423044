"""Trainings on emulated hosts, one of which dies: `run --restarts` starts them again on the others.

A host dies in one of two ways. All of its processes are killed and its memory is lost; or its link goes down,
and its processes live on, and reach nobody. The first host, where `run` was called, stays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from ..netlab import Lab, build
from .leftovers import TrialFolder
from .plans import CASES, STEPS, Blow, Trial
from .trial import Seen, run_trial, training_of

HOSTS, RATE = 3, "1gbit"


def deaths(count: int, seed: int) -> Iterator[Trial]:
    """Trials with a dead host."""
    for number in range(count):
        name = f"host-{seed}-{number}"
        chance = random.Random(name)
        blow = Blow(
            chance.choice(["dead host", "cut host"]),
            chance.randrange(2, STEPS - 10),
            chance.uniform(0, 0.02),
            "host",
            (chance.random(),),
        )
        case = CASES[number % len(CASES)]
        yield Trial(name, "host", case, 0, 1, STEPS, 1, (blow,), timeout_s=3.0, ranks=HOSTS)


def run_on_hosts(trial: Trial, data: Path) -> Seen:
    """Run a trial on hosts of its own.

    Raises:
        LabError: This machine cannot emulate hosts.
    """
    with build(HOSTS, RATE) as lab:

        def command(trial: Trial, folder: TrialFolder, data: Path) -> list[str]:
            folder.own_memory = False  # each host has its own
            run = [*lab.run_command(), "--restarts", "2", *trial.flags(), "--env", "TMPDIR"]
            return lab.inside(0, *run, *training_of(trial, folder, data))

        def fail(blow: Blow, seen: Seen) -> list[int]:
            host = 1 + int(blow.choices[0] * (HOSTS - 1))
            if blow.phase == "dead host":
                ended.extend(lab.fail(host))
            else:
                lab.cut(host)
            return [event.pid for event in seen.of("hello") if event.facts["host"] == f"h{host}"]

        ended: list[int] = []
        seen = run_trial(trial, data, command, fail)
        # Hosts share the folder of temporary files; those that carry the number of a process are its own.
        seen.left = [path for path in seen.left if not path.endswith(tuple(f".{pid}" for pid in ended))]
        seen.left += left_on(lab)
        return seen


def left_on(lab: Lab) -> list[str]:
    """Files in memory on the hosts that are alive."""
    dead = {path.name.removeprefix("dead-") for path in lab.memory.glob("dead-*")}
    hosts = [f"h{i}" for i in range(lab.hosts) if f"h{i}" not in dead]
    return [f"/dev/shm/{path.name} on {host}" for host in hosts for path in (lab.memory / host).iterdir()]
