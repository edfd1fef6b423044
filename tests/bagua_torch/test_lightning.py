"""Strategies for Lightning. Without Lightning, which takes long to import; `slow` tests train with it."""

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.launch import run_python, torchrun
from torch import nn

import bagua_torch
from bagua_comm import ArrayError, ByteGrad, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch.lightning import FABRICS, TRAINERS, BaguaFabricStrategy, BaguaStrategy, names

PROGRAMS = Path(__file__).parents[1] / "support" / "lightning_programs.py"
BOTH = {BaguaStrategy: TRAINERS, BaguaFabricStrategy: FABRICS}


class Base:
    """The members of Lightning's ParallelStrategy that the strategies use."""

    def __init__(self, **given):
        self.given = given


def module(name, **contents):
    made = types.ModuleType(name)
    vars(made).update(contents)
    return made


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules in the place of Lightning's; returns the bases by the name of their home. None is imported yet."""
    bases = {}
    for home in [*TRAINERS.values(), *FABRICS.values()]:
        bases[home] = type("ParallelStrategy", (Base,), {"__module__": f"{home}.strategies"})
        environment = type("ClusterEnvironment", (), {})
        monkeypatch.setitem(sys.modules, f"{home}.strategies", module("s", ParallelStrategy=bases[home]))
        monkeypatch.setitem(
            sys.modules, f"{home}.plugins.environments", module("e", ClusterEnvironment=environment)
        )
        monkeypatch.delitem(sys.modules, home, raising=False)
    for package in ("lightning", "pytorch_lightning", "lightning_fabric"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    return bases


def import_(monkeypatch, *homes):
    for home in homes:
        for name in {home, home.partition(".")[0]}:
            monkeypatch.setitem(sys.modules, name, module(name, __path__=[]))
        monkeypatch.setitem(sys.modules, f"{home}.plugins", module("p", __path__=[]))


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("strategy", BOTH)
def test_the_base_is_that_of_the_distribution_which_the_program_has_imported(
    stand_ins, monkeypatch, strategy, package
):
    home, other = BOTH[strategy][package], BOTH[strategy][({*TRAINERS} - {package}).pop()]
    import_(monkeypatch, home, FABRICS[package])

    def body(comm):
        made = strategy(ByteGrad(), comm=comm)
        assert isinstance(made, (strategy, stand_ins[home]))
        assert isinstance(made, stand_ins[home])
        assert not isinstance(made, stand_ins[other])
        assert type(made).__name__ == strategy.__name__
        ranks = made.given["cluster_environment"]
        assert made.given["parallel_devices"] == [torch.device("cpu")] * 3
        assert made.num_nodes == 1
        return ranks.global_rank(), ranks.local_rank(), ranks.world_size(), ranks.node_rank()

    assert run_ranks(3, body) == [(rank, rank, 3, 0) for rank in range(3)]


@pytest.mark.parametrize("strategy", BOTH)
def test_which_distribution_is_meant_must_be_said_if_both_are_imported(stand_ins, monkeypatch, strategy):
    homes = BOTH[strategy]
    import_(monkeypatch, *homes.values(), *FABRICS.values())
    with pytest.raises(UnsupportedError, match=r"imported both .* package='lightning'\) or package='pytorch_l"):
        strategy()
    with pytest.raises(UnsupportedError, match=r"package is 'torch', expected .* lightning, pytorch_lightning"):
        strategy(package="torch")
    with bagua_torch.connect() as comm:
        for package, home in homes.items():
            assert isinstance(strategy(comm=comm, package=package), stand_ins[home])


def test_without_lightning_the_error_says_what_to_install(monkeypatch):
    for name in ("lightning", "pytorch_lightning", "lightning.pytorch", "lightning.pytorch.strategies"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"pip install 'bagua-comm\[lightning\]'"):
        BaguaStrategy(package="lightning")


REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description, **init_params):
        assert name not in self
        self[name] = {"strategy": strategy, "description": description}

    def get(self, name):
        return self[name]["strategy"]()

class ParallelStrategy:
    def __init__(self, **given):
        self.given = given

REGISTRY = Registry()
""".replace("REGISTRY = R", "StrategyRegistry = STRATEGY_REGISTRY = R")


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """Packages on disk in the place of Lightning's, which nothing has imported yet."""
    for home in [*TRAINERS.values(), *FABRICS.values()]:
        folder = tmp_path.joinpath(*home.split("."))
        for part, text in (("strategies", REGISTRY), ("plugins/environments", "class ClusterEnvironment: pass")):
            (folder / part).mkdir(parents=True)
            for above in (folder / part).relative_to(tmp_path).parents:
                tmp_path.joinpath(above, "__init__.py").touch()
            (folder / part / "__init__.py").write_text(text)
        for name in [*sys.modules]:
            if name.partition(".")[0] == home.partition(".")[0]:
                monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [*sys.modules]:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize(
    ("strategy", "attribute"), [(BaguaStrategy, "StrategyRegistry"), (BaguaFabricStrategy, "STRATEGY_REGISTRY")]
)
@pytest.mark.parametrize("order", ["bagua_torch first", "lightning first"])
def test_strategies_are_found_by_name(on_disk, monkeypatch, strategy, attribute, package, order):
    if order == "lightning first":
        monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if type(f).__name__ != "_AfterImport"])
    home = importlib.import_module(f"{BOTH[strategy][package]}.strategies")
    registry = getattr(home, attribute)
    assert bool(registry) == (order == "bagua_torch first")
    names.register_names()
    names.register_names()  # as when bagua_torch is loaded again
    assert home.__file__.startswith(str(on_disk))
    assert {"bagua", "bagua_bytegrad", "bagua_low_precision_one_peer"} <= registry.keys()
    assert "bagua_every" not in registry  # it needs an algorithm
    with bagua_torch.connect():
        for name, algorithm in (("bagua", None), ("bagua_bytegrad", ByteGrad())):
            made = registry.get(name)
            assert isinstance(made, (strategy, home.ParallelStrategy))
            assert isinstance(made, home.ParallelStrategy)
            assert made.algorithm == algorithm


def test_finders_that_ask_each_other_find_the_module(on_disk, monkeypatch):
    """As after a reload, which makes a second class of finders; or as a finder of another library does."""
    monkeypatch.setattr(bagua_torch.lightning, "names", names)  # to restore it
    monkeypatch.delitem(sys.modules, names.__name__)
    again = importlib.import_module(names.__name__)
    assert again._AfterImport is not names._AfterImport
    monkeypatch.setattr(sys, "meta_path", [again._AfterImport(), *sys.meta_path])
    names.register_names()
    home = importlib.import_module("lightning.pytorch.strategies")
    assert "bagua" in home.StrategyRegistry


def test_a_loader_of_several_modules_still_loads_the_others(monkeypatch):
    """As the loader of a zip file does."""

    class Loader:
        loaded: ClassVar[list[str]] = []

        def exec_module(self, module):
            self.loaded.append(module.__name__)

    class Finder:
        loader = Loader()

        def find_spec(self, name, path=None, target=None):
            return ModuleSpec(name, self.loader)

    monkeypatch.setattr(sys, "meta_path", [finder := names._AfterImport(), object(), Finder()])
    spec = finder.find_spec("lightning.pytorch.strategies")
    for name in ("lightning.pytorch.strategies", "something.else"):
        spec.loader.exec_module(types.ModuleType(name))
    assert Loader.loaded == ["lightning.pytorch.strategies", "something.else"]


def test_the_answers_of_ranks_to_lightning(stand_ins, monkeypatch):
    import_(monkeypatch, "lightning.pytorch", "lightning.fabric")

    def body(comm):
        strategy = BaguaStrategy(comm=comm)
        found = {}
        for op in ("mean", "sum", torch.distributed.ReduceOp.MAX, "product"):
            found[str(op)] = strategy.reduce(torch.tensor([comm.rank + 1.0]), reduce_op=op).item()
        assert strategy.reduce("no tensor") == "no tensor"
        gathered = strategy.all_gather(torch.tensor([[comm.rank], [7]])).tolist()
        assert strategy.broadcast([comm.rank], src=2) == [2]
        strategy.barrier("here")
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 3, "rank": comm.rank}
        with pytest.raises(ArrayError, match="reduce_op is 'median', expected mean, sum"):
            strategy.reduce(torch.ones(1), reduce_op="median")
        with pytest.raises(UnsupportedError, match=r"group is .*expected None"):
            strategy.reduce(torch.ones(1), group=object())
        with pytest.raises(ArrayError, match="num_nodes is 2, but the 3 ranks are on 1 nodes"):
            strategy.num_nodes = 2
        return list(found.values()), gathered

    for found, gathered in run_ranks(3, body):
        assert found == [2, 6, 3, 6]
        assert gathered == [[[0], [7]], [[1], [7]], [[2], [7]]]


class Connector:
    """What Lightning's connectors do with a strategy."""

    def __init__(self, devices, num_nodes=1):
        self._devices_flag, self._num_nodes_flag = devices, num_nodes

    def use(self, strategy):
        strategy._configure_launcher()


@pytest.mark.parametrize("strategy", BOTH)
def test_devices_and_num_nodes_that_are_not_those_of_the_ranks_are_refused(stand_ins, monkeypatch, strategy):
    import_(monkeypatch, "lightning.pytorch", "lightning.fabric")

    def body(comm):
        made = strategy(comm=comm)
        for devices in (1, 2, [0, 1], [3], None):
            Connector(devices).use(made)
        told = "devices is 4, but 2 ranks were started on this host, and devices starts no processes; .*run -n 4`"
        with pytest.raises(ArrayError, match=told):
            Connector(4).use(made)
        with pytest.raises(ArrayError, match="devices is 3, but 2 ranks were"):
            Connector([0, 1, 2]).use(made)
        with pytest.raises(ArrayError, match="num_nodes is 3, but the 2 ranks are on 1 nodes"):
            Connector(1, num_nodes=3).use(made)
        assert made.num_nodes == 1
        made._device = torch.device("cuda:0")  # where devices="auto" counts all GPUs
        if comm.rank == 0:
            with pytest.warns(UserWarning, match="devices is 4, but 2 ranks were"):
                Connector([0, 1, 2, 3]).use(made)

    run_ranks(2, body)


# ---------------------------------------------------------------------------------------------------------
# The members of DistributedDataParallel that the strategies use
# ---------------------------------------------------------------------------------------------------------


def test_an_expected_backward_pass_is_averaged_though_its_forward_pass_is_the_modules():
    def body(comm):
        net = nn.Linear(2, 1, bias=False)
        ddp = bagua_torch.DistributedDataParallel(net, comm=comm)
        found = []
        for expected in (True, False):
            x = torch.full((1, 2), comm.rank + 1.0)
            ddp(x).sum().backward()
            net.weight.grad = None
            if expected:
                ddp.expect_backward()
                ddp.expect_backward()  # it is expected already
            (3 * net(x)).sum().backward()
            ddp.end_backward()
            found.append(net.weight.grad.tolist())
            net.weight.grad = None
        with ddp.no_sync():
            ddp.expect_backward()
            assert not ddp._steps.watch.armed
        ddp.close()
        return found

    averaged = [[3 * 1.5] * 2]
    assert run_ranks(2, body) == [[averaged, [[3.0 * (rank + 1)] * 2]] for rank in range(2)]


def test_a_backward_pass_that_reached_no_parameter_is_completed_by_a_call():
    def body(comm):
        net = nn.Linear(1, 1, bias=False)
        ddp = bagua_torch.DistributedDataParallel(net, comm=comm)
        out = ddp(torch.ones(1, 1))
        if comm.rank == 0:
            out.sum().backward()
        ddp.end_backward()
        ddp.close()
        return net.weight.grad.item()

    assert run_ranks(2, body) == [0.5, 0.5]


def test_buffers_are_copied_for_evaluation():
    def body(comm):
        net = nn.BatchNorm1d(1)
        ddp = bagua_torch.DistributedDataParallel(net, comm=comm)
        with ddp.no_sync():
            ddp(torch.tensor([[0.0], [2.0 + comm.rank]])).sum().backward()
        before = net.running_mean.item()
        ddp.copy_buffers()
        ddp.close()
        return before, net.running_mean.item()

    (mine, first), (other, second) = run_ranks(2, body)
    assert mine == first == second != other


def test_a_wrapper_trains_when_its_module_does():
    def body(comm):
        net = nn.Linear(1, 1, bias=False)
        ddp = bagua_torch.DistributedDataParallel(net, torch.optim.SGD(net.parameters(), 0.1), comm=comm)
        ddp.eval()
        net.train()  # and not the wrapper, as Lightning does after validation
        for _ in range(3):
            ddp(torch.ones(1, 1)).sum().backward()
            ddp.optimizers[0].step()
        ddp.close()
        return ddp.engine.step

    assert run_ranks(2, body) == [3, 3]


def test_pytorchs_own_wrapper_is_refused_around_ours(gloo):
    with bagua_torch.connect() as comm:
        ddp = bagua_torch.DistributedDataParallel(nn.Linear(2, 1), comm=comm)
        with pytest.raises(UnsupportedError, match=r"wrapped by bagua_torch already.*comm_hook"):
            nn.parallel.DistributedDataParallel(ddp)
        ddp.close()


@pytest.mark.slow
def test_a_traceback_is_shown_although_torch_distributed_has_a_hook(tmp_path):
    script = """
        import sys, torch, bagua_comm
        comm = bagua_comm.connect(timeout_s=60)
        ours = sys.excepthook
        torch.distributed.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
        assert sys.excepthook is not ours
        raise RuntimeError("a bad day")
    """
    process = run_python(2, script=(tmp_path / "script.py", script), timeout_s=100)
    assert process.returncode == 1
    assert "Traceback" in process.stderr
    assert "RuntimeError: a bad day" in process.stderr
    assert " of 2:" in process.stderr


# ---------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.needs("lightning", "pytorch_lightning", "sklearn")
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("start", "package", "programs"),
    [
        (run_python, "lightning", ["resume", "weights", "failing", "fabric", "manual"]),
        (torchrun, "pytorch_lightning", ["equal", "norms", "unfreezing"]),
    ],
    ids=["mpirun-lightning", "torchrun-pytorch_lightning"],
)
def test_real_programs_train_as_with_lightnings_own_strategy(start, package, programs):
    process = start(2, PROGRAMS, package, *programs, timeout_s=900)
    assert process.returncode == 0, process.stdout + process.stderr
    assert [line.rpartition(" ")[2] for line in process.stdout.splitlines() if "as expected" in line] == programs
