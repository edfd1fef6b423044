"""Type checkers accept the packages, and programs that use them: typing/program.py and the code of the pages."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT, pages, read
from support.typed_pages import typed_program

PROGRAM = Path(__file__).parent / "typing" / "program.py"


LEFT_OUT = """\
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="var-annotated,import-untyped,import-not-found"
"""
"""The checks that pages may fail: annotations of their functions and of other libraries."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Files to check: typing/program.py, and a program for each page that has Python code."""
    folder = tmp_path_factory.mktemp("pages")
    found = [folder / PROGRAM.name]
    found[0].write_text(PROGRAM.read_text())
    for page in pages():
        for file in sorted({block.file or "" for block in page.blocks}):
            code = typed_program(page, file or None)
            if code:
                name = page.name.removesuffix("md") + file.removesuffix(".py")
                found.append(folder / (re.sub(r"\W", "_", name.rstrip(".")) + ".py"))
                found[-1].write_text(LEFT_OUT + code)
    return found


def check(command, programs, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-m", *command, *map(str, programs)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.needs("mypy")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy_accepts_the_packages_programs_and_the_documentation(programs):
    """Without mypy's cache from the last run, this takes a minute."""
    check(["mypy", "--strict", "--scripts-are-modules", "bagua_comm", "bagua_torch"], programs, ROOT)


@pytest.mark.needs("pyright")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pyright_accepts_a_program(tmp_path):
    """As editors check it. The pages, which import large libraries, are mypy's."""
    (tmp_path / PROGRAM.name).write_text(PROGRAM.read_text())
    settings = {
        "typeCheckingMode": "basic",
        "extraPaths": [str(ROOT)],
        "reportUnnecessaryTypeIgnoreComment": "error",  # so that what must be refused is refused
        "reportMissingModuleSource": "none",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    check(["pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)], [], tmp_path)


PAGE = """# A title

```python
import numpy as np

x = np.ones(3)
```

Text.

* An item:

  ```python
  def double(y):
      return x * y * factor * epoch


  for epoch in range(3):
      double(epoch)
  ```

```sh
not python
```
"""


def test_the_blocks_of_a_page_are_one_program_with_the_readers_names(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    lines = typed_program(read(page)).split("\n")
    assert lines[0] == "from typing import Any, cast; epoch = cast(Any, 0); factor = cast(Any, 0)"
    assert (lines[3], lines[5], lines[13]) == ("import numpy as np", "x = np.ones(3)", "def double(y):")
    assert "not python" not in lines
    page.write_text("# A title\n\nText.\n")
    assert typed_program(read(page)) == ""
