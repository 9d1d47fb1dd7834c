"""Which microbatches are audited: decided by a secret key, after the stage has committed to all of them."""

import hashlib
import hmac
import math
from itertools import pairwise

from phalanx.config import canonical_json


class AuditDraw:
    """Stratified draws from a keyed pseudo-random function.

    The key stays with the owner. Its digest is in the audit log before step 0, so that a key
    revealed after the run proves that no draw was bent.

    Guarantees:
        Exactly ``ceil(q M)`` of M microbatches per stage and attempt, one from each of as many
        equal strata; without the key a draw tells nothing about any other.
    """

    def __init__(self, key: bytes, rate: float) -> None:
        self._key = key
        self.rate = rate

    @property
    def commitment(self) -> str:
        """SHA-256 of the key, hex."""
        return hashlib.sha256(self._key).hexdigest()

    def microbatches(self, *, step: int, epoch: int, stage: int, num_microbatches: int) -> tuple[int, ...]:
        """Draw for one stage and one attempt at a step."""
        count = math.ceil(self.rate * num_microbatches)
        edges = [round(n * num_microbatches / count) for n in range(count + 1)]
        return tuple(
            low + self._number(step, epoch, stage, n) % (high - low) for n, (low, high) in enumerate(pairwise(edges))
        )

    def _number(self, *where: int) -> int:
        # 64 bits more than any stratum needs, so that the modulo's bias is below 2^-48
        return int.from_bytes(hmac.digest(self._key, canonical_json(where), "sha256")[:8], "big")
