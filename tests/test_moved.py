"""Former module paths."""

import importlib
import sys

import pytest

from bagua_comm import moved
from bagua_comm.moved import MOVED

NEEDS = {"bagua_comm.elastic.mpi": "mpi4py", "bagua_torch": "torch"}
"""Packages whose modules import a library that may be missing."""


@pytest.mark.parametrize("path", MOVED)
def test_the_new_path_imports(path):
    for package, library in NEEDS.items():
        if MOVED[path].startswith(package):
            pytest.importorskip(library)
    assert importlib.import_module(MOVED[path])


@pytest.mark.parametrize("path", MOVED)
@pytest.mark.parametrize("form", ["import {path}", "from {path} import x", "from {package} import {module}"])
def test_a_former_path_is_refused_with_the_new_one(path, form):
    package, _, module = path.rpartition(".")
    with pytest.raises(ModuleNotFoundError, match=f"^{path} is now {MOVED[path]}$"):
        exec(form.format(path=path, package=package, module=module))


def test_the_finder_is_installed_once():
    moved.install()
    assert [type(finder) for finder in sys.meta_path].count(moved.MovedModules) == 1


def test_other_modules_that_do_not_exist_are_not_found_as_usual():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'bagua_comm\.no_such_module'"):
        importlib.import_module("bagua_comm.no_such_module")
    with pytest.raises(ImportError, match="cannot import name 'no_such_module'"):
        exec("from bagua_comm import no_such_module")
