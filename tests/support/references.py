"""A small training problem, and the weights that each algorithm should reach on it.

The references simulate all ranks at once, as a list of arrays, in NumPy: `xs[r]` are the flat weights of
rank r's bucket. Given the first weights of the ranks and `gradient(x, rank, step)`, they yield for each step
the weights at which the ranks take their gradients. The optimizer is x <- x - LR * g.
"""

import pickle
from functools import cache, partial
from itertools import count, islice

import numpy as np

from bagua_comm import (
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    Engine,
    Exact,
    GradientAllReduce,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    Plan,
    Point,
    QAdam,
    SparseLoCo,
    TensorSpec,
    optim,
)
from bagua_comm.algorithms.base import runs_in_rounds
from bagua_comm.algorithms.combinators import After, Every
from bagua_comm.arrays import dtype_named
from bagua_comm.testing import run_ranks, sample
from bagua_comm.topology import one_peer_exponential, shift_one

SHAPES = {"a": (7, 3), "b": (600,), "c": (), "d": (2, 3, 4), "e": (5,)}
LR = 0.5
STEPS = 8


# ---------------------------------------------------------------------------------------------------
# References
# ---------------------------------------------------------------------------------------------------


def sgd(xs, gradient, step):
    return [x - LR * gradient(x, rank, step) for rank, x in enumerate(xs)]


def mean(xs):
    return sum(xs) / len(xs)


def decoded(codec, chunks):
    """`chunks`, (n, m), after encoding and decoding."""
    return codec.decode(codec.encode(chunks), np.empty_like(chunks))


def decoded_delta(codec, delta):
    """What others see of `delta`, (m,). Its padding, which does not differ, stays zero."""
    return np.where(delta == 0, np.zeros_like(delta), decoded(codec, delta[None])[0])


def quantized_mean(xs, codec):
    """The mean in one chunk for each rank: coded on the way to its owner, and coded again on the way back."""
    if len(xs) == 1:
        return xs[0]
    chunks = mean([decoded(codec, x.reshape(len(xs), -1)) for x in xs])
    return decoded(codec, chunks).reshape(-1)


def gradient_allreduce(xs, gradient, average=mean):
    for t in count():
        yield xs
        g = average([gradient(x, r, t) for r, x in enumerate(xs)])
        xs = [x - LR * g for x in xs]


def decentralized(xs, gradient, peers, interval=1):
    p = len(xs)
    for t in count():
        yield xs
        s, averaged = t // interval, xs
        if t % interval == 0 and peers == "all":
            averaged = [mean(xs)] * p
        elif t % interval == 0 and peers == "shift_one":
            averaged = [(x + xs[shift_one(r, p, s)]) / 2 for r, x in enumerate(xs)]
        elif t % interval == 0:
            averaged = [(x + xs[one_peer_exponential(r, p, s).source]) / 2 for r, x in enumerate(xs)]
        xs = [averaged[r] - LR * gradient(x, r, t) for r, x in enumerate(xs)]


def low_precision_decentralized(xs, gradient, codec, interval=1):
    p = len(xs)
    weight, left, right = xs, [xs[r - 1] for r in range(p)], [xs[(r + 1) % p] for r in range(p)]
    for t in count():
        yield xs
        xs = sgd(xs, gradient, t)
        if t % interval == 0:
            delta = [xs[r] + left[r] / 3 + right[r] / 3 - (5 / 3) * weight[r] for r in range(p)]
            c = [decoded_delta(codec, d) for d in delta]
            left = [left[r] + c[r - 1] for r in range(p)]
            right = [right[r] + c[(r + 1) % p] for r in range(p)]
            xs = weight = [weight[r] + c[r] for r in range(p)]


def low_precision_one_peer(xs, gradient, codec):
    p = len(xs)
    tau = (p - 1).bit_length()
    sent = [list(xs) for _ in range(tau)]  # [k][r], as the destination of rank r knows it
    received = [[xs[(r - 2**k) % p] for r in range(p)] for k in range(tau)]
    for t in count():
        yield xs
        xs = sgd(xs, gradient, t)
        if p > 1:
            k = t % tau
            c = [decoded_delta(codec, xs[r] - sent[k][r]) for r in range(p)]
            sent[k] = [sent[k][r] + c[r] for r in range(p)]
            received[k] = [received[k][r] + c[(r - 2**k) % p] for r in range(p)]
            xs = [xs[r] + (received[k][r] - sent[k][r]) / 2 for r in range(p)]


def qadam(xs, gradient, average, settings):
    (b1, b2), wd, x, m, v = settings.betas, settings.weight_decay, xs[0], 0, 0
    for t in count(1):
        yield [x] * len(xs)
        gs = [gradient(x, r, t - 1) for r in range(len(xs))]
        if t <= settings.warmup_steps:
            g = mean(gs) + wd * x
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
        else:
            m = average([b1 * m + (1 - b1) * g for g in gs]) + (1 - b1) * wd * x
        deviation = np.sqrt(v) / (1 - b2 ** min(t, settings.warmup_steps)) ** 0.5
        x = x - settings.lr / (1 - b1**t) * m / (deviation + settings.eps)


def diloco(xs, gradient, local_steps, outer_lr, outer_momentum, average=mean):
    anchor, u = xs[0], 0
    for t in count():
        yield xs
        xs = sgd(xs, gradient, t)
        if (t + 1) % local_steps == 0:
            delta = average([anchor - x for x in xs])
            u = outer_momentum * u + delta
            anchor = anchor - outer_lr * (delta + outer_momentum * u)
            xs = [anchor] * len(xs)


def largest(e, chunk, keep, bits=32):
    """`e`, (m,), with the largest elements of each chunk, coded if `bits` is 2, and zeros elsewhere."""
    chosen = []
    for first in range(0, len(e), chunk):
        part = np.abs(e[first : first + chunk]).tolist()
        order = sorted(range(len(part)), key=lambda i: (-part[i], i))[:keep]
        chosen += [first + i for i in sorted(order)]
    values, out = e[chosen].astype("f8"), np.zeros_like(e)
    if bits == 2 and chosen:
        apart = values - values.mean()
        width = 6 * np.sqrt((apart**2).sum() / max(1, len(values) - 1)) / 4
        codes = np.clip(np.rint(apart / width + 2), 0, 3) if width else np.full(len(values), 2.0)
        values = np.array([values[codes == code].mean() for code in codes])
    out[chosen] = values.astype("f4")
    return out


def sparse_loco(xs, gradient, local_steps, chunk, keep, bits, decay, outer_lr=1.0):
    anchor, padding = xs[0], xs[0] == 0
    es = [np.zeros_like(anchor) for _ in xs]
    for t in count():
        yield xs
        xs = sgd(xs, gradient, t)
        if (t + 1) % local_steps == 0:
            es = [anchor - x + e * e.dtype.type(decay) for x, e in zip(xs, es, strict=True)]
            sent = [largest(e, chunk, keep, bits) if len(xs) > 1 else e for e in es]
            es = [np.where(padding, 0, e - s) for e, s in zip(es, sent, strict=True)]
            anchor = anchor - outer_lr * np.where(padding, 0, mean(sent))
            xs = [anchor] * len(xs)


def async_model_average(xs, gradient):
    """A round begins at each step, and is applied to the weights after the next step's optimizer."""
    snapshots = None
    for t in count():
        yield xs
        xs = sgd(xs, gradient, t)
        if snapshots is not None:
            xs = [x + mean(snapshots) - s for x, s in zip(xs, snapshots, strict=True)]
        snapshots = xs


def switched(xs, gradient, steps, first, then, averaged=False):
    """`first` for `steps` steps, then `then` from its weights or their mean, with steps counted from 0."""
    trajectory = first(xs, gradient)
    yield from islice(trajectory, steps)
    xs = next(trajectory)
    xs = [mean(xs)] * len(xs) if averaged else xs
    yield from then(xs, lambda x, rank, step: gradient(x, rank, step + steps))


# ---------------------------------------------------------------------------------------------------
# The problem
# ---------------------------------------------------------------------------------------------------


def make_plan(ranks, dtype="float32", bucket_elements=30):
    """A plan of two buckets: a and b; c, d and e."""
    specs = [TensorSpec(name, shape, dtype) for name, shape in SHAPES.items()]
    nbytes = bucket_elements * dtype_named(dtype).itemsize
    return Plan.pack(specs, bucket_bytes=nbytes, alignment=8 * ranks)


def split(spec, flat):
    """Views of the tensors in the flat array of a bucket, by name."""
    ends = np.cumsum([tensor.size for tensor in spec.tensors])
    return {t.name: flat[end - t.size : end] for t, end in zip(spec.tensors, ends, strict=True)}


def by_name(plan, flats):
    """Views of all tensors, by name."""
    parts = [split(spec, flat) for spec, flat in zip(plan.buckets, flats, strict=True)]
    return {name: x for part in parts for name, x in part.items()}


def start(spec, rank):
    """Weights that differ between ranks."""
    flat = np.zeros(spec.size, dtype_named(spec.dtype))
    for name, x in split(spec, flat).items():
        x[...] = sample(rank, x.shape, spec.dtype, seed=ord(name))
    return flat


def common_start(spec, rank):
    return start(spec, 0)


def start_of(algorithm):
    """Weights that differ between ranks, unless the algorithm needs equal ones."""
    return common_start if algorithm.phase(0).equal_start else start


@cache
def target(spec, rank, step):
    """The minimum of the loss: it differs between ranks, and a little between steps."""
    flat = np.zeros(spec.size)
    for name, x in split(spec, flat).items():
        x[...] = 1 / (1 + rank) + 0.3 * sample(rank, x.shape, "float64", seed=1000 * step + ord(name))
    return flat


def gradient(spec, flat, rank, step):
    return (0.3 * (flat.astype(np.float64) - target(spec, rank, step))).astype(flat.dtype)


class Trainer:
    """One rank of the training: an engine between a gradient and an optimizer of flat arrays."""

    def __init__(self, comm, algorithm, plan, *, start=None, lr=LR):
        self.comm, self.plan, self.lr = comm, plan, lr
        start = start or start_of(algorithm)
        self.weights = [start(spec, comm.rank) for spec in plan.buckets]
        self.grads = plan.allocate()
        self.engine = Engine(comm, algorithm, plan, {"weight": self.weights, "grad": self.grads})

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.engine.close()

    def run(self, steps):
        return [self.step() for _ in range(steps)]

    def step(self):
        """One training step; returns the weights, by name, at which the gradient was taken."""
        self.engine.at(Point.FORWARD)
        before = self.tensors()
        for spec, x, g in zip(self.plan.buckets, self.weights, self.grads, strict=True):
            g[...] = gradient(spec, x, self.comm.rank, self.engine.step)
            for tensor in spec.tensors:
                self.engine.ready(tensor.name)
        self.engine.at(Point.BACKWARD)
        self.update()
        self.engine.at(Point.STEP)
        return before

    def update(self):
        """The optimizer."""
        for x, g in zip(self.weights, self.grads, strict=True):
            x -= (self.lr * g).astype(x.dtype)

    def tensors(self):
        """Copies of the weights, by name."""
        return {name: x.copy() for name, x in by_name(self.plan, self.weights).items()}

    def load_tensors(self, values):
        for name, x in by_name(self.plan, self.weights).items():
            x[...] = values[name]

    def replan(self, plan, algorithm=None):
        old = self.tensors()
        moved = self.engine.replan(plan, algorithm=algorithm)
        moved = moved if isinstance(moved, dict) else {self.engine.payload: moved}
        self.plan, self.grads = plan, moved.get("grad") or plan.allocate()
        self.weights = moved.get("weight") or plan.allocate()
        if "weight" not in moved:
            self.load_tensors(old)

    def state_dict(self):
        engine = self.engine.state_dict()  # before the weights are copied
        return {"engine": engine, "weights": self.tensors()}

    def load_state_dict(self, saved):
        self.load_tensors(saved["weights"])
        self.engine.load_state_dict(saved["engine"])  # writes nothing to the weights


class AdamTrainer(Trainer):
    """A trainer with the optimizer of the algorithm QAdam."""

    optimizer = optim.QAdam(lr=0.05, warmup_steps=4, betas=(0.8, 0.9), weight_decay=0.1)

    def __init__(self, comm, algorithm, plan, *, start=common_start):
        super().__init__(comm, algorithm, plan, start=start)
        self.moments = [self.optimizer.init(x) for x in self.weights]

    def update(self):
        for i, state in enumerate(self.engine.states):
            self.optimizer.step(self.weights[i], self.grads[i], self.moments[i], state.momentum)

    def replan(self, plan):
        steps, old = self.moments[0].step, by_name(self.plan, [state.variance for state in self.moments])
        super().replan(plan)
        self.moments = [self.optimizer.init(x) for x in self.weights]
        for name, variance in by_name(plan, [state.variance for state in self.moments]).items():
            variance[...] = old[name]
        for state in self.moments:
            state.step = steps

    def state_dict(self):
        return {**super().state_dict(), "moments": self.moments}

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.moments = saved["moments"]


class FittingTrainer(Trainer):
    """A trainer with the optimizer that the algorithm of each step needs: SGD, or QAdam's."""

    optimizer = optim.QAdam(lr=0.05, warmup_steps=2)

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.fitted = self.moments = None

    def update(self):
        phase = self.engine.phase
        self.engine.flush()  # so that rounds begin and end in the same steps each time
        if self.engine.phase != self.fitted:
            self.fitted, self.moments = self.engine.phase, [self.optimizer.init(x) for x in self.weights]
        if not phase.lends:
            super().update()
            return
        parts = zip(self.weights, self.grads, self.moments, self.engine.states, strict=True)
        for x, g, moments, state in parts:
            self.optimizer.step(x, g, moments, phase.lent(state))


class AsyncTrainer(Trainer):
    """A trainer that waits for the current round before each STEP, so that its trajectory is deterministic."""

    stops = ()
    """Steps after which it stops and resumes."""

    def update(self):
        super().update()
        self.engine.flush()

    def step(self):
        before = super().step()
        if self.engine.step in self.stops:
            self.engine.stop()
            self.engine.resume()
        return before


def trajectories(ranks, algorithm, *, dtype="float32", replans=None, nodes=None, trainer=Trainer, **settings):
    """The weights of all ranks in every step: [rank][step][name].

    `replans` maps a step to a number of elements: after this step, buckets of this size are made.
    """

    def body(comm):
        with trainer(comm, algorithm, make_plan(ranks, dtype), **settings) as training:
            trajectory = []
            for step in range(STEPS):
                if step in (replans or {}):
                    training.replan(make_plan(ranks, dtype, replans[step]))
                trajectory.append(training.step())
            return trajectory

    return run_ranks(ranks, body, nodes=nodes)


def assert_follows(actual, reference, *, ranks, dtype="float32", wide="float64", start=start, atol=1e-5):
    """Compare trajectories, [rank][step][name] or a dict by rank, with the reference's.

    The training ran in `dtype`; the reference computes in `wide`.
    """
    actual = actual if isinstance(actual, dict) else dict(enumerate(actual))
    steps = len(next(iter(actual.values())))
    for spec in make_plan(ranks, dtype).buckets:
        names, size = [tensor.name for tensor in spec.tensors], sum(tensor.size for tensor in spec.tensors)
        xs = [start(spec, rank).astype(wide) for rank in range(ranks)]
        found = [
            [np.concatenate([trajectory[step][name] for name in names]) for trajectory in actual.values()]
            for step in range(steps)
        ]
        expected = [
            np.stack([weights[rank][:size] for rank in actual])
            for weights in islice(reference(xs, partial(gradient, spec)), steps)
        ]
        what = f"[step, rank of {[*actual]}, element], {names}, {ranks} ranks"
        found = np.array(found).astype(wide)
        np.testing.assert_allclose(found, np.stack(expected), rtol=0, atol=atol, err_msg=what)


def bits(trajectory):
    """A trajectory, [step][name], to be compared bit for bit."""
    return [{name: x.tobytes() for name, x in step.items()} for step in trajectory]


def assert_restarts(ranks, algorithm, *, at, nodes=None, trainer=Trainer, **settings):
    """Saved after the steps `at`, training continues bit for bit, in new engines or set back in one engine."""
    through = trajectories(ranks, algorithm, nodes=nodes, trainer=trainer, **settings)

    def body(comm):
        trajectory, saved = [], []
        for steps in np.diff([0, *at, STEPS]):
            with trainer(comm, algorithm, make_plan(ranks), **settings) as training:
                if saved:
                    training.load_state_dict(pickle.loads(saved[-1]))
                trajectory += training.run(steps)
                saved.append(pickle.dumps(training.state_dict()))
                if len(saved) > len(at):
                    training.load_state_dict(pickle.loads(saved[0]))
                    back = training.run(STEPS - at[0])
        return trajectory, back

    for rank, (trajectory, back) in enumerate(run_ranks(ranks, body, nodes=nodes)):
        assert bits(trajectory) == bits(through[rank]), f"rank {rank} of {ranks}"
        assert bits(back) == bits(through[rank][at[0] :]), f"rank {rank} of {ranks}, set back"


# ---------------------------------------------------------------------------------------------------
# Which reference an algorithm has
# ---------------------------------------------------------------------------------------------------


def equations(algorithm, interval=1):
    """The reference of an algorithm, with its settings; `interval`: that of `every` around it."""
    match algorithm:
        case Decentralized():
            return partial(decentralized, peers=algorithm.peers, interval=interval)
        case LowPrecisionDecentralized():
            return partial(low_precision_decentralized, codec=algorithm.codec, interval=interval)
        case LowPrecisionOnePeer():
            return partial(low_precision_one_peer, codec=algorithm.codec)
        case GradientAllReduce():
            return partial(gradient_allreduce, average=mean_of(algorithm.average))
        case QAdam():
            return partial(qadam, average=mean_of(algorithm.average), settings=AdamTrainer.optimizer)
        case DiLoCo(local_steps, outer_lr, outer_momentum, average):
            settings = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "average": mean_of(average)}
            return partial(diloco, local_steps=local_steps, **settings)
        case SparseLoCo():
            names = ("local_steps", "chunk", "keep", "bits", "decay", "outer_lr")
            return partial(sparse_loco, **{name: getattr(algorithm, name) for name in names})
        case AsyncModelAverage(warmup_steps=0):
            return async_model_average
        case AsyncModelAverage(warmup_steps=steps):
            return partial(switched, steps=steps, first=gradient_allreduce, then=async_model_average)
        case Every(n, inner):
            return equations(inner, n)
        case After(steps, first, then):
            averaged = then.phase(0).equal_start and not first.phase(0).equal_start
            return partial(switched, steps=steps, first=equations(first), then=equations(then), averaged=averaged)


def mean_of(average):
    return mean if average == Exact() else partial(quantized_mean, codec=average.codec)


def follows(algorithm):
    """The arguments of `assert_follows` for an algorithm; one that rounds is computed in float32."""
    rounds = any(word in repr(algorithm) for word in ("codec", "SparseLoCo"))
    start, wide = start_of(algorithm), "float32" if rounds else "float64"
    return {"reference": equations(algorithm), "start": start, "wide": wide}


def trainer_of(algorithm):
    """The trainer whose steps are those of its equations."""
    return AsyncTrainer if runs_in_rounds(algorithm) else AdamTrainer if isinstance(algorithm, QAdam) else Trainer
