"""A row of a crawler's export (Screaming Frog's columns, and those of tools that copy them) -> features and text.

Such a table has one row per address, with numbers under long names and texts between them. Known numbers become the
features that a page itself would give, other numbers keep their names, texts become words, and the rest is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

ADDRESSES = ("Address", "URL", "Url", "url")
"""A table with one of these columns, and none of `file`, `html` and `features`, is an export."""
TEXTS = ("Title 1", "Meta Description 1", "Meta Keywords 1", "H1-1", "H1-2", "H2-1", "H2-2", "title", "h1")
NUMBERS: dict[str, tuple[str, float]] = {
    "Title 1 Length": ("title_length", 1.0),
    "Meta Description 1 Length": ("meta_description_length", 1.0),
    "Word Count": ("num_words", 1.0),
    "Sentence Count": ("num_sentences", 1.0),
    "Average Words Per Sentence": ("words_per_sentence", 1.0),
    "Flesch Reading Ease Score": ("readability", 1.0),
    "Text Ratio": ("text_ratio", 0.01),
    "Outlinks": ("num_internal_links", 1.0),
    "External Outlinks": ("num_external_links", 1.0),
    "Size (bytes)": ("html_kilobytes", 1 / 1024),
    "Size (Bytes)": ("html_kilobytes", 1 / 1024),
}
"""Column -> our feature, and the factor between their units."""
THOUSANDS = re.compile(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
"""A number whose commas separate thousands."""
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+")
"""A number as spreadsheets of many countries write it; not one of English thousands, which are looked for first."""


def is_export(line: Mapping[str, Any]) -> bool:
    """Whether a row comes from a crawler."""
    return any(name in line for name in ADDRESSES) and not any(name in line for name in ("file", "html", "features"))


def find_fault(line: Mapping[str, Any]) -> str | None:
    """Return why the address is not a page that can be scored; None if it is one."""
    kind, status = str(line.get("Content Type") or "text/html"), str(line.get("Status Code") or "200")
    if "html" not in kind.lower():
        return f"is {kind}, not a page"
    return None if status.startswith("2") else f"was answered with status {status}"


def read_export(line: Mapping[str, Any], *, prefix: str) -> tuple[dict[str, float], str]:
    """Return features and text; columns that begin with `prefix` are scores. ValueError: a number cannot be read."""
    features: dict[str, float] = {}
    for name, value in line.items():
        if name and not name.startswith(prefix) and name not in TEXTS and name not in ADDRESSES:
            number = _as_number(value)
            if number is not None:
                known, factor = NUMBERS.get(name, (name, 1.0))
                features[known] = number * factor
            # Left out, either would count as 0 in silence
            elif value and (name in NUMBERS or DECIMAL_COMMA.fullmatch(_strip(value))):
                raise ValueError(f"{name} is {str(value)[:40]!r}, not a number; decimals have a point")
    return features, " ".join(str(line[name]) for name in TEXTS if line.get(name))


def _strip(value: Any) -> str:
    return str(value).strip().rstrip("%")


def _as_number(value: Any) -> float | None:
    text = _strip(value)
    try:
        number = float(text.replace(",", "") if THOUSANDS.fullmatch(text) else text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
