"""Calls of MPI that may wait forever: the package makes them only where something ends the wait."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import bagua_comm

PACKAGE = Path(bagua_comm.__file__).parent

TIMED = {"in_time", "limit", "Deadline"}
"""Functions that end the wait of what they are given, or of what their `with` block does. A function of ours that
is used in such places alone may wait as well."""

ACCEPTED = {
    ("transports/mpi/failure_detector.py", "everyone.Free"): "of a group, which is this process' own",
    ("transports/mpi/failure_detector.py", "members.Free"): "of a group, which is this process' own",
    ("elastic/mpi/processes.py", "group.Free"): "of a group, which is this process' own",
    ("transports/mpi/messages.py", "inactive.Free"): "of a persistent receive, which MPI frees at once",
    ("transports/mpi/world.py", "comm.Split_type"): "whoever calls first_beside ends the wait",
    ("transports/mpi/world.py", "each.Free"): "the same",
    ("bootstrap/rank_exit.py", "self.library.MPI_Finalize"): "at exit, when all ranks have left",
    ("bootstrap/rank_exit.py", "library.MPI_Finalize"): "at exit, while another thread watches",
}
"""Calls that may block elsewhere, with the reason."""

WAITING = {
    "Comm",
    "Intracomm",
    "Topocomm",
    "Cartcomm",
    "Intercomm",
    "Request",
    "Message",
    "Win",
    "File",
    "Session",
}
"""Classes of mpi4py whose methods may wait, as may functions of the module."""

LOCAL = {
    *("Abort", "Revoke", "Ack_failed", "Cancel", "cancel", "Compare", "Clone", "Reduce_local", "Call_errhandler"),
    *("Create_errhandler", "Create_keyval", "Free_keyval", "Delete_attr", "Attach_buffer", "Shared_query"),
    *("Compute_dims", "Query_thread", "Pcontrol", "Wtime", "Wtick", "Alloc_mem", "Free_mem", "Attach", "Detach"),
    "Start",
}
"""Methods that wait for no process. (`Abort` ends this one.)"""


def waiting_names():
    """The names of mpi4py that may wait: all that are not known not to."""
    stub = Path(importlib.util.find_spec("mpi4py").origin).with_name("MPI.pyi")
    names = set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name in WAITING:
            names |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    prompt = (
        "_",
        "Get_",
        "Set_",
        "Is_",
        "Add_",
        "Remove_",
        "Aint_",
        "Test",
        "test",
        "get_",
        "from",
        "to",
        "f2",
        "py2",
    )
    return {
        name
        for name in names - LOCAL
        if not name.startswith(prompt)
        and not (name[0] in "Ii" and {name[1].upper() + name[2:], name[1:]} & names)
        and not name.endswith("_init")
    }


NAMES = waiting_names()


class Module:
    """The places at which a module may wait for MPI."""

    def __init__(self, source):
        self.tree = ast.parse(source)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.Import)]
        self.libraries = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
        self.of_mpi = self._of_mpi()
        self.timed = self._timed_functions()

    def waits(self):
        """(Line, text) of what may wait, where nothing ends the wait."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and self.may_wait(node) and not self.is_timed(node):
                yield node.lineno, ast.unparse(node)

    def may_wait(self, node):
        name = node.attr.removeprefix("MPI_")
        if name not in NAMES or self.root(node) in self.libraries - {"mpi4py"}:
            return False
        # Methods of ours have the names of mpi4py's, but no capitals.
        return name[0].isupper() or self.is_mpi(node.value)

    @staticmethod
    def root(node):
        while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return node.id if isinstance(node, ast.Name) else None

    def is_mpi(self, node):
        """Whether an expression is a communicator, or another object of MPI."""
        text = ast.unparse(node)
        return self.root(node) in ("MPI", "mpi") or "COMM_" in text or text in self.of_mpi

    def _of_mpi(self):
        """Names and attributes that are given objects of MPI somewhere in the module."""
        self.of_mpi = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg) and node.annotation and "MPI." in ast.unparse(node.annotation):
                self.of_mpi.add(node.arg)
        while True:
            known = set(self.of_mpi)
            for node in ast.walk(self.tree):
                if not isinstance(node, ast.Assign):
                    continue
                value = node.value
                makes = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
                made = makes and value.func.attr[0].isupper() and self.is_mpi(value.func.value)
                if made or (not isinstance(value, ast.Call) and self.is_mpi(value)):
                    for target in node.targets:
                        parts = target.elts if isinstance(target, ast.Tuple) else [target]
                        self.of_mpi |= {ast.unparse(part) for part in parts}
            if known == self.of_mpi:
                return known

    def _timed_functions(self):
        """Functions that are used only where something ends the wait."""
        self.timed = set()
        uses = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                uses.setdefault(node.id if isinstance(node, ast.Name) else node.attr, []).append(node)
        names = {node.name for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}
        while True:
            known = set(self.timed)
            self.timed |= {name for name in names & set(uses) if all(map(self.is_timed, uses[name]))}
            if known == self.timed:
                return known

    def is_timed(self, node):
        """Whether a node is given to one of `TIMED`, or lies in its `with` block or in a function of `timed`."""
        child = node
        while child in self.parents:
            parent = self.parents[child]
            if isinstance(parent, ast.Call) and child is not parent.func and self._name(parent.func) in TIMED:
                return True
            if isinstance(parent, ast.With) and child in parent.body:
                calls = [item.context_expr for item in parent.items]
                if any(isinstance(call, ast.Call) and self._name(call.func) in TIMED for call in calls):
                    return True
            if isinstance(parent, ast.FunctionDef) and parent.name in self.timed:
                return True
            child = parent
        return False

    @staticmethod
    def _name(function):
        return getattr(function, "attr", getattr(function, "id", None))


FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if re.search(r"^ *(from|import) +mpi4py\b", path.read_text(), re.MULTILINE)
]


def test_the_modules_that_use_mpi_are_found():
    found = {path.relative_to(PACKAGE).as_posix() for path in FILES}
    assert {"bootstrap/mpi_start.py", "transports/mpi/transport.py"} <= found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_waits_for_mpi_without_an_end(path):
    file = path.relative_to(PACKAGE).as_posix()
    found = [
        f"{file}:{line}: {text}"
        for line, text in Module(path.read_text()).waits()
        if (file, text) not in ACCEPTED
    ]
    assert not found, (
        f"these may wait forever; make them by {sorted(TIMED)}, or a call that does not block: {found}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "MPI.COMM_WORLD.Barrier()",
        "comm = MPI.COMM_WORLD.Dup()",
        "self._comm.Split(1, 0)",
        "make(self._comm.Dup)",
        "make(lambda: comm.Shrink())",
        "here = MPI.COMM_WORLD.Split_type(0)\nhere.bcast(1)",
        "def f(comm: MPI.Comm):\n    self._comm = comm\n    self._comm.allgather(1)",
        "comm, request = MPI.COMM_WORLD.Idup()\nrequest.wait()",
        "request.Waitall(requests)",
        "MPI.Finalize()",
        "library.MPI_Init_thread()",
        "with other(comm):\n    comm.Free()",
        "def f():\n    comm.Agree(1)\nin_time(f)\nf()",
        "in_time.Split(comm.Split)\ncomm.Recv(x)",
    ],
)
def test_calls_that_wait_are_found(source):
    assert list(Module(source).waits())


@pytest.mark.parametrize(
    "source",
    [
        "comm.Ibarrier()",
        "comm.Iallreduce(MPI.IN_PLACE, x, MPI.MIN)",
        "request.Test()",
        "comm.Get_rank()",
        "comm.Improbe(0, 1, status)",
        "transport.allgather(x, out)",
        "self.barrier()",
        "import threading\nlock = threading.Lock()",
        "in_time(comm.Shrink, 1.0, 'shrink')",
        "make(lambda: in_time(lambda: comm.Split(1, 0), 3))",
        "with ending.limit(wait):\n    here = MPI.COMM_WORLD.Split_type(0)\n    here.bcast(1)",
        "def f():\n    comm.Agree(1)\nin_time(f)",
        "def start(library):\n    library.MPI_Init_thread()\nwith limit(3):\n    start(library)",
        "comm.Abort(1)",
    ],
)
def test_other_calls_are_not(source):
    assert not list(Module(source).waits())
