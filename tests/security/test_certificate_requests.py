"""Requests for certificates: keys stay where they were made, and only their holder is certified, once, by name."""

import base64
import re
import stat
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from phalanx.cli.parties.pki import pki_app
from phalanx.errors import CertificateError
from phalanx.security.crypto import (
    Identity,
    certificate_facts,
    certificate_fingerprint,
    create_authority,
    issue_certificate,
    load_identity,
    make_request,
    read_request,
    sign_request,
)
from phalanx.security.crypto import request as requests


@pytest.fixture
def keys(tmp_path):
    create_authority(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def alice(tmp_path):
    return tmp_path / "alice"


def pem_of(home):
    return (home / "certificate.pem").read_bytes()


class ForgedRequest:
    """A request that an attacker writes; every part of it can be another than `make_request` makes."""

    def __init__(self, name="alice"):
        self.tls_key = ec.generate_private_key(ec.SECP256R1())
        self.signing_key = ed25519.Ed25519PrivateKey.generate()
        self.subject, self.named, self.public_key = name, name, self.signing_key.public_key().public_bytes_raw()
        self.extra_names, self.extensions, self.hash = [], [], hashes.SHA256()
        self.proof = None

    def pem(self):
        uri = f"phalanx://{self.named}?ed25519={self.public_key.hex()}"
        names = [x509.DNSName(f"{self.named}.phalanx.internal"), x509.UniformResourceIdentifier(uri)]
        builder = (
            x509.CertificateSigningRequestBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.subject)]))
            .add_extension(x509.SubjectAlternativeName([*names, *self.extra_names]), critical=False)
        )
        for extension in self.extensions:
            builder = builder.add_extension(extension, critical=False)
        proof = self.own_proof() if self.proof is None else self.proof
        if proof:
            builder = builder.add_attribute(requests._PROOF, proof)
        return builder.sign(self.tls_key, self.hash).public_bytes(Encoding.PEM)

    def own_proof(self):
        peer = Identity(self.named, self.signing_key).public
        public = self.tls_key.public_key()
        return b"1 - " + self.signing_key.sign(requests._proven_bytes(peer, public, None)).hex().encode()


def test_a_party_is_certified_and_its_keys_are_on_its_own_machine_only(keys, alice):
    request = make_request(alice, "alice", certificate_fingerprint((keys / "authority.pem").read_bytes()))

    home = sign_request(keys, request)
    for file in ("certificate.pem", "authority.pem"):
        (alice / file).write_bytes((home / file).read_bytes())

    identity = load_identity(alice)
    assert identity.name == "alice"
    assert sorted(path.name for path in home.iterdir()) == ["authority.pem", "certificate.pem"]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in alice.glob("*.key")} == {
        "signing-ml-dsa-44.key": 0o600,
        "signing.key": 0o600,
        "tls.key": 0o600,
    }
    assert identity.public == read_request(request).peer


def test_what_was_forged_is_accepted_where_nothing_is_wrong_with_it(keys):
    assert (sign_request(keys, ForgedRequest().pem()) / "certificate.pem").is_file()


def test_a_request_that_is_made_again_is_for_the_same_keys_and_gives_the_same_certificate(keys, alice):
    first, second = make_request(alice, "alice"), make_request(alice, "alice")

    certificates = [pem_of(sign_request(keys, request)) for request in (first, second, first)]

    assert read_request(first).peer == read_request(second).peer
    assert len(set(certificates)) == 1


def test_after_its_certificate_has_expired_a_party_gets_a_new_one_for_the_same_keys(keys, alice):
    request, now = make_request(alice, "alice"), datetime.now(UTC)
    early = pem_of(sign_request(keys, request, days=10, now=now))

    before = pem_of(sign_request(keys, request, now=now + timedelta(days=9)))
    after = pem_of(sign_request(keys, request, now=now + timedelta(days=11)))

    assert before == early != after


def test_a_name_that_is_certified_with_other_keys_is_refused(keys, alice, tmp_path):
    kept = pem_of(sign_request(keys, make_request(alice, "alice")))

    with pytest.raises(CertificateError, match="alice is certified with other keys already"):
        sign_request(keys, make_request(tmp_path / "mallory", "alice"))

    assert pem_of(keys / "alice") == kept


def test_a_party_of_this_machine_is_not_replaced_by_a_request(keys, tmp_path):
    issue_certificate(keys, "owner")

    with pytest.raises(CertificateError, match="owner is certified with other keys already"):
        sign_request(keys, make_request(tmp_path / "mallory", "owner"))

    assert load_identity(keys / "owner").name == "owner"


def test_keys_of_one_party_are_not_certified_for_a_second(keys, alice):
    sign_request(keys, make_request(alice, "alice"))

    with pytest.raises(CertificateError, match="a key of it is that of alice already"):
        sign_request(keys, make_request(alice, "bob"))

    assert not (keys / "bob").exists()


def test_one_key_of_another_party_is_enough_to_be_refused(keys, alice):
    forged = ForgedRequest()
    sign_request(keys, forged.pem())
    again = ForgedRequest("bob")
    again.tls_key = forged.tls_key

    with pytest.raises(CertificateError, match="a key of it is that of alice already"):
        sign_request(keys, again.pem())


def test_another_party_than_the_expected_one_is_refused(keys, alice):
    with pytest.raises(CertificateError, match="request: is of 'alice', expected 'bob'"):
        sign_request(keys, make_request(alice, "alice"), name="bob")


def test_a_request_to_another_authority_is_refused(keys, alice, tmp_path):
    create_authority(tmp_path / "others")
    request = make_request(
        alice, "alice", certificate_fingerprint((tmp_path / "others" / "authority.pem").read_bytes())
    )

    with pytest.raises(CertificateError, match="asks another authority"):
        sign_request(keys, request)


def change_proof(pem, change):
    """Change the request's proof, and have its TLS key sign it again, as one with that key alone could."""
    forged = ForgedRequest()
    forged.proof = change(forged.own_proof())
    return forged.pem()


@pytest.mark.parametrize(
    "change",
    [
        lambda proof: b"",
        lambda proof: b"1 - " + b"00" * 64,
        lambda proof: proof.replace(b"1 -", b"2 -"),
        lambda proof: proof.replace(b"-", b"0" * 64),
        lambda proof: proof.upper(),
        lambda proof: proof + b"\n",
        lambda proof: "1 - é".encode(),
    ],
    ids=["none", "zeros", "version", "authority", "upper", "newline", "not ascii"],
)
def test_without_proof_that_its_sender_holds_the_message_key_a_request_is_refused(change):
    with pytest.raises(CertificateError, match="message key of alice"):
        read_request(change_proof(None, change))


def test_somebody_elses_message_key_is_not_certified_with_ones_own_tls_key(keys, alice):
    honest = read_request(make_request(alice, "alice"))
    genuine = x509.load_pem_x509_csr(make_request(alice, "alice"))
    stolen = ForgedRequest()
    stolen.public_key = honest.peer.public_key
    stolen.proof = next(a.value for a in genuine.attributes if a.oid == requests._PROOF)

    with pytest.raises(CertificateError, match="did not sign for this name, TLS key and authority"):
        sign_request(keys, stolen.pem())


def test_a_proof_for_one_name_is_void_for_another(keys):
    forged = ForgedRequest("alice")
    forged.proof = forged.own_proof()
    forged.named = forged.subject = "bob"

    with pytest.raises(CertificateError, match="did not sign for this name"):
        sign_request(keys, forged.pem())


def test_subject_and_uri_must_name_the_same_party():
    forged = ForgedRequest("alice")
    forged.subject = "owner"

    with pytest.raises(CertificateError, match="its subject is not 'alice'"):
        read_request(forged.pem())


def weak(forged):
    forged.tls_key = rsa.generate_private_key(65537, 1024)


def other_curve(forged):
    forged.tls_key = ec.generate_private_key(ec.SECP192R1())


def sha1(forged):
    forged.hash = hashes.SHA512()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(weak, "not ECDSA P-256"), (other_curve, "not ECDSA P-256"), (sha1, "was not signed by the TLS key")],
)
def test_a_weak_or_unexpected_tls_key_is_refused(damage, reason):
    forged = ForgedRequest()
    forged.proof = forged.own_proof()
    damage(forged)

    with pytest.raises(CertificateError, match=reason):
        read_request(forged.pem())


FIELD = 2**255 - 19


@pytest.mark.parametrize(
    "y",
    [
        0,
        1,
        FIELD - 1,
        FIELD,
        FIELD + 1,
        # of order 8, RFC 7748's curve; published in lists of weak points
        int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"),
        int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"),
    ],
)
@pytest.mark.parametrize("sign", [0, 2**255])
def test_a_message_key_under_which_everybody_can_sign_is_refused(y, sign):
    forged = ForgedRequest()
    forged.proof = forged.own_proof()
    forged.public_key = (y + sign).to_bytes(32, "little")

    with pytest.raises(CertificateError, match="its message key is weak"):
        read_request(forged.pem())


@given(st.binary(min_size=32, max_size=32))
def test_no_ordinary_message_key_is_called_weak(seed):
    public = ed25519.Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()

    assert not requests._has_small_order(public)


def test_a_request_cannot_ask_to_be_an_authority_or_for_hosts():
    ambitious, hosted = ForgedRequest(), ForgedRequest()
    ambitious.extensions = [x509.BasicConstraints(ca=True, path_length=None)]
    hosted.extra_names = [x509.DNSName("bank.example.org")]

    with pytest.raises(CertificateError, match="asks for more or less than a party's names"):
        read_request(ambitious.pem())
    with pytest.raises(CertificateError, match=re.escape("asks for the hosts bank.example.org")):
        read_request(hosted.pem())


GENUINE = ForgedRequest().pem()


@given(st.data())
@settings(deadline=None)
def test_no_changed_byte_of_a_request_passes(data):
    der = bytearray(x509.load_pem_x509_csr(GENUINE).public_bytes(Encoding.DER))
    der[data.draw(st.integers(0, len(der) - 1))] ^= data.draw(st.integers(1, 255))

    with pytest.raises(CertificateError):
        read_request(in_pem(der, "CERTIFICATE REQUEST"))


def in_pem(der, what):
    return f"-----BEGIN {what}-----\n{base64.encodebytes(der).decode()}-----END {what}-----\n".encode()


def test_a_certificate_of_an_unknown_version_is_refused_as_any_other_malformed_one(keys):
    issue_certificate(keys, "alice")
    der = bytearray(x509.load_pem_x509_certificate(pem_of(keys / "alice")).public_bytes(Encoding.DER))
    version = der.index(bytes.fromhex("a003020102")) + 4
    der[version] = 7

    with pytest.raises(CertificateError, match="is not a readable"):
        certificate_facts(in_pem(der, "CERTIFICATE"))


@given(st.binary(max_size=600))
@settings(deadline=None)
def test_any_bytes_at_all_are_refused(junk):
    with pytest.raises(CertificateError):
        read_request(junk)


def test_two_requests_in_one_file_and_a_long_one_are_refused(alice):
    request = make_request(alice, "alice")

    for pem in (request + request, request + b"#" * 5000):
        with pytest.raises(CertificateError, match="expected exactly one PEM request"):
            read_request(pem)


def invoke(*arguments):
    return CliRunner().invoke(pki_app, [str(argument) for argument in arguments])


def test_request_and_sign_work_together_and_print_no_private_key(keys, alice):
    made = invoke("request", "alice", "--dir", alice, "--authority", keys / "authority.pem")
    signed = invoke("sign", keys, alice / "request.csr", "--name", "alice", "--host", "10.0.0.7")

    assert made.exit_code == signed.exit_code == 0
    key = re.search(r"message key  ([0-9a-f]{64})", made.output)[1]
    assert key in signed.output
    assert "PRIVATE" not in made.output + signed.output
    assert "10.0.0.7" in invoke("show", keys / "alice" / "certificate.pem").output
    printed = re.search(r"fingerprint  ([0-9a-f]{64})", invoke("show", keys / "authority.pem").output)[1]
    assert printed in signed.output


def test_a_stranger_is_not_made_the_owner_unasked(keys, tmp_path):
    invoke("request", "owner", "--dir", tmp_path / "mallory")

    refused = invoke("sign", keys, tmp_path / "mallory" / "request.csr")
    meant = invoke("sign", keys, tmp_path / "mallory" / "request.csr", "--name", "owner")

    assert "asks for the role of the owner of your runs" in str(refused.exception)
    assert meant.exit_code == 0


def test_request_keeps_the_keys_that_are_there(alice):
    invoke("request", "alice", "--dir", alice)
    before = (alice / "signing.key").read_bytes()

    again = invoke("request", "alice", "--dir", alice)

    assert again.exit_code == 0
    assert (alice / "signing.key").read_bytes() == before


def test_keys_that_others_could_read_are_not_used(alice):
    make_request(alice, "alice")
    (alice / "tls.key").chmod(0o644)

    with pytest.raises(CertificateError, match="others may have read this key"):
        make_request(alice, "alice")
