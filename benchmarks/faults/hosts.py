"""Trainings on emulated hosts, one of which dies or has a bad link: `run --restarts` starts them again.

A host dies in one of two ways. All of its processes are killed and its memory is lost; or its link goes down,
and its processes live on, and reach nobody. A link may also be bad for a while: what the host sends or is sent
comes at one byte a millisecond, or is lost. In a split, half of the hosts do not reach the others for a while.
`run` starts processes by another way than these links, except where hosts are cut off. The first host, where
`run` was called, stays.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from ..netlab import Direction, Lab, build
from .leftovers import TrialFolder
from .plans import CASES, STEPS, Blow, LinkFault, Phase, Trial, draw_numpy_case
from .trial import Seen, run_trial, training_of

HOSTS, RATE = 3, "1gbit"

HALVES = 4
"""Hosts of a trial in which half of them are cut off."""

BYTE_A_MS = "8kbit"

BAD_S = 12.0
"""How long a link is bad: four times the timeout of the trials."""

SPLIT_S = 8.0
"""How long hosts are split: longer than `run` waits for them, and shorter than it trains without them."""

DIRECTIONS: dict[LinkFault, Direction] = {
    "slow sender": "out",
    "slow reader": "in",
    "half-open, out": "out",
    "half-open, in": "in",
}
"""The direction in which a link is bad, as its host sees it."""


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


def bad_links(count: int, seed: int) -> Iterator[Trial]:
    """Trials with each kind of a bad link, `count` times each."""
    for number in range(count):
        for fault in get_args(LinkFault):
            name = f"{fault.replace(', ', '-').replace(' ', '-')}-{seed}-{number}"
            chance = random.Random(name)
            step, delay_s = chance.randrange(2, STEPS - 10), chance.uniform(0, 0.02)
            ranks, seconds = (HALVES, SPLIT_S) if fault == "split brain" else (HOSTS, BAD_S)
            blow = Blow(fault, step, delay_s, "host", (chance.random(),), means="link", seconds=seconds)
            case = draw_numpy_case(chance)
            yield Trial(name, "host", case, 0, 1, STEPS, 1, (blow,), timeout_s=3.0, ranks=ranks, fault=fault)


def run_on_hosts(trial: Trial, data: Path) -> Seen:
    """Run a trial on hosts of its own.

    Raises:
        LabError: This machine cannot emulate hosts.
    """
    with build(trial.ranks, RATE) as lab:

        def command(trial: Trial, folder: TrialFolder, data: Path) -> list[str]:
            folder.own_memory = False  # each host has its own
            run = [*lab.run_command(), "--restarts", "9", *trial.flags(), "--env", "TMPDIR"]
            return lab.inside(0, *run, *training_of(trial, folder, data))

        def fail(blow: Blow, seen: Seen) -> list[int]:
            host = 1 + int(blow.choices[0] * (lab.hosts - 1))
            bad = [host] if blow.phase != "split brain" else _half_with(host, lab.hosts)
            if blow.phase == "dead host":
                ended.extend(lab.fail(host))
            elif blow.phase == "split brain":
                lab.split(bad)
            else:
                _break_link(lab, host, blow.phase)
            if blow.means == "link":
                mend = lab.mend if blow.phase == "split brain" else lambda host: lab.limit(host, RATE)
                timers.extend(threading.Timer(blow.seconds, mend, [each]) for each in bad)
                for timer in timers:
                    timer.start()
            return [
                event.pid for event in seen.of("hello") if event.facts["host"] in {f"h{each}" for each in bad}
            ]

        ended: list[int] = []
        timers: list[threading.Timer] = []
        try:
            seen = run_trial(trial, data, command, fail)
        finally:
            for timer in timers:
                timer.cancel()
                timer.join()
        # Hosts share the folder of temporary files; those that carry the number of a process are its own.
        seen.left = [path for path in seen.left if not path.endswith(tuple(f".{pid}" for pid in ended))]
        seen.left += left_on(lab)
        return seen


def _half_with(host: int, hosts: int) -> list[int]:
    """Half of the hosts, with this one, without the first."""
    others = [each for each in range(1, hosts) if each != host]
    return sorted([host, *others[: hosts // 2 - 1]])


def _break_link(lab: Lab, host: int, phase: Phase) -> None:
    if phase == "cut host":
        lab.cut(host)
    elif phase in ("slow sender", "slow reader"):
        lab.limit(host, BYTE_A_MS, DIRECTIONS[phase])
    elif phase in ("half-open, out", "half-open, in"):
        lab.lose(host, DIRECTIONS[phase])


def left_on(lab: Lab) -> list[str]:
    """Files in memory on the hosts that are alive."""
    dead = {path.name.removeprefix("dead-") for path in lab.memory.glob("dead-*")}
    hosts = [f"h{i}" for i in range(lab.hosts) if f"h{i}" not in dead]
    return [f"/dev/shm/{path.name} on {host}" for host in hosts for path in (lab.memory / host).iterdir()]
