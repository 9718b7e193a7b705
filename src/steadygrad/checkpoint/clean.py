"""The old path of `steadygrad.scan.clean`."""

from steadygrad.moved import look_up_in

__getattr__ = look_up_in("steadygrad.scan.clean", old=__name__)
