"""Reading the file of a timeline, also where the clocks of the ranks differ."""

from __future__ import annotations

import gzip
import json
import re
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import BaguaError
from ..trace import Span, Value
from .chrome import FORMAT

_GZIP = b"\x1f\x8b"
"""The first bytes of a file that gzip has compressed."""


class TimelineError(BaguaError, ValueError):
    """A file is not a timeline of `Communicator.trace`."""


@dataclass
class RankTimeline:
    """The spans and numbers of a rank, by the name of their row; times in nanoseconds from the earliest one."""

    rows: dict[str, list[Span]] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        """The spans of all rows."""
        return [span for spans in self.rows.values() for span in spans]


@dataclass
class Timeline:
    """The timelines of all ranks."""

    ranks: dict[int, RankTimeline]
    notes: list[str] = field(default_factory=list)
    """The defects of the file, in sentences."""


def read_timeline(path: str | Path) -> Timeline:
    """Read what `Communicator.trace` has written.

    The file may be compressed by gzip. Where the clocks of ranks differ, times are corrected.

    Raises:
        TimelineError: The file cannot be read, or is no timeline; the message says what it is.
    """
    try:
        data = Path(path).read_bytes()
        whole = json.loads(gzip.decompress(data) if data.startswith(_GZIP) else data)
    except OSError as exc:
        raise TimelineError(f"{path}: {exc.strerror or exc}") from exc
    except (EOFError, zlib.error, ValueError, RecursionError) as exc:
        raise TimelineError(
            f"{path}: it is not JSON, or was cut off: {exc}; expected a timeline that Communicator.trace has "
            "written"
        ) from exc
    events = whole.get("traceEvents") if isinstance(whole, dict) else None
    if not isinstance(events, list):
        raise TimelineError(f'{path}: it has no list "traceEvents", which each Chrome trace has')
    about = whole.get("otherData")
    about = about if isinstance(about, dict) else {}
    notes: list[str] = []
    ranks = _ranks_of(events, notes)
    if {key: about.get(key) for key in FORMAT} != FORMAT:
        notes.append(
            f"The file is of another program or version, and this is written for version {FORMAT['version']}: "
            "parts may be misread; use the version of bagua_comm that wrote it."
        )
    if not ranks:
        raise TimelineError(
            f"{path}: none of its {len(events)} events belongs to a rank; expected a timeline that "
            "Communicator.trace has written, not one of another profiler"
        )
    size = about.get("ranks")
    if isinstance(size, int) and (missing := sorted(set(range(size)) - ranks.keys())):
        notes.append(f"The file has no events of some of its {size} ranks: {', '.join(map(str, missing))}.")
    timeline = Timeline(dict(sorted(ranks.items())), notes)
    correct_clocks(timeline)
    return timeline


def _ranks_of(events: Sequence[Any], notes: list[str]) -> dict[int, RankTimeline]:
    """Sort the events by rank and row; skip those that are damaged."""
    rank_of: dict[object, int] = {}
    name_of: dict[object, str] = {}
    ranks: dict[int, RankTimeline] = {}
    damaged = 0
    for event in events:
        try:
            kind, pid, args = event["ph"], event["pid"], event.get("args", {})
            if kind == "M":
                if event["name"] == "process_name" and (found := re.fullmatch(r"rank (\d+)", args["name"])):
                    rank_of[pid] = int(found[1])
                    ranks.setdefault(rank_of[pid], RankTimeline())
                elif event["name"] == "thread_name":
                    name_of[pid, event["tid"]] = str(args["name"])
            elif pid in rank_of:
                _add_event(event, ranks[rank_of[pid]], name_of)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            damaged += 1
    if damaged:
        notes.append(f"{damaged} events are damaged and left out.")
    return ranks


def _add_event(event: Mapping[str, Any], rank: RankTimeline, name_of: Mapping[object, str]) -> None:
    start_ns, args = round(1000 * event["ts"]), event.get("args", {})
    if event["ph"] == "X":
        row = name_of.get((event["pid"], event["tid"]), f"thread {event['tid']}")
        end_ns = start_ns + round(1000 * event["dur"])
        if end_ns < start_ns or not isinstance(args, dict):
            raise ValueError
        rank.rows.setdefault(row, []).append(Span(str(event["name"]), row, start_ns, end_ns, args))
    elif event["ph"] in ("C", "i"):
        rank.values.append(Value(str(event["name"]), start_ns, float(args["value"])))


# Clocks ------------------------------------------------------------------------------------------------------


def correct_clocks(timeline: Timeline) -> None:
    """Shift the times of ranks whose clocks differ from the clock of the first rank.

    All ranks are in an exchange at the same time. Where those of a rank never overlap with the same ones of the
    first rank, and always differ by about the same, its clock is wrong.
    """
    first, *others = timeline.ranks
    mine = _exchanges_of(timeline.ranks[first])
    for rank in others:
        shift_ns = _shift_between(mine, _exchanges_of(timeline.ranks[rank]))
        if shift_ns:
            timeline.ranks[rank] = _shifted(timeline.ranks[rank], -shift_ns)
            side = "ahead of" if shift_ns > 0 else "behind"
            timeline.notes.append(
                f"The clock of rank {rank} is {abs(shift_ns) / 1e6:.1f} ms {side} that of rank {first}; its "
                "times are corrected."
            )


def is_exchange(span: Span) -> bool:
    """Whether it is an engine's exchange of a bucket; a call of `Communicator.exchange` has the same name."""
    return span.name == "exchange" and "bucket" in span.args


def _exchanges_of(rank: RankTimeline) -> dict[tuple[str, str], Span]:
    """The exchanges of a rank, by step and bucket; of several with the same numbers the last."""
    return {
        (str(span.args.get("step")), str(span.args.get("bucket"))): span
        for span in rank.spans
        if is_exchange(span) and not span.thread.startswith("device: ")
    }


def _shift_between(mine: Mapping[tuple[str, str], Span], theirs: Mapping[tuple[str, str], Span]) -> int:
    """How much later their clock is, in nanoseconds; 0 if the clocks agree as far as exchanges show."""
    pairs = [(mine[key], theirs[key]) for key in mine.keys() & theirs.keys()]
    ahead = all(b.start_ns > a.end_ns for a, b in pairs)
    behind = all(a.start_ns > b.end_ns for a, b in pairs)
    if len(pairs) < LEAST_PAIRS or not (ahead or behind):
        return 0
    shifts = [b.end_ns - a.end_ns for a, b in pairs]
    middle = round(statistics.median(shifts))
    near = sum(abs(shift - middle) <= abs(middle) / 2 for shift in shifts)
    return middle if near > 0.9 * len(shifts) else 0


LEAST_PAIRS = 3
"""The number of exchanges of two ranks that say whether their clocks differ."""


def _shifted(rank: RankTimeline, by_ns: int) -> RankTimeline:
    rows = {
        name: [replace(span, start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns) for span in spans]
        for name, spans in rank.rows.items()
    }
    return RankTimeline(rows, [replace(value, time_ns=value.time_ns + by_ns) for value in rank.values])
