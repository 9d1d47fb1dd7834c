"""The whole path of line 3: nonce, quote, appraisal, EAT, TLS key, key release; for tests and the benchmark."""

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from phalanx.security.crypto import Identity
from phalanx.security.tee import (
    Binding,
    KeyRelease,
    Policy,
    TpmAttester,
    Verifier,
    inspect_evidence,
    issue_token,
    make_certificate,
    read_evidence,
    tls_key_digest,
)
from phalanx.security.tee.tpm.key import TpmReference
from phalanx.security.tee.tpm.structures import parse_public

RUN, ROLE, KEY = b"\x0c" * 32, "server", b"\x2a" * 32
HOUR = timedelta(hours=1)


def policy_for(attester: TpmAttester, binding: Binding) -> Policy:
    """Reference values: what the TPM shows now; its key is enrolled by name."""
    found = inspect_evidence(attester.make_evidence(binding))
    name = parse_public(attester.ak_public).name.hex()
    measured = {one: (value,) for one, value in found.items()}
    return Policy({"tpm": TpmReference(measurements=measured, ak_names=(name,))})


class Company:
    """A verifier, and a relying party with a key that trusts it."""

    def __init__(self, policy: Policy) -> None:
        self.authority = Identity.without_certificate("verifier")
        self.verifier = Verifier(policy)
        self.release = KeyRelease(KEY, self.authority.public, RUN, ROLE, ("tpm",))


def whole_path(company: Company, attester: TpmAttester) -> bytes:
    """Go all the way, over a real TLS 1.3 handshake, and return the key as the enclave got it."""
    now = datetime.now(UTC)
    nonce = company.verifier.new_nonce(now)
    tls_key = ec.generate_private_key(ec.SECP256R1())
    binding = Binding(nonce, tls_key_digest(tls_key.public_key()), RUN, ROLE)
    certificate = make_certificate(tls_key, "enclave", attester.make_evidence(binding), now, HOUR)
    with connected(tls_key, certificate) as (enclave, party, seen):
        evidence, digest = read_evidence(seen)
        shown = Binding(nonce, digest, RUN, ROLE)
        token = issue_token(company.verifier.appraise_evidence(evidence, shown, now), company.authority, now)
        party.write(company.release.release_key(token, nonce, digest, now))
        return enclave.read(64)


@contextmanager
def connected(key, certificate: bytes) -> Iterator[tuple[ssl.SSLObject, ssl.SSLObject, bytes]]:
    """Shake hands in memory: the enclave serves; return both ends, and the certificate that the client saw."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.minimum_version = client.minimum_version = ssl.TLSVersion.TLSv1_3
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate)
        file.flush()
        server.load_cert_chain(file.name)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    enclave = server.wrap_bio(there, back, server_side=True)
    party = client.wrap_bio(back, there)
    waiting = [party, enclave]
    while waiting:
        for one in tuple(waiting):
            try:
                one.do_handshake()
                waiting.remove(one)
            except ssl.SSLWantReadError:
                continue
    seen = party.getpeercert(binary_form=True)
    assert seen == x509.load_pem_x509_certificate(certificate).public_bytes(Encoding.DER)
    yield enclave, party, seen
