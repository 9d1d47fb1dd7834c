"""What a resumed run may change of its run file; everything else is refused by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from phalanx.errors import ConfigError
from phalanx.optimizers import learning_rate
from phalanx.train.config import DomainRun, PipelineRun, RunConfig, SplitRun
from phalanx.train.runs.support import ENGINE_SECTIONS

_SHOWN_KEYS = 4

CHANGEABLE: Mapping[str, str] = MappingProxyType(
    {
        "train.steps": "only more steps: finished steps stay, later ones follow the schedule of the new length",
        "train.validate_every": "validation changes no weight",
        "train.early_stopping": "earlier validations stay, and the new rule is applied to those on its set",
        "train.stability": "finished steps stay, and later batches are judged by the new rule",
        "train.samples": "a generated sample changes no weight",
        "train.histograms": "a histogram of the state changes no weight",
        "data.phases": "finished phases stay unchanged; the loader refuses other changes",
        "data.repeats": "earlier batches stay; a limit that would have changed them is refused",
        "data.skip": "batches are skipped from here on; earlier batches stay",
        "data.dataset": "each group that gave samples must have the same tokens; new groups may be added",
        "rewards.timeout_s": "the timeout changes no reward that was in time",
        "checkpoint.every": "the time of a save changes no state",
        "checkpoint.keep": "older checkpoints are removed after the next one",
        "checkpoint.keep_every": "older checkpoints are removed after the next one",
        "checkpoint.best": "the best checkpoint is chosen among the later validations, if the set is another one",
        "checkpoint.sharded": "a checkpoint has the same tensors either way",
        "checkpoint.asynchronous": "a checkpoint has the bits of its own step either way",
        "evaluate": "suites measure the model and change no weight",
        "tracking": "trackers get metrics and change nothing in the run",
    }
)
"""The keys, or sections, that ``--resume`` may change, each with the consequence."""

LAYOUT: Mapping[str, str] = MappingProxyType(
    {
        f"parallel.{key}": "a checkpoint has whole tensors, which are divided again: the same training, up to rounding"
        for key in (
            *("dp", "tp", "pp", "cp", "context", "zero", "replicas", "schedule", "sequence_parallel", "offload"),
            *("activation_checkpointing", "compile", "min_dp", "max_dp", "restarts", "silence_s"),
        )
    }
)
"""The keys of ``[parallel]`` that ``--resume`` may change too, where ranks of one domain train before and after."""

CUT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("pipeline.stages", "pipeline.layers"),
            "a checkpoint has whole tensors, which the new stages take by name; norms are then summed by other stages",
        ),
        **{
            f"pipeline.{key}": "other machines may serve the stages; convicted and revoked ones stay out"
            for key in ("spares", "respawns", "remote_workers", "may_join", "layout", "layouts")
        },
    }
)
"""The keys of ``[pipeline]`` that ``--resume`` may change too, where workers serve the stages before and after."""


@dataclass(frozen=True)
class RunChanges:
    """The changes between the run file in a run directory and the run file given to ``--resume``."""

    before: RunConfig
    keys: Mapping[str, tuple[Any, Any]]

    @property
    def step_counts(self) -> tuple[int, int] | None:
        """How many steps there were to be and are to be now; None where as many."""
        return self.keys.get("train.steps")

    @property
    def cuts_anew(self) -> bool:
        """Whether the stages may have other layers from here on."""
        return any(key.partition(".")[2] in ("stages", "layers") for key in self.keys if key in CUT)

    def rates_at(self, run: RunConfig, step: int) -> tuple[float, float] | None:
        """The learning rate of a step by the old and by the new length; None where the length is the same."""
        if self.step_counts is None:
            return None
        was, now = self.step_counts
        return learning_rate(run.optimizer, step, was), learning_rate(run.optimizer, step, now)

    def describe_changes(self, run: RunConfig, step: int) -> str:
        """Describe the effect of the changes from a step on."""
        lines = [
            f"{key}: {_format_setting(old_value)} -> {_format_setting(here)}"
            for key, (old_value, here) in self.keys.items()
        ]
        if self.cuts_anew:
            lines.append(f"From step {step} on, the layers are cut into stages anew: every tensor keeps its bits")
        if any(key in LAYOUT for key in self.keys):
            lines.append(f"From step {step} on, whole tensors are divided for the new layout; only rounding changes")
        rates = self.rates_at(run, step)
        if rates is not None:
            lines.append(
                f"Steps before {step} stay unchanged. From step {step} on the learning rate follows the schedule of "
                f"{run.train.steps} steps: {rates[1]:.3g}, where the old length had {rates[0]:.3g}"
            )
        return "; ".join(lines)


def changes_between(before: RunConfig, now: RunConfig, where: str) -> RunChanges:
    """Return what differs between two run files, all of which a resumed run may change."""
    old_values, here = (dict(_flatten_config(run.model_dump(mode="json"))) for run in (before, now))
    keys = {key: (old_values.get(key), here.get(key)) for key in sorted(old_values.keys() | here.keys())}
    keys = {key: pair for key, pair in keys.items() if pair[0] != pair[1]}
    allowed = {
        **CHANGEABLE,
        **(LAYOUT if _has_whole_tensors(before) and _has_whole_tensors(now) else {}),
        **(CUT if _has_stages_of_workers(before) and _has_stages_of_workers(now) else {}),
    }
    # another engine explains the other differences, so it comes first
    refused = sorted(
        (key for key in keys if not any(key == name or key.startswith(f"{name}.") for name in allowed)),
        key=lambda key: key.partition(".")[0] not in ENGINE_SECTIONS,
    )
    instead = f"or begin a new run from its weights: --from {where} with another --run-dir"
    if refused:
        shown = ", ".join(f"{key} ({keys[key][0]!r} there, {keys[key][1]!r} here)" for key in refused[:_SHOWN_KEYS])
        raise ConfigError(
            f"{where}: holds another run: {shown}{', ...' if len(refused) > _SHOWN_KEYS else ''}; --resume may "
            f"change only {', '.join(allowed)}: use the values of {where}/config.toml, {instead}"
        ).with_facts(
            code="PHX-C016",
            file=where,
            key=refused[0],
            found=str(keys[refused[0]][1]),
            expected=str(keys[refused[0]][0]),
            do=f"use the values of {where}/config.toml",
        )
    if keys and isinstance(now, SplitRun):
        raise ConfigError(
            f"{where}: holds another run: {', '.join(keys)} differ, and an enclave's evidence and sealed states are "
            f"bound to every key of its run file: use the values of {where}/config.toml, or begin a new run"
        ).with_facts(code="PHX-C016", file=where, key=next(iter(keys)))
    if now.train.steps < before.train.steps:
        raise ConfigError(
            f"{where}: train.steps: found {now.train.steps}, expected {before.train.steps} or more: a run cannot be "
            f"shortened, because its learning rate depends on its length; use {before.train.steps}, {instead}"
        ).with_facts(code="PHX-C016", file=where, key="train.steps")
    return RunChanges(before, keys)


def _has_whole_tensors(run: RunConfig) -> bool:
    """Return whether a run's checkpoints are whole tensors that any layout of ranks can go on from.

    Islands have moments of their own, sites keep their ranks' states, DeepSpeed writes its own parts, and noise of
    privacy is drawn rank by rank.
    """
    if not isinstance(run, DomainRun):
        return False
    return run.parallel.outer is None and run.deepspeed is None and run.privacy is None


def _has_stages_of_workers(run: RunConfig) -> bool:
    """Return whether a run's layers may be cut anew: noise of privacy is drawn stage by stage."""
    return isinstance(run, PipelineRun) and run.privacy is None


def _flatten_config(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten_config(inner, f"{name}.{key}".removeprefix("."))
    else:
        yield name, value


def _format_setting(value: Any) -> str:
    return "left out" if value is None else str(value)
