"""The nouns that pass between the stages: plain numbers, frozen, no torch.

A `Reading` is what was measured at one optimizer step, and the other Facts what was seen around it; a `Finding` is
what a rule says about Facts; a `Cause` is what caused it; a `Verdict` is what to do and why; an `Outcome` is what was
done; an `Incident` joins them for the record; a `StepRecord` is one step's scalars. Nothing here computes anything
beyond its own fields. Import them from here, not from the files.
"""

from steadygrad.facts.cause import Cause, name_birthplace, name_holder
from steadygrad.facts.incident import (
    Action,
    Evidence,
    Finding,
    Incident,
    Number,
    Outcome,
    Severity,
    Verdict,
)
from steadygrad.facts.looks import (
    ActionTaken,
    ActivationScan,
    ActivationStats,
    Broadcast,
    EpochEnd,
    Fact,
    Flush,
    GraphScan,
    InputScan,
    InputStats,
    ParameterScan,
    Validation,
)
from steadygrad.facts.program_scans import (
    CallScan,
    Load,
    MaskChange,
    Misspelt,
    ModelScan,
    PrecisionScan,
    RankScan,
    RankWait,
)
from steadygrad.facts.proof import Answer, Proof
from steadygrad.facts.reading import (
    NUM_COLUMNS,
    GradientStats,
    GradientTable,
    Reading,
    StepRecord,
)

__all__ = [
    "NUM_COLUMNS",
    "Action",
    "ActionTaken",
    "ActivationScan",
    "ActivationStats",
    "Answer",
    "Broadcast",
    "CallScan",
    "Cause",
    "EpochEnd",
    "Evidence",
    "Fact",
    "Finding",
    "Flush",
    "GradientStats",
    "GradientTable",
    "GraphScan",
    "Incident",
    "InputScan",
    "InputStats",
    "Load",
    "MaskChange",
    "Misspelt",
    "ModelScan",
    "Number",
    "Outcome",
    "ParameterScan",
    "PrecisionScan",
    "Proof",
    "RankScan",
    "RankWait",
    "Reading",
    "Severity",
    "StepRecord",
    "Validation",
    "Verdict",
    "name_birthplace",
    "name_holder",
]
