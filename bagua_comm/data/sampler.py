"""Samplers: the batches of samples of each rank.

    BalancedSampler(lengths, batch_size=32)    ranks get equally long samples at the same time
    BalancedSampler(lengths, max_tokens=4096)  as many samples as fit a budget, all batches equally full
    PlainSampler(len(dataset), batch_size=32)  a random permutation

An epoch is one global list of batches, which does not depend on the number of ranks p. Step s takes batches s p
to s p + p - 1, and deals them, or their samples, to the ranks. If fewer than p batches are left, their samples
are dealt into p smaller ones, so that all ranks make the same number of steps and no sample is lost. Only if
fewer than p samples are left, some are repeated.
"""

from __future__ import annotations

import operator
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from ..arrays import Array
from ..bootstrap import current, default
from ..comm import Communicator
from ..errors import ArrayError, shown

T = TypeVar("T")


class SampleOrder(NamedTuple):
    """The batches of an epoch, in order."""

    indices: Array
    """(samples,): batch b is indices[offsets[b] : offsets[b + 1]]."""
    offsets: Array
    """(batches + 1,)"""

    @classmethod
    def of(cls, indices: Array, sizes: Array) -> SampleOrder:
        """Batches of these sizes, one after another."""
        return cls(indices, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self.offsets) - 1

    def samples(self, start: int, stop: int) -> Array:
        """The samples of batches `start` up to `stop`."""
        found: Array = self.indices[self.offsets[start] : self.offsets[stop]]
        return found


class Sampler(ABC):
    """Lists of indices, one for each batch of this rank: a `batch_sampler` for PyTorch's DataLoader.

    An iteration yields the batches of the epoch, or, after `load_state_dict`, the remaining ones. The next one
    yields the epoch again unless `set_epoch` was called. An iteration begins when its first batch is requested: a
    DataLoader with workers makes two iterators, and uses one of them.
    """

    def __init__(
        self,
        *,
        size: int | None,
        rank: int | None,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        name: str,
        comm: Communicator | None = None,
    ) -> None:
        self._name = name
        if comm is not None:
            if size is not None or rank is not None:
                raise ArrayError(
                    f"{name}: comm is given, and size is {size} and rank is {rank}; give comm, or size and rank"
                )
            if not isinstance(comm, Communicator):
                raise ArrayError(f"{name}: comm is {shown(comm)}, expected a Communicator")
            size, rank = comm.size, comm.rank
        if (size is None) != (rank is None):
            raise ArrayError(f"{name}: size is {size} and rank is {rank}; give both, or neither")
        if size is not None and rank is not None:
            size, rank = self._whole("size", size, 1), self._whole("rank", rank, 0)
            if rank >= size:
                raise ArrayError(f"{name}: rank is {rank}, expected 0 <= rank < {size}")
        self._place = None if size is None or rank is None else (size, rank)
        self._follows = self._place is None
        self.seed = self._whole("seed", seed, 0)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.epoch = 0
        self._made: tuple[int, int, SampleOrder] | None = None
        self._next_start = 0  # the global batch at which the next iteration begins
        self._start = 0  # of the latest iteration
        self._taken = 0  # steps that it has yielded
        self._counted: int | None = None  # steps that `counted` has yielded; None without `counted`

    def _whole(self, what: str, value: object, least: int) -> int:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            number = least - 1
        if number < least:
            raise ArrayError(f"{self._name}: {what} is {shown(value)}, expected a whole number from {least} on")
        return number

    @property
    def size(self) -> int:
        """Number of ranks, as given; else that of `bagua_comm.default()`, also after a change of ranks."""
        return self._size_and_rank()[0]

    @property
    def rank(self) -> int:
        """This rank."""
        return self._size_and_rank()[1]

    def _size_and_rank(self) -> tuple[int, int]:
        """As given; else of the open communicator, or of the last one."""
        if self._follows and (comm := current()) is not None:
            self._place = comm.size, comm.rank
        elif self._place is None:
            comm = default()
            self._place = comm.size, comm.rank
        return self._place

    # The order --------------------------------------------------------------------------------------

    @abstractmethod
    def _make(self, rng: np.random.Generator) -> SampleOrder:
        """The batches of an epoch, from its random numbers."""

    @property
    def order(self) -> SampleOrder:
        """The batches of this epoch for all ranks, the same for any number of ranks."""
        return self._order_of(self.seed, self.epoch)

    def _order_of(self, seed: int, epoch: int) -> SampleOrder:
        if self._made is None or self._made[:2] != (seed, epoch):
            self._made = seed, epoch, self._make(np.random.default_rng([seed, epoch]))
        return self._made[2]

    def _steps(self, start: int) -> tuple[int, int]:
        """The number of steps with p whole batches, from global batch `start` on, and of remaining batches."""
        return divmod(self.order.batches - start, self.size)

    def _count(self, start: int) -> int:
        full, rest = self._steps(start)
        return full + (rest > 0 and not self.drop_last)

    def __len__(self) -> int:
        """The number of batches of the next iteration; the same on every rank."""
        return self._count(self._next_start)

    def __iter__(self) -> Iterator[list[int]]:
        start, order = self._next_start, self.order
        self._start, self._next_start, self._taken, self._counted = start, 0, 0, None
        for step in range(self._count(start)):
            batch = self._dealt(order, start + step * self.size)[self.rank]
            # The position belongs to this iteration: a concurrent one has its own.
            self._start, self._taken = start, step + 1
            yield batch.tolist()

    def counted(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over a loader with this sampler, and count the batches that it yields.

        Workers of a DataLoader take batches from the sampler in advance. In this iteration `state_dict()`
        counts only batches that the loop has received:

            for batch in sampler.counted(loader): ...; state = sampler.state_dict()

        Args:
            loader: A DataLoader with this sampler as its `batch_sampler`.
        """
        batches = iter(loader)
        self._counted = 0
        for step, batch in enumerate(batches, 1):
            self._counted = step
            yield batch

    def _dealt(self, order: SampleOrder, first: int) -> list[Array]:
        """The batch of each rank in the step that begins at global batch `first`."""
        last = min(first + self.size, order.batches)
        if last - first < self.size:
            rest = order.samples(first, last)
            if len(rest) < self.size:
                return list(np.resize(rest, self.size)[:, None])
        return self._deal([order.samples(batch, batch + 1) for batch in range(first, last)])

    def _deal(self, batches: list[Array]) -> list[Array]:
        """Deal the samples of at most p batches into one batch for each rank."""
        return batches if len(batches) == self.size else serpentine(np.concatenate(batches), self.size)

    # Counts -----------------------------------------------------------------------------------------

    @property
    def padding(self) -> int:
        """The number of repeated samples in the epoch, over all ranks: fewer than p; none with drop_last."""
        full, rest = self._steps(0)
        if self.drop_last or not rest:
            return 0
        return max(0, self.size - len(self.order.samples(full * self.size, self.order.batches)))

    @property
    def dropped(self) -> int:
        """The number of samples that the epoch leaves out, over all ranks: 0 unless drop_last."""
        order = self.order
        full, _ = self._steps(0)
        left = len(order.indices) - int(order.offsets[full * self.size]) if self.drop_last else 0
        return self._samples() - len(order.indices) + left

    @abstractmethod
    def _samples(self) -> int:
        """The number of samples of the data set."""

    # State ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Start another epoch, with its own order; does nothing for the current epoch."""
        epoch = self._whole("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch = epoch
            self._next_start = self._start = self._taken = 0
            self._counted = None

    def state_dict(self, steps: int | None = None) -> dict[str, int]:
        """The position in the epoch; the same on all ranks after the same number of steps.

        Args:
            steps: The number of batches of this iteration on which this rank has trained. None means all that
                were yielded. A DataLoader with workers takes batches in advance: iterate over it by `counted`
                there, or count yourself, by `enumerate(loader, 1)`, and pass the number.

        Returns:
            `epoch`, `seed`, `consumed` (samples of the epoch taken by all ranks together), and `order`, a
            checksum.

        Raises:
            ArrayError: `steps` exceeds the number of yielded batches.
        """
        handed_out = self._taken if self._counted is None else self._counted
        taken = handed_out if steps is None else self._whole("steps", steps, 0)
        if taken > self._taken:
            raise ArrayError(
                f"{self._name}: steps is {taken}, but only {self._taken} batches were yielded since this "
                "iteration began; count from there, also after a resume within an epoch, or use counted(loader)"
            )
        order = self.order
        begun = self._start + (taken * self.size if taken else 0)  # a new one needs no communicator for its size
        batches = min(begun, order.batches)
        if self._taken == 0 and self._next_start:
            batches = self._next_start  # loaded, and not begun
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "consumed": int(order.offsets[batches]),
            "order": checksum(order),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from `state`: the next iteration yields the remaining samples, on any number of ranks.

        Raises:
            ArrayError: The state is damaged, or of another data set or other batches; the sampler is unchanged.
        """
        name = self._name
        missing = {"epoch", "seed", "consumed", "order"} - set(state)
        if missing:
            raise ArrayError(f"{name}: the state has no {sorted(missing)}; expected the result of state_dict()")
        epoch, seed = self._whole("epoch", state["epoch"], 0), self._whole("seed", state["seed"], 0)
        order = self._order_of(seed, epoch)
        if state["order"] != checksum(order):
            raise ArrayError(
                f"{name}: the state is of another order of samples; lengths, batch_size, max_tokens, noise, "
                "chunk, shuffle and drop_last must be as they were (and NumPy's random numbers, too)"
            )
        consumed = self._whole("consumed", state["consumed"], 0)
        batch = int(np.searchsorted(order.offsets, consumed))
        if batch > order.batches or order.offsets[batch] != consumed:
            raise ArrayError(f"{name}: consumed is {consumed}, where no batch of the epoch ends")
        self.epoch, self.seed = epoch, seed
        self._next_start, self._start, self._taken, self._counted = batch, batch, 0, None


def checksum(order: SampleOrder) -> int:
    """A checksum of the batches of an epoch."""
    return zlib.crc32(order.offsets.astype("<i8").tobytes(), zlib.crc32(order.indices.astype("<i8").tobytes()))


def serpentine(values: Array, hands: int) -> list[Array]:
    """Deal sorted values into `hands` parts in serpentine order, so that their sums are about equal.

    >>> [part.tolist() for part in serpentine(np.arange(7), 3)]
    [[0, 5, 6], [1, 4], [2, 3]]
    """
    rounds = -(-len(values) // hands)
    places = np.full(rounds * hands, -1, np.int64)
    places[: len(values)] = np.arange(len(values))
    table = places.reshape(rounds, hands)
    table[1::2] = table[1::2, ::-1]
    return [values[column[column >= 0]] for column in table.T]


class PlainSampler(Sampler):
    """A random permutation in batches, or with shuffle=False all samples in order.

    Args:
        samples: The number of samples of the data set.
        batch_size: Samples of a batch of one rank.
        comm: The ranks; if None, those of `bagua_comm.default()`, also after they have changed.
        size: Number of ranks, instead of `comm`.
        rank: This rank, with `size`.
        seed: Seed of the permutations.
        shuffle: Whether to permute.
        drop_last: Leave out samples that do not fill a batch on every rank.

    Raises:
        ArrayError: An argument has a wrong value.

    >>> [list(PlainSampler(5, batch_size=2, size=2, rank=r, shuffle=False)) for r in range(2)]
    [[[0, 1], [4]], [[2, 3], [4]]]
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        comm: Communicator | None = None,
        size: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            comm=comm,
            size=size,
            rank=rank,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            name="PlainSampler",
        )
        self.samples = self._whole("samples", samples, 0)
        self.batch_size = self._whole("batch_size", batch_size, 1)

    def _samples(self) -> int:
        return self.samples

    def _make(self, rng: np.random.Generator) -> SampleOrder:
        indices = rng.permutation(self.samples) if self.shuffle else np.arange(self.samples)
        sizes = even_sizes(self.samples, self.batch_size, drop_last=self.drop_last)
        return SampleOrder.of(indices[: sizes.sum()], sizes)


def even_sizes(samples: int, batch_size: int, *, drop_last: bool) -> Array:
    """The sizes of batches; the last one may be smaller, or is left out."""
    full, rest = divmod(samples, batch_size)
    return np.array([batch_size] * full + [rest] * (rest > 0 and not drop_last), np.int64)


def as_lengths(name: str, lengths: Sequence[float] | Array) -> Array:
    """Lengths as float64.

    Raises:
        ArrayError: They are not a row of finite, nonnegative numbers.
    """
    try:
        found = np.asarray(lengths, np.float64)
    except (TypeError, ValueError) as exc:
        raise ArrayError(f"{name}: lengths are not numbers: {exc}") from exc
    if found.ndim != 1:
        raise ArrayError(f"{name}: lengths have shape {found.shape}, expected one number for each sample")
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        raise ArrayError(f"{name}: lengths[{wrong[0]}] is {found[wrong[0]]}, expected a finite number from 0 on")
    return found
