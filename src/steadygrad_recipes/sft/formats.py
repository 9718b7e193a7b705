"""A file or folder of rows, in the formats people have -> rows with their place, and a row -> prompt and completion.

JSON lines, a JSON array, CSV and TSV, plain text with a row a line, parquet, and a folder that `datasets` saved. A row
may name its parts prompt and completion, be a chat (`messages`, ShareGPT's `conversations`), Alpaca's instruction,
input and output, a question and its answer, or plain `text`. Imports no torch, and runs no code of a file.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from steadygrad.errors import ConfigError
from steadygrad.extras import import_extra

PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("input", "output"))
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
"""ShareGPT's names of the speakers -> those of chat templates."""
KNOWN = "`prompt` and `completion`, `messages`, `instruction` and `output`, `question` and `answer`, or `text`"
CHATS = (("messages", "role", "content"), ("conversations", "from", "value"))
"""Names of a chat, and of the author and the text of a message in it."""
ENDINGS = ".jsonl, .json, .csv, .tsv, .txt or .parquet, or a folder saved by datasets"

Place = str
Placed = tuple[Place, Any]
"""Where a row is, as an error names it, and the row; an exception where it could not be read."""


def read_rows(path: Path, *, hub: bool = False) -> Iterator[Placed]:
    """Yield the rows at `path`; with `hub`, of a dataset of the hub if nothing is there."""
    if path.is_dir() or (hub and not path.exists()):
        yield from _read_dataset(path, hub=hub)
        return
    if not path.is_file():
        raise ConfigError(f"{path} does not exist. Give a file ({ENDINGS}), or --hub for a name on the hub.")
    readers: dict[str, Callable[[Path], Iterator[Placed]]] = {
        ".json": _read_json,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".txt": _read_text,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower(), _read_jsonl)
    with path.open("rb") as file:
        if reader is not _read_parquet and b"\0" in file.read(4096):
            raise ConfigError(f"{path} is not text in UTF-8: it has zero bytes. Give a file ({ENDINGS}).")
    yield from reader(path)


def _read_jsonl(path: Path) -> Iterator[Placed]:
    """Lines are read as bytes, so that one that is not UTF-8 does not affect the others."""
    with path.open("rb") as file:
        yield from ((f"{path}:{number}", line) for number, line in enumerate(file, start=1) if line.strip())


def _read_json(path: Path) -> Iterator[Placed]:
    try:
        content = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":  # JSON lines under another name
            yield from _read_jsonl(path)
            return
        raise ConfigError(f"{path} is not JSON in UTF-8: {error}. Give a list of rows, or JSON lines.") from None
    rows = content if isinstance(content, list) else None
    if isinstance(content, dict):
        lists = (value for value in content.values() if isinstance(value, list))
        rows = next((value for value in lists if not _is_chat(value)), [content])
    if rows is None:
        raise ConfigError(f"{path} holds {type(content).__name__}, not a list of rows. Give a list of objects.")
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))


def _read_csv(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(1 << 27)  # process-wide; the default of 128 KiB is too small for long answers
    with path.open(encoding="utf-8-sig", newline="") as file:  # Excel begins a file with a byte order mark
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            for row in reader:
                place, extra = f"{path}:{reader.line_num}", [cell for cell in row.pop(None, []) if cell]
                # A comma in a text without quotes: what is behind it would be lost
                fault = ValueError(f"more cells than the header's {len(row)}: {extra[0][:20]!r}") if extra else None
                yield place, {name: cell for name, cell in row.items() if cell} if fault is None else fault
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path}:{reader.line_num + 1}: not CSV in UTF-8: {error}. Save it again.") from None


def _read_text(path: Path) -> Iterator[Placed]:
    # As bytes: text would also be split at U+2028 and the like
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", {"text": line.decode()}
            except UnicodeDecodeError:
                yield f"{path}:{number}", ValueError("no UTF-8 text")


def _read_parquet(path: Path) -> Iterator[Placed]:
    parquet = import_extra("data", "pyarrow.parquet", what=f"reading {path.name}", error=ConfigError)
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow's own kinds of exceptions
        raise ConfigError(f"{path} is not a parquet file: {error}. Write it again.") from None
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(table.to_pylist(), start=1))


def _read_dataset(path: Path, *, hub: bool) -> Iterator[Placed]:
    datasets = import_extra("data", "datasets", what=f"reading {path}", error=ConfigError)
    try:
        found = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.load_dataset(str(path))
    except Exception as error:  # of the library, of arrow and of the net
        how = "a folder saved by datasets' save_to_disk" if not hub or path.is_dir() else "a dataset of the hub"
        raise ConfigError(f"{path} is not {how}: {str(error).splitlines()[0]}. Give a file ({ENDINGS}).") from None
    if isinstance(found, dict):  # splits by name
        found = found["train"] if "train" in found else next(iter(found.values()))
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(found, start=1))


# --- one row --------------------------------------------------------------------------------------------------------


def find_parts(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return prompt and completion of a row, whatever it calls them; an empty prompt means that all text is learned."""
    for chat, author, said in CHATS:
        if chat in row:
            return _split_chat(row[chat], author, said)
    if "instruction" in row and "output" in row:
        extra = str(row.get("input") or "").strip()
        return (f"{row['instruction']}\n\n{extra}" if extra else row["instruction"]), row["output"]
    for prompt, completion in PAIRS:
        if prompt in row and completion in row:
            return row[prompt], row[completion]
    if "text" in row:
        return None, row["text"]
    if "prompt" in row:
        raise ValueError(f"no `completion`; it has {', '.join(map(str, row))}")
    raise ValueError(f"no {KNOWN}; it has {', '.join(map(str, row)) or 'nothing'}")


def find_prompt(row: Mapping[str, Any]) -> Any:
    """Return what is asked in a row, which may lack the completion; all of a chat that does not end with an answer."""
    for chat, author, said in CHATS:
        messages = row.get(chat)
        if isinstance(messages, list) and messages and all(isinstance(one, Mapping) for one in messages):
            named = _name_roles(messages, author, said)
            return named[:-1] if named[-1]["role"] == "assistant" and len(named) > 1 else named
    if "instruction" in row:
        return find_parts({**row, "output": ""})[0]
    asked = next((row[prompt] for prompt, _ in PAIRS if prompt in row), row.get("text"))
    if asked is None:
        raise ValueError(
            f"no `prompt`, `messages`, `instruction`, `question`, `input` or `text`; it has {', '.join(row)}"
        )
    return asked


def _is_chat(value: list[Any]) -> bool:
    """Whether these are messages of one row, not rows."""
    named = (all(isinstance(one, Mapping) and {*names} <= one.keys() for one in value) for _, *names in CHATS)
    return bool(value) and any(named)


def _split_chat(value: Any, author: str, said: str) -> tuple[Any, Any]:
    """Return all messages but the last, and the last one, which must be the assistant's: the others are its prompt."""
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(one, Mapping) for one in value):
        found = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
        raise ValueError(f"a chat is a list of two or more messages, found {found}")
    messages = _name_roles(value, author, said)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"the last message is {messages[-1]['role']}'s; there is no answer of the assistant to learn")
    return messages[:-1], messages[-1]["content"]


def _name_roles(messages: list[Any], author: str, said: str) -> list[dict[str, Any]]:
    """Return messages with the names that chat templates know."""
    return [
        {"role": ROLES.get(str(one.get(author)), str(one.get(author))), "content": one.get(said)} for one in messages
    ]
