"""The guide to training is the example that it explains, and a killed training goes on with other ranks."""

import re
from pathlib import Path

import pytest
from support.launch import run_python

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "train_complete.py"


def lines_of(code):
    return [line for line in code.splitlines() if line.strip()]


def test_the_guide_shows_the_whole_program():
    page = (ROOT / "docs" / "guides" / "train.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    _, _, program = EXAMPLE.read_text().split('"""', 2)
    assert lines_of("".join(blocks)) == lines_of(program)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_continues_with_another_number_of_ranks(tmp_path):
    first = run_python(2, EXAMPLE, "--folder", tmp_path, "--epochs", "2", timeout_s=290)
    assert first.returncode == 0, first.stdout + first.stderr
    second = run_python(3, EXAMPLE, "--folder", tmp_path, "--epochs", "4", timeout_s=290)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resuming after epoch 2, which 2 ranks saved" in second.stderr
    assert re.findall(r"epoch +(\d)", second.stderr) == ["2", "3", "4"]
    assert float(re.search(r"best accuracy ([\d.]+)", second.stderr)[1]) > 0.8
