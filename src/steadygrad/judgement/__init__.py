"""Judgement: the host's loop. `judgement.py` defines its order, `event.py` turns findings into incidents."""

from steadygrad.judgement.event import Event
from steadygrad.judgement.judgement import Judgement

__all__ = ["Event", "Judgement"]
