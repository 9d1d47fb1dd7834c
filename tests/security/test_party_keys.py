"""A party's two key files: of the right kind, for nobody else's eyes, and never overwritten."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from phalanx.errors import CertificateError
from phalanx.security.crypto.files import write_private
from phalanx.security.crypto.keys import (
    SIGNING_KEY,
    TLS_KEY,
    load_signing_key,
    load_tls_key,
    make_party_keys,
    new_tls_key,
    private_pem,
)
from phalanx.security.crypto.ml_dsa import ML_DSA_KEY, load_ml_dsa_key


def test_keys_are_loaded_as_they_were_made(tmp_path):
    tls_key, signing_key, ml_dsa_key = make_party_keys(tmp_path / "alice")

    assert load_tls_key(tmp_path / "alice" / TLS_KEY).private_numbers() == tls_key.private_numbers()
    assert load_signing_key(tmp_path / "alice" / SIGNING_KEY).private_bytes_raw() == signing_key.private_bytes_raw()
    assert load_ml_dsa_key(tmp_path / "alice" / ML_DSA_KEY).private_bytes_raw() == ml_dsa_key.private_bytes_raw()
    assert isinstance(tls_key.curve, ec.SECP256R1)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "alice").iterdir()} == {0o600}
    assert (tmp_path / "alice").stat().st_mode & 0o777 == 0o700


def test_two_parties_have_different_keys_and_a_second_making_changes_none(tmp_path):
    first, second = make_party_keys(tmp_path / "alice"), make_party_keys(tmp_path / "bob")
    assert first[1].private_bytes_raw() != second[1].private_bytes_raw()
    before = (tmp_path / "alice" / TLS_KEY).read_bytes()

    with pytest.raises(CertificateError):
        make_party_keys(tmp_path / "alice")
    assert (tmp_path / "alice" / TLS_KEY).read_bytes() == before


@pytest.mark.parametrize(
    ("load", "wrong", "words"),
    [
        (load_tls_key, ed25519.Ed25519PrivateKey.generate(), "is not an ECDSA key"),
        (load_signing_key, new_tls_key(), "is not an Ed25519 key"),
    ],
    ids=["tls", "signing"],
)
def test_a_key_of_the_other_kind_is_refused_by_its_file(tmp_path, load, wrong, words):
    path = tmp_path / "a.key"
    write_private(path, private_pem(wrong))

    with pytest.raises(CertificateError, match=rf"a\.key: {words}"):
        load(path)


def rsa_pem(encryption) -> bytes:
    key = rsa.generate_private_key(65537, 1024)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


@pytest.mark.parametrize("load", [load_tls_key, load_signing_key])
def test_other_and_encrypted_and_broken_keys_are_refused(tmp_path, load):
    encrypted = new_tls_key().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    for number, content in enumerate(
        (rsa_pem(NoEncryption()), encrypted, b"", b"no key", private_pem(new_tls_key())[:80])
    ):
        path = tmp_path / f"{number}.key"
        write_private(path, content)
        with pytest.raises(CertificateError, match=f"{number}.key"):
            load(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_and_one_that_is_missing_are_refused(tmp_path, mode):
    make_party_keys(tmp_path / "alice")
    path = tmp_path / "alice" / TLS_KEY
    path.chmod(mode)

    with pytest.raises(CertificateError, match=TLS_KEY):
        load_tls_key(path)
    with pytest.raises(CertificateError, match="absent"):
        load_tls_key(tmp_path / "absent")
