"""What functions that users call begin with: a wrong argument on one rank is an error on all."""

import threading

import pytest
from torch import nn

from bagua_comm import ArrayError, Exact, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, MoE, SyncBatchNorm, comm_hook, entry, fsdp
from bagua_torch.errors import MisuseError
from bagua_torch.sync_batchnorm import convert

ENTRIES = {
    "bagua_torch.fsdp.attach": lambda comm: fsdp.attach(nn.Linear(2, 2), comm=comm),
    "DistributedDataParallel": lambda comm: DistributedDataParallel(nn.Linear(2, 2), comm=comm),
    "comm_hook": lambda comm: comm_hook(Exact(), comm),
    "MoE": lambda comm: MoE(2, lambda: nn.Linear(2, 2), 4, 2, comm=comm),
    "convert": lambda comm: convert(nn.BatchNorm1d(2), comm),
}


def refusals(ranks, body):
    """The errors of all ranks; `body(comm)` must raise one on each, which leaves the communicator usable."""

    def tried(comm):
        with pytest.raises((ArrayError, UnsupportedError)) as info:
            body(comm)
        assert comm.allgather_object(comm.rank) == [*range(ranks)]
        return info.value

    return run_ranks(ranks, tried, timeout_s=20)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("wrong", [3, "all", Exact()], ids=repr)
def test_what_is_no_communicator_on_one_rank_is_refused_on_all(name, wrong, monkeypatch):
    mine = threading.local()  # ranks are threads, so each has a default communicator of its own
    monkeypatch.setattr(entry, "current", lambda: mine.comm)
    monkeypatch.setattr("bagua_torch.fsdp.attachment.checked_units", lambda *_: [])

    def body(comm):
        mine.comm = comm
        ENTRIES[name](wrong if comm.rank == 1 else comm)

    expected = f"{name}: comm is {wrong!r}, expected a Communicator, as bagua_torch.connect() returns it"
    for error in refusals(3, body):
        assert expected in str(error)


@pytest.mark.parametrize("name", [*ENTRIES, "SyncBatchNorm"])
def test_it_is_refused_without_a_default_communicator_too(name, monkeypatch):
    monkeypatch.setattr(entry, "current", lambda: None)
    function = {**ENTRIES, "SyncBatchNorm": lambda comm: SyncBatchNorm(2, comm=comm)}[name]
    with pytest.raises(ArrayError, match=f"^{name}: comm is 3, expected a Communicator"):
        function(3)


def lazy(comm):
    return nn.LazyLinear(2) if comm.rank == 1 else nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (
            lambda comm: DistributedDataParallel(lazy(comm), comm=comm),
            MisuseError,
            "is lazy; run the module once",
        ),
        (
            lambda comm: DistributedDataParallel([nn.Linear(2, 2), 3][comm.rank == 1], comm=comm),
            MisuseError,
            "module is 3, expected a torch.nn.Module",
        ),
        (lambda comm: comm_hook([Exact(), 3][comm.rank == 1], comm), ArrayError, "comm_hook: average is 3"),
        (lambda comm: MoE(comm.rank, lambda: nn.Linear(2, 2), 4, 2, comm=comm), ArrayError, "MoE: hidden is 0"),
        (
            lambda comm: convert([nn.BatchNorm1d(2), nn.LazyBatchNorm1d()][comm.rank == 1], comm),
            UnsupportedError,
            "is lazy; run the module once before",
        ),
        (lambda comm: convert([nn.BatchNorm1d(2), 3][comm.rank == 1], comm), ArrayError, "module is a int"),
    ],
    ids=["lazy", "no module", "average", "experts", "lazy norm", "no norm"],
)
def test_any_other_wrong_argument_of_one_rank_is_refused_on_all(body, kind, text):
    for error in refusals(2, body):
        assert isinstance(error, kind)
        assert text in str(error)


def test_an_error_of_one_rank_is_raised_on_all():
    def body(comm):
        entry.raise_on_all(comm, ArrayError("no") if comm.rank == 1 else None)

    assert [*map(str, refusals(3, body))] == ["rank 1: no", "no", "rank 1: no"]


def test_an_error_that_is_not_of_this_library_keeps_its_class_on_its_own_rank():
    class Unpicklable(ValueError):
        def __reduce__(self):
            raise AssertionError

    def body(comm):
        try:
            with entry.errors_on_all(comm):
                if comm.rank == 0:
                    raise Unpicklable("seven")
        except Exception as exc:
            return type(exc).__name__, str(exc)

    assert run_ranks(2, body) == [("Unpicklable", "seven"), ("ArrayError", "rank 0: Unpicklable: seven")]
