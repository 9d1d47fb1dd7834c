"""The draw of audits: a secret key decides, after the stage has committed to all its microbatches."""

import hashlib
import hmac
import math
import secrets
from itertools import pairwise

from phalanx.config import canonical_json
from phalanx.pipeline.config import GuardConfig

# further draws of the same place, beside those of the strata, which count from 0
_WHOLE_STEP, _OWNER, _MOMENT, _ANY = -1, -2, -6, -7


class AuditDraw:
    """Stratified draws from a keyed pseudo-random function.

    The key stays with the owner. Its digest is in the audit log before step 0, and the nonce of each session is
    in the line that opens the session, so that a reader that is shown the key after the run can draw again.

    Args:
        key: Secret of the run, 32 bytes.
        nonce: Nonce of this session, 32 bytes from `fresh_nonce`; no secret.
        rate: q, the share of microbatches that is drawn per stage and attempt.
        step_rate: p, the share of (stage, attempt) pairs that are audited as a whole.
        owner_rate: The share of (stage, attempt) pairs that the owner itself redoes.
        min_audits: Microbatches that are drawn per stage and attempt at least, 0 or 1.

    Guarantees:
        Exactly ``ceil(q M)`` of M microbatches per stage and attempt, one from each of as many equal strata; with
        `min_audits` 0 and ``q M < 1``, one of all M in that share of the attempts, and none in the others. Without the
        key a draw reveals nothing about any other, and a session's draws reveal nothing about the same steps in
        another session.
    """

    def __init__(
        self,
        key: bytes,
        nonce: bytes,
        rate: float,
        *,
        step_rate: float = 0.0,
        owner_rate: float = 0.0,
        min_audits: int = 1,
    ) -> None:
        self._key = key
        self.nonce = nonce
        self._session_key = self.derive_secret(b"draws/1 " + nonce)
        self.rate = rate
        self._step_rate = step_rate
        self._owner_rate = owner_rate
        self._min_audits = min_audits

    @classmethod
    def from_guard(cls, key: bytes, nonce: bytes, guard: GuardConfig) -> "AuditDraw":
        """Draws at the rates of a run."""
        return cls(
            key,
            nonce,
            guard.audit_rate,
            step_rate=guard.step_audit_rate,
            owner_rate=guard.owner_audit_rate,
            min_audits=guard.min_audits,
        )

    @property
    def key_commitment(self) -> str:
        """SHA-256 of the key, hex."""
        return hashlib.sha256(self._key).hexdigest()

    def derive_secret(self, purpose: bytes) -> bytes:
        """A further secret for another purpose; tells nothing about the draws."""
        return hmac.digest(self._key, b"phalanx " + purpose, "sha256")

    def draw_microbatches(self, *, step: int, epoch: int, stage: int, num_microbatches: int) -> tuple[int, ...]:
        """Draw for one stage and one attempt at a step."""
        expected = self.rate * num_microbatches
        if not self._min_audits and self._draw_share(_ANY, step, epoch, stage) >= expected:
            return ()
        count = math.ceil(expected)
        edges = [round(n * num_microbatches / count) for n in range(count + 1)]
        return tuple(
            low + self._draw_number(step, epoch, stage, n) % (high - low)
            for n, (low, high) in enumerate(pairwise(edges))
        )

    def draws_whole_step(self, *, step: int, epoch: int, stage: int) -> bool:
        """Whether all work on a stage is audited in this attempt, weight gradient included."""
        return self._draw_share(_WHOLE_STEP, step, epoch, stage) < self._step_rate

    def draws_owner_audit(self, *, step: int, epoch: int, stage: int) -> bool:
        """Whether the owner itself redoes all of a stage's work in this attempt."""
        return self._draw_share(_OWNER, step, epoch, stage) < self._owner_rate

    def draw_moment(self, *, step: int, epoch: int, number: int) -> float:
        """A share from 0 to 1, for a moment of an attempt that no worker may foresee."""
        return self._draw_share(_MOMENT, step, epoch, number)

    def _draw_share(self, purpose: int, *where: int) -> float:
        return self._draw_number(*where, purpose) / 2**64

    def _draw_number(self, *where: int) -> int:
        # 64 bits more than any stratum needs, so that the modulo's bias is below 2^-48
        return int.from_bytes(hmac.digest(self._session_key, canonical_json(where), "sha256")[:8], "big")


def fresh_nonce() -> bytes:
    """Draw the nonce of one session: at every start and every resume a new one."""
    return secrets.token_bytes(32)
