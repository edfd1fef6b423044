"""How large the library may be: lines of code of its packages, files and tests, and what else only shrinks.

The budgets of packages stand in docs/how-it-works/layout.md, with what makes the large ones large. A change that
needs more code raises a number there, in the same commit and with its reason. A change that needs less lowers it.
"""

import ast
import functools
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from support import code_lines

import bagua_comm
from bagua_comm.transports.local import Hub, LocalTransport

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "bagua_comm", ROOT / "bagua_torch"]
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

A_FILE, A_MODULE = 450, 25
"""Lines of code: at most in a file, and at least in a module."""

A_ROOT = 8
"""Modules at the root of a package, at most; the others are in packages of a subject."""

TESTS = 1.28
"""Lines of code of the tests, at most, for each line of the library."""

PARAMETERS = 8
"""Of a function, at most, without `self`."""

SPARE = 40
"""Lines by which a budget may be above what its package needs."""


class Facts(NamedTuple):
    """What the syntax tree of a file says of it."""

    bases: dict[str, list[str]]
    """The names of the base classes of each class."""
    parameters: dict[str, int]
    """The largest number of parameters of the functions of a name."""
    private: set[str]
    """The private names that it defines, of functions, classes, variables and fields of `self`."""
    foreign: list[str]
    """The private names that it uses of other objects and modules, once for each use."""


@functools.cache
def facts(path):
    found = Facts({}, {}, set(), [])
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef():
                bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                found.bases[node.name] = bases
                found.private.add(node.name)
            case ast.FunctionDef():
                count = max(found.parameters.get(node.name, 0), number_of_parameters(node))
                found.parameters[node.name] = count
                found.private.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.private.add(node.id)
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                if isinstance(node.ctx, ast.Store):
                    found.private.add(node.attr)
            case ast.Attribute() if is_private(node.attr):
                found.foreign.append(node.attr)
            case ast.ImportFrom() if node.level or str(node.module).startswith("bagua_"):
                found.foreign.extend(each.name for each in node.names if is_private(each.name))
    return found


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def budgets():
    """The table of layout.md: lines of code by package; "." stands for the modules at the root of a package."""
    page = (ROOT / "docs" / "how-it-works" / "layout.md").read_text()
    rows = re.findall(r"^\| `(bagua_[\w/.]+)` \| ([\d,]+) \|", page, re.MULTILINE)
    return {name: int(number.replace(",", "")) for name, number in rows}


def sizes():
    """Lines of code by package, as in `budgets`."""
    found = Counter()
    for package in PACKAGES:
        for path in filter(code_lines.is_code, package.rglob("*.*")):
            inside = path.relative_to(package).parts
            part = f"{package.name}/{inside[0]}" if len(inside) > 1 else f"{package.name}/."
            found[part] += code_lines.count(path)
    return found


def test_each_package_keeps_its_budget():
    found, table = sizes(), budgets()
    assert found.keys() == table.keys()
    assert {name: n for name, n in found.items() if n > table[name]} == {}, "needs more than its budget"
    assert {name: n for name, n in found.items() if n < table[name] - SPARE} == {}, "lower its budget"


def test_tests_are_not_much_larger_than_what_they_test():
    library = sum(sizes().values())
    tests = sum(map(code_lines.count, (ROOT / "tests").rglob("*.py")))
    assert TESTS - 0.03 < tests / library <= TESTS


def test_no_file_is_longer_than_one_subject_takes():
    files = [*FILES, *(ROOT / "benchmarks").rglob("*.py")]
    assert {str(path): n for path in files if (n := code_lines.count(path)) > A_FILE} == {}


def test_few_modules_lie_at_the_root_of_a_package():
    for package in PACKAGES:
        assert len([path for path in package.glob("*.py") if not path.name.startswith("_")]) <= A_ROOT


SHORT = {
    "bagua_comm/objects/caching.py",
    "bagua_comm/objects/closing.py",
    "bagua_comm/commands/compare.py",
    "bagua_comm/flight/batches.py",
    "bagua_comm/objects/pickling.py",
    "bagua_torch/bases.py",
    "bagua_torch/fsdp/passes.py",
    "bagua_torch/lightning/layer_sync.py",
    "bagua_torch/tensors/rng.py",
}
"""Modules of fewer lines than `A_MODULE`; a list that may only get shorter."""

ALWAYS_SHORT = {"__init__", "_version", "errors", "signatures"}
"""Names of modules that may be short: errors and tables. So may those of the families of kernels."""


def test_no_module_is_too_short_for_a_subject():
    short = {
        str(path.relative_to(ROOT))
        for path in FILES
        if path.stem not in ALWAYS_SHORT and "kernels" not in path.parts and code_lines.count(path) < A_MODULE
    }
    assert short == SHORT


STEMS = {
    "transport": 4, "agreement": 3, "checks": 3, "fleet": 3, "messages": 3,
}  # fmt: skip
"""Names that more than two modules have, and how many; a list that may only get shorter."""


def test_a_module_has_a_name_of_its_own():
    stems = Counter(path.stem for path in FILES if "kernels" not in path.parts)
    del stems["__init__"], stems["base"]
    assert {stem: n for stem, n in stems.items() if n > 2} == STEMS


SPLIT = {
    "Collectives",
    "PointToPoint",
    "ObjectCalls",
    "GatherScatter",
    "CoalescedCollectives",
    "GroupBase",
    "FramedTransport",
}
"""Classes that are the other half of their one subclass; a list that may only get shorter."""

CONTRACTS = {"Scratch", "ShardedStore", "TaskFuture", "Outer"}
"""Classes with one subclass in another file that are used for themselves."""


def test_a_class_lives_in_one_file():
    home = {name: path for path in FILES for name in facts(path).bases}
    subclasses = defaultdict(list)
    for path in FILES:
        for bases in facts(path).bases.values():
            for base in bases:
                subclasses[base].append(path)
    halves = {
        name
        for name, path in home.items()
        if len(others := subclasses[name]) == 1 and path != others[0] and path.parent == others[0].parent
    }
    assert halves - CONTRACTS == SPLIT


MANY_PARAMETERS = {
    "bagua_comm/bootstrap/connection.py:connect",  # public
    "bagua_comm/bootstrap/connection.py:open_world",
    "bagua_comm/data/balanced.py:__init__",  # of PyTorch's DistributedSampler, and more
    "bagua_comm/planning/simulator/failures.py:goodput",
    "bagua_torch/ddp/wrapper.py:__init__",  # of PyTorch's class
    "bagua_torch/moe.py:__init__",  # public
    "bagua_torch/process_group/bootstrap.py:connect",
}
"""Functions with more parameters than `PARAMETERS`, kernels left out; a list that may only get shorter."""


def test_a_function_has_few_parameters():
    many = {
        f"{path.relative_to(ROOT)}:{name}"
        for path in FILES
        if "kernels" not in path.parts
        for name, count in facts(path).parameters.items()
        if count > PARAMETERS
    }
    assert many == MANY_PARAMETERS


def number_of_parameters(function):
    if any(ast.unparse(each) == "overload" for each in function.decorator_list):
        return 0
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


ATTRIBUTES = 25
"""Public attributes of a `Communicator` that are no methods; a number that may only get smaller."""


def test_a_communicator_has_few_attributes():
    comm = bagua_comm.Communicator([LocalTransport(Hub(1), 0)])
    public = [name for name in dir(comm) if not name.startswith("_")]
    assert len([name for name in public if not callable(getattr(comm, name))]) == ATTRIBUTES


FOREIGN = re.compile("_(exit|fields|make|replace|buffers|metadata|modules|parameters|version)")
"""Names of Python's and PyTorch's that begin alike, and that classes here have as well."""

PRIVATE: dict[str, int] = {}
"""Private names that files use of classes in others, and how often; a list that may only get shorter."""


def test_private_names_stay_in_their_file():
    used = Counter(name for path in FILES for name in facts(path).foreign if name not in facts(path).private)
    defined = {name for path in FILES for name in facts(path).private}
    found = {name: n for name, n in used.items() if name in defined and not FOREIGN.fullmatch(name)}
    assert found == PRIVATE


ANY = 600
"""How often the packages may say `Any`, whose uses mypy does not compare."""


def test_any_is_rare():
    assert sum(len(re.findall(r"\bAny\b", path.read_text())) for path in FILES) <= ANY
