"""Groups of texts that follow one another through the stages of a model, so that all stages work at the same time."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.errors import PhalanxError
from phalanx.serve.stages.messages import StageStep
from phalanx.serve.stages.transcript import ServedText, StageParty, StageTranscript
from phalanx.transport import SignedHeader

_MIN_GROUP_ROWS = 16


@dataclass(frozen=True)
class SentStep:
    """A step that a party has been sent.

    Attributes:
        payload: Hidden states as they were sent.
        deadline: Monotonic second at which the party counts as silent.
    """

    party: StageParty
    parts: Sequence[tuple[StageTranscript, Tensor]]
    step: StageStep
    header: SignedHeader
    payload: bytes
    deadline: float


@dataclass
class StagedTexts:
    """Texts that go through the stages together.

    Attributes:
        parts: Hidden states of each text behind the stages that it has passed.
        step: The step that a stage was sent last.
    """

    texts: Sequence[ServedText]
    parts: Sequence[Tensor]
    step: SentStep | None = None

    def require_step(self) -> SentStep:
        """Return the step that a stage computes."""
        if self.step is None:
            raise PhalanxError("a group of texts waits for a stage that was sent nothing")
        return self.step


def cut_groups(lengths: Sequence[int], num_stages: int) -> list[slice]:
    """Cut texts into groups for stages that work at the same time.

    A group of few rows costs a stage as much as one of many, since each reads all weights: fewer than 16 rows are not
    cut off. One stage has nobody to work beside.

    Args:
        lengths: Rows of each text in this step.
    """
    num_groups = 2 * num_stages if num_stages > 1 else 1
    size = max(sum(lengths) / num_groups, _MIN_GROUP_ROWS)
    cuts, rows, rest = [0], 0, sum(lengths)
    for place, length in enumerate(lengths, 1):
        rows, rest = rows + length, rest - length
        if num_groups > 1 and rows >= size and rest >= _MIN_GROUP_ROWS:
            cuts.append(place)
            rows = 0
    return [slice(*pair) for pair in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]
