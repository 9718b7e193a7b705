"""The source -> the tables of rules, policies and recipes in the docs, so that no number there is written by hand.

    python docs/_site/tables.py      writes them into the pages; a test says when that was forgotten

Rules are asked for their names and first sentences, settings for their defaults and the text under each field, the
policy for its ladders. Everything between two markers of a page is replaced, nothing else is touched.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from steadygrad.cli import recipe_fields
from steadygrad.cli.recipe_fields import read_help
from steadygrad.cli.recipes import find_recipe
from steadygrad.config import DetectConfig, Policy
from steadygrad.decide.table import Rung, build_table
from steadygrad.detect import standard_rules
from steadygrad.facts.kinds import KINDS

DOCS = Path(__file__).parent.parent
FAMILIES = {
    "nonfinite": "Not finite",
    "start": "The first steps",
    "loss": "Loss",
    "loss_trend": "Loss",
    "validation": "Validation",
    "gradient_norm": "Gradient norm",
    "gradient_flow": "Single gradients",
    "leading": "Before the loss shows it",
    "inputs": "Inputs",
    "activations": "Activations",
    "parameters": "Weights",
    "graph": "The program, checked once",
    "call_order": "The order of calls",
    "schedule": "The schedule",
    "model_scan": "The optimizer and the model",
    "rank_agreement": "Ranks",
    "precision": "Number formats",
    "loss_program": "Loss, labels and masks",
    "loss_targets": "Loss, labels and masks",
    "modes": "Train and eval mode",
    "stream": "The stream of batches",
    "eps_gradient": "Single gradients",
    "scaler": "Loss scale",
    "actions": "Habits",
}
"""Module of the rule -> title; others stand under their own name."""
OUTSIDE_RULES = {
    "added_gradients": "Gradients from another backward were already there and are part of this step.",
    "asked_for": "You asked for an action, such as a rollback.",
    "checkpoint_failed": "A checkpoint could not be written or verified; the newest good one is kept.",
    "dropped_gradients": "Gradients from another backward were there and were dropped.",
    "doubled_schedule": "The scheduler that a Guard steps is stepped by the program too.",
    "exception": "The program raised an exception in a step.",
    "exploded_start": "In the first steps, the loss rose to a multiple of its first value and of the loss of a guess.",
    "forgotten_state": "A new optimizer is created for every step, so none has averages of gradients (`run` only).",
    "foreign_schedule": "The scheduler belongs to another optimizer, so the learning rates do not follow it.",
    "infinite_state": "State that holds infinities on purpose was saved.",
    "instability_forecast": "The learnt forecast expects the run to become unstable.",
    "new_run": "The run directory held another run, whose record was moved aside.",
    "no_better_than_guessing": "The best validation loss is barely below that of a guess that ignores the input.",
    "partial_overlap": "Parameters that only the model or only the optimizers have.",
    "rank_waits": "A rank waits for the others, and is named with its line.",
    "replaced_loss": "A loss that could not be used was replaced by `safe_compute_loss`.",
    "resumed": "The run was resumed, and from where.",
    "run_directory_lost": "The run directory was deleted during training.",
    "uncopied_state": "State that cannot be copied is left out of snapshots and checkpoints.",
    "underflowing_epsilon": "The optimizer's epsilon is zero in the precision of the weights.",
    "unrecovered_loss": "The loss has not recovered from an explosion.",
}
"""Kinds that no standard rule of the same name reports."""


def render_rules() -> str:
    """A table for each family of rules: name, what it says, what is done."""
    ladders = build_table(Policy())
    families: dict[str, list[str]] = {}
    for rule in standard_rules(DetectConfig(), clip_threshold=1.0):
        module = type(rule).__module__.rpartition(".")[2]
        done = " → ".join(map(spell_rung, ladders.get(rule.name, ()))) or "reported"
        row = f"| `{rule.name}` | {spell_docstring(type(rule))} | {done} |"
        families.setdefault(FAMILIES.get(module, module), []).append(row)
    head = "| rule | what it says | by default |\n|---|---|---|"
    return "\n\n".join(f"### {title}\n\n{head}\n" + "\n".join(rows) for title, rows in families.items())


def render_thresholds() -> str:
    """A table for each group of thresholds."""
    groups: dict[str, Any] = {"": DetectConfig()}
    groups |= {f.name: v for f in dataclasses.fields(DetectConfig) if dataclasses.is_dataclass(v := _default(f))}
    parts = []
    for name, group in groups.items():
        title = "DetectConfig" if not name else f"DetectConfig.{name}: {type(group).__name__}"
        parts.append(f"### `{title}`\n\n{spell_docstring(type(group))}\n\n{render_fields(group)}")
    return "\n\n".join(parts)


def render_kinds() -> str:
    """Every kind of finding: what it says, whether an action on it needs proof, what is done."""
    rules = {rule.name: spell_docstring(type(rule)) for rule in standard_rules(DetectConfig(), clip_threshold=1.0)}
    ladders = build_table(Policy())
    rows = [
        f"| `{name}` | {rules.get(name) or OUTSIDE_RULES[name]} | {'yes' if kind.needs_proof else ''} "
        f"| {' → '.join(map(spell_rung, ladders.get(name, ()))) or 'reported'} |"
        for name, kind in sorted(KINDS.items())
    ]
    return "\n".join(["| kind | what it says | needs proof | by default |", "|---|---|---|---|", *rows])


def render_policy() -> str:
    """The fields of a Policy."""
    return render_fields(Policy())


def render_ladders() -> str:
    """What is done about each kind of finding, mildest first."""
    rows = [f"| `{kind}` | {' → '.join(map(spell_rung, ladder))} |" for kind, ladder in build_table(Policy()).items()]
    return "\n".join(["| finding | what is done, and what comes next |", "|---|---|", *rows])


def render_fields(settings: Any) -> str:
    """Field, default and the text below it."""
    texts = read_help(type(settings))
    rows = [
        f"| `{f.name}` | {spell_value(getattr(settings, f.name))} | {spell_cell(texts[f.name])} |"
        for f in dataclasses.fields(settings)
        if not dataclasses.is_dataclass(getattr(settings, f.name))
    ]
    return "\n".join(["| field | default | what it is |", "|---|---|---|", *rows])


def render_recipe(name: str) -> str:
    """The fields of a recipe, as its command takes them."""
    rows = [
        f"| `{item.opts[0]}` | {recipe_fields.spell_value(item.usual)} | {spell_cell(item.help or '')} |"
        for item in recipe_fields.list_fields(find_recipe(name).load().Config)
    ]
    return "\n".join(["| field | default | what it is |", "|---|---|---|", *rows])


def spell_rung(rung: Rung) -> str:
    """One action in words."""
    by = "" if rung.factor is None else f" × {rung.factor:g}"
    words = {
        "skip": "skip",
        "scale_lr": f"learning rate{by}",
        "scale_weight_decay": f"weight decay{by}",
        "rollback": "rollback" if rung.factor in (None, 1.0) else f"rollback, learning rate{by}",
    }
    after = f" (after {rung.after} in a row)" if rung.after > 1 else ""
    return words.get(rung.action.value, rung.action.value) + after


def spell_value(value: Any) -> str:
    """A default as a person writes it."""
    if value is None or isinstance(value, bool):
        return f"`{value}`"
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) < 1e6 else f"{value}"
    return "none" if not value else f"`{value}`"


def spell_docstring(thing: type) -> str:
    """The first paragraph, on one line."""
    return spell_cell(" ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()))


def spell_cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "rules.md": {"rules": render_rules, "thresholds": render_thresholds},
    "policies.md": {"ladders": render_ladders, "policy": render_policy},
    "reference/kinds.md": {"kinds": render_kinds},
    **{f"recipes/{name}.md": {"fields": partial(render_recipe, name)} for name in ("clip6d", "cod", "sft")},
}
"""Page -> marker -> what stands there."""


def fill(page: str, text: str) -> str:
    """The page's text with its tables as the source has them now."""
    for marker, render in TABLES[page].items():
        pattern = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)", re.DOTALL)
        made = f"\n{render()}\n\n"
        text, count = pattern.subn(lambda match, made=made: f"{match[1]}{made}{match[2]}", text)
        assert count == 1, f"{page} has {count} places for {marker}"
    return text


def write_pages(pages: Iterable[str] = TABLES) -> None:
    """Bring the pages up to date."""
    for page in pages:
        path = DOCS / page
        path.write_text(fill(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
