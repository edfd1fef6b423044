"""A page with the timeline and its summary, to look at in a browser without a network."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from ..trace import Span
from .reading import Timeline
from .summary import Summary
from .text import tables

TEMPLATE = Path(__file__).with_name("page.html")
"""The page, with `{{title}}`, `{{facts}}`, `{{data}}` and the like to fill in."""

MOST_SPANS = 200_000
"""A page with more would be slow to zoom in: it has the latest spans."""


MOST_RANKS = 64
"""A time line with more would be too high for a browser to draw."""


def make_page(timeline: Timeline, summary: Summary, advice: Sequence[str], *, title: str) -> str:
    """Return a page of HTML, complete in itself."""
    notes = list(timeline.notes)
    ranks = _drawn_ranks(list(timeline.ranks), summary.slowest)
    if len(ranks) < len(timeline.ranks):
        notes.append(f"The page draws {len(ranks)} of {len(timeline.ranks)} ranks; the tables are of all.")
    spans = {rank: timeline.ranks[rank].spans for rank in ranks}
    count = sum(map(len, spans.values()))
    if count > MOST_SPANS:
        start_ns = sorted(span.start_ns for each in spans.values() for span in each)[-MOST_SPANS]
        spans = {rank: [span for span in each if span.start_ns >= start_ns] for rank, each in spans.items()}
        notes.append(f"The page draws the last {MOST_SPANS} of {count} spans; the tables are of all.")
    if summary.without_steps:
        notes.append(f"No step ends in the timeline of ranks {', '.join(map(str, summary.without_steps))}.")
    slow = f"rank {summary.slowest}" if summary.slow else "none"
    filled = {
        "title": html.escape(title),
        "facts": _facts(summary),
        "notes": _list(notes, "notes"),
        "advice": _list(advice, "advice"),
        "tables": "".join(
            f"<h2>{html.escape(name)}</h2><div class=wide>{_table(rows, slow)}</div>"
            for name, rows in tables(summary).items()
        )
        or "<p>No steps.</p>",
        "data": _embedded(_data(timeline, spans, summary)),
    }
    return re.sub(r"{{(\w+)}}", lambda found: filled[found[1]], TEMPLATE.read_text(encoding="utf-8"))


def _drawn_ranks(ranks: list[int], slowest: int | None) -> list[int]:
    """The first ranks, and the slowest one."""
    first = ranks[:MOST_RANKS]
    return first if slowest is None or slowest in first else [*first[:-1], slowest]


def _facts(summary: Summary) -> str:
    """The numbers at the top."""
    mean = summary.mean
    if not mean:
        return ""
    facts = [
        ("a step", f"{1e3 * mean['step_s']:.3g} ms"),
        ("of it waiting", f"{100 * mean['waiting_s'] / mean['step_s']:.0f} %"),
        ("of communication hidden", f"{100 * mean['hidden']:.0f} %"),
        ("sent by a rank in a step", f"{mean['wire_bytes'] / 1e6:.3g} MB"),
        ("ranks", str(len(summary.ranks))),
    ]
    if summary.slow:
        facts.append(("is slow", f"rank {summary.slowest}"))
    return "".join(
        f"<div class=fact><b>{html.escape(number)}</b><span>{html.escape(name)}</span></div>"
        for name, number in facts
    )


def _list(texts: Sequence[str], kind: str) -> str:
    marked = [re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text)) for text in texts]
    items = "".join(f"<li>{text}</li>" for text in marked)
    return f"<ul class={kind}>{items}</ul>" if items else ""


def _table(rows: Sequence[Sequence[str]], slow: str) -> str:
    head, *body = [[html.escape(text) for text in row] for row in rows]
    lines = ["<table><thead><tr>" + "".join(f"<th>{text}</th>" for text in head) + "</tr></thead><tbody>"]
    for first, *rest in body:
        mark = " class=slow" if first == slow else ""
        lines.append(f"<tr{mark}><th>{first}</th>" + "".join(f"<td>{text}</td>" for text in rest) + "</tr>")
    return "".join([*lines, "</tbody></table>"])


def _data(timeline: Timeline, spans: dict[int, list[Span]], summary: Summary) -> dict[str, object]:
    """The data of the page; a span is [its name's number, start in us, duration in us, its arguments]."""
    names: dict[str, int] = {}
    rows = []
    for rank, each in spans.items():
        by_row: dict[str, list[list[object]]] = {}
        for span in sorted(each, key=lambda span: (span.start_ns, -span.end_ns)):
            number = names.setdefault(span.name, len(names))
            drawn = [number, span.start_ns / 1e3, (span.end_ns - span.start_ns) / 1e3, span.args]
            by_row.setdefault(span.thread, []).append(drawn)
        rows += [{"rank": rank, "name": name, "spans": drawn} for name, drawn in by_row.items()]
    values: dict[str, dict[int, list[list[float]]]] = {}
    for rank in spans:
        for value in timeline.ranks[rank].values:
            if math.isfinite(value.number):
                points = values.setdefault(value.name, {}).setdefault(rank, [])
                points.append([value.time_ns / 1e9, value.number])
    steps = [
        {"rank": each.rank, "ends": each.step_ends_s, "waits": each.step_waits_s}
        for each in summary.ranks
        if each.rank in spans
    ]
    return {"names": list(names), "rows": rows, "values": values, "steps": steps}


def _embedded(data: dict[str, object]) -> str:
    """JSON that may stand in an element `script`, whatever the names and arguments of spans are."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
