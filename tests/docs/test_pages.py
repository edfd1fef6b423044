"""The documentation does what it says: its code runs, and its links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import needs
from support.launch import run_python, with_packages
from support.pages import ROOT, pages, read

PAGES = pages()
BLOCKS = [block for page in PAGES for block in page.blocks]
LANGUAGES = {"python", "sh", "text", "toml", "yaml", "dockerfile", "ini", "json"}

PROVIDED = {"bagua_torch": "torch", "examples": "sklearn"}
"""What programs name, and the package that it needs."""

HEAVY = {"torch", "lightning", "transformers", "accelerate"}
"""A program with one of these needs seconds to start, and runs among the slow tests."""


def needed(code):
    """The optional packages that a program or a command uses."""
    names = re.findall(r"^\s*(?:import|from) (\w+)|\b(examples)/", code, re.MULTILINE)
    return {PROVIDED.get(name, name) for pair in names for name in pair} & needs.PACKAGES.keys()


def runnable(value, code, name, slow=True):
    """A test case that is left out where `code` cannot run."""
    packages = needed(code)
    marks = [pytest.mark.needs(*sorted(packages))]
    if slow or packages & HEAVY:
        marks.append(pytest.mark.slow)
    return pytest.param(value, id=name, marks=marks)


TAKES_SECONDS = {"docs/guides/extend.md", "docs/how-it-works/wire-format.md"}
PROGRAMS = [
    runnable(page, page.program, page.name, slow=page.name in TAKES_SECONDS)
    for page in PAGES
    if page.program.strip()
]
FOR_RANKS = [runnable(block, block.code, block.place) for block in BLOCKS if block.ranks and block.reason is None]
COMMANDS = [
    runnable(page, "".join(commands), page.name)
    for page in PAGES
    if (commands := [block.code for block in page.blocks if block.comment == "run"])
]

ROOT_MAY_RUN_MPI = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


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


@pytest.mark.timeout(400)
@pytest.mark.parametrize("block", FOR_RANKS)
def test_a_block_for_several_ranks_runs(block, folder, monkeypatch):
    script = folder / block.page.with_suffix(".py").name
    script.write_text("\n" * (block.line - 1) + block.code)  # so that errors name the page's lines
    monkeypatch.chdir(folder)
    check(run_python(block.ranks, script.name, timeout_s=380), block.place)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_of_a_page_run_one_after_the_other(page, folder):
    env = with_packages() | dict.fromkeys(ROOT_MAY_RUN_MPI, "1")
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])  # `python` is this one
    for block in page.blocks:
        if block.comment == "run":
            command = ["bash", "-euo", "pipefail", "-c", block.code]
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=380, env=env)
            check(result, block.place)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.place for block in BLOCKS])
def test_every_block_has_a_language(block):
    """So that none goes unchecked because of a slip of the pen."""
    assert block.language in LANGUAGES
    if block.language == "python":
        assert block.comment != "run", "python blocks run without this comment"
        assert block.ranks or not re.match(r"# *ranks?\b", block.code), "expected `# ranks: N`"
    if block.comment.startswith(("run", "not run")):
        assert block.comment == "run" or block.reason, "expected `<!-- run -->` or `<!-- not run: reason -->`"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
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
