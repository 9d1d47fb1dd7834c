import os
import shutil
import stat

import pytest

from phalanx.errors import CertificateError
from phalanx.security.crypto import create_authority, issue_certificate, load_identity, read_private, write_private


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask():
    old = os.umask(0)
    yield
    os.umask(old)


@pytest.mark.usefixtures("open_umask")
def test_private_keys_are_0600_in_0700_directories_under_any_umask(tmp_path):
    create_authority(tmp_path / "keys")
    home = issue_certificate(tmp_path / "keys", "worker")

    assert mode(tmp_path / "keys") == mode(home) == 0o700
    assert mode(tmp_path / "keys" / "authority.key") == 0o600
    assert mode(home / "tls.key") == mode(home / "signing.key") == 0o600


@pytest.mark.parametrize("name", ["tls.key", "signing.key"])
@pytest.mark.parametrize("extra", [0o040, 0o004, 0o020])
def test_a_key_that_others_can_reach_is_refused_by_name(keys, name, extra):
    home = issue_certificate(keys, "worker")
    (home / name).chmod(0o600 | extra)

    with pytest.raises(CertificateError, match=f"{name}: mode is 06"):
        load_identity(home)


def test_an_authority_whose_key_others_can_read_issues_nothing(keys):
    (keys / "authority.key").chmod(0o644)

    with pytest.raises(CertificateError, match=r"authority\.key"):
        issue_certificate(keys, "worker")


def test_an_authority_is_never_overwritten(keys):
    before = (keys / "authority.key").read_bytes()

    with pytest.raises(CertificateError, match="exists already"):
        create_authority(keys)

    assert (keys / "authority.key").read_bytes() == before


def test_the_keys_of_a_party_are_never_overwritten(keys):
    before = (issue_certificate(keys, "worker") / "signing.key").read_bytes()

    with pytest.raises(CertificateError, match="exists already"):
        issue_certificate(keys, "worker")

    assert (keys / "worker" / "signing.key").read_bytes() == before


def test_keys_are_not_put_into_a_directory_that_others_can_enter(tmp_path):
    tmp_path.chmod(0o755)

    with pytest.raises(CertificateError, match="0755, expected 0700"):
        create_authority(tmp_path)


def test_writing_a_key_does_not_follow_a_link(tmp_path):
    target = tmp_path / "target"
    (tmp_path / "key").symlink_to(target)

    with pytest.raises(CertificateError, match="exists already"):
        write_private(tmp_path / "key", b"secret")

    assert not target.exists()


@pytest.mark.parametrize("make", [lambda path: None, os.mkfifo, os.mkdir, lambda path: path.write_bytes(b"x" * 70_000)])
def test_what_is_no_small_file_is_refused_without_waiting(tmp_path, make):
    make(tmp_path / "key")

    with pytest.raises(CertificateError, match="key"):
        read_private(tmp_path / "key")


@pytest.mark.parametrize("name", ["tls.key", "signing.key"])
def test_a_key_of_another_party_beside_the_certificate_is_refused(keys, name):
    home, other = issue_certificate(keys, "worker"), issue_certificate(keys, "other")
    shutil.copy2(other / name, home / name)

    with pytest.raises(CertificateError, match=f"{name}: is not the"):
        load_identity(home)


def test_swapped_kinds_of_key_are_refused(keys):
    home = issue_certificate(keys, "worker")
    shutil.copy2(home / "tls.key", home / "signing.key")

    with pytest.raises(CertificateError, match=r"signing\.key: is not an Ed25519 key"):
        load_identity(home)


@pytest.mark.parametrize("name", ["certificate.pem", "authority.pem", "tls.key", "signing.key"])
def test_a_missing_or_spoilt_file_is_named(keys, name):
    home = issue_certificate(keys, "worker")
    (home / name).write_bytes(b"spoilt")

    with pytest.raises(CertificateError, match=name):
        load_identity(home)

    (home / name).unlink()
    with pytest.raises(CertificateError, match=f"{name}: cannot be read"):
        load_identity(home)


def test_the_authority_must_be_its_own(keys, tmp_path):
    create_authority(tmp_path / "foreign")
    shutil.copy2(tmp_path / "foreign" / "authority.key", keys / "authority.key")

    with pytest.raises(CertificateError, match="is not the key of"):
        issue_certificate(keys, "worker")
