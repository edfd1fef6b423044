"""Tests of a real device: `python -m pytest -m gpu tests/gpu`.

In the ordinary run most of them work on what stands in for CuPy: the parameter "real" of `device` is marked
`gpu`, and what is marked so is deselected unless it is asked for (pyproject.toml).
"""

import types

import pytest
from cuda_on_cpu.install import environment, installed


@pytest.fixture(params=["lazy", pytest.param("real", marks=pytest.mark.gpu)])
def device(request, tmp_path):
    """What `import cupy` works on here, and in processes with the environment variables `environment`."""
    if request.param == "real":
        yield types.SimpleNamespace(real=True, environment=None)
        return
    with installed(request.param) as machine:
        yield types.SimpleNamespace(real=False, environment=environment(tmp_path), machine=machine)
