"""The roles of RFC 9334 as a run uses them: an attester makes evidence, a verifier appraises it by its own nonce."""

import secrets
import threading
from datetime import datetime, timedelta
from typing import Protocol

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.appraisal import AppraisalResult, appraise_evidence
from phalanx.security.tee.binding import NONCE_BYTES, Binding
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.policy import Policy
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

NONCE_LIFETIME = timedelta(minutes=2)
_MAX_OPEN = 4096


class Attester(Protocol):
    """An attester makes evidence of the machine that it runs on."""

    @property
    def kind(self) -> str:
        """Kind of the evidence, a name in `BACKENDS`."""

    def make_evidence(self, binding: Binding) -> Evidence:
        """Have the hardware sign a binding."""


class Verifier:
    """A verifier draws nonces and appraises evidence; each nonce is good for one appraisal, and for two minutes.

    Guarantees:
        Evidence for a nonce that this object did not draw, has judged before or drew too long ago is refused.
        Any number of threads may use it.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._open: dict[bytes, datetime] = {}
        self._lock = threading.Lock()

    def new_nonce(self, now: datetime) -> bytes:
        """Draw a nonce for one attester; the oldest of 4096 open ones is forgotten."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        with self._lock:
            if len(self._open) >= _MAX_OPEN:
                del self._open[next(iter(self._open))]
            self._open[nonce] = now + NONCE_LIFETIME
        return nonce

    def appraise_evidence(self, evidence: Evidence, binding: Binding, now: datetime) -> AppraisalResult:
        """Appraise evidence for a nonce of this verifier, which is used up whatever the result.

        Args:
            binding: The nonce, and the key, run and role that this verifier knows by itself.

        Raises:
            RefusedEvidenceError: As `appraise`; `wrong_nonce` for a nonce that is not open.
        """
        with self._lock:
            until = self._open.pop(binding.nonce, None)
        if until is None or now > until:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_NONCE,
                "the nonce was not drawn here, was used before or is too old; ask for a new one",
            )
        return appraise_evidence(evidence, self._policy, binding, now)
