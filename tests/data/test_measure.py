"""Lengths, found by all ranks together."""

import numpy as np
import pytest
from support.launch import run_python

from bagua_comm import ArrayError, CommMismatch
from bagua_comm.data import LMDBStore, MemoryStore, measure
from bagua_comm.testing import run_ranks

WORDS = ["a", "bcd", "", "ef", "ghijkl", "m", "no"]


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_each_rank_measures_its_share_and_all_get_all(p):
    seen = [[] for _ in range(p)]

    def body(comm):
        return measure(WORDS, lambda word: seen[comm.rank].append(word) or len(word), comm)

    found = run_ranks(p, body)
    assert all(np.array_equal(each, [len(word) for word in WORDS]) for each in found)
    assert [len(each) for each in seen] == [len(WORDS[r::p]) for r in range(p)]
    assert [word for each in seen for word in each] == [word for r in range(p) for word in WORDS[r::p]]


def test_nothing_to_measure():
    assert [each.shape for each in run_ranks(2, lambda comm: measure([], len, comm))] == [(0,), (0,)]


@pytest.mark.needs("msgpack", "xxhash")
def test_measurements_are_kept(tmp_path):
    calls = []
    store = LMDBStore(tmp_path)

    def body(comm, name="lengths", words=WORDS):
        return measure(words, lambda word: calls.append(word) or len(word), comm, store=store, name=name)

    first = run_ranks(2, body)
    again = run_ranks(3, body)
    assert len(calls) == len(WORDS)
    assert all(np.array_equal(each, first[0]) for each in again)
    again[0][:] = 0  # each rank's own
    assert again[1].any()
    run_ranks(2, lambda comm: body(comm, name="other"))
    run_ranks(2, lambda comm: body(comm, words=WORDS[1:]))
    assert len(calls) == 2 * len(WORDS) + len(WORDS) - 1


@pytest.mark.needs("msgpack", "xxhash")
def test_a_store_of_one_rank_is_enough():
    store = MemoryStore()

    def body(comm):
        return measure(WORDS, len, comm, store=store if comm.rank == 0 else None)

    run_ranks(2, body)
    assert store.count() == 1
    assert run_ranks(2, lambda comm: measure(WORDS, None, comm, store=store if comm.rank == 0 else None))


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (lambda word: 1 / len(word), ZeroDivisionError, "division by zero"),
        (lambda word: float("nan"), ArrayError, "fn returned nan for sample 0"),
        (lambda word: -len(word), ArrayError, "fn returned -1.0 for sample 0"),
        (lambda word: "long", ArrayError, "fn returned 'long' for sample 0"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(fn, error, message):
    def body(comm):
        with pytest.raises((error, ArrayError)) as caught:
            measure(WORDS, fn if comm.rank == 0 else len, comm)
        return caught.value

    found = run_ranks(2, body)
    assert type(found[0]) is error
    assert message in str(found[0])
    assert isinstance(found[1], ArrayError)
    assert f"rank 0 failed: {error.__name__}: " in str(found[1])
    assert message in str(found[1])


def test_data_sets_of_different_lengths_are_refused():
    def body(comm):
        with pytest.raises(CommMismatch, match=r"\[1, 2\] samples"):
            measure(WORDS[: comm.rank + 1], len, comm)

    run_ranks(2, body)


@pytest.mark.slow
def test_samplers_and_measure_use_the_world_of_mpirun(tmp_path):
    script = """
        import sys
        import bagua_comm
        from bagua_comm.data import BalancedSampler, Cached, LMDBStore, PlainSampler, measure

        words = ["x" * (i % 7 + 1) for i in range(100)]
        with bagua_comm.connect() as comm:
            store = LMDBStore(sys.argv[1])
            lengths = measure(words, len, store=store)
            assert lengths.tolist() == [len(word) for word in words]
            for sampler in (BalancedSampler(lengths, batch_size=4), PlainSampler(100, batch_size=4)):
                assert (sampler.size, sampler.rank) == (comm.size, comm.rank)
                with Cached(words, store) as cached:
                    mine = [index for batch in sampler for index in batch]
                    assert [cached[index] for index in mine] == [words[index] for index in mine]
                every = comm.allgather_object(mine)
                assert sorted(index for each in every for index in each) == list(range(100))
            print("well")
    """
    result = run_python(3, tmp_path / "db", script=(tmp_path / "script.py", script))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["well"] * 3
