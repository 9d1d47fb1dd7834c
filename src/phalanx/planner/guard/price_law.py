"""The price law of the guard: CPU seconds and bytes of a step by parameters, tokens and audits."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

STATE_BYTES = 12.0
"""Weight and both moments of one trained number, in fp32."""
_NUMBER_BYTES = 4.0


@dataclass(frozen=True)
class StepSize:
    """The size of one step of a run.

    Attributes:
        watched_parameters: Trained numbers of the stages in other hands.
        watched_share: Work of these stages, as a share of the model's.
        watched_stages: How many stages are in other hands.
        width: Numbers that a token has between stages.
    """

    parameters: float
    watched_parameters: float
    watched_share: float
    watched_stages: int
    stages: int
    microbatches: int
    tokens: int
    width: int

    @classmethod
    def of_equal_stages(
        cls, parameters: float, width: int, tokens: int, *, stages: int, microbatches: int
    ) -> "StepSize | None":
        """Take the stages for equal and all weights for trained; None where the owner has every stage."""
        if stages <= 2:
            return None
        share = (stages - 2) / stages
        return cls(parameters, parameters * share, share, stages - 2, stages, microbatches, tokens, width)

    @property
    def sent_numbers(self) -> float:
        """Numbers that cross between stages in a step, both ways."""
        return 2.0 * (self.stages - 1) * self.tokens * self.width

    @property
    def boundary_bytes(self) -> float:
        """Bytes that cross between stages in a step, both ways."""
        return _NUMBER_BYTES * self.sent_numbers


@dataclass(frozen=True)
class AuditLoad:
    """The audits that a guard draws, per watched stage and step.

    Attributes:
        microbatches: Microbatches that are recomputed by the shadow, in the mean.
        owner_steps: Whole steps that the owner redoes, in the mean.
        screened: Whether an audit computes a weight gradient as well.
        kept_every: Steps from one state on the owner's disk to the next; 0 where none is kept.
        shadows: Copies of a stage besides its holder's; each has the upkeep of one, and only the first audits.
    """

    microbatches: float
    owner_steps: float
    screened: bool
    kept_every: int = 0
    shadows: int = 1


@dataclass(frozen=True)
class PriceLaw:
    """CPU seconds of one step on the machine that was measured; ratios carry over to others.

    Attributes:
        base_step_s: Of the unguarded step, whatever its size.
        base_parameter_s: Of the unguarded step, per parameter.
        base_work_s: Of the unguarded step, per parameter and token.
        step_s: Of the guard's upkeep, whatever the step's size.
        parameter_s: Of the guard's upkeep, per trained number of a watched stage.
        number_s: Of the guard's upkeep, per number that crosses between stages.
        audit_s: Of a recomputed microbatch, whatever its size: its order, its inputs and its report.
        audited_share: Work on an audited microbatch, as a share of the stage's work on one.
        screened_share: The same where its weight gradient screens the sum.
        owner_share: Work on a step that the owner redoes, as a share of the stage's work on it.
        owner_parameter_s: The same, per trained number of the stage: its state is fetched and checked.
        memory_number_bytes: Memory that a guard takes, per trained number of a watched stage.
    """

    base_step_s: float
    base_parameter_s: float
    base_work_s: float
    step_s: float
    parameter_s: float
    number_s: float
    audit_s: float
    audited_share: float
    screened_share: float
    owner_share: float
    owner_parameter_s: float
    memory_number_bytes: float
    source: str

    def base_seconds(self, size: StepSize) -> float:
        """CPU seconds of the unguarded step."""
        return self.base_step_s + size.parameters * (self.base_parameter_s + self.base_work_s * size.tokens)

    def audit_seconds(self, microbatch_s: float, *, screened: bool) -> float:
        """CPU seconds of one recomputed microbatch, for one that takes the stage so long."""
        return self.audit_s + microbatch_s * (self.screened_share if screened else self.audited_share)

    def extra_parts(self, size: StepSize, load: AuditLoad) -> Mapping[str, float]:
        """CPU seconds that the guard adds to a step, by what they grow with."""
        work = size.parameters * self.base_work_s * size.tokens * size.watched_share
        unit_s = self.audit_seconds(work / (size.watched_stages * size.microbatches), screened=load.screened)
        kept = self.owner_parameter_s / load.kept_every if load.kept_every else 0.0
        return {
            "step": self.step_s,
            # of a second shadow that is too much by the holder's own digest, which nothing has measured alone
            "parameters": size.watched_parameters * (self.parameter_s * load.shadows + kept),
            "tokens": size.sent_numbers * self.number_s,
            "audits": size.watched_stages * load.microbatches * unit_s,
            "owner_audits": load.owner_steps
            * (work * self.owner_share + size.watched_parameters * self.owner_parameter_s),
        }

    def extra_share(self, size: StepSize, load: AuditLoad) -> float:
        """Extra CPU time, as a share of the unguarded step's."""
        return math.fsum(self.extra_parts(size, load).values()) / self.base_seconds(size)


def extra_bytes_share(size: StepSize, load: AuditLoad, upkeep_bytes: float) -> float:
    """Return the extra bytes of a step by formula, as a share of what crosses between the stages without a guard.

    Args:
        upkeep_bytes: Bytes a step and trained number that keep one shadow fresh.
    """
    state = size.watched_parameters * state_bytes_per_number(load, upkeep_bytes)
    # an audit fetches the input and the gradient of the output
    fetched = size.watched_stages * (load.microbatches / size.microbatches + load.owner_steps)
    return (state + fetched * 2.0 * size.tokens * size.width * _NUMBER_BYTES) / size.boundary_bytes


def state_bytes_per_number(load: AuditLoad, upkeep_bytes: float) -> float:
    """Return the bytes of a step for each trained number of a watched stage: upkeep, kept states, owner's audits."""
    return upkeep_bytes * load.shadows + STATE_BYTES * (
        load.owner_steps + (1.0 / load.kept_every if load.kept_every else 0.0)
    )


def measured_law() -> PriceLaw:
    """Return the shipped law, fitted to the committed result that it names."""
    text = resources.files("phalanx.planner").joinpath("data", "guard_law.json").read_text(encoding="utf-8")
    return PriceLaw(**json.loads(text))
