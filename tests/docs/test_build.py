"""Sphinx makes the documentation, and has nothing to complain of: every name and page that is linked exists."""

import subprocess
import sys

import pytest
from support.launch import with_packages
from support.pages import ROOT


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.needs("furo", "lightning", "myst_parser", "sphinx", "sphinx_copybutton", "torch")
def test_the_documentation_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "read"]
    result = subprocess.run(
        [*command, ROOT / "docs", tmp_path / "html"],
        capture_output=True,
        text=True,
        timeout=380,
        env=with_packages(),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "html" / "reference" / "communicator.html").read_text().count('id="bagua_comm.') > 20
