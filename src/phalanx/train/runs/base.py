"""The sections that every run has, their checks, and the optional parts that several engines share."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import (
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from phalanx.checkpoint import CheckpointConfig
from phalanx.config import RefusedKeyError, StrictModel, own_references, printable_text
from phalanx.data import DataConfig
from phalanx.errors import ConfigError
from phalanx.evaluate.suite import KINDS, list_suites
from phalanx.models import ModelConfig
from phalanx.objectives import OBJECTIVES, ObjectiveSettings, RolloutSettings
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline.config import GuardConfig
from phalanx.policy.policy_file import PolicyReference
from phalanx.rewards import RewardsConfig
from phalanx.rollouts import RolloutsConfig
from phalanx.security.privacy.config import PrivacyConfig
from phalanx.telemetry.sinks import SinkConfig
from phalanx.train.runs.row_privacy import LEARNED_BY_STAGES, data_faults
from phalanx.train.runs.support import (
    SECTIONS,
    WEIGHTED_OBJECTIVE,
    WHOLE_MODEL_OBJECTIVE,
    section_fault,
    unsupported_value,
)
from phalanx.train.train_section import LeakMeterConfig, TrainConfig

Faults = Iterator[str | ValueError]
REMOTE_TEXTS = "remote clients set these files in their client files, not the owner"


class EvaluateConfig(StrictModel):
    """Suites of ``phalanx eval`` that measure the model while it trains."""

    every: int = Field(ge=1)
    """Steps between two evaluations; the last step has one too."""
    suites: tuple[str, ...] = Field(default=("prose", "facts"), min_length=1, max_length=16)
    """Names of suites of this package that need log-likelihoods and no texts of the model."""
    limit: int | None = Field(default=None, ge=1)
    """At most so many rows of each suite, drawn by their digests."""


class BaseRun(StrictModel):
    """What every run has; one of its subclasses is the run of a run file.

    Attributes:
        engine: The engine's name as a column of the support matrix: its section, or two joined by a plus.
    """

    engine: ClassVar[str]
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    policy: PolicyReference | None = None
    """The organisation's policy, which the run must keep from its start to its release."""
    tracking: tuple[SinkConfig, ...] = ()
    """Where curves are sent beside the run's own files; without a section nothing is sent anywhere."""
    evaluate: EvaluateConfig | None = None
    """Suites that measure the model on the way; without the section it is validated only."""
    _name: str = PrivateAttr(default="run")
    _home: Path = PrivateAttr(default=Path())

    @classmethod
    def check_sections(cls, names: Collection[str]) -> None:
        """Refuse sections of another engine by presence, whatever they hold."""
        fault = cls._section_fault(names) or section_fault(cls.engine, set(names) - cls.model_fields.keys())
        if fault is not None:
            raise fault

    @classmethod
    def _section_fault(cls, names: Collection[str]) -> RefusedKeyError | None:
        """Describe conflicts between the sections that are there, beside the ones that the engine lacks."""
        return None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for fault in self._faults():
            raise fault if isinstance(fault, ValueError) else ValueError(fault)
        return self

    def _faults(self) -> Faults:
        """Describe values that conflict with each other; subclasses add the conflicts of their own sections."""
        yield from self._validation_faults()
        yield from self._objective_faults()
        fault = unsupported_value(self, self.engines)
        if fault is not None:
            yield fault
        yield from self._pair_faults()
        yield from self._stability_faults()
        if self.evaluate is not None:
            yield from self._evaluation_faults(self.evaluate)
        if self.train.steps and self.optimizer.warmup_steps >= self.train.steps:
            yield RefusedKeyError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} takes all of train.steps = "
                f"{self.train.steps}; lower it, or use optimizer.warmup_share instead",
                key="optimizer.warmup_steps",
                found=str(self.optimizer.warmup_steps),
                expected=f"below train.steps = {self.train.steps}",
                do="lower it, or use optimizer.warmup_share instead",
            )

    def _evaluation_faults(self, settings: EvaluateConfig) -> Faults:
        headers = list_suites()
        for name in settings.suites:
            header = headers.get(name)
            if header is None or KINDS[header.kind].writes or header.task is not None:
                able = ", ".join(n for n, h in headers.items() if not KINDS[h.kind].writes and h.task is None)
                why = "is no suite" if header is None else "needs texts of the model, or data; evaluate a checkpoint"
                yield f'evaluate.suites: "{name}" {why}; choices: {able}'
        for name, is_there in self._unevaluated.items():
            if is_there:
                yield f"[evaluate] excludes {name}; remove one, and use phalanx eval on a checkpoint"

    @property
    def _unevaluated(self) -> dict[str, bool]:
        """What no suite can measure on the way, and whether this run has it."""
        kind, adapter = self.train.objective_kind, self.model.adapter
        return {
            f'train.objective = "{kind}"': kind not in (WHOLE_MODEL_OBJECTIVE, WEIGHTED_OBJECTIVE),
            'data.attention = "document"': self.data.attention == "document",
            "model.adapter with virtual tokens": adapter is not None and adapter.kind != "lora",
        }

    def _stability_faults(self) -> Faults:
        rule = self.train.stability
        if rule is None or rule.action != "roll_back":
            return
        needs = 'train.stability.action = "roll_back"'
        if not self.checkpoint.every:
            yield f"{needs} returns to a checkpoint, but checkpoint.every = 0 saves the last step alone; set it"
        if self.stage_guard is not None and not self.stage_guard.is_enabled:
            yield f'{needs} needs states that are known to be right, but guard.mode is "off"; set action = "skip"'
        if self.train.learns_from_texts:
            yield f'{needs}: the texts of passed batches were written by weights that are gone; set action = "skip"'

    def _validation_faults(self) -> Faults:
        judges = {"checkpoint.best": self.checkpoint.best}
        if self.train.early_stopping is not None:
            judges["train.early_stopping.on"] = self.train.early_stopping.on
        set_names = self.validation_names
        for key, name in judges.items():
            if name is not None and name not in set_names:
                yield (
                    f'{key} = "{name}" is not a validation set of [data]; expected one of '
                    f"{', '.join(set_names) or 'none'}: name one, or add held-out text"
                )
        if self.checkpoint.best is not None and not self.train.validate_every:
            yield (
                "checkpoint.best compares several validations, but train.validate_every = 0 has only one at "
                "the end; set validate_every"
            )

    def _objective_faults(self) -> Faults:
        kind, data = self.train.objective_kind, self.data
        classifies = kind == "classification"
        if classifies and data.labelled is None:
            yield (
                'train.objective = "classification" needs labels, which data.sources lack; use data.labelled instead'
            )
        if data.labelled is not None and not classifies:
            yield f'data.labelled needs train.objective = "classification", got "{kind}"; change one of them'
        objective = OBJECTIVES.get(kind)
        if objective is None:
            return
        # rows that an objective makes say themselves which tokens see which
        if objective.rewriting is not None and data.attention == "document":
            yield (
                f'train.objective = "{kind}" defines the attention of its own rows and excludes data.attention '
                '= "document"; set attention = "across"'
            )
        if objective.attention == "bidirectional" and self.train.samples is not None:
            yield (
                f'train.samples: a model with attention in both directions (train.objective = "{kind}") cannot '
                "continue texts; remove samples"
            )

    def _pair_faults(self) -> Faults:
        writes_texts = isinstance(self.train.objective, RolloutSettings)
        if bool(self.data.prompts) != writes_texts:
            yield section_of_rollouts(self.train.objective_kind, "data.prompts", is_wanted=writes_texts)
        fault = self.train.objection_to_pairs(self.data.preferences is not None, *self.row_cuts)
        if fault is not None:
            yield fault
        pairs = self.data.preferences
        if pairs is not None and bool(pairs.sources) == self.has_remote_texts:
            yield (
                f"data.preferences.sources: not allowed; {REMOTE_TEXTS}"
                if pairs.sources
                else "data.preferences.sources: missing; add at least one"
            )
        talks = self.data.conversations
        if (talks is not None and talks.weighted) != (self.train.objective_kind == WEIGHTED_OBJECTIVE):
            yield (
                f'train.objective = "{self.train.objective_kind}": only "{WEIGHTED_OBJECTIVE}" reads the '
                "weights of data.conversations with weighted = true; set both or neither"
            )

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out optional sections that are absent, and keep one order of sections for all engines."""
        sections = write(self)
        return {name: sections[name] for name in SECTIONS if name in sections and getattr(self, name) not in (None, ())}

    @property
    def learned_objective(self) -> str | ObjectiveSettings:
        """What engines learn: the objective of ``[train]``, or several."""
        return self.train.objective

    @property
    def main_rows(self) -> int:
        """Rows of a batch that the objective of ``[train]`` learns from."""
        return self.train.batch_size

    @property
    def main_draws(self) -> int:
        """What a loader of ``[data]`` draws for a step: sequences, or pairs of them."""
        return self.main_rows // 2 if self.train.learns_pairs else self.main_rows

    @property
    def validation_names(self) -> tuple[str, ...]:
        """Names of all sets that the run is validated on."""
        return self.data.validation_names

    @property
    def engines(self) -> tuple[str, ...]:
        """The columns of the support matrix that hold of this run."""
        return (*self.engine.split("+"), self.engine)

    @property
    def row_cuts(self) -> tuple[int, int]:
        """Data parallel copies that share out a batch, and ranks that share a row."""
        return 1, 1

    @property
    def batches_a_step(self) -> int:
        """Batches of `train.batch_size` rows that one step trains on."""
        return 1

    @property
    def stage_guard(self) -> GuardConfig | None:
        """The guard of the stages that the run's own workers serve; None where they serve none."""
        return None

    @property
    def remote_workers(self) -> tuple[str, ...]:
        """Names of workers of stages that other people start."""
        return ()

    @property
    def has_remote_texts(self) -> bool:
        """Whether all texts are with parties that are processes of others."""
        return False

    @property
    def text_parties(self) -> tuple[str, ...]:
        """Names of the parties that share labelled texts."""
        return ()

    @property
    def can_journal(self) -> bool:
        """Whether states of single steps can be kept."""
        return False

    @property
    def journals(self) -> bool:
        """Whether the owner keeps a journal and every process its states: wherever it can, unless it is off."""
        return self.can_journal if self.checkpoint.journal is None else self.checkpoint.journal

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of all parties that may ever work beside the owner."""
        return ()

    @property
    def stage_workers(self) -> tuple[str, ...]:
        """Names of all workers that may ever serve a stage."""
        return ()

    @property
    def pki(self) -> str | None:
        """Directory of the authority that parties of other machines are certified by; None where the run makes one."""
        return None

    @property
    def certified_elsewhere(self) -> tuple[str, ...]:
        """Parties of other machines of which a certificate must be there before the run begins."""
        return ()

    @property
    def world(self) -> dict[str, int]:
        """How many processes there are, and how many stages they hold; of a domain, as its run file has it."""
        raise NotImplementedError

    def of_length(self, steps: int) -> Self:
        """Return the same run with so many steps in the place of its epochs, checked anew."""
        try:
            train = TrainConfig.model_validate({**self.train.model_dump(), "epochs": None, "steps": steps})
            return self.with_sections({"train": train})
        except ValidationError as exc:
            reasons = "; ".join(error["msg"].removeprefix("Value error, ") for error in exc.errors())
            raise ConfigError(f"train.epochs = {self.train.epochs:g} is train.steps = {steps}: {reasons}") from exc

    def require_steps(self, reader: str) -> None:
        """Return where the run file gives its length in steps."""
        if self.train.epochs is not None:
            raise ConfigError(
                f"train.epochs = {self.train.epochs:g}: {reader} does not count the training text, but `phalanx "
                "train RUN.toml --dry-run` does: use --unset train.epochs --set train.steps=N"
            )

    @property
    def name(self) -> str:
        """The run file's name without its ending; names the run directory."""
        return self._name

    @property
    def home(self) -> Path:
        """The run file's directory, where files of the user's own code are."""
        return self._home

    def placed_at(self, name: str, home: Path) -> Self:
        """Return the same run with the name and the directory of its run file."""
        run = self.model_copy()
        run._name, run._home = name, home
        return run

    @property
    def written(self) -> dict[str, Any]:
        """The sections that were written, by name; defaults that nobody wrote are not among them."""
        sections = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: section for name, section in sections.items() if section is not None}

    def with_sections(self, sections: Mapping[str, Any]) -> Self:
        """Return this run with other sections of its engine, checked anew; None takes one out."""
        written = {name: section for name, section in (self.written | dict(sections)).items() if section is not None}
        self.check_sections(written)
        return type(self)(**written).placed_at(self.name, self.home)

    @property
    def flat(self) -> dict[str, str | int | float | bool | None]:
        """The run file as a metrics sink is told: a value for each ``section.key``; a list as one text."""
        return dict(_flat(self.model_dump(mode="json")))

    @property
    def own_code(self) -> list[str]:
        """References to code of the user's own, attacks included, which the laboratory alone loads."""
        return own_references(self.model_dump(mode="json"))


class RolloutBase(BaseRun):
    """A run that may learn from texts that its model writes."""

    rewards: RewardsConfig | None = None
    rollouts: RolloutsConfig | None = None
    leak_meter: LeakMeterConfig | None = None

    def _faults(self) -> Faults:
        yield from super()._faults()
        kind = self.train.objective_kind
        if self.leak_meter is not None and kind != WHOLE_MODEL_OBJECTIVE:
            yield (
                f'[leak_meter] measures next tokens, but train.objective = "{kind}"; remove it, or set objective = '
                f'"{WHOLE_MODEL_OBJECTIVE}"'
            )
        train, settings = self.train, self.train.objective
        if (self.rewards is not None) != isinstance(settings, RolloutSettings):
            yield section_of_rollouts(kind, "[rewards]", is_wanted=self.rewards is None)
        if not isinstance(settings, RolloutSettings):
            if self.rollouts is not None:
                yield f'train.objective = "{kind}" does not use [rollouts]; remove it'
            return
        if self.rollouts is not None and train.precision != "fp32":
            yield (f'train.precision = "{train.precision}": texts of [rollouts] are checked in fp32 only; remove one')
        if self.rollouts is not None and self.rollouts.check.unread_weight < 1.0:
            yield from _weight_faults(kind, settings)
        if train.batch_size % settings.group:
            yield (
                f"train.batch_size = {train.batch_size} texts is not a multiple of train.objective.group = "
                f"{settings.group}; make it a multiple"
            )
        if train.epochs is not None:
            yield "train.epochs: epochs count passes over text, but this run generates its texts; set train.steps"
        if self.model.adapter is not None:
            yield "model.adapter: texts are generated without adapters only; remove it"


class PrivateBase(BaseRun):
    """A run that may hide its training rows behind noise."""

    privacy: PrivacyConfig | None = None

    def _faults(self) -> Faults:
        yield from super()._faults()
        if self.privacy is None:
            return
        if self.train.stability is not None:
            yield "[privacy] excludes train.stability: which batch is skipped would tell of its rows; remove it"
        learned = self._privately_learned
        for fault in (*self._privacy_faults(self.privacy), *data_faults(self.model, self.data, self.train, learned)):
            yield f"[privacy] excludes {fault}"
        if self.tracking and not self.engine.startswith("federated"):
            loss = "the loss of training rows would leave this machine without noise"
            yield f"[privacy] has no tracking: {loss}; remove it"

    @property
    def _privately_learned(self) -> tuple[str, ...]:
        """Objectives whose loss is a sum over rows."""
        return LEARNED_BY_STAGES

    def _privacy_faults(self, privacy: PrivacyConfig) -> Iterator[str]:
        """Describe the parts of the engine's own sections that the bound of ``[privacy]`` would not cover."""
        raise NotImplementedError


def _weight_faults(kind: str, settings: RolloutSettings) -> Faults:
    """Describe why texts cannot have weights: something of theirs is learned that is no advantage."""
    key = "rollouts.check.unread_weight"
    if settings.has_critic:
        yield f'{key}: the critic of train.objective = "{kind}" learns from every text alike; set it to 1.0'
    elif settings.kl and not settings.kl_in_reward:
        yield (
            f'{key}: train.objective.kl = {settings.kl:g} is a loss of its own in "{kind}", which has no weight; set '
            'kl to 0, or take "rloo", where it lowers the reward'
        )


def section_of_rollouts(kind: str, name: str, *, is_wanted: bool) -> str:
    """Describe a section of learning from the model's texts that is missing, or that has no use."""
    if is_wanted:
        return f'train.objective = "{kind}" learns from texts of the model and needs {name}; add it'
    return f'train.objective = "{kind}" does not use {name}; remove it'


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}".removeprefix("."))
    else:
        yield name, printable_text(json.dumps(value)) if isinstance(value, list) else value
