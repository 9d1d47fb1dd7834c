"""The support matrix: which sections and which values of a run file each engine lacks, and why."""

import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config import OWN_KIND, RefusedKeyError, is_own
from phalanx.objectives import OBJECTIVES, ObjectiveSettings, RolloutSettings
from phalanx.objectives.kto import WANTED

WHOLE_MODEL_OBJECTIVE = "causal_lm"
"""What every engine learns."""

WEIGHTED_OBJECTIVE = "weighted_causal_lm"
"""What is learned of ``data.conversations`` with ``weighted = true``."""

SECTIONS = (
    *("model", "data", "train", "objectives", "optimizer", "parallel", "deepspeed", "split", "federated", "pipeline"),
    *(
        "guard",
        "attack",
        "checkpoint",
        "rewards",
        "rollouts",
        "privacy",
        "leak_meter",
        "policy",
        "tracking",
        "evaluate",
    ),
)
"""Every section of a run file, in the order in which a run directory keeps them."""

ENGINE_SECTIONS = ("parallel", "deepspeed", "split", "federated")
"""Sections that make a run something else than a pipeline."""

_TRUST = "the ranks of a domain trust each other, so no stage needs other parties"
_ENCLAVE = (
    "an enclave and its clients take the place of stages, unless split.workers_see_hidden_states = true gives "
    "workers the middle ones"
)
_ZERO = "it configures the ranks of [parallel] only"
_SITES = "a site trains in one process, with ranks of [parallel], or with its own stages of [pipeline]"
_NO_ROLLOUTS = "an enclave answers with losses only, and a text of the model would leave it"
_NO_NOISE = (
    "noise is added by [parallel], [federated] and [pipeline]; clients and enclave of [split] share no secret that it "
    "could come from, and what they send each other tells of rows"
)
_SITES_LEARN = "no objective of sites learns from what the model writes"

ABSENT_SECTIONS: Mapping[str, Mapping[str, str]] = {
    "pipeline": {},
    "parallel": dict.fromkeys(("pipeline", "guard", "attack"), _TRUST),
    "deepspeed": {
        **dict.fromkeys(("pipeline", "guard", "attack"), _ZERO),
        "objectives": f"it supports {WHOLE_MODEL_OBJECTIVE} only",
    },
    "split": {
        "parallel": "a run is trained either by ranks or by an enclave and its clients",
        "deepspeed": _ZERO,
        **dict.fromkeys(("pipeline", "guard", "attack"), _ENCLAVE),
        **dict.fromkeys(("rewards", "rollouts"), _NO_ROLLOUTS),
        "objectives": "clients make their own batches, of one objective",
        "privacy": _NO_NOISE,
        "leak_meter": "rows are with clients, and no party has them together with the whole model",
    },
    "federated": {
        "deepspeed": _SITES,
        "split": "sites train a whole model each, but clients only its front",
        "attack": "the owner of a site's pipeline starts honest workers only; run drills with [pipeline] alone",
        **dict.fromkeys(("rewards", "rollouts"), _SITES_LEARN),
        "objectives": "sites make their own batches, of one objective",
        "leak_meter": "rows stay at the sites, and the owner has none to measure",
    },
    "federated+pipeline": {"parallel": _TRUST},
}
"""Sections that the run of an engine lacks, with the reason."""


def section_fault(engine: str, surplus: Collection[str]) -> RefusedKeyError | None:
    """Describe a section that the run of an engine lacks; None where none of the surplus ones is such a section."""
    first = engine.partition("+")[0]
    for section, reason in ABSENT_SECTIONS[first].items():
        if section in surplus:
            return exclusion(first, section, reason)
    return None


def exclusion(first: str, second: str, reason: str) -> RefusedKeyError:
    """Return the error of a run file that has two sections of which a run has one."""
    return RefusedKeyError(
        f"[{first}] and [{second}] exclude each other: {reason}; remove one",
        key=f"[{first}] and [{second}]",
        found="both",
        expected="one of them",
        do="remove one",
    )


def missing_section(section: str, message: str, do: str) -> RefusedKeyError:
    """Return the error of a run file that lacks a section which another one needs."""
    return RefusedKeyError(f"{message}; {do}", key=f"[{section}]", found="nothing", expected=f"[{section}]", do=do)


@dataclass(frozen=True)
class ValueLimit:
    """The values of a key that one engine lacks.

    Attributes:
        only: The values that there are; empty where `never` says which are not.
        never: The values that there are not.
        own: Whether code of the user's own is what there is not.
    """

    reason: str
    instead: str = "remove it"
    only: tuple[object, ...] = ()
    never: tuple[object, ...] = ()
    own: bool = False

    def allows(self, value: object) -> bool:
        """Whether an engine has this value."""
        if self.own:
            return not is_own(value)
        return value not in self.never if self.never else value in self.only

    @property
    def lacking(self) -> str:
        """The values that there are not, in words."""
        if self.own:
            return f'`"{OWN_KIND}"`'
        if self.never:
            return " or ".join(f"`{json.dumps(value)}`" for value in self.never)
        if None in self.only:
            return "`true`" if False in self.only else "any"
        if self.only == (False,):
            return "`true`"
        return f"all but {' or '.join(f'`{json.dumps(value)}`' for value in self.only)}"


_COPIES, _NOT_TRIED = "its ranks are data-parallel copies only", "it is not supported here"
_ADAMW = "only the two moments of adamw can be saved, sealed and checked"
_TWO_MOMENTS = "stages save and compare the two moments of each number"
_SET_ADAMW, _SET_BF16 = 'set it to "adamw"', 'set it to "bf16" or "fp32"'
_EVIDENCE = "an enclave runs only the code that its evidence names"
_OWN_DRAWS = "each client draws from its own share of every group, but a phase counts samples of the whole run"
_NO_DEEPSPEED, _STAGES_OR_RANKS = "remove [deepspeed]", "use [pipeline] or [parallel]"

_UNTRIED = ValueLimit(_NOT_TRIED, only=(None,))
_UNCUT = ValueLimit("it trains the whole language model", only=(None,))
_UNCHOSEN = ValueLimit(
    "the trained heads and rows depend on the model's weights, and stages are created without weights",
    'set kind = "lora", "ptuning" or "prompt_encoder"',
    never=("spf",),
)
_UNCOUNTED_TOKENS = ValueLimit(_NOT_TRIED, 'set it to "lora" or "ptuning"', never=("prompt_encoder",))
_UNQUANTIZED = ValueLimit(_NOT_TRIED, _STAGES_OR_RANKS, only=(None,))
_ACROSS = ValueLimit(_NOT_TRIED, never=("document",))
_ONE_COPY = ValueLimit(_COPIES, "set it to 1", only=(1,))
_NO_PHASES = ValueLimit(_OWN_DRAWS, only=((),))
_HERE: Mapping[str, str] = {
    "split+pipeline": "client, enclave and workers of a run are processes of this machine",
    "federated+pipeline": "the workers of a site are processes of its machine",
}

LIMITS: Mapping[str, Mapping[str, ValueLimit]] = {
    "model.family": {
        "deepspeed": ValueLimit(_NOT_TRIED, _NO_DEEPSPEED, only=(None,)),
        "split": ValueLimit(_EVIDENCE, "use [pipeline]", only=(None,)),
    },
    "model.layers": {"pipeline": _UNCUT, "parallel": _UNCUT},
    "model.activation_checkpointing": {
        "parallel": ValueLimit(
            "ranks have their own key for it", 'set parallel.activation_checkpointing = "full"', only=(False,)
        ),
    },
    "model.adapter.kind": {
        "pipeline": _UNCHOSEN,
        "parallel": _UNCHOSEN,
        "deepspeed": _UNCOUNTED_TOKENS,
        "split": ValueLimit(
            "its virtual tokens precede the text, and clients send rows of the text's length",
            'set it to "lora" or "ptuning"',
            never=("prompt_encoder",),
        ),
    },
    "model.adapter.quantize": {
        "deepspeed": _UNQUANTIZED,
        "split+pipeline": ValueLimit("its stages were tried with whole matrices only", only=(None,)),
    },
    "model.adapter.path": {
        "split": ValueLimit(
            "an enclave draws the first values of its adapter and reads no directory of a client", only=(None,)
        ),
    },
    "data.phases": {"split": _NO_PHASES, "federated": _NO_PHASES},
    "data.skip": {"federated": _NO_PHASES},
    "data.attention": {"deepspeed": _ACROSS},
    "train.epochs": {"federated": ValueLimit("a step is a round of all sites", "set train.steps", only=(None,))},
    "train.precision": {
        "pipeline": ValueLimit(
            "its loss scale depends on every stage, so an audit would have to know it", _SET_BF16, never=("fp16",)
        ),
        "deepspeed": ValueLimit(
            "its own loss scale would skip steps without repeating them", _SET_BF16, never=("fp16",)
        ),
        "split": ValueLimit(
            "an enclave keeps neither a loss scale nor master weights", _SET_BF16, only=("fp32", "bf16")
        ),
        "split+pipeline": ValueLimit("its stages were tried in float32 only", never=("bf16",)),
        "federated": ValueLimit(
            "its loss scale follows from the steps before, but a round that is repeated must give the same update",
            _SET_BF16,
            never=("fp16",),
        ),
    },
    "train.numerics": dict.fromkeys(
        ("parallel", "split", "federated"),
        ValueLimit("only stages of [pipeline] follow that law", 'set it to "float"', only=("float",)),
    ),
    "train.device": {
        "split": ValueLimit("enclaves do not support accelerators", only=("cpu",)),
        "federated": ValueLimit("no site has been run on a GPU yet", 'set it to "cpu"', only=("cpu",)),
    },
    "train.samples": {
        "parallel": ValueLimit("ranks return losses, not logits", only=(None,)),
        "split": ValueLimit("an enclave answers with losses only, and a text would leave it", only=(None,)),
    },
    "train.histograms": {
        "split": ValueLimit("an enclave gives out its state only sealed", only=(None,)),
    },
    "train.stability": {
        "deepspeed": ValueLimit("it updates before the norm of the gradient is known here", only=(None,)),
        "split": ValueLimit("an enclave updates before its owner knows loss and gradient", only=(None,)),
        "federated": ValueLimit(
            "losses of single batches are claims of sites; federated.aggregator withstands outliers", only=(None,)
        ),
    },
    "train.stability.action": {
        "pipeline": ValueLimit(
            "every auditor computes the rate of a step from its number alone",
            'set it to "skip" or "roll_back"',
            never=("lower_rate",),
        ),
    },
    "train.neftune_alpha": {
        "deepspeed": _UNTRIED,
        "split": ValueLimit(
            "clients embed their own texts and learn no step number, which the noise would need", only=(None,)
        ),
    },
    "optimizer.kind": {
        "pipeline": ValueLimit(_TWO_MOMENTS, 'set it to "adamw" or "adamw8bit"', only=("adamw", "adamw8bit")),
        "deepspeed": ValueLimit("its kernel on the host supports adamw only", _SET_ADAMW, only=("adamw",)),
        "split": ValueLimit(_ADAMW, _SET_ADAMW, only=("adamw",)),
    },
    "checkpoint.journal": {
        "parallel": ValueLimit(
            "ranks restart together from a checkpoint, and none saves its own state", only=(None, False)
        ),
        "split": ValueLimit("a journal saves stages; an enclave saves its newest state sealed", only=(None, False)),
        "federated": ValueLimit("rounds have their own journal", only=(None, False)),
    },
    "checkpoint.asynchronous": {
        "deepspeed": ValueLimit("it would copy a state that may be on disk", only=(False,)),
        "split": ValueLimit("an enclave numbers its states, and its last state may not be verified yet", only=(False,)),
        "federated": ValueLimit("a checkpoint ends a round, and the next one begins with it", only=(False,)),
    },
    "checkpoint.sharded": {
        "pipeline": ValueLimit("each stage has a file already", only=(False,)),
        "deepspeed": ValueLimit("it would copy a state that may be on disk", only=(False,)),
        "split": ValueLimit("an enclave saves its state sealed", only=(False,)),
        "federated": ValueLimit("one process has the state of all rounds", only=(False,)),
    },
    "checkpoint.best": {"split": ValueLimit("an enclave opens only its newest state", only=(None,))},
    "parallel.tp": {"deepspeed": _ONE_COPY},
    "parallel.pp": {"deepspeed": _ONE_COPY},
    "parallel.cp": {"deepspeed": _ONE_COPY},
    "parallel.zero": {"deepspeed": ValueLimit("deepspeed.zero configures the sharding", only=(0,))},
    "parallel.gradient_compression": {"deepspeed": ValueLimit(_NOT_TRIED, only=("none",))},
    "parallel.outer": {"deepspeed": _UNTRIED},
    "parallel.compile": {"deepspeed": ValueLimit(_NOT_TRIED, only=(False,))},
    "split.mode": {
        "split+pipeline": ValueLimit(
            "masking needs the whole back part in one process", 'set mode = "sealed"', never=("masked",)
        ),
    },
    "split.tier": {
        "split+pipeline": ValueLimit(
            "its sandbox has no network, but workers listen on one",
            'set tier = "tpm" or "sim"',
            never=("process",),
        ),
    },
    "guard.mode": {
        "split+pipeline": ValueLimit("untrusted workers must be checked", 'set mode = "phalanx"', only=("phalanx",)),
    },
    "guard.commit_lag": {
        "split+pipeline": ValueLimit("an enclave reports a step only after its verification", only=(0,)),
    },
    "pipeline.remote_workers": {engine: ValueLimit(reason, only=((),)) for engine, reason in _HERE.items()},
    "pipeline.pki": {engine: ValueLimit(reason, only=(None,)) for engine, reason in _HERE.items()},
    "pipeline.layout": dict.fromkeys(_HERE, _UNTRIED),
    "pipeline.layouts": dict.fromkeys(_HERE, _UNTRIED),
}
"""The values that engines lack, by key and engine; `OBJECTIVES` adds those of `train.objective`."""

_OBJECTIVE = "train.objective"


def learns_from_rollouts(name: str) -> bool:
    """Whether an objective learns from texts that the model itself writes."""
    settings = OBJECTIVES[name].settings
    return settings is not None and issubclass(settings, RolloutSettings)


def _objective_limits() -> Iterator[tuple[str, ValueLimit]]:
    """Return what engines cannot learn, as (engine, limit); these follow from properties of objectives."""
    for name in itertools.filterfalse(learns_from_rollouts, OBJECTIVES):
        objective = OBJECTIVES[name]
        reasons: dict[str, tuple[str, str]] = {}
        if name != WHOLE_MODEL_OBJECTIVE:
            reasons["deepspeed"] = (f"it supports {WHOLE_MODEL_OBJECTIVE} only", _NO_DEEPSPEED)
        if objective.head == "score":
            reasons["split"] = ("an enclave has the language model's head, and none of scores", _STAGES_OR_RANKS)
        elif WANTED in objective.extras:
            reasons["split"] = (
                "its score compares wanted and unwanted answers of all clients, and no party has them together",
                _STAGES_OR_RANKS,
            )
        elif name == WEIGHTED_OBJECTIVE:
            weights = ("its row weights are not supported there", "call the engine from Python")
            reasons |= {"split": weights, "deepspeed": weights}
        elif objective.extras and objective.target != "pair":
            rows = ", ".join(sorted(objective.extras))
            reason = f"it reads extra rows ({rows}), which no data source of a run file has"
            reasons = dict.fromkeys(("pipeline", "parallel", "split"), (reason, "call the engine from Python"))
        elif objective.own_head:
            reason = "it trains its own head, but stages and ranks have the language model's"
            reasons = dict.fromkeys(("pipeline", "parallel"), (reason, "use [split] alone"))
        elif objective.rewriting is not None:
            reasons["split"] = ("clients make their own batches of packed rows", _STAGES_OR_RANKS)
        for engine, (reason, instead) in reasons.items():
            yield engine, ValueLimit(reason, instead, never=(name,))
    for name in filter(learns_from_rollouts, OBJECTIVES):
        yield "split", ValueLimit(_NO_ROLLOUTS, _STAGES_OR_RANKS, never=(name,))
        yield "deepspeed", ValueLimit(_NOT_TRIED, _NO_DEEPSPEED, never=(name,))
        yield "federated", ValueLimit(_SITES_LEARN, _STAGES_OR_RANKS, never=(name,))
    yield "deepspeed", ValueLimit(f"it supports {WHOLE_MODEL_OBJECTIVE} only", _NO_DEEPSPEED, own=True)
    yield "split", ValueLimit(_EVIDENCE, "use [pipeline]", own=True)


def limits() -> Iterator[tuple[str, str, ValueLimit]]:
    """Return every limit as (engine, key, limit)."""
    for engine, limit in _objective_limits():
        yield engine, _OBJECTIVE, limit
    for key, engines in LIMITS.items():
        for engine, limit in engines.items():
            yield engine, key, limit


def sections_of(engine: str) -> str:
    """Return the section, or the two, of an engine as a message names them."""
    return " with ".join(f"[{section}]" for section in engine.split("+"))


def unsupported_value(run: object, engines: Collection[str]) -> RefusedKeyError | None:
    """Describe the first value of a run that one of its engines lacks; None where they have all of them."""
    for engine, key, limit in limits():
        if engine not in engines:
            continue
        value: Any = run
        for name in key.split("."):
            value = getattr(value, name, None)
        value = value.kind if isinstance(value, ObjectiveSettings) else value
        if not limit.allows(value):
            has_text = isinstance(value, str | int | float)
            value_text = f" = {json.dumps(value)}" if has_text else ""
            return RefusedKeyError(
                f"{sections_of(engine)} excludes {key}{value_text}: {limit.reason}; {limit.instead}",
                key=key,
                found=json.dumps(value) if has_text else "a value",
                expected=f"a value that {sections_of(engine)} has",
                do=limit.instead,
            )
    return None
