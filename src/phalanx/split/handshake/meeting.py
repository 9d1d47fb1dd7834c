"""The handshake of client and enclave: evidence for the other side's nonce, then keys that only these two have.

    client                                                     enclave
      nonce  ------------------------------------------------->
             <-----  channel key, evidence(nonce, keys, config); its own nonce, where the run file has a policy for the
      appraises; signs the result as a token                      client
      token, evidence(nonce, keys, session), hello  ---------->   checks that the token is about it; appraises
             <-------------------------------------------------  reply

Evidence binds message key and TLS key of the side that makes it. That of the enclave binds a channel key as well, which
its process has made: its reply is signed with that one. The keys of its certificate lie in files, and whoever reads the
disk of a confidential machine, as its host does, has them; the channel key is in memory alone.
A client gives its evidence to an enclave that it has appraised, and to no other. The digests of token and evidence are
in every key of the channel: a side that rests on another appraisal has other keys.
"""

from collections.abc import Callable, Mapping

from phalanx.errors import PeerRefusedError, RefusedEvidenceError
from phalanx.security.crypto import Identity, Peer, steady_now
from phalanx.security.seal import EpochSource, HandshakeOffer, answer_hello
from phalanx.security.tee import (
    AppraisalResult,
    Attester,
    Binding,
    Policy,
    RefusedEvidenceReason,
    Verifier,
    check_measurements,
    issue_token,
    parse_evidence,
    read_token,
)
from phalanx.split.channel.link import SealedLink
from phalanx.split.handshake.client_appraisal import ClientAppraiser
from phalanx.split.handshake.terms import HandshakeTerms, attested_keys

KEY_BYTES = 32
"""Bytes of an enclave's channel key, raw Ed25519, before its evidence."""
MakeEvidence = Callable[[Binding], bytes]
"""Has this machine's hardware sign a binding; returns the envelope."""


class EnclaveHandshake:
    """The enclave's side of the handshake."""

    def __init__(
        self,
        identity: Identity,
        attester: Attester,
        terms_of_run: HandshakeTerms,
        epochs: EpochSource,
        clients: Mapping[str, Peer],
        appraiser: ClientAppraiser | None = None,
    ) -> None:
        self._identity, self._attester, self._terms = identity, attester, terms_of_run
        self._appraiser = appraiser or ClientAppraiser(terms_of_run, {}, {})
        self._epochs, self._clients = epochs, clients
        self._nonces: dict[str, bytes] = {}
        self._channel_identity = Identity.without_certificate(identity.name)
        self._channel_key = self._channel_identity.public.public_key

    def enclave_evidence(self, client: str, nonce: bytes) -> bytes:
        """Return the key that channels of this process are signed by, and evidence of it for a client's nonce."""
        if client not in self._clients:
            raise PeerRefusedError(f"{client}: is not a client of this run")
        try:
            binding = self._terms.enclave_binding(nonce, self._channel_key)
        except ValueError as exc:
            raise PeerRefusedError(f"{client}: {exc}") from exc
        self._nonces[client] = nonce
        return self._channel_key + self._attester.make_evidence(binding).to_bytes()

    def draw_client_nonce(self, client: str) -> bytes | None:
        """Draw the nonce for a client's own evidence; None where none is asked for."""
        return self._appraiser.draw_nonce(client)

    def admit_client(self, client: str, token: bytes, hello: bytes, evidence: bytes = b"") -> tuple[bytes, SealedLink]:
        """Return the reply to a client's hello, and this side's link.

        Args:
            client: Name that transport and signature have proved.
            token: Its word on this enclave's evidence.
            evidence: Its own; empty where it brings none.

        Raises:
            RefusedEvidenceError: The token is not this client's word on the evidence that it was last given, or its
                own evidence does not pass.
        """
        nonce, peer = self._nonces.pop(client, None), self._clients.get(client)
        if nonce is None or peer is None:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_NONCE, f"{client}: was given no evidence; ask for it first"
            )
        read_token(token, peer, self._terms.enclave_binding(nonce, self._channel_key), steady_now())
        self._appraiser.appraise_client(client, evidence)
        terms = self._terms.channel_terms(client, token, evidence)
        reply, channel = answer_hello(hello, terms, self._channel_identity, self._epochs, peer)
        return reply, SealedLink(channel, self._identity)


class ClientHandshake:
    """The client's side of the handshake.

    Args:
        policy: Reads the policy that is accepted now.
        make_evidence: Gives this client's own; None where it has none to give.
    """

    def __init__(
        self,
        identity: Identity,
        terms_of_run: HandshakeTerms,
        epochs: EpochSource,
        policy: Callable[[], Policy],
        make_evidence: MakeEvidence | None = None,
    ) -> None:
        self.result: AppraisalResult | None = None
        self._make_evidence = make_evidence
        self._identity, self._terms, self._epochs, self._policy = identity, terms_of_run, epochs, policy
        self._asked: tuple[Verifier, bytes] | None = None
        self._offer: HandshakeOffer | None = None
        self._channel_peer: Peer | None = None
        self._has_channel = False

    def draw_nonce(self) -> bytes:
        """Draw the nonce of the next appraisal."""
        verifier = Verifier(self._policy())
        nonce = verifier.new_nonce(steady_now())
        self._asked = (verifier, nonce)
        return nonce

    def appraise_enclave(self, evidence: bytes) -> AppraisalResult:
        """Appraise the evidence for the nonce that was drawn last, which is used up.

        Args:
            evidence: Channel key and envelope, as `EnclaveHandshake.enclave_evidence` returns them.
        """
        if self._asked is None:
            raise RefusedEvidenceError(RefusedEvidenceReason.WRONG_NONCE, "unexpected evidence")
        (verifier, nonce), self._asked = self._asked, None
        channel_key, envelope = evidence[:KEY_BYTES], evidence[KEY_BYTES:]
        if self._has_channel and channel_key != self._appraised_peer.public_key:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_KEY, "the evidence is of another process than the one that has the channel"
            )
        binding = self._terms.enclave_binding(nonce, channel_key)
        self.result = verifier.appraise_evidence(parse_evidence(envelope), binding, steady_now())
        self._channel_peer = Peer(self._terms.enclave.name, channel_key)
        return self.result

    def client_evidence(self, nonce: bytes) -> bytes:
        """Return this client's evidence for the enclave's nonce, after `appraise_enclave`."""
        if self.result is None:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_NONCE, "the enclave was not appraised, so it is given no evidence"
            )
        if self._make_evidence is None:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.MISSING_EVIDENCE,
                "the enclave requires this client's evidence, but its file sets no attester",
            )
        keys = attested_keys(self._identity.public, self._identity.certificate_pem)
        return self._make_evidence(self._terms.client_binding(nonce, keys))

    def make_hello(self, evidence: bytes = b"") -> tuple[bytes, bytes]:
        """Return the token and the hello for the enclave, after `appraise_enclave`.

        Args:
            evidence: The client's evidence from `prove`; empty where the enclave has asked for none.
        """
        if self.result is None:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_NONCE, "nothing was appraised, so no key is agreed on"
            )
        token = issue_token(self.result, self._identity, steady_now())
        terms = self._terms.channel_terms(self._identity.name, token, evidence)
        self._offer = HandshakeOffer(terms, self._identity, self._epochs)
        return token, self._offer.hello

    def accept_reply(self, reply: bytes) -> SealedLink:
        """Return this side's link."""
        if self._offer is None:
            raise RefusedEvidenceError(RefusedEvidenceReason.WRONG_NONCE, "a reply came to no hello")
        offer, self._offer = self._offer, None
        channel = offer.accept_reply(reply, self._appraised_peer)
        self._has_channel = True
        return SealedLink(channel, self._identity)

    @property
    def _appraised_peer(self) -> Peer:
        if self._channel_peer is None:
            raise RefusedEvidenceError(RefusedEvidenceReason.WRONG_NONCE, "nothing was appraised yet")
        return self._channel_peer

    def check_still_accepted(self) -> None:
        """Compare the appraised evidence with the policy as it is now."""
        if self.result is None:
            raise RefusedEvidenceError(RefusedEvidenceReason.WRONG_NONCE, "nothing was appraised yet")
        policy, claims = self._policy(), self.result.claims
        check_measurements(claims.measurements, policy.reference_for(claims.kind), policy.revoked_measurements)
