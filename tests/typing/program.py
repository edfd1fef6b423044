"""A program as users write it, for type checkers: what editors say of each result. Nothing runs it."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import assert_type

import bagua_comm
import bagua_torch
from bagua_comm import Algorithm, Bucket, Codec, Communicator, Point, Rounds, Window, every, quantized_allreduce
from bagua_comm.transports import POINT_TO_POINT, Message, Transport

Floats = npt.NDArray[np.float32]
Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def numpys(comm: Communicator, x: Floats, table: Table, loss: np.float32) -> None:
    assert_type(comm.allreduce(x, op="avg"), Floats)
    assert_type(comm.allreduce(x, out=x), Floats)
    assert_type(comm.scan(table), Table)
    assert_type(comm.reduce(x, root=0), Floats | None)
    assert_type(comm.broadcast(x, root=0), Floats)
    assert_type(comm.alltoall(x), Floats)
    assert_type(comm.allgather(table), npt.NDArray[np.int64])  # another shape
    assert_type(comm.allgather(x, table), Table)
    assert_type(comm.reduce_scatter(table, counts=[1]), npt.NDArray[np.int64])
    assert_type(comm.gather(table, root=0), npt.NDArray[np.int64] | None)
    assert_type(comm.gather(table, counts=[1], root=0), npt.NDArray[np.int64] | None)
    assert_type(comm.scatter(table, root=0), npt.NDArray[np.int64])
    assert_type(comm.scatter(x if comm.rank == 0 else None, x, root=0), Floats)
    assert_type(comm.scatter(x, root=0, counts=[1]), Floats)
    assert_type(comm.allgather(x, x, counts=[1]), Floats)
    assert_type(comm.alltoall(x, x, counts=[1], out_counts=[1]), Floats)
    assert_type(comm.recv(x, source=0), Floats)
    assert_type(comm.sendrecv(x, x, dest=None, source=None), Floats)
    assert_type(comm.allreduce_many([x, x]), list[Floats])
    assert_type(comm.allreduce(loss), np.float32)
    assert_type(comm.allgather(loss), Floats)
    assert_type(quantized_allreduce(comm, x, op="avg"), Floats)
    comm.send(x, dest=0)
    comm.exchange([(0, x), (None, x)], [(0, x)])


def tensors(comm: Communicator, x: torch.Tensor) -> None:
    assert_type(comm.allreduce(x, op="max"), torch.Tensor)
    assert_type(comm.allgather(x), torch.Tensor)
    assert_type(comm.allgather(x, x), torch.Tensor)
    assert_type(comm.reduce_scatter(x), torch.Tensor)
    assert_type(comm.gather(x, root=0), torch.Tensor | None)
    assert_type(comm.scatter(x, root=0), torch.Tensor)
    assert_type(comm.broadcast_many([x], root=0), list[torch.Tensor])
    assert_type(quantized_allreduce(comm, x), torch.Tensor)
    assert_type(bagua_torch.functional.allreduce(comm, x, op="avg"), torch.Tensor)


def objects(comm: Communicator) -> None:
    assert_type(comm.allgather_object(comm.rank), list[int])
    assert_type(comm.gather_object("a", root=0), list[str] | None)
    assert_type(comm.broadcast_object({"a": 1} if comm.rank == 0 else None, root=0), dict[str, int])
    assert_type(comm.scatter_object(["a"] if comm.rank == 0 else None, root=0), str)
    comm.send_object(1, dest=0)


def lanes(comm: Communicator, x: Floats, t: torch.Tensor) -> None:
    with comm.lane() as lane:
        assert_type(lane.submit(len, "abc"), Future[int])
        lane.submit(lane.comm.allreduce, x, out=x, op="avg")
        lane.submit(lane.comm.allreduce, t, out=t)
        lane.submit(lane.comm.recv, x, source=0)
        lane.submit(lane.comm.allgather, x, x)


@dataclass(frozen=True)
class Plain(Algorithm):
    """An algorithm whose class says what it is."""

    payload = "grad"
    window = Window(Point.GRADIENT, Point.BACKWARD)

    def init(self, bucket: Bucket, comm: Communicator) -> None:
        return None

    def exchange(self, bucket: Bucket, comm: Communicator, state: None) -> None:
        comm.allreduce(bucket.flat, out=bucket.flat, op="avg")


@dataclass(frozen=True)
class Chosen(Algorithm):
    """An algorithm whose settings say what it is."""

    payload: str = "weight"
    window: Rounds = field(default_factory=Rounds)

    def init(self, bucket: Bucket, comm: Communicator) -> Floats:
        return np.empty_like(bucket.flat)

    def exchange(self, bucket: Bucket, comm: Communicator, state: Floats) -> None:
        comm.allreduce(state, out=state, op="avg")


@dataclass(frozen=True)
class Halves(Codec):
    """A codec of one's own."""

    def wire_nbytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return 2 * count

    def _encode(self, chunks: npt.NDArray[Any], wire: npt.NDArray[np.uint8]) -> None:
        wire.view(np.float16)[...] = chunks

    def _decode(self, wire: npt.NDArray[np.uint8], out: npt.NDArray[Any]) -> None:
        out[...] = wire.view(np.float16)


class Alone(Transport):
    """A transport of one's own."""

    name = "alone"

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size, self.timeout_s = 0, 1, 60.0

    def moves(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        for (_, x), (_, out) in zip(sends, recvs, strict=True):
            out[...] = x

    def split(self, color: int, key: int) -> Transport:
        return Alone()

    def abort(self, exit_code: int = 1) -> None:
        raise SystemExit(exit_code)


def training(comm: Communicator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    algorithms: list[Algorithm] = [
        Plain(),
        Chosen(),
        bagua_comm.ByteGrad(),
        bagua_comm.QAdam(10),
        bagua_comm.Decentralized("all"),
        bagua_comm.LowPrecisionDecentralized(),
        bagua_comm.LowPrecisionOnePeer(),
        bagua_comm.AsyncModelAverage(0.5),
        bagua_comm.DiLoCo(2, average=bagua_comm.Quantized(Halves())),
        every(2, bagua_comm.Decentralized("all")),
        bagua_comm.after(2, Plain(), bagua_comm.by_node(Chosen())),
    ]
    ddp = bagua_torch.DistributedDataParallel(model, [optimizer], algorithms[0], comm=comm)
    ddp.switch(bagua_comm.GradientAllReduce(bagua_comm.Hierarchical(bagua_comm.Quantized())))
    Communicator([Alone()]).barrier()


def refused(comm: Communicator, x: Floats) -> None:
    comm.allreduce([1.0, 2.0])  # type: ignore  # a list is no array
    comm.allreduce(x, op="mean")  # type: ignore  # no such reduction
    every(2, bagua_comm.Quantized())  # type: ignore  # an average is no algorithm
