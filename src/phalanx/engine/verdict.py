"""A verdict ends a dispute: it names exactly one guilty party."""

from typing import Literal

from phalanx.config import StrictModel

Offence = Literal[
    "message",
    "accusation",
    "equivocation",
    "forgery",
    "gradient",
    "state",
    "shape",
    "transfer",
    "collusion",
]


class Verdict(StrictModel):
    """One party is guilty; `reason` states the place, the measured value and the allowed one."""

    step: int
    stage: int
    party: str
    offence: Offence
    reason: str
    direction: Literal["forward", "backward"] | None = None
    microbatch: int | None = None
    distance: float | None = None
    """Largest relative distance over tokens; None where digests were compared or a tensor is not finite."""
    allowed: float | None = None
    accuser: str | None = None
    evidence: str | None = None
    """Name of the evidence file under the run directory."""
    evidence_sha256: str | None = None
    """SHA-256 of that file, so that the signed log covers it."""
