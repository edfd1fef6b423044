"""The documentation does what it says: its code runs, and its links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import run_python, with_packages
from support.pages import ROOT, pages, read

PAGES = pages()
BLOCKS = [block for page in PAGES for block in page.blocks]
LANGUAGES = {"python", "sh", "text", "toml", "yaml", "dockerfile", "ini", "json"}

IMPORTS_MUCH = re.compile(r"^\s*(import|from) (torch|bagua_torch|lightning|transformers|accelerate)\b", re.M)
"""A program with one of these needs seconds to start, and runs among the slow tests."""

PROGRAMS = [
    pytest.param(page, id=page.name, marks=[pytest.mark.slow] if IMPORTS_MUCH.search(page.program) else [])
    for page in PAGES
    if page.program.strip()
]


def each(values):
    return [pytest.param(value, id=value.name if value in PAGES else value.place) for value in values]


@pytest.fixture
def folder(tmp_path):
    """A folder of the test's own to work in, with all that the repository holds."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


def check(result, place):
    text = result.stdout + result.stderr
    assert result.returncode == 0, f"{place} ends with exit code {result.returncode}:\n{text}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_blocks_of_a_page_run_one_after_the_other(page, folder):
    script = folder / page.path.with_suffix(".py").name
    script.write_text(page.program)
    command = [sys.executable, script.name]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=380, env=with_packages())
    line = re.search(rf'File "[^"]*{re.escape(script.name)}", line (\d+)', result.stderr)
    check(result, f"{page.name}:{line[1] if line else 1}")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("block", each(block for block in BLOCKS if block.ranks and block.reason is None))
def test_a_block_for_several_ranks_runs(block, folder, monkeypatch):
    script = folder / block.page.with_suffix(".py").name
    script.write_text("\n" * (block.line - 1) + block.code)  # so that errors name the page's lines
    monkeypatch.chdir(folder)
    check(run_python(block.ranks, script.name, timeout_s=380), block.place)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("block", each(block for block in BLOCKS if block.comment == "run"))
def test_the_commands_of_a_block_run(block, folder):
    env = with_packages()
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])  # `python` is this one
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=380, env=env)
    check(result, block.place)


@pytest.mark.parametrize("block", each(BLOCKS))
def test_every_block_says_what_it_is(block):
    """So that none goes unchecked because of a slip of the pen."""
    assert block.language in LANGUAGES
    if block.language == "python":
        assert block.comment != "run", "python blocks run without this comment"
        assert block.ranks or not re.match(r"# *ranks?\b", block.code), "expected `# ranks: N`"
    if block.comment.startswith(("run", "not run")):
        assert block.comment == "run" or block.reason, "expected `<!-- run -->` or `<!-- not run: reason -->`"


@pytest.mark.parametrize("page", each(PAGES))
def test_links_lead_to_pages_headings_and_files_that_exist(page):
    for line, target in page.links:
        if re.match(r"[a-z]+:", target):
            continue  # `python -m sphinx -b linkcheck docs docs/_build/links` tries these
        place = f"{page.name}:{line}: {target}"
        name, _, anchor = target.partition("#")
        found = (page.path.parent / name).resolve() if name else page.path
        assert found.exists(), f"{place}: there is no such file"
        assert found.is_relative_to(ROOT), f"{place}: leads out of the repository"
        if anchor and found.suffix == ".md":
            anchors = read(found).anchors
            assert anchor in anchors, f"{place}: no such heading; there are {sorted(anchors)}"
