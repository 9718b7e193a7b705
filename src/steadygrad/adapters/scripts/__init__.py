"""`steadygrad run`: a training script of any kind, unedited -> the same script, watched and kept from bad steps.

`launch` runs the script as Python would; when it imports torch, a `Session` ties itself to the places that every
training passes: an optimizer is made, backward runs, gradients are clipped, an optimizer steps. Each optimizer has a
`Watch`. What the script prints, returns and raises stays its own.
"""
