"""One matrix of algorithms and laws: contract, equations, precisions, other buckets, restarts, refusals."""

import pytest
from support.own_algorithms import OWN_ALGORITHMS, Half, Plain, RandomPeer, Unhashable
from support.references import (
    STEPS,
    AdamTrainer,
    AsyncTrainer,
    assert_follows,
    assert_restarts,
    bits,
    follows,
    trainer_of,
    trajectories,
)

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    Exact,
    Float16,
    GradientAllReduce,
    Hierarchical,
    Int4,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    MinMaxUInt8,
    Plan,
    QAdam,
    Quantized,
    Reproducible,
    SparseLoCo,
    StreamingDiLoCo,
    TensorSpec,
    TopK,
    UnsupportedError,
    after,
    by_node,
    every,
)
from bagua_comm.algorithms.base import runs_in_rounds
from bagua_comm.testing import check_algorithm, run_ranks

PAIRS, ONE_PEER = Decentralized("shift_one"), Decentralized("one_peer_exponential")
ALWAYS, ASYNC_WARM_UP = AsyncModelAverage(interval_s=0), AsyncModelAverage(interval_s=0, warmup_steps=4)
ADAM = QAdam(warmup_steps=AdamTrainer.optimizer.warmup_steps, beta1=0.8)
EXACT_ADAM = QAdam(ADAM.warmup_steps, ADAM.beta1, average=Exact())
LOW_PRECISION = [LowPrecisionDecentralized(), LowPrecisionOnePeer()]
SPARSE = {"chunk": 96, "keep": 10}
STOCHASTIC = Quantized(Int4(rounding="stochastic"), min_bytes=0)
FED = ErrorFeedback(Quantized(MinMaxUInt8(block=16)))
LOCO = ErrorFeedback(FED.inner, 0.8, 3, MinMaxUInt8(block=24))
FEW = (1, 3)

# The contract --------------------------------------------------------------------------------------------

CONTRACT = {
    FEW: [
        *(ALWAYS, AsyncModelAverage(interval_s=0, warmup_steps=2)),
        *(after(1, GradientAllReduce(), ALWAYS), Decentralized(), ONE_PEER, *LOW_PRECISION),
        *(DiLoCo(local_steps=2), DiLoCo(1, average=Quantized()), GradientAllReduce(), SparseLoCo(2, **SPARSE)),
        GradientAllReduce(Hierarchical(Quantized(MinMaxUInt8.bagua()))),
        *(QAdam(warmup_steps=2), QAdam(1, average=ErrorFeedback()), GradientAllReduce(Hierarchical(FED))),
        SparseLoCo(2, average=Hierarchical(ErrorFeedback(TopK(96, 10), retain=0.9))),
        *(GradientAllReduce(Reproducible()), GradientAllReduce(Reproducible(7))),
        *(StreamingDiLoCo(2, 2, 1), StreamingDiLoCo(3, 1, 0, average=Quantized())),
        *OWN_ALGORITHMS,
    ],
    (2, 4): [PAIRS],
    (3,): [
        *(type(each)(Int4(rounding="stochastic")) for each in LOW_PRECISION),
        *(GradientAllReduce(LOCO), GradientAllReduce(Hierarchical(LOCO))),
    ],
    (2,): [  # of the others, restarts draw the same random numbers
        *(QAdam(1, average=LOCO), QAdam(2, average=STOCHASTIC), DiLoCo(2, average=STOCHASTIC)),
        *(GradientAllReduce(STOCHASTIC), GradientAllReduce(Hierarchical(STOCHASTIC))),
        GradientAllReduce(ErrorFeedback(Quantized(STOCHASTIC.codec))),
    ],
}
"""Algorithms by the numbers of ranks; those with a name are checked by their defaults in test_named.py."""

STEPWISE = [Plain(), Unhashable(), RandomPeer(), Half()]
COMBINED = {
    FEW: [
        *(every(2, each) for each in (Decentralized(), *LOW_PRECISION, DiLoCo(2))),
        *(after(0, GradientAllReduce(), Decentralized()), after(1, ByteGrad(), DiLoCo(1))),
        *(after(1, ONE_PEER, GradientAllReduce()), after(1, LowPrecisionDecentralized(), QAdam(1))),
        after(1, LowPrecisionOnePeer(), after(1, GradientAllReduce(), LowPrecisionDecentralized())),
        after(4, GradientAllReduce(ErrorFeedback(Quantized())), DiLoCo(3)),
    ],
    (2,): [
        *(every(2, each) for each in STEPWISE),
        *(after(2, GradientAllReduce(), each) for each in OWN_ALGORITHMS),
        *(after(2, each, every(3, Plain())) for each in OWN_ALGORITHMS),
    ],
}
LEVELS = [
    *(by_node(each) for each in (Decentralized(), *LOW_PRECISION, DiLoCo(2), every(2, ONE_PEER))),
    by_node(after(2, Decentralized(), DiLoCo(2))),
]


@pytest.mark.algorithms("all")
@pytest.mark.parametrize(("algorithm", "sizes"), [(x, n) for n, xs in CONTRACT.items() for x in xs], ids=str)
def test_the_contract_is_kept(algorithm, sizes):
    check_algorithm(algorithm, sizes=sizes)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize(("algorithm", "sizes"), [(x, n) for n, xs in COMBINED.items() for x in xs], ids=str)
def test_the_contract_is_kept_by_combinations(algorithm, sizes):
    check_algorithm(algorithm, sizes=sizes)


def check_on(nodes, algorithm):
    run_ranks(len(nodes), lambda comm: check_algorithm(algorithm, comm=comm), nodes=nodes)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", LEVELS, ids=repr)
def test_the_contract_is_kept_on_nodes(algorithm):
    check_algorithm(algorithm, sizes=(1, 3))
    for nodes in ("aabb", "abbb"):
        check_on(nodes, algorithm)


@pytest.mark.covering(1)
@pytest.mark.parametrize("nodes", ["aabb", "aba"])
@pytest.mark.parametrize(
    "inner", [Exact(), Quantized(), ErrorFeedback(), ErrorFeedback(Quantized(STOCHASTIC.codec))]
)
def test_the_contract_is_kept_with_a_codec_inside_nodes(nodes, inner):
    check_on(nodes, GradientAllReduce(Hierarchical(inner, inside=Quantized(MinMaxUInt8(block=16)))))


# Equations -----------------------------------------------------------------------------------------------


def assert_follows_its_equations(algorithm, ranks, dtype="float32", atol=1e-5, **settings):
    actual = trajectories(ranks, algorithm, dtype=dtype, trainer=trainer_of(algorithm), **settings)
    assert_follows(actual, ranks=ranks, dtype=dtype, atol=atol, **follows(algorithm))


EQUATIONS = {
    (1, 2, 3): LOW_PRECISION,
    FEW: [
        *(GradientAllReduce(), ALWAYS, Decentralized(), EXACT_ADAM, ADAM),
        *(GradientAllReduce(Quantized(codec, 0)) for codec in (MinMaxUInt8(), Float16())),
        *(DiLoCo(1, 0.6, 0.8), DiLoCo(3, 0.6, 0.8), after(4, GradientAllReduce(), DiLoCo(3, 0.6, 0.8))),
        *(ASYNC_WARM_UP, SparseLoCo(1, **SPARSE), SparseLoCo(2, **SPARSE, bits=32, decay=1.0)),
        SparseLoCo(3, **SPARSE, decay=0.5, outer_lr=0.7),
        *(DiLoCo(2, average=Quantized()), every(3, LowPrecisionDecentralized())),
        after(3, LowPrecisionDecentralized(), Decentralized()),
    ],
    (3, 8): [ONE_PEER],
    (2, 8): [PAIRS],
    (8,): [LowPrecisionOnePeer()],
    (3,): [
        *(type(each)(codec) for each in LOW_PRECISION for codec in (Float16(), Int4())),
        *(every(n, each) for each in (Decentralized(), ONE_PEER) for n in (1, 3)),
        after(2, GradientAllReduce(), after(3, every(2, Decentralized()), GradientAllReduce())),
    ],
    (4,): [
        *(type(each)(MinMaxUInt8.bagua()) for each in LOW_PRECISION),
        *(every(3, PAIRS), after(3, ONE_PEER, LowPrecisionDecentralized()), after(5, PAIRS, GradientAllReduce())),
        after(2, GradientAllReduce(), every(3, PAIRS)),  # which counts its steps from 0
    ],
}
PRECISIONS = {
    ALWAYS: {"float64": 1e-12, "bfloat16": 0.1},
    Decentralized(): {"float64": 1e-12, "float16": 1e-2},
    ONE_PEER: {"float64": 1e-12, "bfloat16": 8e-2},
    LOW_PRECISION[0]: {"bfloat16": 0.1},
    LOW_PRECISION[1]: {"float16": 0.05},
    ADAM: {"float16": 0.1, "bfloat16": 0.2},
    DiLoCo(3): {"float64": 1e-12, "bfloat16": 0.15},
    SparseLoCo(2, chunk=16, keep=16, bits=32): {"float16": 2e-2},  # rounding chooses no elements
    after(4, GradientAllReduce(), every(2, Decentralized())): {"float16": 0.1},
}
BUCKETS = [
    *((each, 4, {3: 10_000, 6: 1}, 1e-5) for each in (Decentralized(), PAIRS, ONE_PEER)),
    *(
        (each, 3, {3: 10_000, 6: 1}, 0.05) for each in LOW_PRECISION
    ),  # blocks that hold other tensors round otherwise
    (EXACT_ADAM, 3, {3: 10_000, 6: 1}, 1e-5),
    (DiLoCo(3), 3, {4: 10_000, 6: 1}, 1e-5),
    (after(4, GradientAllReduce(), DiLoCo(3)), 3, {2: 10_000, 4: 1, 6: 100}, 1e-5),
]


@pytest.mark.algorithms("all")
@pytest.mark.parametrize(
    ("algorithm", "ranks"), [(x, n) for ns, xs in EQUATIONS.items() for x in xs for n in ns], ids=str
)
def test_weights_follow_the_equations(algorithm, ranks):
    assert_follows_its_equations(algorithm, ranks)


@pytest.mark.algorithms("all")
@pytest.mark.parametrize(
    ("algorithm", "dtype", "atol"),
    [(x, *each) for x, found in PRECISIONS.items() for each in found.items()],
    ids=str,
)
def test_other_precisions(algorithm, dtype, atol):
    assert_follows_its_equations(algorithm, 2 if isinstance(algorithm, SparseLoCo) else 3, dtype, atol)


@pytest.mark.algorithms("all")
@pytest.mark.parametrize(("algorithm", "ranks", "replans", "atol"), BUCKETS, ids=str)
def test_training_continues_in_other_buckets(algorithm, ranks, replans, atol):
    assert_follows_its_equations(algorithm, ranks, atol=atol, replans=replans)


EQUAL = [(ADAM, 1), *((each, 3) for each in (DiLoCo(3), DiLoCo(3, average=Quantized()), SparseLoCo(3, **SPARSE)))]


@pytest.mark.parametrize(("algorithm", "period"), EQUAL, ids=str)
def test_all_ranks_hold_the_same_weights_bit_for_bit_after_an_outer_step(algorithm, period):
    first, *others = trajectories(3, algorithm, trainer=trainer_of(algorithm))
    for other in others:
        same = [bits([x]) == bits([y]) for x, y in zip(first, other, strict=True)]
        assert same == [step % period == 0 for step in range(STEPS)]


# Restarts ------------------------------------------------------------------------------------------------


class Pausing(AsyncTrainer):
    stops = (3, 5, 7)


RESTARTS = [
    *((each, nodes, Pausing.stops) for each, nodes in ((ALWAYS, "a"), (ALWAYS, "ab"), (ASYNC_WARM_UP, "abc"))),
    *((Decentralized(), "ab", (5,)), (PAIRS, "ab", (5,)), (ONE_PEER, "abc", (5, 7))),
    *((each, "abc", (4, 7)) for each in LOW_PRECISION),
    *((ADAM, "ab", (2, 4, 7)), (DiLoCo(3), "a", (3, 5, 7)), (SparseLoCo(3, **SPARSE), "a", (3, 5, 7))),
    *((DiLoCo(3, average=each), "ab", (3, 5, 7)) for each in (Exact(), Quantized())),
    (SparseLoCo(3, **SPARSE), "ab", (3, 5, 7)),
    *(  # what is under way is in the checkpoint, and saving changes nothing
        (each, "ab", (3, 5, 7))
        for each in (
            *(StreamingDiLoCo(4, 2, 2), StreamingDiLoCo(3, 2, 2, average=ErrorFeedback())),
            StreamingDiLoCo(4, 2, 0),
        )
    ),
    (after(6, StreamingDiLoCo(4, 2, 2, mix=0.0), Decentralized()), "ab", (5, 6, 7)),
    *((GradientAllReduce(ErrorFeedback()), "ab", (2, 7)), (GradientAllReduce(Hierarchical(FED)), "abb", (2, 7))),
    *((every(3, PAIRS), "ab", (2, 4)), (after(4, GradientAllReduce(FED), DiLoCo(3)), "ab", (2, 4, 5, 7))),
    (after(5, LowPrecisionOnePeer(), every(2, LowPrecisionDecentralized())), "abc", (4, 5, 7)),
    *((by_node(LowPrecisionDecentralized()), "abb", (5, 7)), (by_node(DiLoCo(3)), "aabb", (5,))),
]


@pytest.mark.algorithms("all")
@pytest.mark.parametrize(("algorithm", "nodes", "at"), RESTARTS, ids=str)
def test_training_continues_after_a_restart(algorithm, nodes, at):
    trainer = Pausing if runs_in_rounds(algorithm) else trainer_of(algorithm)
    assert_restarts(len(nodes), algorithm, at=at, nodes=nodes, trainer=trainer)


# Bad input -----------------------------------------------------------------------------------------------

DTYPES = [
    *((each, "int32") for each in (Decentralized(), DiLoCo(), SparseLoCo(), ALWAYS, ASYNC_WARM_UP)),
    (every(2, Decentralized()), "int32"),
    *(
        (after(1, Decentralized(), GradientAllReduce()), "int32"),
        (after(1, ByteGrad(), Decentralized()), "int32"),
    ),
    *(
        (each, "float64")
        for each in (*LOW_PRECISION, QAdam(), ByteGrad(), DiLoCo(average=Quantized()), SparseLoCo())
    ),
    *((GradientAllReduce(ErrorFeedback()), "float64"), (StreamingDiLoCo(average=Quantized(Int4())), "float64")),
]


@pytest.mark.algorithms("all")
@pytest.mark.parametrize(("algorithm", "dtype"), DTYPES, ids=str)
def test_a_dtype_that_cannot_be_averaged_is_refused_with_the_tensor_on_all_ranks(algorithm, dtype):
    specs = [TensorSpec("narrow", (3,), "float32"), TensorSpec("odd one", (3,), dtype)]
    plan = Plan.pack(specs, groups=algorithm.groups(specs))
    storage = {payload: plan.allocate() for payload in ("grad", "weight")}

    def body(comm):
        with pytest.raises(UnsupportedError, match=rf"'odd one'.*{dtype}"):
            Engine(comm, algorithm, plan, storage)

    run_ranks(2, body)


REFUSED = [
    *((AsyncModelAverage, {"interval_s": value}, "interval_s") for value in (-1, -0.1, float("nan"))),
    (AsyncModelAverage, {"warmup_steps": -1}, "warmup_steps"),
    (Decentralized, {"peers": "ring"}, "ring"),
    *((type(each), {"codec": "MinMaxUInt8"}, "codec") for each in LOW_PRECISION),
    *((QAdam, {"warmup_steps": value}, "warmup_steps") for value in (0, -1)),
    *((QAdam, {"beta1": value}, "beta1") for value in (-0.1, 1.0)),
    *((each, {"average": "mean"}, "average") for each in (QAdam, DiLoCo, SparseLoCo)),
    *((DiLoCo, {"local_steps": value}, "local_steps") for value in (0, -1)),
    (SparseLoCo, {"local_steps": 0}, "local_steps"),
    (SparseLoCo, {"chunk": 4097}, "chunk is 4097, .* from 2 to 4096, since indices have 12 bits"),
    (SparseLoCo, {"chunk": 8, "keep": 10}, "keep is 10, .* even int from 2 to the chunk of 8"),
    *((SparseLoCo, {"keep": value}, f"keep is {value}, .* even") for value in (3, 0)),
    (SparseLoCo, {"bits": 4}, "bits is 4, expected 2, 16 or 32"),
    *((SparseLoCo, {"decay": value}, f"decay is {value!r}, .* from 0 to 1") for value in (1.5, "much")),
    (SparseLoCo, {"outer_lr": 0}, "outer_lr is 0"),
    (SparseLoCo, {"average": Exact(), "keep": 32}, r"keep is 32 beside average=Exact\(\)"),
    (StreamingDiLoCo, {"local_steps": 0}, "local_steps is 0, .* at least 1"),
    *((StreamingDiLoCo, {"fragments": value}, f"fragments is {value}, .* integer") for value in (0, 2.0)),
    (StreamingDiLoCo, {"delay": -1}, "delay is -1, .* at least 0"),
    (StreamingDiLoCo, {"delay": 30}, "delay is 30 and local_steps 30, .* delay < local_steps"),
    *((StreamingDiLoCo, {"mix": value}, f"mix is {value!r}, .* number") for value in (1, "half")),
    (StreamingDiLoCo, {"outer_lr": 0}, "outer_lr is 0 and outer_momentum 0.9"),
    (StreamingDiLoCo, {"outer_momentum": 1}, "outer_momentum 1, expected"),
    (StreamingDiLoCo, {"average": "mean"}, "StreamingDiLoCo: .*average is 'mean', expected an Average"),
    *((every, {"n": value, "algorithm": Decentralized()}, "every") for value in (0, -1, 1.5)),
    *((every, {"n": 2, "algorithm": value}, "every") for value in ("bytegrad", None, Decentralized, Quantized())),
    (every, {"n": 2, "algorithm": after(1, Decentralized(), AsyncModelAverage())}, "every: rounds of .* by time"),
    *((after, {"steps": value, "first": ByteGrad(), "then": ByteGrad()}, "after") for value in (-1, 1.5)),
    *((after, {"steps": 1, "first": value, "then": ByteGrad()}, "after") for value in ("bytegrad", ByteGrad)),
    (after, {"steps": 1, "first": ByteGrad(), "then": None}, "after"),
    *(
        (by_node, {"algorithm": value}, "exchanges gradients.*take Hierarchical")
        for value in (GradientAllReduce(), after(2, GradientAllReduce(), Decentralized()))
    ),
    (by_node, {"algorithm": AsyncModelAverage()}, "no step waits for the rounds"),
    (by_node, {"algorithm": "decentralized"}, "expected an algorithm"),
]


@pytest.mark.parametrize(
    ("make", "settings", "words"), REFUSED, ids=[f"{make.__name__}: {words}" for make, _, words in REFUSED]
)
def test_settings_out_of_range_are_refused(make, settings, words):
    with pytest.raises(ArrayError, match=words):
        make(**settings)
