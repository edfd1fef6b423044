"""Releases: one version everywhere, and complete packages."""

import importlib
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import numpy as np
import pytest
from support import needs

import bagua_comm

ROOT = Path(__file__).parent.parent


def entries_of(changelog):
    """The headings of the second level: (version, date)."""
    return re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changelog, re.MULTILINE)


def test_the_changelog_begins_with_unreleased_changes_and_then_this_version():
    entries = entries_of((ROOT / "CHANGELOG.md").read_text())
    assert entries[0] == ("Unreleased", "")
    assert entries[1][0] == bagua_comm.__version__
    dates = [date for _, date in entries[1:]]
    assert all(dates)
    assert dates == sorted(dates, reverse=True)


def test_the_changelog_has_the_sections_of_its_format_each_at_most_once_in_a_version():
    for text in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        sections = re.findall(r"^### (.+)$", text, re.MULTILINE)
        assert {*sections} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
        assert len({*sections}) == len(sections)


def test_an_unreleased_change_is_one_short_line_of_the_changelog():
    unreleased = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    lines = [line for line in unreleased.splitlines()[1:] if line and not line.startswith("### ")]
    assert [line for line in lines if not line.startswith("* ") or len(line) > 160] == []


def test_the_changelog_is_short():
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 120


def test_links_of_the_changelog_lead_to_pages():
    links = re.findall(r"\]\((docs/[^)#]+)", (ROOT / "CHANGELOG.md").read_text())
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_citation_is_valid_and_of_this_version():
    citation = needs.package("yaml").safe_load((ROOT / "CITATION.cff").read_text())

    assert {"authors", "cff-version", "message", "title"} <= citation.keys()  # as version 1.2.0 requires
    assert citation["cff-version"] == "1.2.0"
    works = [citation, *citation["references"]]
    assert all({"authors", "title", "type"} <= work.keys() for work in citation["references"])
    people = [author for work in works for author in work["authors"]]
    assert all({*author} in ({"name"}, {"family-names", "given-names"}) for author in people)
    assert citation["license"] == "MIT"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert (citation["version"], str(citation["date-released"])) == entries_of(changelog)[1]
    assert citation["version"] == bagua_comm.__version__


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, built from a copy: the sdist first, and the wheel from it."""
    needs.package("build")
    needs.package("hatchling")
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.needs("twine")
def test_an_index_would_accept_the_packages(built):
    command = [sys.executable, "-m", "twine", "check", "--strict", *built]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


@pytest.fixture(scope="module")
def metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(wheel.read(name))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_is_pure_and_holds_both_packages_and_nothing_else(built):
    wheel, _ = built
    assert wheel.name == f"bagua_comm-{bagua_comm.__version__}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    suffixes = {".py", ".c", ".cu", ".cuh", ".typed", ".html"}
    files = [path for package in ("bagua_comm", "bagua_torch") for path in (ROOT / package).rglob("*")]
    assert names == {str(path.relative_to(ROOT)) for path in files if path.suffix in suffixes}
    assert {"bagua_comm/py.typed", "bagua_torch/py.typed", "bagua_comm/kernels/device/minmax.cu"} <= names
    assert "bagua_comm/net/plugin.c" in names


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sdist_has_all_files_for_building_and_testing(built):
    _, sdist = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    top = [
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "pyproject.toml",
    ]
    assert {*top, "bagua_comm/kernels/device/minmax.cu", "examples/train.py", "benchmarks/figures.py"} <= names
    assert {"tests/conftest.py", "tests/golden/minmax.json", "tests/cuda_on_cpu/cuda_on_cpu.h"} <= names
    names.remove(".gitignore")  # it excludes files from the wheel
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|^\.", name)]
    assert sdist.stat().st_size < 5e6


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_metadata_is_complete(metadata):
    assert metadata["Name"] == "bagua-comm"
    assert metadata["Version"] == bagua_comm.__version__
    assert metadata["Author"] == "The bagua_comm authors"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10"
    assert len(metadata["Summary"]) < 512
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.match(r"[\w-]+", line)[0] for line in needed] == ["ml-dtypes", "mpi4py", "numpy"]
    extras = {
        "cuda12",
        "cuda13",
        "data",
        "docs",
        "examples",
        "fast",
        "lightning",
        "mpi",
        "test",
        "test-core",
        "torch",
    }
    assert extras <= {*metadata.get_all("Provides-Extra")}
    known = needs.package("trove_classifiers").classifiers
    assert {*metadata.get_all("Classifier")} <= known


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_description_is_the_readme_and_renders_as_package_indexes_do_it(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload(decode=True).decode()
    assert text == (ROOT / "README.md").read_text()
    needs.package("readme_renderer")
    html = importlib.import_module("readme_renderer.markdown").render(text)
    assert "<h1" in html
    assert "<pre" in html


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    """It uses the dependencies of this environment, so that nothing is fetched."""
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", built[0]]
    subprocess.run(pip, check=True, timeout=200)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    # At the end of the path: where this environment has the library as well, that of the wheel is found first.
    (packages / "dependencies.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    code = (
        "import bagua_comm, numpy as np, sys\n"
        "from importlib import metadata\n"
        "from bagua_comm.testing import run_ranks\n"
        "assert bagua_comm.__file__.startswith(sys.prefix), bagua_comm.__file__\n"
        "assert metadata.version('bagua-comm') == bagua_comm.__version__\n"
        "print(*run_ranks(2, lambda comm: comm.allreduce(np.ones(2) + comm.rank)))"
    )
    run = [python, "-I", "-c", code]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[3. 3.] [3. 3.]\n", done.stderr
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [tmp_path / "bin" / "bagua", "info"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert bagua_comm.__version__ in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
