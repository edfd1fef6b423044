"""Advice from a timeline."""

from __future__ import annotations

import re
import statistics

from .summary import RankSummary, Summary

FEW_BYTES = 64 * 1024
"""Buckets smaller than this spend their time on latency."""


def advise(summary: Summary) -> list[str]:
    """Return advice, in sentences; the most important first.

    All of it follows from the timeline alone: nothing here predicts how long a step will take.
    """
    if not summary.ranks:
        return [
            "No step ends in the timeline. Call `comm.trace` after some training steps. A program without an "
            'engine marks each of them by `with comm.tracer.span("step"):`.'
        ]
    said: list[str] = []
    ranks = summary.ranks
    fastest_wait = min(ranks, key=lambda each: each.waiting_s / each.step_s)  # the network's part of all waits
    waiting, first = fastest_wait.waiting_s / fastest_wait.step_s, ranks[0]
    buckets = first.buckets
    if summary.slow:
        slow = next(each for each in ranks if each.rank == summary.slowest)
        others_s = statistics.median(each.own_s for each in ranks if each is not slow)
        said.append(
            f"Rank {slow.rank} is slow: its own work takes {_ms(slow.own_s)} a step, that of the others "
            f"{_ms(others_s)}, and they wait for it. Look at its machine, its data and its threads"
            f"{_largest_difference(slow, ranks, slow.own_s - others_s)}."
        )
    divisible = first.payload != "weight" and len(buckets) == 1 and buckets[0].bytes >= 4 * FEW_BYTES
    if waiting > 0.1 and divisible and buckets[0].hidden < 0.5:
        quarter = max(1, round(buckets[0].bytes / 4))
        said.append(
            "There is one bucket, so its exchange begins when the backward pass has ended, and nothing overlaps: "
            f"set bucket_bytes, for example to {quarter}."
        )
    largest = max((bucket.bytes for bucket in buckets), default=0)
    if len(buckets) > 1 and largest < FEW_BYTES and waiting > 0.1:
        said.append(
            f"There are {len(buckets)} buckets of at most {largest / 1024:.0f} KiB, and each pays for the "
            f"latency of the network: {_fewer_buckets(first)}."
        )
    if waiting > 0.3 and first.payload_bytes:
        said.append(
            f"{waiting:.0%} of a step waits for exchanges, even on the rank that waits least. {_fewer(first)}"
        )
    elif waiting < 0.05 and any(each.exchange_s for each in ranks):
        said.append(
            f"Training waits for exchanges {waiting:.0%} of a step, on the rank that waits least: another "
            "algorithm would not make steps shorter."
        )
    other = statistics.fmean(each.other_s / each.step_s for each in ranks)
    if other > 0.25 and first.on_device:
        said.append(
            f"{other:.0%} of a step the device runs none of forward pass, backward pass, optimizer and exchange: "
            "it is idle, as where the host is too slow for it or data is late, or it computes something else."
        )
    elif other > 0.25 and any(each.forward_s or each.backward_s or each.compute_s for each in ranks):
        said.append(
            f"{other:.0%} of a step is neither forward pass, backward pass, optimizer nor communication: it is "
            "the loss, the loading of data, or an evaluation. Spans of your own show which, as by "
            '`comm.tracer.span("load batch")`.'
        )
    return [text.replace("%", " %") for text in said]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _largest_difference(slow: RankSummary, ranks: list[RankSummary], difference_s: float) -> str:
    """Where the slow rank spends the most time more than others."""
    names = {
        "forward_s": "the forward pass",
        "backward_s": "the backward pass",
        "compute_s": "the forward and backward passes",
        "optimizer_s": "the optimizer",
        "marked_s": "your own spans",
        "other_s": "what is outside of passes and optimizer",
    }
    more = {
        name: getattr(slow, name) - statistics.median(getattr(each, name) for each in ranks if each is not slow)
        for name in names
    }
    largest = max(more, key=more.__getitem__)
    if more[largest] < difference_s / 2:
        return ""
    return f"; most of the difference is in {names[largest]} ({_ms(more[largest])})"


LOCAL_STEPS = {"DiLoCo", "SparseLoCo", "StreamingDiLoCo"}
"""Algorithms that exchange weights once in `local_steps`."""


def _classes(rank: RankSummary) -> list[str]:
    """The classes of its algorithm, the outermost first."""
    return re.findall(r"\w+", rank.algorithm)


def _fewer_buckets(rank: RankSummary) -> str:
    if "StreamingDiLoCo" in _classes(rank):
        return "give StreamingDiLoCo fewer `fragments`, or, if these have several buckets, a larger bucket_bytes"
    return "set a larger bucket_bytes"


def _fewer(rank: RankSummary) -> str:
    """How fewer bytes could be sent; a ring or a direct exchange of float32 sends up to twice the payload."""
    classes, sends_much = _classes(rank), rank.wire_bytes > 0.75 * rank.sent_payload_bytes
    local = LOCAL_STEPS.intersection(classes)
    compare = "`bagua advise` compares the algorithms for your network."
    if sends_much and rank.payload != "weight":
        return f"Send fewer bytes: ByteGrad() sends about a quarter. {compare}"
    if sends_much and local and "SparseLoCo" not in classes:
        return (
            f"Send fewer bytes: {local.pop()} with average=Quantized() sends about a quarter, and with a larger "
            "local_steps it exchanges less often."
        )
    little = "" if sends_much else "The exchanges send few bytes for the size of the buckets already. "
    if local:
        return f"{little}Exchange in fewer steps, by a larger local_steps."
    if "Every" in classes:
        return f"{little}Exchange in fewer steps, by a larger n of `every`. {compare}"
    return f"{little}Exchange in fewer steps, as `every` and `DiLoCo` do. {compare}"
