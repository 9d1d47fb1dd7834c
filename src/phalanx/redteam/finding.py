"""The finding of an attack: a score with its interval, the positive control, and its meaning for a decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.security.privacy.leakage import Interval

Outcome = Literal["found", "not found", "not judged"]


@dataclass(frozen=True)
class Score:
    """A figure of an attack.

    Attributes:
        chance: Score of the attack on a model that leaks nothing.
        n: Number of rows, prompts or documents that it is of.
        threshold: Found where the whole interval is above it; left out, above chance.
    """

    value: float
    interval: Interval
    chance: float
    n: int
    measure: str
    threshold: float | None = None

    @property
    def is_found(self) -> bool:
        """Whether the interval excludes the score of a model without the fault; a NaN excludes nothing."""
        return self.interval[0] > (self.chance if self.threshold is None else self.threshold)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "score": self.value,
            "interval": list(self.interval),
            "chance": self.chance,
            "n": self.n,
            "measure": self.measure,
        }


@dataclass(frozen=True)
class AttackFinding:
    """The finding of one attack on one model.

    Attributes:
        score: Left out of an attack that was not judged.
        examples: Texts that the model gave away or wrote; hostile data, to be escaped wherever they are shown.
        meaning: Advice to the person who must decide.
        reason: Reason for not judging it.
        control: The score of the same attack on an undefended model of its kind; None where none was made.
    """

    attack: str
    score: Score | None = None
    examples: tuple[str, ...] = ()
    meaning: str = ""
    details: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    control: Score | None = None

    @property
    def outcome(self) -> Outcome:
        """An attack without a score is never counted as passed; nor is one that failed where it had to win."""
        if self.score is None or (self.control is not None and not self.control.is_found):
            return "not judged"
        return "found" if self.score.is_found else "not found"

    @property
    def why_not(self) -> str:
        """Why it was not judged; empty where it was."""
        if self.score is not None and self.outcome == "not judged":
            return "the attack failed on its own positive control"
        return self.reason

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "attack": self.attack,
            "outcome": self.outcome,
            **({"score": None} if self.score is None else self.score.to_json()),
            "control": None if self.control is None else self.control.to_json(),
            "reason": self.why_not,
            "meaning": self.meaning,
            "examples": list(self.examples),
            "details": dict(self.details),
        }
