"""Starts `benchmarks.collectives.run`, where the arguments are described."""

import sys

from .run import main

sys.exit(main())
