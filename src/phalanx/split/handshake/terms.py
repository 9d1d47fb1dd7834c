"""The facts on which both sides of a handshake agree, and what evidence of either side is bound to."""

import hashlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from phalanx.security.crypto import Peer, in_domain
from phalanx.security.seal import Terms
from phalanx.security.tee import Binding

ROLE, CLIENT_ROLE = "enclave", "client"
"""Roles in evidence, so that neither side can present the evidence of the other."""


@dataclass(frozen=True)
class HandshakeTerms:
    """The facts on which both sides of a handshake must agree.

    Attributes:
        config_digest: SHA-256 of the run's config, 32 bytes.
        enclave: The enclave's name and message key.
        keys: Digest of the keys that evidence must be bound to; see `attested_keys`.
        chunk_bytes: Bytes of a chunk; see `Terms`.
    """

    run: str
    config_digest: bytes
    enclave: Peer
    keys: bytes
    chunk_bytes: int

    def channel_terms(self, client: str, token: bytes, evidence: bytes = b"") -> Terms:
        """Return the terms of a channel with a client.

        Args:
            token: The client's signed appraisal of the enclave's evidence.
            evidence: The client's own evidence; empty if the enclave asked for none.
        """
        rests_on = hashlib.sha256(token).digest()
        if evidence:
            appraisals = rests_on + hashlib.sha256(evidence).digest()
            rests_on = hashlib.sha256(in_domain("both-appraisals/1", appraisals)).digest()
        return Terms(self.run, self.config_digest, rests_on, client, self.enclave.name, self.chunk_bytes)

    def enclave_binding(self, nonce: bytes, channel_key: bytes) -> Binding:
        """Return the binding of the enclave's evidence for a client's nonce.

        Args:
            channel_key: Key by which the enclave's process signs its half of channels; made in its memory.
        """
        keys = hashlib.sha256(in_domain("enclave-channel-key/1", self.keys + channel_key)).digest()
        return Binding(nonce, keys, self.config_digest, ROLE)

    def client_binding(self, nonce: bytes, client_keys: bytes) -> Binding:
        """Return the binding of a client's evidence for the enclave's nonce.

        Where the enclave's evidence names the run, a client's names the run, this session of it and the keys of the
        enclave that asks: evidence that a client has given to another enclave, or in another session, is not this.
        """
        # both of 32 bytes, so that nothing else reads as the same
        fields = self.config_digest + self.keys + self.run.encode("utf-8")
        session = hashlib.sha256(in_domain("client-evidence-session/1", fields)).digest()
        return Binding(nonce, client_keys, session, CLIENT_ROLE)


def attested_keys(peer: Peer, certificate_pem: bytes = b"") -> bytes:
    """Return SHA-256 over a party's message key and, where it has a certificate, its TLS key."""
    spki = b""
    if certificate_pem:
        key = x509.load_pem_x509_certificate(certificate_pem).public_key()
        spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(in_domain("enclave-keys/1", peer.public_key + spki)).digest()
