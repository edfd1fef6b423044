"""A network plugin for NCCL that divides messages among many TCP flows.

`plugin.c` is the plugin. `build` compiles it once into the user's cache; NCCL loads it if NCCL_NET_PLUGIN is
its `path`, and NCCL_NET=`NAME` makes a failure to load it an error. `check` sends data through it without NCCL.
NCCL uses it between hosts; inside a host it uses shared memory.
"""

from .binding import Plugin, PluginError, counters
from .building import NAME, build, path, source_hash
from .checking import Checked, check

__all__ = ["NAME", "Checked", "Plugin", "PluginError", "build", "check", "counters", "path", "source_hash"]
