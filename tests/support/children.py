"""Children of a test: forked functions and started programs, whose end is waited for and whose exit code is read.

A child that dies of a signal would else pass in silence, and one that does not end would hold up the suite.
"""

import contextlib
import os
import signal
import subprocess
import traceback
import warnings

from support.waiting import until

LIMIT_S = 60.0
"""How long a child may take to end."""


class Forked:
    """A forked process that calls a function, and ends with the code that it returns or exits with.

    An exception ends it with code 1, and nothing of the interpreter's own end runs. Without a function the child
    goes on as its parent does, with `pid` 0.
    """

    def __init__(self, function, *arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
            self.pid = os.fork()
        if self.pid == 0 and function is not None:
            _run(function, arguments)

    def code(self, limit_s=LIMIT_S):
        """The exit code; minus the number of a signal. A child that takes longer is killed."""
        ended = []

        def has_ended():
            ended[:] = os.waitpid(self.pid, os.WNOHANG)
            return ended[0]

        try:
            until(has_ended, limit_s)
        except BaseException:
            self.kill()
            raise
        return os.waitstatus_to_exitcode(ended[1])

    def kill(self):
        """Kill it, unless it has ended; returns its exit code."""
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def forked(function, *arguments, limit_s=LIMIT_S):
    """Call a function in a forked child, and return its exit code; see `Forked`."""
    return Forked(function, *arguments).code(limit_s)


def _run(function, arguments):
    code = 1
    try:
        code = function(*arguments) or 0
    except SystemExit as exc:
        code = exc.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def started(command, *, code=0, limit_s=LIMIT_S, **settings):
    """Run a program in the body of `with`, which gets its `Popen`; then it must end with this exit code.

    Its input is closed after the body. After an error in the body it is killed.
    """
    with subprocess.Popen(command, **settings) as process:
        try:
            yield process
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            assert process.wait(limit_s) == code
        finally:
            process.kill()
