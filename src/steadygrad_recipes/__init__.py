"""The five training programs that `steadygrad train` runs by name, and the demo. On Guard; the engine imports none.

They are found as anybody's are: by the entry points of the group `steadygrad.recipes`. `RECIPES` says the same in
Python, for a checkout whose metadata is older than its source: an editable install learns of new entry points only
when it is made again.
"""

from __future__ import annotations

RECIPES = {
    "seo": "steadygrad_recipes.seo",
    "clip6d": "steadygrad_recipes.clip6d",
    "cod": "steadygrad_recipes.cod",
    "mmdit": "steadygrad_recipes.mmdit",
    "sft": "steadygrad_recipes.sft",
    "demo": "steadygrad_recipes.demo.telling",
}
"""Name -> module, as in pyproject.toml; a test holds the two together."""
