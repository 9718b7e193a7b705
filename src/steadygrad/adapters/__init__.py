"""Adapters for frameworks: Lightning, transformers and accelerate, each translated into calls of a Guard.

Translation only: nothing is detected or decided here. Each module needs its library, and names the extra to install if
that is missing. accelerate does not need its own module: use `Guard.from_accelerator`.
"""
