import re
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from phalanx.errors import CertificateError
from phalanx.security.crypto import (
    Identity,
    certificate_facts,
    create_authority,
    issue_certificate,
    load_authority,
    load_identity,
    peer_from_certificate,
    tls_server_name,
)

NOW = datetime.now(UTC)


def pem_of(home):
    return (home / "certificate.pem").read_bytes()


class Forge:
    """Issues certificates by the real authority's key with one thing wrong."""

    def __init__(self, keys):
        self.key = load_pem_private_key((keys / "authority.key").read_bytes(), None)
        self.authority = x509.load_pem_x509_certificate((keys / "authority.pem").read_bytes())
        self.party = Identity.without_certificate("worker").public
        self.subject_key = ec.generate_private_key(ec.SECP256R1())
        uri = f"phalanx://worker?ed25519={self.party.public_key.hex()}"
        self.names = [x509.DNSName("worker.phalanx.internal"), x509.UniformResourceIdentifier(uri)]
        self.roles = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        self.is_authority = False
        self.signs_certificates = False
        self.extra = []

    def pem(self):
        usage = dict.fromkeys(
            ["content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
             "decipher_only", "crl_sign"],
            False,
        )  # fmt: skip
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "worker")]))
            .issuer_name(self.authority.subject)
            .public_key(self.subject_key.public_key())
            .serial_number(1)
            .not_valid_before(NOW - timedelta(days=1))
            .not_valid_after(NOW + timedelta(days=1))
            .add_extension(x509.BasicConstraints(self.is_authority, None), True)
            .add_extension(x509.KeyUsage(digital_signature=True, key_cert_sign=self.signs_certificates, **usage), True)
            .add_extension(x509.ExtendedKeyUsage(self.roles), False)
        )
        if self.names:
            builder = builder.add_extension(x509.SubjectAlternativeName(self.names), False)
        for extension in self.extra:
            builder = builder.add_extension(extension, True)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def test_an_issued_identity_loads_and_its_certificate_names_it(keys):
    home = issue_certificate(keys, "worker-1", hosts=("localhost", "127.0.0.1", "gpu.example.org"))

    identity = load_identity(home)
    peer = peer_from_certificate(pem_of(home), load_authority(keys / "authority.pem"))
    facts = certificate_facts(pem_of(home))

    assert identity.name == "worker-1"
    assert peer == identity.public
    peer.verify_signature(identity.sign_data(b"x"), b"x")
    assert facts.hosts == ("localhost", "gpu.example.org", "127.0.0.1")
    assert tls_server_name("worker-1") == "worker-1.phalanx.internal"


def test_a_party_certificate_is_a_leaf_with_both_tls_roles_and_a_curve_key(keys):
    certificate = x509.load_pem_x509_certificate(pem_of(issue_certificate(keys, "worker")))
    authority = x509.load_pem_x509_certificate((keys / "authority.pem").read_bytes())

    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    roles = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert basic.critical
    assert not basic.value.ca
    assert set(roles) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert certificate.public_key().curve.name == "secp256r1"
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0


def test_a_forged_certificate_with_nothing_wrong_passes(keys):
    assert peer_from_certificate(Forge(keys).pem(), load_authority(keys / "authority.pem")).name == "worker"


def two_parties(forge):
    forge.names.append(x509.DNSName("owner.phalanx.internal"))


def two_uris(forge):
    forge.names.append(x509.UniformResourceIdentifier("phalanx://owner?ed25519=" + "00" * 32))


def other_dns_name(forge):
    forge.names[0] = x509.DNSName("owner.phalanx.internal")


def no_names(forge):
    forge.names = []


def odd_uri(forge):
    forge.names[1] = x509.UniformResourceIdentifier(forge.names[1].value + "&x=1")


def short_key(forge):
    forge.names[1] = x509.UniformResourceIdentifier("phalanx://worker?ed25519=00")


def capital_hex(forge):
    forge.names[1] = x509.UniformResourceIdentifier("phalanx://worker?ed25519=" + "AB" * 32)


def bad_host_in_uri(forge):
    forge.names[1] = x509.UniformResourceIdentifier("phalanx://[::1?ed25519=" + "00" * 32)


def server_only(forge):
    forge.roles = [ExtendedKeyUsageOID.SERVER_AUTH]


def also_signs_code(forge):
    forge.roles = [*forge.roles, ExtendedKeyUsageOID.CODE_SIGNING]


def may_sign_certificates(forge):
    forge.signs_certificates = True


def authority_itself(forge):
    forge.is_authority = True


def rsa_key(forge):
    forge.subject_key = rsa.generate_private_key(65537, 2048)


def other_curve(forge):
    forge.subject_key = ec.generate_private_key(ec.SECP384R1())


def unknown_critical(forge):
    forge.extra = [x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00")]


@pytest.mark.parametrize(
    "spoil",
    [
        two_parties,
        two_uris,
        other_dns_name,
        no_names,
        odd_uri,
        short_key,
        capital_hex,
        bad_host_in_uri,
        server_only,
        also_signs_code,
        may_sign_certificates,
        authority_itself,
        rsa_key,
        other_curve,
        unknown_critical,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_a_certificate_by_the_right_authority_with_one_thing_wrong_is_refused(keys, spoil):
    forge = Forge(keys)
    spoil(forge)

    with pytest.raises(CertificateError):
        peer_from_certificate(forge.pem(), load_authority(keys / "authority.pem"))


def test_a_certificate_of_another_authority_is_refused(keys, tmp_path):
    create_authority(tmp_path / "foreign")
    pem = pem_of(issue_certificate(tmp_path / "foreign", "worker"))

    with pytest.raises(CertificateError, match="not signed by"):
        peer_from_certificate(pem, load_authority(keys / "authority.pem"))


def test_a_party_cannot_issue_for_another_one(keys):
    party = pem_of(issue_certificate(keys, "worker"))

    with pytest.raises(CertificateError, match="expected an authority"):
        peer_from_certificate(pem_of(issue_certificate(keys, "other")), party)


@pytest.mark.parametrize(("days", "message"), [(-1, "not valid before"), (91, "expired at")])
def test_a_certificate_is_refused_outside_its_days(keys, days, message):
    pem = pem_of(issue_certificate(keys, "worker", days=90))

    with pytest.raises(CertificateError, match=message):
        peer_from_certificate(pem, load_authority(keys / "authority.pem"), NOW + timedelta(days=days))


def test_a_certificate_never_outlives_its_authority(tmp_path):
    create_authority(tmp_path, days=10)

    facts = certificate_facts(pem_of(issue_certificate(tmp_path, "worker", days=90)))

    assert facts.not_after == certificate_facts((tmp_path / "authority.pem").read_bytes()).not_after


def test_an_expired_authority_is_refused(tmp_path):
    create_authority(tmp_path / "old", days=1, now=NOW - timedelta(days=3))

    with pytest.raises(CertificateError, match=r"authority\.pem: expired"):
        load_authority(tmp_path / "old" / "authority.pem")
    with pytest.raises(CertificateError, match="expired"):
        issue_certificate(tmp_path / "old", "worker")


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_is_refused_by_path(keys, content):
    path = keys / "authority.pem"
    path.write_bytes(content)

    with pytest.raises(CertificateError, match=re.escape(str(path))):
        load_authority(path)


def test_a_bundle_of_two_certificates_is_refused(keys):
    pem = (keys / "authority.pem").read_bytes()

    with pytest.raises(CertificateError, match="exactly one"):
        peer_from_certificate(pem_of(issue_certificate(keys, "worker")), pem + pem)


@pytest.mark.parametrize("host", ["owner.phalanx.internal", "OWNER.Phalanx.Internal", "*.example.org", "", "a b", "-x"])
def test_a_host_that_could_pass_for_a_party_is_refused(keys, host):
    with pytest.raises(CertificateError, match="host"):
        issue_certificate(keys, "worker", hosts=(host,))
    assert not (keys / "worker").exists()


@pytest.mark.parametrize("days", [0, -1, 10**6])
def test_a_senseless_validity_is_refused(keys, days):
    with pytest.raises(CertificateError, match="days"):
        issue_certificate(keys, "worker", days=days)
