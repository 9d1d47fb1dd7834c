"""A run with a verified pipeline: the owner's own, or the middle part of another engine's run."""

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import field_validator

from phalanx.config import RefusedKeyError
from phalanx.models import LoraConfig
from phalanx.pipeline.config import AttackConfig, GuardConfig, PipelineConfig, with_standard_preset
from phalanx.pipeline.party_layout import unshared_adapter
from phalanx.security.privacy.config import PrivacyConfig
from phalanx.train.runs.base import BaseRun, Faults, RolloutBase
from phalanx.train.runs.mixed import MixedBase

_UNDONE = {
    "keep_states": "a published step could be repeated with the same rows without a charge",
    "classes": "a gradient with noise does not show how wrong it may be",
}
_GUARDED: dict[str, object] = {"keep_states": 0, "classes": "one"}


class GuardedBase(BaseRun):
    """A run in which somebody owns stages that workers serve: the owner of the run, an enclave, or each site."""

    pipeline: PipelineConfig = PipelineConfig()
    guard: GuardConfig = GuardConfig()

    @field_validator("guard", mode="before")
    @classmethod
    def _name_preset(cls, section: Any) -> Any:
        """Give the preset `standard` to a guard that is written as a section and names none."""
        return with_standard_preset(section) if isinstance(section, dict) else section

    def _faults(self) -> Faults:
        yield from super()._faults()
        if self.guard.shadow_upkeep.adapters_only and self.model.adapter is None:
            yield (
                'guard.shadow = "adapters" promises that only adapters change, but [model] has none; give '
                'model.adapter a rank, or set guard.shadow = "gradient"'
            )


class StagedBase(GuardedBase):
    """A run whose own workers serve stages, honest or played by the laboratory."""

    attack: AttackConfig = AttackConfig()

    def _faults(self) -> Faults:
        yield from super()._faults()
        middle = range(1, self.pipeline.stages - 1)
        if stray := [
            stage for attacker in self.attack.single_attacks for stage in attacker.stages if stage not in middle
        ]:
            yield RefusedKeyError(
                f"attack.stages has {stray}: only workers can attack, and they hold the middle stages "
                f"{list(middle)}: the first and the last stage are the owner's; set attack.stages to some of the "
                "middle ones",
                key="attack.stages",
                found=str(stray),
                expected=f"some of {list(middle)}",
                do="name middle stages",
            )
        if not all(attacker.stages for attacker in self.attack.single_attacks):
            yield f'attack.stages is empty; name middle stages, {list(middle)}, or set kind = "none"'

    @property
    def stage_guard(self) -> GuardConfig | None:
        return self.guard

    @property
    def stage_workers(self) -> tuple[str, ...]:
        return (*self.pipeline.worker_names, *self.pipeline.late_workers)


class PipelineRun(StagedBase, RolloutBase, MixedBase):
    """A run of a verified pipeline: the owner has the first and the last stage, and workers have the others."""

    engine: ClassVar[str] = "pipeline"

    def _faults(self) -> Faults:
        yield from super()._faults()
        if self.attack.kind != "none" and self.pipeline.remote_workers:
            yield (
                "attack needs local workers; the laboratory starts a remote attacker: see the output of "
                "`phalanx attack --kinds KIND`"
            )
        yield from self._layout_faults()
        if self.checkpoint.journal and not self.can_journal:
            yield (
                'checkpoint.journal = true needs train.device = "cpu", no encryption, and with remote_workers '
                "a guard, which verifies their saved states; remove it"
            )
        if self.train.learns_from_texts and self.guard.commit_lag > 0:
            yield (
                f"guard.commit_lag = {self.guard.commit_lag}: texts are generated with verified weights only; "
                "set it to 0"
            )

    def _layout_faults(self) -> Faults:
        shared = [name for name in self.pipeline.worker_names if self.pipeline.layout_of(name).num_ranks > 1]
        if not shared:
            return
        if self.guard.is_enabled and self.guard.classes == "one":
            yield (
                f"pipeline.layout gives {shared[0]} several ranks, which sum in another order than the owner; "
                'set guard.classes = "mixed"'
            )
        if (fault := unshared_adapter(self.model.adapter)) is not None:
            yield f"pipeline.layout gives {shared[0]} several ranks: {fault}"

    def _privacy_faults(self, privacy: PrivacyConfig) -> Iterator[str]:
        train = self.train
        if train.microbatches != train.batch_size:
            yield (
                f"train.microbatches = {train.microbatches} for train.batch_size = {train.batch_size}: stages clip "
                "single rows, so each microbatch is one; set both to the rows for which a step has room"
            )
        if privacy.mean_rows is not None and privacy.mean_rows > train.batch_size:
            yield (
                f"privacy.mean_rows = {privacy.mean_rows} but room for train.batch_size = {train.batch_size}; lower it"
            )
        if privacy.mean_rows is not None and privacy.sampling == "order":
            yield 'privacy.mean_rows with sampling = "order": each step has train.batch_size rows; remove it'
        if "clipping" in privacy.model_fields_set:
            yield "privacy.clipping: with one row a microbatch, a stage has the gradient of each row; remove it"
        if train.epochs is not None:
            yield "train.epochs: the number of rows of a step varies; set train.steps"
        if train.device != "cpu":
            yield (
                f'train.device = "{train.device}": noise and clipping of stages are not supported there; set it to '
                '"cpu"'
            )
        if self.pipeline.layout is not None or self.pipeline.layouts is not None:
            yield "pipeline.layout: each rank of a worker sees a part of a row's gradient; remove it"
        if isinstance(self.model.adapter, LoraConfig) and self.model.adapter.dropout:
            yield (
                f"model.adapter.dropout = {self.model.adapter.dropout}: auditors draw it by the index of a "
                "microbatch, which would reveal the number of rows before it; set it to 0"
            )
        yield from _guard_faults(self.guard)

    @property
    def can_journal(self) -> bool:
        unverified = bool(self.pipeline.remote_workers) and not self.guard.is_enabled
        return not (unverified or self.train.device != "cpu" or self.checkpoint.encrypt)

    @property
    def remote_workers(self) -> tuple[str, ...]:
        return self.pipeline.remote_workers

    @property
    def workers(self) -> tuple[str, ...]:
        return self.stage_workers

    @property
    def pki(self) -> str | None:
        return self.pipeline.pki

    @property
    def certified_elsewhere(self) -> tuple[str, ...]:
        return (*self.pipeline.remote_workers, *self.pipeline.may_join)

    @property
    def world(self) -> dict[str, int]:
        ranks = sum(self.pipeline.layout_of(name).num_ranks for name in self.pipeline.worker_names)
        return {"processes": 1 + ranks, "stages": self.pipeline.stages}


def _guard_faults(guard: GuardConfig) -> Iterator[str]:
    """Describe what would let a step be published whose noise no other party has computed, or be undone afterwards."""
    if guard.mode != "phalanx" or not guard.shadow_upkeep.in_lockstep:
        yield (
            f'guard.mode = "{guard.mode}" with shadow = "{guard.shadow}": a step without noise could be '
            'published before its detection; set mode = "phalanx" and shadow = "lockstep"'
        )
    for name, only in _GUARDED.items():
        if (value := getattr(guard, name)) != only:
            yield f"guard.{name} = {json.dumps(value)}: {_UNDONE[name]}; set it to {json.dumps(only)}"
