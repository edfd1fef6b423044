"""Leaves modules without doctests out of the collection, which looks through all that a module defines."""

import pytest
from _pytest.doctest import DoctestModule


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Keep modules with an example."""
    collectors = yield
    return [each for each in collectors if not isinstance(each, DoctestModule) or ">>>" in file_path.read_text()]
