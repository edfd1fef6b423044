"""How messages, bytes and peers grow with the number of ranks: the formulas of docs/how-it-works/growth.md."""

import gc
import pickle
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support.counting import count_each

from bagua_comm import GradientAllReduce, Plan, TensorSpec
from bagua_comm.engine.weights import EngineWeights
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport

PAGE = Path(__file__).parent.parent / "docs" / "how-it-works" / "growth.md"

M = {"Small arrays": 128, "Large arrays": 1 << 15}
"""The bytes of an array, by the section of the page."""

OBJECT = b"x" * (M["Small arrays"] - len(pickle.dumps(b"")))


def compare_weights(comm):
    """The check of an engine before its first step."""
    plan = Plan.pack([TensorSpec("x", (8,), "float32")])
    storage = {"grad": plan.allocate(), "weight": plan.allocate()}
    EngineWeights(comm, storage, compare=True).check(GradientAllReduce(), plan, {})


CALLS = {
    "barrier": lambda comm, x: comm.barrier(),
    "allreduce, sum": lambda comm, x: comm.allreduce(x),
    "allreduce, max of integers": lambda comm, x: comm.allreduce(x.view(np.int64), op="max"),
    "allreduce": lambda comm, x: comm.allreduce(x),
    "reduce": lambda comm, x: comm.reduce(x, root=0),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x.reshape(comm.size, -1)),
    "scan": lambda comm, x: comm.scan(x),
    "allgather": lambda comm, x: comm.allgather(x),
    "alltoall": lambda comm, x: comm.alltoall(x.reshape(comm.size, -1)),
    "broadcast": lambda comm, x: comm.broadcast(x, root=0),
    "allgather_object of m bytes": lambda comm, x: comm.allgather_object(OBJECT),
    "check_consistency": lambda comm, x: comm.check_consistency(x),
    "barrier with `connect(check=True)`": lambda comm, x: comm.barrier(),
    "alltoall with counts, of 8 bytes to each rank, with `connect(check=True)`": lambda comm, x: comm.alltoall(
        np.ones(comm.size), counts=[1] * comm.size, out_counts=[1] * comm.size
    ),
    "split": lambda comm, x: comm.split(0, comm.rank),
    "dup": lambda comm, x: comm.dup(),
    "the weights of an engine, compared before the first step": lambda comm, x: compare_weights(comm),
}


def rows_of(section):
    """The rows of the table in a section of the page: the call, and its three formulas."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)
    ]
    return [(call.strip(), [formula.strip("` ") for formula in formulas]) for call, *formulas in rows[2:]]


def check_page(section, size):
    """Compare the formulas of a section with what `size` ranks send; that of the rank that sends most."""
    rows, m = rows_of(section), M[section]
    assert len(rows) > 5
    bodies = [
        ("check=True" in call, lambda comm, make=CALLS[call]: make(comm, np.ones(m // 8))) for call, _ in rows
    ]
    found = count_each(size, bodies)
    for i, (call, formulas) in enumerate(rows):
        counts = [of_rank[i] for of_rank in found]
        most = max(count.messages for count, _ in counts), max(count.nbytes for count, _ in counts)
        values = [eval(text, {}, {"p": size, "m": m, "log": (size - 1).bit_length()}) for text in formulas]
        assert most == tuple(values[:2]), (call, size)
        assert max(peers for _, peers in counts) <= values[2], (call, size)


SIZES = [2, 8, 9, 16, pytest.param(33, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
def test_small_arrays_take_a_logarithm_of_messages(size, monkeypatch):
    if size <= LocalTransport.few_ranks:
        monkeypatch.setattr(LocalTransport, "few_ranks", 1)  # the formulas hold for few ranks, too
    check_page("Small arrays", size)


@pytest.mark.parametrize("size", [2, 4, 8, 16, *[pytest.param(n, marks=pytest.mark.slow) for n in (32, 64)]])
def test_large_arrays_go_directly(size):
    check_page("Large arrays", size)


@pytest.mark.parametrize("size", [2, 8])
def test_few_ranks_send_small_arrays_to_all_others_in_one_round(size):
    found = count_each(size, [(False, lambda comm: comm.allgather(np.ones(4)))])
    assert {(count.messages, count.rounds) for ((count, _),) in found} == {(size - 1, 1)}


def test_each_communicator_keeps_the_numbers_of_its_members():
    def body(comm):
        made = comm.split(comm.rank % 2, 0)
        assert len(comm.flight.groups[made.group]) == made.size == 4

    count_each(8, [(False, body)])


# Memory -----------------------------------------------------------------------------------------------


def bytes_held(size, make):
    """Bytes that each of `size` ranks holds of what `make` returns, and the most that it holds meanwhile."""
    held = [0.0, 0.0]

    def body(comm):
        make(comm)  # caches and lazily imported modules do not count
        comm.barrier()
        if comm.rank == 0:
            gc.collect()
            tracemalloc.start()
        comm.barrier()
        made = make(comm)
        comm.barrier()
        if comm.rank == 0:
            gc.collect()
            held[:] = [n / size for n in tracemalloc.get_traced_memory()]
            tracemalloc.stop()
        comm.barrier()
        return made

    run_ranks(size, body)
    return held


def test_a_communicator_holds_a_few_numbers_of_each_member():
    few, many = (bytes_held(size, lambda comm: [comm.dup() for _ in range(8)])[0] / 8 for size in (4, 32))
    assert 8 < (many - few) / 28 < 100
    assert "about 50 bytes for each of its members" in PAGE.read_text().split("## Memory\n")[1]


def test_the_flight_recorder_holds_as_much_on_any_number_of_ranks():
    def fill(comm):
        for _ in range(100):
            comm.barrier()

    few, many = (bytes_held(size, fill)[0] for size in (2, 16))
    assert many < 2 * few + 20_000


@pytest.mark.parametrize("size", [2, 4, 16])
def test_an_allreduce_holds_one_array_more(size):
    m = 1 << 20

    def reduce(comm):
        x = np.zeros(m // 8)
        return comm.allreduce(x, out=x)

    _, most = bytes_held(size, reduce)
    assert 1.5 * m < most < 2.5 * m
