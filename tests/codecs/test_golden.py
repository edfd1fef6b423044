"""The codecs against bytes worked out separately from them."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import needs

from bagua_comm import (
    Int4,
    MinMaxUInt8,
    kernels,
    quantized_allgather,
    quantized_allreduce,
    quantized_reduce_scatter,
)
from bagua_comm.arrays import dtype_named
from bagua_comm.kernels.host import Draws
from bagua_comm.testing import run_ranks

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = ("minmax", "int4")
CASES = [case for family in FAMILIES for case in json.loads((GOLDEN / f"{family}.json").read_text())]


@pytest.fixture(params=["host", "compiled"], autouse=True)
def kernels_in_use(request, monkeypatch):
    if request.param == "compiled":
        needs.package("numba")
    module = importlib.import_module(f"bagua_comm.kernels.{request.param}")
    monkeypatch.setattr(kernels, "on_host", lambda: module)


def codec_of(case):
    if "rotate" not in case:
        return MinMaxUInt8(block=case["block"], eps=case["eps"])
    rounding = "nearest" if case["key"] is None else "stochastic"
    return Int4(block=case["block"], rotate=case["rotate"], rounding=rounding)


def draws_of(case):
    """The random numbers of stochastic rounding."""
    return None if case.get("key") is None else Draws(case["key"], case["counter"])


def cases(kind):
    return [
        pytest.param(case, id=f"{type(codec_of(case)).__name__}-{case['name']}")
        for case in CASES
        if case["kind"] == kind
    ]


def load(case, part, shape, dtype):
    data = (GOLDEN / case["files"][part]).read_bytes()
    return np.frombuffer(data, dtype).reshape(shape).copy()


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_files_equal_the_output_of_their_generator(family):
    script = GOLDEN / f"make_{family}.py"
    result = subprocess.run([sys.executable, script, "--check"], timeout=60)
    assert result.returncode == 0


@pytest.mark.parametrize("case", cases("codec"))
def test_encode_and_decode(case):
    n, m, dtype = case["n"], case["m"], dtype_named(case["dtype"])
    codec = codec_of(case)
    x = load(case, "input", (n, m), dtype)
    wire = load(case, "wire", (n, codec.wire_nbytes(m, dtype)), np.uint8)
    decoded = load(case, "decoded", (n, m), dtype)

    assert wire.tobytes() == codec.encode(x, draws=draws_of(case)).tobytes()
    assert decoded.tobytes() == codec.decode(wire, np.empty_like(x)).tobytes()


@pytest.mark.parametrize("case", cases("combine"))
def test_combine(case):
    n, m, dtype = case["n"], case["m"], dtype_named(case["dtype"])
    codec = codec_of(case)
    wire = load(case, "wire", (n, codec.wire_nbytes(m, dtype)), np.uint8)
    combined = load(case, "combined", (1, wire.shape[1]), np.uint8)

    actual = codec.combine(wire, op=case["op"], count=m, dtype=dtype, draws=draws_of(case))

    assert combined.tobytes() == actual.tobytes()


@pytest.mark.parametrize("case", cases("allreduce"))
def test_allreduce(case):
    p, count, dtype = case["n"], case["m"], dtype_named(case["dtype"])
    x = load(case, "input", (p, count), dtype)
    expected = load(case, "output", (count,), dtype)

    def body(comm):
        return quantized_allreduce(comm, x[comm.rank], codec=codec_of(case), op=case["op"])

    for actual in run_ranks(p, body):
        assert expected.tobytes() == actual.tobytes()


@pytest.mark.parametrize("case", cases("reduce_scatter"))
def test_reduce_scatter(case):
    p, count, dtype = case["n"], case["m"], dtype_named(case["dtype"])
    x, expected = load(case, "input", (p, count), dtype), load(case, "output", (count,), dtype)

    def body(comm):
        settings = {"codec": codec_of(case), "op": case["op"], "counts": case["counts"]}
        return quantized_reduce_scatter(comm, x[comm.rank], **settings)

    assert expected.tobytes() == b"".join(chunk.tobytes() for chunk in run_ranks(p, body))


@pytest.mark.parametrize("case", cases("allgather"))
def test_allgather(case):
    counts, dtype = case["counts"], dtype_named(case["dtype"])
    x, expected = load(case, "input", (sum(counts),), dtype), load(case, "output", (sum(counts),), dtype)
    mine = np.split(x, np.cumsum(counts)[:-1])

    def body(comm):
        return quantized_allgather(comm, mine[comm.rank], codec=codec_of(case), counts=counts)

    for actual in run_ranks(len(counts), body):
        assert expected.tobytes() == actual.tobytes()
