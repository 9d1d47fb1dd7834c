"""Certificates and invitations that are taken back: what counts no more, and what a damaged list does."""

from datetime import timedelta

import pytest

from phalanx.errors import CertificateError, PeerRefusedError
from phalanx.security.crypto import (
    RevokedParties,
    create_authority,
    issue_certificate,
    load_identity,
    make_request,
    sign_request,
)
from phalanx.security.crypto.revocation import LONGEST_REASON
from phalanx.security.invite import EnrolmentServer, Invitations, JoinTerms, enrol_machine

DAY = timedelta(days=1)


@pytest.fixture
def keys(tmp_path):
    create_authority(tmp_path / "keys")
    issue_certificate(tmp_path / "keys", "owner")
    return tmp_path / "keys"


@pytest.fixture
def invitations(keys):
    return Invitations(keys)


@pytest.fixture
def server(keys, invitations):
    with EnrolmentServer(keys, invitations, JoinTerms(7070)) as server:
        yield server.start_listening("127.0.0.1", 0)


def invited(invitations, server, name="alice"):
    return invitations.invite_party(name, f"127.0.0.1:{server.port}", DAY)


def test_a_token_that_was_taken_back_certifies_nobody(invitations, server, tmp_path):
    token = invited(invitations, server)

    assert invitations.revoke_party("alice", "") == (True, None)

    with pytest.raises(PeerRefusedError, match="the token of alice was taken back by the owner"):
        enrol_machine(token, tmp_path / "alice")
    assert invitations.open_names() == []
    assert not (tmp_path / "alice" / "certificate.pem").exists()


def test_an_invitation_that_nobody_has_used_may_be_made_anew(invitations, server, tmp_path):
    old = invited(invitations, server)
    invitations.revoke_party("alice", "")

    new = invited(invitations, server)

    with pytest.raises(PeerRefusedError, match="a newer one has replaced it"):
        enrol_machine(old, tmp_path / "thief")
    enrol_machine(new, tmp_path / "alice")
    assert load_identity(tmp_path / "alice").name == "alice"


def test_the_token_of_a_revoked_party_is_of_no_use_to_it_nor_to_others(invitations, server, tmp_path):
    token = invited(invitations, server)
    enrol_machine(token, tmp_path / "alice")

    was_open, entry = invitations.revoke_party("alice", "keys were copied")

    assert (was_open, entry.party, entry.reason) == (False, "alice", "keys were copied")
    for home in ("alice", "thief"):
        with pytest.raises(PeerRefusedError, match="was taken back by the owner"):
            enrol_machine(token, tmp_path / home)


def test_a_revoked_party_is_certified_no_more_by_name_or_by_key(keys, tmp_path):
    request = make_request(tmp_path / "alice", "alice")
    sign_request(keys, request)
    RevokedParties(keys).revoke_party("alice", "")

    for name in ("alice", "other"):
        with pytest.raises(CertificateError, match="alice was revoked and stays so"):
            sign_request(keys, make_request(tmp_path / name, "alice"))
    with pytest.raises(CertificateError, match="alice was revoked and stays so"):
        Invitations(keys).invite_party("alice", "127.0.0.1:7070", DAY)
    # the directory that showed whose keys these are may be moved away
    (keys / "alice").rename(tmp_path / "moved")
    for name in ("signing.key", "tls.key"):
        (tmp_path / "carol").mkdir(mode=0o700, exist_ok=True)
        (tmp_path / "alice" / name).rename(tmp_path / "carol" / name)
    with pytest.raises(CertificateError, match="carol shows the keys of alice, which were revoked"):
        sign_request(keys, make_request(tmp_path / "carol", "carol"))
    with pytest.raises(CertificateError, match="alice was revoked"):
        issue_certificate(keys, "alice")


def test_another_party_is_certified_as_before(keys, tmp_path):
    sign_request(keys, make_request(tmp_path / "alice", "alice"))
    RevokedParties(keys).revoke_party("alice", "")

    sign_request(keys, make_request(tmp_path / "bob", "bob"))

    assert (keys / "bob" / "certificate.pem").exists()


def test_to_revoke_twice_changes_nothing(keys):
    issue_certificate(keys, "alice")
    first = RevokedParties(keys).revoke_party("alice", "the first reason")

    assert RevokedParties(keys).revoke_party("alice", "another") == first
    assert list(RevokedParties(keys).read_revocations()) == ["alice"]


def test_a_reason_is_cut_and_cannot_steer_a_terminal(keys):
    issue_certificate(keys, "alice")

    entry = RevokedParties(keys).revoke_party("alice", "\x1b[2J" + "x" * 1000)

    assert entry.reason.startswith("?[2J")
    assert len(entry.reason) == LONGEST_REASON


@pytest.mark.parametrize("name", ["owner", "nobody", "../owner", ""])
def test_what_cannot_be_revoked_is_refused_and_leaves_no_list(keys, invitations, name):
    with pytest.raises(CertificateError):
        invitations.revoke_party(name, "")

    assert RevokedParties(keys).read_revocations() == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"version": 2, "revoked": []}',
        b'{"version": 1, "revoked": [{"party": "a"}]}',
        b'{"version": 1, "revoked": [], "more": 1}',
        b"\xff" * 10,
        b" " * 70_000,
    ],
)
def test_a_list_that_cannot_be_read_is_an_error_and_not_an_empty_one(keys, tmp_path, content):
    path = keys / "revoked.json"
    path.touch(mode=0o600)
    path.write_bytes(content)

    with pytest.raises(CertificateError):
        RevokedParties(keys).read_revocations()
    with pytest.raises(CertificateError):
        sign_request(keys, make_request(tmp_path / "bob", "bob"))
    with pytest.raises(CertificateError):
        Invitations(keys).invite_party("bob", "127.0.0.1:7070", DAY)
    assert path.read_bytes() == content


def test_a_list_that_others_may_read_or_that_points_nowhere_is_an_error(keys, tmp_path):
    issue_certificate(keys, "alice")
    RevokedParties(keys).revoke_party("alice", "")
    (keys / "revoked.json").chmod(0o644)
    with pytest.raises(CertificateError, match="mode is 0644"):
        RevokedParties(keys).read_revocations()

    (keys / "revoked.json").unlink()
    (keys / "revoked.json").symlink_to(tmp_path / "gone")
    with pytest.raises(CertificateError, match="cannot be read"):
        RevokedParties(keys).read_revocations()


def test_another_name_without_keys_to_compare_is_still_free(keys):
    issue_certificate(keys, "alice")
    RevokedParties(keys).revoke_party("alice", "")

    RevokedParties(keys).check_not_revoked("bob")


@pytest.mark.parametrize("other", ["bob/certificate.pem", "authority.pem"], ids=["another party's", "the authority's"])
def test_a_certificate_of_another_in_the_partys_place_is_not_revoked_in_its_name(keys, other):
    issue_certificate(keys, "alice")
    issue_certificate(keys, "bob")
    (keys / "alice" / "certificate.pem").write_bytes((keys / other).read_bytes())

    with pytest.raises(CertificateError, match="is no certificate of alice"):
        RevokedParties(keys).revoke_party("alice", "")
    assert RevokedParties(keys).read_revocations() == {}
