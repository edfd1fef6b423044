"""Exceptions of signal handlers, at every place where Python may raise one."""

import sys


class Interrupt(BaseException):
    """What signal handlers raise here."""


def interrupted_everywhere(call, check):
    """Raise at each place in `call()` where Python may run signal handlers, one after the other.

    It runs them where a function begins, and where one of C has returned. `check()` is called after each. Returns
    how many places there are. Those within an import do not count, whose lock would stay with this thread.
    """
    places = 0
    while True:
        left = places

        def look(frame, event, _):
            nonlocal left
            if event in ("call", "c_return") and not _imports(frame):
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    raise Interrupt

        try:
            sys.setprofile(look)
            call()
        except Interrupt:
            pass
        finally:
            sys.setprofile(None)
        if left >= 0:
            return places
        places += 1
        check()


def _imports(frame):
    """Whether a frame, or one that has called it, is of an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
