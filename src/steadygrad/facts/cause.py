"""`Cause`: what a diagnosis found, and how to format it as text.

For text use its `headline` or `str()`, so that terminal and log agree. Nothing here looks for a cause: that is
`diagnose`.
"""

from __future__ import annotations

from dataclasses import dataclass

from steadygrad.facts.card import show_card

UNNAMED = (" argument", " outside the step")
"""How the name of a tensor ends when the program has no name for it: 'the first argument'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What caused it: the op, line, module, ranges of its inputs, samples. `str()` formats all of it."""

    kind: str
    """'nan' or 'inf': the value that arose, in backward what the gradients hold; 'error': the step raised an error;
    'exploding', 'vanishing', 'dead': finite but wrong; 'unknown': no diagnosis was possible, `note` says why."""
    phase: str
    """'input', 'parameter', 'forward', 'backward' or 'optimizer'; 'unknown'."""
    op: str | None = None
    """In backward: the forward op whose derivative failed. 'input' or 'parameter' for what was bad on arrival."""
    module: str | None = None
    """Qualified name in the model; '' is the model itself, None is code outside any module."""
    file: str | None = None
    line: int | None = None
    source: str | None = None
    inputs: tuple[str, ...] = ()
    explanation: str = ""
    fixes: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    """Path from where the value arose to where it did harm."""
    reproducible: str | None = None
    """Result of a second replay."""
    symptom: str = ""
    """What was seen: 'NaN loss', 'Inf gradient'."""
    name: str = ""
    """Name of the explanation, such as 'sqrt_at_zero'; for an input, parameter or buffer, its own name."""
    node: str | None = None
    """The autograd node that was running."""
    caller: str | None = None
    """The user's line that called into a library: 'train.py:12   loss = model(x)'."""
    samples: tuple[int, ...] = ()
    """Indices in the batch."""
    samples_note: str = ""
    """How many of how many, and what is special about them; or why that is unknown."""
    terms: tuple[str, ...] = ()
    """The terms of the loss, the bad ones first."""
    growth: float | None = None
    """Exploding or vanishing: factor per layer."""
    step: int | None = None
    rank: int | None = None
    batch: str | None = None
    """Where the batch was stored, inside the run directory."""
    note: str = ""
    """What limits this diagnosis."""
    in_custom_backward: bool | None = None
    """True where the op itself failed, in the program's own backward or hook, and not its derivative; else None."""

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"  {name:<8} {text}" for name, text in self.rows())])

    def _repr_html_(self) -> str:
        return show_card(self.headline, self.kind, self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Return name and text of everything that is known, in the order in which it is read."""
        known = (
            ("module", None if self.module is None else self.module or "(the model itself)"),
            ("line", self._spell_line()),
            ("called", self.caller),
            *(("input", text) for text in self.inputs),
            ("why", self.explanation),
            ("terms", " | ".join(self.terms)),
            ("samples", self.samples_note),
            ("chain", " > ".join(self.chain)),
            ("fixes", " | ".join(self.fixes)),
            ("again", self.reproducible),
            ("batch", self.batch),
            ("note", self.note),
        )
        return [(name, text) for name, text in known if text]

    @property
    def identity(self) -> tuple[str | int | None, ...]:
        """What two causes have in common that are one bug: kind, op and line, not the numbers of one step."""
        reason = self.note if self.phase == "unknown" else ""
        return self.kind, self.phase, self.op, self.name, self.module, self.file, self.line, self.rank, reason

    @property
    def brief(self) -> str:
        """One line with the place: 'step 5: NaN loss, born in aten.sqrt, model.py:41'."""
        place = self._spell_place()
        return self.headline if place is None or place in self.headline else f"{self.headline}, {place}"

    def refer_to(self, step: int) -> str:
        """One line for a cause that an earlier step had already."""
        same = "for the same reason as" if self.phase == "unknown" else "the same cause as"
        return f"{self.brief}: {same} at step {step}"

    @property
    def headline(self) -> str:
        """One line: what was seen, and where it arose."""
        step = "" if self.step is None else f"step {self.step}: "
        rank = "" if self.rank is None else f"rank {self.rank}: "
        what = self.symptom or self.kind
        if self.phase in ("input", "parameter"):
            return f"{step}{rank}{what}, already in {name_holder(self.phase, self.name)}"
        if self.op is None:
            return f"{step}{rank}{what}"
        return f"{step}{rank}{what}, born in {name_birthplace(self.phase, self.op, self.in_custom_backward)}"

    def _spell_place(self) -> str | None:
        return None if self.file is None else f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}"

    def _spell_line(self) -> str | None:
        place = self._spell_place()
        return None if place is None else f"{place}   {self.source or ''}".rstrip()


def name_birthplace(phase: str, op: str, in_custom_backward: object) -> str:
    """Return where a bad value was born: 'aten.log', 'the backward of aten.sqrt', "the optimizer's aten.div"."""
    if in_custom_backward:
        return f"{op} in a custom backward or hook"
    return {"backward": "the backward of ", "optimizer": "the optimizer's "}.get(phase, "") + op


def name_holder(phase: str, name: str) -> str:
    """Return what held a bad value before the step: "the input batch['image']", 'the first argument'."""
    return name if name.endswith(UNNAMED) else f"the {phase} {name}".rstrip()
