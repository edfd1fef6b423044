"""Former module paths: importing one raises an error that names the new path.

The modules themselves are gone. This table goes in the release after next.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

MOVED: Mapping[str, str] = MappingProxyType(
    {
        "bagua_comm.agreement": "bagua_comm.comm.agreement",
        "bagua_comm.algorithms.checkpoints": "bagua_comm.algorithms.state",
        "bagua_comm.call": "bagua_comm.comm.call",
        "bagua_comm.changes": "bagua_comm.engine",
        "bagua_comm.collectives": "bagua_comm.averages",
        "bagua_comm.commands.agent": "bagua_comm.launch.remote_shell",
        "bagua_comm.commands.base": "bagua_comm.launch.cli",
        "bagua_comm.commands.hosts": "bagua_comm.launch.hosts",
        "bagua_comm.commands.job_folder": "bagua_comm.launch.job_folder",
        "bagua_comm.commands.links": "bagua_comm.launch.measure_links",
        "bagua_comm.commands.mpirun": "bagua_comm.launch.mpirun",
        "bagua_comm.commands.supervise": "bagua_comm.launch.supervisor",
        "bagua_comm.commands.verdict": "bagua_comm.launch.verdict",
        "bagua_comm.commands.write": "bagua_comm.launch.job_scripts",
        "bagua_comm.costmodel": "bagua_comm.planning.costmodel",
        "bagua_comm.elastic.committing": "bagua_comm.elastic.snapshot.commit",
        "bagua_comm.elastic.copies": "bagua_comm.elastic.snapshot.snapshots",
        "bagua_comm.elastic.members": "bagua_comm.elastic.roles",
        "bagua_comm.elastic.origin": "bagua_comm.elastic.mpi.parent",
        "bagua_comm.elastic.parts": "bagua_comm.elastic.snapshot.parts",
        "bagua_comm.elastic.recruits": "bagua_comm.elastic.mpi.spawn",
        "bagua_comm.elastic.restoring": "bagua_comm.elastic.snapshot.restore",
        "bagua_comm.elastic.sealing": "bagua_comm.elastic.mpi.sealing",
        "bagua_comm.elastic.slots": "bagua_comm.elastic.snapshot.slot",
        "bagua_comm.elastic.unsealing": "bagua_comm.elastic.mpi.unsealing",
        "bagua_comm.gpu_facts": "bagua_comm.bootstrap.gpu",
        "bagua_comm.job": "bagua_comm.bootstrap.job",
        "bagua_comm.kernels.loops": "bagua_comm.kernels.numba",
        "bagua_comm.kernels.making": "bagua_comm.kernels.numba.background",
        "bagua_comm.launchers": "bagua_comm.bootstrap.launchers",
        "bagua_comm.links": "bagua_comm.bootstrap.tcp_links",
        "bagua_comm.objects": "bagua_comm.comm.packets",
        "bagua_comm.pace": "bagua_comm.engine.schedule",
        "bagua_comm.roll": "bagua_comm.bootstrap.rendezvous",
        "bagua_comm.transports.mpi.blocking": "bagua_comm.transports.mpi.time_limit",
        "bagua_comm.transports.mpi.channel": "bagua_comm.elastic.mpi.channel",
        "bagua_comm.transports.mpi.crew": "bagua_comm.elastic.mpi.processes",
        "bagua_comm.transports.mpi.memory": "bagua_comm.transports.mpi.peer_memory",
        "bagua_comm.transports.mpi.table": "bagua_comm.transports.mpi.small_messages",
        "bagua_comm.transports.mpi.turns": "bagua_comm.transports.mpi.paced_messages",
        "bagua_comm.transports.mpi.window": "bagua_comm.transports.mpi.shared_window",
        "bagua_comm.tuner": "bagua_comm.planning.tuner",
        "bagua_comm.turn": "bagua_comm.comm.guard",
        "bagua_torch.backward": "bagua_torch.training.backward",
        "bagua_torch.buffers": "bagua_torch.training.buffers",
        "bagua_torch.contents": "bagua_torch.model_state",
        "bagua_torch.drawing": "bagua_torch.rng",
        "bagua_torch.elementwise": "bagua_torch.fused.elementwise",
        "bagua_torch.join": "bagua_torch.training.join",
        "bagua_torch.layer_sync": "bagua_torch.lightning.layer_sync",
        "bagua_torch.optimizers": "bagua_torch.training.optimizers",
        "bagua_torch.process_group.board": "bagua_torch.process_group.store",
        "bagua_torch.stage": "bagua_torch.training.stage",
        "bagua_torch.steps": "bagua_torch.training.steps",
        "bagua_torch.unfreezing": "bagua_torch.training.unfreezing",
        "bagua_torch.unused": "bagua_torch.training.unused",
        "bagua_torch.versions": "bagua_torch.training.versions",
    }
)
"""New paths by former paths. A module that was split has the package of its parts."""

PICKLED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "bagua_comm.reproducible": ("bagua_comm.averages.reproducible", "Reproducible"),
        "bagua_torch.wrapping": ("bagua_torch.training.hooks", "WeakCall"),
    }
)
"""New paths of former ones that pickles name, such as files of `torch.save(module)`, and the one class in them.

Such a path can be imported, since a pickle is loaded by an import; it has nothing but that class.
"""


class MovedModules(MetaPathFinder, Loader):
    """The last finder of `sys.meta_path`: refuses former paths. Imports that succeed never reach it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Raise `ModuleNotFoundError` if the module has moved."""
        if fullname in MOVED:
            # Without `name`: `from bagua_comm import call` would replace an error of that name by its own.
            raise ModuleNotFoundError(f"{fullname} is now {MOVED[fullname]}")
        return ModuleSpec(fullname, self) if fullname in PICKLED else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module of `PICKLED`."""
        path, name = PICKLED[module.__name__]
        setattr(module, name, getattr(importlib.import_module(path), name))

        def refuse(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            raise ModuleNotFoundError(f"{module.__name__} is now {path}")

        module.__getattr__ = refuse  # type: ignore[method-assign]


def install() -> None:
    """Append the finder to `sys.meta_path`, unless it is there."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
