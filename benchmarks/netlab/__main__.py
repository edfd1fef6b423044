"""Starts `benchmarks.netlab.run`."""

import signal
import sys

from .run import main

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the emulated hosts are removed
sys.exit(main())
