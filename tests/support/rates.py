"""Rates of a cluster whose work takes no time."""

import math

from bagua_comm.planning.costmodel import CodecRates, Rates

INSTANT = CodecRates(math.inf, math.inf, math.inf)
FREE = Rates(INSTANT, INSTANT, math.inf, math.inf, message_s=0, network_s_per_byte=0, polling=0, direct=1, ring=1)
"""Nothing costs anything but the wire."""
