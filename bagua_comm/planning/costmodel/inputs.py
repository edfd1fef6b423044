"""The inputs and the result of the cost model: cluster, job, rates, method, and prediction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ...algorithms import Algorithm, Point, Window
from ...arrays import FLOATS
from ...bucket import DEFAULT_BUCKET_BYTES
from ...errors import ArrayError, shown
from ..models import Layer

MOST_RANKS, MOST_BUCKETS, MOST_FLOWS = 2**20, 100_000, 1000
"""Limits of clusters and jobs: a prediction visits every bucket."""

SMALLEST, LARGEST = 1e-18, 1e18
"""The range of rates and sizes, in any unit, within which nothing overflows; a rate may also be infinite."""


@dataclass(frozen=True)
class Cluster:
    """Ranks and the links between them.

    Args:
        nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node.
        bandwidth_gbit: Bandwidth of a node's link, each way, in Gbit/s; the ranks of the node share it.
        latency_s: Latency of a message between nodes.
        intra_gbs: Bandwidth from a rank to others of its node, each way, in GB/s.
        intra_latency_s: Latency of a message inside a node.
        cores_per_rank: Cores that computation and communication of a rank share; infinite if communication
            does not slow computation down.
        transport: How exact averages travel. "mpi": each rank exchanges with all others at once, as host arrays
            do. "nccl": along rings and trees, as device arrays do.
        flows: Number of flows (TCP connections) between two ranks on different nodes, which share their data.
        flow_bandwidth_gbit: The bandwidth limit of a flow, in Gbit/s; infinite if only the link limits it.

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
        check_fields(self, 1, MOST_RANKS, "nodes", "ranks_per_node", whole=True)
        check_fields(self, 1, MOST_FLOWS, "flows", whole=True)
        if self.size > MOST_RANKS:
            raise ArrayError(
                f"Cluster: {self.nodes} nodes of {self.ranks_per_node} ranks are too many, "
                f"expected at most {MOST_RANKS} ranks"
            )
        _check_positive(self, "bandwidth_gbit", "intra_gbs", "cores_per_rank", "flow_bandwidth_gbit")
        check_fields(self, 0, LARGEST, "latency_s", "intra_latency_s")
        if self.transport not in ("mpi", "nccl"):
            raise ArrayError(f'Cluster: transport is {self.transport!r}, expected "mpi" or "nccl"')

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def has_two_levels(self) -> bool:
        """Whether there are several nodes, and several ranks on each."""
        return self.nodes > 1 and self.ranks_per_node > 1

    def reached_gbit(self, pairs: float = 1.0) -> float:
        """Gbit/s that leave a node when `pairs` pairs of ranks communicate at once.

        >>> Cluster(2, bandwidth_gbit=1, flows=4, flow_bandwidth_gbit=0.1).reached_gbit()
        0.4
        """
        return min(self.bandwidth_gbit, pairs * self.flows * self.flow_bandwidth_gbit)


@dataclass(frozen=True)
class Job:
    """A training step on one rank, without communication, and the tensors to average.

    Args:
        model_bytes: Bytes of all gradients, or of all weights.
        forward_s: Seconds of the forward pass. All times are measured while all ranks of the node compute.
        backward_s: Seconds of the backward pass.
        optimizer_s: Seconds of the optimizer's step.
        bucket_bytes: The size at which a bucket is full.
        layers: The layers in the order in which their gradients become complete; if empty, gradients become
            complete evenly over the backward pass.
        dtype: The dtype of gradients and weights.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(Layer(*layer) for layer in self.layers))
        check_fields(self, 1, LARGEST, "model_bytes", "bucket_bytes", whole=True)
        check_fields(self, 0, LARGEST, "forward_s", "backward_s", "optimizer_s")
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
        """Bytes of each bucket, and the fraction of the backward pass after which it is complete.

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
    """Bytes of full-precision arrays that a core or a device encodes or decodes in a second."""

    encode: float
    decode: float
    combine: float
    """Bytes of all arrays that are decoded and added, not of their sum."""


@dataclass(frozen=True)
class Rates:
    """The costs of communication besides the wire. The defaults are those of NumPy's kernels on one core.

    Args:
        minmax: Rates of eight-bit codecs, and of all other codecs that are not casts.
        cast: Rates of sixteen-bit codecs.
        add: Bytes that sums and other elementwise arithmetic read in a second.
        copy: Bytes copied in a second.
        message_s: Seconds of work for a message, on either side.
        network_s_per_byte: Seconds of work for a byte to or from another node, which the operating system copies.
        polling: The fraction of a free core that a rank uses while it waits for messages, since MPI polls. Not
            counted on a ring, where PyTorch waits without polling.
        direct: The fraction of the line rate that ranks reach when each exchanges with one or many others at
            once.
        ring: The fraction of the line rate that ranks reach on a ring.

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
        check_fields(self, 0, LARGEST, "message_s", "network_s_per_byte", "polling")
        check_fields(self, SMALLEST, 1, "direct", "ring")

    @classmethod
    def gpu(cls) -> Rates:
        """Rates of a data-centre GPU over NCCL.

        Those of codecs, sums and copies were measured on an H200 (benchmarks/results/gpu_h200.json), in float32:
        `combine` for eight ranks; for two it reaches half of that. The others are estimates. It is assumed,
        and cautious, that `Int4` is as fast as the eight-bit codec (encode and decode took 0.9 of its time), and
        that `TopK` takes `costs.CHOICE` times as long to encode, as on CPUs (it took 1.7 times as long).
        """
        minmax, cast = CodecRates(3.1e12, 2.8e12, 7.9e12), CodecRates(2.5e12, 2.5e12, 5.9e12)
        return cls(minmax, cast, add=2.9e12, copy=2.1e12, message_s=1e-6, network_s_per_byte=0.0, polling=0.0)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rates:
        """Rates from the dictionary of `dataclasses.asdict`; a missing rate has its default.

        Raises:
            ArrayError: The dictionary has an unknown name, or a rate is out of range.
        """
        names = ", ".join(each.name for each in dataclasses.fields(cls))
        if not isinstance(data, Mapping):
            raise ArrayError(f"Rates: found {data!r}, expected a dictionary of some of {names}")
        try:
            codecs = {name: CodecRates(**data[name]) for name in ("minmax", "cast") if name in data}
            return cls(**{**data, **codecs})
        except TypeError as exc:
            raise ArrayError(f"Rates: {exc}; expected some of {names}") from exc


@dataclass(frozen=True)
class TorchDDP:
    """PyTorch's DistributedDataParallel, for comparison: exact averages on a ring, in its own buckets.

    Args:
        bucket_bytes: Its `bucket_cap_mb`, in bytes.
        dtype: The dtype on the wire: "float16" with its fp16 compression hook; None for the gradients' own dtype.
    """

    bucket_bytes: int = 25 * 2**20
    dtype: str | None = None

    window = Window(Point.GRADIENT, Point.BACKWARD)


Method: TypeAlias = "Algorithm | TorchDDP"


@dataclass(frozen=True)
class Prediction:
    """The time and the bytes of a training step, averaged over the steps."""

    step_s: float
    compute_s: float
    """Seconds of the step without communication."""
    communication_s: float
    """Seconds during which the lane is busy."""
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
        """The fraction of communication that adds no time to the step, between 0 and 1."""
        return 1 - min(1.0, self.exposed_s / self.communication_s) if self.communication_s else 1.0


# Checks ----------------------------------------------------------------------------------------------------


def check_range(owner: str, name: str, value: object, least: float, most: float, *, whole: bool = False) -> None:
    """Raise `ArrayError` unless a setting is a number between two bounds."""
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # type: ignore[operator]
        expected = f"an integer from {least} to {most}" if whole else f"a number from {least:g} to {most:g}"
        raise ArrayError(f"{owner}: {name} is {shown(value)}, expected {expected}")


def check_fields(owner: object, least: float, most: float, *names: str, whole: bool = False) -> None:
    """Raise `ArrayError` unless these fields of a dataclass are numbers between two bounds."""
    for name in names:
        check_range(type(owner).__name__, name, getattr(owner, name), least, most, whole=whole)


def _check_positive(owner: object, *names: str) -> None:
    """Raise unless these fields are positive; they may be infinite."""
    check_fields(owner, SMALLEST, LARGEST, *(name for name in names if getattr(owner, name) != math.inf))
