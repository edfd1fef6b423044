"""Spans of steps, and lines in the log about them."""

import logging
import re

import pytest
import torch
from support.engine_steps import exchange_in_three_steps
from support.torch_training import make_model

from bagua_comm import ByteGrad, GradientAllReduce, Point
from bagua_comm.engine import progress
from bagua_comm.engine.points import PointOrder
from bagua_comm.engine.progress import Progress, describe
from bagua_comm.testing import run_ranks
from bagua_comm.trace import Counter, ExchangeCounters, Recorder
from bagua_torch import DistributedDataParallel

LOGGER = logging.getLogger("bagua_comm.engine.test")


def make_progress(*, stages=True, rank=0, counters=None):
    recorder = Recorder()
    counters = counters or ExchangeCounters()
    order = PointOrder(GradientAllReduce()) if stages else None
    return recorder, Progress(
        recorder, LOGGER, rank, counters, on_device=False, order=order, ended=lambda *times: None
    )


def seen(recorder):
    return [(span.name, span.args) for span in recorder.spans()]


def run(reached, points, step=0):
    for point in points:
        reached.reach(Point[point], 1, step)


def test_a_step_and_its_stages_are_spans():
    recorder, reached = make_progress()
    run(reached, ["FORWARD", "BACKWARD", "STEP"], step=7)
    assert seen(recorder) == [("forward and backward", {}), ("optimizer", {}), ("step", {"step": 7})]


def test_passes_whose_gradients_are_added_up_belong_to_one_step():
    recorder, reached = make_progress(stages=False)
    run(reached, ["STEP"])  # without a beginning
    for step in range(2):
        run(reached, ["FORWARD", "BACKWARD", "FORWARD", "BACKWARD", "STEP"], step)
    assert seen(recorder) == [("step", {"step": 0}), ("step", {"step": 1})]


def test_without_the_optimizers_a_step_lasts_until_the_next_begins():
    recorder, reached = make_progress(stages=False)
    run(reached, ["FORWARD", "FORWARD", "BACKWARD"] * 3)
    assert seen(recorder) == [("step", {"step": 0}), ("step", {"step": 1})]


def test_the_line_of_a_closed_engine_excludes_the_first_step(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "bagua_comm")
    now_ns, counters = 0, ExchangeCounters()
    monkeypatch.setattr(progress.time, "perf_counter_ns", lambda: now_ns)
    _, reached = make_progress(counters=counters)
    for step in range(5):
        reached.reach(Point.FORWARD, now_ns + 1, step)
        now_ns += 40_000_000 if step else 10**10
        counters.exchange.add(1000, 2_000_000, 30_000_000)
        counters.wait.add(0, 0, 12_000_000 if step else 10**10)
        reached.reach(Point.BACKWARD, now_ns, step)
        reached.reach(Point.STEP, now_ns, step)
    reached.close()
    reached.close()
    (record,) = [record for record in caplog.records if record.levelno == logging.INFO]
    assert record.getMessage() == (
        "5 steps, 40 ms each; waiting 12 ms (30 %), 60 % of communication hidden; 2.0 MB a step sent"
    )


def test_a_long_training_is_heard_of_now_and_then(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "bagua_comm")
    now_ns = 0
    monkeypatch.setattr(progress.time, "perf_counter_ns", lambda: now_ns)
    for rank in range(2):
        _, reached = make_progress(rank=rank)
        for step in range(150):
            reached.reach(Point.FORWARD, now_ns + 1, step)
            now_ns += 10**9
            reached.reach(Point.STEP, now_ns, step)
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    lines = ["step 60: 1000 ms each", "step 121: 1000 ms each"]
    assert found == [("INFO", line) for line in lines] + [("DEBUG", line) for line in lines]


def test_what_a_device_does_is_not_taken_from_the_waits_of_the_host():
    counters = ExchangeCounters(Counter(4, 100, 4_000_000, 10), Counter(4, time_ns=1))
    assert describe(2, 0.5, counters, on_device=True) == "250 ms each; 2.0 MB a step sent"
    assert describe(2, 0.0002, ExchangeCounters()) == "0.1 ms each"
    assert "100 % of communication hidden" in describe(1, 1.0, ExchangeCounters(Counter(1, 1, 1, 10), Counter()))


@pytest.mark.parametrize("size", [1, 2])
def test_each_engine_logs_a_line_when_it_is_closed(caplog, size):
    caplog.set_level(logging.INFO, "bagua_comm")
    run_ranks(size, lambda comm: exchange_in_three_steps(comm, 4096))
    (line,) = [text for text in caplog.messages if "steps" in text]
    sent = "0 bytes" if size == 1 else r"0\.016 MB"
    assert re.fullmatch(
        r"3 steps, [\d.]+ ms each; waiting [\d.]+ ms \(\d+ %\), \d+ % of communication hidden; "
        rf"{sent} a step sent",
        line,
    )


def test_a_wrapper_adds_the_stages_of_each_training_pass():
    def body(comm):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = DistributedDataParallel(model, optimizer, ByteGrad(), comm=comm)
        for _ in range(2):
            with wrapped.no_sync():
                wrapped(torch.ones(3, 4)).sum().backward()
            wrapped(torch.ones(3, 4)).sum().backward()
            model(torch.ones(3, 4)).sum()  # not by the wrapper
            optimizer.step()
            with torch.no_grad():
                wrapped(torch.ones(3, 4))
            wrapped.eval()(torch.ones(3, 4))
            wrapped.train()
        wrapped.close()
        names = [span.name for span in sorted(comm.tracer.spans(), key=lambda span: span.start_ns)]
        return [name for name in names if name in ("step", "forward", "backward", "optimizer")]

    # The step begins with the pass whose gradients are averaged.
    for names in run_ranks(2, body):
        assert names == ["forward", "step", "forward", "backward", "optimizer"] * 2


def test_a_pass_that_fails_has_no_span():
    def body(comm):
        model = make_model()
        wrapped = DistributedDataParallel(model, comm=comm)
        with pytest.raises(RuntimeError):
            wrapped(torch.ones(3, 5))
        model(torch.ones(3, 4))
        return [span.name for span in comm.tracer.spans() if span.name == "forward"]

    assert run_ranks(1, body) == [[]]
