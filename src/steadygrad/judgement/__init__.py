"""Judgement: the host's loop. `judgement.py` is its order, `event.py` what comes of one finding."""

from steadygrad.judgement.event import Event
from steadygrad.judgement.judgement import Judgement

__all__ = ["Event", "Judgement"]
