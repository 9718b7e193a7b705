"""A suspicion on finite numbers -> proof or acquittal, by the paired test. Reads only: everything is put back."""

from steadygrad.prove.prover import Prover

__all__ = ["Prover"]
