"""Algorithms by name: every name makes its algorithm, and an unknown one is an error with the known names."""

import dataclasses
import json

import pytest

import bagua_comm
from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    BFloat16,
    ByteGrad,
    Decentralized,
    DiLoCo,
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
    SparseLoCo,
    StreamingDiLoCo,
    TensorSpec,
    TopK,
    after,
    by_node,
    every,
)
from bagua_comm.algorithms import NAMED, from_name, named
from bagua_comm.engine.checks import check_fit
from bagua_comm.planning.costmodel import METHODS
from bagua_comm.testing import check_algorithm

ONE_PEER = Decentralized("one_peer_exponential")
MEANT = {
    "gradient-allreduce": GradientAllReduce(),
    "exact": GradientAllReduce(Exact()),
    "float16": GradientAllReduce(Quantized(Float16())),
    "bfloat16": GradientAllReduce(Quantized(BFloat16())),
    "bytegrad": ByteGrad(),
    "bagua": GradientAllReduce(Quantized(MinMaxUInt8.bagua())),
    "int4": GradientAllReduce(Quantized(Int4())),
    "error-feedback": GradientAllReduce(ErrorFeedback(Quantized())),
    "int4-error-feedback": GradientAllReduce(ErrorFeedback(Quantized(Int4()))),
    "hierarchical": GradientAllReduce(Hierarchical()),
    "hierarchical-bytes": GradientAllReduce(Hierarchical(Quantized())),
    "hierarchical-all-bytes": GradientAllReduce(Hierarchical(Quantized(), inside=Quantized())),
    "hierarchical-int4": GradientAllReduce(Hierarchical(Quantized(Int4()))),
    "qadam": QAdam(),
    "decentralized": Decentralized(),
    "shift-one": Decentralized("shift_one"),
    "one-peer": ONE_PEER,
    "low-precision": LowPrecisionDecentralized(),
    "low-precision-ring": LowPrecisionDecentralized(),
    "low-precision-one-peer": LowPrecisionOnePeer(),
    "async": AsyncModelAverage(),
    "diloco": DiLoCo(),
    "diloco-100": DiLoCo(100),
    "diloco-100-bytes": DiLoCo(100, average=Quantized()),
    "streaming-diloco": StreamingDiLoCo(),
    "streaming-diloco-int4": StreamingDiLoCo(average=Quantized(Int4())),
    "sparseloco": SparseLoCo(),
    "sparseloco-hierarchical": SparseLoCo(average=Hierarchical(ErrorFeedback(TopK(), retain=0.95))),
    "every-4": every(4, ONE_PEER),
    "shift-one-by-node": by_node(Decentralized("shift_one")),
    "low-precision-by-node": by_node(LowPrecisionDecentralized()),
    "shift-one-every-4": every(4, Decentralized("shift_one")),
    "warm-up": after(50, GradientAllReduce(), DiLoCo(10)),
}
PARTS = {
    "every": {"n": 2, "algorithm": "one-peer"},
    "by-node": {"algorithm": "one-peer"},
    "after": {"steps": 1, "first": "exact", "then": "diloco"},
}
"""The settings that some names require."""


def test_every_name_makes_its_algorithm():
    assert {name: from_name(name) for name in MEANT} == MEANT
    assert {*NAMED} >= {*MEANT, *PARTS}
    assert ByteGrad() == GradientAllReduce(Quantized(MinMaxUInt8(block=512, eps=0.0)))


@pytest.mark.parametrize("name", NAMED)
def test_every_algorithm_with_a_name_keeps_the_contract_and_its_repr_makes_it_again(name):
    settings = PARTS.get(name, {})
    algorithm = from_name(name, **settings)
    again = eval(repr(algorithm), {**vars(named), **vars(bagua_comm)})
    assert (again, hash(again)) == (algorithm, hash(algorithm))
    for field in dataclasses.fields(algorithm):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, field.name, None)
    assert from_name(name.replace("-", "_").upper(), **settings) == algorithm
    check_algorithm(algorithm, sizes=(2,))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('"qadam"', QAdam()),
        ('{"name": "qadam", "warmup_steps": 7}', QAdam(warmup_steps=7)),
        (
            '{"name": "every", "n": 4, "algorithm": {"name": "decentralized", "peers": "shift_one"}}',
            every(4, Decentralized("shift_one")),
        ),
        (
            '{"name": "gradient_allreduce", "average": {"name": "quantized", "min_bytes": 0,'
            ' "codec": {"name": "minmax_uint8", "block": 256}}}',
            GradientAllReduce(Quantized(MinMaxUInt8(256), min_bytes=0)),
        ),
        (
            '{"name": "gradient-allreduce", "average": {"name": "quantized",'
            ' "codec": {"name": "minmax-uint8", "block": null}}}',
            GradientAllReduce(Quantized(MinMaxUInt8(None))),
        ),
        (
            '{"name": "diloco", "average": {"name": "hierarchical", "inner": {"name": "error-feedback",'
            ' "inner": {"name": "quantized", "codec": "float16"}}}}',
            DiLoCo(average=Hierarchical(ErrorFeedback(Quantized(Float16())))),
        ),
        (
            '{"name": "error-feedback", "decay": 0.8, "reset_every": 1024, "residual_codec": "minmax-uint8"}',
            GradientAllReduce(ErrorFeedback(Quantized(), 0.8, 1024, MinMaxUInt8())),
        ),
        (
            '{"name": "diloco", "average": {"name": "error-feedback", "residual_codec": {"name": "bfloat16"}}}',
            DiLoCo(average=ErrorFeedback(residual_codec=BFloat16())),
        ),
        (
            '{"name": "gradient-allreduce", "average": {"name": "quantized",'
            ' "codec": {"name": "int4", "block": 64, "rounding": "stochastic", "seed": 3}}}',
            GradientAllReduce(Quantized(Int4(64, 32, "stochastic", 3))),
        ),
        ('{"name": "low-precision-ring", "codec": "bagua"}', LowPrecisionDecentralized(MinMaxUInt8.bagua())),
        (
            '{"name": "after", "steps": 9, "first": "bytegrad", "then": {"name": "async", "interval_s": 0.5}}',
            after(9, ByteGrad(), AsyncModelAverage(0.5)),
        ),
        ('{"name": "hierarchical", "inner": "quantized"}', GradientAllReduce(Hierarchical(Quantized()))),
        (
            '{"name": "hierarchical", "inside": {"name": "quantized", "codec": "bfloat16"}}',
            GradientAllReduce(Hierarchical(inside=Quantized(BFloat16()))),
        ),
    ],
)
def test_a_configuration_file_can_hold_an_algorithm(written, expected):
    assert from_name(json.loads(written)) == expected


def test_settings_may_be_objects_and_keywords_come_before_those_of_a_mapping():
    assert from_name("diloco", average=Quantized()) == DiLoCo(average=Quantized())
    assert from_name({"name": "qadam", "warmup_steps": 7}, warmup_steps=8) == QAdam(warmup_steps=8)
    assert from_name(name="every", n=2, algorithm=ONE_PEER) == every(2, ONE_PEER)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "bytegard",
            {},
            r"no algorithm 'bytegard'; did you mean 'bytegrad'\? expected one of after, .*, warm-up",
        ),
        ("Byte_Gard", {}, r"did you mean 'bytegrad'\?"),
        ("zzz", {}, r"no algorithm 'zzz'; expected one of after, "),
        (3, {}, "no algorithm 3"),
        ({}, {"n": 1}, "no algorithm None"),
        (None, {}, "no algorithm None"),
        ("qadam", {"warm_steps": 1}, r"'qadam' has no setting 'warm_steps'; did you mean 'warmup_steps'\?"),
        ("qadam", {"zzz": 1}, r"'qadam' has no setting 'zzz'; expected one of average, beta1, warmup_steps"),
        ("bytegrad", {"codec": "float16"}, "'bytegrad' has no setting 'codec'; it has no settings"),
        ("shift-one", {"peers": "all"}, "'shift-one' has no setting 'peers'"),
        ("every", {"n": 4}, "'every' needs 'algorithm'"),
        ("after", {}, "'after' needs 'steps' and 'first' and 'then'"),
        ("every", {"n": 4, "algorithm": "shift_oen"}, r"no algorithm 'shift_oen'; did you mean 'shift-one'\?"),
        ("diloco", {"average": {"codec": "float16"}}, "no average None; expected one of error-feedback, exact"),
        ("diloco", {"average": "quantised"}, r"no average 'quantised'; did you mean 'quantized'\?"),
        ("low-precision", {"codec": "uint8"}, "no codec 'uint8'"),
        ("low-precision", {"codec": {"name": "minmax-uint8", "bits": 4}}, "'minmax-uint8' has no setting 'bits'"),
        ("qadam", {"warmup_steps": "100"}, "warmup_steps is '100', expected an integer"),
        ("diloco", {"outer_lr": "fast"}, "'diloco' does not take .*'outer_lr': 'fast'"),
        ("diloco", {"average": 3}, "average is 3, expected an Average"),
        ("error-feedback", {"inner": "exact"}, r"ErrorFeedback: inner is Exact\(\), expected Quantized"),
        ("error-feedback", {"decay": 1}, "decay is 1, expected a number of at least 0 and below 1"),
        ("error-feedback", {"residual_codec": "uint8"}, "no codec 'uint8'"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(name, settings, message):
    with pytest.raises(ArrayError, match=message):
        from_name(name, **settings)


def test_the_tables_cannot_be_changed():
    for table in (NAMED, METHODS):
        with pytest.raises(TypeError):
            table["mine"] = ByteGrad


def test_advice_uses_the_same_names():
    assert {name: METHODS[name] for name in METHODS if name != "ddp"} == {
        name: MEANT[name] for name in METHODS if name != "ddp"
    }


@pytest.mark.algorithms("all")
def test_one_program_packs_buckets_for_any_of_them():
    specs = [TensorSpec(name, (n, 10), "float32") for name, n in zip("abcd", (3, 100, 1, 40), strict=True)]
    settings = {
        "every": {"n": 2, "algorithm": "decentralized"},
        "by-node": {"algorithm": "decentralized"},
        "after": {"steps": 3, "first": "exact", "then": "streaming-diloco"},
    }
    grouped = set()
    for name in NAMED:
        algorithm = from_name(name, **settings.get(name, {}))
        groups = algorithm.groups(specs)
        plan = Plan.pack(specs, groups=groups)
        check_fit(algorithm, plan, 4)
        if groups is not None and len(set(groups)) > 1:
            grouped.add(name)
            assert len(plan.buckets) == len(set(groups))
            with pytest.raises(ArrayError, match=r"groups=algorithm.groups\(tensors\)"):
                check_fit(algorithm, Plan.pack(specs), 4)
        else:
            assert len(plan.buckets) == 1
    assert {"streaming-diloco", "streaming-diloco-int4", "after"} <= grouped
