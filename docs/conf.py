"""How Sphinx makes the documentation: `python -m sphinx -W --keep-going docs docs/_build/html`.

Pages are Markdown (MyST); the reference comes from docstrings. In a docstring, `name` is code, and a link
where it is a name that the reference describes.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bagua_comm  # noqa: E402 - the one beside these pages, not an installed one

project = "bagua_comm"
author = "the authors of bagua_comm"
project_copyright = "the authors of bagua_comm, MIT licence"
version = release = bagua_comm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# A name in backticks may be an argument or a formula, and types come from libraries that are not described here.
nitpick_ignore_regex = [("py:obj", ".*"), (r"py:(class|data|meth|exc|func)", r"(?!bagua_).*")]
default_role = "py:obj"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

autodoc_mock_imports = [
    name for name in ("torch", "lightning", "mpi4py") if importlib.util.find_spec(name) is None
]
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 80
add_module_names = False

html_theme = "furo"
html_title = f"bagua_comm {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_show_sourcelink = False


OF_A_PROTOCOL = {
    "Algorithm": {"init", "exchange", "commit", "check", "check_size", "begin", "phase", "phases", "lends"},
    "Average": {"bind", "check"},
}
"""What a class of a kind has because all of the kind have it: described once, where the kind is."""


def leave_out_what_the_protocol_says(
    app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any
) -> bool | None:
    """Methods that users never call are shown in `Algorithm` and `Average`, not again in each class."""
    owner = getattr(member, "__qualname__", "").partition(".")[0]
    if owner in OF_A_PROTOCOL or what != "class":
        return None
    module = getattr(member, "__module__", "") or ""
    kind = "Algorithm" if ".algorithms" in module else "Average" if module.endswith(".averages") else None
    return True if kind and name in OF_A_PROTOCOL[kind] else None


def to_its_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Find `bagua_comm.comm.Communicator`, as types are called, under `bagua_comm.Communicator`, as users do."""
    target = node.get("reftarget", "")
    package, _, _ = target.partition(".")
    if node.get("refdomain") != "py" or package not in ("bagua_comm", "bagua_torch"):
        return None
    domain = env.domains.python_domain
    name = target.rpartition(".")[2]
    found = [known for known in domain.objects if known.startswith("bagua_") and known.split(".")[-1] == name]
    if len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, content)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", leave_out_what_the_protocol_says)
    app.connect("missing-reference", to_its_public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
