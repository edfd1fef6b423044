"""For Sphinx: reads our docstrings as they are written, and finds what their types name."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

OF_ITS_KIND = {
    "Algorithm": {"init", "exchange", "commit", "check", "check_size", "begin", "phase", "phases", "lends"},
    "Average": {"bind", "check"},
}
"""Methods that users never call: described once, where the kind is, and not in each class of that kind."""


def mark_code(app: Sphinx, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Mark what a docstring shows indented, or between fences, as code in the way that Sphinx reads.

    Indented lines are code if they follow an empty line, and before it text that is neither indented nor a list.
    """
    marked: list[str] = []
    before = ""  # the last line with text
    fenced = code = False
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
            marked += [f".. code-block:: {line.strip('` ')}", ""] if fenced else [""]
        elif fenced:
            marked.append("    " + line)
        else:
            if line.startswith("    ") and not code:
                code = marked[-1:] == [""] and before[:1] not in {"", " ", "*", "-", ".", ">"}
                marked += ["::", ""] if code else []
            elif line and not line.startswith("    "):
                code = False
            marked.append(line)
        before = line or before
    lines[:] = marked


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
    app.connect("autodoc-skip-member", leave_out)
    app.connect("missing-reference", find_public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
