"""The comparison of all algorithms for a job on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ...algorithms import from_name
from ...algorithms.by_node import ByNode
from ...averages import Hierarchical
from ...errors import ArrayError, UnsupportedError
from .inputs import Cluster, Job, Method, Prediction, Rates, TorchDDP
from .prediction import check_fit, predict


class Advice(NamedTuple):
    """An algorithm, its short name, and its prediction."""

    name: str
    method: Method
    prediction: Prediction


_ADVISED = (
    "exact",
    "float16",
    "bytegrad",
    "int4",
    "error-feedback",
    "int4-error-feedback",
    "hierarchical",
    "hierarchical-bytes",
    "hierarchical-all-bytes",
    "hierarchical-int4",
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
    "streaming-diloco",
    "streaming-diloco-int4",
    "sparseloco",
    "sparseloco-hierarchical",
)

METHODS: Mapping[str, Method] = MappingProxyType(
    {"ddp": TorchDDP(), **{name: from_name(name) for name in _ADVISED}}
)
"""The methods that `advise` compares: PyTorch's averaging, and algorithms of `algorithms.NAMED`."""


def advise(
    job: Job, cluster: Cluster, rates: Rates | None = None, methods: Mapping[str, Method] = METHODS
) -> list[Advice]:
    """Predict the step of every algorithm that supports this job and this cluster; the shortest comes first.

    Algorithms that exchange weights, or not in every step, may need more steps for the same result; only time is
    predicted. Hierarchical averages are left out if all ranks are on one node, or each node has one rank.

    >>> [advice.name for advice in advise(Job(100_000_000, 0.1, 0.2), Cluster(4, bandwidth_gbit=1))][:2]
    ['streaming-diloco-int4', 'diloco-100-bytes']
    """
    found = [
        Advice(name, method, predict(method, job, cluster, rates))
        for name, method in methods.items()
        if applies(method, job, cluster)
    ]
    return sorted(found, key=lambda advice: advice.prediction.step_s)


def applies(method: Method, job: Job, cluster: Cluster) -> bool:
    """Whether `advise` compares a method for this job on this cluster."""
    of_levels = isinstance(method, ByNode) or isinstance(getattr(method, "average", None), Hierarchical)
    if of_levels and not cluster.has_two_levels:
        return False
    try:
        check_fit(method, job, cluster)
    except (ArrayError, UnsupportedError):
        return False
    return True
