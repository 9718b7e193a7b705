"""A class -> its living instances, found among all objects of the process. Reads only.

A program does not hand over its model, its loaders or its wrappers; what Python's garbage collector knows is all there
is. Searched in single calls that no other thread can interrupt, and without a list of all objects: a thread that is
building a tuple from a generator dies of a SystemError if anybody else holds the unfinished tuple meanwhile
(https://bugs.python.org/issue15108).
"""

from __future__ import annotations

import gc
import time
from itertools import chain, compress, starmap, tee
from typing import TypeVar

T = TypeVar("T")
FREE_SECONDS = 3.0
"""CPU seconds of search in a process that count as nothing. One takes 50 ms where half a million objects live."""
SHARE = 0.02
"""Share of the process's time that searches may take beyond that."""

_seconds = 0.0


def is_affordable() -> bool:
    """Return whether a search is worth its time: not for the thousandth optimizer of a process."""
    return _seconds < FREE_SECONDS or _seconds < SHARE * time.process_time()


def list_live(kind: type[T], *, is_exact: bool = False) -> list[T]:
    """Return the instances of a class and of its subclasses. One may be half built, without its attributes.

    `is_exact`: not of its subclasses, which takes less than half the time.
    """
    global _seconds
    start = time.process_time()
    wanted: list[type] = [kind]
    if not is_exact:
        # starmap: all objects are asked for only while the set is being made, within this one call.
        kinds = set(map(type, chain.from_iterable(starmap(gc.get_objects, [()]))))
        wanted = [one for one in kinds if issubclass(one, kind)]
    # An object refers to its type. A list: `*` of a generator would itself be an unfinished tuple, which others find.
    holders = gc.get_referrers(*wanted)
    # By type(): isinstance() would also ask `__class__`, which runs the code of lazy proxies.
    found = [thing for thing in holders if (type(thing) is kind if is_exact else issubclass(type(thing), kind))]
    _seconds += time.process_time() - start
    return found


def list_young(kind: type[T]) -> list[T]:
    """Return the instances that are so new that no full collection has seen them; takes no time worth mentioning."""
    generations = [(0,), (1,)]
    kinds = set(map(type, chain.from_iterable(starmap(gc.get_objects, generations))))
    wanted = {one for one in kinds if issubclass(one, kind)}
    things, same = tee(chain.from_iterable(starmap(gc.get_objects, generations)))
    return list(compress(things, map(wanted.__contains__, map(type, same))))
