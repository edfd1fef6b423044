"""What works in one process alone, and so cannot be pickled."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex, TypeVar

from .errors import UnsupportedError

S = TypeVar("S", bound="Shared")


class Live:
    """Base of objects with threads, connections or memory of their own: they are neither pickled nor copied."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__}: cannot be pickled or copied, as it works in this process alone; leave "
            "it out, and make another one"
        )


class Shared:
    """Base of objects that are not pickled either, but that copies of what holds them share."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(
            f"{self!r}: cannot be pickled, as it works in this process alone. If a module holds it, save "
            "module.state_dict() in the place of the module, or take the attribute away before; another process "
            "gets one from connect()"
        )

    def __copy__(self: S) -> S:
        return self

    def __deepcopy__(self: S, memo: Any) -> S:
        return self
