"""The handshake of client and enclave: evidence for the client's own nonce, then keys that only these two have.

    client                                                     enclave
      nonce  ------------------------------------------------->
             <-------------------------------------------------  evidence(nonce, keys, config)
      appraises; signs the result as a token
      token, hello  ------------------------------------------>   checks that the token is about it
             <-------------------------------------------------  reply

The evidence binds the enclave's message key and TLS key; the reply is signed with that message key. The digest of the
token is in every key of the channel: a side that rests on another appraisal has other keys.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from phalanx.errors import PeerRefusedError, RefusedEvidenceError
from phalanx.security.crypto import Identity, Peer, in_domain, steady_now
from phalanx.security.seal import EpochSource, Offer, Terms, answer
from phalanx.security.tee import (
    AppraisalResult,
    Attester,
    Binding,
    Policy,
    Reason,
    Verifier,
    check_measurements,
    issue_token,
    parse_evidence,
    read_token,
)
from phalanx.split.channel.link import SealedLink

ROLE = "enclave"


@dataclass(frozen=True)
class HandshakeTerms:
    """The facts on which both sides of a handshake must agree.

    Attributes:
        run: Name of the session.
        config_digest: SHA-256 of the run's config, 32 bytes.
        enclave: The enclave's name and message key.
        keys: Digest of the keys that evidence must be bound to; see `attested_keys`.
        chunk_bytes: As in `Terms`.
    """

    run: str
    config_digest: bytes
    enclave: Peer
    keys: bytes
    chunk_bytes: int

    def terms(self, client: str, token: bytes) -> Terms:
        """Return what a channel with a client is about."""
        rests_on = hashlib.sha256(token).digest()
        return Terms(self.run, self.config_digest, rests_on, client, self.enclave.name, self.chunk_bytes)

    def binding(self, nonce: bytes) -> Binding:
        """Return what evidence for a nonce is bound to."""
        return Binding(nonce, self.keys, self.config_digest, ROLE)


def attested_keys(peer: Peer, certificate_pem: bytes = b"") -> bytes:
    """Return SHA-256 over a party's message key and, where it has a certificate, its TLS key."""
    spki = b""
    if certificate_pem:
        key = x509.load_pem_x509_certificate(certificate_pem).public_key()
        spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(in_domain("enclave-keys/1", peer.public_key + spki)).digest()


class EnclaveHandshake:
    """The enclave's side of the handshake.

    Args:
        identity: The enclave.
        attester: Makes its evidence.
        terms_of_run: The facts to agree on.
        epochs: Raised at every handshake.
        clients: The clients of the run.
    """

    def __init__(
        self,
        identity: Identity,
        attester: Attester,
        terms_of_run: HandshakeTerms,
        epochs: EpochSource,
        clients: Mapping[str, Peer],
    ) -> None:
        self._identity, self._attester, self._terms = identity, attester, terms_of_run
        self._epochs, self._clients = epochs, clients
        self._nonces: dict[str, bytes] = {}

    def evidence(self, client: str, nonce: bytes) -> bytes:
        """Return evidence for a client's nonce.

        Raises:
            PeerRefusedError: It is no client of the run, or it sent no nonce.
        """
        if client not in self._clients:
            raise PeerRefusedError(f"{client}: is no client of this run")
        try:
            binding = self._terms.binding(nonce)
        except ValueError as exc:
            raise PeerRefusedError(f"{client}: {exc}") from exc
        self._nonces[client] = nonce
        return self._attester.evidence(binding).to_bytes()

    def admit(self, client: str, token: bytes, hello: bytes) -> tuple[bytes, SealedLink]:
        """Return the reply to a client's hello, and this side's link.

        Raises:
            RefusedEvidenceError: The token is not this client's word on the evidence that it was last given.
            SealError: The hello is about something else.
            SignatureError: The client did not sign it.
        """
        nonce, peer = self._nonces.pop(client, None), self._clients.get(client)
        if nonce is None or peer is None:
            raise RefusedEvidenceError(Reason.WRONG_NONCE, f"{client}: was given no evidence; ask for it first")
        read_token(token, peer, self._terms.binding(nonce), steady_now())
        terms = self._terms.terms(client, token)
        reply, channel = answer(hello, terms, self._identity, self._epochs, peer)
        return reply, SealedLink(channel, self._identity)


class ClientHandshake:
    """The client's side of the handshake.

    Args:
        identity: The client.
        terms_of_run: The facts to agree on.
        epochs: Raised at every meeting.
        policy: Reads what is accepted now.

    Attributes:
        result: Of the latest appraisal; None before the first one.
    """

    def __init__(
        self, identity: Identity, terms_of_run: HandshakeTerms, epochs: EpochSource, policy: Callable[[], Policy]
    ) -> None:
        self.result: AppraisalResult | None = None
        self._identity, self._terms, self._epochs, self._policy = identity, terms_of_run, epochs, policy
        self._asked: tuple[Verifier, bytes] | None = None
        self._offer: Offer | None = None

    def ask(self) -> bytes:
        """Draw the nonce of the next appraisal."""
        verifier = Verifier(self._policy())
        nonce = verifier.new_nonce(steady_now())
        self._asked = (verifier, nonce)
        return nonce

    def judge(self, evidence: bytes) -> AppraisalResult:
        """Appraise what came for the nonce that was drawn last; the nonce is used up.

        Raises:
            RefusedEvidenceError: It does not pass; `reason` says why.
        """
        if self._asked is None:
            raise RefusedEvidenceError(Reason.WRONG_NONCE, "evidence came that nobody asked for")
        (verifier, nonce), self._asked = self._asked, None
        self.result = verifier.appraise(parse_evidence(evidence), self._terms.binding(nonce), steady_now())
        return self.result

    def hello(self) -> tuple[bytes, bytes]:
        """Return the token and the hello for the enclave, after `judge`.

        Raises:
            RefusedEvidenceError: Nothing was appraised, or its certificates have ended.
            RollbackError: There is no fresh epoch.
        """
        if self.result is None:
            raise RefusedEvidenceError(Reason.WRONG_NONCE, "nothing was appraised, so no key is agreed on")
        token = issue_token(self.result, self._identity, steady_now())
        self._offer = Offer(self._terms.terms(self._identity.name, token), self._identity, self._epochs)
        return token, self._offer.hello

    def accept(self, reply: bytes) -> SealedLink:
        """Return this side's link.

        Raises:
            SealError: The reply answers another hello, or is about something else.
            SignatureError: The attested key did not sign it.
        """
        if self._offer is None:
            raise RefusedEvidenceError(Reason.WRONG_NONCE, "a reply came to no hello")
        offer, self._offer = self._offer, None
        return SealedLink(offer.accept(reply, self._terms.enclave), self._identity)

    def check_still_accepted(self) -> None:
        """Compare what was appraised with the policy as it is now.

        Raises:
            RefusedEvidenceError: A measurement was revoked, or is no reference value any more.
        """
        if self.result is None:
            raise RefusedEvidenceError(Reason.WRONG_NONCE, "nothing was appraised yet")
        policy, claims = self._policy(), self.result.claims
        check_measurements(claims.measurements, policy.reference(claims.kind), policy.revoked_measurements)
