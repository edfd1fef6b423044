"""The communicator that `connect` makes, and the default communicator of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm import Communicator
from ..errors import BootstrapError, shown_as
from ..live import writer as live
from ..transports import Transport
from .rank_exit import ExitHandler


@shown_as("Communicator")
class World(Communicator):
    """The communicator that `connect` makes. It is the default communicator until it is closed."""

    def __init__(
        self, transports: Sequence[Transport], *, exit_handler: ExitHandler | None, **settings: Any
    ) -> None:
        super().__init__(transports, **settings)
        self._exit_handler = exit_handler
        if exit_handler is not None:
            exit_handler.add(self)

    def shrink(self) -> Communicator:
        """See `Communicator.shrink`. The result replaces this communicator as the default."""
        survivors = super().shrink()
        if self._exit_handler is not None:
            self._exit_handler.discard(self)
        if _default.world is self:
            _default.world = survivors
        return survivors

    def _survivors(self, transports: Sequence[Transport], **settings: Any) -> Communicator:
        return World(transports, exit_handler=self._exit_handler, **settings)

    def close(self) -> None:
        """Free the resources of this communicator. Collective."""
        if self.guard.closed or not self.guard.is_of_this_process:
            return
        if _default.world is self:
            _default.world = None
            live.leave(self.flight)
        if self._exit_handler is not None:
            self._exit_handler.leave(self)
        super().close()


@dataclass
class _Default:
    """The default communicator of this process."""

    world: Communicator | None = None
    """The communicator that `connect` made last, unless it is closed."""
    implicit: Communicator | None = None
    """The communicator that `default_or` made, if it made one."""


_default = _Default()


def set_default(world: Communicator) -> None:
    """Make `world` the default communicator of this process."""
    _default.world = world


def current() -> Communicator | None:
    """Return the communicator that `connect` made last; None if it is closed, or there is none."""
    return _default.world


def default_or(connect: Callable[[], Communicator]) -> Communicator:
    """Return the default communicator; without one, `connect()`, which a later `connect` may replace.

    Collective, if it connects.
    """
    if _default.world is not None:
        return _default.world
    _default.implicit = connect()
    return _default.implicit


def refuse_a_second_world() -> None:
    """Raise `BootstrapError` if the communicator that `connect` made last is open."""
    world = _default.world
    if world is not None and world is not _default.implicit and world.guard.is_of_this_process:
        raise BootstrapError(
            "connect: this process is connected already. bagua_comm.default() returns the communicator, and its "
            "dup() makes another one of the same ranks; close() it, or leave its `with` block, to connect anew. "
            "connect(comm=mpi4py.MPI.COMM_WORLD) makes another world with other settings"
        )
