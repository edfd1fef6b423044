"""A sampler that gives all ranks samples of about equal length in each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Array
from ..comm import Communicator
from ..errors import ArrayError, shown
from .sampler import SampleOrder, Sampler, as_lengths, even_sizes, serpentine

CHUNKS = (960, 240, 48, 24)
"""Default chunks, in batches: the first with at least `LEAST_CHUNKS` chunks an epoch, else the last."""

LEAST_CHUNKS = 20


class BalancedSampler(Sampler):
    """Batches of about equally long samples, so that no rank waits long for another and little is padded.

    With `batch_size`, samples are sorted by length, cut into chunks of `chunk` batches, and the chunks are
    shuffled. A step takes the next p batches, and deals their samples to the p ranks in serpentine order. So
    all ranks have about the same work in each step, and samples of one batch are about equally long. Only a
    step across two chunks has samples of two lengths, and therefore more padding; there is none if `chunk` is a
    multiple of p. The chunk does not depend on p by default, so that another number of ranks can resume within
    an epoch.

    With `max_tokens`, samples are packed, the longest first, while samples x longest <= max_tokens. All batches
    cost about the same for any number of ranks, and they are shuffled.

    Source: shuffled chunks of sorted samples, as in Bagua's load-balancing sampler.

    Args:
        lengths: The cost of each sample, (samples,): a length or a time; see `measure`.
        batch_size: Samples of a batch of one rank.
        max_tokens: Instead of `batch_size`: the largest number of samples times the longest of them.
        comm: The ranks; if None, those of `bagua_comm.default()`, also after they have changed.
        size: Number of ranks, instead of `comm`.
        rank: This rank, with `size`.
        seed: Seed of the orders.
        noise: Lengths are sorted after U(0, noise x (longest - shortest)) is added, so that epochs batch
            different samples together; 0 to 1.
        chunk: Batches of a chunk; None: 960, 240, 48 or 24, by the number of batches.
        shuffle: False: no noise, and the longest samples first.
        drop_last: Leave out samples that do not fill a batch on every rank, chosen at random.

    Raises:
        ArrayError: An argument has a wrong value, or a sample alone is longer than `max_tokens`.

    >>> lengths = [5, 1, 4, 2, 3, 6, 8, 7]
    >>> [list(BalancedSampler(lengths, batch_size=2, size=2, rank=r, chunk=2, shuffle=False)) for r in range(2)]
    [[[6, 0], [2, 1]], [[7, 5], [4, 3]]]
    """

    def __init__(
        self,
        lengths: Sequence[float] | Array,
        *,
        batch_size: int | None = None,
        max_tokens: float | None = None,
        comm: Communicator | None = None,
        size: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        noise: float = 0.0,
        chunk: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        name = "BalancedSampler"
        super().__init__(
            comm=comm, size=size, rank=rank, seed=seed, shuffle=shuffle, drop_last=drop_last, name=name
        )
        self.lengths = as_lengths(name, lengths)
        if (batch_size is None) == (max_tokens is None):
            raise ArrayError(f"{name}: give either batch_size or max_tokens; got {batch_size} and {max_tokens}")
        if not (isinstance(noise, (int, float)) and 0 <= noise <= 1):
            raise ArrayError(f"{name}: noise is {shown(noise)}, expected a number from 0 to 1")
        self.noise = noise
        self.batch_size = None if batch_size is None else self._whole("batch_size", batch_size, 1)
        self.max_tokens = max_tokens
        if max_tokens is not None:
            if chunk is not None:
                raise ArrayError(f"{name}: chunk is for batch_size; batches of max_tokens all cost the same")
            if not (isinstance(max_tokens, (int, float)) and 0 < max_tokens < float("inf")):
                raise ArrayError(f"{name}: max_tokens is {shown(max_tokens)}, expected a positive number")
            longest = int(np.argmax(self.lengths)) if len(self.lengths) else None
            if longest is not None and self.lengths[longest] > max_tokens:
                raise ArrayError(
                    f"{name}: lengths[{longest}] is {self.lengths[longest]:g}, more than "
                    f"max_tokens={max_tokens:g}: raise max_tokens, or cut or leave out such samples"
                )
        self.chunk = self._default_chunk() if chunk is None else self._whole("chunk", chunk, 1)

    def _default_chunk(self) -> int:
        batches = len(self.lengths) / (self.batch_size or 1)
        return next((chunk for chunk in CHUNKS if batches >= LEAST_CHUNKS * chunk), CHUNKS[-1])

    def _samples(self) -> int:
        return len(self.lengths)

    def _deal(self, batches: list[Array]) -> list[Array]:
        if self.max_tokens is None:
            samples = np.concatenate(batches)
            return serpentine(samples[np.argsort(-self.lengths[samples], kind="stable")], self.size)
        while len(batches) < self.size:  # parts of batches stay within the budget
            most = max(range(len(batches)), key=lambda b: (len(batches[b]) > 1, self.lengths[batches[b]].sum()))
            batches += serpentine(batches.pop(most), 2)
        return batches

    def imbalance(self) -> float:
        """The sum over the epoch's steps of the largest rank's length, divided by the ranks' mean; 1 is ideal."""
        order = self.order
        costs = np.array(
            [
                [self.lengths[batch].sum() for batch in self._dealt(order, step * self.size)]
                for step in range(self._count(0))
            ]
        )
        return float(costs.max(axis=1).sum() / costs.mean(axis=1).sum()) if costs.any() else 1.0

    def _make(self, rng: np.random.Generator) -> SampleOrder:
        """Sort, then cut or pack."""
        keys = -self.lengths
        tried = np.arange(len(keys))
        if self.shuffle and len(keys):
            tried = rng.permutation(len(keys))  # equally long samples in any order
            keys = keys - self.noise * np.ptp(keys) * rng.random(len(keys))
        if self.drop_last and self.batch_size is not None:
            tried = tried[: len(tried) - len(tried) % self.batch_size]
        tried = tried[np.argsort(keys[tried], kind="stable")]
        return self._cut(tried, rng) if self.batch_size is not None else self._pack(tried, rng)

    def _cut(self, ranked: Array, rng: np.random.Generator) -> SampleOrder:
        """Chunks of equally many batches in random order; last, random samples that do not fill one."""
        assert self.batch_size is not None
        width = self.batch_size * self.chunk
        chunks, rest = divmod(len(ranked), width)
        cut = int(rng.integers(chunks + 1)) * width if self.shuffle else len(ranked) - rest
        last = ranked[cut : cut + rest]
        whole = np.delete(ranked, slice(cut, cut + rest)).reshape(chunks, width)
        if self.shuffle:
            whole = whole[rng.permutation(chunks)]
            whole = np.where(rng.integers(2, size=(chunks, 1)), whole, whole[:, ::-1])  # up or down
        sizes = even_sizes(len(ranked), self.batch_size, drop_last=False)
        return SampleOrder.of(np.concatenate([whole.reshape(-1), last]), sizes)

    def _pack(self, ranked: Array, rng: np.random.Generator) -> SampleOrder:
        """Batches within the budget, in random order; last, that of the remaining samples."""
        assert self.max_tokens is not None
        lengths = self.lengths[ranked]
        stops = []
        start = 0
        while start < len(ranked):
            # Noise may put a longer sample later, so the longest so far counts.
            room = max(1, int(self.max_tokens // max(lengths[start], self.max_tokens / len(ranked))))
            longest = np.maximum.accumulate(lengths[start : start + room])
            fits = longest * np.arange(1, len(longest) + 1) <= self.max_tokens
            start += len(fits) if fits.all() else max(1, int(np.argmin(fits)))
            stops.append(start)
        batches = np.split(ranked, stops[:-1]) if stops else []
        if self.shuffle and batches:
            batches = [*(batches[i] for i in rng.permutation(len(batches) - 1)), batches[-1]]
        indices = np.concatenate(batches) if batches else ranked
        return SampleOrder.of(indices, np.array([len(batch) for batch in batches], np.int64))
