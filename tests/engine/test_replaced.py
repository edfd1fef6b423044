"""Weights that a program replaces while an engine exchanges them: algorithms begin anew from them."""

import warnings

import numpy as np
import pytest

from bagua_comm import (
    AsyncModelAverage,
    CommMismatch,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    Plan,
    Point,
    SparseLoCo,
    StreamingDiLoCo,
    TensorSpec,
    TopK,
    by_node,
    every,
)
from bagua_comm.testing import run_ranks

PLAN = Plan.pack([TensorSpec("a", (40,), "float32"), TensorSpec("b", (24,), "float32")], bucket_bytes=100)
NEW = np.random.default_rng(7).normal(size=64).astype(np.float32)


def put(flats, values):
    flats[0][...], flats[1][...] = values[:40], values[40:]


def train(comm, engine, flats, step):
    """One step of an engine alone, towards a target of this rank."""
    engine.at(Point.FORWARD)
    engine.at(Point.BACKWARD)
    for i, x in enumerate(flats):
        x -= np.float32(0.1) * (
            x - np.random.default_rng([step, comm.rank, i]).normal(size=x.size).astype(x.dtype)
        )
    engine.at(Point.STEP)


def stand(engine):
    """One step in which the weights stay as they are."""
    for point in (Point.FORWARD, Point.BACKWARD, Point.STEP):
        engine.at(point)


def engine_of(comm, algorithm, start=0.0):
    flats = [np.full(40, start, np.float32), np.full(24, start, np.float32)]
    return Engine(comm, algorithm, PLAN, {"weight": flats}), flats


def loaded_after(comm, algorithm, steps, more, *, anew):
    """The weights of `more` steps after `NEW` is loaded; `anew`: training stands still at `NEW` until then."""
    engine, flats = engine_of(comm, algorithm, start=1.0)
    with engine:
        if anew:
            put(flats, NEW)
            engine.weights_replaced()
        for step in range(steps):
            stand(engine) if anew else train(comm, engine, flats, step)
        if not anew:
            put(flats, NEW)
            engine.weights_replaced()
        rows = []
        for step in range(steps, steps + more):
            train(comm, engine, flats, step)
            engine.settle()
            rows.append(np.concatenate(flats))
    return rows


SPARSE = SparseLoCo(3, average=ErrorFeedback(TopK(chunk=8, keep=2), retain=0.95))


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(3),
        DiLoCo(2, average=ErrorFeedback()),
        SPARSE,
        LowPrecisionDecentralized(),
        LowPrecisionOnePeer(),
        Decentralized(),
        every(2, LowPrecisionOnePeer()),
        by_node(DiLoCo(2)),
        by_node(LowPrecisionDecentralized()),
    ],
    ids=repr,
)
def test_training_after_a_load_is_as_if_it_had_begun_with_these_weights(algorithm):
    def trained(anew):
        return run_ranks(3, lambda comm: loaded_after(comm, algorithm, 4, 6, anew=anew), nodes=[0, 1, 1])

    np.testing.assert_allclose(trained(anew=False), trained(anew=True), atol=2e-6)


def outer_steps(algorithm, size, loaded, steps):
    """(Streaming) DiLoCo of all ranks in float64, from the equations; `NEW` is loaded after `loaded` steps."""
    period, delay = algorithm.local_steps, algorithm.delay
    offsets = dict(zip([0, 1], algorithm.offsets(2), strict=True))
    begin = [np.ones(40), np.ones(24)]
    x, anchor, momentum, due = [[v.copy() for v in begin] for _ in range(size)], begin, [0 * v for v in begin], {}
    for step in range(steps):
        if step == loaded:
            begin = [NEW[:40].astype(float), NEW[40:].astype(float)]
            x, anchor, momentum, due = (
                [[v.copy() for v in begin] for _ in range(size)],
                begin,
                [0 * v for v in begin],
                {},
            )
        for i, n in enumerate((40, 24)):
            for rank in range(size):
                target = np.random.default_rng([step, rank, i]).normal(size=n).astype(np.float32)
                x[rank][i] = x[rank][i] - 0.1 * (x[rank][i] - target)
            if (step + 1) % period == offsets[i]:
                change = np.mean([anchor[i] - row[i] for row in x], axis=0)
                momentum[i] = algorithm.outer_momentum * momentum[i] + change
                anchor[i] = anchor[i] - algorithm.outer_lr * (change + algorithm.outer_momentum * momentum[i])
                due[i] = step + delay
            if due.get(i) == step:
                for row in x:
                    row[i] = algorithm.mix * row[i] + (1 - algorithm.mix) * anchor[i]
    return [np.concatenate(row) for row in x]


@pytest.mark.parametrize("loaded", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4, 5, 6))])
def test_an_exchange_under_way_is_not_written_over_loaded_weights(loaded):
    algorithm = StreamingDiLoCo(4, fragments=lambda name: "ab".index(name), delay=3)

    def body(comm):
        engine, flats = engine_of(comm, algorithm, start=1.0)
        with engine:
            for step in range(10):
                if step == loaded:
                    put(flats, NEW)
                    engine.weights_replaced()
                train(comm, engine, flats, step)
            engine.settle()
            return np.concatenate(flats)

    np.testing.assert_allclose(run_ranks(2, body), outer_steps(algorithm, 2, loaded, 10), atol=1e-5)


def test_a_window_that_is_open_in_the_forward_pass_is_not_written_over_loaded_weights():
    def body(comm):
        engine, flats = engine_of(comm, Decentralized(), start=float(comm.rank))
        with engine:
            engine.at(Point.FORWARD)  # an evaluation in training mode, without a backward pass
            put(flats, NEW)
            engine.weights_replaced()
            stand(engine)
            return np.concatenate(flats)

    for found in run_ranks(2, body):
        np.testing.assert_array_equal(found, NEW)


def test_rounds_between_loaded_and_earlier_weights_are_dropped():
    def body(comm):
        engine, flats = engine_of(comm, AsyncModelAverage(0.0), start=1.0)
        with engine:
            stand(engine)
            for rank in (0, 1):  # at different times
                if comm.rank == rank:
                    put(flats, NEW)
                    engine.weights_replaced()
                for _ in range(20):
                    stand(engine)
                comm.barrier()
        return np.concatenate(flats)

    for found in run_ranks(2, body):
        np.testing.assert_array_equal(found, NEW)


# Ranks that differ ------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", [DiLoCo(5), StreamingDiLoCo(4, 2), AsyncModelAverage(0.0)], ids=repr)
@pytest.mark.parametrize("what", ["one rank", "another step", "other values"])
def test_ranks_that_replace_their_weights_differently_all_get_an_error(algorithm, what):
    if what != "one rank" and algorithm.payload == "weight" and not hasattr(algorithm, "local_steps"):
        return  # ranks of rounds have steps of their own, and may differ

    def body(comm):
        engine, flats = engine_of(comm, algorithm)
        for step in range(4):
            if step == (2 if what == "another step" and comm.rank else 1) and (
                what != "one rank" or not comm.rank
            ):
                put(flats, NEW + comm.rank * (what == "other values"))
                engine.weights_replaced()
            stand(engine)
        with pytest.raises(CommMismatch, match=r"replaced.*load the same weights on all ranks"):
            engine.close()

    run_ranks(2, body)


def test_ranks_that_replace_their_weights_differently_learn_it_during_training():
    def body(comm):
        engine, flats = engine_of(comm, DiLoCo(2))
        for _ in range(3):
            stand(engine)
        if comm.rank == 0:
            put(flats, NEW)
            engine.weights_replaced()
        with pytest.raises(CommMismatch, match="after step 3 on rank 0, and never on rank 1"):
            [stand(engine) for _ in range(40)]
        assert engine.step < 22

    run_ranks(2, body)


def test_weights_replaced_while_ranks_are_stopped_are_the_same_after_any_number_of_steps():
    def body(comm):
        engine, flats = engine_of(comm, DiLoCo(2))
        with engine:
            stand(engine)
            engine.stop()
            for _ in range(1 + comm.rank):
                stand(engine)
            put(flats, NEW)
            engine.weights_replaced()
            engine.expect_weights()
            put(flats, 2 * NEW)
            if comm.rank:  # it follows them here, the other rank in `resume`
                stand(engine)
            engine.resume()
            for _ in range(20):
                stand(engine)

    run_ranks(2, body)


class AsyncWithCopies(AsyncModelAverage):
    """Rounds of an algorithm that keeps something of earlier weights."""

    def restart(self, bucket, state):
        """Nothing is kept in this test."""


def test_ranks_with_a_pace_of_their_own_do_not_compare_replaced_weights_by_steps():
    def body(comm):
        engine, flats = engine_of(comm, AsyncWithCopies(0.0))
        with engine:
            for _ in range(5 if comm.rank else 40):
                stand(engine)
            put(flats, NEW)
            engine.weights_replaced()

    run_ranks(2, body, timeout_s=5)


# Changes that nobody reports --------------------------------------------------------------------------------


def warned(algorithm, change, steps=8):
    """The warnings of a training where `change(engine, flats, step)` follows each step."""

    def body(comm):
        engine, flats = engine_of(comm, algorithm, start=1.0)
        with engine:
            for step in range(steps):
                train(comm, engine, flats, step)
                change(engine, flats, step)
            stand(engine)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_ranks(1, body)
    return [str(warning.message) for warning in found]


def copied(engine, flats, step):
    if step == 4:
        put(flats, NEW)


def test_weights_that_are_copied_in_place_are_noticed_at_the_next_forward_pass():
    (found,) = warned(DiLoCo(100), copied)
    assert "'a' changed after step 5, and neither an optimizer nor an exchange" in found
    assert "call weights_replaced() of the engine" in found


def test_weights_that_are_copied_after_the_first_step_alone_are_noticed():
    (found,) = warned(DiLoCo(100), lambda engine, flats, step: step or put(flats, NEW))
    assert "'a' changed after step 1" in found


def normalised(engine, flats, step):
    for x in flats:
        x /= np.linalg.norm(x)


def clipped(engine, flats, step):
    for x in flats:
        np.clip(x, -0.5, 0.9, out=x)


def swapped(engine, flats, step):
    engine.settle()
    kept = [x.copy() for x in flats]
    put(flats, NEW)
    engine.settle()
    for x, y in zip(flats, kept, strict=True):
        x[...] = y


@pytest.mark.parametrize("change", [normalised, clipped, swapped])
def test_changes_that_belong_to_every_step_or_are_undone_are_not_warned_of(change):
    assert warned(DiLoCo(100), change) == []


def test_changes_that_an_exchange_under_way_overwrites_are_warned_of_once():
    (found,) = warned(LowPrecisionOnePeer(), normalised)
    assert "changed while an exchange was under way, whose result has replaced that change" in found


# Comparisons of weights ---------------------------------------------------------------------------------------


def test_ranks_with_a_pace_of_their_own_wait_for_no_exchange_when_nothing_is_compared():
    def body(comm):
        engine, _ = engine_of(comm, AsyncModelAverage(0.0))
        for _ in range(0 if comm.rank else 20):  # at step 16, weights are compared that must be equal
            stand(engine)
        comm.barrier()
        engine.close()

    run_ranks(2, body, timeout_s=5)
