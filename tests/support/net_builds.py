"""Builds of the network plugin, each compiled once for all processes of a run."""

import fcntl
import shutil
from pathlib import Path

from cuda_on_cpu import build

from bagua_comm.net import building


def built(folder, name="plugin", flags=(), *, header="", source=building.SOURCE, copied_as=None):
    """A copy in `folder` of the build of this name, which has globals of its own.

    Args:
        folder: Where the copy goes.
        name: The name; others with it give the same arguments.
        flags: For the compiler.
        header: Text to be included before the source.
        source: The source.
        copied_as: The name of the copy, if it is another.
    """
    shared = Path(build.folder()) / "net"
    shared.mkdir(exist_ok=True)
    library = shared / f"{name}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first process compiles, the others wait
        if not library.exists():
            text = library.with_suffix(".h")
            text.write_text(header)
            building.compile_to(next(building.compilers()), library, ["-include", str(text), *flags], source)
    return Path(shutil.copy(library, Path(folder, f"{copied_as or name}.so")))
