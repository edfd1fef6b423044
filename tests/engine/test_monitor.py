"""Rows of step times that ride along with exchanges: slow ranks and links are the same on all ranks."""

import contextlib
import logging
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support.engine_steps import backward, give_times

from bagua_comm import DiLoCo, Engine, GradientAllReduce, Hierarchical, Plan, Point, StreamingDiLoCo, TensorSpec
from bagua_comm.engine import links, monitor
from bagua_comm.flight import diagnose
from bagua_comm.health.slow import HealthLogs, Slow
from bagua_comm.testing import run_ranks

PLAN = Plan.pack([TensorSpec(f"x{i}", (8,), "float32") for i in range(2)])
STEP_MS = 100


def train(
    comm, steps, own_ms, *, waiting_ms=lambda step: 10, algorithm=None, look=lambda engine, step: None, plan=PLAN
):
    """Train with steps whose times are given, in the place of those of a clock; returns the engine's rows."""
    with Engine(comm, algorithm or GradientAllReduce(), plan, plan.allocate()) as engine:
        give_times(engine, lambda step: own_ms(step, comm.rank), waiting_ms)
        for step in range(steps):
            engine.at(Point.FORWARD)
            backward(engine, [])
            engine.at(Point.STEP)
            look(engine, step)
        return comm.health()


def slowed(rank, begin, end, factor=1.5):
    def own_ms(step, mine):
        noise = random.Random(1000 * step + mine).uniform(0.95, 1.05)
        return STEP_MS * noise * (factor if mine == rank and begin <= step < end else 1)

    return own_ms


def test_a_slow_rank_is_named_on_all_ranks_and_when_it_is_slow_no_longer(caplog):
    caplog.set_level(logging.INFO, "bagua_comm")
    named_at = {}

    def body(comm):
        def look(engine, step):
            if comm.health().slow:
                named_at.setdefault(comm.rank, step)

        return train(comm, 120, slowed(1, 60, 90), look=look)

    reports = run_ranks(3, body)

    assert {(str(each.past), each.slow) for each in reports} == {(str(reports[0].past), ())}
    (past,) = reports[0].past
    assert (past.ranks, past.factor) == ((1,), pytest.approx(1.5, abs=0.15))
    assert 55 <= past.since <= 61
    assert 85 <= past.until <= 91
    assert all(step < 80 for step in named_at.values())
    assert len(named_at) == 3
    lines = [
        record.message for record in caplog.records if record.levelno == logging.INFO and "slow" in record.message
    ]
    assert len(lines) == 2
    assert "rank 1 has been slow since step" in lines[0]
    assert "rank 1 was slow from step" in lines[1]


def test_quiet_ranks_are_not_slow():
    for report in run_ranks(3, lambda comm: train(comm, 150, slowed(None, 0, 0))):
        assert (report.slow, report.past) == ((), ())
        assert len(report.rows) == 3
        assert "nothing is slow" in str(report)


def test_a_slow_link_is_measured_when_all_ranks_wait(monkeypatch):
    measured = []

    def links(comm, nodes, nbytes):
        measured.append(nodes)
        assert nbytes == 2**16  # the least: exchanges are smaller
        seconds = np.ones((2, 2))
        seconds[1, 0] = 2.0 if 50 < step[0] < 80 or len(measured) <= 4 else 1.0  # the start is noisy, too
        return seconds

    step = [0]
    monkeypatch.setattr(monitor, "measure_links", links)

    def look(engine, at):
        step[0] = at

    def body(comm):
        return train(comm, 130, slowed(None, 0, 0), waiting_ms=lambda at: 50 if 50 < at < 80 else 20, look=look)

    for report in run_ranks(4, body, nodes=[0, 0, 1, 1]):
        (past,) = report.past
        assert past.what == "the link from node 1 (rank 2) to node 0 (rank 0)"
        assert past.factor == 2.0
    assert len(measured) < 4 * 6  # at first, at the changes, and none in quiet rows


@pytest.mark.parametrize("nodes", range(2, 9))
def test_each_link_has_its_turn_beside_none_that_shares_its_link_or_connection(nodes):
    seen = []
    for distance, senders in links.turns(nodes):
        pairs = [(sender, (sender + distance) % nodes) for sender in senders]
        assert len({receiver for _, receiver in pairs}) == len(pairs)
        assert len({frozenset(pair) for pair in pairs}) == len(pairs)
        seen += pairs
    assert sorted(seen) == [(a, b) for a in range(nodes) for b in range(nodes) if a != b]


class Late:
    """A communicator of a rank whose sends go on after `measure_links` has got its message, as on a slow link."""

    def __init__(self, comm, late_s):
        self._comm, self._late_s = comm, late_s

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, x, *, dest):
        future = self._comm.isend(x, dest=dest)
        return SimpleNamespace(result=lambda: (future.result(), time.sleep(self._late_s)))


@pytest.mark.parametrize("late", [0, 1, 2, 4])
def test_a_rank_that_is_late_makes_no_link_seem_slow(late):
    """The rank that receives from it must not begin without it."""

    def body(comm):
        return links.measure_links(Late(comm, 0.2) if comm.rank == late else comm, [0, 1, 2, 2, 3], 2**19)

    for seconds in run_ranks(5, body):
        assert np.nanmax(seconds) < 0.1


@pytest.mark.parametrize(("exchanged", "nbytes"), [((1, 2), 2**16), ((7, 10**5), 10**5), ((10**7, 0), 2**19)])
def test_links_are_measured_with_messages_of_the_size_of_exchanges(exchanged, nbytes):
    found = run_ranks(2, lambda comm: links.size_of_messages(comm, exchanged[comm.rank]))
    assert found == [nbytes] * 2


def test_what_is_sent_inside_and_across_nodes_belongs_to_an_exchange(monkeypatch):
    sizes, plan = [], Plan.pack([TensorSpec("x", (2**17,), "float32")])
    monkeypatch.setattr(
        monitor, "measure_links", lambda comm, nodes, nbytes: sizes.append(nbytes) or np.ones((2, 2))
    )
    algorithm = GradientAllReduce(Hierarchical())
    run_ranks(
        4, lambda comm: train(comm, 20, slowed(None, 0, 0), algorithm=algorithm, plan=plan), nodes=[0, 0, 1, 1]
    )
    assert {*sizes} == {2**19}


def test_ranks_that_are_stopped_send_no_rows():
    def body(comm):
        with Engine(comm, GradientAllReduce(), PLAN, PLAN.allocate()) as engine:
            engine.stop()
            for _ in range(40 + 10 * comm.rank):
                engine.at(Point.FORWARD)
                backward(engine, [])
                engine.at(Point.STEP)
            engine.resume()
            for _ in range(10):
                engine.at(Point.FORWARD)
                backward(engine, [])
                engine.at(Point.STEP)
        return len(comm.health().rows)

    assert run_ranks(2, body) == [2, 2]


def test_rows_ride_along_with_exchanges_only():
    def body(comm):
        at = []
        train(
            comm,
            100,
            slowed(None, 0, 0),
            algorithm=DiLoCo(local_steps=16),
            look=lambda engine, step: at.append((step, bool(comm.health().rows))),
        )
        return next(step for step, has_rows in at if has_rows)

    first = run_ranks(2, body)
    assert set(first) <= {79, 80}


def test_a_diagnosis_names_the_rank_that_was_slow():
    def body(comm):
        records = []
        train(comm, 80, slowed(1, 40, 80), look=lambda engine, step: records.append(comm.flight.record()))
        return records[-1]

    diagnosis = diagnose(run_ranks(2, body))
    (finding,) = [each for each in diagnosis.findings if each.kind == "slow"]
    assert finding.ranks == (1,)
    assert "rank 1 has been slow since step 4" in finding.text or "since step 3" in finding.text


def test_what_was_slow_is_past_when_the_engine_is_closed():
    def body(comm):
        train(comm, 60, slowed(1, 20, 60))
        return comm.health()

    for report in run_ranks(2, body):
        assert report.slow == ()
        assert [each.ranks for each in report.past] == [(1,)]
        assert report.past[0].until == 59


def test_engines_of_one_world_do_not_end_what_others_have_found():
    logs = HealthLogs({"a": (0, 1), "b": (0, 1), "c": (0, 1)})
    first, second = logs.open("a"), logs.open("b")
    for log in (first, second):
        log.begin(Slow("rank 1", (1,), 5, 2.0))
    second.end("rank 1", 9)
    assert [each.until for each in logs.latest.slow] == [None]
    assert [each.until for each in logs.latest.past] == [9]
    first.is_closed = True
    logs.open("c")
    assert logs.latest.slow == ()


def test_fragments_that_are_exchanged_in_turn_have_rows_too():
    def body(comm):
        plan = Plan.pack(PLAN.buckets[0].tensors, bucket_bytes=32)
        train(comm, 200, slowed(None, 0, 0), algorithm=StreamingDiLoCo(4, fragments=2, delay=1), plan=plan)
        return len(comm.health().rows)

    assert run_ranks(2, body) == [2, 2]


def test_rows_go_on_soon_after_one_in_which_most_ranks_had_no_data():
    due = []

    def body(comm):
        def look(engine, step):
            due.append(engine.health._due)

        with contextlib.ExitStack() as stack:

            def without(engine, step):
                look(engine, step)
                if step == 3 and comm.rank:
                    stack.enter_context(engine.health.without_data())

            return train(comm, 40, slowed(None, 0, 0), look=without)

    run_ranks(3, body)
    assert max(due) < 60


def test_waits_for_another_engine_are_waits_too():
    """As of two models that are trained in turn."""

    def body(comm):
        engines = [Engine(comm, GradientAllReduce(), PLAN, PLAN.allocate()) for _ in range(2)]
        with engines[0], engines[1]:
            for engine in engines * 3:
                engine.at(Point.FORWARD)
                backward(engine, ["x0", "x1"])
                engine.at(Point.STEP)
            waits = [engine.counters.wait.time_ns for engine in engines]
            return comm.flight.waited_ns, waits

    for waited_ns, waits in run_ranks(2, body):
        assert min(waits) > 0
        assert waited_ns >= sum(waits)
