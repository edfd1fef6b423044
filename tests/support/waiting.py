"""Wait for a condition, in place of a sleep of fixed length."""

import time

PAUSE_S = 0.005


def until(condition, limit_s=30):
    """Call `condition` until it returns something true, and return that; fail after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{condition} was still {found!r} after {limit_s} s"
        time.sleep(PAUSE_S)  # sleeps: a condition of any other kind has no event
    return found
