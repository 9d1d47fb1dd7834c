"""The draw of the texts that are read again: a secret key decides, after their worker has signed them."""

import hmac
import math

from phalanx.config import canonical_json

_DRAWS = b"phalanx rollout draws/1"


class CheckedShare:
    """Draws from a keyed pseudo-random function, for each answer anew.

    Args:
        key: Secret of the owner, 32 bytes.
        rate: The share of the texts of an answer; at least one of each answer is drawn where it is above 0.

    Guarantees:
        Exactly ``ceil(rate n)`` of n texts. The digest of the signed answer enters the draw, so a worker that has seen
        all earlier draws knows nothing of this one.
    """

    def __init__(self, key: bytes, rate: float) -> None:
        self._key = hmac.digest(key, _DRAWS, "sha256")
        self.rate = rate

    def draw_texts(self, worker: str, signed: str, texts: int) -> tuple[int, ...]:
        """Draw from the texts of one answer.

        Args:
            worker: The party that signed it.
            signed: Digest of the signed header.

        Returns:
            Places in the answer, rising.
        """
        count = min(texts, math.ceil(self.rate * texts))
        order = sorted(
            range(texts), key=lambda n: hmac.digest(self._key, canonical_json([worker, signed, n]), "sha256")
        )
        return tuple(sorted(order[:count]))
