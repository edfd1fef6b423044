"""Makes a test fail that leaves behind anything that a later one in this process would find.

Looked at after every test and its fixtures: the default communicator (one that `default()` has made unasked as
well), PyTorch's default process group, environment variables, the working directory, and threads that the end of
the process would wait for. A doctest has no place to close what it shows, so its communicator is closed here.
The stacks that Python writes when a signal ends a forked child are a failure, too.
"""

import faulthandler
import gc
import multiprocessing
import os
import sys
import threading
import time

import pytest

OURS = {"PYTEST_CURRENT_TEST", "PYTEST_VERSION"}
"""Environment variables that pytest changes itself."""

IMPORTS = ("KMP_", "OMPI_MCA_", "TORCH", "PYTORCH", "CRC32C_", "TF_", "GRPC_", "HF_", "TOKENIZERS_")
"""Prefixes of the variables that libraries set when they are first imported."""

ENDING_S = 5.0
"""How long a thread may take to end."""

_before = pytest.StashKey[dict]()

_stacks = os.memfd_create("stacks")


@pytest.hookimpl(trylast=True)
def pytest_configure():
    """Have the stacks of forked children that crash written to a file; pytest's own way leads past `capfd`."""
    os.register_at_fork(after_in_child=lambda: faulthandler.enable(_stacks))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    """Record the state before the fixtures."""
    item.stash[_before] = state()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """Compare it with the state after them."""
    result = yield
    if isinstance(item, pytest.DoctestItem):
        close_default()
    forget_meshes()
    left = differences(item.stash[_before])
    if left:
        pytest.fail("this test leaves behind: " + "; ".join(left), pytrace=False)
    return result


def state():
    """The state of the process that a test must not change."""
    return {
        "communicator": default(),
        "process group": has_process_group(),
        "environment": {**os.environ},
        "folder": os.getcwd(),
        "threads": {*threading.enumerate()},
        "children": {*multiprocessing.active_children()},
    }


def default():
    """The default communicator, if there is one; importing the package is left to the tests."""
    bootstrap = sys.modules.get("bagua_comm.bootstrap")
    return bootstrap and bootstrap.current()


def close_default():
    """Close the default communicator."""
    if (comm := default()) is not None:
        comm.close()


def forget_meshes():
    """Empty PyTorch's caches of sharded tensors, which keep process groups that were destroyed.

    The caches belong to a thread. Where another one forks, the child frees them, and the groups with them, whose
    threads it does not have.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def has_process_group():
    """Whether PyTorch has a default process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def differences(before):
    """Return the differences from `before`, in words, and undo all but threads."""
    left = []
    after = state()
    if stacks := new_stacks():
        left.append(f"a child crashed: {stacks}")
    if after["communicator"] not in (None, before["communicator"]):
        left.append(f"the default communicator is open, {after['communicator']}: close() it")
        close_default()
    if after["process group"] and not before["process group"]:
        left.append("torch.distributed is initialized: call destroy_process_group()")
        sys.modules["torch.distributed"].destroy_process_group()
    old, new = before["environment"], after["environment"]
    if old != new:
        names = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
        changed = sorted(name for name in names if name not in OURS and not name.startswith(IMPORTS))
        if changed:
            left.append(f"environment variables changed, {', '.join(changed)}: use monkeypatch")
        for name in changed:
            if name in old:
                os.environ[name] = old[name]
            else:
                del os.environ[name]
    if after["folder"] != before["folder"]:
        left.append(f"the working directory is {after['folder']}: use monkeypatch.chdir()")
        os.chdir(before["folder"])
    for what in ("threads", "children"):
        if running := still_running(after[what] - before[what]):
            left.append(f"{what} are running, {', '.join(each.name for each in running)}: end them")
    return left


def new_stacks():
    """Return the stacks of forked children that have crashed since the last call."""
    size = os.fstat(_stacks).st_size
    if not size:
        return ""
    text = os.pread(_stacks, size, 0).decode(errors="replace")
    os.ftruncate(_stacks, 0)
    os.lseek(_stacks, 0, os.SEEK_SET)
    return text.strip()


def still_running(threads):
    """Return the threads or processes that are still running after `ENDING_S`, except daemons."""
    if any(not each.daemon or not isinstance(each, threading.Thread) for each in threads):
        gc.collect()  # pools without references end their threads, and a DataLoader's iterators their workers
    threads = [each for each in threads if not each.daemon]
    end = time.monotonic() + ENDING_S
    while threads and time.monotonic() < end:
        time.sleep(0.001)  # sleeps: threads may still end, and need not
        threads = [thread for thread in threads if thread.is_alive()]
    return threads
