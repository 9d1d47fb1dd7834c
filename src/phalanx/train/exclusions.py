"""The sections and values that exclude each other in a run file: a written value is used or refused."""

import itertools
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.config import OWN_KIND, is_own
from phalanx.objectives import OBJECTIVES, ObjectiveSettings, RolloutSettings
from phalanx.train.private_run import privacy_fault

WHOLE_MODEL_OBJECTIVE = "causal_lm"
"""What every engine learns."""

WEIGHTED_OBJECTIVE = "weighted_causal_lm"
"""What is learned of ``data.conversations`` with ``weighted = true``."""

ENGINES = ("parallel", "deepspeed", "split", "federated")
"""Sections of engines; a run with none of them is a pipeline."""

_TRUST = "the ranks of a domain trust each other, so no stage needs other parties"
_ENCLAVE = (
    "an enclave and its clients replace the stages, unless split.workers_see_hidden_states = true gives workers "
    "the middle ones"
)

_SITES = "a site trains in one process, with ranks of [parallel], or with its own stages of [pipeline]"
_SITES_DRILL = "the owner of a site's pipeline starts honest workers only; run drills with [pipeline] alone"

EXCLUSIONS: dict[tuple[str, str], str] = {
    ("parallel", "split"): "a run is trained either by ranks or by an enclave and its clients",
    ("parallel", "pipeline"): _TRUST,
    ("parallel", "guard"): _TRUST,
    ("parallel", "attack"): _TRUST,
    ("deepspeed", "split"): "it configures the ranks of [parallel] only",
    ("deepspeed", "pipeline"): "it configures the ranks of [parallel] only",
    ("deepspeed", "guard"): "it configures the ranks of [parallel] only",
    ("deepspeed", "attack"): "it configures the ranks of [parallel] only",
    ("split", "pipeline"): _ENCLAVE,
    ("split", "guard"): _ENCLAVE,
    ("split", "attack"): _ENCLAVE,
    ("federated", "deepspeed"): _SITES,
    ("federated", "split"): "sites train a whole model each, but clients only its front",
    ("federated", "attack"): _SITES_DRILL,
}
"""Two sections that no run file has both of, the engine's first, with the reason."""

_JOINED = {("split", "pipeline"), ("split", "guard"), ("split", "attack")}
"""Those that a run file may have both of once it says what workers see."""


def contradiction(written: Collection[str], *, workers_see: bool = False) -> str | None:
    """Describe the contradiction of a run file with these sections; None where there is none.

    Args:
        written: Sections that are there, whatever they hold: one that repeats every default was asked for too.
        workers_see: Whether workers of a split may see hidden states.
    """
    for first, other in _excluding(workers_see):
        if first in written and other in written:
            return f"[{first}] and [{other}] exclude each other: {EXCLUSIONS[first, other]}; remove one"
    return None


def excluded_by(written: Collection[str], *, workers_see: bool = False) -> set[str]:
    """Return the sections that a run with these has no use for; the arguments are those of `contradiction`."""
    pairs = _excluding(workers_see)
    return {other for pair in pairs for one, other in (pair, pair[::-1]) if one in written}


def _excluding(workers_see: bool) -> list[tuple[str, str]]:
    return [pair for pair in EXCLUSIONS if not (workers_see and pair in _JOINED)]


@dataclass(frozen=True)
class ValueExclusion:
    """One key of which an engine does not have all values.

    Attributes:
        engine: The section of the engine.
        key: The key, with its section.
        only: The values that there are; empty where `never` says which are not.
        never: The values that there are not.
        beside: Another engine's section, where the line holds only of runs with both.
        own: Whether what there is not is code of the user's own.
    """

    engine: str
    key: str
    reason: str
    instead: str = "remove it"
    only: tuple[object, ...] = ()
    never: tuple[object, ...] = ()
    beside: str = ""
    own: bool = False

    @property
    def where(self) -> str:
        """The section, or the two, of which the line holds."""
        return f"[{self.engine}]" + (f" with [{self.beside}]" if self.beside else "")

    @property
    def values(self) -> str:
        """The values that there are not, in words."""
        if self.own:
            return f'`"{OWN_KIND}"`'
        if self.never:
            return " or ".join(f"`{json.dumps(value)}`" for value in self.never)
        if None in self.only:
            return "`true`" if False in self.only else "any"
        return (
            "`true`"
            if self.only == (False,)
            else f"all but {' or '.join(f'`{json.dumps(value)}`' for value in self.only)}"
        )

    def refusal(self, run: object) -> str | None:
        """Return the refusal of a run of this engine; None where it is valid."""
        value: Any = run
        for name in self.key.split("."):
            value = getattr(value, name, None)
        if isinstance(value, ObjectiveSettings):
            value = value.kind
        if value in self.only or (self.never and value not in self.never) or (self.own and not is_own(value)):
            return None
        value_text = f" = {json.dumps(value)}" if isinstance(value, str | int | float) else ""
        return f"{self.where} excludes {self.key}{value_text}: {self.reason}; {self.instead}"


_COPIES, _NOT_TRIED = "its ranks are data-parallel copies only", "it is not supported here"
_NO_CUT = "it trains the whole language model"
_ADAMW = "only the two moments of adamw can be saved, sealed and checked"
_TWO_MOMENTS = "stages save and compare the two moments of each number"
_CHOSEN = "the trained heads and rows depend on the model's weights, and stages are created without weights"
_LONGER = "its virtual tokens precede the text, and clients send rows of the text's length"
_SET_LORA = 'set kind = "lora", "ptuning" or "prompt_encoder"'
_SET_ADAMW, _SET_BF16 = 'set it to "adamw"', 'set it to "bf16" or "fp32"'
_MASKED_NORMS = "it reads the frozen matrices, and those of an enclave may be masked"
_OWN_WEIGHTS = "an enclave's matrices may be masked, which uses integer arithmetic"
_SEALED_START = "an enclave draws the first values of its adapter and reads no directory of a client"
_MASTERS = "ranks store float32 weights, which ZeRO divides, and round them for each product"
_LOSS_SCALE = "its loss scale depends on every stage, so an audit would have to know it"
_PAIRS = "it reads pairs of rows, but clients take turns with single texts"
_EVIDENCE = "an enclave runs only the code that its evidence names"
_NAMED_ALONE = "an enclave gets the name of the objective, but not its settings"
_NO_ROLLOUTS = "an enclave answers with losses only, and a text of the model would leave it"
_ROWS = "clients make their own batches of packed rows"
_OWN_DRAWS = "each client draws from its own share of every group, but a phase counts samples of the whole run"
_CLIENTS_EMBED = "clients embed their own texts and learn no step number, which the noise would need"
_HERE = "client, enclave and workers of a run are processes of this machine"
_HERE_AT_SITES = "the workers of a site are processes of its machine"


VALUE_EXCLUSIONS: tuple[ValueExclusion, ...] = (
    ValueExclusion(
        "pipeline", "optimizer.kind", _TWO_MOMENTS, 'set it to "adamw" or "adamw8bit"', only=("adamw", "adamw8bit")
    ),
    ValueExclusion("pipeline", "train.precision", _LOSS_SCALE, _SET_BF16, never=("fp16",)),
    ValueExclusion("pipeline", "model.layers", _NO_CUT, only=(None,)),
    ValueExclusion("pipeline", "model.adapter.kind", _CHOSEN, _SET_LORA, never=("spf",)),
    ValueExclusion(
        "parallel",
        "model.activation_checkpointing",
        "ranks have their own key for it",
        'set parallel.activation_checkpointing = "full"',
        only=(False,),
    ),
    ValueExclusion(
        "parallel",
        "checkpoint.journal",
        "ranks restart together from a checkpoint, and none saves its own state",
        only=(None, False),
    ),
    ValueExclusion("parallel", "model.layers", _NO_CUT, only=(None,)),
    ValueExclusion("parallel", "model.adapter.kind", _CHOSEN, _SET_LORA, never=("spf",)),
    *(
        ValueExclusion("deepspeed", f"parallel.{axis}", _COPIES, "set it to 1", only=(1,))
        for axis in ("tp", "pp", "cp")
    ),
    ValueExclusion("deepspeed", "parallel.zero", "deepspeed.zero configures the sharding", only=(0,)),
    ValueExclusion("deepspeed", "parallel.gradient_compression", _NOT_TRIED, only=("none",)),
    ValueExclusion("deepspeed", "data.attention", _NOT_TRIED, never=("document",)),
    ValueExclusion("deepspeed", "parallel.outer", _NOT_TRIED, only=(None,)),
    ValueExclusion("deepspeed", "parallel.compile", _NOT_TRIED, only=(False,)),
    ValueExclusion(
        "deepspeed", "optimizer.kind", "its kernel on the host supports adamw only", _SET_ADAMW, only=("adamw",)
    ),
    ValueExclusion(
        "deepspeed",
        "train.precision",
        "its own loss scale would skip steps without repeating them",
        _SET_BF16,
        never=("fp16",),
    ),
    ValueExclusion(
        "deepspeed",
        "checkpoint.asynchronous",
        "it would copy a state that may be on disk",
        only=(False,),
    ),
    ValueExclusion("split", "model.adapter.dora", _MASKED_NORMS, "use rslora, or [pipeline]", only=(None, False)),
    *(
        ValueExclusion(engine, "model.adapter.quantize", reason, "use [pipeline] or [parallel]", only=(None,))
        for engine, reason in (("split", _OWN_WEIGHTS), ("federated", _NOT_TRIED), ("deepspeed", _NOT_TRIED))
    ),
    *(
        ValueExclusion(engine, "model.adapter.kind", reason, 'set it to "lora" or "ptuning"', never=("prompt_encoder",))
        for engine, reason in (("split", _LONGER), ("federated", _NOT_TRIED), ("deepspeed", _NOT_TRIED))
    ),
    ValueExclusion("split", "model.adapter.path", _SEALED_START, only=(None,)),
    ValueExclusion("split", "optimizer.kind", _ADAMW, _SET_ADAMW, only=("adamw",)),
    ValueExclusion("split", "train.precision", "both parts compute in float32", only=("fp32",)),
    ValueExclusion("split", "train.device", "enclaves do not support accelerators", only=("cpu",)),
    ValueExclusion(
        "split",
        "checkpoint.journal",
        "a journal saves stages; an enclave saves its newest state sealed",
        only=(None, False),
    ),
    ValueExclusion(
        "split",
        "checkpoint.asynchronous",
        "an enclave numbers its states, and its last state may not be verified yet",
        only=(False,),
    ),
    ValueExclusion("split", "train.neftune_alpha", _CLIENTS_EMBED, only=(None,)),
    ValueExclusion("parallel", "train.precision", _MASTERS, _SET_BF16, never=("bf16_weights",)),
    ValueExclusion("deepspeed", "train.neftune_alpha", _NOT_TRIED, only=(None,)),
    ValueExclusion("parallel", "train.samples", "ranks return losses, not logits", only=(None,)),
    ValueExclusion(
        "split", "train.samples", "an enclave answers with losses only, and a text would leave it", only=(None,)
    ),
    ValueExclusion("split", "train.histograms", "an enclave gives out its state only sealed", only=(None,)),
    ValueExclusion("split", "checkpoint.best", "an enclave opens only its newest state", only=(None,)),
    ValueExclusion(
        "split",
        "split.mode",
        "masking needs the whole back part in one process",
        'set mode = "sealed"',
        never=("masked",),
        beside="pipeline",
    ),
    ValueExclusion(
        "split",
        "split.tier",
        "its sandbox has no network, but workers listen on one",
        'set tier = "tpm" or "sim"',
        never=("process",),
        beside="pipeline",
    ),
    ValueExclusion(
        "split",
        "guard.mode",
        "untrusted workers must be checked",
        'set mode = "phalanx"',
        only=("phalanx",),
        beside="pipeline",
    ),
    ValueExclusion(
        "split",
        "guard.commit_lag",
        "an enclave reports a step only after its verification",
        only=(0,),
        beside="pipeline",
    ),
    ValueExclusion("split", "data.phases", _OWN_DRAWS, only=((),)),
    ValueExclusion("federated", "data.phases", _OWN_DRAWS, only=((),)),
    ValueExclusion("federated", "data.skip", _OWN_DRAWS, only=((),)),
    ValueExclusion("federated", "data.attention", _NOT_TRIED, never=("document",)),
    ValueExclusion("federated", "train.epochs", "a step is a round of all sites", "set train.steps", only=(None,)),
    ValueExclusion("federated", "train.precision", "sites compute in float32", only=("fp32",)),
    ValueExclusion("federated", "train.device", _NOT_TRIED, 'set it to "cpu"', only=("cpu",)),
    ValueExclusion("federated", "train.samples", _NOT_TRIED, only=(None,)),
    ValueExclusion("federated", "train.histograms", _NOT_TRIED, only=(None,)),
    ValueExclusion("federated", "train.neftune_alpha", _NOT_TRIED, only=(None,)),
    ValueExclusion(
        "federated", "optimizer.kind", _NOT_TRIED, 'set it to "adamw" or "sgd"', never=("adafactor", "adamw8bit")
    ),
    ValueExclusion(
        "federated",
        "checkpoint.asynchronous",
        "a checkpoint ends a round, and the next one begins with it",
        only=(False,),
    ),
    ValueExclusion("federated", "checkpoint.journal", "rounds have their own journal", only=(None, False)),
    *(
        exclusion
        for engine, here in (("split", _HERE), ("federated", _HERE_AT_SITES))
        for exclusion in (
            ValueExclusion(engine, "pipeline.remote_workers", here, only=((),), beside="pipeline"),
            ValueExclusion(engine, "pipeline.pki", here, only=(None,), beside="pipeline"),
            ValueExclusion(engine, "pipeline.layout", _NOT_TRIED, only=(None,), beside="pipeline"),
            ValueExclusion(engine, "pipeline.layouts", _NOT_TRIED, only=(None,), beside="pipeline"),
        )
    ),
)
"""What an engine has not, apart from objectives."""


def learns_from_rollouts(name: str) -> bool:
    """Whether an objective learns from texts that the model itself writes."""
    settings = OBJECTIVES[name].settings
    return settings is not None and issubclass(settings, RolloutSettings)


def _of_rollouts(key: str) -> Iterator[ValueExclusion]:
    for name in filter(learns_from_rollouts, OBJECTIVES):
        yield ValueExclusion("split", key, _NO_ROLLOUTS, "use [pipeline] or [parallel]", never=(name,))
        yield ValueExclusion("deepspeed", key, _NOT_TRIED, "remove [deepspeed]", never=(name,))


def _of_objectives(key: str) -> Iterator[ValueExclusion]:
    for name in itertools.filterfalse(learns_from_rollouts, OBJECTIVES):
        objective = OBJECTIVES[name]
        if objective.target == "pair":
            yield ValueExclusion("split", key, _PAIRS, "use [pipeline] or [parallel]", never=(name,))
        elif objective.extras:
            rows = ", ".join(sorted(objective.extras))
            reason = f"it reads extra rows ({rows}), which no data source of a run file has"
            engines: tuple[str, ...] = ("pipeline", "parallel", "split")
            if name == WEIGHTED_OBJECTIVE:
                engines, reason = ("split", "deepspeed"), "its row weights are not supported there"
            for engine in engines:
                yield ValueExclusion(engine, key, reason, "call the engine from Python", never=(name,))
        elif objective.own_head:
            for engine in ("pipeline", "parallel"):
                reason = "it trains its own head, but stages and ranks have the language model's"
                yield ValueExclusion(engine, key, reason, "use [split] alone", never=(name,))
        elif objective.rewriting is not None:
            yield ValueExclusion("split", key, _ROWS, "use [pipeline] or [parallel]", never=(name,))
        elif objective.settings is not None:
            yield ValueExclusion("split", key, _NAMED_ALONE, "use [pipeline] or [parallel]", never=(name,))
        is_refused_anyway = objective.target != "pair" and (objective.extras or objective.own_head)
        if name != WHOLE_MODEL_OBJECTIVE and not is_refused_anyway:
            yield ValueExclusion(
                "deepspeed", key, f"it supports {WHOLE_MODEL_OBJECTIVE} only", "remove [deepspeed]", never=(name,)
            )


def value_exclusions() -> Iterator[ValueExclusion]:
    """Return every value that an engine lacks: consequences of `OBJECTIVES`, and the entries of `VALUE_EXCLUSIONS`."""
    key = "train.objective"
    yield from _of_objectives(key)
    yield from _of_rollouts(key)
    yield ValueExclusion("deepspeed", key, f"it supports {WHOLE_MODEL_OBJECTIVE} only", "remove [deepspeed]", own=True)
    yield ValueExclusion("split", key, _EVIDENCE, "use [pipeline]", own=True)
    learned = (WHOLE_MODEL_OBJECTIVE, "classification")
    yield ValueExclusion("federated", key, _NOT_TRIED, "use [pipeline] or [parallel]", only=learned)
    yield ValueExclusion("federated", "model.family", _NOT_TRIED, "use [pipeline]", only=(None,))
    yield ValueExclusion("deepspeed", "model.family", _NOT_TRIED, "remove [deepspeed]", only=(None,))
    yield ValueExclusion("split", "model.family", _EVIDENCE, "use [pipeline]", only=(None,))
    yield from VALUE_EXCLUSIONS


def rollouts_fault(run: Any) -> str | None:
    """Describe what a run lacks, or has too much, for learning from its model's texts; None where nothing."""
    settings, kind = run.train.objective, run.train.objective_kind
    is_wanted = isinstance(settings, RolloutSettings)
    for name, is_there in (("data.prompts", bool(run.data.prompts)), ("[rewards]", run.rewards is not None)):
        if is_there != is_wanted:
            statement = "learns from texts of the model and needs" if is_wanted else "does not use"
            return f'train.objective = "{kind}" {statement} {name}; {"add" if is_wanted else "remove"} it'
    if not isinstance(settings, RolloutSettings):
        return None if run.rollouts is None else f'train.objective = "{kind}" does not use [rollouts]; remove it'
    cuts = 1 if run.parallel is None else run.parallel.cp
    faults = {
        f'parallel.cp = {cuts} divides rows, but train.objective = "{kind}" needs whole rows; set it to 1': (
            cuts > 1 and not OBJECTIVES[kind].shares_rows
        ),
        f'train.precision = "{run.train.precision}": texts of [rollouts] are checked in fp32 only; remove one': (
            run.rollouts is not None and run.train.precision != "fp32"
        ),
        f"train.batch_size = {run.train.batch_size} texts is not a multiple of train.objective.group = "
        f"{settings.group}; make it a multiple": run.train.batch_size % settings.group != 0,
        "train.epochs: epochs count passes over text, but this run generates its texts; set train.steps": (
            run.train.epochs is not None
        ),
        "model.adapter: texts are generated without adapters only; remove it": run.model.adapter is not None,
        f"guard.commit_lag = {run.guard.commit_lag}: texts are generated with verified weights only; set it to 0": (
            run.guard.commit_lag > 0
        ),
    }
    return next((fault for fault, holds in faults.items() if holds), None)


def engines_of(run: object) -> tuple[str, ...]:
    """The sections of the engines that a run has; a run with none of the others is a pipeline."""
    engines = tuple(name for name in ENGINES if getattr(run, name, None) is not None)
    split: Any = getattr(run, "split", None)
    joined = (split is not None and split.workers_see_hidden_states) or getattr(run, "has_site_stages", False)
    return (*engines, "pipeline") if not engines or joined else engines


def refused_value(run: object) -> str | None:
    """What is wrong with the first value that a run's engine has not; None where all is well."""
    engines = engines_of(run)
    lines = (
        exclusion
        for exclusion in value_exclusions()
        if exclusion.engine in engines and (exclusion.beside or exclusion.engine) in engines
    )
    refusals = (exclusion.refusal(run) for exclusion in lines)
    return (
        next((refusal_text for refusal_text in refusals if refusal_text is not None), None)
        or rollouts_fault(run)
        or privacy_fault(run)
    )
