"""The budget of one step, from the plan: the most that one party sends to another, and that is written to disk."""

from dataclasses import dataclass, field

from phalanx.pipeline.assignment.stage_memory import stage_counts
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.tensor_stream import PART_BYTES
from phalanx.transport import Allowance

_NUMBER = 4
_WORD_BYTES = 2048
"""Of a message without payload; what holds passed-on headers is counted by these."""

_TWICE = 2
"""Straight and, where a link has failed, once more by way of the owner."""

LINES_AT_FIRST = 16
"""Of each party's refused messages in a step, and of what it reports, before only powers of two are written down."""

LINE_BYTES = 4096
"""Longest line of the audit log about one of them: 500 characters of what was said, of four bytes, and the rest."""


def allowance_of(plan: StepPlan) -> Allowance:
    """Return the bytes that one party may send to another in one attempt at a step, beside answers to requests.

    | what | messages |
    |---|---|
    | tensors to both adjacent stages of every stage | 2 M K |
    | the same for auditors and for receivers that missed one | 2 M K |
    | commitments, reports, hits, standings | 4 M K + 16 K + 256 |
    | gradients, and states: of an upkeep, and of changed roles | their parts |

    All of it twice. An honest party has none refused but in a race with changing roles: 4 M K + 64.
    """
    num_stages, tensors = len(plan.stages), 2 * plan.microbatches * len(plan.stages)
    rows = [stage_counts(plan, stage) for stage in range(num_stages)]
    states = sum(row.size_bytes + 2 * _NUMBER * row.trainable for row in rows)
    bulk = sum(_NUMBER * row.trainable for row in rows) + 2 * states
    parts = bulk // PART_BYTES + 3 * num_stages
    num_bytes_of_words = 4 * tensors + 16 * num_stages + 256
    frames = 2 * tensors + parts + num_bytes_of_words
    return Allowance(
        messages=_TWICE * frames,
        size_bytes=_TWICE * (2 * tensors * plan.hidden_bytes + bulk + frames * _WORD_BYTES),
        refusals=2 * tensors + 64,
    )


def max_answer_bytes(plan: StepPlan) -> int:
    """Of one frame that was asked for, at most, where it is not part of something longer."""
    return plan.hidden_bytes + _WORD_BYTES


@dataclass
class EventSampler:
    """A sample of an attempt's like events to write down: the first few, then twice, four, eight times as many."""

    _seen: dict[tuple[str, str], int] = field(default_factory=dict)

    def number_event(self, kind: str, party: str) -> int | None:
        """Count one more; returns which one it is, or None when it is not written down."""
        number = self._seen[kind, party] = self._seen.get((kind, party), 0) + 1
        return number if number <= LINES_AT_FIRST or number & (number - 1) == 0 else None
