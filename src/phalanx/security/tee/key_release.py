"""The release of a key to a freshly appraised attester, over the connection with the key that the evidence binds."""

from collections.abc import Iterable
from datetime import datetime

from phalanx.errors import RefusedEvidenceError
from phalanx.security.crypto import Peer
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.eat import Token, read_token
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason


class KeyRelease:
    """One key in the hands of a relying party that trusts one verifier.

    Guarantees:
        Every nonce gets the key at most once. A token for another key, run, role or nonce gets nothing.
    """

    def __init__(self, key: bytes, verifier: Peer, run: bytes, role: str, kinds: Iterable[str]) -> None:
        self._key, self._verifier, self._run, self._role = bytes(key), verifier, run, role
        self._kinds = frozenset(kinds)
        self._used: dict[bytes, datetime] = {}

    def release_key(self, token: bytes, nonce: bytes, tls_key: bytes, now: datetime) -> bytes:
        """Return the key for one connection.

        Args:
            token: The verifier's, as `issue_token` made it.
            tls_key: Digest of the key that the peer has just proven to hold in the TLS handshake, 32 bytes.

        Raises:
            RefusedEvidenceError: The token is not this verifier's, has ended, is about something else, is of a kind
                that is not good enough, or got the key before.
        """
        claims = read_token(token, self._verifier, Binding(nonce, tls_key, self._run, self._role), now)
        if claims.kind not in self._kinds:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.INSECURE_KIND,
                f"key: evidence of kind {claims.kind[:40]!r}, accepted {', '.join(self._kinds)}",
            )
        self._use_nonce(claims, now)
        return self._key

    def _use_nonce(self, token: Token, now: datetime) -> None:
        self._used = {nonce: expires for nonce, expires in self._used.items() if expires > now}
        if token.binding.nonce in self._used:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_NONCE, "key: was released for this nonce before; draw a new one"
            )
        self._used[token.binding.nonce] = token.expires

    def __repr__(self) -> str:
        return f"KeyRelease(role={self._role!r})"
