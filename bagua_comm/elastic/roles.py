"""Roles of the processes, with the same result on every process.

trainer   a process that trains, as a rank of the communicator of training
spare     a process that stands by until it can replace a dead trainer
buddy     the rank that holds a snapshot of another rank's private state

`share` distributes the microbatches of a step over the ranks, by their times if they shift.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from numbers import Integral

from .. import topology
from ..comm import Communicator
from ..errors import ArrayError
from ..logs import log_on_root

_log = logging.getLogger(__name__)


def choose_trainers(alive: Sequence[int], before: Sequence[int], wanted: int) -> list[int]:
    """Choose the processes that train next; returns their numbers, by rank.

    Living trainers stay. If spares can replace all dead trainers, they take over their ranks, so that no rank
    changes. Otherwise the living trainers close ranks, and spares are appended.

    Args:
        alive: The numbers of all living processes.
        before: The numbers of the previous trainers, dead or alive, by rank; empty at the start.
        wanted: How many train, if enough are alive.

    >>> choose_trainers([0, 2, 3, 4], before=[0, 1, 2], wanted=3)
    [0, 3, 2]
    >>> choose_trainers([0, 2, 3], before=[0, 1, 2, 3], wanted=4)
    [0, 2, 3]
    """
    spares = [number for number in sorted(alive) if number not in before]
    stay = [number for number in before if number in alive]
    vacant = max(0, wanted - len(stay))
    if before and len(stay) + min(vacant, len(spares)) == len(before):
        return [number if number in alive else spares.pop(0) for number in before]
    return stay + spares[:vacant]


def buddies(hosts: Sequence[Hashable]) -> list[int]:
    """The buddy of every rank, on another host if there is one.

    The buddies of the ranks of a host are spread over the ranks of the next host. On a single host, the buddy is
    the next rank.

    Args:
        hosts: The host of every rank.

    >>> buddies(["a", "a", "b", "b"])
    [2, 3, 0, 1]
    >>> buddies(["a", "a", "a"])
    [1, 2, 0]
    """
    groups = list(topology.ranks_by(hosts).values())
    if len(groups) == 1:
        return [(rank + 1) % len(hosts) for rank in range(len(hosts))]
    found = [0] * len(hosts)
    for ranks, following in zip(groups, groups[1:] + groups[:1], strict=True):
        for position, rank in enumerate(ranks):
            found[rank] = following[position % len(following)]
    return found


def share(microbatches: int, comm: Communicator, *, shift: bool = False) -> range:
    """The numbers of this rank's microbatches, out of `microbatches` in all, numbered from 0.

    Each rank gets a contiguous range, as of `numpy.array_split`: the first ones may have one more. With the
    average `Reproducible(addends=microbatches)`, the mean of their gradients has the same bits on any number of
    ranks.

    With `shift`, a rank whose microbatches take longer for some time gets fewer of them, one at least, until they
    no longer do. The ranks decide by the rows that engines gather (see `Communicator.health`), and send nothing
    more. All ranks call it once for each step, after the step before has ended, with the same arguments. The
    latest call decides, also one without `shift`; of several engines on these ranks, the one made last decides.
    Set the weight of the step, `engine.weight = len(mine)`, or average by `Reproducible(addends=microbatches)`,
    so that all microbatches count equally.

    Args:
        microbatches: Their number on all ranks.
        comm: The ranks.
        shift: Whether ranks that are slow for long get fewer.

    Raises:
        ArrayError: There are fewer microbatches than ranks, so that a rank would have none. With `shift`,
            on all ranks: there is no engine on these ranks, its mean has neither weights nor addends, or ranks
            have called it with unlike arguments in earlier steps.

    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(3, lambda comm: list(share(8, comm)))
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    if not isinstance(microbatches, Integral) or microbatches < comm.size:
        raise ArrayError(
            f"share: microbatches is {microbatches!r}, expected an int of at least {comm.size}: one for each rank"
        )
    shares = comm.flight.health.shares(comm.group)
    if not shift:
        shares.reset()
        return topology.share(microbatches, comm.rank, comm.size)
    before, counts = shares.counts(microbatches), shares.shift(microbatches)
    if counts != before:
        log_on_root(_log, comm.rank, "microbatches are shifted: %s by rank, %s before", counts, before)
    first = sum(counts[: comm.rank])
    return range(first, first + counts[comm.rank])
