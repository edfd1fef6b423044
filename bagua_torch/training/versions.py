"""Detection of optimizers that step within a backward pass, before gradients are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn


class WeightVersions:
    """Compares the versions of parameters at the end of a backward pass with those at its beginning.

    Reading a version takes 0.1 us. All versions are read only if a parameter has a hook that might step it;
    otherwise one of each bucket, since an optimizer within the pass steps most parameters.

    Args:
        parameters: The parameters, by name. They have the hooks of the wrapper.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._hooks = [parameter._post_accumulate_grad_hooks or {} for parameter in parameters.values()]
        self._own = len(self._hooks)
        self._before: dict[str, int] = {}

    def begin(self, buckets: Sequence[Sequence[str]]) -> None:
        """Record versions at the beginning of a pass; `buckets` has the names of each bucket."""
        hooked = sum(map(len, self._hooks)) != self._own
        names = self._parameters if hooked else [names[0] for names in buckets]
        self._before = {name: self._parameters[name]._version for name in names}

    def changed(self) -> str | None:
        """The name of a parameter changed since `begin`, or None."""
        before, self._before = self._before, {}
        for name, version in before.items():
            if self._parameters[name]._version != version:
                return name
        return None
