"""How Sphinx makes the documentation: `python -m sphinx -W --keep-going docs docs/_build/html`.

Pages are Markdown (MyST). The reference comes from docstrings, which `_extensions/docstrings.py` reads, and the
help of the command line from the commands, by `_extensions/commands.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_extensions")]

import bagua_comm  # noqa: E402 - the one beside these pages, not an installed one

project = "bagua_comm"
author = "the authors of bagua_comm"
project_copyright = "the authors of bagua_comm, MIT licence"
version = release = bagua_comm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "commands",
]
exclude_patterns = ["_build"]
nitpicky = True
INTERNAL = (  # types that signatures name, and that nobody needs to know
    *("After", "AgreedPlan", "ByNode", "Clock", "Dataset", "EdgeReplicas", "Encoding", "EngineRegistry", "Every"),
    *("BoundedCache", "Failure", "Flow", "Gathering", "Hooks", "Hub", "LaneComm", "MeanWeights", "Momentum"),
    *("Order", "Outer", "OuterAlgorithm", "OuterFragment", "ProcessId", "Ranks", "RecordedFailure", "Reducer"),
    *("RendezvousInfo", "Replicas", "Receive", "SampleOrder", "Scheduler", "Session", "Shares"),
    *("SpanContext", "SparseOuter", "Steps", "SupportsDLPack", "TaskFuture", "TorchEngine", "Traced"),
)
# Backticks in docstrings are for code, too, and types may come from libraries that are not described here.
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:.*", r"(?!bagua_(comm|torch)\.).*"),
    ("py:class", rf".*\.(_\w+|[A-Z]|{'|'.join(INTERNAL)})"),
]
default_role = "py:obj"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

autodoc_mock_imports = [
    name for name in ("torch", "lightning", "mpi4py") if importlib.util.find_spec(name) is None
]
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"bagua_comm {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_js_files = ["tables.js"]
html_copy_source = False
html_show_sourcelink = False
