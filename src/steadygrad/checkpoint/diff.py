"""The old path of `steadygrad.scan.diff`."""

from steadygrad.moved import look_up_in

__getattr__ = look_up_in("steadygrad.scan.diff", old=__name__)
