"""The comparison of all algorithms for a job on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ...algorithms.by_node import ByNode
from ...algorithms.named import NAMED, from_name
from ...averages import Hierarchical
from ...errors import ArrayError, UnsupportedError
from .inputs import Cluster, Job, Method, Prediction, Rates, TorchDDP
from .prediction import check_fit, predict


class Advice(NamedTuple):
    """An algorithm, its short name, and its prediction."""

    name: str
    method: Method
    prediction: Prediction


_VARIANTS = ("gradient-allreduce", "reproducible", "bfloat16", "bagua", "low-precision", "diloco")
"""Names in `algorithms.NAMED` that are not compared: another one stands for them."""

_COMBINATIONS = ("every", "every-4", "by-node", "after", "warm-up")
"""The same, of algorithms that are made of other ones."""

METHODS: Mapping[str, Method] = MappingProxyType(
    {"ddp": TorchDDP(), **{name: from_name(name) for name in NAMED if name not in _VARIANTS + _COMBINATIONS}}
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
