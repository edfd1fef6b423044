"""Lets each process of pytest-xdist prepare a share of what all of them load before the first test.

In a fresh clone these are the test files with rewritten asserts, and the constants that hypothesis draws from.
Each process would else prepare all of them, at the same time as the others.
"""

import contextlib
from types import ModuleType

import pytest
from _pytest.assertion import rewrite


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Write this process's share of the files to disk, where the others find them."""
    config = session.config
    if not hasattr(config, "workerinput"):
        return
    count, number = config.workerinput["workercount"], int(config.workerinput["workerid"].removeprefix("gw"))
    folders = [config.rootpath / each for each in (*config.getini("testpaths"), "benchmarks")]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py"))[number::count]:
        keep_constants(path)
        pyc = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if path.match("test_*.py") and rewrite._read_pyc(path, pyc) is None and rewrite.try_makedirs(pyc.parent):
            digest, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, pyc)


def keep_constants(path):
    """Let hypothesis write the constants of a module to its folder."""
    with contextlib.suppress(ImportError):  # its first versions draw from none
        from hypothesis.internal.constants_ast import constants_from_module

        module = ModuleType(path.stem)
        module.__file__ = str(path)
        constants_from_module(module)
