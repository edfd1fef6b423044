"""Former module paths."""

import importlib
import pickle
import sys
from pathlib import Path

import pytest

import bagua_comm
from bagua_comm import moved
from bagua_comm.moved import MOVED, PICKLED

ROOT = Path(bagua_comm.__file__).parents[1]


def test_the_new_path_exists():
    """It is not imported: modules over MPI start it."""
    for path, new in MOVED.items():
        file = ROOT / new.replace(".", "/")
        assert file.with_suffix(".py").exists() or (file / "__init__.py").exists(), new
        assert not (ROOT / path.replace(".", "/")).with_suffix(".py").exists(), path


@pytest.mark.parametrize("library", ["bagua_comm", "bagua_torch"])
@pytest.mark.parametrize("form", ["import {path}", "from {path} import x", "from {package} import {module}"])
def test_a_former_path_is_refused_with_the_new_one(library, form):
    pytest.importorskip(library.replace("bagua_torch", "torch"))
    paths = [path for path in MOVED if path.split(".")[0] == library]
    for path in paths:
        package, _, module = path.rpartition(".")
        with pytest.raises(ModuleNotFoundError, match=f"^{path} is now {MOVED[path]}$"):
            exec(form.format(path=path, package=package, module=module))
    assert paths


@pytest.mark.parametrize("path", PICKLED)
def test_pickles_of_former_versions_load(path):
    """`torch.save` of a wrapped module names the class of its hooks by its path."""
    pytest.importorskip(path.split(".")[0].replace("bagua_torch", "torch"))
    new, name = PICKLED[path]
    assert pickle.loads(f"c{path}\n{name}\n.".encode()) is getattr(importlib.import_module(new), name)
    with pytest.raises(ModuleNotFoundError, match=f"^{path} is now {new}$"):
        exec(f"from {path} import x")


def test_the_finder_is_installed_once():
    moved.install()
    assert [type(finder) for finder in sys.meta_path].count(moved.MovedModules) == 1


def test_other_modules_that_do_not_exist_are_not_found_as_usual():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'bagua_comm\.no_such_module'"):
        importlib.import_module("bagua_comm.no_such_module")
    with pytest.raises(ImportError, match="cannot import name 'no_such_module'"):
        exec("from bagua_comm import no_such_module")


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("averages", "Average ErrorFeedback Exact Hierarchical Quantized quantized_allreduce"),
        ("comm", "Communicator Nodes"),
        ("engine", "Engine Lane StreamLane ThreadLane check_fit"),
        ("planning.costmodel", "Advice Cluster Job Prediction Rates TorchDDP advise held_up_s predict"),
        ("planning.tuner", "Search Settings Trial Tuner"),
    ],
)
def test_a_module_that_became_a_package_keeps_its_names(package, names):
    module = importlib.import_module(f"bagua_comm.{package}")
    assert set(names.split()) <= set(module.__all__) & set(dir(module))
