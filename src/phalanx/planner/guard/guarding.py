"""The costs of verification and sealing, as factors that were measured elsewhere in the project."""

import json
from dataclasses import dataclass
from importlib import resources

AUDITED_SHARE = 0.72
"""Forward and backward to the inputs, in parts of a microbatch's whole work."""

FIXED_SHARE = 0.015
"""Signing, hashing and comparing, in parts of a step's work."""

SEALED_BYTES_PER_S = 1.26e9
"""TLS 1.3 with AES-256-GCM over one connection, both ends on one core of the machine that it was measured on."""


@dataclass(frozen=True)
class Verification:
    """The share of others' work that is done again.

    Attributes:
        audit_rate: q: the share of microbatches recomputed forward and backward to the inputs.
        step_audit_rate: p: how often a whole step is recomputed, weight gradients included.
        owner_audit_rate: How often the owner redoes a whole step itself.
    """

    audit_rate: float
    step_audit_rate: float = 0.0
    owner_audit_rate: float = 0.0

    @property
    def extra_compute(self) -> float:
        """Compute beyond the unguarded run's, as a share of it. Source: the design's section 2: ``0.72 q + p``."""
        return AUDITED_SHARE * self.audit_rate + self.step_audit_rate + self.owner_audit_rate + FIXED_SHARE

    def extra_time(self, bubble: float) -> float:
        """Share of a step's time that is added when audits fill the pipeline's idle time first.

        Args:
            bubble: Idle share of the unguarded step; what is recomputed fits in there, what is fixed does not.
        """
        recomputed = self.extra_compute - FIXED_SHARE
        busy = 1.0 - bubble
        return max(0.0, recomputed * busy - bubble) + FIXED_SHARE * busy


def sealed_bandwidth(bytes_per_s: float, cipher_bytes_per_s: float = SEALED_BYTES_PER_S) -> float:
    """Bytes a second over a link that encrypts before it sends, one after the other."""
    return 1.0 / (1.0 / bytes_per_s + 1.0 / cipher_bytes_per_s)


@dataclass(frozen=True)
class GuardCosts:
    """Measured shares; a test compares each with the raw results that are named.

    Attributes:
        audited_share: Work on an audited microbatch, as a share of all work on one.
        screened_share: The same where its weight gradient screens the claimed sum.
        fixed_share: Signatures, digests, commitments and upkeep, as a share of the unguarded run.
        doubted_honest: Honest weight gradients that the screen doubts, the most of any measured model.
        found_gross: Gross lies about a weight gradient that it doubts, the least of any measured model and lie.
        sources: Raw results by figure.
    """

    audited_share: float
    screened_share: float
    fixed_share: float
    doubted_honest: float
    found_gross: float
    sources: dict[str, str]


def measured_costs() -> GuardCosts:
    """The shipped figures."""
    text = resources.files("phalanx.planner").joinpath("data", "guard_costs.json").read_text(encoding="utf-8")
    return GuardCosts(**json.loads(text))
