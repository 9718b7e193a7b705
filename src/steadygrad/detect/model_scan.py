"""Rules about how model and optimizers fit together: facts about the program, most of them certain at once.

Cost: none on Readings; names are compared when a scan is due.
"""

from __future__ import annotations

from steadygrad.detect.nonfinite import SHOWN, show
from steadygrad.detect.once import OnceRule, at
from steadygrad.facts import Finding, Load, ModelScan
from steadygrad.facts.program import IdleLoad, Restored
from steadygrad.words import spell_count

NUM_SCANS = 2
"""Scans in a row that must see parameters out of reach: a program may unfreeze something for a moment."""
FEWEST_RENAMED, RENAMED = 2, 0.5
"""Tensors, and share of those that a load left out, that were given under a name with another prefix."""
KEPT = 0.3
"""Correlation of loaded weights with those before the first step, below which they were overwritten: 1 if untouched,
0.9 and more after pruning, quantising, adding noise or some training."""


class OutOfReach(OnceRule[ModelScan]):
    """No optimizer holds parameters that became trainable, were added or were replaced during training."""

    name = "out_of_reach"
    hears = (ModelScan,)
    memory = ("_num_scans", "_first", "_told")

    def __init__(self) -> None:
        self._num_scans = self._first = 0

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding when two scans in a row have seen it."""
        if not fact.unfrozen:
            self._num_scans = 0
            return None
        self._first = self._first if self._num_scans else fact.step
        self._num_scans += 1
        if self._num_scans < NUM_SCANS:
            return None
        num = spell_count(len(fact.unfrozen), "parameter")
        gone = f", and {len(fact.replaced)} that the optimizer holds left the model" if fact.replaced else ""
        return self.report(
            step=self._first,
            message=f"{num} became trainable after the optimizer was created, and no optimizer holds them: "
            f"{show(list(fact.unfrozen))}{gone}",
            advice="Call optimizer.add_param_group({'params': [...]}) when you unfreeze, add or replace layers.",
            evidence={"parameters": list(fact.unfrozen[:SHOWN]), "num_parameters": len(fact.unfrozen)},
        )


class Untied(OnceRule[ModelScan]):
    """An embedding and an output layer began with the same values and are trained apart: the tie was lost."""

    name = "untied_weights"
    hears = (ModelScan,)

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        if not fact.came_apart:
            return None
        one, other = fact.came_apart[0]
        return self.report(
            step=fact.step,
            message=f"{one} and {other} began with the same values and differ now: they are two parameters, not one",
            advice="Tie them last: head.weight = embedding.weight, after loading, copying or converting the model.",
            evidence={"parameters": [one, other]},
        )


class SameUnits(OnceRule[ModelScan]):
    """All units of a layer began with the same weights and learn the same: the layer is as wide as one unit."""

    name = "equal_units"
    hears = (ModelScan,)

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding once the weights have moved together."""
        if not fact.equal_units:
            return None
        return self.report(
            step=0,
            message=f"all units of {show(fact.equal_units)} began with the same weights, and still have the same ones "
            f"after {spell_count(fact.num_steps, 'step')}: they compute one and the same thing",
            advice="Initialise weights at random (nn.init.kaiming_uniform_, xavier_normal_, trunc_normal_); a constant "
            "is for biases, norms and scales.",
            evidence={"parameters": list(fact.equal_units[:SHOWN]), "num_parameters": len(fact.equal_units)},
        )


class NotFrozen(OnceRule[ModelScan]):
    """What should be frozen is trained: by a flag that freezes nothing, or by a `train()` that was not called."""

    name = "not_frozen"
    hears = (ModelScan,)

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding; scans before the first step show it."""
        if fact.freed_by_flag:
            return self.report(
                step=fact.step,
                message=f"nothing is frozen by {show(list(fact.freed_by_flag))}: torch does not know the attribute",
                advice="Write p.requires_grad = False for a parameter, module.requires_grad_(False) for a module.",
                evidence={"flags": list(fact.freed_by_flag[:SHOWN]), "num_flags": len(fact.freed_by_flag)},
            )
        if not fact.not_frozen:
            return None
        return self.report(
            step=fact.step,
            message=f"nothing is frozen in {show(list(fact.not_frozen))}, whose train() freezes parameters",
            advice="Call model.train() before you create the optimizer: it was never called on this model.",
            evidence={"modules": list(fact.not_frozen[:SHOWN])},
        )


class WrongGroup(OnceRule[ModelScan]):
    """A parameter group has an option that the optimizer does not know, or lists a parameter twice."""

    name = "wrong_group"
    hears = (ModelScan,)

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding."""
        if fact.doubled:
            num = spell_count(len(fact.doubled), "parameter")
            return self.report(
                step=fact.step,
                message=f"{num} twice in one group, so each step updates them twice: {show(list(fact.doubled))}",
                advice="Pass each parameter once: list(dict.fromkeys(parameters)) keeps their order.",
                evidence={"parameters": list(fact.doubled[:SHOWN]), "num_parameters": len(fact.doubled)},
            )
        if not fact.misspelt:
            return None
        one = fact.misspelt[0]
        return self.report(
            step=0,
            message=f"the optimizer does not know the option {one.name!r} of group {one.group}; {one.meant!r} was "
            f"probably meant, which is {one.used:g} there and not {one.value:g}",
            advice=f"Write {one.meant!r}: torch ignores names in a parameter group that it does not know.",
            evidence={"group": one.group, "option": one.name, "meant": one.meant, "value": one.value, "used": one.used},
        )


class FrozenHead(OnceRule[ModelScan]):
    """Most of the model is frozen, and so is its last layer, which still has its random initial values.

    A frozen last layer alone is usual (adapters, prompts, projectors); one that was never trained is not.
    """

    name = "frozen_head"
    hears = (ModelScan,)

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding; scans before the first step show it."""
        if not fact.frozen_head:
            return None
        return self.report(
            step=fact.step,
            message=f"{fact.frozen_share:.0%} of the model is frozen, its last layer {fact.frozen_head} included, "
            "which still has the random values that it was made with",
            advice=f"Unfreeze it before you create the optimizer: model.{fact.frozen_head}.requires_grad_(True).",
            evidence={"share": fact.frozen_share},
        )


class LostWeights(OnceRule[ModelScan]):
    """The loaded weights are not the ones that train: nothing matched, or they were initialised again afterwards."""

    name = "lost_weights"
    hears = (ModelScan,)

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding; scans before the first step show it."""
        for load in fact.loads:
            message, advice = _judge_load(load)
            if message:
                return self.report(
                    step=fact.step,
                    message=message,
                    advice=advice,
                    evidence={"where": load.where, "num_given": load.num_given, "num_matched": load.num_matched},
                )
        return None


def _judge_load(load: Load) -> tuple[str, str]:
    """Return what is wrong with a load and what to do; two empty strings if nothing is."""
    place = at(load.where)
    # Partial matches are usual (a new head); none at all, or the same names under another prefix, are not
    if (load.num_given and not load.num_matched) or _is_renamed(load):
        return (
            f"load_state_dict(strict=False){place} matched {load.num_matched} of {load.num_given} tensors: it was "
            f"given {load.example!r}, and the module has {load.wanted!r}",
            "Rename the keys (the prefix 'module.' comes from DistributedDataParallel), or load with strict=True.",
        )
    if load.kept is not None and abs(load.kept) < KEPT:
        return (
            f"the weights loaded{place} were overwritten before the first step: their correlation with the current "
            f"ones is {load.kept:.2f}",
            "Initialise first and load last; look for apply(init_weights) or reset_parameters() after the load.",
        )
    return "", ""


def _is_renamed(load: Load) -> bool:
    """Whether most of what the module lacks was given under a name with another prefix."""
    return load.num_renamed >= FEWEST_RENAMED and load.num_renamed > RENAMED * load.num_missing


class StaleSave(OnceRule[ModelScan]):
    """The program saves the weights from before the first step again and again: a copy, not the model in training."""

    name = "stale_save"
    hears = (ModelScan,)

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding when two saves ten steps apart held the first weights and none held others."""
        if not fact.stale_save:
            return None
        return self.report(
            step=fact.step,
            message=f"torch.save at {fact.stale_save} wrote the weights from before the first step, after "
            f"{fact.num_steps} steps",
            advice="Save the state_dict() of the model that is trained, at the time of the save: an earlier copy, or "
            "an average that is never updated, stays as it was.",
            evidence={"where": fact.stale_save, "num_steps": fact.num_steps},
        )


class IdleLoaded(OnceRule[IdleLoad]):
    """`load_state_dict` gives a module its own weights: the state that it should restore or copy is not a copy."""

    name = "idle_load"
    hears = (IdleLoad,)

    def judge(self, fact: IdleLoad) -> Finding | None:
        """Return the finding: the watch reports only loads that cannot have an effect."""
        if fact.is_earlier:
            message = "a state_dict() of the model that was taken earlier holds the current weights, not the earlier "
            "ones"
            advice = "Copy it when you take it: copy.deepcopy(model.state_dict()). It returns the weights themselves."
        else:
            message = f"a {fact.module} that is not trained is loaded with its own weights again and again"
            advice = "Load the weights of the other network: target.load_state_dict(model.state_dict())."
        return self.report(
            step=fact.step,
            message=f"load_state_dict{at(fact.where)} changes nothing: {message}",
            advice=advice,
            evidence={"where": fact.where, "module": fact.module},
        )


class IdleAverage(OnceRule[ModelScan]):
    """The program evaluates an average of the weights that was never updated.

    An AveragedModel, or a copy of the model whose name says that it is an average and that was evaluated three times
    with the first weights. Other copies may stay as they are: teachers, references. Cost: all live objects are searched
    once for copies, 10 to 20 ms, and an evaluation of one reads a few of its weights.
    """

    name = "idle_average"
    hears = (ModelScan,)

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        name, where = fact.idle_copy
        if not fact.idle_average and not name:
            return None
        message = (
            "an AveragedModel of this model is evaluated, and update_parameters() was never called: it has the "
            "weights that it was made with"
        )
        advice = "Call ema.update_parameters(model) after each step, or pass it: Guard(model, optimizer, ema=ema)."
        if not fact.idle_average:
            message = (
                f"{name}, a copy of the model, is evaluated{at(where)} and still has the weights from before the first "
                f"step, after {fact.num_steps} steps"
            )
            advice = f"Update {name} after each step, in place: average.lerp_(weight, 1 - decay) for each parameter."
        return self.report(
            step=fact.step,
            message=message,
            advice=advice,
            evidence={"where": where, "num_steps": fact.num_steps},
        )


class StaleStatistics(OnceRule[ModelScan]):
    """The program evaluates an average of the weights whose BatchNorm statistics are never updated.

    The weights of a copy that is called an average moved between three evaluations, the model's statistics did, and
    those of the copy did not: it normalises by what other weights produced. Statistics that are copied, averaged,
    measured again before an evaluation, or frozen in the model as well are left alone. Cost: see `idle_average`.
    """

    name = "stale_statistics"
    hears = (ModelScan,)

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        name, where = fact.stale_statistics
        if not name:
            return None
        return self.report(
            step=fact.step,
            message=f"{name}, an average of the weights, is evaluated{at(where)} with BatchNorm statistics that never "
            "change, while the model's do: they belong to other weights",
            advice=f"Update the buffers too: buffer.copy_(model's) for each of {name}.buffers(), or use "
            "torch.optim.swa_utils.AveragedModel, or update_bn() before the evaluation.",
            evidence={"where": where, "num_steps": fact.num_steps},
        )


class RestoredWeights(OnceRule[Restored]):
    """Every forward runs with the weights from before the first step: the program puts them back after each step.

    Needs two looks far apart. A model that is called with the weights that a step has made, as in test-time training,
    is left alone. Cost: a few hundred weights are compared at the calls of two steps.
    """

    name = "restored_weights"
    hears = (Restored,)
    memory = ("_num_looks", "_first", "_told")

    def __init__(self) -> None:
        self._num_looks = self._first = 0

    def judge(self, fact: Restored) -> Finding | None:
        """Return the finding when two looks have shown it."""
        if not fact.is_restored:
            self._num_looks = 0
            return None
        self._first = self._first if self._num_looks else fact.step
        self._num_looks += 1
        if self._num_looks < NUM_SCANS:
            return None
        load = f"; load_state_dict was called last at {fact.where}" if fact.where else ""
        return self.report(
            step=self._first,
            message=f"at step {fact.step} the model is called with the weights from before the first step, although "
            f"each step moves them: they are restored every time{load}",
            advice="Load or copy weights once, before the loop; look for load_state_dict, copy_ or an EMA that is "
            "swapped in and never out.",
            evidence={"where": fact.where, "num_steps": fact.step},
        )


class PartialSaved(OnceRule[ModelScan]):
    """Saves leave out frozen parameters that exist nowhere else, so the model cannot be loaded again as it is.

    Those that were trained in this run and frozen later, or that still have their random initial values. A frozen
    part with other values was loaded and can be again; with adapters beside it, it is left alone. Needs two saves, and
    none in the run that has them. Cost: names are compared at each save.
    """

    name = "partial_save"
    hears = (ModelScan,)

    def judge(self, fact: ModelScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        if fact.partial_save is None:
            return None
        where, names = fact.partial_save.where, fact.partial_save.parameters
        why = "still have their random initial values"
        if fact.partial_save.was_trained:
            why = "were trained in this run"
        return self.report(
            step=fact.step,
            message=f"torch.save at {where} leaves out {spell_count(len(names), 'frozen parameter')} that {why} and "
            f"are in no other save: {show(list(names))}",
            advice="Save model.state_dict() whole; leave out frozen weights only if they can be loaded from elsewhere.",
            evidence={"where": where, "parameters": list(names[:SHOWN]), "num_parameters": len(names)},
        )
