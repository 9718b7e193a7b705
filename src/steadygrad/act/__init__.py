"""Verdict -> Outcome. The only package that changes training."""
