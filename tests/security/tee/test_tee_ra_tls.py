"""Evidence in a TLS certificate: what the handshake proves is what the evidence is bound to."""

import socket
import ssl
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
from amd import Amd
from authority import p256
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from refusals import refusal

from phalanx.security.tee import (
    Binding,
    appraise_certificate,
    make_certificate,
    read_evidence,
    tls_key_digest,
)

HOUR = timedelta(hours=1)
NONCE, RUN = b"\x0a" * 32, b"\x0c" * 32


@pytest.fixture(scope="module")
def amd():
    return Amd()


def made(amd, key, *, bound_to=None):
    """A certificate of a key with evidence for that key, or for another one."""
    binding = Binding(NONCE, tls_key_digest((bound_to or key).public_key()), RUN)
    case = amd.case(binding)
    return case, make_certificate(key, "enclave", case.evidence, case.now, HOUR)


def as_der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


def test_evidence_comes_out_of_a_certificate_as_it_went_in(amd):
    key = p256()
    case, pem = made(amd, key)

    evidence, digest = read_evidence(as_der(pem))

    assert evidence == case.evidence
    assert digest == tls_key_digest(key.public_key())


def test_the_peer_of_a_real_handshake_is_appraised(amd, tmp_path):
    key = p256()
    case, pem = made(amd, key)
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "certificate.pem").write_bytes(pem)

    seen = certificate_of_server(tmp_path)

    assert appraise_certificate(seen, case.policy, NONCE, RUN, "server", case.now).binding == case.expected


def certificate_of_server(folder) -> bytes:
    """Handshake over a socket pair, TLS 1.3, and return what the server showed."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.minimum_version = ssl.TLSVersion.TLSv1_3
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with server.wrap_socket(theirs, server_side=True) as connection:
            connection.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    with client.wrap_socket(ours) as connection:
        seen = connection.getpeercert(binary_form=True)
        connection.sendall(b"x")
    thread.join(120.0)
    return seen


def test_evidence_for_another_key_is_refused(amd):
    case, pem = made(amd, p256(), bound_to=p256())

    assert (
        refusal(lambda: appraise_certificate(as_der(pem), case.policy, NONCE, RUN, "server", case.now)) == "wrong_key"
    )


def test_evidence_for_another_key_that_lies_about_it_is_refused(amd):
    key = p256()
    case, _ = made(amd, key, bound_to=p256())
    lying = replace(case.evidence, statement=Binding(NONCE, tls_key_digest(key.public_key()), RUN))
    der = as_der(make_certificate(key, "enclave", lying, case.now, HOUR))

    assert refusal(lambda: appraise_certificate(der, case.policy, NONCE, RUN, "server", case.now)) == "wrong_binding"


@pytest.mark.parametrize(
    ("nonce", "run", "role", "reason"),
    [
        (b"\x01" * 32, RUN, "server", "wrong_nonce"),
        (NONCE, b"\x01" * 32, "server", "wrong_run"),
        (NONCE, RUN, "client", "wrong_role"),
    ],
)
def test_a_relayed_or_replayed_certificate_is_refused(amd, nonce, run, role, reason):
    case, pem = made(amd, p256())

    assert refusal(lambda: appraise_certificate(as_der(pem), case.policy, nonce, run, role, case.now)) == reason


def test_a_certificate_before_or_after_its_time_is_refused(amd):
    case, pem = made(amd, p256())

    for now, reason in ((case.now - HOUR, "not_yet_valid"), (case.now + 2 * HOUR, "expired")):
        act = lambda now=now: appraise_certificate(as_der(pem), case.policy, NONCE, RUN, "server", now)  # noqa: E731
        assert refusal(act) == reason


def test_a_certificate_without_evidence_is_refused(amd):
    case = amd.case(Binding(NONCE, bytes(32), RUN))

    act = lambda: appraise_certificate(amd.leaf.der, case.policy, NONCE, RUN, "server", case.now)  # noqa: E731
    assert refusal(act) == "missing_endorsement"


def test_an_altered_certificate_is_refused(amd):
    case, pem = made(amd, p256())
    der = as_der(pem)

    for position in range(0, len(der), 7):
        altered = der[:position] + bytes([der[position] ^ 1]) + der[position + 1 :]
        act = lambda a=altered: appraise_certificate(a, case.policy, NONCE, RUN, "server", case.now)  # noqa: E731
        assert refusal(act)
