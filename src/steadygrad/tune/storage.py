"""Where a search keeps its trials -> Optuna's study there, checked to belong to the same tuning.

The place is a database URL, `journal:FILE` for a file on a network file system, or by default SQLite in the run
directory. The study also holds the request, so that workers with another request are refused rather than mixed in.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra

STUDY = "steadygrad"
JOURNAL = "journal:"
REQUEST = "request"
BUSY_SECONDS = 60
"""How long SQLite waits for another worker's write; its default of 5 is too short for many workers on a slow disk."""
NUM_TRIES = 5
"""Attempts to open the storage: workers that create its tables at the same moment can collide."""


def open_study(
    storage: str | None,
    run_dir: Path,
    request: Mapping[str, Any],
    *,
    name: str | None = None,
    resume: bool = False,
    seed: int | None = 0,
) -> Any:
    """Open or create the study; raise UsageError if that fails, or if it belongs to another tuning."""
    optuna = import_extra("tune", "optuna", what="a search", error=UsageError)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = storage if storage is not None else f"sqlite:///{run_dir / 'tune.db'}"
    settings = {
        "study_name": name or STUDY,
        "sampler": optuna.samplers.TPESampler(seed=seed, n_startup_trials=6),
        "pruner": optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3),
        "load_if_exists": True,
    }
    study = _try_to_open(optuna, url, settings)
    _check_request(study, hide_password(url), request, resume=resume)  # the URL may be printed
    return study


def _try_to_open(optuna: Any, url: str, settings: Mapping[str, Any]) -> Any:
    failure: Exception | None = None
    for i in range(NUM_TRIES):
        try:
            return optuna.create_study(storage=_open_storage(optuna, url), **settings)
        except Exception as error:  # from whatever driver the URL names
            failure = error
            time.sleep(0.1 * i)
    said = next(iter(str(failure).splitlines()), type(failure).__name__)
    raise UsageError(
        f"the storage {hide_password(url)} cannot be used: {said}. Give one such as sqlite:///tune.db, "
        f"{JOURNAL}/shared/tune.log or postgresql://user@host/name."
    ) from failure


def _open_storage(optuna: Any, url: str) -> Any:
    if url.startswith(JOURNAL):
        backend = optuna.storages.journal.JournalFileBackend(url.removeprefix(JOURNAL))
        return optuna.storages.JournalStorage(backend)
    options = {"connect_args": {"timeout": BUSY_SECONDS}} if is_sqlite(url) else {}
    return optuna.storages.RDBStorage(url, engine_kwargs=options)


def is_sqlite(url: str) -> bool:
    """Return whether a URL names SQLite, whose locks a network file system may not honour."""
    return url.startswith("sqlite:")


def hide_password(url: str) -> str:
    """Return a URL with its password hidden.

    >>> hide_password("postgresql://me:secret@host/name")
    'postgresql://me:***@host/name'
    """
    return re.sub(r"(?<=://)([^:/@]*):[^@]*@", r"\1:***@", url)


def _check_request(study: Any, where: str, request: Mapping[str, Any], *, resume: bool) -> None:
    held = study.user_attrs.get(REQUEST)
    if held is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(REQUEST, json.dumps(request))
        return
    if held is None:
        raise UsageError(
            f"{where} holds a study {study.study_name!r} of another program. Use another --study or --storage."
        )
    before, wanted = json.loads(held), json.loads(json.dumps(request))
    different = [key for key in {**before, **wanted} if before.get(key) != wanted.get(key)]
    if different:
        key = different[0]
        raise UsageError(
            f"the study {study.study_name!r} in {where} was begun with {key} {before.get(key)!r}, and now it is "
            f"{wanted.get(key)!r}. Ask for the same, or give another --study or --storage."
        )
    if not resume:
        raise UsageError(
            f"{where} already holds the study {study.study_name!r}. Join or continue it with --resume, or give "
            "another --study or --storage."
        )
