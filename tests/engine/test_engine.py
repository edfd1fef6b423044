"""The engine: when buckets leave, what happens when things go wrong, and what is kept."""

import time
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.engine_steps import backward
from support.waiting import until

from bagua_comm import (
    Algorithm,
    ArrayError,
    AsyncModelAverage,
    ByteGrad,
    CommAborted,
    CommMismatch,
    Decentralized,
    DiLoCo,
    Engine,
    GradientAllReduce,
    LowPrecisionOnePeer,
    Plan,
    Point,
    QAdam,
    TensorSpec,
    UnsupportedError,
    Window,
    after,
    every,
)
from bagua_comm.engine import EngineCallbacks
from bagua_comm.testing import run_ranks

SPECS = [TensorSpec(name, (2, 2), "float32") for name in "abc"]
PLAN = Plan.pack(SPECS, bucket_bytes=16, alignment=4)  # a bucket for each


@dataclass
class Calls:
    exchanged: list = field(default_factory=list)
    committed: list = field(default_factory=list)
    momentum: np.ndarray = field(default_factory=lambda: np.zeros(2))


@dataclass(frozen=True)
class Probe(Algorithm):
    """An algorithm that writes down when it is called."""

    opens: Point
    closes: Point
    payload: str = "grad"

    @property
    def window(self):
        return Window(self.opens, self.closes)

    def check(self, dtype):
        pass

    def init(self, bucket, comm):
        return Calls()

    def exchange(self, bucket, comm, state):
        state.exchanged.append(bucket.step)
        state.momentum += 1

    def commit(self, bucket, state):
        state.committed.append(bucket.step)


def make_engine(comm, algorithm=None, plan=PLAN):
    return Engine(comm, algorithm or GradientAllReduce(), plan, plan.allocate())


def fill(engine, value):
    for bucket in engine.buckets:
        for view in bucket.views.values():
            view[...] = value


def test_buckets_leave_in_plan_order_whatever_order_they_become_ready_in():
    def body(comm):
        with make_engine(comm) as engine:
            fill(engine, comm.rank)
            backward(engine, "cba" if comm.rank else "abc")
            order = [s.args["bucket"] for s in comm.tracer.spans() if s.name == "exchange"]
            return order, [bucket.flat.tolist() for bucket in engine.buckets]

    for order, flats in run_ranks(2, body):
        assert order == [0, 1, 2]
        assert flats == [[0.5] * 4] * 3


def test_buckets_that_are_ready_as_a_whole_leave_in_plan_order():
    def body(comm):
        with make_engine(comm) as engine:
            for step in range(2):
                fill(engine, comm.rank)
                for index in (1, 0, 2) if comm.rank else (0, 1, 2):
                    engine.ready_bucket(index)
                engine.at(Point.BACKWARD)
                assert [bucket.flat.tolist() for bucket in engine.buckets] == [[0.5] * 4] * 3
                engine.at(Point.STEP)
                assert engine.step == step + 1
            return [s.args["bucket"] for s in comm.tracer.spans() if s.name == "exchange"]

    assert run_ranks(2, body) == [[0, 1, 2] * 2] * 2


def test_a_complete_bucket_leaves_before_the_others_are_complete():
    def body(comm):
        with make_engine(comm) as engine:
            fill(engine, 2.0 * comm.rank)
            engine.ready("a")
            engine.flush()
            early = engine.buckets[0].flat.tolist()
            engine.ready("b")
            engine.ready("c")
            engine.at(Point.BACKWARD)
            return early

    assert run_ranks(2, body) == [[1.0] * 4] * 2


def test_a_new_plan_between_two_phases_belongs_to_the_first():
    def body(comm):
        algorithm = after(2, GradientAllReduce(), Probe(Point.GRADIENT, Point.BACKWARD))
        with make_engine(comm, algorithm) as engine:
            for step in range(4):
                if step == 2:
                    engine.replan(Plan.pack(SPECS, bucket_bytes=32, alignment=4))
                    assert engine.phase == GradientAllReduce()
                for point in (Point.FORWARD, Point.BACKWARD, Point.STEP):
                    engine.at(point)
            return [state.exchanged for state in engine.states]

    assert run_ranks(1, body) == [[[0, 1], [0, 1]]]


def test_tensors_that_never_become_ready_are_sent_as_zeros():
    def body(comm):
        with make_engine(comm) as engine:
            fill(engine, 6.0)
            if comm.rank == 0:
                engine.ready("b")
            engine.at(Point.BACKWARD)
            return [bucket.flat[0] for bucket in engine.buckets]

    assert run_ranks(2, body) == [[0, 3, 0]] * 2


def test_waiting_for_exchanges_is_counted():
    class Slow(GradientAllReduce):
        def exchange(self, bucket, comm, state):
            end_ns = time.perf_counter_ns() + 3_000_000
            while time.perf_counter_ns() < end_ns:
                pass
            comm.barrier()

    def body(comm):
        with make_engine(comm, Slow()) as engine:
            engine.at(Point.BACKWARD)
            return engine.counters.as_dict()

    for numbers in run_ranks(2, body):
        assert numbers["exchange/calls"] == 3
        assert numbers["wait/calls"] == 1
        assert 0.009 <= numbers["exchange/seconds"] < 30
        assert 0.003 <= numbers["wait/seconds"] < 30


@pytest.mark.parametrize(
    ("opens", "closes"),
    [(Point.FORWARD, Point.BACKWARD), (Point.STEP, Point.FORWARD), (Point.GRADIENT, Point.BACKWARD)],
)
def test_each_bucket_is_exchanged_and_committed_once_a_step(opens, closes):
    def body(comm):
        engine = make_engine(comm, Probe(opens, closes))
        for _ in range(3):
            engine.at(Point.FORWARD)
            backward(engine, "abc")
            engine.at(Point.STEP)
        engine.at(Point.FORWARD)
        engine.flush()
        committed = [len(state.committed) for state in engine.states]
        engine.close()
        return committed, engine.states

    committed, states = run_ranks(1, body)[0]
    assert committed == [3, 3, 3]
    for state in states:
        # Opened at FORWARD, the fourth step's exchange has begun as well; closing the engine commits it.
        steps = list(range(4 if opens is Point.FORWARD else 3))
        assert (state.exchanged, state.committed) == (steps, steps)


def test_an_error_in_an_exchange_surfaces_when_the_window_closes():
    @dataclass(frozen=True)
    class Broken(GradientAllReduce):
        def exchange(self, bucket, comm, state):
            raise ZeroDivisionError(bucket.index)

    def body(comm):
        engine = make_engine(comm, Broken())
        with pytest.raises(ZeroDivisionError):
            engine.at(Point.BACKWARD)
        with pytest.raises(CommAborted, match="an earlier task on this lane failed"):
            engine.flush()

    run_ranks(1, body)


def test_a_name_that_is_wrong_or_ready_twice_is_refused():
    def body(comm):
        specs = [TensorSpec("layer.weight", (1,), "float32"), TensorSpec("bias", (1,), "float32")]
        plan = Plan.pack(specs)
        with Engine(comm, GradientAllReduce(), plan, plan.allocate()) as engine:
            with pytest.raises(ArrayError, match=r"no tensor 'layer.weigth'; did you mean 'layer.weight'\?"):
                engine.ready("layer.weigth")
            engine.ready("bias")
            with pytest.raises(ArrayError, match="'bias' was complete already"):
                engine.ready("bias")
            with pytest.raises(ArrayError, match="ready_bucket: 'bias' was complete already"):
                engine.ready_bucket(0)
            for index in (-1, 1):
                with pytest.raises(ArrayError, match=rf"index is {index}, expected 0 to 0"):
                    engine.ready_bucket(index)
            engine.ready("layer.weight")

    run_ranks(1, body)


READ_ONLY = np.zeros(4, "f4")
READ_ONLY.flags.writeable = False
MEMORY = np.zeros(12, "f4")


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (None, r"storage\['grad'\] is None, expected a list"),
        ([[0.0] * 4] * 3, r"storage\['grad'\]\[0\]: expected a NumPy"),
        ([np.zeros(4, "f4"), READ_ONLY, np.zeros(4, "f4")], r"storage\['grad'\]\[1\] is read-only"),
        ([MEMORY[:4], MEMORY[8:], MEMORY[2:6]], r"\['grad'\]\[0\] and storage\['grad'\]\[2\] share memory"),
        ({"weight": [MEMORY[8:], *PLAN.allocate()[:2]], "grad": [MEMORY[i : i + 4] for i in (0, 4, 8)]}, "share"),
    ],
)
def test_storage_is_writable_memory_that_no_two_buckets_share(storage, message):
    algorithm = after(2, GradientAllReduce(), then=Decentralized()) if isinstance(storage, dict) else ByteGrad()
    with pytest.raises((ArrayError, UnsupportedError), match=message):
        run_ranks(1, lambda comm: Engine(comm, algorithm, PLAN, storage))


def test_storage_may_be_interleaved():
    memory = np.zeros((4, 3), "f4")
    run_ranks(1, lambda comm: Engine(comm, GradientAllReduce(), PLAN, list(memory.T)).close())


def test_plans_that_differ_between_ranks_are_refused():
    def body(comm):
        plan = Plan.pack(SPECS, bucket_bytes=16 if comm.rank else 1000)
        with pytest.raises(CommMismatch, match="have different plans"):
            Engine(comm, GradientAllReduce(), plan, plan.allocate())

    run_ranks(2, body)


def test_replan_moves_the_values_along():
    def body(comm):
        with make_engine(comm) as engine:
            for i, bucket in enumerate(engine.buckets):
                bucket.flat[...] = i
            plan = Plan.pack(reversed(SPECS), bucket_bytes=1000)
            (flat,) = engine.replan(plan)
            assert flat is engine.buckets[0].flat
            before = flat.tolist()
            backward(engine, "abc")
            with pytest.raises(ArrayError, match="other tensors"):
                engine.replan(Plan.pack(SPECS[:2]))
            return before, flat.tolist()

    for before, moved in run_ranks(2, body):
        assert before == moved == [2] * 4 + [1] * 4 + [0] * 4


def test_replan_within_the_same_memory_keeps_the_values():
    def body(comm):
        memory = np.repeat(np.float32([0, 1, 2]), 4)
        with Engine(comm, GradientAllReduce(), PLAN, list(memory.reshape(3, 4))) as engine:
            engine.replan(Plan.pack(reversed(SPECS), bucket_bytes=1000), [memory])
            return memory.tolist()

    assert run_ranks(1, body) == [[2] * 4 + [1] * 4 + [0] * 4]


def test_state_survives_a_round_trip():
    def body(comm):
        with make_engine(comm, Probe(Point.GRADIENT, Point.BACKWARD)) as engine:
            engine.at(Point.BACKWARD)
            engine.at(Point.STEP)
            saved = engine.state_dict()
            engine.at(Point.BACKWARD)
        with make_engine(comm, Probe(Point.GRADIENT, Point.BACKWARD)) as again:
            again.load_state_dict(saved)
            assert again.step == 1
            assert [state.momentum.tolist() for state in again.states] == [[1, 1]] * 3
            again.at(Point.BACKWARD)
            assert [state.exchanged for state in again.states] == [[1]] * 3
            with pytest.raises(ArrayError, match="nothing was saved for 'c'"):
                again.load_state_dict({**saved, "tensors": {name: saved["tensors"][name] for name in "ab"}})
        with make_engine(comm) as other, pytest.raises(ArrayError, match="saved with Probe"):
            other.load_state_dict(saved)

    run_ranks(2, body)


@dataclass
class Kept:
    exact: np.ndarray  # as long as the bucket
    pair: np.ndarray  # two of them
    count: int = 0


@dataclass(frozen=True)
class Keeper(Probe):
    """An algorithm that keeps arrays as long as its bucket."""

    def init(self, bucket, comm):
        return Kept(np.zeros_like(bucket.flat), np.zeros((2, bucket.flat.size), "float32"))

    def exchange(self, bucket, comm, state):
        state.exact += bucket.flat
        state.pair[1] -= bucket.flat
        state.count += 1

    def commit(self, bucket, state):
        pass


def test_replan_moves_the_state_along_by_the_names_of_the_tensors():
    def body(comm):
        with make_engine(comm, Keeper(Point.GRADIENT, Point.BACKWARD)) as engine:
            for i, bucket in enumerate(engine.buckets):
                bucket.flat[...] = i + 1
            engine.at(Point.BACKWARD)  # zeros: nothing was ready
            for i, bucket in enumerate(engine.buckets):
                bucket.flat[...] = i + 1
                engine.ready("abc"[i])
            engine.at(Point.BACKWARD)
            engine.replan(Plan.pack(reversed(SPECS), bucket_bytes=1000, alignment=32))
            (state,) = engine.states
            return state

    (state,) = run_ranks(1, body)
    expected = [3.0] * 4 + [2.0] * 4 + [1.0] * 4 + [0.0] * 20
    assert state.exact.tolist() == expected
    assert state.pair.tolist() == [[0.0] * 32, [-value for value in expected]]
    assert state.count == 2


def test_storage_for_both_payloads_where_an_algorithm_needs_both():
    warm_up = after(1, GradientAllReduce(), Decentralized())

    def body(comm):
        with pytest.raises(ArrayError, match=r"storage is for 'grad', but .* needs 'grad' and 'weight'"):
            Engine(comm, warm_up, PLAN, PLAN.allocate())
        storage = {"grad": PLAN.allocate(), "weight": PLAN.allocate()}
        with Engine(comm, warm_up, PLAN, storage) as engine:
            assert (engine.payload, engine.buckets[0].flat) == ("grad", storage["grad"][0])
            fill(engine, comm.rank)
            engine.at(Point.FORWARD)
            backward(engine, "abc")
            engine.at(Point.STEP)
            for flat in storage["weight"]:
                flat[...] = 10 * comm.rank
            engine.at(Point.FORWARD)
            assert engine.payload == "weight"
            assert engine.buckets[0].flat is storage["weight"][0]
            engine.at(Point.BACKWARD)
        return [storage[payload][0][0] for payload in ("grad", "weight")]

    assert run_ranks(2, body) == [[0.5, 5.0]] * 2


def test_a_stopped_engine_exchanges_nothing_until_it_resumes():
    def body(comm):
        with make_engine(comm) as engine:
            seen = []
            for action in (engine.stop, engine.stop, engine.resume, engine.resume):
                action()
                fill(engine, comm.rank)
                backward(engine, "abc")
                seen.append(float(engine.buckets[0].flat[0]))
            return seen

    assert run_ranks(2, body) == [[0.0, 0.0, 0.5, 0.5], [1.0, 1.0, 0.5, 0.5]]


def test_callbacks_are_called_once_the_engine_exists():
    def body(comm):
        calls = []
        callbacks = EngineCallbacks(
            complete_step=lambda: calls.append("complete"),
            make_equal=lambda: calls.append("equal"),
            detach=lambda: calls.append("detach"),
        )
        engine = Engine(comm, ByteGrad(), PLAN, PLAN.allocate(), callbacks=callbacks)
        engine.complete_step()
        engine.stop()
        for point in (Point.FORWARD, Point.BACKWARD, Point.STEP):
            engine.at(point)
        engine.resume()
        engine.abort()
        engine.abort()
        return calls, engine.closed

    assert run_ranks(2, body) == [(["complete", "equal", "detach"], True)] * 2


def test_a_registry_of_engines_gets_no_callbacks():
    class Registry:
        def register(self, engine):
            engine.complete_step()
            self.registered = engine

    def body(comm):
        calls = []
        comm.engine_registry = registry = Registry()
        engine = Engine(
            comm, ByteGrad(), PLAN, PLAN.allocate(), callbacks=EngineCallbacks(lambda: calls.append(1))
        )
        engine.close()
        return registry.registered is engine, calls

    assert run_ranks(1, body) == [(True, [])]


# What an engine alone says of ranks that differ ------------------------------------------------


def train_from(comm, weight, algorithm, *, before=None, names="abc"):
    """One step from weights that are `weight`, a number of this rank."""
    weights = PLAN.allocate()
    for flat in weights:
        flat[...] = weight if before is None else before
    with Engine(comm, algorithm, PLAN, {"weight": weights, "grad": PLAN.allocate()}) as engine:
        for flat in weights:
            flat[...] = weight
        for _ in range(2):
            engine.at(Point.FORWARD)
            backward(engine, names)
            engine.at(Point.STEP)


@pytest.mark.parametrize(
    "algorithm",
    [GradientAllReduce(), after(5, GradientAllReduce(), Decentralized()), QAdam(5), DiLoCo(10)],
    ids=repr,
)
def test_weights_that_differ_when_training_begins_are_an_error_on_all_ranks(algorithm):
    def body(comm):
        with pytest.raises(CommMismatch, match=r"rank 1 and rank 0 have different weights \('a' and 2 more\)"):
            train_from(comm, comm.rank, algorithm)
        train_from(comm, 1.5, algorithm)
        train_from(comm, comm.rank, Decentralized())  # exchanges weights, and needs no equal ones

    run_ranks(2, body)


def test_copies_of_weights_that_differed_when_the_engine_was_constructed_are_an_error():
    def body(comm):
        train_from(comm, 1.0, GradientAllReduce(), before=comm.rank)
        with pytest.raises(CommMismatch, match=r"copy of weights that were different on rank 1 and rank 0"):
            train_from(comm, 1.0, DiLoCo(10), before=comm.rank)

    run_ranks(2, body)


def test_weights_are_compared_again_after_a_checkpoint_was_loaded():
    def body(comm):
        weights = PLAN.allocate()
        with Engine(comm, GradientAllReduce(), PLAN, {"weight": weights, "grad": PLAN.allocate()}) as engine:
            points = Point.FORWARD, Point.BACKWARD, Point.STEP
            for point in points:
                engine.at(point)
            weights[2][...] = comm.rank  # not seen: only the first step compares
            for point in points:
                engine.at(point)
            engine.load_state_dict(engine.state_dict())
            with pytest.raises(CommMismatch, match=r"different weights \('c'\)"):
                engine.at(Point.FORWARD)
            weights[2][...] = 0

    run_ranks(2, body)


WHOLE = (Point.FORWARD, Point.BACKWARD, Point.STEP)


def make_steps(engine, count, points):
    for _ in range(count):
        for point in points:
            engine.at(point)


@pytest.mark.algorithms("all")
@pytest.mark.parametrize(
    ("algorithm", "left_out"),
    [
        *((Decentralized("all"), point) for point in WHOLE[:2]),
        (DiLoCo(2), Point.FORWARD),
        (LowPrecisionOnePeer(), Point.FORWARD),
        (QAdam(2), Point.BACKWARD),
        *((every(2, ByteGrad()), point) for point in WHOLE[:2]),
        *((after(2, ByteGrad(), Decentralized("all")), point) for point in WHOLE[:2]),
    ],
    ids=str,
)
def test_a_point_that_is_left_out_is_an_error_where_the_algorithm_depends_on_it(algorithm, left_out):
    def body(comm):
        storage = {"grad": PLAN.allocate(), "weight": PLAN.allocate()}
        with Engine(comm, algorithm, PLAN, storage) as engine:
            with pytest.raises(ArrayError, match=rf"expected {left_out} before, in step \d; call engine.at"):
                make_steps(engine, 2, [point for point in WHOLE if point is not left_out])
            engine.stop()

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [QAdam(2), DiLoCo(1), after(2, ByteGrad(), Decentralized("all"))], ids=str)
def test_steps_that_are_never_reported_are_warned_of(algorithm):
    def body(comm):
        with Engine(comm, algorithm, PLAN, {"grad": PLAN.allocate(), "weight": PLAN.allocate()}) as engine:
            make_steps(engine, 2, WHOLE[:2])

    with pytest.warns(UserWarning, match=r"engine.at\(Point.STEP\) was never called"):
        run_ranks(2, body)


def test_several_passes_may_come_before_a_step_and_a_step_begins_anew_after_a_checkpoint_is_loaded():
    def body(comm):
        with Engine(comm, DiLoCo(1), PLAN, {"weight": PLAN.allocate(), "grad": PLAN.allocate()}) as engine:
            make_steps(engine, 1, (*WHOLE[:2], *WHOLE[:2], Point.STEP))
            saved = engine.state_dict()
            make_steps(engine, 1, WHOLE[:2])
            engine.load_state_dict(saved)
            make_steps(engine, 1, WHOLE)
            return engine.step

    assert run_ranks(2, body) == [2, 2]


@pytest.mark.parametrize(("algorithm", "points"), [(ByteGrad(), WHOLE[1:2]), (DiLoCo(2), WHOLE[::2])])
def test_a_point_may_be_left_out_where_the_algorithm_does_not_depend_on_it(algorithm, points):
    def body(comm):
        with Engine(comm, algorithm, PLAN, {"grad": PLAN.allocate(), "weight": PLAN.allocate()}) as engine:
            make_steps(engine, 4, points)
            return engine.counter.calls

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert min(run_ranks(2, body)) > 0


def test_weights_that_a_wrong_optimizer_makes_differ_are_reported_once():
    def body(comm):
        weights, grads = PLAN.allocate(), PLAN.allocate()
        with Engine(comm, QAdam(1), PLAN, {"weight": weights, "grad": grads}) as engine:
            for _ in range(34):
                engine.at(Point.FORWARD)
                for grad in grads:
                    grad[...] = comm.rank + 1
                backward(engine, PLAN.cut(grads))
                for weight, grad in zip(weights, grads, strict=True):
                    weight -= grad
                engine.at(Point.STEP)

    with pytest.warns(
        UserWarning, match=r"at: QAdam.* keeps weights equal, but rank 1 .* optim.QAdam, with the same"
    ):
        run_ranks(2, body)


def test_weights_are_compared_one_step_after_another_algorithm_began():
    def body(comm):
        weights = PLAN.allocate()
        algorithm = after(1, ByteGrad(), GradientAllReduce())
        with Engine(comm, algorithm, PLAN, {"weight": weights, "grad": PLAN.allocate()}) as engine:
            for step in range(2):
                for point in WHOLE:
                    engine.at(point)
                weights[0][...] = step * comm.rank
            engine.at(Point.FORWARD)

    with pytest.warns(UserWarning, match="keeps weights equal, but rank 1 and rank 0 have different"):
        run_ranks(2, body)


def test_a_tensor_that_is_not_ready_is_reported_once_on_the_rank_that_left_it_out():
    text = r"in step 0, 'b' and 1 more were not ready on rank 1: zeros are averaged in place of their gradients"

    with pytest.warns(UserWarning, match=text) as said:
        run_ranks(2, lambda comm: train_from(comm, 1.0, GradientAllReduce(), names="a" if comm.rank else "abc"))

    assert len(said) == 1


def test_weights_in_the_storage_of_one_rank_alone_are_an_error_on_all_ranks():
    def body(comm):
        storage = {"grad": PLAN.allocate()} | ({"weight": PLAN.allocate()} if comm.rank else {})
        with pytest.raises(CommMismatch, match=r"different storage: .*\['grad'"):
            Engine(comm, GradientAllReduce(), PLAN, storage)

    run_ranks(2, body)


def _replaced_item(flats, storage):
    flats[1] = flats[1] - 1


def _replaced_items(flats, storage):
    flats[:] = [flat - 1 for flat in flats]


def _one_more(flats, storage):
    flats.append(flats[0])


def _replaced_list(flats, storage):
    storage["weight"] = [flat - 1 for flat in flats]


@pytest.mark.parametrize("replace", [_replaced_item, _replaced_items, _one_more, _replaced_list])
def test_an_array_that_is_exchanged_is_not_replaced_unnoticed(replace):
    def body(comm):
        flats = list(PLAN.allocate())  # a list of the user's own
        storage = {"weight": flats, "grad": PLAN.allocate()}
        with Engine(comm, DiLoCo(2), PLAN, storage) as engine:
            for _ in range(3):
                engine.at(Point.FORWARD)
                engine.at(Point.BACKWARD)
                flats[0] -= 1
                engine.at(Point.STEP)
            engine.at(Point.FORWARD)
            engine.at(Point.BACKWARD)
            replace(flats, storage)
            with pytest.raises(ArrayError, match=r"storage\['weight'\].*flats\[0\]\[...\] ="):
                engine.at(Point.STEP)
            engine.abort()

    run_ranks(2, body)


def test_a_gradient_of_a_list_that_is_replaced_is_an_error():
    def body(comm):
        flats = list(PLAN.allocate())
        with Engine(comm, GradientAllReduce(), PLAN, flats) as engine:
            engine.at(Point.FORWARD)
            flats[0] = np.ones_like(flats[0])
            engine.at(Point.BACKWARD)
            with pytest.raises(ArrayError, match=r"storage\['grad'\]: item 0 is another array"):
                engine.at(Point.STEP)

    run_ranks(2, body)


def test_weights_that_are_only_compared_may_be_replaced():
    def body(comm):
        weights, grads = list(PLAN.allocate()), PLAN.allocate()
        with Engine(comm, GradientAllReduce(), PLAN, {"weight": weights, "grad": grads}) as engine:
            for _ in range(18):  # compared before step 16, with the arrays that are there
                engine.at(Point.FORWARD)
                grads[0][...] = comm.rank
                backward(engine, "abc")
                weights[:] = [flat - grad for flat, grad in zip(weights, grads, strict=True)]
                engine.at(Point.STEP)
            assert engine._weights._given is weights
        return weights[0].tolist()

    first, second = run_ranks(2, body)
    assert first == second == [-9.0] * 4


def test_the_memory_that_replan_returns_replaces_what_was_given():
    def body(comm):
        flats = PLAN.allocate()
        with Engine(comm, Decentralized(), PLAN, flats) as engine:
            new = engine.replan(Plan.pack(SPECS))
            flats.clear()  # no longer in use
            engine.at(Point.FORWARD)
            engine.at(Point.BACKWARD)
            new[0] -= 1
            engine.at(Point.STEP)
            with pytest.raises(ArrayError, match="is a bucket's memory"):
                new[0] = new[0] - 1

    run_ranks(2, body)


def test_the_end_of_a_communicator_says_nothing_of_exchanges_of_an_engine_that_is_gone(recwarn):
    """Rank 1 begins a round that rank 0, whose engine is gone, does not make."""

    def body(comm):
        engine = make_engine(comm, AsyncModelAverage(interval_s=0, warmup_steps=0))
        schedule = engine._schedule
        for _ in range(1 + comm.rank):
            until(lambda: all(future.done() for future in schedule._under_way))
            for point in (Point.FORWARD, Point.BACKWARD, Point.STEP):
                engine.at(point)
        schedule = None
        del engine
        comm.barrier()
        comm.close()

    run_ranks(2, body, timeout_s=0.5)
    assert not recwarn.list
