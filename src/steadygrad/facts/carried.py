"""Carried: an object on a log record that any formatter can write: to all but its reader it is a string."""

from __future__ import annotations

from typing import Any, Self


class Carried(str):
    """A text that carries an object. Formatters that write every attribute of a record as JSON write the text.

    >>> import json
    >>> json.dumps({"finding": Carried("nonfinite_loss", object())})
    '{"finding": "nonfinite_loss"}'
    """

    __slots__ = ("value",)
    value: Any

    def __new__(cls, text: str, value: Any) -> Self:
        """Return `text`, with `value` on it."""
        made = super().__new__(cls, text)
        made.value = value
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Log records are copied and sent to other processes, by QueueHandler and SocketHandler."""
        return type(self), (str(self), self.value)


def open_carried(thing: Any) -> Any:
    """Return what is carried; anything else as it is."""
    return thing.value if isinstance(thing, Carried) else thing
