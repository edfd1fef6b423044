"""Records the program of a rank from the code that trains.

The plan packs the tensors of the job into buckets, as `DistributedDataParallel` does. The schedule of the engine
decides when buckets leave and are written back, and the algorithm exchanges them, over a transport that records
(`transport`) arrays without values (`shapes`). What is left is what the model itself does: computation, and calls
for which it waits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import numpy as np

from ... import kernels
from ...algorithms import Decentralized, LowPrecisionOnePeer, Point, Rounds, StreamingDiLoCo, Window
from ...algorithms.base import Algorithm, core_of
from ...algorithms.by_node import ByNode
from ...arrays import dtype_named
from ...bucket import Bucket, Plan, TensorSpec, make_buckets
from ...comm import Communicator
from ...engine.exchanges import Exchanges
from ...engine.restore import make_states
from ...engine.schedule import ExchangeSchedule, RoundSchedule, schedule_of
from ...execution.lane import Lane
from ...trace import NULL
from ..costmodel import Cluster, Job, Method, TorchDDP
from ..tuner.grid import period_of, warmup_of
from .shapes import Kernels, noting, of_size
from .transport import Op, Program, Recorder, SimulatedCommunicator

P = ParamSpec("P")
R = TypeVar("R")

_EVEN_TENSORS = 16
"""The number of tensors of a bucket, for a job whose layers are not known."""


def trace(method: Method, job: Job, cluster: Cluster) -> Program:
    """Record the program of a rank that trains `job` on `cluster`, after the warm-up of its algorithm.

    It has as many steps as the algorithm takes to repeat what it sends. Which arguments fit together is checked
    by `costmodel.check_fit`.
    """
    over_gloo: Literal["gloo"] | None = "gloo" if isinstance(method, TorchDDP) else None
    recorder = Recorder(cluster, ring="nccl" if cluster.transport == "nccl" else over_gloo)
    with kernels.use(Kernels()), noting(recorder.note):
        _Tracing(recorder, method, job).run()
    return recorder.program


@dataclass(frozen=True)
class _RingAverage(Algorithm):
    """The exchange of PyTorch's DistributedDataParallel: gradients are copied to a bucket and back."""

    dtype: str | None = None
    payload = "grad"
    window = Window(Point.GRADIENT, Point.BACKWARD)

    def init(self, bucket: Bucket, comm: Communicator) -> None:
        """It has no state."""

    def exchange(self, bucket: Bucket, comm: Communicator, state: None) -> None:
        """Average the bucket. Collective."""
        sent = of_size(bucket.flat.size, bucket.flat.dtype if self.dtype is None else dtype_named(self.dtype))
        wire = sent.reshape(1, -1).view(np.uint8)
        chunks, run = bucket.flat[None], kernels.of(sent)
        if self.dtype is None:
            sent[...] = bucket.flat
        else:
            run.cast_encode(chunks, wire, sent.dtype)
        comm.allreduce(sent, out=sent, op="avg")
        if self.dtype is None:
            bucket.flat[...] = sent
        else:
            run.cast_decode(wire, chunks, sent.dtype)


class _RecordedFuture(Future[R]):
    """The result of a task of the lane, and its number."""

    number: int


class _RecordingLane(Lane[Communicator]):
    """A lane that records its tasks, and when training waits for them."""

    def __init__(self, comm: Communicator, recorder: Recorder) -> None:
        super().__init__(comm)
        self._recorder = recorder

    def submit(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Record the operations of a task; see `Lane.submit`."""
        recorder, program = self._recorder, self._recorder.program
        trainer = recorder.ops
        ops: list[Op] = []
        future: _RecordedFuture[R] = _RecordedFuture()
        if trainer is not None:
            future.number = len(program.tasks)
            trainer.append(("submit", future.number))
            program.tasks.append(ops)
            recorder.ops = ops
        future.set_result(task(*args, **kwargs))
        recorder.ops = trainer
        return future

    def wait(self) -> None:
        """Record that training waits for all tasks."""
        if self._recorder.ops is not None and self._recorder.program.tasks:
            self._recorder.ops.append(("wait", len(self._recorder.program.tasks) - 1))

    def result(self, future: Future[R]) -> R:
        """Record that training waits for a task."""
        if self._recorder.ops is not None:
            assert isinstance(future, _RecordedFuture)
            self._recorder.ops.append(("wait", future.number))
        return future.result()


class _Tracing:
    """The recording of one program."""

    def __init__(self, recorder: Recorder, method: Method, job: Job) -> None:
        self._recorder, self._program = recorder, recorder.program
        self._job = job
        if isinstance(method, TorchDDP):
            job = dataclasses.replace(job, bucket_bytes=method.bucket_bytes)
            phase: Algorithm = _RingAverage(method.dtype)
        else:
            phase = method.phases[-1]
        plan, self._shares = _plan_of(job, phase)
        self._comm = SimulatedCommunicator(recorder)
        flats = [of_size(bucket.size, dtype_named(bucket.dtype)) for bucket in plan.buckets]
        self._buckets = make_buckets(plan, flats)
        self._exchanges = Exchanges(_RecordingLane(self._comm, recorder), NULL)
        states = make_states(phase, self._buckets, self._comm, None)
        self._exchanges.begin_phase(phase, self._buckets, states, began=0)
        window = phase.window
        self._schedule: ExchangeSchedule = schedule_of(self._exchanges)
        if isinstance(window, Rounds):
            self._program.interval_s = window.interval_s
            # A round ends in the step after its beginning; `replay` decides how many steps that takes.
            self._schedule = RoundSchedule(Rounds(0.0), self._exchanges)
        self._steps = _steps_of(phase, recorder.cluster)
        self._first = -(-warmup_of(phase) // self._steps) * self._steps

    def run(self) -> None:
        """Record the steps, and the end of what they leave under way."""
        self._recorder.ops = self._program.trainer
        for step in range(self._first, self._first + self._steps):
            self._exchanges.set_step(step)
            self._step()
            self._program.trainer.append(("step",))
        if self._program.interval_s is None:
            self._schedule.settle()
        else:
            self._schedule.at(Point.STEP)  # the round ends, and another begins
            self._forget_the_next_round()
        self._program.steps = self._steps
        self._recorder.ops = None

    def _forget_the_next_round(self) -> None:
        ops = self._program.trainer
        ended = ops.index(("step",))
        again = next((i for i, op in enumerate(ops) if i > ended and op[0] == "submit"), len(ops))
        first = ops[again][1] if again < len(ops) else len(self._program.tasks)
        del ops[again:], self._program.tasks[first:]

    def _step(self) -> None:
        job, ops = self._job, self._program.trainer
        self._schedule.at(Point.FORWARD)
        ops.append(("compute", job.forward_s))
        passed = 0.0
        for index, share in enumerate(self._shares):
            ops.append(("compute", (share - passed) * job.backward_s))
            passed = share
            self._schedule.ready_bucket(index)
        ops.append(("compute", (1 - passed) * job.backward_s))
        self._schedule.at(Point.BACKWARD)
        ops.append(("compute", job.optimizer_s))
        self._schedule.at(Point.STEP)


def _plan_of(job: Job, phase: Algorithm) -> tuple[Plan, list[float]]:
    """Pack the tensors of a job; and the fraction of the backward pass after which each bucket is complete."""
    itemsize = dtype_named(job.dtype).itemsize
    layers = [(layer.nbytes, layer.share) for layer in job.layers]
    if not layers:
        count = max(1, -(-job.model_bytes // job.bucket_bytes)) * _EVEN_TENSORS
        piece = max(itemsize, -(-job.model_bytes // (count * itemsize)) * itemsize)
        sizes = [min(piece, job.model_bytes - at) for at in range(0, job.model_bytes, piece)]
        layers = [(size, float(size)) for size in sizes]
    specs = [TensorSpec(str(i), (-(-nbytes // itemsize),), job.dtype) for i, (nbytes, _) in enumerate(layers)]
    groups = phase.groups(specs) if isinstance(phase, StreamingDiLoCo) else None
    plan = Plan.pack(specs, bucket_bytes=job.bucket_bytes, groups=groups)
    whole = sum(share for _, share in layers) or 1.0
    complete = [passed / whole for passed in itertools.accumulate(share for _, share in layers)]
    ends = [max(complete[int(tensor.name)] for tensor in bucket.tensors) for bucket in plan.buckets]
    return plan, list(itertools.accumulate(ends, max))


def _steps_of(phase: Algorithm, cluster: Cluster) -> int:
    """The number of steps after which an algorithm sends the same again, to the same ranks."""
    core, size = core_of(phase), cluster.size
    if isinstance(phase, ByNode) or isinstance(getattr(phase, "algorithm", None), ByNode):
        size = cluster.nodes
    rounds = 1
    if isinstance(core, LowPrecisionOnePeer) or core == Decentralized("one_peer_exponential"):
        rounds = max(1, (size - 1).bit_length())
    window = phase.window
    again = 2 if isinstance(window, Window) and window.delay else 1
    return period_of(phase) * rounds * again
