"""An algorithm needs four members only; wherever algorithms are taken, one with no others is."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from support.own_algorithms import OWN_ALGORITHMS, Beside, Plain, RandomPeer

from bagua_comm import (
    Algorithm,
    ArrayError,
    Average,
    ByteGrad,
    CommMismatch,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    Exact,
    GradientAllReduce,
    Hierarchical,
    MinMaxUInt8,
    Plan,
    Point,
    QAdam,
    Quantized,
    Rounds,
    TensorSpec,
    UnsupportedError,
    Window,
    after,
    every,
)
from bagua_comm.algorithms import base
from bagua_comm.engine import check_fit
from bagua_comm.planning.costmodel import Cluster, Job, predict
from bagua_comm.testing import check_algorithm, run_ranks

PLAN = Plan.pack([TensorSpec(name, (2, 2), "float32") for name in "abc"], bucket_bytes=16, alignment=4)


def test_classes_that_a_function_defines_keep_the_contract_too():
    @dataclass(frozen=True)
    class Mine(Plain):
        pass

    @dataclass(frozen=True)
    class Coded(MinMaxUInt8):
        pass

    @dataclass(frozen=True)
    class Mean(Average):
        inner: object = Exact()

        def bind(self, comm):
            return self.inner.bind(comm)

    for algorithm in (
        Mine(),
        every(2, Mine()),
        after(1, Mine(), RandomPeer(3)),
        GradientAllReduce(Quantized(Coded(block=4), min_bytes=0)),
        GradientAllReduce(ErrorFeedback(Quantized(Coded(block=4)))),
        GradientAllReduce(Hierarchical(Quantized(Coded(block=4)))),
        GradientAllReduce(Mean(Quantized(Coded(block=4)))),
        DiLoCo(2, average=Mean()),
    ):
        check_algorithm(algorithm, sizes=(2,))


@pytest.mark.algorithms("all")
@pytest.mark.parametrize("algorithm", OWN_ALGORITHMS, ids=repr)
def test_the_cost_model_says_that_it_knows_nothing_of_it(algorithm):
    for whole in (algorithm, after(2, ByteGrad(), algorithm)):
        with pytest.raises(UnsupportedError, match="the model does not know what"):
            predict(whole, Job(100), Cluster(2))


def test_every_dtype_and_number_of_ranks_fits_if_it_does_not_say_otherwise():
    plan = Plan.pack([TensorSpec("a", (2,), "int32")])
    for algorithm in (*OWN_ALGORITHMS, every(2, Plain()), after(1, Plain(), RandomPeer())):
        check_fit(algorithm, plan, 3)
    with pytest.raises(UnsupportedError, match=r"tensor 'a': .* cannot average int32"):
        check_fit(after(1, Plain(), every(2, Decentralized())), plan, 2)
    with pytest.raises(ArrayError):
        check_fit(after(1, Plain(), every(2, Decentralized("shift_one"))), PLAN, 3)


def test_members_have_defaults():
    plain = Plain()
    assert (plain.phases, plain.phase(7), plain.lends, plain.drifts) == ((plain,), plain, None, False)
    assert not plain.defines("commit")
    assert RandomPeer().defines("commit")
    plain.check("int8")
    plain.check_size(3)


def test_fields_replace_members():
    @dataclass(frozen=True)
    class Particular(Plain):
        lends: str
        phases: tuple = field(default_factory=lambda: (Plain(), RandomPeer()))
        drifts: bool = True

        def __post_init__(self):
            object.__setattr__(self, "commit", lambda bucket, state: None)

    made = Particular("momentum")
    assert (made.lends, made.phases, made.drifts) == ("momentum", (Plain(), RandomPeer()), True)
    assert made.defines("commit")
    assert made.equal_start


def test_an_algorithm_without_a_required_member_or_without_the_base_class_is_refused():
    @dataclass(frozen=True)
    class Empty(Algorithm):
        payload = "grad"

        def init(self, bucket, comm):
            return None

    @dataclass(frozen=True)
    class Duck:
        payload, window = Plain.payload, Plain.window
        init, exchange = Plain.init, Plain.exchange

    @dataclass(frozen=True)
    class Around(Plain):
        def __getattr__(self, name):
            return getattr(QAdam(2), name)

    with pytest.raises(ArrayError, match="expected an algorithm with window and exchange; define them"):
        every(2, Empty())
    with pytest.raises(ArrayError, match=r"let Around inherit from .*Combinator"):
        every(2, Around())
    with pytest.raises(ArrayError, match=r"let Duck inherit from bagua_comm.algorithms.Algorithm"):
        every(2, Duck())


def test_an_algorithm_with_rounds_runs_in_rounds():
    assert Beside().window == Rounds(0.0)
    assert base.runs_in_rounds(after(5, Plain(), Beside()))
    assert not base.runs_in_rounds(after(5, Plain(), RandomPeer()))
    with pytest.raises(ArrayError, match="begin by time"):
        every(2, Beside())


def test_rounds_make_ranks_equal_when_they_stop():
    def body(comm):
        with Engine(comm, Beside(), PLAN, PLAN.allocate()) as engine:
            for bucket in engine.buckets:
                bucket.flat[...] = comm.rank
            for _ in range(3):
                for point in (Point.FORWARD, Point.BACKWARD, Point.STEP):
                    engine.at(point)
            engine.stop()
            return [bucket.flat[0] for bucket in engine.buckets]

    first, second = run_ranks(2, body)
    np.testing.assert_array_equal(first, second)


def test_check_algorithm_refuses_a_window_that_opens_or_closes_at_no_point_of_a_step():
    @dataclass(frozen=True)
    class Odd(Plain):
        window = Window("forward", Point.BACKWARD)

    with pytest.raises(AssertionError, match="expected a Point of a step"):
        check_algorithm(Odd())


def test_check_algorithm_names_the_step_and_the_bucket_of_gradients_that_differ():
    @dataclass(frozen=True)
    class Alone(Plain):
        def exchange(self, bucket, comm, state):
            pass

    with pytest.raises(CommMismatch, match=r"step 0, bucket 0: .* ranks hold different gradients"):
        check_algorithm(Alone(), sizes=(2,))


def test_check_algorithm_refuses_classes_that_are_no_dataclass():
    class Loose(Algorithm):
        payload, window = Plain.payload, Plain.window
        init, exchange = Plain.init, Plain.exchange

    with pytest.raises(AssertionError, match="is not a dataclass"):
        check_algorithm(Loose())


# Averages of users ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Narrow(Average):
    """An average whose `bind` takes the communicator alone."""

    def bind(self, comm):
        return lambda x: comm.allreduce(x, out=x, op="avg")


@dataclass(frozen=True)
class Wide(Average):
    """An average that is bound to arrays like one that it is given."""

    seen: list = field(default_factory=list, compare=False, repr=False)

    def bind(self, comm, like=None):
        self.seen.append(None if like is None else like.size)
        return lambda x: comm.allreduce(x, out=x, op="avg")


@dataclass(frozen=True)
class Open(Wide):
    """An average that takes more than it knows."""

    def bind(self, comm, **options):
        return super().bind(comm, **options)


@pytest.mark.parametrize("average", [Narrow(), Wide(), Open()], ids=repr)
@pytest.mark.parametrize("kind", [GradientAllReduce, lambda average: DiLoCo(2, average=average)])
def test_averages_with_and_without_like_are_bound(average, kind):
    check_algorithm(kind(average), sizes=(2,))


@pytest.mark.parametrize("make", [Wide, Open])
@pytest.mark.parametrize(
    "kind",
    [GradientAllReduce, lambda average: DiLoCo(2, average=average), lambda average: QAdam(1, average=average)],
)
def test_an_average_sees_the_bucket_that_it_is_bound_for(make, kind):
    average = make()

    def body(comm):
        with Engine(comm, kind(average), PLAN, PLAN.allocate()):
            pass

    run_ranks(1, body)
    assert average.seen == [4, 4, 4]
