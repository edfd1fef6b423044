"""A fleet under torchrun without torchrun: forked processes, and their store."""

import ctypes
import itertools
import os
import pickle
import signal
import traceback

import torch.distributed as dist

import bagua_comm
from bagua_comm import CommError
from bagua_comm.execution import cuda
from bagua_torch.process_group.fleet import TorchrunFleet
from support.children import Forked
from support.waiting import until

TIMEOUT_S = 20.0

LIMIT_S = 100.0
"""How long a process may take to end."""

KILLED = (-signal.SIGKILL, -signal.SIGKILL & 0xFF, 1)
"""Exit codes of processes that are to die; one in a container ends by `_exit(1)`, as it is process 1 there."""

_NEW_MOUNTS, _NEW_PIDS = 0x20000, 0x20000000
_PRIVATE = 0x44000
"""MS_REC and MS_PRIVATE: mounts are seen by this process alone."""


class Processes:
    """Forked processes, since importing torch in each would take seconds; this process serves their store."""

    def __init__(self, folder):
        self._folder, self._children, self._numbers = folder, {}, itertools.count()
        cuda.device_count()  # imports CuPy, once for all
        bagua_comm.kernels.on_host()

    def start(self, rank, size, body, *, timeout_s=TIMEOUT_S, agents=None, containers=(), **settings):
        """Run `body(fleet)` in a new process with this rank; return the number of the process, for `result`.

        A rank in `containers` gets a PID namespace to itself, in which it is process 1.
        """
        number = next(self._numbers)
        port = self._folder / "port"

        def process():
            try:
                if rank in containers:
                    enter_container()
                until(port.exists)
                store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
                agent = None if agents is None else agents[rank]
                outcome = body(TorchrunFleet(store, rank, size, timeout_s=timeout_s, agent=agent, **settings))
            except BaseException as exc:
                outcome = f"{type(exc).__name__}: {exc}" if isinstance(exc, CommError) else traceback.format_exc()
            (self._folder / f"new-{number}").write_bytes(pickle.dumps(outcome))
            (self._folder / f"new-{number}").rename(self._folder / f"result-{number}")

        self._children[number] = Forked(process)
        return number

    def serve(self):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        new = self._folder / "port-new"
        new.write_text(str(self.store.port))
        new.rename(self._folder / "port")

    def result(self, number):
        """Return the result of the body, or None if the process was killed."""
        code = self._children.pop(number).code(LIMIT_S)
        path = self._folder / f"result-{number}"
        if not path.exists():
            assert code in KILLED
            return None
        assert code == 0
        return pickle.loads(path.read_bytes())

    def results(self):
        return [self.result(number) for number in list(self._children)]

    def close(self):
        for child in self._children.values():
            child.kill()


def enter_container():
    """Continue in a child with a PID namespace and a /proc to itself. Needs root, which CI has."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_NEW_MOUNTS | _NEW_PIDS))
    inside = Forked(None)
    if inside.pid:
        os._exit(inside.code(LIMIT_S) & 0xFF)
    _check(libc.prctl(1, signal.SIGKILL))  # it ends with its parent
    _check(libc.mount(None, b"/", None, _PRIVATE, None))
    _check(libc.mount(b"proc", b"/proc", b"proc", 0, None))


def _check(code):
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def run(processes, size, body, **settings):
    """Run `body(fleet)` in `size` processes; return the results, None for each that was killed."""
    for rank in range(size):
        processes.start(rank, size, body, **settings)
    processes.serve()
    return processes.results()
