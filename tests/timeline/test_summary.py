"""Where the time of steps went, by hand; and what to do about it."""

import dataclasses
import re
from pathlib import Path

import pytest
from support.timelines import span, timeline_of, training

import bagua_comm
from bagua_comm import (
    ByteGrad,
    Decentralized,
    DiLoCo,
    Engine,
    Plan,
    Point,
    Quantized,
    SparseLoCo,
    StreamingDiLoCo,
    TensorSpec,
    every,
)
from bagua_comm.testing import run_ranks
from bagua_comm.timeline.advice import advise
from bagua_comm.timeline.reading import RankTimeline, Timeline, read_timeline
from bagua_comm.timeline.summary import OF_LIBRARY, summarize, summarize_rank
from bagua_comm.timeline.text import describe


def test_a_step_by_hand():
    found = summarize_rank(3, training())
    assert (found.rank, found.steps) == (3, 4)
    expected = {
        "step_s": 0.040,
        "median_step_s": 0.040,
        "slowest_step_s": 0.040,
        "forward_s": 0.008,
        "backward_s": 0.016,
        "compute_s": 0,
        "optimizer_s": 0.003,
        "waiting_s": 0.007,
        "other_s": 0.006,
        "exchange_s": 0.020,
        "own_s": 0.033,
    }
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected)
    assert found.hidden == pytest.approx(15 / 20)
    assert (found.payload_bytes, found.wire_bytes) == (2 * 2**20, 2**20)
    assert [(each.index, each.bytes, each.exchange_s, each.hidden) for each in found.buckets] == [
        (0, 2**20, pytest.approx(0.010), 1),
        (1, 2**20, pytest.approx(0.010), pytest.approx(0.5)),
    ]
    assert found.step_ends_s == pytest.approx([0.038, 0.078, 0.118, 0.158, 0.198])
    assert found.step_waits_s == pytest.approx([0.007] * 4)


def test_spans_of_the_program_are_shown_by_name_and_are_not_other():
    """Here 2 of the 6 ms that are no stage, with a span inside, one in the backward pass, one of a loader."""
    spans = training().spans
    for at in range(0, 200, 40):
        spans += [
            span("load batch", at + 36, at + 38),
            span("decode", at + 37, at + 38),
            span("loss", at + 10, at + 11),
            span("read", at, at + 40, "loader"),
            span("commit", at + 38, at + 39),
            span("tuner: trial", at, at + 40),
        ]
    found = summarize_rank(0, timeline_of(spans))
    assert (found.marked_s, found.other_s) == (pytest.approx(0.002), pytest.approx(0.004))
    assert [(each.name, each.times) for each in found.marked] == [("load batch", 1), ("decode", 1), ("loss", 1)]
    assert [each.seconds for each in found.marked] == pytest.approx([0.002, 0.001, 0.001])
    text = describe(summarize(Timeline({0: timeline_of(spans)})), [], [])
    assert re.search(r"waiting +your spans +other", text)
    assert re.search(r"Your spans, on rank 0:\n\n +in a step +time in a step\nload batch +1 +2.00 ms\n", text)


def test_the_names_of_all_spans_of_this_library_are_known():
    text = "".join(file.read_text() for file in Path(bagua_comm.__file__).parent.rglob("*.py"))
    names = set(re.findall(r'tracer\.(?:span|add)\("([^"]+)"', text)) - {"load batch"}
    assert {"exchange", "step", "commit"} <= names
    assert {name for name in names if not name.startswith("tuner: ")} <= OF_LIBRARY


def test_the_parts_add_up_to_the_step():
    found = summarize_rank(0, training(own=1.5))
    parts = ("forward", "backward", "compute", "optimizer", "waiting", "other", "marked")
    assert sum(getattr(found, f"{part}_s") for part in parts) == pytest.approx(found.step_s)


def test_a_single_step_is_summarized_too():
    found = summarize_rank(0, training(n=1))
    assert (found.steps, found.step_s, found.waiting_s) == (1, pytest.approx(0.038), pytest.approx(0.007))


def test_steps_without_a_length_are_no_steps():
    timeline = Timeline({0: RankTimeline({"main": [span("step", 5, 5), span("step", 5, 5)]})})
    summary = summarize(timeline)
    assert summary.without_steps == [0]
    assert "No step ends" in describe(summary, [], advise(summary))


def test_calls_on_the_thread_that_trains_are_waits_as_well():
    spans = training().spans
    spans += [span("broadcast", 40 * i + 36, 40 * i + 37, wire_bytes=8) for i in range(5)]
    spans += [span("allreduce", 40 * i + 3, 40 * i + 5, wire_bytes=8) for i in range(5)]  # as of a SyncBatchNorm
    found = summarize_rank(0, timeline_of(spans))
    assert (found.waiting_s, found.forward_s) == (pytest.approx(0.010), pytest.approx(0.006))
    assert found.wire_bytes == 2**20  # of exchanges alone


def test_exchanges_on_the_thread_that_trains_are_not_hidden():
    spans = [dataclasses.replace(each, thread="main") for each in training(wait=(30, 30)).spans]
    found = summarize_rank(0, timeline_of(spans))
    assert found.hidden == 0
    assert found.waiting_s == pytest.approx(0.020)
    assert found.backward_s == pytest.approx(0.001)


def test_on_a_device_its_own_rows_count():
    spans = training().spans
    for i in range(5):
        spans += [
            span("forward", 40 * i + 1, 40 * i + 11, "device: forward"),
            span("backward", 40 * i + 11, 40 * i + 25, "device: backward"),
            span("exchange", 40 * i + 20, 40 * i + 30, "device: lane", bucket=0, bytes=100),
        ]
    found = summarize_rank(0, timeline_of(spans))
    assert (found.forward_s, found.backward_s) == (pytest.approx(0.010), pytest.approx(0.014))
    assert (found.exchange_s, found.hidden, found.waiting_s) == pytest.approx((0.010, 0.5, 0.005))


def test_without_spans_of_steps_backward_passes_count():
    spans = [each for each in training().spans if each.name != "step"]
    assert summarize_rank(0, timeline_of(spans)).step_s == pytest.approx(0.040)
    assert summarize_rank(0, timeline_of(spans[:3])) is None
    assert summarize_rank(0, RankTimeline()) is None


def summary_of(*ranks):
    return summarize(Timeline(dict(enumerate(ranks))))


def test_the_slowest_rank_is_named_if_others_wait_for_it():
    slow = training(wait=(31.5, 32))  # its backward pass takes 6.5 ms longer
    summary = summary_of(training(), slow, training())
    assert (summary.slowest, summary.slow) == (1, False)  # 39.5 ms against 33 ms
    slower = training(every=40, wait=(40 - 0.1, 40))
    summary = summary_of(training(), training(), slower)
    assert (summary.slowest, summary.slow) == (2, True)
    (text, *_) = advise(summary)
    assert text.startswith("Rank 2 is slow: its own work takes 39.9 ms a step, that of the others 33 ms")
    assert "most of the difference is in the backward pass (14.9 ms)" in text


def test_a_single_rank_is_not_the_slowest():
    summary = summary_of(training())
    assert (summary.slowest, summary.slow) == (None, False)


def test_advice_for_one_bucket():
    ranks = [training(bucket_ms=[(25, 32)], wire=1) for _ in range(2)]
    texts = advise(summary_of(*ranks))
    text = "There is one bucket, so its exchange begins when the backward pass has ended, and nothing overlaps: "
    assert texts == [f"{text}set bucket_bytes, for example to 262144."]


def on_device(timeline):
    return timeline_of([dataclasses.replace(each, thread=f"device: {each.name}") for each in timeline.spans])


STREAMING = {"kib": 8, "algorithm": "StreamingDiLoCo", "payload": "weight"}
WAITS = "40 % of a step waits for exchanges, even on the rank that waits least."
ADVICE = {
    "small buckets": ([training(kib=8)] * 2, "There are 2 buckets of at most 8 KiB", ""),
    "small fragments": ([training(**STREAMING)] * 2, "", "give StreamingDiLoCo fewer `fragments`"),
    "nothing waits": ([training(wait=(31, 32))] * 2, "", "waits for exchanges 2 % of a step"),
    "the network": ([training(wait=(16, 32), wire=1.0)] * 2, WAITS, "ByteGrad() sends about a quarter"),
    "the network, fewer bytes": ([training(wait=(16, 32), wire=0.25)] * 2, WAITS, "fewer steps"),
    "something else": ([training(every=60)], "43 % of a step is neither", ""),
    "a device": ([on_device(training(every=60))], "47 % of a step the device runs none of", ""),
    "no steps": ([RankTimeline()], "", "after some training steps"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice(name):
    ranks, begin, words = ADVICE[name]
    (text, *others) = advise(summary_of(*ranks))
    assert text.startswith(begin)
    assert words in text
    assert others == [] or name == "small fragments"


def test_the_text_has_a_row_for_each_rank_and_leaves_out_what_is_not_known():
    summary = summary_of(training(), RankTimeline(), training())
    text = describe(summary, ["It is cut off."], ["Buy a network."])
    lines = text.splitlines()
    assert lines[0] == "! It is cut off."
    assert "! No step ends in the timeline of ranks 1." in lines
    heads = next(line for line in lines if "waiting" in line).split()
    assert heads == ["step", "forward", "backward", "optimizer", "waiting", "other", "exchange", "hidden", "sent"]
    row = "rank 0 40.0 ms 8.00 ms 16.0 ms 3.00 ms 7.00 ms 6.00 ms 20.0 ms 75 % 1.0 MB"
    assert row in [" ".join(line.split()) for line in lines]
    assert [line.split()[0] for line in lines if line.startswith(("rank", "mean"))] == ["rank", "rank", "mean"]
    assert lines[-1] == "* Buy a network."
    assert "No rank is slow: without waits, the median step takes 33.0 ms to 33.0 ms on the ranks." in lines
    text = describe(summary_of(training(), training(), training(wait=(40 - 0.1, 40))), [], [])
    assert "Rank 2 is slow: without waits, the median step takes 33.0 ms to 39.9 ms on the ranks." in text


def without_an_engine(steps):
    """Three steps of 10 ms; in each a call of 4 ms, in which another one runs, and a call of 1 ms."""
    spans = []
    for at in (0, 10, 20):
        spans.append(span("allreduce", at, at + 4, bytes=400, wire_bytes=300))
        spans.append(span("alltoall", at + 1, at + 2, bytes=100, wire_bytes=100))
        spans.append(span("barrier", at + 5, at + 6, bytes=0, wire_bytes=8))
        if steps:
            spans.append(span("step", at, at + 9))
    return timeline_of(spans)


def test_the_calls_of_a_program_without_an_engine_are_added_up():
    summary = summary_of(without_an_engine(steps=False), without_an_engine(steps=False))
    assert summary.ranks == []
    assert [dataclasses.astuple(each) for each in summary.calls] == [
        ("allreduce", 3, pytest.approx(0.012), 1200, 900),
        ("barrier", 3, pytest.approx(0.003), 0, 24),
    ]
    text = [" ".join(line.split()) for line in describe(summary, [], advise(summary)).splitlines()]
    assert "allreduce 3 4.00 ms 400 bytes 300 bytes" in text
    assert 'by `with comm.tracer.span("step"):`' in text[-1]
    assert summary_of(training()).calls == []


def test_steps_marked_by_the_program_have_the_waits_and_bytes_of_its_calls():
    summary = summary_of(without_an_engine(steps=True), without_an_engine(steps=True))
    (first, _) = summary.ranks
    assert (first.steps, first.step_s, first.waiting_s) == (2, pytest.approx(0.010), pytest.approx(0.005))
    assert first.wire_bytes == 308
    text = describe(summary, [], advise(summary)).splitlines()
    assert next(line for line in text if "waiting" in line).split() == ["step", "waiting", "other", "sent"]
    assert len(summary.calls) == 2


def test_no_smaller_buckets_are_advised_where_latency_takes_the_time():
    def advises_smaller_buckets(kib):
        timeline = training(bucket_ms=((25, 32),), kib=kib)
        return any("bucket_bytes, for example" in text for text in advise(summary_of(timeline)))

    assert advises_smaller_buckets(1024)
    assert not advises_smaller_buckets(4)


def test_a_call_of_exchange_is_no_exchange_of_a_bucket():
    calls = [span("exchange", 40 * i + 3, 40 * i + 5, bytes=8, wire_bytes=8) for i in range(5)]

    summary = summarize(timeline_of_ranks(calls))
    assert [(each.name, each.calls, each.wire_bytes) for each in summary.calls] == [("exchange", 5, 40)]
    assert "Calls, on the first rank" in describe(summary, [], advise(summary))

    steps = [span("step", 40 * i, 40 * i + 38, step=i) for i in range(5)]
    (rank,) = summarize(timeline_of_ranks(calls + steps)).ranks
    assert (rank.exchange_s, rank.buckets, rank.wire_bytes) == (0, [], 8)
    assert rank.waiting_s == pytest.approx(0.002)


def timeline_of_ranks(spans):
    return Timeline({0: timeline_of(spans)})


LONGER = "Exchange in fewer steps, by a larger local_steps."


@pytest.mark.parametrize(
    ("algorithm", "name", "says"),
    [
        (ByteGrad(), "GradientAllReduce", "as `every` and `DiLoCo` do"),
        (Decentralized(), "Decentralized", ". Exchange in fewer steps, as `every`"),
        (every(2, Decentralized()), "Every(Decentralized)", "by a larger n of `every`"),
        (DiLoCo(3), "DiLoCo", "DiLoCo with average=Quantized() sends about a quarter"),
        (StreamingDiLoCo(4), "StreamingDiLoCo", "StreamingDiLoCo with average=Quantized() sends about a quarter"),
        (DiLoCo(3, average=Quantized(min_bytes=0)), "DiLoCo", LONGER),
        (SparseLoCo(3), "SparseLoCo", LONGER),
    ],
    ids=lambda value: repr(value)[:30],
)
@pytest.mark.algorithms("all")
def test_the_advice_fits_the_algorithm_of_the_timeline(algorithm, name, says, tmp_path):
    specs = [TensorSpec(each, (20_000,), "float32") for each in "abcd"]
    plan = Plan.pack(specs, groups=algorithm.groups(specs))

    def body(comm):
        storage = {"weight": plan.allocate(), "grad": plan.allocate()}
        with Engine(comm, algorithm, plan, storage) as engine:
            for _ in range(9):
                engine.at(Point.FORWARD)
                for spec in specs:
                    engine.ready(spec.name)
                engine.at(Point.BACKWARD)
                engine.at(Point.STEP)
        comm.trace(tmp_path / "trace.json")

    run_ranks(2, body)
    found = summarize(read_timeline(tmp_path / "trace.json"))
    assert {(each.algorithm, each.payload) for each in found.ranks} == {(name, algorithm.payload)}
    ranks = [dataclasses.replace(each, waiting_s=0.5 * each.step_s) for each in found.ranks]
    advice = advise(dataclasses.replace(found, ranks=ranks, slow=False))
    (text,) = [text for text in advice if "waits for exchanges" in text]
    assert says in text
    assert "ByteGrad" not in text
    assert not any("set bucket_bytes" in text for text in advice) or algorithm.payload == "grad"


def test_exchanges_that_send_nothing_do_not_count_as_compressed():
    (rank,) = summary_of(training(wire=1.0)).ranks
    assert rank.sent_payload_bytes == rank.payload_bytes == rank.wire_bytes
    idle = [each for each in training().spans if each.name not in ("allreduce", "inner")]
    (rank,) = summary_of(timeline_of(idle)).ranks
    assert (rank.sent_payload_bytes, rank.payload_bytes) == (0, 2 * 2**20)
