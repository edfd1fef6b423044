"""Lets each process of pytest-xdist prepare a share of what all of them load before the first test.

In a fresh clone these are the test files with rewritten asserts, and the constants that hypothesis draws from.
Each process would else prepare all of them, at the same time as the others.
"""

from types import ModuleType

import pytest
from _pytest.assertion import rewrite


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Write this process's share of the files to disk, where the others find them."""
    config = session.config
    if not hasattr(config, "workerinput"):
        return
    from hypothesis.internal.constants_ast import constants_from_module

    count, number = config.workerinput["workercount"], int(config.workerinput["workerid"].removeprefix("gw"))
    files = sorted(path for each in config.getini("testpaths") for path in (config.rootpath / each).rglob("*.py"))
    for path in files[number::count]:
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        constants_from_module(module)
        pyc = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if path.match("test_*.py") and rewrite._read_pyc(path, pyc) is None and rewrite.try_makedirs(pyc.parent):
            digest, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, pyc)
