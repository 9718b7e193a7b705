"""Why an op failed, and code that cures it: a library of entries, one file a family of ops.

`explain` turns a Situation into an Explanation. No torch: an incident can be explained again from its record.
"""

from steadygrad.diagnose.explanations.entry import Explanation
from steadygrad.diagnose.explanations.library import explain

__all__ = ["Explanation", "explain"]
