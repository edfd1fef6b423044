"""Lets each process of pytest-xdist prepare a share of what all of them load before the first test.

In a fresh clone these are the test files with rewritten asserts, and the constants that hypothesis draws from.
Each process would else prepare all of them, at the same time as the others. Functions of pytest and of hypothesis
that are not public do it; where a version has others, each process prepares all.
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
        with contextlib.suppress(ImportError, AttributeError, TypeError, ValueError):
            keep_constants(path)
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            keep_rewritten(path, config)


def keep_rewritten(path, config):
    """Write a test file with rewritten asserts to its folder, unless it is there."""
    pyc = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
    if path.match("test_*.py") and rewrite._read_pyc(path, pyc) is None and rewrite.try_makedirs(pyc.parent):
        digest, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, pyc)


def keep_constants(path):
    """Let hypothesis write the constants of a module to its folder."""
    from hypothesis.internal.constants_ast import constants_from_module

    module = ModuleType(path.stem)
    module.__file__ = str(path)
    constants_from_module(module)
