"""The report of `doctor`: as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ...launch.cli import count
from ..info import Facts
from .findings import Finding, World, ranks_text
from .measure import Pair

SHADES = "█▓▒░ "
"""From the best value of a table to the worst."""

MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}


def lines(world: World, found: Sequence[Finding], title: str) -> Iterator[str]:
    """Return the report as lines of text."""
    size, hosts = len(world.facts), world.hosts
    yield f"{title}: {count(size, 'rank')} on {count(len(hosts), 'host')}"
    for host, ranks in hosts.items():
        yield f"  {host}: {ranks_text(ranks)}" + ("" if world.is_mixed else f"; {_host_text(world.on(host))}")
    yield "  " + ", ".join(f"{name} {version}" for name, version in world.facts[0]["versions"].items())
    yield f"  {world.facts[0]['MPI'].get('library', 'no MPI')}"
    if world.pairs:
        yield ""
        yield from table(
            "latency, us", world.pairs, {pair: pair.latency_s * 1e6 for pair in world.pairs}, least=True
        )
        yield ""
        yield from table("bandwidth, GB/s", world.pairs, {pair: pair.bytes_per_s / 1e9 for pair in world.pairs})
    yield ""
    for finding in found:
        yield f"{MARKS[finding.level]:<8} {finding.what}"
        if finding.do:
            yield f"{'':<8} -> {finding.do}"
    counts = {level: sum(finding.level == level for finding in found) for level in ("problem", "warning")}
    yield ""
    yield ", ".join(count(number, level) for level, number in counts.items())


def _host_text(facts: Facts) -> str:
    memory = facts["shared memory"]
    space = (
        "no /dev/shm"
        if memory is None
        else f"/dev/shm {memory['free'] / 2**30:.1f} of {memory['total'] / 2**30:.1f} GiB"
    )
    networks = [
        f"{name} {each['address']}" + (f" {each['Mbit/s'] / 1000:g} Gbit/s" if each["Mbit/s"] else "")
        for name, each in facts["interfaces"].items()
    ]
    limits = [f"{name} {'unlimited' if limit is None else limit}" for name, limit in facts["limits"].items()]
    return "; ".join([f"{facts['cores of the host']} cores", space, *(networks or ["no network"]), *limits])


def table(title: str, pairs: Sequence[Pair], values: dict[Pair, float], *, least: bool = False) -> Iterator[str]:
    """Return a heat map: a number for each pair, with a shade that compares it with the best.

    Args:
        title: The quantity and its unit.
        pairs: The pairs; each is shown twice.
        values: The number of each pair.
        least: Whether small numbers are good.
    """
    ranks = sorted({rank for pair in pairs for rank in (pair.a, pair.b)})
    cells = {key: values[pair] for pair in pairs for key in ((pair.a, pair.b), (pair.b, pair.a))}
    best, worst = min(values.values()), max(values.values())
    if not least:
        best, worst = worst, best
    yield title
    yield " rank" + "".join(f"{rank:>8}" for rank in ranks)
    for row in ranks:
        texts = [f"{_cell(cells.get((row, column)), best, worst):>8}" for column in ranks]
        yield f"{row:>5}" + "".join(texts).rstrip()


def _cell(value: float | None, best: float, worst: float) -> str:
    if value is None:
        return ". "
    ratio = max(value, best) / min(value, best)  # a shade for each factor of 1.5
    shade = SHADES[min(next((n for n in range(4) if ratio < 1.5 ** (n + 1)), 4), len(SHADES) - 1)]
    return f"{value:.3g}{shade}"


def record(world: World, found: Sequence[Finding], exit_code: int) -> Facts:
    """Return the report as plain data for JSON."""
    return {
        "exit_code": exit_code,
        "findings": [dataclasses.asdict(finding) for finding in found],
        "hosts": world.hosts,
        "pairs": [dataclasses.asdict(pair) for pair in world.pairs],
        "clocks_ahead_s": world.clocks,
        "ranks": world.facts,
    }
