import ast
from pathlib import Path

import pytest

from support.waiting import until

TESTS = Path(__file__).parents[1]


def test_it_returns_the_value_of_the_condition():
    found = iter([0, None, "", 3])
    assert until(lambda: next(found)) == 3


def test_it_fails_after_its_limit_with_the_last_value():
    with pytest.raises(AssertionError, match=r"was still \[\] after 0.02 s"):
        until(list, limit_s=0.02)


def test_no_test_sleeps_without_a_reason():
    """A comment `# sleeps: ...` gives it, unless a lambda delays a function that the test replaces."""
    silent = []
    for path in TESTS.rglob("*.py"):
        source = path.read_text()
        lines = source.splitlines() if "sleep(" in source else []
        if all("# sleeps: " in line or "lambda" in line for line in lines if "sleep(" in line):
            continue  # most files: to parse them takes longest
        silent += [
            f"{path.relative_to(TESTS)}:{call.lineno}"
            for call in ast.walk(ast.parse(source))
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("time.sleep", "sleep")
            if "# sleeps: " not in (line := lines[call.lineno - 1]) and "lambda" not in line
        ]
    assert silent == []
