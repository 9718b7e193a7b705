"""`steadygrad run`: any unedited training script -> the same script, watched and kept from bad steps.

`launch` runs the script as Python would; when it imports torch, a `Session` hooks into the places that every training
passes: an optimizer is created, backward runs, gradients are clipped, an optimizer steps. Each optimizer has a `Watch`.
What the script prints, returns and raises is unchanged.
"""
