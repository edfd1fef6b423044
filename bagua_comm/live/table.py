"""The ranks of a job as lines of text, for a terminal of any width."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..logs import megabytes
from .findings import duration, findings, milliseconds
from .status import SIGTERM, Status

Order: TypeAlias = Literal["rank", "slowest", "waiting"]

ORDERS: Mapping[Order, Callable[[Status], object]] = {
    "rank": lambda each: each.rank,
    "slowest": lambda each: -(each.own_s or 0.0),
    "waiting": lambda each: -max(each.waiting_s or 0.0, each.call_s),
}
"""How the ranks may be sorted."""

LEAST_LAST = 22
"""The least width of the last column, which is cut where there is no room."""


@dataclass(frozen=True)
class Column:
    """A column: its title, the text of a rank, and how soon it is left out where there is no room: 0 is never."""

    title: str
    text: Callable[[Status], str]
    left_out: int = 0


COLUMNS = (
    Column("rank", lambda each: str(each.rank)),
    Column("host", lambda each: each.host, 7),
    Column("step", lambda each: "-" if each.step is None else str(each.step), 1),
    Column("steps/s", lambda each: f"{1 / each.step_s:.3g}" if each.step_s else "-", 2),
    Column("own", lambda each: "-" if each.own_s is None else milliseconds(each.own_s), 3),
    Column("waiting", lambda each: "-" if each.waiting_s is None else milliseconds(each.waiting_s), 4),
    Column("sent/s", lambda each: megabytes(each.sent_per_s), 6),
    Column("memory", lambda each: megabytes(each.memory), 5),
    Column("state", lambda each: state_text(each)),
    Column("warning", lambda each: each.warning, 8),
)


def state_text(status: Status) -> str:
    """The state of a rank, with the call that it is in.

    >>> state_text(Status("job", 0, 2, "a", "12 3 a", call="barrier #4", call_s=7.0, state="in a call"))
    'in barrier #4 for 7 s'
    """
    if status.state == "in a call":
        return f"in {status.call} for {duration(status.call_s)}" if status.call_s >= 1 else "training"
    if status.state == "silent":
        return f"silent for {duration(status.age_s)}"
    if status.state == "failed":
        return "ended by SIGTERM" if status.reason == SIGTERM else f"failed: {status.reason}"
    if status.state == "training" and status.line:
        return f"in no call for {duration(status.last_s)}" if status.last else "in no call"
    return status.state


def size_of(ranks: Sequence[Status]) -> int:
    """The number of ranks of a job now: those that have died before others went on do not know it."""
    return max([each.size for each in ranks if not each.is_over] or [each.size for each in ranks])


def headline(ranks: Sequence[Status]) -> str:
    """The job as a whole: its ranks, its step, and what it makes and sends in a second."""
    size, hosts = size_of(ranks), {each.host for each in ranks}
    steps = [each.step for each in ranks if each.step is not None and not each.is_over]
    rates = [1 / each.step_s for each in ranks if each.step_s]
    parts = [f"{ranks[0].job}: {size} rank{'s' * (size > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"]
    parts += [f"step {min(steps)}"] if steps else []
    parts += [f"{min(rates):.3g} steps/s"] if rates else []
    parts += [f"{megabytes(sent)}/s sent"] if (sent := sum(each.sent_per_s for each in ranks)) else []
    return ", ".join(parts)


def lines(ranks: Sequence[Status], width: int, order: Order = "rank", problems: Sequence[str] = ()) -> list[str]:
    """The headline, the table and the problems, in lines of at most `width` characters.

    Args:
        ranks: The ranks that are known.
        width: The width of the terminal.
        order: How they are sorted.
        problems: More lines for the end, beside what the statuses show themselves.
    """
    rows = sorted(ranks, key=ORDERS[order])  # type: ignore[arg-type]
    shown = [each for each in COLUMNS if each.title != "warning" or any(rank.warning for rank in ranks)]
    cells = {each.title: [each.title, *map(each.text, rows)] for each in shown}
    widths = {title: max(map(len, texts)) for title, texts in cells.items()}
    while _room(shown, widths, width) < 0 and (optional := [each for each in shown if each.left_out]):
        shown.remove(max(optional, key=lambda each: each.left_out))
    found = []
    for row in range(len(rows) + 1):
        parts = [_cell(each.title, cells[each.title][row], widths[each.title]) for each in shown]
        found.append("  ".join(parts).rstrip()[:width])
    told = [*findings(ranks), *problems]
    texts = [line for text in told for line in textwrap.wrap(f"* {text}", width, subsequent_indent="  ")]
    return [*textwrap.wrap(headline(ranks), width), "", *found, *([""] if texts else []), *texts]


def _room(shown: Sequence[Column], widths: Mapping[str, int], width: int) -> int:
    """The characters that remain beside the columns; the last one may be cut."""
    *others, last = (widths[each.title] for each in shown)
    return width - sum(others) - 2 * len(others) - min(last, LEAST_LAST)


def _cell(title: str, text: str, width: int) -> str:
    return text.ljust(width) if title in ("host", "state", "warning") else text.rjust(width)
