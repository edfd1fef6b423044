"""The former name of `bagua_comm.planning.tuner`; it goes in the next release."""

from .former import former_name_of
from .planning import tuner

__getattr__ = former_name_of(tuner, "bagua_comm.tuner")
