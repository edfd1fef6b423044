"""Algorithms as users write them: with the four members that an algorithm must have, and few others."""

from dataclasses import dataclass, field

import numpy as np

from bagua_comm import Algorithm, Point, Rounds, Window


@dataclass(frozen=True)
class Plain(Algorithm):
    """The mean of the gradients, with nothing that could be left out."""

    payload = "grad"
    window = Window(Point.GRADIENT, Point.BACKWARD)

    def init(self, bucket, comm):
        return None

    def exchange(self, bucket, comm, state):
        comm.allreduce(bucket.flat, out=bucket.flat, op="avg")


@dataclass
class Unhashable(Algorithm):
    """A dataclass that is not frozen, and so has no hash."""

    factors: list = field(default_factory=lambda: [1.0])

    payload, window = Plain.payload, Plain.window
    init, exchange = Plain.init, Plain.exchange

    def begin(self, bucket, state):
        for factor in self.factors:
            bucket.flat[...] *= factor


@dataclass
class Kept:
    average: np.ndarray = field(metadata={"transient": True})
    round: int = 0


@dataclass(frozen=True)
class RandomPeer(Algorithm):
    """The mean of the weights of two ranks that are drawn anew in every round."""

    seed: int = 0

    payload = "weight"
    window = Window(Point.FORWARD, Point.BACKWARD)

    def init(self, bucket, comm):
        return Kept(bucket.flat.copy())

    def exchange(self, bucket, comm, state):
        order = np.random.default_rng([self.seed, state.round]).permutation(comm.size)
        place = int(np.flatnonzero(order == comm.rank)[0])
        state.average[...] = bucket.flat
        if (place ^ 1) < comm.size:
            peer = int(order[place ^ 1])
            comm.sendrecv(bucket.flat, state.average, dest=peer, source=peer)
            state.average += bucket.flat
            state.average /= 2
        state.round += 1

    def commit(self, bucket, state):
        bucket.flat[...] = state.average


@dataclass(frozen=True)
class Beside(Algorithm):
    """The mean of the weights in rounds beside training."""

    payload = "weight"
    window = Rounds(0.0)

    def init(self, bucket, comm):
        return Kept(bucket.flat.copy())

    def begin(self, bucket, state):
        state.average[...] = bucket.flat

    def exchange(self, bucket, comm, state):
        comm.allreduce(state.average, out=state.average, op="avg")

    def commit(self, bucket, state):
        bucket.flat[...] = state.average


@dataclass(frozen=True)
class Half(Algorithm):
    """Has `phase` but not `phases`: the mean of the gradients, and from step 2 on half of it."""

    factor: float = 1.0

    payload = "grad"
    window = Window(Point.GRADIENT, Point.BACKWARD)

    def phase(self, step):
        return Half(0.5) if step >= 2 else self

    def init(self, bucket, comm):
        return None

    def exchange(self, bucket, comm, state):
        comm.allreduce(bucket.flat, out=bucket.flat, op="avg")
        bucket.flat[...] *= self.factor


OWN_ALGORITHMS = [Plain(), Unhashable(), RandomPeer(), Beside(), Half()]
