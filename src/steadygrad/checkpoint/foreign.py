"""The old path of `steadygrad.scan.foreign`."""

from steadygrad.moved import look_up_in

__getattr__ = look_up_in("steadygrad.scan.foreign", old=__name__)
