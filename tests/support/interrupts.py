"""Exceptions of signal handlers, at every place where Python may raise one."""

import sys


class Interrupt(BaseException):
    """The exception that signal handlers raise in these tests."""


def interrupted_everywhere(call, check):
    """Raise at each place in `call()` where Python may run signal handlers, one place at a time.

    These are the beginnings of functions of Python and the returns of functions of C, except in imports, where
    the thread would keep the lock of the import. `check()` is called after each interrupt.

    Returns:
        The number of places.
    """
    places, here = 0, sys._getframe()
    while True:
        left = places

        def look(frame, event, _):
            nonlocal left
            if event in ("call", "c_return") and not _imports(frame, here):
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


def _imports(frame, end):
    """Whether a frame, or one that has called it, is of an import; of those that `end` has called."""
    while frame is not end and frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
