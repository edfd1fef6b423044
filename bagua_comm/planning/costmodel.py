"""How long a training step takes: a model of latency, bandwidth and work, for every algorithm and average.

    message of m bytes over a link    latency + m / (share of the line rate that is reached)
    line rate of a link               its bandwidth, and no more than all flows that leave the node at once carry
    work on an array of m bytes       m / rate
    bucket                            its messages and its work one after the other; a message also costs work
    step                              buckets one after the other on a lane, beside as much computation as the
                                      window of the algorithm allows

A rank has `cores_per_rank` cores. Computation uses all of them while it is alone. A lane that works takes up
to one core, and at most half of them, and computation loses what the lane takes. So a step is never shorter than
all its work divided by the cores. With infinitely many cores, as for training on a GPU, both go on side by side.

Parts of a model that communicate themselves (batch normalization over all ranks, a mixture of experts) hold the
step up: each of their calls takes as long as it takes alone, whatever the algorithm. What the lane does meanwhile
is left out, since both share the wire.

The model leaves out chance: all ranks are equally fast, and none waits for a slow one. Bytes are those that each
rank sends in a training step after warm-up, as `Communicator.counters` counts them.

Source: messages as in the alpha-beta model of Hockney, "The communication challenge for MPP" (1994), and Thakur
et al., "Optimization of Collective Communication Operations in MPICH" (2005); comparing algorithms under network
conditions as in Bagua (Gan et al., arXiv 2107.01499).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from ..algorithms import (
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    Point,
    QAdam,
    Window,
    from_name,
)
from ..algorithms.base import Rounds, check_size, phases_of, with_defaults
from ..algorithms.by_node import ByNode
from ..algorithms.combinators import Every
from ..arrays import FLOATS, dtype_named
from ..averages import Average, ErrorFeedback, Exact, Hierarchical, Quantized
from ..averages.reproducible import Reproducible
from ..bucket import DEFAULT_BUCKET_BYTES
from ..codecs import BFloat16, Codec, Float16
from ..errors import ArrayError, UnsupportedError, shown
from .models import Blocking, Layer

MOST_RANKS, MOST_BUCKETS, MOST_FLOWS = 2**20, 100_000, 1000
"""The largest cluster and job. There is a limit because a prediction visits every bucket."""

SMALLEST, LARGEST = 1e-18, 1e18
"""The range of rates and sizes, in any unit, so that nothing overflows; a rate may also be infinite."""

# ---------------------------------------------------------------------------------------------------
# What is given
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Ranks and what connects them.

    Args:
        nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node.
        bandwidth_gbit: Bandwidth of a node's link, each way, in Gbit/s; the ranks of the node share it.
        latency_s: Latency of a message between nodes.
        intra_gbs: Bandwidth from a rank to others of its node, each way, in GB/s.
        intra_latency_s: Latency of a message inside a node.
        cores_per_rank: Cores that computation and communication of a rank share; infinite if communication
            takes nothing from computation.
        transport: How exact averages travel. "mpi": each rank exchanges with all others at once, as host arrays
            do. "nccl": along rings and trees, as device arrays do.
        flows: Number of flows (TCP connections) that share what a rank sends to another on a different node.
        flow_bandwidth_gbit: What a flow carries at most, in Gbit/s; infinite if nothing but the link holds it.

    Raises:
        ArrayError: An argument is out of range.
    """

    nodes: int
    ranks_per_node: int = 1
    bandwidth_gbit: float = 10.0
    latency_s: float = 50e-6
    intra_gbs: float = 10.0
    intra_latency_s: float = 2e-6
    cores_per_rank: float = math.inf
    transport: Literal["mpi", "nccl"] = "mpi"
    flows: int = 1
    flow_bandwidth_gbit: float = math.inf

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "flows"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArrayError(f"Cluster: {name} is {shown(value)}, expected an integer of at least 1")
        if self.flows > MOST_FLOWS:
            raise ArrayError(f"Cluster: flows is {shown(self.flows)}, expected at most {MOST_FLOWS}")
        if self.size > MOST_RANKS:
            raise ArrayError(
                f"Cluster: {self.nodes} nodes of {self.ranks_per_node} ranks are too many, "
                f"expected at most {MOST_RANKS} ranks"
            )
        _check_positive(self, "bandwidth_gbit", "intra_gbs", "cores_per_rank", "flow_bandwidth_gbit")
        _check_not_negative(self, "latency_s", "intra_latency_s")
        if self.transport not in ("mpi", "nccl"):
            raise ArrayError(f'Cluster: transport is {self.transport!r}, expected "mpi" or "nccl"')

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def reached_gbit(self, pairs: float = 1.0) -> float:
        """Gbit/s that leave a node from which `pairs` pairs of ranks send at once.

        >>> Cluster(2, bandwidth_gbit=1, flows=4, flow_bandwidth_gbit=0.1).reached_gbit()
        0.4
        """
        return min(self.bandwidth_gbit, pairs * self.flows * self.flow_bandwidth_gbit)


@dataclass(frozen=True)
class Job:
    """A training step on one rank, without communication, and the tensors to average.

    Args:
        model_bytes: Bytes of all gradients, or of all weights.
        forward_s: Seconds of the forward pass. This and the other times hold while all ranks of the node compute.
        backward_s: Seconds of the backward pass.
        optimizer_s: Seconds of the optimizer's step.
        bucket_bytes: The size at which a bucket is closed.
        layers: The layers in the order in which their gradients become complete; if empty, gradients become
            complete evenly over the backward pass.
        dtype: The dtype of gradients and weights.
        blocking: Calls for which the step waits, in any order; `models.sync_batchnorm` and
            `models.mixture_of_experts` list those of such layers.

    Raises:
        ArrayError: An argument is out of range, or the layers do not add up to `model_bytes`.
    """

    model_bytes: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    layers: tuple[Layer, ...] = ()
    dtype: str = "float32"
    blocking: tuple[Blocking, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(Layer(*layer) for layer in self.layers))
        object.__setattr__(self, "blocking", tuple(Blocking(*call) for call in self.blocking))
        for call in self.blocking:
            numbers = (call.nbytes, call.times)
            if call.call not in ("allreduce", "allgather", "alltoall") or not all(
                isinstance(n, int) and 0 <= n <= LARGEST for n in numbers
            ):
                raise ArrayError(
                    f'Job: blocking has {shown(call)}, expected "allreduce", "allgather" or "alltoall", and '
                    f"bytes and times of at least 0, at most {LARGEST:g}"
                )
        for name in ("model_bytes", "bucket_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
                raise ArrayError(f"Job: {name} is {shown(value)}, expected a positive integer up to {LARGEST:g}")
        _check_not_negative(self, "forward_s", "backward_s", "optimizer_s")
        if self.dtype not in FLOATS:
            raise ArrayError(f"Job: dtype is {self.dtype!r}, expected one of {', '.join(sorted(FLOATS))}")
        if not self.layers and self.model_bytes > MOST_BUCKETS * self.bucket_bytes:
            raise ArrayError(
                f"Job: model_bytes is {self.model_bytes!r} and bucket_bytes {self.bucket_bytes!r}, "
                f"expected at most {MOST_BUCKETS} buckets; make them larger"
            )
        total = sum(layer.nbytes for layer in self.layers)
        if self.layers and total != self.model_bytes:
            raise ArrayError(f"Job: layers have {total} bytes, expected model_bytes, {self.model_bytes}")

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.optimizer_s

    def buckets(self) -> list[tuple[int, float]]:
        """Bytes of each bucket, and the share of the backward pass after which it is complete.

        >>> Job(25, bucket_bytes=10).buckets()
        [(10, 0.4), (10, 0.8), (5, 1.0)]
        >>> Job(25, bucket_bytes=10, layers=(Layer(24, 1), Layer(1, 3))).buckets()
        [(24, 0.25), (1, 1.0)]
        """
        layers = self.layers or _even_layers(self.model_bytes, self.bucket_bytes)
        whole = sum(layer.share for layer in layers) or 1.0
        closed: list[tuple[int, float]] = []
        nbytes, passed = 0, 0.0
        for layer in layers:
            nbytes, passed = nbytes + layer.nbytes, passed + layer.share
            if nbytes >= self.bucket_bytes:
                closed.append((nbytes, passed / whole))
                nbytes = 0
        return [*closed, (nbytes, 1.0)] if nbytes else closed


def _even_layers(nbytes: int, piece: int) -> tuple[Layer, ...]:
    sizes = [piece] * (nbytes // piece) + [nbytes % piece] * bool(nbytes % piece)
    return tuple(Layer(size, size) for size in sizes)


@dataclass(frozen=True)
class CodecRates:
    """Bytes of full-precision arrays that a core, or a device, codes in a second."""

    encode: float
    decode: float
    combine: float
    """Bytes of all arrays that are decoded and added, not of their sum alone."""


@dataclass(frozen=True)
class Rates:
    """The costs of communication beside the wire. The defaults are those of NumPy's kernels on one core.

    Args:
        minmax: Rates of eight-bit codecs, and of all others that are not casts.
        cast: Rates of sixteen-bit codecs.
        add: Bytes that sums and other elementwise arithmetic read in a second.
        copy: Bytes copied in a second.
        message_s: Seconds of work for a message, on either side.
        network_s_per_byte: Seconds of work for a byte to or from another node: the operating system copies it.
        polling: The share of a free core that a rank takes while it waits for messages, since it polls over MPI.
            Not counted on a ring, where PyTorch waits without polling.
        direct: The share of the line rate that ranks reach when each exchanges with many others, or with one, at
            once.
        ring: The share of the line rate that ranks reach on a ring.

    Raises:
        ArrayError: A rate is not positive, or a share is not between 0 and 1.
    """

    minmax: CodecRates = CodecRates(encode=2.4e9, decode=3.9e9, combine=2.5e9)
    cast: CodecRates = CodecRates(encode=0.9e9, decode=1.4e9, combine=1.0e9)
    add: float = 14e9
    copy: float = 10e9
    message_s: float = 5e-6
    network_s_per_byte: float = 0.4e-9
    polling: float = 0.25
    direct: float = 0.9
    ring: float = 0.95

    def __post_init__(self) -> None:
        for name in ("minmax", "cast"):
            value = getattr(self, name)
            if not isinstance(value, CodecRates):
                raise ArrayError(f"Rates: {name} is {value!r}, expected CodecRates")
            _check_positive(value, "encode", "decode", "combine")
        _check_positive(self, "add", "copy")
        _check_not_negative(self, "message_s", "network_s_per_byte", "polling")
        for name in ("direct", "ring"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not SMALLEST <= value <= 1:
                raise ArrayError(f"Rates: {name} is {value!r}, expected a share, above 0, at most 1")

    @classmethod
    def gpu(cls) -> Rates:
        """Rates of a data-centre GPU over NCCL, guessed from a memory bandwidth of 2 TB/s; not measured."""
        codec = CodecRates(encode=1.0e12, decode=1.0e12, combine=1.0e12)
        return cls(codec, codec, add=1.5e12, copy=0.8e12, message_s=1e-6, network_s_per_byte=0.0, polling=0.0)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rates:
        """The rates in a dictionary made by `dataclasses.asdict`; a missing rate has its default.

        Raises:
            ArrayError: The dictionary has an unknown name, or a rate is out of range.
        """
        _check_names("Rates", data, cls)
        given = dict(data)
        for name in {"minmax", "cast"} & data.keys():
            _check_names(f"Rates: {name}", data[name], CodecRates, complete=True)
            given[name] = CodecRates(**data[name])
        return cls(**given)


@dataclass(frozen=True)
class TorchDDP:
    """PyTorch's own DistributedDataParallel, the yardstick: exact averages on a ring, in buckets of its own.

    Args:
        bucket_bytes: Its `bucket_cap_mb`, in bytes.
        dtype: The dtype on the wire: "float16" with its fp16 compression hook; None for the gradients' own dtype.
    """

    bucket_bytes: int = 25 * 2**20
    dtype: str | None = None

    window = Window(Point.GRADIENT, Point.BACKWARD)


Method: TypeAlias = "Algorithm | TorchDDP"


# ---------------------------------------------------------------------------------------------------
# Predictions
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The time and the bytes of a training step, on average over the steps."""

    step_s: float
    compute_s: float
    """Seconds of the step without communication."""
    communication_s: float
    """Seconds in which the lane is busy."""
    wire_bytes: float
    """Bytes that a rank sends to other ranks."""
    node_bytes: float
    """Bytes that a node sends to other nodes."""

    @property
    def exposed_s(self) -> float:
        """Seconds that communication adds to the step."""
        return self.step_s - self.compute_s

    @property
    def hidden(self) -> float:
        """The share of communication that costs no time, between 0 and 1."""
        return 1 - min(1.0, self.exposed_s / self.communication_s) if self.communication_s else 1.0


def predict(method: Method, job: Job, cluster: Cluster, rates: Rates | None = None) -> Prediction:
    """The step time and bytes of training `job` on `cluster` with an algorithm, after its warm-up.

    Raises:
        ArrayError: The algorithm does not support this number of ranks.
        UnsupportedError: The model does not know what the algorithm, or its average, exchanges; or the algorithm
            does not take the dtype of the job.

    >>> job, cluster = Job(100_000_000, 0.1, 0.2), Cluster(nodes=4, bandwidth_gbit=1)
    >>> exact, bytegrad = (predict(from_name(name), job, cluster) for name in ("exact", "bytegrad"))
    >>> exact.wire_bytes, round(exact.step_s / bytegrad.step_s, 1)
    (150000000, 2.6)
    """
    _check_fit(method, job, cluster)
    costs = _Costs(cluster, rates or Rates(), job.dtype)
    averages, tasks = _averages(method, job, costs), _blocking(job, costs)
    held_s = held_up_s(job, cluster, rates)
    return Prediction(
        averages.step_s + held_s,
        averages.compute_s,
        averages.communication_s + held_s,
        averages.wire_bytes + sum(times * task.wire_bytes for times, task in tasks),
        averages.node_bytes + sum(times * task.node_bytes for times, task in tasks),
    )


def held_up_s(job: Job, cluster: Cluster, rates: Rates | None = None) -> float:
    """Seconds in which a step waits for the calls of the model itself.

    >>> from bagua_comm.planning.models import sync_batchnorm
    >>> job = Job(100, blocking=sync_batchnorm(64, layers=50))
    >>> round(held_up_s(job, Cluster(2, latency_s=1e-3)), 2)
    0.15
    """
    costs = _Costs(cluster, rates or Rates(), job.dtype)
    return sum(times * costs.alone(task) for times, task in _blocking(job, costs))


def _blocking(job: Job, costs: _Costs) -> list[tuple[int, _Task]]:
    """The tasks of the calls for which the step waits, and how often."""
    everyone = _Group(costs.cluster.size, costs.cluster.ranks_per_node)
    if everyone.size == 1:
        return []
    tasks: list[tuple[int, _Task]] = []
    for call, nbytes, times in job.blocking:
        match call:
            case "allreduce":
                tasks += [(times, task) for task in costs.average(Exact(), nbytes, everyone)]
            case "allgather":
                tasks.append((times, costs.allgather(nbytes, everyone)))
            case "alltoall":
                tasks.append((times, costs.pairs(nbytes / everyone.size, everyone)))
    return tasks


def _averages(method: Method, job: Job, costs: _Costs) -> Prediction:
    """What `predict` says of a model that does not communicate itself."""
    if isinstance(method, TorchDDP):
        job = dataclasses.replace(job, bucket_bytes=method.bucket_bytes)
    else:
        method = phases_of(method)[-1]
    if isinstance(method, Every):
        return _one_step_in(method.n, _averages(method.algorithm, job, costs))
    exchanges = (
        [_exchange(method, nbytes, costs) for nbytes, _ in job.buckets()] if costs.cluster.size > 1 else []
    )
    window = method.window if isinstance(method, TorchDDP) else with_defaults(method).window
    if isinstance(window, Rounds):
        return _beside(window.interval_s, job, exchanges, costs)
    prediction = _within(window, job, exchanges, costs)
    return _one_step_in(method.local_steps, prediction) if isinstance(method, DiLoCo) else prediction


def _check_fit(method: Method, job: Job, cluster: Cluster) -> None:
    if not isinstance(method, TorchDDP):
        with_defaults(method).check(job.dtype)
        check_size(method, cluster.size)
        for phase in phases_of(method):
            if isinstance(phase, ByNode) and cluster.nodes > 1:
                check_size(phase.algorithm, cluster.nodes)


class _Exchange(NamedTuple):
    """The tasks for one bucket: those of its lane, in order, and those of the training thread around them."""

    lane: list[_Task]
    trainer: _Task


def _within(window: Window, job: Job, exchanges: list[_Exchange], costs: _Costs) -> Prediction:
    """Predict the step of an algorithm whose `window` opens and closes in each step."""
    backward_begins, backward_ends = job.forward_s, job.forward_s + job.backward_s
    at = {
        Point.FORWARD: 0.0,
        Point.GRADIENT: backward_begins,
        Point.BACKWARD: backward_ends,
        Point.STEP: job.compute_s,
    }
    beside_s = (at[window.closes] - at[window.opens]) % (job.compute_s or 1.0)
    by_gradient = window.opens is Point.GRADIENT
    ready = [share * job.backward_s if by_gradient else 0.0 for _, share in job.buckets()]
    overlapped_s, busy_s = costs.overlap(beside_s, list(zip(ready, (e.lane for e in exchanges), strict=False)))
    trainer_s = sum(costs.alone(exchange.trainer) for exchange in exchanges)
    step_s = job.compute_s - beside_s + overlapped_s + trainer_s
    return Prediction(step_s, job.compute_s, busy_s, *_bytes(exchanges))


def _beside(interval_s: float, job: Job, exchanges: list[_Exchange], costs: _Costs) -> Prediction:
    """Predict the step of an algorithm whose rounds of exchanges go on beside training, which never waits.

    A round begins at the end of a step, at the earliest `interval_s` after the round before. Computation loses
    the cores that the round works with.
    """
    if not exchanges:
        return Prediction(job.compute_s, job.compute_s, 0.0, 0.0, 0.0)
    tasks = [costs.beside(task) for exchange in exchanges for task in exchange.lane]
    round_s = sum(spent for spent, _ in tasks)
    lost_s = sum(spent * (1 - speed) for spent, speed in tasks)
    lost_s += sum(costs.alone(exchange.trainer) for exchange in exchanges)
    # The n steps from round to round take n compute_s + lost_s, and at least as long as the round.
    steps = max(1.0, (max(interval_s, round_s) - lost_s) / job.compute_s) if job.compute_s else 1.0
    in_every = Prediction(job.compute_s + lost_s, job.compute_s, round_s, *_bytes(exchanges))
    return _one_step_in(steps, in_every)


def _bytes(exchanges: Iterable[_Exchange]) -> tuple[float, float]:
    """The bytes that a rank sends, and that a node sends."""
    tasks = [task for exchange in exchanges for task in exchange.lane]
    return sum(task.wire_bytes for task in tasks), sum(task.node_bytes for task in tasks)


def _one_step_in(n: float, step: Prediction) -> Prediction:
    """The mean over `n` steps, of which one is `step` and the others do not communicate."""
    return Prediction(
        step.compute_s + step.exposed_s / n,
        step.compute_s,
        step.communication_s / n,
        step.wire_bytes / n,
        step.node_bytes / n,
    )


# ---------------------------------------------------------------------------------------------------
# The exchange of a bucket
# ---------------------------------------------------------------------------------------------------


def _exchange(method: Method, n: int, costs: _Costs) -> _Exchange:
    """The tasks of a method for a bucket of `n` bytes."""
    everyone = _Group(costs.cluster.size, costs.cluster.ranks_per_node)
    work, nothing = costs.work, _Task()
    match method:
        case TorchDDP(dtype=dtype):
            itemsize = dtype_named(costs.dtype).itemsize
            sent = n if dtype is None else n // itemsize * dtype_named(dtype).itemsize
            casts = [] if dtype is None else [costs.coded(Float16(), encode=n), costs.coded(Float16(), decode=n)]
            lane = [*costs.ring_allreduce(sent, everyone), *casts, work(copy=2 * n)]
            return _Exchange(lane, nothing)
        case GradientAllReduce(average):
            return _Exchange(costs.average(average, n, everyone), nothing)
        case QAdam(average=average):
            return _Exchange([work(add=2 * n), *costs.average(average, n, everyone)], nothing)
        case Decentralized(peers="all"):
            return _Exchange(costs.average(Exact(), n, everyone), work(copy=n))
        case Decentralized(peers="shift_one"):
            # The two halves of the ranks are on different nodes, except on a node in the middle.
            away = n if costs.cluster.nodes > 1 else 0
            pairs = costs.cluster.ranks_per_node
            return _Exchange([costs.transfer(away, n - away, pairs=pairs), work(add=2 * n)], work(copy=n))
        case Decentralized():
            return _Exchange([costs.to_one_peer(n), work(add=2 * n)], work(copy=n))
        case LowPrecisionDecentralized(codec):
            both = costs.to_both_neighbours(costs.wire_nbytes(codec, n))
            lane = [work(add=4 * n), costs.coded(codec, encode=n), both]
            lane += 3 * [costs.coded(codec, decode=n), work(add=2 * n)]
            return _Exchange(lane, work(copy=n))
        case LowPrecisionOnePeer(codec):
            lane = [work(add=2 * n), costs.coded(codec, encode=n)]
            lane += [costs.to_one_peer(costs.wire_nbytes(codec, n))]
            lane += 2 * [costs.coded(codec, decode=n), work(add=2 * n)]
            return _Exchange([*lane, work(add=3 * n)], work(copy=n))
        case ByNode((Decentralized() | LowPrecisionDecentralized() | LowPrecisionOnePeer()) as algorithm):
            node = _Group(costs.cluster.ranks_per_node, costs.cluster.ranks_per_node)
            chunk = costs.chunk(n, node.size)
            lane = [costs.allgather(chunk, node), work(add=n)] if node.size > 1 else []
            lane += costs.among_nodes(algorithm, chunk)
            lane += [costs.allgather(chunk, node)] if node.size > 1 else []
            return _Exchange(lane, work(copy=n))
        case AsyncModelAverage():
            return _Exchange(costs.average(Exact(), n, everyone), work(copy=n, add=3 * n))
        case DiLoCo(average=average):
            lane = [work(add=2 * n), *costs.average(average, n, everyone), work(add=4 * n)]
            return _Exchange(lane, work(copy=n))
    raise UnsupportedError(f"costmodel: the model does not know what {method!r} exchanges")


class _Task(NamedTuple):
    """A task of a lane: it waits for the wire and works, both at once."""

    wire_s: float = 0.0
    work_s: float = 0.0
    """Seconds of work of one core, or of the device."""
    poll_s: float = 0.0
    """Seconds of polling, if there is a core for it; the task does not depend on it."""
    wire_bytes: float = 0
    node_bytes: float = 0


class _Group(NamedTuple):
    """Ranks that exchange with each other, equally many on each node. Every rank is in one such group."""

    size: int
    per_node: int


@dataclass(frozen=True)
class _Costs:
    """The costs of each operation on this cluster."""

    cluster: Cluster
    rates: Rates
    dtype: str

    # Averages ---------------------------------------------------------------------------------------

    def average(self, average: Average, n: int, group: _Group) -> list[_Task]:
        """Average `n` bytes over a group."""
        p = group.size
        if p == 1:
            return []
        match average:
            case Exact() if self.cluster.transport == "nccl":
                return self.ring_allreduce(n, group)
            case Exact():
                chunk = self.chunk(n, p)
                return [self.pairs(chunk, group), self.work(add=n, copy=chunk), self.pairs(chunk, group)]
            case Reproducible(block=block):
                count = -(-n // dtype_named(self.dtype).itemsize)
                fields = self.average(Exact(), -(-count // block), group)
                units = self.average(Exact(), 4 * count, group)
                begin, middle = self.work(add=n), self.work(add=n, copy=4 * count)
                return [begin, *fields, middle, *units, self.work(add=4 * count, copy=n)]
            case Quantized(codec):
                chunk = self.wire_nbytes(codec, self.chunk(n, p))
                return [
                    self.coded(codec, encode=n),
                    self.pairs(chunk, group),
                    self.coded(codec, combine=n),
                    self.allgather(chunk, group),
                    self.coded(codec, decode=n),
                ]
            case ErrorFeedback(Quantized(codec) as inner):
                lost = [self.coded(codec, decode=2 * n), self.work(add=5 * n, copy=n)]
                return [self.work(add=2 * n), *self.average(inner, n, group), *lost]
            case Hierarchical(inner):
                node, across = _Group(group.per_node, group.per_node), _Group(p // group.per_node, 1)
                if node.size == 1:
                    return self.average(inner, n, across)
                chunk = self.chunk(n, node.size)
                scatter = [self.allgather(chunk, node), self.work(add=n)]
                return [*scatter, *self.average(inner, chunk, across), self.allgather(chunk, node)]
        raise UnsupportedError(f"costmodel: the model does not know what {average!r} exchanges")

    def among_nodes(self, algorithm: Algorithm, n: int) -> list[_Task]:
        """What `algorithm` does with `n` bytes where each rank exchanges with one of every other node."""
        k = self.cluster.ranks_per_node
        if self.cluster.nodes == 1:
            return []
        share = dataclasses.replace(
            self.cluster, ranks_per_node=1, bandwidth_gbit=self.cluster.bandwidth_gbit / k
        )
        exchange = _exchange(algorithm, n, dataclasses.replace(self, cluster=share))
        return [task._replace(node_bytes=k * task.node_bytes) for task in [*exchange.lane, exchange.trainer]]

    def ring_allreduce(self, n: int, group: _Group) -> list[_Task]:
        """Reduce and gather `n` bytes along rings (or trees, over NCCL), adding while the next bytes come."""
        half = self.ring(n, group)
        return [half._replace(work_s=half.work_s + self.work(add=n).work_s), half]

    # Messages ---------------------------------------------------------------------------------------

    def pairs(self, message: float, group: _Group) -> _Task:
        """Each rank of a group sends `message` bytes to each other rank, all at once."""
        size, inside = group.size, group.per_node - 1
        away = size - 1 - inside
        pairs = self.cluster.ranks_per_node * away
        return self.transfer(away * message, inside * message, messages=size - 1, pairs=pairs)

    def allgather(self, message: float, group: _Group) -> _Task:
        """Each rank of a group gets `message` bytes from each other rank."""
        if self.cluster.transport == "nccl":
            return self.ring(message * group.size, group)
        return self.pairs(message, group)

    def ring(self, n: float, group: _Group) -> _Task:
        """Each rank of a group sends (p - 1) / p of `n` bytes, all its chunks but one, to its successor."""
        p, k = group
        sent = self.chunk(n, p) * (p - 1)
        away = sent / k if p > k else 0  # a ring leaves each node once
        hops = math.ceil(math.log2(p)) if self.cluster.transport == "nccl" else p - 1
        pairs = self.cluster.ranks_per_node / k  # each group of the node's ranks has a ring of its own
        return self.transfer(away, sent - away, messages=hops, hops=hops, share=self.rates.ring, pairs=pairs)

    def to_one_peer(self, n: float) -> _Task:
        """Each rank sends `n` bytes on the one-peer exponential graph; the mean over its rounds."""
        c = self.cluster
        hops = [2**k for k in range((c.size - 1).bit_length())]
        leaving = [min(hop, c.ranks_per_node) / c.ranks_per_node if c.nodes > 1 else 0.0 for hop in hops]
        away = n * sum(leaving) / len(hops)
        return self.transfer(away, n - away, pairs=c.ranks_per_node * sum(leaving) / len(hops))

    def to_both_neighbours(self, n: float) -> _Task:
        """Each rank sends `n` bytes to both neighbours on a ring; two edges of the ring leave each node."""
        away = 2 * n / self.cluster.ranks_per_node if self.cluster.nodes > 1 else 0
        return self.transfer(away, 2 * n - away, messages=2, pairs=2)

    def transfer(
        self,
        away: float,
        inside: float,
        *,
        pairs: float,
        messages: int = 1,
        hops: int = 1,
        share: float | None = None,
    ) -> _Task:
        """Each rank sends `away` bytes to other nodes and `inside` bytes within its own, and receives as many.

        The bytes that leave a node do so between `pairs` pairs of ranks at once.
        """
        c, rates = self.cluster, self.rates
        link_s = (
            away * c.ranks_per_node / (c.reached_gbit(pairs) / 8 * 1e9 * (share or rates.direct)) if away else 0.0
        )
        inside_s = inside / (c.intra_gbs * 1e9)
        wait_s = hops * (c.latency_s if away else c.intra_latency_s)
        work_s = 2 * (messages * rates.message_s + away * rates.network_s_per_byte + inside / rates.copy)
        wire_s = wait_s + max(link_s, inside_s)
        poll_s = 0.0 if share else rates.polling * wire_s
        return _Task(wire_s, work_s, poll_s, away + inside, away * c.ranks_per_node)

    # Work -------------------------------------------------------------------------------------------

    def work(self, *, add: float = 0, copy: float = 0) -> _Task:
        """Read `add` bytes for arithmetic, and copy `copy` bytes."""
        return _Task(work_s=add / self.rates.add + copy / self.rates.copy)

    def coded(self, codec: Codec, *, encode: float = 0, decode: float = 0, combine: float = 0) -> _Task:
        """Encode, decode and combine these bytes of full-precision arrays."""
        rates = self.rates.cast if isinstance(codec, (Float16, BFloat16)) else self.rates.minmax
        return _Task(work_s=encode / rates.encode + decode / rates.decode + combine / rates.combine)

    def wire_nbytes(self, codec: Codec, n: int) -> int:
        """Bytes of an encoded chunk of `n` bytes."""
        dtype = dtype_named(self.dtype)
        return codec.wire_nbytes(-(-n // dtype.itemsize), dtype)

    def chunk(self, n: float, parts: int) -> int:
        """Bytes of one of `parts` equal chunks, in whole elements."""
        itemsize = dtype_named(self.dtype).itemsize
        return -(-int(n) // (itemsize * parts)) * itemsize

    # Time -------------------------------------------------------------------------------------------

    def alone(self, task: _Task) -> float:
        """Seconds of a task beside which nothing else runs."""
        return max(task.wire_s, task.work_s / min(1.0, self.cluster.cores_per_rank))

    def beside(self, task: _Task) -> tuple[float, float]:
        """Seconds of a task beside computation, and the share of its speed that computation keeps."""
        cores = self.cluster.cores_per_rank
        free = min(1.0, cores / 2)
        spent = max(task.wire_s, task.work_s / free)
        return spent, 1 - min(free, (task.work_s + task.poll_s) / spent) / cores if spent else 1.0

    def overlap(self, compute_s: float, tasks: Sequence[tuple[float, Sequence[_Task]]]) -> tuple[float, float]:
        """Seconds until computation and a lane beside it have ended, and how long the lane is busy.

        Args:
            compute_s: Seconds of the computation if it were alone.
            tasks: For each bucket in turn, the computation that comes before it, and the tasks of the lane.
        """
        now = done = busy = 0.0
        for ready_s, bucket in tasks:
            if done < ready_s:
                now, done = now + ready_s - done, ready_s
            for task in bucket:
                spent, speed = self.beside(task)
                if done + spent * speed <= compute_s:
                    done += spent * speed
                else:  # computation ends first; the rest of this task goes on alone
                    left = max(0.0, compute_s - done) / speed
                    spent = left + (1 - left / spent) * self.alone(task)
                    done = compute_s
                now, busy = now + spent, busy + spent
        return now + max(0.0, compute_s - done), busy


# ---------------------------------------------------------------------------------------------------
# Advice
# ---------------------------------------------------------------------------------------------------


class Advice(NamedTuple):
    """An algorithm, its short name, and its prediction."""

    name: str
    method: Method
    prediction: Prediction


_ADVISED = (
    "exact",
    "float16",
    "bytegrad",
    "error-feedback",
    "hierarchical",
    "hierarchical-bytes",
    "qadam",
    "decentralized",
    "shift-one",
    "one-peer",
    "low-precision-ring",
    "low-precision-one-peer",
    "shift-one-by-node",
    "low-precision-by-node",
    "shift-one-every-4",
    "async",
    "diloco-100",
    "diloco-100-bytes",
)

METHODS: Mapping[str, Method] = MappingProxyType(
    {"ddp": TorchDDP(), **{name: from_name(name) for name in _ADVISED}}
)
"""What `advise` compares: PyTorch's own averaging, and algorithms by their names in `algorithms.NAMED`."""


def advise(
    job: Job, cluster: Cluster, rates: Rates | None = None, methods: Mapping[str, Method] = METHODS
) -> list[Advice]:
    """Predict every algorithm that supports this job and this cluster; the shortest step comes first.

    Algorithms that exchange weights, or not in every step, may need more steps for the same result; the model
    predicts only time. Hierarchical averages are left out if all ranks are on one node, or each rank is alone on
    its node.

    >>> [advice.name for advice in advise(Job(100_000_000, 0.1, 0.2), Cluster(4, bandwidth_gbit=1))][:2]
    ['diloco-100-bytes', 'async']
    """
    found = [
        Advice(name, method, predict(method, job, cluster, rates))
        for name, method in methods.items()
        if _applies(method, job, cluster)
    ]
    return sorted(found, key=lambda advice: advice.prediction.step_s)


def _applies(method: Method, job: Job, cluster: Cluster) -> bool:
    one_level = cluster.nodes == 1 or cluster.ranks_per_node == 1
    if one_level and (isinstance(method, ByNode) or isinstance(getattr(method, "average", None), Hierarchical)):
        return False
    try:
        _check_fit(method, job, cluster)
    except (ArrayError, UnsupportedError):
        return False
    return True


# ---------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, (int, float)) or not (SMALLEST <= value <= LARGEST or value == math.inf):
            raise ArrayError(
                f"{type(owner).__name__}: {name} is {shown(value)}, expected a positive number "
                f"between {SMALLEST:g} and {LARGEST:g}, or inf"
            )


def _check_not_negative(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
            raise ArrayError(
                f"{type(owner).__name__}: {name} is {shown(value)}, expected a number of at least 0, "
                f"at most {LARGEST:g}"
            )


def _check_names(owner: str, data: object, cls: type, *, complete: bool = False) -> None:
    """Raise unless `data` is a dictionary of fields of the dataclass `cls`: all of them, if `complete`."""
    names = [f.name for f in dataclasses.fields(cls)]
    if not isinstance(data, Mapping) or not set(data) <= set(names) or (complete and set(data) != set(names)):
        found = ", ".join(map(str, data)) if isinstance(data, Mapping) else repr(data)
        raise ArrayError(
            f"{owner}: found {found}, expected {'all' if complete else 'some'} of {', '.join(names)}"
        )
