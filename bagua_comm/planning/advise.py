"""Advice on which algorithm to train with, from the predictions of the cost model.

The advice: average gradients exactly where the network keeps up. Where it does not, send eight bits: `ByteGrad()`
with one rank on each node, `GradientAllReduce(Hierarchical(Quantized()))` with several, which share a link. Both
need about as many steps as exact averaging. Where the network limits each flow (TCP connection), more flows may
gain more than fewer bytes. Algorithms that average weights may be faster still, and those that do not average
them in every step the fastest of all, but they may need more steps to the same loss. That number is not known
here, so the report says how many they may need.

The advice for a sharded model: let PyTorch communicate, or send exactly, where the network keeps up. Where it
does not, send gradients in eight bits, then parameters as well, in two levels with several ranks on each node. If
the model fits the memory of a node, shards inside nodes, and replicas between them, send least.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from ..algorithms import Algorithm, AsyncModelAverage, ByteGrad
from ..algorithms.by_node import ByNode
from ..algorithms.combinators import After, Every
from ..averages import Exact
from .costmodel import METHODS, SHARDED, Advice, Cluster, Job, Rates, Sharded, ShardedAdvice, predict
from .costmodel.inputs import MOST_FLOWS

A = TypeVar("A", Advice, ShardedAdvice)

MOST_FAITHFUL = (
    "exact",
    "hierarchical",
    "float16",
    "bytegrad",
    "hierarchical-bytes",
    "hierarchical-all-bytes",
    "error-feedback",
)
"""Averages of gradients in eight bits or more, the one with the smallest error first."""

IN_FOUR_BITS = "int4", "hierarchical-int4"
"""Averages of gradients in four bits, without error feedback."""

AS_FAST = 1.02
"""Steps whose times differ by less than this ratio count as equally fast: the model is not more precise."""


def best_of_gradients(rows: Iterable[Advice]) -> Advice:
    """The average of gradients with the smallest error among the fastest ones.

    QAdam is left out, since it is an optimizer as well; its step is about as long as that of its average.
    """
    return _first_of_the_fastest([row for row in rows if row.name in MOST_FAITHFUL], MOST_FAITHFUL)


class Best(NamedTuple):
    """The algorithms to choose from; None for those that are not faster than simpler ones."""

    gradients: Advice
    """See `best_of_gradients`."""
    in_four_bits: Advice | None
    """The average of gradients in four bits, beside those in more."""
    weights: Advice | None
    """The fastest average of weights in every step, beside averages of gradients."""
    now_and_then: Advice | None
    """The fastest average of weights in some of the steps, beside averages in every step."""


def best(rows: Sequence[Advice]) -> Best:
    """Choose the algorithms to advise."""

    def fastest(among: Iterable[Advice], slower: Advice) -> Advice | None:
        limit_s = slower.prediction.step_s / AS_FAST
        faster = (row for row in among if row.prediction.step_s < limit_s)
        return min(faster, key=lambda row: row.prediction.step_s, default=None)

    gradients = best_of_gradients(rows)
    weights = fastest((row for row in rows if kind_of(row.method) == 1), gradients)
    return Best(
        gradients,
        fastest((row for row in rows if row.name in IN_FOUR_BITS), gradients),
        weights,
        fastest((row for row in rows if kind_of(row.method) == 2), weights or gradients),
    )


def steps_of_an_exchange(row: Advice, rows: Iterable[Advice]) -> float:
    """The number of steps in which `row` exchanges everything once.

    Asynchronous averages exchange as often as the network allows: what exact averaging sends in a step takes them
    so many steps.
    """
    if not isinstance(row.method, AsyncModelAverage):
        steps = row.method.n if isinstance(row.method, Every) else getattr(row.method, "local_steps", 1)
        return float(steps)
    exact = next((each.prediction.wire_bytes for each in rows if each.name == "exact"), 0.0)
    return max(1.0, exact / row.prediction.wire_bytes) if row.prediction.wire_bytes else 1.0


def kind_of(method: object) -> int:
    """The group of an algorithm in the report: 0 gradients, 1 weights in every step, 2 weights now and then."""
    if payload(method) == "gradients":
        return 0
    now_and_then = isinstance(method, (Every, AsyncModelAverage)) or hasattr(method, "local_steps")
    return 2 if now_and_then else 1


def payload(method: object) -> str:
    """The payload of an algorithm: "gradients", averaged in every step, or "weights"."""
    return "weights" if getattr(method, "payload", "grad") == "weight" else "gradients"


def expression(value: object) -> str:
    """The Python expression of an algorithm, an average or a codec, without defaults.

    >>> from bagua_comm.algorithms import from_name
    >>> expression(from_name("hierarchical-bytes")), expression(from_name("bytegrad"))
    ('GradientAllReduce(Hierarchical(Quantized()))', 'ByteGrad()')
    """
    if value == ByteGrad():
        return "ByteGrad()"
    if not dataclasses.is_dataclass(value):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    made_by = {Every: "every", ByNode: "by_node", After: "after"}
    arguments: list[str] = []
    skipped = False
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if not field.init or given == default:
            skipped = True
        else:
            by_name = skipped or field.kw_only
            arguments.append(f"{field.name}={expression(given)}" if by_name else expression(given))
    return f"{made_by.get(type(value), type(value).__name__)}({', '.join(arguments)})"


def best_of_shards(rows: Iterable[ShardedAdvice]) -> ShardedAdvice:
    """The way with the smallest error among the fastest ones with shards over all ranks."""
    return _first_of_the_fastest([row for row in rows if not row.method.by_node], SHARDED)


def best_of_replicas(rows: Sequence[ShardedAdvice]) -> ShardedAdvice | None:
    """The same with shards inside nodes; None if none is faster than shards over all ranks."""
    limit_s = best_of_shards(rows).prediction.step_s / AS_FAST
    found = [row for row in rows if row.method.by_node and row.prediction.step_s < limit_s]
    return _first_of_the_fastest(found, SHARDED) if found else None


def _first_of_the_fastest(rows: Sequence[A], names: Iterable[str]) -> A:
    """The first one, in the order of these names, that is as fast as the fastest."""
    fastest_s = min(row.prediction.step_s for row in rows)
    known = {row.name: row for row in rows if row.prediction.step_s <= AS_FAST * fastest_s}
    return next(known[name] for name in names if name in known)


def attachment(method: Sharded, cluster: Cluster, local_steps: Algorithm | None = None) -> list[str]:
    """The lines of Python that shard a model in this way; with local steps, between the replicas.

    >>> attachment(SHARDED["both"], Cluster(4))
    ['fully_shard(model)', 'bagua_torch.fsdp.attach(model, Quantized(), Quantized())']
    """
    lines = ["fully_shard(model)"]
    if method.by_node:
        device = "cuda" if cluster.transport == "nccl" else "cpu"
        shape = f"({cluster.nodes}, {cluster.ranks_per_node})"
        lines = [
            f'mesh = init_device_mesh("{device}", {shape}, mesh_dim_names=("replicas", "shards"))',
            "fully_shard(model, mesh=mesh)",
        ]
    if method.reduce is None:
        return lines
    arguments = ["model", expression(method.reduce)]
    arguments += [] if method.gather in (None, Exact()) else [expression(method.gather)]
    replicas = local_steps or method.replicas
    arguments += [] if replicas is None else [f"replicas={expression(replicas)}"]
    arguments += [] if local_steps is None else ["optimizers=optimizer"]
    return [*lines, f"bagua_torch.fsdp.attach({', '.join(arguments)})"]


def enough_flows(job: Job, cluster: Cluster, rates: Rates) -> int:
    """The smallest number of flows between two ranks with which exact averaging is as fast as with more."""

    def step_s(flows: int) -> float:
        return predict(METHODS["exact"], job, dataclasses.replace(cluster, flows=flows), rates).step_s

    whole = math.ceil(cluster.bandwidth_gbit / cluster.flow_bandwidth_gbit)
    most = max(cluster.flows, min(whole, MOST_FLOWS))
    limit_s = AS_FAST * step_s(most)
    return bisect.bisect_left(range(1, most), True, key=lambda flows: step_s(flows) <= limit_s) + 1
