"""The former name of `bagua_comm.planning.costmodel`; it goes in the next release."""

from .former import former_name_of
from .planning import costmodel

__getattr__ = former_name_of(costmodel, "bagua_comm.costmodel")
