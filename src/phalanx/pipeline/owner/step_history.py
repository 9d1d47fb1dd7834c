"""The history of the last steps: enough to replay one stage, and to do the steps again."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from phalanx.engine import StepInputs
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol.messages import StateDigest
from phalanx.pipeline.verify.ledger import StepLedger


@dataclass(frozen=True)
class PastStep:
    """One applied step.

    Attributes:
        ledger: What every party had committed to.
        assignment: Holders and shadows at the time.
        inputs: The owner's batch.
    """

    ledger: StepLedger
    assignment: Assignment
    inputs: StepInputs

    @property
    def agreed(self) -> Mapping[int, StateDigest]:
        """Digest of each watched stage before the step."""
        return self.ledger.agreed


def slim(step: PastStep) -> PastStep:
    """The step without the headers of its messages and the reports of its audits: what was committed to remains."""
    ledger = step.ledger
    bare = replace(
        ledger,
        commits={stage: said.model_copy(update={"received": (), "sent": ()}) for stage, said in ledger.commits.items()},
        commit_headers={},
        messages={},
        held={},
        reports={},
        awaited_audits=set(),
    )
    return replace(step, ledger=bare)


class StepHistory:
    """The last `undoable_steps` applied steps, without a gap."""

    def __init__(self, undoable_steps: int) -> None:
        self._steps: deque[PastStep] = deque(maxlen=undoable_steps)

    def add(self, step: PastStep) -> None:
        """Remember the step that is about to be applied."""
        self._steps.append(step)

    def get(self, step: int) -> PastStep | None:
        """A step that is remembered."""
        return next((past for past in self._steps if past.ledger.step == step), None)

    def since(self, step: int) -> Iterator[PastStep]:
        """The remembered steps from this one on, in order."""
        return iter([past for past in self._steps if past.ledger.step >= step])

    @property
    def oldest(self) -> int | None:
        """The first step that is remembered."""
        return self._steps[0].ledger.step if self._steps else None

    def forget_from(self, step: int) -> None:
        """Forget this step and later ones: they were undone."""
        while self._steps and self._steps[-1].ledger.step >= step:
            self._steps.pop()
