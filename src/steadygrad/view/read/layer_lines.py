"""Lines of layers.jsonl as the recorder writes them -> names and norms, without building a list for each parameter.

Of the four numbers of a parameter a map needs the first, and whether the third is zero. A line in any other form, with
a value that is not finite or with update ratios, makes the whole batch None: then JSON reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

_STEP, _TABLE = b"step", b"gradients"


@dataclass(frozen=True, slots=True)
class LayerLine:
    """One step: the names of the parameters, and a norm for each."""

    step: int
    names: list[str]
    norms: list[float]


def read_layer_lines(text: bytes) -> list[LayerLine] | None:
    """Return what complete lines hold; None unless every one has the usual form and only finite values."""
    # Splitting at quotes is only right where no name holds an escaped one, hence no backslash anywhere
    if b'"nan"' in text or b'inf"' in text or b"\\" in text or b"update_ratios" in text:
        return None
    found = []
    known: tuple[list[bytes], list[str]] = ([], [])
    for line in text.splitlines():
        words = line.partition(b',"run":')[0].split(b'"')
        # {"step":10,"gradients":{"a":[1.0,0.5,0,0.0],"b":[...]}} is cut into: { step :10, gradients :{ a :[1.0,...], b
        if len(words) < 7 or words[1] != _STEP or words[3] != _TABLE:
            return None
        spelled, cells = words[5::2], words[6::2]
        # The same list again for the same names: LayerMap recognises it by identity and skips its own comparison
        if spelled != known[0]:
            known = (spelled, [name.decode() for name in spelled])
        rows = [cell.split(b",", 3) for cell in cells]
        try:
            if any(row[2] != b"0" for row in rows):  # num_nonfinite
                return None
            norms = [float(row[0][2:]) for row in rows]
            found.append(LayerLine(int(words[2][1:-1]), known[1], norms))
        except (ValueError, IndexError, UnicodeDecodeError):
            return None
    return found
