"""The documentation does what it says: its code runs, and its links lead somewhere."""

import re
import subprocess
import sys

import pytest
from support import needs
from support.launch import as_typed, clone, with_packages
from support.pages import ROOT, commands_of_examples, pages, read

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
FOR_RANKS = [
    runnable(block, block.code, block.place)
    for block in BLOCKS
    if block.ranks and block.reason is None and not block.saved
]
COMMANDS = [
    runnable(page, "\n".join(step.code for step in page.steps), page.name) for page in PAGES if page.steps
]
OF_EXAMPLES = commands_of_examples()

ELSEWHERE = re.compile(r"python3 -m venv |\. \.venv/bin/activate$|(\w+=\S+ )?pip install |python -m pytest\b")
"""Commands that fetch packages, or run this suite. CI runs README's, and `tests/extras.py` tests each extra."""


TYPED_ELSEWHERE = {("README.md", "torchrun --nproc-per-node 2 train.py"): "docs/quickstart/pytorch.md"}
"""Commands that start a program once more, by another launcher, and the page that starts one like it so."""


@pytest.fixture
def folder(tmp_path):
    """A folder of the test's own to work in, with all that the repository holds."""
    return clone(tmp_path)


def check(result, place):
    text = result.stdout + result.stderr
    assert result.returncode == 0, f"{place} ends with exit code {result.returncode}:\n{text}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_blocks_of_a_page_run_one_after_the_other(page, folder):
    script = folder / "first.py"
    script.write_text(page.program)
    command = [sys.executable, script.name]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=380, env=with_packages())
    line = re.search(rf'File "[^"]*{re.escape(script.name)}", line (\d+)', result.stderr)
    check(result, f"{page.name}:{line[1] if line else 1}")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("block", FOR_RANKS)
def test_a_block_for_several_ranks_runs(block, folder):
    """By the command of docs/quickstart/index.md."""
    (folder / "first.py").write_text("\n" * (block.line - 1) + block.code)  # so that errors name the page's lines
    check(as_typed(f"bagua run -n {block.ranks} first.py", folder, timeout_s=380), block.place)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", COMMANDS)
def test_a_page_does_what_its_reader_does(page, folder):
    """Save the programs and type the commands, in the order of the page."""
    for step in page.steps:
        if (page.name, step.code) in TYPED_ELSEWHERE:
            continue
        if step.name is None:
            check(as_typed(step.code, folder, timeout_s=380), f"{page.name}:{step.line}")
        else:
            with (folder / step.name).open("a") as file:
                file.write(step.code)


def test_every_block_has_a_language():
    """So that none goes unchecked because of a slip of the pen."""
    examples = {command for commands in OF_EXAMPLES.values() for command in commands}
    for block in BLOCKS:
        place = block.place
        assert block.language in LANGUAGES, place
        if block.language == "python":
            assert block.comment != "run", f"{place}: python blocks run without this comment"
            assert block.ranks or not re.match(r"# *ranks?\b", block.code), f"{place}: expected `# ranks: N`"
        said = block.comment.startswith(("run", "not run", "save", "example"))
        known = block.comment == "run" or block.reason or block.saved or block.example
        wanted = "`<!-- run -->`, or `not run: reason`, `save: name` or `example: path`"
        assert known or not said, f"{place}: expected {wanted}"
        assert not re.search(r"\b(slow|long|hours?|minutes?)\b", block.reason or ""), (
            f"{place}: expected another reason"
        )
        if block.language == "sh" and not known:
            rest = [line for line in block.commands if not ELSEWHERE.match(line) and line not in examples]
            assert not rest, f"{place}: expected `<!-- run -->`, or a command from the docstring of an example"


def test_a_program_that_is_saved_is_started_as_the_page_says():
    for page in PAGES:
        commands = [step.code for step in page.steps if step.name is None]
        for block in page.blocks:
            if block.saved:
                starts = [line for line in "\n".join(commands).splitlines() if block.saved in line.split()]
                assert starts, f"{block.place}: no command starts {block.saved}"
                if block.ranks:
                    assert any(f"-n {block.ranks} " in line for line in starts), (
                        f"{block.place}: expected -n {block.ranks}"
                    )


@pytest.mark.parametrize("example", OF_EXAMPLES)
def test_blocks_of_an_example_are_its_code(example):
    path = f"examples/{example}.py"
    shown = "".join(block.code for block in BLOCKS if block.example == path)
    if shown:
        _, _, code = (ROOT / path).read_text().split('"""', 2)
        assert shown.split() == code.split()
    assert {block.example for block in BLOCKS} <= {None, *(f"examples/{name}.py" for name in OF_EXAMPLES)}


def test_links_lead_to_pages_headings_and_files_that_exist():
    for page in PAGES:
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
