"""Buffers that are the same on all ranks after each step, such as the statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import torch

from bagua_comm import CommMismatch, Communicator

from ..tensors.broadcast import broadcast_values
from ..tensors.model_state import ModelState
from .stage import StepOptions


def _shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items()}


class SharedBuffers:
    """Copies the buffers of one rank to the others after each backward pass.

    A backward pass needs the buffers as its forward pass left them, and another pass through the same graph may
    follow. So `fetch_if`, which is collective, receives values without changing buffers. `write`, which is local,
    writes them after the pass, and `restore` undoes this for another pass. Version counters stay the same, since
    no graph sees the other values.

    Args:
        comm: The ranks.
        model: The parameters and buffers that all ranks share, as when the module was wrapped.
        options: They say whether buffers are copied.
    """

    def __init__(self, comm: Communicator, model: ModelState, options: StepOptions) -> None:
        self._comm, self._model, self._options = comm, model, options
        self._at_first = _shapes_of(model.buffers())
        self._shapes: list[torch.Size] = []
        self._layout = torch.tensor(0)
        self.due = False
        """Whether there was a training forward pass since the last copy, so that buffers may differ."""
        self._fetched: list[_Fetched] = []
        self._own: list[tuple[_Fetched, torch.Tensor]] = []
        """The buffers that were written, and their values before."""

    def fetch_if(self, due: bool, root: int) -> None:
        """At the end of a backward pass, get the values of `root`'s buffers, if copied and due. Collective."""
        if self._options.copies_buffers and due and self._comm.size > 1:
            self._fetch(self._model.buffers(of_step=True), root)

    def copy(self) -> None:
        """Copy the buffers of rank 0 to all ranks, if `copies_buffers`. Collective."""
        if self._options.copies_buffers:
            self._fetch(self._model.buffers(), root=0)
            self.write()

    def _fetch(self, buffers: Mapping[str, torch.Tensor], root: int) -> None:
        """Receive the values of `root`'s buffers. Collective.

        Raises:
            CommMismatch: The ranks' buffers differ in their shapes or dtypes.
        """
        mine, self.due = list(buffers.values()), False
        if not mine or self._comm.size == 1:
            return
        shapes = [tensor.shape for tensor in mine]
        if shapes != self._shapes:
            self._shapes, self._layout = shapes, torch.tensor(crc32(repr(shapes).encode()))
        # A checksum of the shapes is sent along, since other shapes may have the same number of elements. It is
        # omitted for CUDA buffers, where comparing it would make the host wait.
        numbers = [] if mine[0].is_cuda else [self._layout]
        try:
            theirs = list(broadcast_values(self._comm, [*mine, *numbers], root=root))
            if numbers and not torch.equal(theirs.pop(), self._layout):
                raise CommMismatch(f"rank {self._comm.rank} and rank {root} have buffers of other shapes")
        except CommMismatch as exc:
            raise CommMismatch(f"{exc}; {self._changes(_shapes_of(buffers))}") from exc
        pairs = zip(mine, theirs, strict=True)
        self._fetched = [_Fetched(buffer, value) for buffer, value in pairs if value is not buffer]
        self._own = []

    def _changes(self, now: dict[str, str]) -> str:
        """Text about the first buffer whose shape or dtype has changed since the module was wrapped."""
        before, rule = self._at_first, "buffers must have the same shapes and dtypes on all ranks"
        for name in {**before, **now}:
            was, is_now = before.get(name, "none"), now.get(name, "none")
            if was != is_now:
                return f"{rule}, but here {name!r} is {is_now}, and was {was} when the module was wrapped"
        return f"{rule}; those of this rank are as they were when the module was wrapped"

    def write(self) -> None:
        """Write the received values, except to buffers that have changed since."""
        if self._fetched:
            fetched, self._fetched = [each for each in self._fetched if each.fresh], []
            self._own = [(each, each.buffer.detach().clone()) for each in fetched]
            for each in fetched:
                each.buffer.data.copy_(each.value)

    def restore(self) -> None:
        """Restore the values before `write`, until the next `write`."""
        if self._own:
            own, self._own = [(each, value) for each, value in self._own if each.fresh], []
            self._fetched = [each for each, _ in own]
            for each, value in own:
                each.buffer.data.copy_(value)

    def keep(self) -> None:
        """Write, and drop the values before: no more passes through graphs of this step follow."""
        self.write()
        self._own = []


class _Fetched:
    """A buffer and the value to write to it."""

    def __init__(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        self.buffer, self.value = buffer, value
        self._version = buffer._version

    @property
    def fresh(self) -> bool:
        """Whether the buffer has not changed since the value was received."""
        return self.buffer._version == self._version
