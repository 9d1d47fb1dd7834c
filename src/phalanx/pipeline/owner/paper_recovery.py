"""The recoveries of Lu et al. 2023, kept as a baseline: an alarm excludes no party, the step is attempted again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.engine import Verdict
from phalanx.errors import TrainingError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER

MAX_ATTEMPTS = 200
"""Attempts at one step, all of them attacked, after which `restart` gives up."""


@dataclass(frozen=True)
class Attempt:
    """One way to attempt a step.

    Attributes:
        number: Attempts at this step that `restart` has thrown away.
        bypassed: Stages that are left out: the activation passes them by, as does the gradient.
        frozen: Stages that keep their weights as they are.
    """

    number: int = 0
    bypassed: frozenset[int] = frozenset()
    frozen: frozenset[int] = frozenset()

    def serving(self, assignment: Assignment) -> Assignment:
        """The assignment of this attempt: the owner, which is trusted, hands on what a bypassed stage is sent."""
        return Assignment(
            {stage: OWNER if stage in self.bypassed else name for stage, name in assignment.holders.items()},
            {stage: name for stage, name in assignment.shadows.items() if stage not in self.bypassed},
        )

    def resting(self, assignment: Assignment) -> Assignment:
        """The parties that have the bypassed stages and do nothing with them."""
        return Assignment(self._of_bypassed(assignment.holders), self._of_bypassed(assignment.shadows))

    def _of_bypassed(self, parties: Mapping[int, str]) -> dict[int, str]:
        return {stage: name for stage, name in parties.items() if stage in self.bypassed}


PLAIN = Attempt()


def skipping(suspect: int, num_stages: int) -> Attempt:
    """The attempt after an alarm about a stage: it and its accuser are left out, its predecessor is frozen as well.

    The last stage is trusted and has the head: it is never left out and never frozen.

    Source: Lu et al. 2023, section 6.3.
    """
    last = {num_stages - 1}
    return Attempt(0, frozenset({suspect, suspect + 1} - last), frozenset({suspect - 1, suspect, suspect + 1} - last))


class PaperRecovery:
    """The paper's recovery says how a step is attempted after a verdict.

    Args:
        recovery: What follows a verdict.
        num_stages: Of the pipeline.

    Source: Lu et al. 2023, sections 6.1 (restart) and 6.3 (skip layer).
    """

    def __init__(self, recovery: Literal["restart", "skip_layer"], num_stages: int) -> None:
        self._recovery = recovery
        self._num_stages = num_stages
        self._step = -1
        self._attempt = PLAIN

    def answers(self, verdict: Verdict) -> bool:
        """Whether another attempt mends what the verdict is about; a wrong state would still be there."""
        is_middle = 0 < verdict.stage < self._num_stages - 1
        return verdict.offence != "state" and is_middle

    def after(self, verdict: Verdict, step: int) -> Attempt:
        """How to attempt `step` again.

        Raises:
            TrainingError: `restart` has tried too often; or a party lies although `skip_layer` left two stages out.
        """
        before = self.at(step)
        self._step = step
        if self._recovery == "restart":
            self._attempt = Attempt(before.number + 1)
            if self._attempt.number == MAX_ATTEMPTS:
                raise TrainingError(
                    f"step {step}: attacked in {MAX_ATTEMPTS} attempts in a row; restart never ends at this rate, "
                    'set guard.recovery = "takeover"'
                )
            return self._attempt
        if before.bypassed:
            left_out = " and ".join(map(str, sorted(before.bypassed)))
            raise TrainingError(
                f"step {step}: {verdict.party} lies at stage {verdict.stage} although stages {left_out} are left out; "
                'skip_layer knows one liar a step, set guard.recovery = "takeover"'
            )
        self._attempt = skipping(verdict.stage, self._num_stages)
        return self._attempt

    def at(self, step: int) -> Attempt:
        """How `step` is attempted now."""
        return self._attempt if step == self._step else PLAIN

    def forget_detour(self) -> None:
        """Let every stage take part again."""
        self._attempt = Attempt(self._attempt.number)
