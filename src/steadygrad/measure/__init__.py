"""Tensors -> Reading. Reads only: nothing in this package changes a tensor that it did not create."""

from steadygrad.measure.check import check_nan_inf
from steadygrad.measure.measurement import Measurement, StepContext
from steadygrad.measure.meter import Meter
from steadygrad.measure.transfer import Ticket, Transfer

__all__ = ["Measurement", "Meter", "StepContext", "Ticket", "Transfer", "check_nan_inf"]
