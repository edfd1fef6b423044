"""The ranks of a job as lines of text, for a terminal of any width."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from ..logs import megabytes
from .findings import duration, findings
from .status import OVER, SIGTERM, Status, is_running

Order: TypeAlias = Literal["rank", "slowest", "waiting"]

ORDERS: dict[Order, Callable[[Status], float]] = {
    "rank": lambda each: each.rank,
    "slowest": lambda each: -(each.own_s or 0.0),
    "waiting": lambda each: -max(each.waiting_s or 0.0, each.call_s),
}
"""How the ranks may be sorted."""

COLUMNS: dict[str, Callable[[Status], str]] = {
    "rank": lambda each: str(each.rank),
    "host": lambda each: each.host,
    "step": lambda each: "-" if each.step is None else str(each.step),
    "steps/s": lambda each: f"{1 / each.step_s:.3g}" if each.step_s else "-",
    "own": lambda each: _milliseconds(each.own_s),
    "waiting": lambda each: _milliseconds(each.waiting_s),
    "sent/s": lambda each: megabytes(each.sent_per_s),
    "memory": lambda each: megabytes(each.memory),
    "state": lambda each: state_text(each),
}
"""The text of a rank in each column. The last one is cut where there is no room."""

LEFT_OUT = ("host", "sent/s", "memory", "waiting", "own", "steps/s", "step")
"""The columns that are left out where there is no room, in this order."""

STATE_WIDTH = 22
"""The least width of the last column."""


def state_text(status: Status) -> str:
    """The state of a rank, with the call that it is in.

    >>> state_text(Status("job", 0, 2, "a", 12, call="barrier #4", call_s=7.0, state="in a call"))
    'in barrier #4 for 7 s'
    """
    texts: dict[str, str] = {
        "in a call": f"in {status.call} for {duration(status.call_s)}" if status.call_s >= 1 else "training",
        "training": f"in no call for {duration(status.last_s)}" if status.line else "training",
        "silent": f"silent for {duration(status.age_s)}",
        "failed": "ended by SIGTERM" if status.reason == SIGTERM else f"failed: {status.reason}",
    }
    return texts.get(status.state, status.state)


def size_of(ranks: Sequence[Status]) -> int:
    """The number of ranks of a job now: those that have died before others went on do not know it."""
    return max([each.size for each in ranks if each.state not in OVER] or [each.size for each in ranks])


def lines(ranks: Sequence[Status], width: int, order: Order = "rank", problems: Sequence[str] = ()) -> list[str]:
    """The job as a whole, a table, and what is wrong, in lines of at most `width` characters.

    Args:
        ranks: The ranks that are known.
        width: The width of the terminal.
        order: How they are sorted.
        problems: More lines for the end, beside `findings`.
    """
    rows = sorted(ranks, key=ORDERS[order])
    cells = {title: [title, *map(text, rows)] for title, text in COLUMNS.items()}
    widths = {title: max(map(len, texts)) for title, texts in cells.items()}
    for title in LEFT_OUT:
        if sum(widths.values()) - widths["state"] + STATE_WIDTH + 2 * len(widths) > width:
            del widths[title]
    found = []
    for row in range(len(rows) + 1):
        texts = [cells[title][row].rjust(wide) for title, wide in widths.items() if title != "state"]
        found.append("  ".join([*texts, cells["state"][row]])[:width])
    told = [*findings(ranks), *[f"rank {each.rank} warns: {each.warning}" for each in rows if each.warning]]
    told += [*problems, *([] if is_running(ranks) else ["this job has ended"])]
    wrapped = [line for text in told for line in textwrap.wrap(f"* {text}", width, subsequent_indent="  ")]
    return [*textwrap.wrap(_headline(ranks), width), "", *found, "", *wrapped]


def _headline(ranks: Sequence[Status]) -> str:
    """The job as a whole: its ranks, its step, and what it makes and sends in a second."""
    steps = [each.step for each in ranks if each.step is not None and each.state not in OVER]
    rates = [1 / each.step_s for each in ranks if each.step_s]
    size, hosts = size_of(ranks), len({each.host for each in ranks})
    text = f"{ranks[0].job}: {size} rank{'s' * (size > 1)} on {hosts} host{'s' * (hosts > 1)}"
    text += f", step {min(steps)}" if steps else ""
    text += f", {min(rates):.3g} steps/s" if rates else ""
    return f"{text}, {megabytes(sum(each.sent_per_s for each in ranks))} sent a second"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3g} ms"
