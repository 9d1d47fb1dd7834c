"""The interface between an arm and the loop that trains it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.engine import StepInputs
from phalanx.lab.reproduce.attacker import Attacker
from phalanx.models import ModelSource, StageModule
from phalanx.pipeline import StepPlan
from phalanx.train import PipelineRun


@dataclass(frozen=True)
class ArmInputs:
    """The parts from which an arm is built.

    Attributes:
        attacker: The attacker; its schedule may be None.
        warm_up: Honest batches that an arm may calibrate itself with; never trained on.
    """

    run: PipelineRun
    source: ModelSource
    plan: StepPlan
    attacker: Attacker
    warm_up: Sequence[StepInputs]
    directory: Path


@dataclass
class Counts:
    """The counts of one training.

    Attributes:
        redone_steps: Attempts beyond the first, over all steps.
        alarms: Times that the arm thought something was wrong; None for an arm without a detector.
        honest_accused: Number of alarms about an honest stage's message or an honest party; None likewise.
        lies_missed: Falsified messages that were used; None likewise.
        evicted: Parties that were excluded or replaced, in order.
    """

    dropped_steps: int = 0
    redone_steps: int = 0
    alarms: int | None = None
    honest_accused: int | None = None
    lies_missed: int | None = None
    evicted: tuple[str, ...] = ()


class Arm(AbstractContextManager["Arm"], Protocol):
    """One way to train under attack."""

    def step_arm(self, step: int, inputs: StepInputs) -> None:
        """Run one optimizer step to its end, whatever that is for this arm."""

    def current_stages(self) -> Iterator[StageModule]:
        """All stages in order, as they are now."""

    def weights_digest(self) -> str:
        """SHA-256 over all parameters by name, independent of the layout."""

    @property
    def event_counts(self) -> Counts:
        """What has happened so far."""
