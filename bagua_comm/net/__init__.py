"""A network plugin for NCCL that cuts messages over many TCP flows: building it, finding it, trying it.

`plugin.c` is the plugin. `build` compiles it once into the user's cache; NCCL loads what `path` returns when
NCCL_NET_PLUGIN names it, and NCCL_NET=`NAME` makes it an error when that fails. `check` moves data through it
without NCCL. It counts between hosts only: on one host NCCL uses shared memory.
"""

from .binding import Plugin, PluginError, counters
from .building import NAME, build, path, source_hash
from .checking import Checked, check

__all__ = ["NAME", "Checked", "Plugin", "PluginError", "build", "check", "counters", "path", "source_hash"]
