"""Healthy but unusual trainings: whatever their loss looks like, a Guard has nothing to do in them.

`catalogue.SCENARIOS` has them all; `scenario.py` says what one is and runs it, plain and guarded.
"""
