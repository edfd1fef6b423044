"""Tests that need a missing package are skipped, or fail where CI is set."""

import pytest

from support import needs

pytest_plugins = "pytester"


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a suite that can do without `absent_package`, with environment variables."""
    monkeypatch.setitem(needs.PACKAGES, "absent_package", "fast")
    pytester.makeini("[pytest]\nmarkers =\n    needs: left out\n")
    pytester.makepyfile(
        ours="import absent_package\n",
        test_file="import ours\n\ndef test_never_seen(): pass\n",
        test_marked="import pytest\n@pytest.mark.needs('absent_package')\ndef test_x(): raise AssertionError\n",
        test_asks="from support import needs\ndef test_x(): needs.package('absent_package').anything()\n",
        test_other="def test_x(): pass\n",
    )

    def run(**environment):
        for name in ("CI", "BAGUA_TEST_COMPLETE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return pytester.runpytest_inprocess("--continue-on-collection-errors", plugins=[needs])

    return run


@pytest.mark.parametrize(
    "environment", [pytest.param({}, marks=pytest.mark.slow), {"CI": "true", "BAGUA_TEST_COMPLETE": "0"}]
)
def test_a_test_that_needs_a_missing_package_is_skipped_with_the_reason(run, environment):
    result = run(**environment)
    result.assert_outcomes(passed=1, skipped=3)
    result.stdout.fnmatch_lines(
        [
            "*left out, for packages that are not installed*",
            "absent_package: 1 module and 2 tests; pip install -e '.[[]fast]'",
            "All of them: pip install -e '.[[]test]'",
        ]
    )


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"BAGUA_TEST_COMPLETE": "1"}])
def test_where_everything_must_run_a_missing_package_is_an_error(run, environment):
    result = run(**environment)
    result.assert_outcomes(passed=1, failed=1, errors=2)
    result.stdout.fnmatch_lines(["*No module named 'absent_package'*"])
    result.stdout.no_fnmatch_line("*left out*")


def test_a_package_that_is_installed_and_broken_is_no_reason_to_leave_tests_out(run, pytester):
    pytester.makepyfile(absent_package="import another_package\n")
    run().assert_outcomes(passed=1, failed=2, errors=1)  # a marked test runs: it does not import the package


def test_a_module_that_was_imported_by_half_is_not_found_by_the_next_import(pytester, monkeypatch):
    monkeypatch.setitem(needs.PACKAGES, "absent_package", "fast")
    monkeypatch.setenv("BAGUA_TEST_COMPLETE", "0")
    pytester.makepyfile(
        ours="import absent_package\n",
        test_ours="import pytest\ndef test_x():\n    with pytest.raises(ImportError): import ours\n",
    )
    result = pytester.runpytest_inprocess("--doctest-modules", "--import-mode=importlib", plugins=[needs])
    result.assert_outcomes(passed=1, skipped=1)


def test_a_package_must_be_listed_with_its_extra():
    with pytest.raises(ValueError, match="'os' is not in PACKAGES"):
        needs.package("os")
