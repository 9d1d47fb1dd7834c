"""Tolerances between honest parties, the verdict on a worker beyond them, and dismissals without one."""

from typing import Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.pipeline.protocol.message import Digest, PartyName, Step

RolloutOffence = Literal["form", "sketch", "logprob", "draw", "stale", "equivocation"]
"""What a worker can be convicted of, all of it by records that it signed:

- form: a text that no honest worker sends, whatever the weights: cut short, going on after its end
- sketch: hidden states of other weights, or of another prompt
- logprob: log-probabilities that these weights do not give
- draw: a token that lost its draw: other weights, temperature or rule, a text of another place, the best of several
- stale: log-probabilities that fit an older policy that it wrote by, and not the one of the request
- equivocation: two different answers to one request
"""

DismissalCause = Literal["borders", "reward", "undecided", "unanswered", "frames", "lost", "revoked"]
"""Why a worker is left out without a conviction:

- borders: the second-best token too often where two are nearly equal, counted over all its answers
- reward: a reward that the text does not earn by the owner's rule
- undecided: texts that are off, and may be off because a router chose other experts by rounding
- unanswered: more requests without an answer in time than `RolloutCheck.max_unanswered` allows
- frames: malformed frames, or far more frames than requests
- lost: its link failed
- revoked: the owner has revoked its certificate
"""


class RolloutTolerance(StrictModel):
    """Tolerances between honest computations; the defaults are for float32 weights on any CPU or GPU.

    Attributes:
        margin: Allowed difference of the logits that decide a draw.
        logprob: Allowed difference of a log-probability, in logits: at a temperature below 1 it is divided by that
            temperature.
        sketch: Relative distance of a sketch.
        border_rate: The largest share of honest tokens for which another token wins at the checker.
        router: Allowed difference of the logits by which a router chooses experts: nearer experts may be chosen in
            either order.
    """

    margin: float = Field(default=1e-3, ge=0.0, le=100.0)
    logprob: float = Field(default=1e-3, ge=0.0, le=100.0)
    sketch: float = Field(default=1e-3, ge=0.0, le=10.0)
    border_rate: float = Field(default=1e-4, ge=0.0, le=1.0)
    router: float = Field(default=2e-5, ge=0.0, le=1.0)

    def narrower_parts(self, other: "RolloutTolerance") -> tuple[str, ...]:
        """Return the names of tolerances that are smaller here than in another one."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) < getattr(other, name))


class RolloutDismissal(StrictModel):
    """One worker is left out from now on, and convicted of nothing.

    Attributes:
        step: Step of the request at which the owner decided.
    """

    party: PartyName
    step: Step
    cause: DismissalCause
    reason: str


class RolloutVerdict(StrictModel):
    """One worker is guilty; `reason` names the place, the measured and the allowed value.

    Attributes:
        prompt: Number of the prompt; None where the offence is not about one text.
        sample: Number of the text within its prompt.
        measured: Largest value that was found; None where it is no finite number or nothing was measured.
        checked: Tokens of the answer that were read again.
    """

    party: PartyName
    step: Step
    request: Digest
    offence: RolloutOffence
    reason: str
    prompt: int | None = None
    sample: int | None = None
    measured: float | None = None
    allowed: float | None = None
    checked: int = 0
    evidence: str | None = None
    evidence_sha256: str | None = None
