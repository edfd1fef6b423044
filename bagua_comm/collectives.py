"""The former name of `bagua_comm.averages`; it goes in the next release."""

from . import averages
from .former import former_name_of

__getattr__ = former_name_of(averages, "bagua_comm.collectives")
