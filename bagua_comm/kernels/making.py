"""Compiled kernels on disk: a process of its own makes them, while all others work with NumPy's.

A compiler in a training process would hold Python's lock for seconds, also on a thread. So a process of its own
runs it, one on each host. Unless somebody waits, it is of the lowest priority, and rests most of the time while
all processors are busy: even so, threads of a training that wake up wait for it a moment. It keeps every kernel
as an object file (see `loops`) in a folder of ~/.cache/bagua_comm, whose name stands for the source, the versions
of Numba and LLVM, and the processor. Then a further process compares the results with NumPy's: what crashes or
errs does so there. Its verdict, a file in the same folder, ends the work for good. To load the kernels takes
LLVM, but not Numba, and some 30 ms.

Who compiles is decided by a lease: a file that whoever makes it first has. The compiling process renews it every
second, and ends if the lease is its own no more, or if the process that started it is gone. A lease that nobody
renews is taken away, since its process may be stopped, or its host down.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..files import is_own_file, kept_folder, write_at_once
from ..processes import processor_ticks

_log = logging.getLogger(__name__)

KERNELS = {
    "encode_rows": "iiiiiiiif",
    "decode_rows": "iiiiiiiif",
    "combine_rows": "iiiiiiiiif",
    "cast_rows": "iiiiiiii",
    "sum_rows": "iiiiiiiii",
    "find_fields": "iiiii",
    "add_fixed": "iiiiiiii",
    "mean_of_fixed": "iiiiiiii",
    "weigh_blocks": "iiiiii",
}
"""The kernels, with a letter for each argument: i, an integer of 64 bits, or f, a float of 64 bits."""

_TYPES: dict[str, type[ctypes.c_int64 | ctypes.c_double]] = {"i": ctypes.c_int64, "f": ctypes.c_double}

_GOOD = "good"
"""The verdict on kernels that may be used; any other says why not."""

_RENEW_S, _STALE_S, _POLL_S = 1.0, 15.0, 0.25
"""How often a lease is renewed, after how long without that it is taken away, and how often others look."""

_WORK_S, _REST_S = 0.01, 0.2
"""How long the compiler works at once while all processors are busy, and after how long a rest looks about."""

_LEAST, _MOST, _GROWS_S = 0.01, 0.05, 20.0
"""For what share of the time it works then, at first and at most, and in what time the share grows. So a program
of some seconds hardly notices it."""

_LEFT_OVER = 1.5
"""So many processors must be left over for the compiler to work all the time: one for itself, and half of one for
threads that wake up."""

_NO_LEASE = 75
"""The exit code of a process whose lease is its own no more, or whose parent is gone."""

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
"""The signals by which code ends its own process; by others somebody ends it: for its memory, or with its job."""

_PR_SET_PDEATHSIG = 1
"""Linux' number for the signal that a process gets when the thread that started it ends."""

_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "SLURM_", "TORCHELASTIC_", "BAGUA_")
"""How the environment variables begin by which launchers know the processes of a job."""

Function = Callable[..., None]


class UnavailableError(Exception):
    """There are no compiled kernels here, for the reason that the message gives."""


def is_installed() -> bool:
    """Whether Numba is there to compile."""
    return importlib.util.find_spec("numba") is not None


def place() -> Path:
    """The folder of kernels for this source, these versions and this processor.

    Raises:
        UnavailableError: Numba is not installed or cannot be used, or nothing can be kept.
    """
    if not is_installed():
        raise UnavailableError("Numba is not installed: pip install 'bagua-comm[fast]'")
    kept = kept_folder("bagua_comm")
    if kept is None:
        raise UnavailableError("nothing can be kept in ~/.cache/bagua_comm")
    try:
        return kept / f"kernels-{_key()}"
    except Exception as exc:  # nobody knows what a broken installation raises
        raise UnavailableError(f"Numba cannot be used here: {type(exc).__name__}: {exc}") from exc


@functools.cache
def _key() -> str:
    from llvmlite import binding

    source = Path(__file__).with_name("loops.py").read_bytes()
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    processor = platform.machine(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    return hashlib.blake2b(repr((source, KERNELS, versions, processor)).encode(), digest_size=12).hexdigest()


def state() -> str:
    """Which kernels work on NumPy's arrays here, in a line; nothing is compiled or loaded for it."""
    try:
        folder = place()
    except UnavailableError as exc:
        return f"NumPy's: {exc}"
    verdict = _verdict(folder)
    if verdict == _GOOD:
        return f"compiled, in {folder}"
    if verdict is not None:
        return f"NumPy's: {verdict}"
    if _Lease(folder).path.exists():
        return f"NumPy's until the compiled ones are ready, in {folder}"
    return "NumPy's until a program that uses them has compiled them in the background"


# ---------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------


def _seal(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=32).digest() + code


def _read(path: Path) -> bytes | None:
    """The object file at `path`, if it is there, whole, and this user's."""
    if not is_own_file(path):
        return None
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content[32:] if content == _seal(content[32:]) else None


def _object(folder: Path, name: str) -> Path:
    return folder / f"{name}.o"


def _verdict(folder: Path) -> str | None:
    """Why the kernels of a folder cannot be used, or that they are `_GOOD`; None if nobody knows yet."""
    path = folder / "verdict"
    if not is_own_file(path):
        return None
    try:
        return path.read_text(errors="replace") or None
    except OSError:
        return None


def _judge(folder: Path, verdict: str) -> None:
    write_at_once(folder / "verdict", verdict.encode(), mode=0o600)


class _Lease:
    """The right to compile the kernels of a folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self.token = folder / "lease", secrets.token_hex(8)
        self._seen, self._since = (0, 0), 0.0

    def take(self) -> bool:
        """Take the lease unless another one has it; whether this has.

        Raises:
            OSError: It cannot be written.
        """
        try:
            with open(self.path, "x", opener=functools.partial(os.open, mode=0o600)) as file:
                file.write(self.token)
        except FileExistsError:
            self._take_away_if_stale()
            return False
        return True

    def _take_away_if_stale(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = self.path.stat()
            # What counts is that it does not change: the clock of another host may be wrong.
            if (seen := (found.st_ino, found.st_mtime_ns)) != self._seen:
                self._seen, self._since = seen, time.monotonic()
            elif time.monotonic() - self._since > _STALE_S:
                self.path.unlink()

    def is_own(self) -> bool:
        """Whether nobody has taken it away."""
        try:
            return self.path.read_text() == self.token
        except OSError:
            return False

    def give_back(self) -> None:
        """Leave it to others."""
        with contextlib.suppress(OSError):
            if self.is_own():
                self.path.unlink()


# ---------------------------------------------------------------------------------------------------
# Processes that use kernels
# ---------------------------------------------------------------------------------------------------


def load(folder: Path) -> dict[str, Function] | None:
    """The kernels of a folder as functions; None if they are not there yet, or some cannot be read.

    Raises:
        UnavailableError: There is a verdict that they are no good, or they cannot be loaded.
    """
    verdict = _verdict(folder)
    if verdict is None:
        return None
    if verdict != _GOOD:
        raise UnavailableError(verdict)
    try:
        return _load(folder)
    except Exception as exc:  # LLVM's
        raise UnavailableError(f"they cannot be loaded: {type(exc).__name__}: {exc}") from exc


def _load(folder: Path) -> dict[str, Function] | None:
    from llvmlite import binding

    codes = {name: _read(_object(folder, name)) for name in KERNELS}
    if None in codes.values():
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    for code in codes.values():
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return {name: _function(engine.get_function_address(name), letters) for name, letters in KERNELS.items()}


_engines: list[Any] = []
"""What holds the code of kernels in memory."""


def _function(address: int, letters: str) -> Function:
    """A kernel; Python's lock is not held while it runs."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *(_TYPES[letter] for letter in letters))
    return functools.partial(kind(address), *_UNUSED)


_results = ctypes.create_string_buffer(16)
_UNUSED = ctypes.addressof(_results), ctypes.addressof(_results) + 8
"""Where kernels write that they have neither a result nor an error."""


class Supply:
    """A thread that has the kernels compiled, or waits until another process has, and then takes them over.

    Args:
        folder: Where they are kept.
        use: What to do with them; it is called on the thread.
        urgent: Whether somebody waits for them, so that compiling does not give way to other work.
    """

    def __init__(self, folder: Path, use: Callable[[dict[str, Function]], None], *, urgent: bool = False) -> None:
        self._folder, self._use, self._urgent = folder, use, urgent
        self._rests = not urgent
        self._stop, self._owner = threading.Event(), os.getpid()
        self.obstacle: str | None = None
        """Why there will be no compiled kernels in this process."""
        self.ended = threading.Event()
        """Set when they are in use, or will never be."""
        self._thread = threading.Thread(target=self._work, name="bagua_comm kernels", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def is_here(self) -> bool:
        """Whether it is at work in this process, and not in the one that this was forked from."""
        return os.getpid() == self._owner

    def hurry(self) -> None:
        """Somebody waits: the compiler rests no more."""
        self._rests = False

    def end(self) -> None:
        """Stop waiting, and have no process compile for this one any more."""
        if self.is_here():  # a forked child has neither the thread nor the process
            self._stop.set()
            self._thread.join()

    def _work(self) -> None:
        try:
            functions = self._obtain()
            if functions is not None:
                self._use(functions)
                _log.info("the kernels of NumPy's arrays are the compiled ones from now on")
        except Exception as exc:  # whatever it is, NumPy's kernels go on
            self.obstacle = str(exc) or type(exc).__name__
            _log.warning("the kernels of NumPy's arrays stay NumPy's: %s", exc)
        finally:
            self.ended.set()

    def _obtain(self) -> dict[str, Function] | None:
        """The kernels, once they are there; None if this is to stop."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        lease = _Lease(self._folder)
        while not self._stop.is_set():
            verdict, functions = _verdict(self._folder), load(self._folder)
            if functions is not None:
                return functions
            if not lease.take():
                self._stop.wait(_POLL_S)
                continue
            try:
                if _verdict(self._folder) == verdict:  # nobody has made them since
                    self._compile(lease)
            finally:
                lease.give_back()
        return None

    def _compile(self, lease: _Lease) -> None:
        """Have a process compile, until it has ended or this is to stop.

        Raises:
            UnavailableError: It ended without a verdict.
        """
        with contextlib.suppress(OSError):  # it is there if some of the files that it speaks of cannot be read
            (self._folder / "verdict").unlink()
        process = _start("make", self._folder, lease, urgent=self._urgent)
        said, load, busy = b"", _Load(), self._rests
        began_s = time.monotonic()
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = process.communicate(timeout=_WORK_S if busy else _POLL_S)[0]
            if process.returncode is None and self._stop.is_set():
                process.kill()
            elif process.returncode is None and self._rests:
                share = _share(time.monotonic() - began_s)
                busy = self._rest(process, load, _WORK_S / share - _WORK_S) if busy else load.is_full()
        if _verdict(self._folder) is None and not self._stop.is_set() and lease.is_own():
            raise UnavailableError(_last_words("compiling them", process.returncode, said))

    def _rest(self, process: subprocess.Popen[bytes], load: _Load, seconds: float) -> bool:
        """Stop the process, and those that it has started, a while; returns whether processors are still busy.

        The rest ends at once if they are not, and if somebody waits for the kernels.
        """
        busy = True
        with contextlib.suppress(OSError):  # it has just ended
            os.killpg(process.pid, signal.SIGSTOP)
            end_s = time.monotonic() + seconds
            while busy and self._rests and (left_s := end_s - time.monotonic()) > 0:
                self._stop.wait(left_s if left_s < 2 * _REST_S else _REST_S)  # never so short that no clock ticks
                busy = not self._stop.is_set() and load.is_full()
            os.killpg(process.pid, signal.SIGCONT)
        return busy


def _share(age_s: float) -> float:
    """For what share of the time to compile while processors are busy, so long after the beginning.

    >>> [_share(seconds) for seconds in (0, 10, 60)]
    [0.01, 0.03, 0.05]
    """
    return _LEAST + (_MOST - _LEAST) * min(1.0, age_s / _GROWS_S)


class _Load:
    """What the processors of this machine do, by Linux' count."""

    def __init__(self) -> None:
        self._before = processor_ticks()

    def is_full(self) -> bool:
        """Whether other processes have left over less than `_LEFT_OVER`, since this was asked last."""
        before, self._before = self._before, processor_ticks()
        spent = [after - earlier for after, earlier in zip(self._before, before, strict=True)]
        if not sum(spent):
            return False
        _, nice, _, idle, *_ = spent  # the compiler's own time is counted as nice
        return (nice + idle) * (os.cpu_count() or 1) < _LEFT_OVER * sum(spent)


def _last_words(what: str, code: int, said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return f"{what} ended with {code}: {lines[-1] if lines else 'no message'}"


def _start(step: str, folder: Path, lease: _Lease, *, urgent: bool) -> subprocess.Popen[bytes]:
    """Start a process that runs `main`, and is no process of the job that this one belongs to."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, step, str(folder), lease.token, str(os.getpid()), *["urgent"][:urgent]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        start_new_session=step == "make",  # what checks stops and goes on with what makes
    )


# ---------------------------------------------------------------------------------------------------
# Processes that make them
# ---------------------------------------------------------------------------------------------------


def main(step: str, folder: str, token: str, parent: str, urgent: str = "") -> None:
    """Compile the kernels that are missing in a folder, or compare those in it with NumPy's.

    Args:
        step: "make" or "check".
        folder: Where they are kept.
        token: What is written in the lease, which this process renews.
        parent: The number of the process that started this one, which ends with it.
        urgent: Anything, if it is not to give way to other work.
    """
    with contextlib.suppress(AttributeError):  # it may be stopped when the process ends that would let it go on
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not urgent:
        _give_way()
    lease = _Lease(Path(folder))
    lease.token = token
    threading.Thread(target=_renew, args=(lease, int(parent)), daemon=True).start()
    if step == "make":
        _make(Path(folder), lease, urgent=bool(urgent))
    else:
        _check(Path(folder))


def _give_way() -> None:
    """Take processor time only where nobody else wants it."""
    os.nice(19)
    with contextlib.suppress(AttributeError, OSError):  # only Linux has the following
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        # Processors may be shared out among sessions first, and this process is alone in its own.
        Path("/proc/self/autogroup").write_text("19")


def _renew(lease: _Lease, parent: int) -> None:
    while os.getppid() == parent and lease.is_own():
        with contextlib.suppress(OSError):
            os.utime(lease.path)
        time.sleep(_RENEW_S)
    lease.give_back()
    os._exit(_NO_LEASE)


def _make(folder: Path, lease: _Lease, *, urgent: bool) -> None:
    try:
        from . import loops  # this imports Numba

        for name in KERNELS:
            if _read(_object(folder, name)) is None:
                write_at_once(_object(folder, name), _seal(loops.object_code(name)), mode=0o600)
    except (OSError, MemoryError):
        raise  # another time there may be room
    except Exception as exc:
        _judge(folder, f"compiling them raised {type(exc).__name__}: {exc}")
        return
    process = _start("check", folder, lease, urgent=urgent)
    said = process.communicate()[0]
    why = _last_words("comparing them", code := process.returncode, said)
    if code == _NO_LEASE or (code < 0 and -code not in _CRASHES):
        sys.exit(why)  # it was ended from outside, which says nothing of the kernels
    _judge(folder, why if code else _GOOD)


def _check(folder: Path) -> None:
    """Raise unless the kernels of a folder, used in a process without Numba, give NumPy's bytes."""
    from . import compiled, host

    functions = _load(folder)
    if functions is None:
        raise UnavailableError("some cannot be read")
    compiled.take(functions)
    for dtype in compiled.DTYPES:
        if _results_of(host, dtype) != _results_of(compiled, dtype):
            raise UnavailableError(f"they differ from NumPy's in arrays of {dtype}")


def _results_of(run: Any, dtype: str) -> list[bytes]:
    """What all kernels make of some numbers."""
    from ..arrays import dtype_named

    kind, wire16, count = dtype_named(dtype), np.dtype(np.float16), 3000
    x = np.random.default_rng(0).standard_normal((3, count), np.float32).astype(kind)
    layout = {"start": 48 * kind.itemsize, "block": 128, "eps": 1e-7}
    coded, cast = np.zeros((3, 48 * kind.itemsize + count), np.uint8), np.zeros((3, 2 * count), np.uint8)
    outs = [np.zeros_like(x) for _ in range(4)]
    totals = [np.zeros_like(coded[:1]), np.zeros_like(cast[:1])]
    run.minmax_encode(x, coded, **layout)
    run.minmax_decode(coded, outs[0], **layout)
    run.minmax_combine(coded, totals[0], count, kind, op="avg", **layout)
    run.cast_encode(x, cast, wire16)
    run.cast_decode(cast, outs[1], wire16)
    run.cast_combine(cast, totals[1], count, kind, wire16, "avg")
    run.reduce_rows(x, outs[2][0], "sum")
    bounds, fields, total = np.array([0, 100, count]), np.zeros(2, np.uint8), np.zeros(count, np.int32)
    run.fixed_exponents(x[0], bounds, fields)
    run.fixed_add(x[0], bounds, fields, 24, total, first=True)
    run.fixed_mean(total, bounds, fields, 24, 3, outs[3][0])
    words, weights, sums = coded[0].view(np.uint64), np.arange(128, dtype=np.uint64).reshape(2, 64), np.zeros(64)
    run.weigh_blocks(words, weights, sums.view(np.uint64))
    return [array.tobytes() for array in (coded, cast, *totals, *outs, fields, total, sums)]
