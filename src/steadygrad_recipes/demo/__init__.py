"""The demo: one small transformer trained twice on the same text with the same faults, without a Guard and with one."""

from steadygrad_recipes.demo.faults import Fault
from steadygrad_recipes.demo.story import Comparison, DemoSettings, Listener, RunSummary, run_demo

__all__ = ["Comparison", "DemoSettings", "Fault", "Listener", "RunSummary", "run_demo"]
