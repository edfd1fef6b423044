"""`interrupted_everywhere` leaves nothing behind."""

import _imp
import importlib
import sys

from support.interrupts import interrupted_everywhere


def test_no_interrupt_leaves_the_lock_of_all_imports_with_this_thread():
    def call():
        sys.modules.pop("colorsys", None)
        importlib.import_module("colorsys")

    interrupted_everywhere(call, lambda: None)
    assert not _imp.lock_held()
