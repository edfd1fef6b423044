"""For Sphinx: reads our docstrings as they are written, and finds what their types name."""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

OF_ITS_KIND = {
    "Algorithm": {
        "init",
        "exchange",
        "commit",
        "check",
        "check_size",
        "begin",
        "communicates",
        "phase",
        "phases",
        "lends",
    },
    "Average": {"bind", "check"},
}
"""Methods that users never call: described once, where the kind is, and not in each class of that kind."""


def mark_code(app: Sphinx, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Mark what a docstring shows indented, or between fences, as code in the way that Sphinx reads.

    Indented lines are code if they follow an empty line, and before it text that is neither indented nor a list.
    """
    marked: list[str] = []
    before = ""  # the last line with text
    while lines:
        line = lines.pop(0)
        if line.lstrip().startswith("```"):
            end = next(i for i, other in enumerate(lines) if other.strip() == "```")
            marked += code_block([f"    {other}" for other in lines[:end]])
            del lines[: end + 1]
        elif line.startswith("    ") and marked[-1:] == [""] and before[:1] not in {"", " ", "*", "-", ".", ">"}:
            end = next((i for i, other in enumerate(lines) if other and not other.startswith("    ")), len(lines))
            marked += code_block([line, *lines[:end]])
            del lines[:end]
        else:
            marked.append(re.sub(r"(?<!`)`(?=\.\w)", "`!", line))  # `.name` is no link: it may mean several
            before = line or before
    lines[:] = marked


def code_block(lines: list[str]) -> list[str]:
    """A block of indented `lines`, as Python if it is."""
    try:
        ast.parse(textwrap.dedent("\n".join(lines)))
    except SyntaxError:
        language = "text"
    else:
        language = "python"
    return [f".. code-block:: {language}", "", *lines, ""]


def show_defaults(
    app: Sphinx, what: str, name: str, member: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Show what a dataclass's field is by default, where its signature says `<factory>`."""
    if signature is None or not dataclasses.is_dataclass(member):
        return None
    for each in dataclasses.fields(member):
        if each.init and each.default_factory is not dataclasses.MISSING:
            signature = signature.replace("<factory>", repr(each.default_factory()), 1)
    return signature, returns


def leave_out(app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leave out of a class what `OF_ITS_KIND` describes."""
    module = getattr(member, "__module__", None) or ""
    kind = "Algorithm" if ".algorithms." in module else "Average" if module == "bagua_comm.averages" else ""
    owner = getattr(member, "__qualname__", "").partition(".")[0]
    return True if owner != kind and name in OF_ITS_KIND.get(kind, ()) else None


def find_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Find `bagua_comm.comm.Communicator`, as a type is called, at `bagua_comm.Communicator`, as users say."""
    package, _, rest = node.get("reftarget", "").partition(".")
    if node.get("refdomain") != "py" or package not in {"bagua_comm", "bagua_torch"}:
        return None
    domain = env.domains.python_domain
    name = rest.rpartition(".")[2]
    for known in (f"{package}.{name}", *sorted(domain.objects)):
        if known in domain.objects and known.startswith(f"{package}.") and known.endswith(f".{name}"):
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", known, node, content)
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", show_defaults)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("missing-reference", find_public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
