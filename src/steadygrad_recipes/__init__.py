"""The five training programs that `steadygrad train` runs by name, and the demo. They build on Guard; it imports none.

They are found like anyone else's: through the entry points of the group `steadygrad.recipes`. `RECIPES` repeats them in
Python, for a checkout whose metadata is older than its source: an editable install picks up new entry points only
when it is reinstalled.
"""

from __future__ import annotations

RECIPES = {
    "seo": "steadygrad_recipes.seo",
    "clip6d": "steadygrad_recipes.clip6d",
    "cod": "steadygrad_recipes.cod",
    "mmdit": "steadygrad_recipes.mmdit",
    "sft": "steadygrad_recipes.sft",
    "demo": "steadygrad_recipes.demo.narration",
}
"""Name -> module, as in pyproject.toml; a test keeps the two in step."""
