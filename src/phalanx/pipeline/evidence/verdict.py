"""The verdict, which names exactly one guilty party, and the referee's work for it."""

from typing import Literal

from phalanx.config import StrictModel
from phalanx.pipeline.schedules.action import Direction

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
    "statistics",
]


class RefereeWork(StrictModel):
    """What the referee did again to settle one dispute."""

    microbatches: int = 0
    """Messages: forward, and input-backward where the dispute is about a gradient, of one stage's microbatch."""
    steps: int = 0
    """States and weight gradients: all microbatches of one stage, or its update."""


class Verdict(StrictModel):
    """One party is guilty; `reason` says where, what was found and what was allowed."""

    step: int
    stage: int
    party: str
    offence: Offence
    reason: str
    direction: Direction | None = None
    microbatch: int | None = None
    distance: float | None = None
    """Largest relative distance over tokens; None where digests were compared or a tensor is not finite."""
    allowed: float | None = None
    accuser: str | None = None
    evidence: str | None = None
    """Name of the evidence file under the run directory."""
    evidence_sha256: str | None = None
    """SHA-256 of that file, so that the signed log covers it."""
