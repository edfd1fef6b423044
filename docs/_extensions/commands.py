"""For Sphinx: the directive `commands`, a section with the help of each command of `python -m bagua_comm`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]


def help_of(*command: str) -> str:
    """What `python -m bagua_comm COMMAND --help` prints, at most 80 columns wide."""
    found = os.environ.get("PYTHONPATH")
    env = {**os.environ, "COLUMNS": "82", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([found] if found else [])])
    result = subprocess.run(
        [sys.executable, "-m", "bagua_comm", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        check=True,
    )
    return result.stdout


class Commands(SphinxDirective):
    """Says what every command does, in its own words."""

    def run(self) -> list[nodes.Node]:
        """The sections."""
        overview = help_of()
        listed = re.search(r"\{([\w,-]+)\}", overview)
        if listed is None:
            raise self.error(f"no list of commands in the help of bagua_comm:\n{overview}")
        return [self._section(name) for name in listed[1].split(",")]

    def _section(self, name: str) -> nodes.section:
        block = nodes.literal_block("", help_of(name), language="text")
        section = nodes.section("", nodes.title("", "", nodes.literal("", name)), block, ids=[f"command-{name}"])
        self.set_source_info(block)
        return section


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
