"""The message for ranks with different numbers of batches, the same in errors and in the diagnosis."""

from __future__ import annotations

from collections.abc import Sequence

CURE = "use `with ddp.join():` (PyTorch), or a sampler that gives all ranks as many"

NAMED = 8
"""The number of ranks that a text names."""


def fewer_batches(ended: int, steps: int, doing: str, waiting: Sequence[int], step: int) -> str:
    """Say that a rank had fewer batches than others.

    Args:
        ended: The rank with fewer batches.
        steps: The number of training steps that it made.
        doing: What it did then: "left".
        waiting: The ranks that wait for it.
        step: The number of the step in which they wait, from 1 on.

    >>> text, cure = fewer_batches(0, 5, "left", [1], 6).split("? ")
    >>> text
    'rank 0 made 5 steps and left; rank 1 waits in its 6th step: fewer batches'
    """
    plural, made = len(waiting) > 1, "1 step" if steps == 1 else f"{steps} steps"
    wait = f"{'wait' if plural else 'waits'} in {'their' if plural else 'its'} {ordinal(step)} step"
    return f"rank {ended} made {made} and {doing}; {named(waiting)} {wait}: fewer batches? {CURE}"


def ordinal(number: int) -> str:
    """A number as 1st, 2nd, 3rd, 4th.

    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21, 112)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '21st', '112th']
    """
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def named(numbers: Sequence[int]) -> str:
    """Ranks as text: "rank 1", "ranks 0, 2", of which the first ones are named."""
    text = ", ".join(map(str, numbers[:NAMED]))
    return f"{'ranks' if len(numbers) > 1 else 'rank'} {text}{more(numbers[NAMED:])}"


def more(rest: Sequence[object]) -> str:
    """The end of a list of which `rest` is not shown."""
    return f" and {len(rest)} more" if rest else ""
