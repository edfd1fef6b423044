"""The codecs against bytes worked out separately from them."""

import importlib
import subprocess
import sys

import numpy as np
import pytest
from support import needs
from support.golden import FAMILIES, GOLDEN, cases_of, codec_of, draws_of

from bagua_comm import kernels, quantized_allgather, quantized_allreduce, quantized_reduce_scatter
from bagua_comm.arrays import dtype_named
from bagua_comm.testing import run_ranks

CASES = {family: cases_of(family) for family in FAMILIES}


@pytest.fixture(params=["host", "compiled"])
def kernels_in_use(request, monkeypatch):
    if request.param == "compiled":
        needs.package("numba")
    module = importlib.import_module(f"bagua_comm.kernels.{request.param}")
    monkeypatch.setattr(kernels, "on_host", lambda: module)


def each_case(kind):
    """Run a test on each case of a kind; a test for each family and dtype."""

    def decorated(check):
        @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
        @pytest.mark.parametrize("family", [name for name in FAMILIES if any(of_kind(name, kind))])
        def test(family, dtype):
            found = [case for case in of_kind(family, kind) if case["dtype"] == dtype]
            assert found
            for case in found:
                check(case)

        return test

    return decorated


def of_kind(family, kind):
    return [case for case in CASES[family] if case["kind"] == kind]


def load(case, part, shape, dtype):
    data = (GOLDEN / case["files"][part]).read_bytes()
    return np.frombuffer(data, dtype).reshape(shape).copy()


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_files_equal_the_output_of_their_generator(family):
    script = GOLDEN / f"make_{family}.py"
    result = subprocess.run([sys.executable, script, "--check"], timeout=300)
    assert result.returncode == 0


@pytest.mark.usefixtures("kernels_in_use")
@each_case("codec")
def test_encode_and_decode(case):
    n, m, dtype = case["n"], case["m"], dtype_named(case["dtype"])
    codec = codec_of(case)
    x = load(case, "input", (n, m), dtype)
    wire = load(case, "wire", (n, codec.wire_nbytes(m, dtype)), np.uint8)
    decoded = load(case, "decoded", (n, m), dtype)

    assert wire.tobytes() == codec.encode(x, draws=draws_of(case)).tobytes(), case["name"]
    assert decoded.tobytes() == codec.decode(wire, np.empty_like(x)).tobytes(), case["name"]


@pytest.mark.usefixtures("kernels_in_use")
@each_case("combine")
def test_combine(case):
    n, m, dtype = case["n"], case["m"], dtype_named(case["dtype"])
    codec = codec_of(case)
    wire = load(case, "wire", (n, codec.wire_nbytes(m, dtype)), np.uint8)
    combined = load(case, "combined", (1, wire.shape[1]), np.uint8)

    actual = codec.combine(wire, op=case["op"], count=m, dtype=dtype, draws=draws_of(case))

    assert combined.tobytes() == actual.tobytes(), case["name"]


@each_case("allreduce")
def test_allreduce(case):
    p, count, dtype = case["n"], case["m"], dtype_named(case["dtype"])
    x = load(case, "input", (p, count), dtype)
    expected = load(case, "output", (count,), dtype)

    def body(comm):
        return quantized_allreduce(comm, x[comm.rank], codec=codec_of(case), op=case["op"])

    for actual in run_ranks(p, body):
        assert expected.tobytes() == actual.tobytes(), case["name"]


@each_case("reduce_scatter")
def test_reduce_scatter(case):
    p, count, dtype = case["n"], case["m"], dtype_named(case["dtype"])
    x, expected = load(case, "input", (p, count), dtype), load(case, "output", (count,), dtype)

    def body(comm):
        settings = {"codec": codec_of(case), "op": case["op"], "counts": case["counts"]}
        return quantized_reduce_scatter(comm, x[comm.rank], **settings)

    assert expected.tobytes() == b"".join(chunk.tobytes() for chunk in run_ranks(p, body)), case["name"]


@each_case("allgather")
def test_allgather(case):
    counts, dtype = case["counts"], dtype_named(case["dtype"])
    x, expected = load(case, "input", (sum(counts),), dtype), load(case, "output", (sum(counts),), dtype)
    mine = np.split(x, np.cumsum(counts)[:-1])

    def body(comm):
        return quantized_allgather(comm, mine[comm.rank], codec=codec_of(case), counts=counts)

    for actual in run_ranks(len(counts), body):
        assert expected.tobytes() == actual.tobytes(), case["name"]
