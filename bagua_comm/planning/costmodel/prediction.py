"""The prediction of a step: its exchanges beside computation, as the window of the algorithm allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ...algorithms import Point, Rounds, StreamingDiLoCo, Window
from ...algorithms.base import check_size
from ...algorithms.by_node import ByNode
from ...algorithms.combinators import Every
from .costs import BucketExchange, Costs, bytes_sent, exchange_of
from .inputs import Cluster, Job, Method, Prediction, Rates, TorchDDP


def predict(method: Method, job: Job, cluster: Cluster, rates: Rates | None = None) -> Prediction:
    """Predict the step time and bytes of training `job` on `cluster` with an algorithm, after its warm-up.

    Raises:
        ArrayError: The algorithm does not support this number of ranks.
        UnsupportedError: The model does not know the exchange of the algorithm or its average, or the algorithm
            does not support the dtype of the job.

    >>> from bagua_comm.algorithms import from_name
    >>> job, cluster = Job(100_000_000, 0.1, 0.2), Cluster(nodes=4, bandwidth_gbit=1)
    >>> exact, bytegrad = (predict(from_name(name), job, cluster) for name in ("exact", "bytegrad"))
    >>> round(exact.wire_bytes), round(exact.step_s / bytegrad.step_s, 1)
    (150000000, 2.6)
    """
    check_fit(method, job, cluster)
    return _predict(method, job, Costs(cluster, rates or Rates(), job.dtype))


def _predict(method: Method, job: Job, costs: Costs) -> Prediction:
    if isinstance(method, TorchDDP):
        job = dataclasses.replace(job, bucket_bytes=method.bucket_bytes)
    else:
        method = method.phases[-1]
    if isinstance(method, Every):
        return _mean_over(method.n, _predict(method.algorithm, job, costs))
    exchanges = _exchanges(method, job, costs)
    window = method.window
    if isinstance(window, Rounds):
        return _predict_rounds(window.interval_s, job, exchanges, costs)
    if isinstance(method, StreamingDiLoCo):
        return _predict_fragments(method, job, costs)
    prediction = _predict_window(window, job, exchanges, costs)
    return _mean_over(getattr(method, "local_steps", 1), prediction)


def _exchanges(method: Method, job: Job, costs: Costs) -> list[BucketExchange]:
    """The exchange of each bucket; none on a single rank."""
    return [exchange_of(method, n, costs) for n, _ in job.buckets()] if costs.cluster.size > 1 else []


def _predict_fragments(method: StreamingDiLoCo, job: Job, costs: Costs) -> Prediction:
    """Predict the step of an algorithm whose fragments are exchanged in turn, each beside some further steps.

    Where a function chooses the fragments, each bucket is counted as one.
    """
    count = len(job.buckets()) if callable(method.fragments) else method.fragments
    job = dataclasses.replace(job, bucket_bytes=max(1, min(job.bucket_bytes, -(-job.model_bytes // count))))
    exchanges = _exchanges(method, job, costs)
    size = max(1, -(-len(exchanges) // count))
    fragments = [exchanges[first : first + size] for first in range(0, len(exchanges), size)]
    steps = [_predict_window(method.window, job, fragment, costs) for fragment in fragments]
    busy_s = sum(step.communication_s for step in steps)
    # One lane sends all fragments in turn, also those whose windows overlap.
    exposed_s = max(sum(step.exposed_s for step in steps), busy_s - method.local_steps * job.compute_s)
    together = Prediction(job.compute_s + exposed_s, job.compute_s, busy_s, *_bytes_sent(exchanges))
    return _mean_over(method.local_steps, together)


def check_fit(method: Method, job: Job, cluster: Cluster) -> None:
    """Raise unless the algorithm supports the dtype, the number of ranks and the number of nodes.

    Raises:
        ArrayError: It does not support this number of ranks or nodes.
        UnsupportedError: It does not support the dtype of the job.
    """
    if not isinstance(method, TorchDDP):
        method.check(job.dtype)
        check_size(method, cluster.size)
        for phase in method.phases:
            if isinstance(phase, ByNode) and cluster.nodes > 1:
                check_size(phase.algorithm, cluster.nodes)


def _predict_window(window: Window, job: Job, exchanges: list[BucketExchange], costs: Costs) -> Prediction:
    """Predict the step of an algorithm whose `window` opens in it."""
    backward_begins, backward_ends = job.forward_s, job.forward_s + job.backward_s
    at = {
        Point.FORWARD: 0.0,
        Point.GRADIENT: backward_begins,
        Point.BACKWARD: backward_ends,
        Point.STEP: job.compute_s,
    }
    beside_s = at[window.closes] - at[window.opens]
    if beside_s < 0:  # it closes in the next step
        beside_s += job.compute_s
    beside_s += window.delay * job.compute_s
    by_gradient = window.opens is Point.GRADIENT
    ready = [share * job.backward_s if by_gradient else 0.0 for _, share in job.buckets()]
    overlapped_s, busy_s = costs.overlap(beside_s, list(zip(ready, (e.lane for e in exchanges), strict=False)))
    trainer_s = sum(costs.time_alone(exchange.trainer) for exchange in exchanges)
    step_s = job.compute_s - beside_s + overlapped_s + trainer_s
    return Prediction(step_s, job.compute_s, busy_s, *_bytes_sent(exchanges))


def _predict_rounds(interval_s: float, job: Job, exchanges: list[BucketExchange], costs: Costs) -> Prediction:
    """Predict the step of an algorithm whose rounds of exchanges run beside training, which never waits.

    A round begins at the end of a step, at least `interval_s` after the previous round began. Computation loses
    the cores that the round uses.
    """
    if not exchanges:
        return Prediction(job.compute_s, job.compute_s, 0.0, 0.0, 0.0)
    tasks = [costs.time_beside_compute(task) for exchange in exchanges for task in exchange.lane]
    round_s = sum(spent for spent, _ in tasks)
    lost_s = sum(spent * (1 - speed) for spent, speed in tasks)
    lost_s += sum(costs.time_alone(exchange.trainer) for exchange in exchanges)
    # The n steps from round to round take n compute_s + lost_s, and at least as long as the round.
    steps = max(1.0, (max(interval_s, round_s) - lost_s) / job.compute_s) if job.compute_s else 1.0
    in_every = Prediction(job.compute_s + lost_s, job.compute_s, round_s, *_bytes_sent(exchanges))
    return _mean_over(steps, in_every)


def _bytes_sent(exchanges: Iterable[BucketExchange]) -> tuple[float, float]:
    """Bytes that a rank sends, and bytes that a node sends."""
    return bytes_sent([task for exchange in exchanges for task in exchange.lane])


def _mean_over(n: float, step: Prediction) -> Prediction:
    """The mean over `n` steps, of which only `step` communicates."""
    return Prediction(
        step.compute_s + step.exposed_s / n,
        step.compute_s,
        step.communication_s / n,
        step.wire_bytes / n,
        step.node_bytes / n,
    )
