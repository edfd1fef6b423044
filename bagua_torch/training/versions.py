"""Whether something steps parameters within a backward pass, before their gradients are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn


class WeightVersions:
    """Compares the versions of parameters at the end of a backward pass with those at its beginning.

    To read a version takes a tenth of a microsecond. So all are read only if a parameter has a hook that might
    step it; else one of each bucket is, since whatever steps within the pass steps most parameters.

    Args:
        parameters: The parameters, by name. The hooks of the wrapper itself are on them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._hooks = [parameter._post_accumulate_grad_hooks or {} for parameter in parameters.values()]
        self._own = len(self._hooks)
        self._before: dict[str, int] = {}

    def begin(self, buckets: Sequence[Sequence[str]]) -> None:
        """A backward pass begins; `buckets` has the parameters of each bucket."""
        hooked = sum(map(len, self._hooks)) != self._own
        names = self._parameters if hooked else [names[0] for names in buckets]
        self._before = {name: self._parameters[name]._version for name in names}

    def changed(self) -> str | None:
        """The name of a parameter that was changed since then, if one was."""
        before, self._before = self._before, {}
        for name, version in before.items():
            if self._parameters[name]._version != version:
                return name
        return None
