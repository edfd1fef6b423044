"""Diagnosis of a failure in words: a pure function of the records of all ranks.

The ranks of a communicator make the same collective calls in the same order, so call number n of one rank belongs
to call number n of every other. The first number at which calls differ, or at which a rank is missing, is the
cause; later problems follow from it. Findings are in the order of their certainty: calls that differ, ranks that
died, ranks that left or had fewer batches, ranks that wait for each other in different communicators, missing
ranks, and late ranks.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from .batches import fewer_batches, more, named
from .circles import circles
from .entries import LEFT_WELL, Entry, RankRecord, Signature, differences, read_folder, share_counts
from .recorder import FlightRecorder
from .stacks import users_line

Kind: TypeAlias = Literal[
    "skipped", "swapped", "different", "unlike", "died", "uneven", "left", "crossed", "behind", "slow"
]
"""skipped: a rank omitted a call. swapped: it made two calls in the other order. different: it made another call.
unlike: sizes, dtypes or arguments differ. died, left: a rank has ended. uneven: it made fewer training steps.
crossed: ranks wait for each other, in different communicators or in messages. behind: a rank did not make a call.
slow: it made a call late, or its training steps took longer than those of others."""

LATE_SHARE = 0.5
LATE_S = 0.5
"""A rank is late if all others waited at least this long, and this part of the longest wait, for it."""

_RECEIVED_BY = {"send": "recv", "send_object": "recv_object"}
"""The call that receives what another one sends."""

SHOWN_RANKS = 8
"""The number of ranks that a short text describes."""

AROUND = 8
"""The number of common calls from which the offset of two ranks' clocks is estimated."""


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        kind: The kind of problem.
        ranks: The ranks concerned, as ranks of the world.
        text: The description.
        group, number: The communicator and the number of the collective call; 0 if unknown.
    """

    kind: Kind
    ranks: tuple[int, ...]
    text: str
    group: str = ""
    number: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """The problems found, and the state of each rank.

    Attributes:
        findings: The problems, the likeliest cause first.
        ranks: A line for each rank of the world.
        lines: The line of the user's program in which each rank was, by rank; without those that are not known.
        short: `ranks`, without the arguments of calls.
        stacks: The Python stacks of each rank, as lines of text, by rank.
    """

    findings: tuple[Finding, ...]
    ranks: tuple[str, ...]
    lines: Mapping[int, str] = field(default_factory=dict)
    short: tuple[str, ...] = ()
    stacks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        failed = any(": failed in " in text for text in self.ranks)
        none = "No cause of the failed calls was found." if failed else "Nothing wrong was found."
        found = [f"* {finding.text}" for finding in self.findings] or [none]
        return "\n".join([*found, "", *self._with_lines(self.ranks)])

    def brief(self) -> str:
        """The likeliest cause, and the state of the first ranks, without the arguments of calls."""
        found = [f"* {finding.text}" for finding in self.findings[:1]]
        hidden = [f"and {len(self.ranks) - SHOWN_RANKS} more ranks"] if len(self.ranks) > SHOWN_RANKS else []
        return "\n".join([*found, *self._with_lines(self.short[:SHOWN_RANKS]), *hidden])

    def with_stacks(self) -> str:
        """The diagnosis, and the Python stacks of all ranks that have them in their records."""
        parts = [str(self)]
        parts += ["\n".join([f"rank {rank}:", *lines]) for rank, lines in self.stacks.items()]
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, object]:
        """The diagnosis for JSON."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "ranks": list(self.ranks),
            "lines": {str(rank): line for rank, line in self.lines.items()},
            "stacks": {str(rank): list(lines) for rank, lines in self.stacks.items()},
        }

    def _with_lines(self, ranks: Sequence[str]) -> Iterator[str]:
        for rank, text in enumerate(ranks):
            yield text
            if rank in self.lines:
                yield f"  at {self.lines[rank]}"


def diagnose(records: Sequence[RankRecord]) -> Diagnosis:
    """Explain the records of the ranks that have one.

    >>> calls = [Entry("world", 1, True, "barrier", start_ns=0, end_ns=None)]
    >>> def record(rank, entries):
    ...     return RankRecord("job", rank, 2, "host", 1, 10**9, {"world": (0, 1)}, tuple(entries))
    >>> print(diagnose([record(0, calls), record(1, [])]))
    * rank 1 has not come to barrier #1, where rank 0 waits; it has made no call
    <BLANKLINE>
    rank 0: in barrier() #1, for 1.0 s
    rank 1: has made no call
    """
    ranks = {record.rank: _Rank(record) for record in records}
    size = max((record.size for record in records), default=0)
    groups: dict[str, tuple[int, ...]] = {}
    for record in records:
        groups.update(record.groups)
    analysis = _Analysis(ranks, size, groups)
    found = tuple(analysis.findings())
    return Diagnosis(
        found,
        tuple(analysis.state_of(rank) for rank in range(size)),
        {record.rank: line for record in records if (line := users_line(record.stacks))},
        tuple(analysis.state_of(rank, short=True) for rank in range(size)),
        {r.rank: tuple(line for stack in r.stacks for line in stack.lines()) for r in records if r.stacks},
    )


def explain(flight: FlightRecorder, wait_s: float) -> str:
    """Explain the failure of this job from the records of its ranks; "" without records. Never raises.

    Args:
        flight: The recorder of this rank, which has written its record.
        wait_s: The longest wait for the records of the other ranks.
    """
    if flight.folder is None:
        return ""
    deadline = time.monotonic() + wait_s
    try:
        while len(records := read_folder(flight.folder)) < flight.size and time.monotonic() < deadline:
            time.sleep(0.02)
        return diagnose(records).brief()
    except Exception:  # the error that is being reported matters more
        return ""


class _Rank:
    """The record of a rank, by communicator."""

    def __init__(self, record: RankRecord) -> None:
        self.record = record
        self.calls: defaultdict[str, dict[int, Entry]] = defaultdict(dict)
        """The collective calls of the rank, by communicator and number."""
        for entry in record.entries:
            if entry.collective:
                self.calls[entry.group][entry.number] = entry

    @cached_property
    def last(self) -> Entry | None:
        """The last call that the rank began."""
        return self.record.entries[-1] if self.record.entries else None

    @cached_property
    def open(self) -> list[Entry]:
        """The calls that are in progress or have failed."""
        return [entry for entry in self.record.entries if not entry.is_over]

    def reached(self, group: str) -> int:
        """The number of the rank's last collective call in a communicator; 0 without calls."""
        return max(self.calls[group], default=0)


class _Analysis:
    """Analysis of all records.

    Args:
        ranks: The ranks that left a record.
        size: The number of ranks of the world.
        groups: The members of all communicators.
    """

    def __init__(self, ranks: Mapping[int, _Rank], size: int, groups: Mapping[str, tuple[int, ...]]) -> None:
        self.ranks, self.size, self.groups = ranks, size, groups
        self.dead = {
            rank for each in ranks.values() for failure in each.record.failures for rank in failure.ranks
        }
        self.silent = [rank for rank in range(size) if rank not in ranks]
        """The ranks without a record."""
        for group in groups:
            for number in self._numbers(group):
                for rank, entry in share_counts(self._calls_at(group, number), groups[group]).items():
                    ranks[rank].calls[group][number] = entry

    def findings(self) -> Iterator[Finding]:
        """All problems, in the order of their certainty."""
        differing = {group: self._first_difference(group) for group in self.groups}
        for group, number in differing.items():
            if number is not None:
                yield self._differ(group, number)
        yield from self._gone()
        crossed = self._crossed()
        yield from crossed
        for group, ranks, text in circles({rank: each.open for rank, each in self.ranks.items()}, self.groups):
            yield Finding("crossed", ranks, text, group)
        for group, number in differing.items():
            if number is None and not crossed:
                yield from self._held_up(group)
        known = {text: tuple(ranks) for each in self.ranks.values() for text, ranks in each.record.slow}
        for text, ranks in known.items():
            yield Finding("slow", ranks, text)

    # Calls that differ ------------------------------------------------------------------------------

    def _calls_at(self, group: str, number: int) -> dict[int, Entry]:
        """Call `number` of each member that has recorded it."""
        members = (rank for rank in self.groups[group] if rank in self.ranks)
        found = {rank: self.ranks[rank].calls[group].get(number) for rank in members}
        return {rank: entry for rank, entry in found.items() if entry is not None}

    def _numbers(self, group: str) -> list[int]:
        """The numbers of all recorded calls of a communicator."""
        return sorted({number for each in self.ranks.values() for number in each.calls[group]})

    def _first_difference(self, group: str) -> int | None:
        """The first call in which ranks differ; None if they agree on all."""
        for number in self._numbers(group):
            if len({entry.signature for entry in self._calls_at(group, number).values()}) > 1:
                return number
        return None

    def _differ(self, group: str, number: int) -> Finding:
        """The finding for the first difference."""
        calls = self._calls_at(group, number)
        sides: defaultdict[Signature, list[int]] = defaultdict(list)
        kind: Kind
        for rank, entry in calls.items():
            sides[entry.signature].append(rank)
        usual, *others = sorted(sides, key=lambda side: -len(sides[side]))
        expected_here = self._expected(group, number)
        if expected_here in others:  # the majority may be wrong
            others = [usual, *(side for side in others if side != expected_here)]
            usual = expected_here
        many, some = sides[usual], sides[others[0]]
        odd = tuple(sorted(rank for side in others for rank in sides[side]))
        if len(many) == len(odd) and usual != expected_here:
            odd = tuple(sorted((*many, *odd)))  # it is unknown which is right
        right, wrong = calls[many[0]], calls[some[0]]
        one = named(some)
        text = f"in collective call {_position(right)}, {named(many)} called {right.call}, "
        text += f"but {one} called {wrong.call}"
        then, late = self._next(many, group, number), self._next(some, group, number)
        if then == others[0] and late == usual:
            kind, text = "swapped", f"{text}: {one} made these two calls in the other order"
        elif then == others[0] or self._usual_after(usual, group, number) == others[0]:
            kind, text = "skipped", f"{text}: {one} left out {right.name}"
        elif late == usual:
            kind, text = "skipped", f"{text}: {one} made one call too many, or {named(many)} left it out"
        elif right.name == wrong.name:
            kind, text = "unlike", f"{text}: {differences(right, wrong)}"
        else:
            kind, text = "different", f"{text}; look for a call that only some ranks make"
        text += _all_must(calls.values())
        if (batches := self._uneven(some[0], [many[0]]) or self._uneven(many[0], [some[0]])) is not None:
            text += f"; {batches}"
        return Finding(kind, odd, text, group, number)

    def _expected(self, group: str, number: int) -> Signature | None:
        """The usual call after the one before `number`, from earlier steps; None if unknown."""
        before = self._calls_at(group, number - 1)
        last = next((entry.signature for entry in before.values()), None)
        return None if last is None else self._usual_after(last, group, number)

    def _usual_after(self, signature: Signature, group: str, until: int) -> Signature | None:
        """The call that always followed such a call, among the calls before `until`; None if unknown."""
        after = {
            each.calls[group][number + 1].signature
            for each in self.ranks.values()
            for number, entry in each.calls[group].items()
            if number + 1 < until and entry.signature == signature and number + 1 in each.calls[group]
        }
        return after.pop() if len(after) == 1 else None

    def _next(self, ranks: Sequence[int], group: str, number: int) -> Signature | None:
        """The call of these ranks after call `number`; None if none of them has recorded it."""
        found = (self.ranks[rank].calls[group].get(number + 1) for rank in ranks)
        return next((entry.signature for entry in found if entry is not None), None)

    # Ranks that are gone ----------------------------------------------------------------------------

    def _gone(self) -> Iterator[Finding]:
        for rank in sorted(self.dead):
            yield Finding("died", (rank,), f"rank {rank} died{self._last_seen(rank)}")
        for rank, each in sorted(self.ranks.items()):
            if each.record.left is not None and rank not in self.dead:
                waiting = [other for other, one in sorted(self.ranks.items()) if other != rank and one.open]
                text = self._uneven(rank, waiting) if each.record.left == LEFT_WELL else None
                if text is not None:
                    yield Finding("uneven", (rank,), text)
                else:
                    text = f"rank {rank} left: {each.record.left}{self._last_seen(rank)}"
                    yield Finding("left", (rank,), text)

    def _uneven(self, rank: int, waiting: Sequence[int]) -> str | None:
        """A text that `rank` had fewer batches than ranks that wait; None if it began as many steps as they."""
        each = self.ranks[rank]
        made = each.record.steps
        ahead: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for other in waiting:
            for group, begun in self.ranks[other].record.steps.items():
                steps = [e.step for e in self.ranks[other].open if e.group == group and e.step is not None]
                step = max(steps) + 1 if steps else begun  # weights are exchanged when the next step begins
                if step > made.get(group, step):
                    ahead[group, step].append(other)
        if not ahead:
            return None
        (group, step), behind = next(iter(ahead.items()))
        doing = f"is in {each.open[-1].short}" if each.open else "left"
        return fewer_batches(rank, made[group], doing if each.record.left is None else "left", behind, step)

    def _last_seen(self, rank: int) -> str:
        """A phrase on the last call of a rank, from its record or those of its peers."""
        if rank in self.ranks:
            last = self.ranks[rank].last
            if last is None:
                return "; it has made no call"
            return f"; its last call was {last.short}{self._unlike_message(rank, last)}"
        shared = [
            entry
            for each in self.ranks.values()
            for entry in each.record.entries
            if entry.collective and entry.state == "ended" and rank in self.groups[entry.group]
        ]
        if not shared:
            return "; nobody has ended a call together with it"
        return f"; the last call that it was needed for, and that has ended, is {max(shared, key=_end).short}"

    def _unlike_message(self, rank: int, last: Entry) -> str:
        """A phrase if another rank receives by the wrong call what `rank` sent last."""
        if last.name in _RECEIVED_BY:
            for other, each in self.ranks.items():
                wait = each.last
                if wait is None or wait.group != last.group or wait.name not in _RECEIVED_BY.values():
                    continue
                group = self.groups[last.group]
                ends = group[last.detail["dest"]], group[wait.detail["source"]]
                if ends == (other, rank) and wait.name != _RECEIVED_BY[last.name]:
                    return f"; {_RECEIVED_BY[last.name]} receives it, not {wait.name}"
        return ""

    # Ranks that wait for each other -----------------------------------------------------------------

    def _crossed(self) -> list[Finding]:
        """Pairs of ranks that wait in different communicators, each for the other."""
        found = []
        waiting = {rank: [e for e in each.open if e.collective] for rank, each in self.ranks.items()}
        for a, in_a in waiting.items():
            for b, in_b in waiting.items():
                pairs = ((x, y) for x in in_a for y in in_b if a < b and x.group != y.group)
                for x, y in pairs:
                    if not (b in self.groups[x.group] and a in self.groups[y.group]):
                        continue
                    if self.ranks[b].reached(x.group) < x.number and self.ranks[a].reached(y.group) < y.number:
                        found.append(self._cross(a, x, b, y))
        return found[:1]

    def _cross(self, a: int, x: Entry, b: int, y: Entry) -> Finding:
        """The finding for rank a in call x and rank b in call y, of two communicators."""
        for rank, other in ((a, b), (b, a)):
            if (text := self._uneven(rank, [other])) is not None:
                return Finding("uneven", (rank,), text, x.group, x.number)
        text = (
            f"rank {a} is in {x.short}, and rank {b} in {y.short}: each waits for the other; the calls of "
            f"these two communicators are in another order on the two ranks{_all_must((x, y))}"
        )
        return Finding("crossed", (a, b), text, x.group, x.number)

    # Ranks that are missing, or late ----------------------------------------------------------------

    def _held_up(self, group: str) -> Iterator[Finding]:
        """Why ranks wait in a communicator: the first unfinished call with an explanation."""
        members = [self.ranks[rank] for rank in self.groups[group] if rank in self.ranks]
        unfinished = {entry.number for each in members for entry in each.open if entry.group == group}
        for number in sorted(unfinished & set(self._numbers(group))):
            calls = self._calls_at(group, number)
            found = [*self._behind(group, number, calls), *self._slow(group, number, calls)]
            if found:
                yield from found
                return

    def _behind(self, group: str, number: int, calls: Mapping[int, Entry]) -> Iterator[Finding]:
        """The members that have not made a call in which others wait."""
        waiting = sorted(rank for rank, entry in calls.items() if not entry.is_over)
        missing = [rank for rank in self.groups[group] if rank not in calls and rank not in self.dead]
        for rank in missing:
            if rank in self.silent:
                fate = f"it left no record: it died, or hangs outside of any call{self._last_seen(rank)}"
            elif self.ranks[rank].record.left is not None:
                continue  # already reported
            else:
                fate = _doing(self.ranks[rank])
            wait = "waits" if len(waiting) == 1 else "wait"
            text = f"rank {rank} has not come to {calls[waiting[0]].short}, where {named(waiting)} {wait}; {fate}"
            text += _all_must(calls.values())
            yield Finding("behind", (rank,), text, group, number)

    def _slow(self, group: str, number: int, calls: Mapping[int, Entry]) -> Iterator[Finding]:
        """The last rank to make a call, if all others waited long for it."""
        if len(calls) < max(2, len(self.groups[group])):
            return
        clocks = self._clocks(group)
        came = sorted(((_start(entry) - clocks[rank], rank) for rank, entry in calls.items()))
        (first, _), (before, _), (last, rank) = came[0], came[-2], came[-1]
        longest = max(_end(entry) - _start(entry) for entry in calls.values())
        if last - before < LATE_S * 1e9 or last - before < LATE_SHARE * longest:
            return
        text = (
            f"rank {rank} came to {calls[rank].short} {(last - first) / 1e9:.1f} s after the first rank, and "
            f"{(last - before) / 1e9:.1f} s after all others: it is slow, or was busy with something else"
        )
        yield Finding("slow", (rank,), text, group, number)

    def _clocks(self, group: str) -> dict[int, float]:
        """The offset of each member's clock, since ranks leave a call at about the same time."""
        members = [rank for rank in self.groups[group] if rank in self.ranks]
        ended = {
            rank: {n: e for n, e in self.ranks[rank].calls[group].items() if e.state == "ended"}
            for rank in members
        }
        common = sorted(set.intersection(*(set(calls) for calls in ended.values())))[-AROUND:] if ended else []
        reference = members[0]
        return {
            rank: statistics.median([_end(ended[rank][n]) - _end(ended[reference][n]) for n in common] or [0])
            for rank in members
        }

    # What each rank was in --------------------------------------------------------------------------

    def state_of(self, rank: int, *, short: bool = False) -> str:
        """A line on the state of a rank when it wrote its record; `short` omits the arguments of calls."""
        if rank in self.dead:
            return f"rank {rank}: dead"
        if rank not in self.ranks:
            return f"rank {rank}: left no record"
        each = self.ranks[rank]
        record = each.record
        shown = operator.attrgetter("short") if short else str
        texts = [_state(entry, record, shown(entry)) for entry in each.open[-3:]]
        if not texts:
            texts = ["has made no call" if each.last is None else f"in no call; the last was {shown(each.last)}"]
        if record.queued:
            texts.append(f"queued on a lane: {', '.join(map(shown, record.queued[:3]))}{more(record.queued[3:])}")
        for group, (position, count) in record.plans.items():
            texts.append(f"at call {position} of {count} of the plan of {group}")
        if record.left is not None:
            texts.append(f"left: {record.left}")
        return f"rank {rank}: {'; '.join(texts)}"


def _doing(each: _Rank) -> str:
    """A phrase on the last activity of a rank."""
    last = each.last
    if last is None:
        return "it has made no call"
    if not last.is_over:
        return f"it is in {last.short}"
    ended_s = (each.record.written_ns - _end(last)) / 1e9
    return f"its last call was {last.short}, which ended {ended_s:.1f} s before"


def _state(entry: Entry, record: RankRecord, shown: str) -> str:
    lasted_s = ((entry.end_ns or record.written_ns) - _start(entry)) / 1e9
    if entry.state == "failed":
        return f"failed in {shown}, after {lasted_s:.1f} s"
    return f"in {shown}, for {lasted_s:.1f} s"


def _all_must(entries: Iterable[Entry]) -> str:
    """The end of a text on ranks that wait for others, if they are in public methods that all ranks must call."""
    methods = dict.fromkeys(entry.method for entry in entries if entry.method)
    if not methods:
        return ""
    verb = "is" if len(methods) == 1 else "are"
    return f"; {' and '.join(methods)} {verb} collective: all ranks must make the same calls"


def _position(entry: Entry) -> str:
    within = "" if entry.bucket is None else f" (bucket {entry.bucket}, step {entry.step})"
    return f"#{entry.number} of {entry.group}{within}"


def _start(entry: Entry) -> int:
    return entry.start_ns or 0


def _end(entry: Entry) -> int:
    return entry.end_ns or 0
