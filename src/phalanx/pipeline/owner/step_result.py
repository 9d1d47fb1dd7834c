"""The engine's result of one finished step."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.pipeline.evidence.verdict import Verdict


@dataclass(frozen=True)
class StepResult:
    """What one step did; `attempts` above 1 means that it was redone."""

    step: int
    loss: float
    num_targets: int
    gradient_norm: float
    attempts: int
    num_audits: int
    num_alarms: int
    verdicts: tuple[Verdict, ...]
    phases: dict[str, float]
    bytes_by_link: dict[str, int]
    restarts: int = 0
    """Attempts that the paper's `restart` threw away."""
    skipped: tuple[int, ...] = ()
    """Stages that the paper's `skip_layer` left out of this step."""
    steps_redone: int = 0
    """Earlier steps that were undone and done again before this one."""
    claimed_links: tuple[str, ...] = ()
    """Links of `bytes_by_link` between two workers; their figures are the senders' claims."""
    batch: str = ""
    """Digest of the tokens and labels that the step was applied with."""


def describe_failure(step: int, loss: float, norm: float, norms: Mapping[int, float | None]) -> str:
    """Describe a step with a loss or a gradient that is not a number; `norms`: squared, by stage."""
    stages = [str(stage) for stage, square in sorted(norms.items()) if square is None]
    where = f" (of stages {', '.join(stages)})" if stages else ""
    return (
        f"step {step}: loss {loss}, gradient norm {norm}{where}, and every audit agrees; "
        "lower optimizer.lr or set optimizer.clip_norm, then --resume from the last checkpoint"
    )
