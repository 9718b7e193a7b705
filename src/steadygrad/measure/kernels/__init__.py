"""Three implementations of one table of gradient statistics; `reference.py` is the specification."""
