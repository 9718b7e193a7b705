"""Tensors -> Reading. Reads only: nothing in this package changes a tensor that it did not create."""

from steadygrad.measure.check import check_nan_inf
from steadygrad.measure.meter import Measurement, Meter, StepContext
from steadygrad.measure.transfer import Ticket, Transfer

__all__ = ["Measurement", "Meter", "StepContext", "Ticket", "Transfer", "check_nan_inf"]
