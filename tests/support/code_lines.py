"""Counts lines of code: neither blank, nor comments, nor docstrings."""

import ast
import functools

OTHERS = {".c": "//", ".cu": "//", ".cuh": "//", ".html": "<!--"}
"""What begins a line that is a comment, by the suffix of files that are not Python's."""


def is_code(path):
    """Whether `count` knows the language of a file."""
    return path.suffix == ".py" or path.suffix in OTHERS


@functools.cache
def count(path):
    """Return the number of lines of code in a file."""
    source = path.read_text()
    documented = set(_docstrings(ast.parse(source).body)) if path.suffix == ".py" else set()
    comments = (OTHERS.get(path.suffix, "#"), "/*", "* ") if path.suffix != ".py" else "#"
    lines = enumerate(map(str.strip, source.splitlines()), start=1)
    return sum(bool(line) and not line.startswith(comments) and n not in documented for n, line in lines)


def _docstrings(statements):
    """The lines of all docstrings, those of attributes too."""
    for node in statements:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                yield from range(node.lineno, node.end_lineno + 1)
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _docstrings(getattr(node, block, ()))
