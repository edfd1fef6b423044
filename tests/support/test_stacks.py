"""The report of a test that a time limit has ended."""

import threading

import pytest

from bagua_comm import CommTimeout

from .stacks import stacks_of_others

pytest_plugins = "pytester"


def test_the_stack_of_a_thread_names_its_call():
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(60,), name="one that waits")
    thread.start()
    try:
        found = stacks_of_others()
    finally:
        end.set()
        thread.join()
    assert "one that waits:" in found
    assert "in wait" in found
    assert "in test_the_stack_of_a_thread_names_its_call" not in found


@pytest.mark.parametrize("error", [CommTimeout, TimeoutError, LookupError], ids=lambda e: e.__name__)
def test_only_time_limits_add_stacks(error, pytester):
    pytester.makeconftest("from support.stacks import pytest_runtest_makereport")
    pytester.makepyfile(f"""
        import bagua_comm

        def test_it():
            raise {"bagua_comm." if error is CommTimeout else ""}{error.__name__}("too late")
    """)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    assert ("threads that still run" in result.stdout.str()) == (error is not LookupError)
