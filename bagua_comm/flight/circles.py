"""Ranks that wait for each other in messages: a pure function of their open calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .batches import named
from .entries import Entry

_WAYS = (
    ("send", "dest", "send to", "use sendrecv or exchange"),
    ("recv", "source", "receive from", "one of them must send first; or use sendrecv or exchange"),
)
"""The call, the name of its peer, the verb, and the cure."""


def circles(
    calls: Mapping[int, Sequence[Entry]], groups: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Circles of ranks of which each sends to the next one, or receives from it, so that none can go on.

    Args:
        calls: The calls of each rank that have not ended, or have failed.
        groups: The members of each communicator, as ranks of the world.

    Returns:
        The communicator, the ranks and a text for each circle.

    >>> calls = {rank: [Entry("world", 0, False, "send", detail={"dest": 1 - rank})] for rank in (0, 1)}
    >>> list(circles(calls, {"world": (0, 1)}))
    [('world', (0, 1), 'ranks 0, 1 both send to each other: use sendrecv or exchange')]
    """
    yield from _apart(calls, groups)
    for name, way, does, cure in _WAYS:
        waits = {
            (entry.group, rank): (entry.group, groups[entry.group][entry.detail[way]])
            for rank, entries in calls.items()
            for entry in entries
            if entry.name.removesuffix("_object") == name
        }
        for start, following in waits.items():
            path = [start]
            while following in waits and following not in path:
                path.append(following)
                following = waits[following]
            if following == start == min(path):
                ranks = tuple(rank for _, rank in path)
                advice = "use sendrecv or exchange" if len(ranks) == 1 else cure
                if any(each.name == f"{name}_object" for each in calls[ranks[0]]):
                    advice = advice.replace("sendrecv or exchange", "a lane, or allgather_object")
                verb = f"both {does} each other" if len(ranks) == 2 else f"all {does} the next one, in a circle"
                if len(ranks) == 1:
                    verb = f"{does.replace(' ', 's ')} itself"
                yield start[0], ranks, f"{named(ranks)} {verb}: {advice}"


def _apart(
    calls: Mapping[int, Sequence[Entry]], groups: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Pairs of a rank that sends and one that receives from it, in different communicators or on other lanes."""
    ways = {name: way for name, way, *_ in _WAYS}
    ends: dict[str, list[tuple[int, int, str]]] = {name: [] for name in ways}
    for rank, entries in calls.items():
        for entry in entries[-1:]:  # an earlier one may be that of a lane, which receives ahead of time
            name = entry.name.removesuffix("_object")
            if name in ends:
                peer = groups[entry.group][entry.detail[ways[name]]]
                ends[name].append((rank, peer, entry.group))
    for rank, peer, group in ends["send"]:
        for other, source, received in ends["recv"]:
            if (other, source) == (peer, rank) and received != group:
                text = (
                    f"rank {rank} sends to rank {peer} in {group}, and rank {peer} receives from it in "
                    f"{received}; if this is one message, use the same communicator, or lane, on both ranks"
                )
                yield group, (rank, peer), text
