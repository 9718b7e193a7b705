"""Where people already train: Lightning, transformers and accelerate, each translated into the calls of a Guard.

Translation only: nothing is detected or decided here. Each module needs its library, and says which extra to install
when that is missing. accelerate needs no module of its own: `Guard.from_accelerator`.
"""
