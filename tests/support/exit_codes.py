"""Finds the places in a program where a child process is started and nothing looks at how it ended."""

import ast
import functools
import textwrap

STARTS = ("subprocess.run(", "subprocess.Popen(", ".Process(", "os.fork", "os.wait")
"""One of these is in the text of a program that starts a child or waits for one."""

WAITS = {"wait", "waitpid", "waitid", "poll"}
"""Methods and functions whose result tells how a child has ended."""


def may_start(text):
    """Whether a program may start children, by its text."""
    return any(word in text for word in STARTS)


def unread(source):
    """Return `(line, what)` of each child in this source whose exit code is not read.

    A program that the source holds as a string, to be run by another process, is looked at as well.
    """
    found = []
    for node in _nodes(source):
        if isinstance(node, ast.Call) and (what := _unread(node)):
            found.append((node.lineno, what))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "os.fork()" in node.value:
            found += [(node.lineno, what) for _, what in _unread_in_text(node.value)]
    return found


def forks(source):
    """Return the lines of this source that call os.fork."""
    calls = [node for node in _nodes(source) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if _name(call) in ("os.fork", "os.forkpty")]


@functools.lru_cache(maxsize=1)
def _nodes(source):
    """All nodes of the functions and classes of a program that may start a child; they know their parents."""
    tree, lines = ast.parse(source), source.split("\n")
    nodes = [each for each in tree.body if may_start("\n".join(lines[each.lineno - 1 : each.end_lineno]))]
    for node in nodes:
        node.parent = tree
    for node in nodes:  # which grows
        for child in ast.iter_child_nodes(node):
            child.parent = node
            nodes.append(child)
    return nodes


def _unread_in_text(text):
    try:
        return unread(textwrap.dedent(text))
    except SyntaxError:
        return []  # words, or a part of a program


def _unread(call):
    """What is wrong with this call, or ""."""
    name, is_dropped = _name(call), isinstance(call.parent, ast.Expr)
    if name in ("os.waitpid", "os.wait") and is_dropped:
        return f"the status that {name} returns is dropped"
    if _last(call) == "Process" and _imports_multiprocessing(call) and not _is_read(call):
        return f"nothing reads the exit code of {name}"
    if name in ("subprocess.run", "subprocess.Popen") and not _checks(call) and not _is_read(call):
        return f"nothing reads the exit code of {name}"
    return ""


def _is_read(call):
    """Whether the function around a call, or its caller, may read the exit code."""
    parent = call.parent
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("returncode", *WAITS)
    if isinstance(parent, ast.Return | ast.Lambda):
        return True
    around = _function(call)
    calls = [node for node in ast.walk(around) if isinstance(node, ast.Call)]
    given = {name.id for each in calls for name in _names([_value(argument) for argument in each.args])}
    return any(_reads(node) for node in ast.walk(around)) or any(name.id in given for name in _targets(call))


def _imports_multiprocessing(node):
    while hasattr(node, "parent"):
        node = node.parent
    return any(isinstance(each, ast.Import) and "multiprocessing" in ast.unparse(each) for each in node.body)


def _reads(node):
    if isinstance(node, ast.Attribute) and node.attr in ("returncode", "check_returncode", "exitcode"):
        return True
    return isinstance(node, ast.Call) and _last(node) in WAITS and not isinstance(node.parent, ast.Expr)


def _targets(call):
    """The names that stand for the result of a call."""
    if isinstance(call.parent, ast.NamedExpr):
        return [call.parent.target]
    if isinstance(call.parent, ast.Assign):
        return _names(call.parent.targets)
    return _names([call.parent.optional_vars]) if isinstance(call.parent, ast.withitem) else []


def _value(node):
    return node.target if isinstance(node, ast.NamedExpr) else node


def _names(nodes):
    return [node for node in nodes if isinstance(node, ast.Name)]


def _function(node):
    """The outermost class or function around a node, or the program."""
    around = []
    while hasattr(node, "parent"):
        node = node.parent
        around.append(node)
    return next(
        (each for each in reversed(around) if isinstance(each, ast.ClassDef | ast.FunctionDef)), around[-1]
    )


def _checks(call):
    return any(each.arg == "check" for each in call.keywords)  # False is a decision, too


def _name(call):
    return ast.unparse(call.func) if isinstance(call.func, ast.Attribute) else ""


def _last(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
