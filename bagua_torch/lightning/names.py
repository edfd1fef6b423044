"""The strategies by name, in Lightning's registries.

    Trainer(strategy="bagua")              GradientAllReduce(), as PyTorch's own wrapper
    Fabric(strategy="bagua_bytegrad")      ByteGrad()

After "bagua_" comes any name of `bagua_comm.algorithms.NAMED` that needs no settings, with underscores. `import
bagua_torch` registers the names, before or after Lightning is imported; it does not import Lightning.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

from bagua_comm import ArrayError
from bagua_comm.algorithms import NAMED, from_name

from .fabric import BaguaFabricStrategy
from .packages import FABRICS, TRAINERS
from .trainer import BaguaStrategy

REGISTRIES: dict[str, tuple[str, Callable[..., object], str]] = {
    **{f"{home}.strategies": ("StrategyRegistry", BaguaStrategy, package) for package, home in TRAINERS.items()},
    **{
        f"{home}.strategies": ("STRATEGY_REGISTRY", BaguaFabricStrategy, package)
        for package, home in FABRICS.items()
    },
}
"""Lightning's modules with a registry: its name, our strategy for it, and the distribution."""


def register_names() -> None:
    """Register the strategies with Lightning if it is imported, else as soon as it is."""
    for name in REGISTRIES.keys() & sys.modules.keys():
        _register(sys.modules[name])
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register(module: ModuleType) -> None:
    attribute, strategy, package = REGISTRIES[module.__name__]
    registry: Any = getattr(module, attribute, None)
    if registry is None or "bagua" in registry:
        return
    for name in ("", *NAMED):
        try:
            algorithm = from_name(name) if name else None
        except ArrayError:
            continue  # it needs settings, as `every` does
        found = f"bagua_{name}".replace("-", "_").rstrip("_")
        make = partial(strategy, algorithm, package=package)
        registry.register(found, make, description=f"bagua_torch: {algorithm or 'exact averages'}")


class _AfterImport:
    """A finder of modules that registers the strategies after a module with a registry has been imported.

    It asks the other finders, of which one may ask this one again, as a finder of another library does.
    """

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders return for one of `REGISTRIES`; otherwise None."""
        if name not in REGISTRIES or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name
        try:
            spec = self._spec_of_others(name, path, target)
        finally:
            self._asking.name = None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if module.__name__ in REGISTRIES:  # a loader of a zip file loads all modules in it
                    _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec

    def _spec_of_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """The first spec that another finder returns."""
        for finder in tuple(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            found = find_spec(name, path, target) if finder is not self and find_spec is not None else None
            if found is not None:
                return cast(ModuleSpec, found)
        return None
