"""A class -> its living instances, found among all objects of the process. Reads only.

A program does not hand over its model, its loaders or its wrappers; what Python's garbage collector knows is all there
is. Searched in single calls that no other thread can interrupt, and without a list of all objects: a thread that is
building a tuple from a generator dies of a SystemError if anybody else holds the unfinished tuple meanwhile
(https://bugs.python.org/issue15108).
"""

from __future__ import annotations

import gc
from itertools import chain, starmap
from typing import TypeVar

T = TypeVar("T")


def list_live(kind: type[T]) -> list[T]:
    """Return the instances of a class and of its subclasses. One may be half built, without its attributes."""
    # starmap: all objects are asked for only while the set is being made, within this one call.
    kinds = set(map(type, chain.from_iterable(starmap(gc.get_objects, [()]))))
    wanted = [one for one in kinds if issubclass(one, kind)]
    # An object refers to its type. A list: `*` of a generator would itself be an unfinished tuple, which others find.
    holders = gc.get_referrers(*wanted)
    # By type(): isinstance() would also ask `__class__`, which runs the code of lazy proxies.
    return [thing for thing in holders if issubclass(type(thing), kind)]
