"""The public interface of the package."""

import inspect

from bagua_comm import data


def test_only_collective_methods_say_that_they_are():
    found = [name for name in data.__all__ if "\nCollective." in (inspect.getdoc(getattr(data, name)) or "")]
    assert found == ["measure"]
