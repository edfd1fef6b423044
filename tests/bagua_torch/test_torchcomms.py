"""The backend of torchcomms, on a base class of the shape of its own."""

import enum
import re
import sys
import threading
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bagua_comm import ArrayError, CommError, CommMismatch, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch.backend import torchcomms

RedOpType = enum.Enum("RedOpType", ["SUM", "MAX", "AVG", "PREMUL_SUM"])
OPTIONS = SimpleNamespace(timeout=timedelta(seconds=20))


def op(name):
    return SimpleNamespace(type=RedOpType[name])


class TorchCommBackend:
    """As that of torchcomms: a class derived from it overrides the calls that it has."""

    def __init__(self):
        self.told = None

    def _set_device_and_options(self, device, options):
        self.told = device, options


@pytest.fixture
def registered(monkeypatch):
    """The classes that importing the module registers, by name."""
    found = {}
    library = ModuleType("torchcomms")
    library._comms = ModuleType("torchcomms._comms")
    library._comms.TorchCommBackend = TorchCommBackend
    library._comms.register_backend = lambda name, cls: found.update({name: cls})
    monkeypatch.setitem(sys.modules, "torchcomms", library)
    monkeypatch.setitem(sys.modules, "torchcomms._comms", library._comms)
    torchcomms.register()
    return found


@pytest.fixture
def on_ranks(registered, monkeypatch):
    """Runs `body(backend)` on ranks that are threads."""
    local = threading.local()
    monkeypatch.setattr(torchcomms, "current", lambda: local.comm)
    monkeypatch.setattr(torchcomms, "default_or", lambda make: local.comm)

    def on_ranks(body, size=3):
        def run(comm):
            local.comm = comm
            backend = registered["bagua"]()
            backend.init(torch.device("cpu"), "main", OPTIONS)
            result = body(backend)
            backend.finalize()
            return result

        return run_ranks(size, run)

    return on_ranks


def test_its_entry_point_is_the_module_that_registers_it(registered):
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    value = re.search(r'entry-points."torchcomms.backends"\]\nbagua = "(.*)"', project)[1]
    assert metadata.EntryPoint("bagua", value, "torchcomms.backends").load() is torchcomms
    assert issubclass(registered["bagua"], TorchCommBackend)


def test_each_call_of_torchcomms(on_ranks):
    def body(backend):
        rank, size = backend.get_rank(), backend.get_size()
        assert (backend.get_backend_name(), backend.get_comm_name()) == ("bagua", "main")
        every = [torch.arange(2.0) + 10 * each for each in range(size)]
        mine, lists = every[rank], [torch.empty(2) for _ in range(size)]
        x, out, total = mine.clone(), torch.empty(2), torch.stack(every).sum(0)
        assert backend.all_reduce(x, op("SUM"), False) is None
        assert torch.equal(x, total)
        x = mine.clone()
        work = backend.all_reduce(x, op("AVG"), True)
        work.wait()
        assert work.is_completed()
        assert torch.equal(x, total / size)
        backend.reduce(x := mine.clone(), 1, op("MAX"), False)
        assert rank != 1 or torch.equal(x, every[-1])
        backend.broadcast(x := mine.clone(), 2, False)
        assert torch.equal(x, every[2])
        for gather in (backend.all_gather, backend.all_gather_v):
            gather(lists, mine, False)
            assert torch.equal(torch.stack(lists), torch.stack(every))
        backend.all_gather_single(whole := torch.empty(2 * size), mine, False)
        assert torch.equal(whole, torch.cat(every))
        for reduce_scatter in (backend.reduce_scatter, backend.reduce_scatter_v):
            reduce_scatter(out, every, op("SUM"), False)
            assert torch.equal(out, size * mine)
        backend.reduce_scatter_single(out, torch.cat(every), op("SUM"), False)
        assert torch.equal(out, size * mine)
        backend.scatter(out, every if rank == 0 else [], 0, False)
        assert torch.equal(out, mine)
        backend.gather(lists if rank == 1 else [], mine + 1, 1, False)
        assert rank != 1 or torch.equal(torch.stack(lists), torch.stack(every) + 1)
        sent = [torch.full((2,), 10.0 * rank + each) for each in range(size)]
        expected = [torch.full((2,), 10.0 * each + rank) for each in range(size)]
        backend.all_to_all(lists, sent, False)
        assert torch.equal(torch.stack(lists), torch.stack(expected))
        backend.all_to_all_single(whole, torch.cat(sent), False)
        assert torch.equal(whole, torch.cat(expected))
        counts = [2] * size
        backend.all_to_all_v_single(whole.zero_(), torch.cat(sent), counts, counts, False)
        assert torch.equal(whole, torch.cat(expected))
        right, left = (rank + 1) % size, (rank - 1) % size
        works = [backend.send(mine, right, True), backend.recv(out, left, True)]
        for work in works:
            work.wait()
        assert torch.equal(out, every[left])
        backend.set_timeout(timedelta(seconds=9))
        assert backend.barrier(False) is None

    on_ranks(body)


def test_split_makes_communicators_of_some_ranks(on_ranks):
    def body(backend):
        rank = backend.get_rank()
        with pytest.raises(ArrayError, match="expected different ranks from 0 to 2, among them this one"):
            backend.split([rank, rank], "twice")
        child = backend.split([2, 0] if rank != 1 else [], "ends", OPTIONS)
        if rank == 1:
            assert child is None
            return None
        assert child.told == (torch.device("cpu"), OPTIONS)
        assert (child.get_comm_name(), child.get_size()) == ("ends", 2)
        x = torch.tensor([rank + 1.0])
        child.all_reduce(x, op("SUM"), False)
        child.finalize()
        return child.get_backend_name(), x.item()

    assert on_ranks(body) == [("bagua", 4.0), None, ("bagua", 4.0)]


def test_errors_are_named_and_on_all_ranks(on_ranks):
    def body(backend):
        with pytest.raises(UnsupportedError, match="op is PREMUL_SUM"):
            backend.all_reduce(torch.ones(1), op("PREMUL_SUM"), False)
        with pytest.raises(ArrayError, match="the root is rank 7"):
            backend.broadcast(torch.ones(1), 7, False)
        with pytest.raises(CommError, match="init of main, expected one call"):
            backend.init(torch.device("cpu"), "again")
        with pytest.raises(CommMismatch):
            backend.all_reduce(torch.ones(1 + backend.get_rank()), op("SUM"), False)

    on_ranks(body, 2)
    with pytest.raises(CommError, match="not initialised, or was finalised"):
        torchcomms.TorchCommBagua().barrier(False)
