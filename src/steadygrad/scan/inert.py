"""A pickle -> what it describes, without running any of it.

An interpreter of pickle's opcodes that can build containers, numbers and text, and nothing else: a name of a class or
function stays a Name, and calling one gives a Call that only remembers its arguments. A few names of torch, numpy and
the standard library that stand for plain data are known. Every other one is a stranger: an object that a class of the
user's holds data in, which can be left out, or something that would run, so that a refusal can say what. Time and
memory are bounded by the length of the pickle: keys are hashed only when they are flat and short, since the hash of a
tuple of tuples of itself never ends, and no more elements are copied than the pickle has bytes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, BinaryIO

DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, MemoryError, Warning)
"""What reading nonsense can raise; pickletools warns of odd escapes, which some programs turn into errors."""
MAX_SHOWN = 100
"""Characters of a call's arguments."""
MAX_PARTS = 100
"""Parts of a key: a tuple is hashed again each time it is used as one."""
CONTAINERS = {"builtins.set", "builtins.frozenset", "builtins.list", "builtins.tuple", "torch.Size"}
DICTS = {"collections.OrderedDict", "collections.defaultdict", "collections.Counter", "builtins.dict"}


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function, by name only."""

    module: str
    name: str

    def __str__(self) -> str:
        text = f"{self.module}.{self.name}"
        return text if text.isprintable() else repr(text)  # it is shown to people, on terminals


@dataclass(eq=False, slots=True)
class Call:
    """What calling `name` with `arguments` would have made, and the state it would have been given."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)
    """What was appended to it."""


@dataclass(eq=False, slots=True)
class Storage:
    """A stretch of bytes that the pickle refers to by key. `kind` is None for an untyped one, counted in bytes."""

    key: str
    kind: str | None
    size: int


class BrokenPickle(ValueError):
    """The bytes are not a pickle of data; the message says where."""


class Use(Enum):
    """What a pickle does with a name."""

    NAMED = "named"
    """It only refers to it."""
    MADE = "made"
    """It makes an empty object of that class and fills in its attributes; no code of the class's own is asked for."""
    CALLED = "called"


@dataclass(slots=True)
class Pickle:
    """What was read: the value, what it wanted to run, and what was left out."""

    value: Any
    wanted: list[str]
    left_out: list[str] = field(default_factory=list)
    """Names of classes that were not known, whose objects are Calls."""


@dataclass(slots=True)
class Interpreter:
    """One run over one pickle; `persist` turns a persistent id into a value."""

    knows: Callable[[str], bool]
    persist: Callable[[Any], Any]
    may_leave: Callable[[str, Use], bool] = lambda _name, _use: False
    """Whether an unknown name that is used like this can be left out."""
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    wanted: dict[str, None] = field(default_factory=dict)
    strangers: dict[str, None] = field(default_factory=dict)
    num_read: int = 0
    """Bytes of the pickle before this opcode."""
    num_copied: int = 0
    """Elements of containers that calls have copied."""

    def run(self, stream: BinaryIO) -> Pickle:
        """Interpret up to STOP and leave `stream` behind it. BrokenPickle for everything that does not fit."""
        position, start = 0, stream.tell()
        try:
            for opcode, argument, place in pickletools.genops(stream):
                position = place or 0
                self.num_read = position - start
                # Not beyond it: the older format has several pickles in one stream
                if opcode.name == "STOP":
                    return Pickle(self.stack.pop(), list(self.wanted), list(self.strangers))
                self._execute(opcode.name, argument)
        except BrokenPickle:
            raise
        except DAMAGE as error:
            raise BrokenPickle(f"broken at byte {position} of the pickle ({type(error).__name__}: {error})") from error
        raise BrokenPickle("the pickle has no end")

    def _execute(self, name: str, argument: Any) -> None:
        if name in CONSTANTS:
            self.stack.append(CONSTANTS[name]())
        elif name in LITERALS:
            self.stack.append(argument)
        elif name in STEPS:
            STEPS[name](self, argument)
        elif name not in NOTHING_TO_DO:
            # Refused, not skipped: EXT1 to EXT4 and NEXT_BUFFER obtain objects from outside the file
            raise BrokenPickle(f"opcode {name} belongs to no pickle of plain data")

    def pop_to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def refer(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise BrokenPickle("a global whose name is not text")
        found = Name(module, name)
        if not self.knows(str(found)):
            # Collected, not raised at once, so that a refusal names everything; the name is never imported
            known = self.strangers if self.may_leave(str(found), Use.NAMED) else self.wanted
            known.setdefault(str(found))
        self.stack.append(found)

    def call(self, function: Any, arguments: Any, use: Use = Use.CALLED) -> None:
        if not isinstance(arguments, tuple):
            raise BrokenPickle("a call whose arguments are not a tuple")
        if not isinstance(function, Name):
            raise BrokenPickle(f"a call of a {type(function).__name__}")
        # A name that was harmless to mention may not be to call
        is_stranger = str(function) in self.strangers and not self.may_leave(str(function), use)
        if str(function) in self.wanted or is_stranger:
            self.wanted.pop(str(function), None)
            self.wanted.setdefault(f"{function}({_show(arguments)})")
        if str(function) in CONTAINERS | DICTS:
            self.copy(*(one for one in arguments if isinstance(one, list | tuple | dict)))
        self.stack.append(_make(str(function), arguments))

    def copy(self, *containers: Collection[Any]) -> None:
        """Count what is about to be copied, and refuse more than a program's pickle can need.

        Such a pickle writes a container for the call that copies it, with a byte or more for each element; only a
        hostile one copies the same container again and again.
        """
        self.num_copied += sum(len(one) for one in containers)
        if self.num_copied > self.num_read:
            raise BrokenPickle(f"{self.num_read} bytes that make {self.num_copied} copies of elements")


def read_pickle(
    stream: BinaryIO,
    knows: Callable[[str], bool],
    persist: Callable[[Any], Any],
    may_leave: Callable[[str, Use], bool] = lambda _name, _use: False,
) -> Pickle:
    """Return the inert value of the next pickle; names that `knows` does not know are collected, never looked up."""
    return Interpreter(knows, persist, may_leave).run(stream)


def _make(name: str, arguments: tuple[Any, ...]) -> Any:
    """Plain containers are made, everything else is only remembered."""
    if name in DICTS:
        first = arguments[-1] if arguments and name != "collections.defaultdict" else ()
        pairs = first.items() if isinstance(first, dict) else first
        return {_check_key(key): value for key, value in pairs}
    # A set becomes a list: hashing what is in it could run forever
    if name in CONTAINERS:
        items = arguments[0] if arguments else ()
        if not isinstance(items, list | tuple):
            raise BrokenPickle(f"{name} of a {type(items).__name__}")
        return tuple(items) if name in {"torch.Size", "builtins.tuple"} else list(items)
    return Call(name, arguments)


def _check_key(key: Any) -> Any:
    flat = key if isinstance(key, tuple) else (key,)
    if len(flat) > MAX_PARTS:
        raise BrokenPickle(f"a key of {len(flat)} parts")
    if all(part is None or isinstance(part, str | bytes | int | float | bool | Call | Name) for part in flat):
        return key
    raise BrokenPickle(f"a key that is a {type(key).__name__}")


def _show(arguments: tuple[Any, ...]) -> str:
    """Return arguments for a person; only plain ones, since showing a nested one may never end."""
    starts = (one[:MAX_SHOWN] if isinstance(one, str | bytes) else one for one in arguments[:4])
    shown = (repr(one) if isinstance(one, str | bytes | int | float | bool | None) else "..." for one in starts)
    text = ", ".join(shown)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# --- opcodes ------------------------------------------------------------------------------------------------------

CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": list,  # never hashed
}
# No BYTEARRAY8 and no PERSID: what is not listed in these tables is refused
LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
NOTHING_TO_DO = {"PROTO", "FRAME"}


def _mark(machine: Interpreter, _: Any) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _tuple_of(count: int) -> Callable[[Interpreter, Any], None]:
    def build(machine: Interpreter, _: Any) -> None:
        items = [machine.stack.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(items)))

    return build


def _tuple(machine: Interpreter, _: Any) -> None:
    items = machine.pop_to_mark()
    machine.stack.append(tuple(items))


def _list(machine: Interpreter, _: Any) -> None:
    items = machine.pop_to_mark()
    machine.stack.append(items)


def _dict(machine: Interpreter, _: Any) -> None:
    items = machine.pop_to_mark()
    machine.stack.append({_check_key(key): value for key, value in zip(items[::2], items[1::2])})


def _append(machine: Interpreter, _: Any) -> None:
    item = machine.stack.pop()
    _extend(machine.stack[-1], [item])


def _appends(machine: Interpreter, _: Any) -> None:
    items = machine.pop_to_mark()
    _extend(machine.stack[-1], items)


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Call):
        target.items.extend(items)
    else:
        raise BrokenPickle(f"items for a {type(target).__name__}")


def _set_item(machine: Interpreter, _: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine.stack[-1], [key, value])


def _set_items(machine: Interpreter, _: Any) -> None:
    items = machine.pop_to_mark()
    _update(machine.stack[-1], items)


def _update(target: Any, items: list[Any]) -> None:
    pairs = {_check_key(key): value for key, value in zip(items[::2], items[1::2])}
    if isinstance(target, dict):
        target.update(pairs)
    elif isinstance(target, Call):
        target.items.append(pairs)
    else:
        raise BrokenPickle(f"keys for a {type(target).__name__}")


def _put(machine: Interpreter, argument: Any) -> None:
    machine.memo[len(machine.memo) if argument is None else int(argument)] = machine.stack[-1]  # None: MEMOIZE


def _get(machine: Interpreter, argument: Any) -> None:
    machine.stack.append(machine.memo[int(argument)])


def _global(machine: Interpreter, argument: Any) -> None:
    module, name = str(argument).split(" ", 1)
    machine.refer(module, name)


def _stack_global(machine: Interpreter, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.refer(module, name)


def _reduce(machine: Interpreter, _: Any) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    machine.call(function, arguments)


def _new_object(machine: Interpreter, _: Any) -> None:
    arguments, kind = machine.stack.pop(), machine.stack.pop()
    machine.call(kind, arguments, Use.MADE)


def _new_object_with_keywords(machine: Interpreter, _: Any) -> None:
    keywords, arguments, kind = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.copy(arguments)
    machine.call(kind, (*arguments, keywords), Use.MADE)


def _instance(machine: Interpreter, argument: Any) -> None:
    arguments = machine.pop_to_mark()
    _global(machine, argument)
    machine.call(machine.stack.pop(), tuple(arguments))


def _object(machine: Interpreter, _: Any) -> None:
    kind, *arguments = machine.pop_to_mark()
    machine.call(kind, tuple(arguments))


def _build(machine: Interpreter, _: Any) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, Call):
        target.state = state  # attributes of a plain container, such as a state_dict's _metadata, hold no tensor


def _persist(machine: Interpreter, _: Any) -> None:
    machine.stack.append(machine.persist(machine.stack.pop()))


def _duplicate(machine: Interpreter, _: Any) -> None:
    machine.stack.append(machine.stack[-1])


def _pop(machine: Interpreter, argument: Any) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        _pop_mark(machine, argument)


def _pop_mark(machine: Interpreter, _: Any) -> None:
    machine.pop_to_mark()


STEPS: dict[str, Callable[[Interpreter, Any], None]] = {
    "MARK": _mark,
    "TUPLE": _tuple,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "LIST": _list,
    "DICT": _dict,
    "FROZENSET": _list,
    "APPEND": _append,
    "APPENDS": _appends,
    "ADDITEMS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _put,
    "GET": _get,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _new_object,
    "NEWOBJ_EX": _new_object_with_keywords,
    "INST": _instance,
    "OBJ": _object,
    "BUILD": _build,
    "BINPERSID": _persist,
    "DUP": _duplicate,
    "POP": _pop,
    "POP_MARK": _pop_mark,
}
