"""The public interface of the package."""

import inspect

import pytest

from bagua_comm import data


@pytest.mark.parametrize("name", data.__all__)
def test_everything_public_has_a_docstring(name):
    value = getattr(data, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        for method, function in inspect.getmembers(value, inspect.isfunction):
            assert method.startswith("_") or inspect.getdoc(function), method


def test_only_collective_methods_say_that_they_are():
    found = [name for name in data.__all__ if "\nCollective." in (inspect.getdoc(getattr(data, name)) or "")]
    assert found == ["measure"]
