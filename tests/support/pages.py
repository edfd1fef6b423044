"""The Python code on the pages of the documentation, as programs that type checkers read."""

import ast
import builtins
import re
from pathlib import Path

BLOCK = re.compile(r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
ROOT = Path(__file__).parent.parent.parent


def pages():
    """README.md, and all of docs/ if it is there."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def program_of(text):
    """The blocks of a page, one after the other at the lines where they stand; empty if there are none.

    Names that no block defines, or only a later one, are the reader's own: each of them is `Any`.
    """
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first, indent = text.count("\n", 0, block.start()) + 1, len(block["indent"])
        for number, line in enumerate(block["code"].splitlines(), first):
            lines[number] = line[indent:]
    if not any(lines):
        return ""
    own = sorted(_free_names(ast.parse("\n".join(lines))))
    head = "from typing import Any, cast" + "".join(f"; {name} = cast(Any, 0)" for name in own)
    assert not lines[0], "a page begins with its title"
    return "\n".join([head, *lines[1:]]) + "\n"


def _free_names(tree):
    names = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Name)), key=lambda name: name.lineno)
    defined = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    lines = {}
    for node in names:
        lines.setdefault((node.id, isinstance(node.ctx, ast.Load)), node.lineno)
    late = {name for name, loaded in lines if loaded and lines[name, True] < lines.get((name, False), 0)}
    return ({node.id for node in names} - defined) | late
