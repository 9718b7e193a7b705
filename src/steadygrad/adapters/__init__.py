"""Adapters for frameworks: Lightning, transformers and torchtitan, each translated into calls of a Guard.

Translation only: nothing is detected or decided here. Each module needs its library, and names the extra to install if
that is missing. accelerate and DeepSpeed need no module of their own: use `Guard.from_accelerator` and
`Guard.from_deepspeed`.
"""
