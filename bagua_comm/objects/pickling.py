"""Base classes of objects that belong to one process and cannot be pickled."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex, TypeVar

from ..errors import UnsupportedError

S = TypeVar("S", bound="Shared")


class Live:
    """Base of objects with threads, connections or memory: they can be neither pickled nor copied."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__}: cannot be pickled or copied, since it belongs to this process; leave it "
            "out, and make another one"
        )


class Shared:
    """Base of objects that cannot be pickled, and that a copy of their holder shares."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(
            f"{self!r}: cannot be pickled, since it belongs to this process. If a module holds it, save "
            "module.state_dict() instead of the module, or remove the attribute first; another process gets one "
            "from connect()"
        )

    def __copy__(self: S) -> S:
        return self

    def __deepcopy__(self: S, memo: object) -> S:
        return self
