"""The run file: one section per part of the project, checked together; `exclusions.py` has the exclusions."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import (
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from phalanx.checkpoint import CheckpointConfig
from phalanx.config import (
    RefusedKeyError,
    StrictModel,
    check_relative_paths,
    load_config,
    own_references,
    pin_own_code,
    printable,
)
from phalanx.data import DataConfig
from phalanx.errors import ConfigError
from phalanx.federated.config import FederatedConfig
from phalanx.models import ModelConfig
from phalanx.objectives import OBJECTIVES
from phalanx.optimizers import OptimizerConfig
from phalanx.parallel import ParallelConfig
from phalanx.parallel.deepspeed import DeepSpeedConfig
from phalanx.pipeline.config import AttackConfig, GuardConfig, PipelineConfig, with_standard
from phalanx.pipeline.party_layout import unshared_adapter
from phalanx.rewards import RewardsConfig
from phalanx.rollouts import RolloutsConfig
from phalanx.security.privacy.config import PrivacyConfig
from phalanx.split import ENCLAVE, SplitConfig
from phalanx.telemetry.sinks import SinkConfig
from phalanx.train.exclusions import ENGINES, WEIGHTED_OBJECTIVE, contradiction, excluded_by, refused_value
from phalanx.train.federated_faults import federated_fault
from phalanx.train.split_faults import split_fault
from phalanx.train.train_section import TrainConfig

RUN_RECORD = "run.json"
"""The file of a run directory that says which run it is."""
_FEWEST_JOINED = 3
"""Stages of the pipeline of an enclave, which has the first and the last one itself."""
_THIRD_PARTY = 3
"""Workers at least, for one of them to be neither a stage's holder nor its shadow."""


class RunConfig(StrictModel):
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig | None = None
    deepspeed: DeepSpeedConfig | None = None
    split: SplitConfig | None = None
    federated: FederatedConfig | None = None
    pipeline: PipelineConfig = PipelineConfig()
    guard: GuardConfig = GuardConfig()
    attack: AttackConfig = AttackConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rewards: RewardsConfig | None = None
    rollouts: RolloutsConfig | None = None
    privacy: PrivacyConfig | None = None
    tracking: tuple[SinkConfig, ...] = ()
    """Where curves are sent beside the run's own files; without a section nothing is sent anywhere."""
    _name: str = PrivateAttr(default="run")
    _home: Path = PrivateAttr(default=Path())

    @field_validator("guard", mode="before")
    @classmethod
    def _name_preset(cls, section: Any) -> Any:
        """Give the preset `standard` to a guard that is written as a section and names none."""
        return with_standard(section) if isinstance(section, dict) else section

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        """By presence: a section that repeats the defaults was asked for as much as any other."""
        written = {name for name in self.model_fields_set if getattr(self, name) is not None}
        fault = contradiction(written, workers_see=self.is_joined)
        if fault is not None:
            first, *_ = fault.partition(" exclude")
            raise RefusedKeyError(fault, key=first, found="both", expected="one of them", do="remove one")
        if self.is_joined and "pipeline" not in written:
            raise ValueError(
                "split.workers_see_hidden_states = true needs workers of middle stages; add [pipeline], or remove it"
            )
        return self

    @model_validator(mode="after")
    def _check_domain(self) -> Self:
        if self.parallel is not None and self.parallel.outer is not None:
            self._check_islands(self.parallel.outer.every)
        if self.deepspeed is not None and self.parallel is None:
            raise ValueError("[deepspeed] needs the ranks of [parallel]; add [parallel]")
        return self

    def _check_islands(self, every: int) -> None:
        """Between outer steps islands have different weights, and there is no one model to measure or save."""
        steps = {
            "train.steps": self.train.steps,
            "train.validate_every": self.train.validate_every,
            "checkpoint.every": self.checkpoint.every,
        }
        for name, number in steps.items():
            if number % every:
                nearest = max(1, round(number / every)) * every
                raise ValueError(
                    f"{name} = {number} is not a multiple of parallel.outer.every = {every}, and islands differ "
                    f"between two outer steps; set it to {nearest}"
                )

    @model_validator(mode="after")
    def _check_validation_names(self) -> Self:
        judges = {"checkpoint.best": self.checkpoint.best}
        if self.train.early_stopping is not None:
            judges["train.early_stopping.on"] = self.train.early_stopping.on
        set_names = self.data.validation_names
        for key, name in judges.items():
            if name is not None and name not in set_names:
                raise ValueError(
                    f'{key} = "{name}" is not a validation set of [data]; expected one of '
                    f"{', '.join(set_names) or 'none'}: name one, or add held-out text"
                )
        if self.checkpoint.best is not None and not self.train.validate_every:
            raise ValueError(
                "checkpoint.best compares several validations, but train.validate_every = 0 has only one at the "
                "end; set validate_every"
            )
        return self

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        classifies = self.train.objective_kind == "classification"
        if classifies and self.data.labelled is None:
            raise ValueError(
                'train.objective = "classification" needs labels, which data.sources lack; use data.labelled instead'
            )
        if self.data.labelled is not None and not classifies:
            raise ValueError(
                f'data.labelled needs train.objective = "classification", got "{self.train.objective_kind}"; change '
                "one of them"
            )
        self._check_attention()
        return self

    def _check_attention(self) -> None:
        """Rows that an objective makes say themselves which tokens see which."""
        kind = self.train.objective_kind
        objective = OBJECTIVES.get(kind)
        if objective is None:
            return
        if objective.rewriting is not None and self.data.attention == "document":
            raise ValueError(
                f'train.objective = "{kind}" defines the attention of its own rows and excludes data.attention = '
                '"document"; set attention = "across"'
            )
        if objective.attention == "bidirectional" and self.train.samples is not None:
            raise ValueError(
                f'train.samples: a model with attention in both directions (train.objective = "{kind}") cannot '
                "continue texts; remove samples"
            )

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if self.split is None:
            return self
        if self.model.adapter is None:
            raise ValueError("[split] trains adapters in the enclave, but [model] has none; add [model.adapter]")
        if self.is_joined and self.pipeline.stages < _FEWEST_JOINED:
            raise ValueError(
                f"pipeline.stages = {self.pipeline.stages} beside [split]: the enclave has the first and the last "
                f"stage, and workers need one between them; set it to {_FEWEST_JOINED} or more"
            )
        if self.split.clients > self.train.microbatches:
            raise ValueError(
                f"split.clients = {self.split.clients} share train.microbatches = {self.train.microbatches}, so "
                "some clients would get none; raise microbatches"
            )
        return self

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        cuts = (1, 1) if self.parallel is None else (self.parallel.dp, self.parallel.cp)
        fault = split_fault(self) or refused_value(self) or federated_fault(self)
        fault = fault or self.train.objection_to_pairs(self.data.preferences is not None, *cuts)
        if fault is not None:
            raise ValueError(fault)
        talks = self.data.conversations
        if (talks is not None and talks.weighted) != (self.train.objective_kind == WEIGHTED_OBJECTIVE):
            raise ValueError(
                f'train.objective = "{self.train.objective_kind}": only "{WEIGHTED_OBJECTIVE}" reads the weights of '
                "data.conversations with weighted = true; set both or neither"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        middle = range(1, self.pipeline.stages - 1)
        if stray := [stage for attacker in self.attack.attackers for stage in attacker.stages if stage not in middle]:
            raise RefusedKeyError(
                f"attack.stages has {stray}: only workers can attack, and they hold the middle stages "
                f"{list(middle)}; the first and the last stage are the owner's",
                key="attack.stages",
                found=str(stray),
                expected=f"some of {list(middle)}",
                do="name middle stages",
            )
        if self.guard.upkeep.adapters_only and self.model.adapter is None:
            raise ValueError(
                'guard.shadow = "adapters" promises that only adapters change, but [model] has none; give '
                'model.adapter a rank, or set guard.shadow = "gradient"'
            )
        if not all(attacker.stages for attacker in self.attack.attackers):
            raise ValueError(f'attack.stages is empty; name middle stages, {list(middle)}, or set kind = "none"')
        if self.attack.kind != "none" and self.pipeline.remote_workers:
            raise ValueError(
                "attack needs local workers; the laboratory starts a remote attacker: see the output of `phalanx "
                "attack --kinds KIND`"
            )
        shared = [name for name in self.pipeline.workers if self.pipeline.layout_of(name).world > 1]
        if shared and self.guard.enabled and self.guard.classes == "one":
            raise ValueError(
                f"pipeline.layout gives {shared[0]} several ranks, which sum in another order than the owner; set "
                'guard.classes = "mixed"'
            )
        if (fault := unshared_adapter(self.model.adapter) if shared else None) is not None:
            raise ValueError(f"pipeline.layout gives {shared[0]} several ranks: {fault}")
        if self.checkpoint.journal and not self.can_journal:
            raise ValueError(
                'checkpoint.journal = true needs train.device = "cpu", no encryption, and with remote_workers a '
                "guard, which verifies their saved states; remove it"
            )
        if self.train.steps and self.optimizer.warmup_steps >= self.train.steps:
            raise RefusedKeyError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} takes all of train.steps = "
                f"{self.train.steps}; lower it, or use optimizer.warmup_share instead",
                key="optimizer.warmup_steps",
                found=str(self.optimizer.warmup_steps),
                expected=f"below train.steps = {self.train.steps}",
                do="lower it, or use optimizer.warmup_share instead",
            )
        return self

    @model_serializer(mode="wrap")
    def _without_the_other(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the sections of the engine that the run does not have."""
        engines = {name for name in ENGINES if getattr(self, name) is not None}
        left_out = (set(ENGINES) - engines) | excluded_by(engines, workers_see=self.is_joined)
        left_out |= {"pipeline", "guard"} if self.federated is not None and not self.has_site_stages else set()
        left_out |= {name for name in ("rewards", "rollouts", "privacy", "tracking") if not getattr(self, name)}
        return {name: value for name, value in write(self).items() if name not in left_out}

    @property
    def is_joined(self) -> bool:
        """Whether the enclave of a split owns a pipeline, with workers that serve the middle stages of its part."""
        return self.split is not None and self.split.workers_see_hidden_states

    @property
    def is_domain(self) -> bool:
        """Whether the ranks of ``[parallel]`` are the run's own; those of a site belong to the site."""
        return self.parallel is not None and self.federated is None

    @property
    def has_site_stages(self) -> bool:
        """Whether each site of ``[federated]`` owns a verified pipeline: where the section is written beside it."""
        return self.federated is not None and "pipeline" in self.model_fields_set

    @property
    def has_stages(self) -> bool:
        """Whether there is a verified pipeline; a domain and an enclave with its whole part have none."""
        return self.parallel is None and self.federated is None and (self.split is None or self.is_joined)

    @property
    def journals(self) -> bool:
        """Whether the owner keeps a journal and every process its states: wherever it can, unless it is off."""
        return self.can_journal if self.checkpoint.journal is None else self.checkpoint.journal

    @property
    def can_journal(self) -> bool:
        """Whether states of single steps can be kept: on CPUs, in the clear, and verified where workers are remote."""
        unverified = bool(self.pipeline.remote_workers) and not self.guard.enabled
        elsewhere = self.train.device != "cpu" or any(getattr(self, name) is not None for name in ENGINES)
        return not (unverified or elsewhere or self.checkpoint.encrypt)

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of all parties that may ever work beside the owner; the ranks of a domain have none."""
        if self.split is not None:
            return (ENCLAVE, *self.split.client_names, *self.split.masked_workers)
        return self.stage_workers if self.federated is None else self.federated.sites

    @property
    def stage_workers(self) -> tuple[str, ...]:
        """Names of all workers that may ever serve a stage."""
        return (*self.pipeline.workers, *self.pipeline.late_workers) if self.has_stages else ()

    @property
    def pki(self) -> str | None:
        """Directory of the authority that parties of other machines are certified by; None where the run makes one."""
        section = self.split or self.federated or self.pipeline
        return section.pki

    @property
    def certified_elsewhere(self) -> tuple[str, ...]:
        """Parties of other machines of which a certificate must be there before the run begins."""
        if self.split is not None:
            return (ENCLAVE,) if self.split.remote_enclave else ()
        if self.federated is not None:
            return self.federated.sites if self.federated.pki else ()
        return (*self.pipeline.remote_workers, *self.pipeline.may_join)

    @property
    def world(self) -> dict[str, int]:
        """How many processes there are, and how many stages they hold; of a domain, as its run file has it."""
        if self.split is not None:
            processes = 2 + len(self.split.masked_workers) + len(self.split.remote_clients)
            stages = 2
            if self.is_joined:
                processes, stages = processes + len(self.pipeline.workers), 1 + self.pipeline.stages
            return {"processes": processes, "stages": stages, "clients": self.split.clients}
        if self.federated is not None:
            sites, stages, processes_per_site = (
                len(self.federated.sites),
                1,
                1 if self.parallel is None else self.parallel.world,
            )
            if self.has_site_stages:
                stages, processes_per_site = self.pipeline.stages, 1 + len(self.pipeline.workers)
            return {"processes": 1 + sites * processes_per_site, "stages": stages, "sites": sites}
        if self.parallel is None:
            ranks = sum(self.pipeline.layout_of(name).world for name in self.pipeline.workers)
            return {"processes": 1 + ranks, "stages": self.pipeline.stages}
        return self.parallel.figures

    def of_length(self, steps: int) -> "RunConfig":
        """Return the same run with so many steps in the place of its epochs, checked anew.

        Raises:
            ConfigError: So many do not fit the rest.
        """
        try:
            train = TrainConfig.model_validate({**self.train.model_dump(), "epochs": None, "steps": steps})
            return self.with_sections({"train": train})
        except ValidationError as exc:
            reasons = "; ".join(error["msg"].removeprefix("Value error, ") for error in exc.errors())
            raise ConfigError(f"train.epochs = {self.train.epochs:g} is train.steps = {steps}: {reasons}") from exc

    def require_steps(self, reader: str) -> None:
        """Return where the run file gives its length in steps.

        Args:
            reader: Reader of the length, for the message.

        Raises:
            ConfigError: It gives epochs, which only the data can be counted for.
        """
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

    def with_sections(self, sections: Mapping[str, Any]) -> "RunConfig":
        """Return this run with other sections, checked anew; None takes one out.

        Raises:
            ValueError: They do not go together.
        """
        # only what was written: sections exclude each other by their presence
        written = {name: getattr(self, name) for name in self.model_fields_set} | dict(sections)
        config = RunConfig(**{name: section for name, section in written.items() if section is not None})
        config._name, config._home = self._name, self._home
        return config

    @property
    def flat(self) -> dict[str, str | int | float | bool | None]:
        """The run file as a metrics sink is told: a value for each ``section.key``; a list as one text."""
        return dict(_flat(self.model_dump(mode="json")))

    @property
    def own_code(self) -> list[str]:
        """References to code of the user's own, attacks included, which the laboratory alone loads."""
        return own_references(self.model_dump(mode="json"))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}".removeprefix("."))
    else:
        yield name, printable(json.dumps(value)) if isinstance(value, list) else value


def load_run(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file.

    Args:
        overrides: ``section.key=value`` strings.

    Raises:
        ConfigError: Names the file, the key, the value found and the choices.

    Guarantees:
        Code of the user's own that the file names is pinned by its digest and not run.
    """
    run = load_config(Path(path), RunConfig, overrides, pin_own_code)
    run._name, run._home = Path(path).stem, Path(path).parent
    if not (run.home / RUN_RECORD).exists():
        # in the directory of a run they are those of the run file that it was begun with
        check_relative_paths(run.model_dump(mode="json"), Path(path))
    return run
