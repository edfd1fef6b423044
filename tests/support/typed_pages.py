"""The Python code of a page as a program that type checkers read."""

import ast
import builtins


def typed_program(page, file=None):
    """All python blocks of a page, one after the other at the lines where they stand; empty if there are none.

    With `file`, the blocks that a reader saves as this file, or that are parts of this example; else all others.
    Names that no block defines, or only a later one, are the reader's own: each of them is `Any`.
    """
    blocks = [block for block in page.blocks if block.language == "python" and block.file == file]
    if not blocks:
        return ""
    lines = [""] * (page.prose.count("\n") + 1)
    for block in blocks:
        code = block.code.splitlines()
        lines[block.line - 1 : block.line - 1 + len(code)] = code
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
