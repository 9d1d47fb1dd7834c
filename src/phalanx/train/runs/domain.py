"""A run of one domain: ranks that trust each other share the model and the data by ``[parallel]``."""

from collections.abc import Collection, Iterator
from typing import ClassVar

from phalanx.config import RefusedKeyError
from phalanx.objectives import OBJECTIVES
from phalanx.parallel import ParallelConfig
from phalanx.parallel.deepspeed import DeepSpeedConfig
from phalanx.security.privacy.config import PrivacyConfig
from phalanx.train.runs.base import Faults, PrivateBase, RolloutBase
from phalanx.train.runs.mixed import MixedBase
from phalanx.train.runs.support import ABSENT_SECTIONS, exclusion, missing_section, section_fault

_OPTIMIZER_STATE_ALONE = 1
"""The level of ZeRO that leaves weights and gradients whole."""
_COPIES_THAT_SHARE = 2


class RankedBase(PrivateBase):
    """A run whose model is trained by ranks: all of it, or the model of each site."""

    parallel: ParallelConfig

    @property
    def row_cuts(self) -> tuple[int, int]:
        return self.parallel.dp, self.parallel.cp

    @property
    def steps_a_rate(self) -> int:
        """Steps of the ranks that have the same learning rate."""
        return 1

    def _faults(self) -> Faults:
        yield from super()._faults()
        layout = self.parallel
        fewest = layout.min_dp_copies * layout.cp // layout.num_islands
        if self.train.precision == "bf16_weights" and (
            layout.zero <= _OPTIMIZER_STATE_ALONE or fewest < _COPIES_THAT_SHARE
        ):
            yield (
                'train.precision = "bf16_weights": copies that share parameters keep them in float32 and gather them '
                f"in bf16, which takes zero = 2 or 3 and at least {_COPIES_THAT_SHARE} copies; found zero = "
                f'{layout.zero} and {fewest}; change parallel, or set train.precision = "bf16"'
            )

    def _private_layout_faults(self) -> Iterator[str]:
        """Describe the layouts in which the gradient of a single row cannot be clipped."""
        layout = self.parallel
        if layout.max_dp_copies > layout.dp:
            yield "parallel.max_dp: rows are drawn for a fixed number of copies; remove it"
        for name in ("tp", "pp", "cp"):
            if (size := getattr(layout, name)) > 1:
                yield (
                    f"parallel.{name} = {size}: each rank would see a part of a row's gradient and of its norm; "
                    "set it to 1"
                )
        if layout.zero > _OPTIMIZER_STATE_ALONE:
            yield (
                f"parallel.zero = {layout.zero}: ranks add up and divide gradients before single rows are clipped; "
                f"set it to {_OPTIMIZER_STATE_ALONE}, which divides the optimizer's state"
            )
        plain: dict[str, object] = {"gradient_compression": "none", "activation_checkpointing": "none"}
        for name, only in {**plain, "compile": False, "outer": None}.items():
            if getattr(layout, name) != only:
                yield f"parallel.{name}: per-row gradients are not supported with it; remove it"


class DomainRun(RankedBase, RolloutBase, MixedBase):
    """A run of the ranks of ``[parallel]``; nobody else works for it."""

    engine: ClassVar[str] = "parallel"
    deepspeed: DeepSpeedConfig | None = None

    @classmethod
    def _section_fault(cls, names: Collection[str]) -> RefusedKeyError | None:
        if "deepspeed" in names and "parallel" not in names:
            return section_fault("deepspeed", names) or missing_section(
                "parallel", "[deepspeed] needs the ranks of [parallel]", "add [parallel]"
            )
        return None

    def _faults(self) -> Faults:
        if self.parallel.outer is not None:
            yield from self._island_faults(self.parallel.outer.every)
        yield from super()._faults()
        kind, cuts = self.train.objective_kind, self.parallel.cp
        if self.train.learns_from_texts and cuts > 1 and not OBJECTIVES[kind].shares_rows:
            yield f'parallel.cp = {cuts} divides rows, but train.objective = "{kind}" needs whole rows; set it to 1'
        if self.objectives:
            yield from self._mixed_faults()

    def _mixed_faults(self) -> Faults:
        layout, section = self.parallel, "objectives"
        if self.deepspeed is not None:
            yield exclusion("deepspeed", section, ABSENT_SECTIONS["deepspeed"][section])
        for name, why in {"tp": "divides the vocabulary", "cp": "divides rows"}.items():
            if (size := getattr(layout, name)) > 1:
                yield f"parallel.{name} = {size} {why}, but [[objectives]] need whole rows and logits; set it to 1"
        if layout.outer is not None:
            yield "parallel.outer: each island would divide the losses of [[objectives]] by its own rows; remove one"

    @property
    def _unevaluated(self) -> dict[str, bool]:
        return {"[deepspeed]": self.deepspeed is not None, **super()._unevaluated}

    def _island_faults(self, every: int) -> Faults:
        """Describe steps between outer steps: islands differ there, and there is no one model to measure or save."""
        steps = {
            **({} if self.leak_meter is None else {"leak_meter.every": self.leak_meter.every}),
            "train.steps": self.train.steps,
            "train.validate_every": self.train.validate_every,
            "checkpoint.every": self.checkpoint.every,
            **({} if self.evaluate is None else {"evaluate.every": self.evaluate.every}),
        }
        for name, number in steps.items():
            if number % every:
                nearest = max(1, round(number / every)) * every
                yield (
                    f"{name} = {number} is not a multiple of parallel.outer.every = {every}, and islands differ "
                    f"between two outer steps; set it to {nearest}"
                )

    def _privacy_faults(self, privacy: PrivacyConfig) -> Iterator[str]:
        if privacy.mean_rows is not None:
            yield "privacy.mean_rows: a step draws train.batch_size rows on average here; remove it"
        if self.deepspeed is not None:
            yield "[deepspeed]: it sums gradients before single rows can be clipped; remove one"
        yield from self._private_layout_faults()

    @property
    def engines(self) -> tuple[str, ...]:
        return ("parallel",) if self.deepspeed is None else ("parallel", "deepspeed")

    @property
    def world(self) -> dict[str, int]:
        return self.parallel.layout_figures
