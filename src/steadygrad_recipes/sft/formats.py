"""A file or folder of rows, in the formats people have -> rows with their place, and a row -> prompt and completion.

JSON lines, a JSON array, CSV and TSV, plain text with a row a line, parquet, and a folder that `datasets` saved. A row
may name its parts prompt and completion, be a chat (`messages`, ShareGPT's `conversations`), Alpaca's instruction,
input and output, a question and its answer, or plain `text`. Imports no torch, and runs no code of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from steadygrad.errors import ConfigError
from steadygrad.extras import import_extra
from steadygrad_recipes.tables import (
    HALF_PAIR,
    parse_json,
    read_csv,
    read_jsonl,
    read_lines,
    require_text,
    require_unicode,
    resolve_inside,
)

PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("input", "output"))
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
"""ShareGPT's names of the speakers -> those of chat templates."""
KNOWN = "`prompt` and `completion`, `messages`, `instruction` and `output`, `question` and `answer`, or `text`"
CHATS = ("messages", "conversations")
"""Names of a chat."""
ENDINGS = ".jsonl, .json, .csv, .tsv, .txt or .parquet, or a folder saved by datasets"

Place = str
Placed = tuple[Place, Any]
"""Where a row is, as an error names it, and the row; an exception where it could not be read."""


def read_rows(path: Path, *, hub: bool = False) -> Iterator[Placed]:
    """Yield the rows at `path`; with `hub`, of a dataset of the hub if nothing is there."""
    if path.is_dir() or (hub and not path.exists()):
        yield from _read_dataset(path)
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
    if reader is not _read_parquet:
        require_text(path)
    yield from reader(path)


def _read_jsonl(path: Path) -> Iterator[Placed]:
    yield from ((f"{path}:{number}", row) for number, row in read_jsonl(path))


def _read_csv(path: Path) -> Iterator[Placed]:
    yield from ((f"{path}:{number}", row) for number, row in read_csv(path))


def _read_text(path: Path) -> Iterator[Placed]:
    for number, line in read_lines(path):
        yield f"{path}:{number}", line if isinstance(line, ValueError) else {"text": line}


def _read_json(path: Path) -> Iterator[Placed]:
    text = path.read_bytes()
    try:
        content = parse_json(text)
    except ValueError as error:
        if "Extra data" in str(error):  # JSON lines under another name
            yield from _read_jsonl(path)
            return
        raise ConfigError(f"{path} is {error}. Give a list of rows, or JSON lines.") from None
    rows = _find_rows(path, content) if isinstance(content, Mapping) else content
    if not isinstance(rows, list):
        raise ConfigError(f"{path} holds {type(content).__name__}, not a list of rows. Give a list of objects.")
    has_halves = HALF_PAIR.search(text) is not None
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", _find_halves(row) or row if has_halves else row


def _find_halves(row: Any) -> ValueError | None:
    try:
        require_unicode(row)
    except ValueError as error:
        return error
    return None


def _find_rows(path: Path, content: Mapping[str, Any]) -> list[Any]:
    """Return the list of rows inside an object, or the object as the only row."""
    lists = {name: value for name, value in content.items() if _holds_rows(value)}
    return lists[_choose_split(path, lists)] if lists else [content]


def _choose_split(path: Path, splits: Mapping[str, Any]) -> str:
    """Return the name of the part to use: the only one, or `train`."""
    if len(splits) > 1 and "train" not in splits:
        raise ConfigError(f"{path} has the parts {', '.join(splits)}, and none is called train. Save one by itself.")
    return "train" if "train" in splits else next(iter(splits))


def _read_parquet(path: Path) -> Iterator[Placed]:
    parquet = import_extra("data", "pyarrow.parquet", what=f"reading {path.name}", error=ConfigError)
    try:
        table = parquet.read_table(path)
        table.validate(full=True)  # text that is not UTF-8 would raise only when it is read
    except Exception as error:  # pyarrow's own kinds of exceptions
        raise ConfigError(f"{path} cannot be read as a parquet file: {spell_reason(error)}. Write it again.") from None
    yield from _number_rows(path, table.to_pylist())


def _read_dataset(path: Path) -> Iterator[Placed]:
    datasets = import_extra("data", "datasets", what=f"reading {path}", error=ConfigError)
    is_saved = path.is_dir()
    try:
        found = _load_saved(datasets, path) if is_saved else datasets.load_dataset(str(path))
    except ConfigError:
        raise
    except Exception as error:  # of the library, of arrow and of the net
        damaged = _find_damaged(datasets, path) if is_saved else None
        if damaged is not None:
            raise ConfigError(
                f"{damaged} cannot be read: {spell_reason(error)}. The file is damaged: write it again."
            ) from None
        how = "a folder saved by datasets' save_to_disk" if is_saved else "a dataset of the hub"
        raise ConfigError(f"{path} is not {how}: {spell_reason(error)}. Give a file ({ENDINGS}).") from None
    if isinstance(found, dict):  # splits by name
        found = found[_choose_split(path, found)]
    yield from _number_rows(path, found)


def _load_saved(datasets: Any, path: Path) -> Any:
    """Return the rows of a saved folder; of its parts only those of the one to use."""
    parts = path / "dataset_dict.json"
    if parts.is_file():
        names = parse_json(parts.read_bytes())["splits"]
        path = resolve_inside(path, _choose_split(path, dict.fromkeys(names)))
    state = path / "state.json"
    if state.is_file() and parse_json(state.read_bytes())["_data_files"] == []:
        return []  # saved without rows, and datasets itself does not load that
    return datasets.load_from_disk(str(path))


def _find_damaged(datasets: Any, path: Path) -> Path | None:
    """Return the first Arrow file in a folder that cannot be opened."""
    for file in sorted(path.rglob("*.arrow")):
        try:
            datasets.Dataset.from_file(str(file))
        except Exception:
            return file
    return None


def _number_rows(path: Path, rows: Any) -> Iterator[Placed]:
    """Yield rows with their numbers, from 1; a damaged file may only show itself here."""
    left = iter(rows)
    number = 1
    while True:
        try:
            row = next(left)
        except StopIteration:
            return
        except Exception as error:  # of arrow
            raise ConfigError(
                f"{path}: row {number} cannot be read: {spell_reason(error)}. The file is damaged: write it again."
            ) from None
        yield f"{path}: row {number}", row
        number += 1


def spell_reason(error: Exception) -> str:
    """Return the first line of an exception's text, without the stop at its end."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")


# --- one row --------------------------------------------------------------------------------------------------------


def find_parts(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return prompt and completion of a row, whatever it calls them; None as prompt means that all text is learned."""
    chat = next((name for name in CHATS if name in row), None)
    if chat is not None:
        return _split_chat(row[chat])
    if "instruction" in row and "output" in row:
        return _join_instruction(row), row["output"]
    for prompt, completion in PAIRS:
        if prompt in row and completion in row:
            return "" if row[prompt] is None else row[prompt], row[completion]
    if "text" in row:
        return None, row["text"]
    if "prompt" in row:
        raise ValueError(f"no `completion`; it has {', '.join(map(str, row))}")
    raise ValueError(f"no {KNOWN}; it has {', '.join(map(str, row)) or 'nothing'}")


def find_prompt(row: Mapping[str, Any]) -> Any:
    """Return what is asked in a row, which may lack the completion; all of a chat that does not end with an answer."""
    for chat in CHATS:
        if isinstance(row.get(chat), list) and row[chat]:
            named = _name_roles(row[chat])
            asked = named[:-1] if named[-1]["role"] == "assistant" and len(named) > 1 else named
            _require_texts(asked)
            return asked
    if "instruction" in row:
        return _join_instruction(row)
    question = next((row[prompt] for prompt, _ in PAIRS if prompt in row), row.get("text"))
    if question is None:
        raise ValueError(
            f"no `prompt`, `messages`, `instruction`, `question`, `input` or `text`; it has {', '.join(map(str, row))}"
        )
    return question


def _join_instruction(row: Mapping[str, Any]) -> str:
    """Return Alpaca's prompt: the instruction, an empty line, the input; either may be empty."""
    parts = [row.get(name) for name in ("instruction", "input")]
    wrong = next((part for part in parts if part is not None and not isinstance(part, str)), None)
    if wrong is not None:
        raise ValueError(f"instruction and input must be text, found {type(wrong).__name__}")
    return "\n\n".join(part for part in parts if part and part.strip())


def _holds_rows(value: Any) -> bool:
    """Whether this is a list of rows; the messages of one row are none."""
    if not isinstance(value, list) or not any(isinstance(one, Mapping) for one in value):
        return False
    return not all(isinstance(one, Mapping) and _is_message(one) for one in value)


def _is_message(value: Mapping[str, Any]) -> bool:
    return {"role", "content"} <= value.keys() or {"from", "value"} <= value.keys()


def _split_chat(value: Any) -> tuple[Any, Any]:
    """Return all messages but the last, and the last one, which must be the assistant's: the others are its prompt."""
    if not isinstance(value, list) or len(value) < 2:
        found = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
        raise ValueError(f"a chat is a list of two or more messages, found {found}")
    messages = _name_roles(value)
    last = messages[-1]
    if last["role"] != "assistant":
        raise ValueError(f"the last message is {last['role']}'s; there is no answer of the assistant to learn")
    if last.get("tool_calls"):
        raise ValueError("the answer of the assistant calls tools, which cannot be learned here")
    _require_texts(messages)
    return messages[:-1], last["content"]


def _name_roles(messages: list[Any]) -> list[dict[str, Any]]:
    """Return messages with the names that chat templates know; whatever else they have stays."""
    named = []
    for one in messages:
        if not isinstance(one, Mapping) or not _is_message(one):
            raise ValueError("a message needs `role` and `content`, or ShareGPT's `from` and `value`")
        # Arrow gives every message every key, most of them None
        rest = {name: value for name, value in one.items() if name not in ("from", "value") and value is not None}
        role = one.get("role") or one.get("from")
        if not isinstance(role, str):
            raise ValueError(f"the role of a message is {type(role).__name__}, not text")
        named.append({**rest, "role": ROLES.get(role, role), "content": one.get("content", one.get("value"))})
    return named


def _require_texts(messages: list[dict[str, Any]]) -> None:
    """Raise ValueError for a content that is a list of parts, or null beside tool calls."""
    for number, one in enumerate(messages, start=1):
        if not isinstance(one["content"], str):
            found = type(one["content"]).__name__
            raise ValueError(f"the content of message {number}, of {one['role']}, is {found}, not text")
