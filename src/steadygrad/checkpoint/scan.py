"""The old path of `steadygrad.scan.checkpoint_scan`."""

from steadygrad.moved import look_up_in

__getattr__ = look_up_in("steadygrad.scan.checkpoint_scan", old=__name__)
