"""Predicted times of training steps: a model of latency, bandwidth and work, for every algorithm and average.

    message of m bytes over a link    latency + m / (share of the line rate that is reached)
    line rate of a link               its bandwidth, limited by the flows that leave the node at once
    work on an array of m bytes       m / rate
    bucket                            its messages and its work one after the other; a message also costs work
    step                              buckets one after the other on a lane, beside as much computation as the
                                      window of the algorithm allows

A rank has `cores_per_rank` cores. Computation uses all of them while it runs alone. A busy lane takes up to one
core, and at most half of them, from computation. So a step is never shorter than all its work divided by the
cores. With infinitely many cores, as for training on a GPU, computation and lane do not slow each other down.

The model leaves out chance: all ranks are equally fast, and none waits for a slow one. Bytes are those that each
rank sends in a training step after warm-up, as `Communicator.counters` counts them.

inputs        cluster, job, rates, and the prediction
costs         the exchange of a bucket
prediction    a step
comparison    all algorithms
sharding      a step of a sharded model, and all ways in which it may communicate

Source: messages as in the alpha-beta model of Hockney, "The communication challenge for MPP" (1994), and Thakur
et al., "Optimization of Collective Communication Operations in MPICH" (2005); comparing algorithms under network
conditions as in Bagua (Gan et al., arXiv 2107.01499).
"""

from .comparison import METHODS, Advice, advise
from .inputs import Cluster, CodecRates, Job, Method, Prediction, Rates, TorchDDP
from .prediction import predict
from .sharding import SHARDED, Sharded, ShardedAdvice, advise_sharded, predict_sharded

__all__ = [
    "METHODS",
    "SHARDED",
    "Advice",
    "Cluster",
    "CodecRates",
    "Job",
    "Method",
    "Prediction",
    "Rates",
    "Sharded",
    "ShardedAdvice",
    "TorchDDP",
    "advise",
    "advise_sharded",
    "predict",
    "predict_sharded",
]
