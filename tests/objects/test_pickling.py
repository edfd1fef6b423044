"""Settings are pickled and copied, copies share communicators, and what lives in a process says so."""

import copy
import io
import pickle

import pytest

import bagua_comm
from bagua_comm import Checkpoints, Communicator, Engine, Plan, TensorSpec, Tuner, UnsupportedError, connect
from bagua_comm.algorithms import from_name
from bagua_comm.algorithms.named import NAMED
from bagua_comm.testing import run_ranks

SETTINGS = {
    **{name: from_name(name) for name in NAMED if name not in ("after", "by-node", "every")},
    "after": bagua_comm.after(3, bagua_comm.ByteGrad(), bagua_comm.DiLoCo()),
    "every": bagua_comm.every(2, bagua_comm.Decentralized()),
    "by-node": bagua_comm.by_node(bagua_comm.Decentralized()),
    "a codec": bagua_comm.MinMaxUInt8(),
    "an average": bagua_comm.Hierarchical(bagua_comm.Quantized()),
    "a plan": Plan.pack([TensorSpec("a", (3,), "float32"), TensorSpec("b", (70,), "float16")], bucket_bytes=100),
    "a tuner": Tuner(),
}


@pytest.mark.parametrize("value", SETTINGS.values(), ids=SETTINGS)
def test_settings_are_pickled_and_copied(value):
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert type(other) is type(value)
        assert repr(other).partition(" at 0x")[0] == repr(value).partition(" at 0x")[0]


def test_a_pickled_communicator_is_named_with_what_to_do():
    def body(comm):
        for given in (comm, {"model": [comm]}, comm.by_node()):
            with pytest.raises(
                UnsupportedError,
                match=r"^<Communicator rank \d of \d over local>: cannot be pickled, .*save module.state_dict",
            ):
                pickle.dumps(given)
        with pytest.raises(UnsupportedError, match=r"this Communicator cannot be pickled.*module.state_dict\(\)"):
            comm.allgather_object(comm)
        comm.barrier()

    run_ranks(2, body)


def test_copies_of_objects_with_a_communicator_share_it():
    with connect() as comm:
        held = {"comm": comm}
        assert copy.deepcopy(held)["comm"] is copy.copy(held)["comm"] is copy.copy(comm) is comm


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_live_objects_are_neither_pickled_nor_copied(how, tmp_path):
    with connect() as comm, Checkpoints(tmp_path, comm) as checkpoints, comm.lane() as lane:
        plan = Plan.pack([TensorSpec("a", (3,), "float32")])
        with Engine(comm, bagua_comm.GradientAllReduce(), plan, plan.allocate()) as engine:
            for live in (engine, lane, comm.transports[0], checkpoints):
                what = f"^{type(live).__name__}: cannot be pickled or copied, .*; leave it out"
                with pytest.raises(UnsupportedError, match=what):
                    how(live)


@pytest.mark.needs("torch")
def test_a_module_that_holds_a_communicator():
    """torch.save says what to save, and an average of weights copies it."""
    import torch

    with connect() as comm:
        net = torch.nn.Linear(2, 1)
        net.comm = comm
        with pytest.raises(UnsupportedError, match=r"Communicator rank 0 of 1 .*save module.state_dict\(\)"):
            torch.save(net, io.BytesIO())
        torch.save(net.state_dict(), io.BytesIO())
        averaged = torch.optim.swa_utils.AveragedModel(net)
        assert isinstance(averaged.module.comm, Communicator)
        assert averaged.module.comm is comm
        assert averaged.module.weight is not net.weight
