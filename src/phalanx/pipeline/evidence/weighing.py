"""The one judge: pure functions from signed statements and recomputed values to at most one guilty party.

The run calls them before it convicts, and so does the reader of evidence: there is no second finding that could differ.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from phalanx.engine import Offence
from phalanx.pipeline.protocol.messages import StateDigest
from phalanx.pipeline.stage.rounding import MARGIN
from phalanx.pipeline.tolerance.distance import distance_to_truth, gradient_distance, token_distance
from phalanx.security.crypto import digest_hex
from phalanx.transport.tensors import tensor_buffers


@dataclass
class Limit:
    """The largest distance of an honest party of another numeric class.

    Attributes:
        allowed: Tau at first; more where this message is rounded worse, once that was measured.
        measure: Measures that; called once, when a distance is beyond tau.
    """

    allowed: float
    measure: Callable[[], float] | None = None

    def is_beyond(self, distance: float) -> bool:
        """Whether a distance, which may be no number, is more than any honest party's."""
        if not distance <= self.allowed and self.measure is not None:
            self.allowed, self.measure = self.measure(), None
        return not distance <= self.allowed


@dataclass(frozen=True)
class MessageClaim:
    """What one party signed to be a message.

    Attributes:
        tensor: The tensor of that digest; None where no party has brought it.
        limit: Allowed distance; None inside one numeric class, where any other bit is a lie.
    """

    party: str
    digest: str
    tensor: Tensor | None
    limit: Limit | None


@dataclass(frozen=True)
class MessageFinding:
    """One guilty party, or one that has withheld bytes of its own signature.

    Attributes:
        offence: "transfer" convicts nobody: the bytes that decide were not brought.
        distance: Distance of its tensor to the recomputed one; None where digests were compared.
        allowed: The largest distance that is no lie; 0 inside one numeric class.
    """

    party: str
    offence: Offence
    distance: float | None = None
    allowed: float = 0.0


def weigh_message(truth: Tensor, output: MessageClaim, report: MessageClaim | None) -> MessageFinding | None:
    """Judge a message and the report of its auditor by a recomputation from signed inputs with signed weights.

    Args:
        report: The auditor's claim; None where the judge has recomputed on its own.

    Returns:
        The stage where its message is off; else the auditor where its claim is; None where neither is.
    """
    finding = _weigh_claim(truth, output, "message")
    return _weigh_claim(truth, report, "accusation") if finding is None and report is not None else finding


def _weigh_claim(truth: Tensor, claim: MessageClaim, offence: Offence) -> MessageFinding | None:
    distance = None if claim.tensor is None else token_distance(claim.tensor, truth)
    if claim.limit is None:
        is_off = claim.digest != digest_hex(tensor_buffers(truth.contiguous()))
        return MessageFinding(claim.party, offence, distance) if is_off else None
    if claim.tensor is None:
        return MessageFinding(claim.party, "transfer")
    if not claim.limit.is_beyond(distance_to_truth(claim.tensor, truth)):
        return None
    return MessageFinding(claim.party, offence, distance, claim.limit.allowed)


def vouches_for_lie(truth: Tensor, output: MessageClaim, reported: str) -> bool:
    """Whether an auditor reported the very digest of a message that is off: it is the liar's accomplice."""
    return reported == output.digest and weigh_message(truth, output, None) is not None


@dataclass(frozen=True)
class GradientClaim:
    """The weight gradient of a step as one party signed it: its digest, and its squared norm (None: not finite)."""

    party: str
    digest: str
    norm_squared: float | None


def weigh_gradient(
    truth: tuple[str, float | None], commitment: GradientClaim, other: GradientClaim | None
) -> str | None:
    """Judge two claims about a weight gradient inside one numeric class.

    Args:
        truth: Digest and squared norm of the recomputed gradient.
        other: Contradicting claim of the auditor or shadow.

    Returns:
        The stage where its claim is off; else the other party where its claim is; None where neither is.
    """
    for claim in (commitment, other):
        if claim is not None and (claim.digest, claim.norm_squared) != truth:
            return claim.party
    return None


_NORM_TOLERANCE = 1e-5
"""Relative, of squared norms that were added up in another order; the clip coefficient moves by half of it at most."""


def same_norm(one: float | None, other: float | None, *, alike: bool) -> bool:
    """Whether two parties may both have got these squared norms from the same numbers."""
    if alike or one is None or other is None:
        return one == other
    return abs(one - other) <= _NORM_TOLERANCE * max(abs(one), abs(other))


@dataclass(frozen=True)
class GradientDistance:
    """How far a signed weight gradient is from the recomputed one, where bits do not decide.

    Attributes:
        allowed: The largest distance that is no lie.
    """

    distance: float
    allowed: float

    @property
    def is_off(self) -> bool:
        """Whether the distance, which may be no number, is more than any honest party's."""
        return not self.distance <= self.allowed


def weigh_distant_gradient(
    truth: Mapping[str, Tensor],
    claimed: Mapping[str, Tensor],
    tolerance: float,
    redo_exactly: Callable[[], Mapping[str, Tensor]],
) -> GradientDistance:
    """Judge a weight gradient across numeric classes, or of a party of several ranks.

    Args:
        redo_exactly: Recomputes in float64; called where the distance is beyond tau.

    Returns:
        The distance, and what is allowed: tau, or eight times the rounding error of `truth` where that is more. Where
        honest numbers overflow, rounding decides which: any gradient is allowed then.
    """
    distance = gradient_distance(claimed, truth)
    if distance <= tolerance:
        return GradientDistance(distance, tolerance)
    if not all(bool(tensor.isfinite().all()) for tensor in truth.values()):
        return GradientDistance(0.0, tolerance)
    return GradientDistance(distance, max(tolerance, MARGIN * gradient_distance(truth, redo_exactly())))


def weigh_update(truth: StateDigest, signed: Mapping[str, StateDigest]) -> tuple[str, ...]:
    """Return the parties that signed another state than the redone update leads to."""
    return tuple(party for party, state in signed.items() if state != truth)
