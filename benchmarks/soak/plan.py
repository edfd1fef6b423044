"""The disturbances, drawn from a seed: what happens, when, to whom, and for how long."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "pair", "all", "stop", "slow", "cut"]
"""SIGKILL of one process, of two at once, of all ranks; SIGSTOP of a process; a slow link; no link."""

WEIGHTS: dict[Kind, int] = {"kill": 52, "pair": 6, "all": 2, "stop": 14, "slow": 20, "cut": 6}
"""How often each happens, of 100 disturbances."""

RATES = ("2mbit", "5mbit", "20mbit")
"""Of a slow link. A step sends about 0.1 MB over it."""

OLDEST_SPARED = 0.9
"""The share of disturbances of one process that spare the oldest, so that some processes see many recoveries."""


@dataclass(frozen=True)
class Disturbance:
    """One disturbance.

    Args:
        kind: What happens.
        after_s: Seconds from the previous one.
        choices: A number from 0 to 1 for each victim.
        oldest_too: Whether the process that has been alive for longest may be hit.
        seconds: How long a process is stopped, or a link is slow or cut.
        rate: Of a slow link.
    """

    kind: Kind
    after_s: float
    choices: tuple[float, float]
    oldest_too: bool
    seconds: float
    rate: str


def disturbances(seed: int, every_s: float) -> Iterator[Disturbance]:
    """Disturbances without end, one every `every_s` seconds on average."""
    chance = random.Random(f"soak-{seed}")
    while True:
        (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        seconds = {"stop": chance.choice([0.5, 3.0, 40.0]), "slow": chance.uniform(5, 15), "cut": 20.0}
        yield Disturbance(
            kind,
            chance.uniform(0.5, 1.5) * every_s,
            (chance.random(), chance.random()),
            chance.random() > OLDEST_SPARED,
            seconds.get(kind, 0.0),
            chance.choice(RATES),
        )
