"""How the suite runs: which tests, on how many processes, and with which fixtures.

Tests in tests/mpi run under mpirun only; tests/test_mpirun.py starts them. `device` stands in for a GPU.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from _pytest.doctest import DoctestItem, DoctestModule
from _pytest.mark import deselect_by_mark
from cuda_on_cpu import build, machine
from cuda_on_cpu.install import installed
from support import doctests, needs, selection, shares, stacks, tidy
from support.launch import TIME_FACTOR

from bagua_comm import kernels
from bagua_comm.system import infiniband

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of child processes load the same modules
sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup; the programs of tests would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

MPI_TESTS = Path(__file__).parent / "mpi"
LEFT_OUT = pytest.StashKey()
PROCESSES, SLOW_PROCESSES = 4, 3
"""Number of processes of pytest-xdist for the whole suite, and with `-m slow`; `-n 0` runs all in one.

Tests wait for ranks, time limits and other processes, so that two processes leave a sixth of two cores idle.
"""


def pytest_configure(config):
    config.pluginmanager.register(needs)  # here, so that it also sees the doctests of the packages
    config.pluginmanager.register(doctests)
    config.pluginmanager.register(shares)
    config.pluginmanager.register(stacks)
    if not config.getoption("--with-mpi", False):  # under mpirun the ranks have one communicator for all tests
        config.pluginmanager.register(tidy)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if not config.pluginmanager.hasplugin("xdist") or config.option.numprocesses is not None:
        return
    if hasattr(config, "workerinput") or "PYTEST_XDIST_WORKER" in os.environ:
        return  # this is one of the processes, or a pytest that a test started
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and not config.option.collectonly and not config.option.usepdb:
        processes = SLOW_PROCESSES if config.option.markexpr == "slow" else PROCESSES
        config.option.numprocesses, config.option.dist = processes, "worksteal"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the cores are busy already


def pytest_sessionstart(session):
    """Compile kernels once, so that all processes find them on disk, and while the processes collect."""
    if hasattr(session.config, "workerinput"):
        return  # the process that started this one does it
    os.environ[build.FOLDER] = str(build.folder())  # all processes find the stand-in's files here
    cache = getattr(session.config, "cache", None)  # not there with `-p no:cacheprovider`
    if cache is not None:
        with contextlib.suppress(OSError):  # a checkout that cannot be written
            build.keep_in(cache.mkdir("cuda_on_cpu"))
    _compiling.start()
    if getattr(session.config.option, "numprocesses", None):
        _precompiling.start()
    else:
        _compiling.join()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished():
    _compiling.join()  # no process gets a test before
    _precompiling.join()


def _compile():
    with contextlib.suppress(ImportError, RuntimeError):  # the tests that need the compiled kernels say so
        kernels.compile_now()


def _precompile():
    with contextlib.suppress(OSError, AssertionError):  # the tests that need the compiler say so
        build.precompiled()


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled():
    """Load them in every process, so that no test sees them change."""
    _compile()


_compiling = threading.Thread(target=_compile, name="compile kernels")
_precompiling = threading.Thread(target=_precompile, name="precompile the stand-in's header")


def pytest_ignore_collect(collection_path, config):
    if collection_path == MPI_TESTS and not config.getoption("--with-mpi"):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage meanwhile: nearly all objects stay, and each collection of garbage would visit them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Leave tests and modules, which stay to the end, out of garbage collections, which many tests ask for."""
    gc.freeze()


def pytest_report_collectionfinish(config):
    """Print with `-v` which cases this run leaves out."""
    return config.stash.get(LEFT_OUT, [])


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for doctests only in the packages: the tests have none, and the search would import helpers twice."""
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    selection.mark_slow_cases(items)
    if "not slow" not in config.option.markexpr:  # else those that are extra are left out, too
        selection.mark_extra_cases(items)
    for item in items:
        if limit := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIME_FACTOR * limit.args[0]), append=False)
    if config.option.verbose > 0 and "not slow" in config.option.markexpr:
        config.stash[LEFT_OUT] = selection.summary(items, config.option.verbose)
    for mark in ("gpu", "extra"):
        if mark not in config.option.markexpr:  # as in `-m slow`: these must be asked for
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
    deselect_by_mark(items, config)  # as pytest does later, when other plugins have looked at all of them
    # The longest tests come first, so that no process is alone with one at the end.
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    result = yield
    for item in items:
        if isinstance(item, DoctestItem):  # pytest-mpi takes the name of a package for its mark
            item.own_markers = [mark for mark in item.own_markers if "--with-mpi" not in str(mark.kwargs)]
    return result


@pytest.fixture
def ports(tmp_path, monkeypatch):
    """Make devices of InfiniBand: by name, the rate and the state of each port in turn, as Linux writes them."""

    def made(**devices):
        root = tmp_path / "infiniband"
        root.mkdir(exist_ok=True)
        for name, texts in devices.items():
            (root / name).mkdir()
            for number in range(1, len(texts) // 2 + 1):
                port = root / name / "ports" / str(number)
                port.mkdir(parents=True)
                for file, text in zip(("rate", "state"), texts[2 * number - 2 :], strict=False):
                    (port / file).write_text(f"{text}\n")
        monkeypatch.setattr(infiniband, "FOLDER", root)
        return root

    return made


@pytest.fixture(params=machine.POLICIES)
def device(request):
    """A `Machine` behind `import cupy`, of one device (set `count` for more). Tests run under every policy."""
    with installed(request.param) as stand_in:
        yield stand_in
