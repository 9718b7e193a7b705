"""The version, readable without installing."""

__version__ = "0.1.0"
