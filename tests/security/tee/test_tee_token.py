"""The result as a token: short-lived, signed by one verifier, about one nonce, key, run and role."""

from dataclasses import replace
from datetime import timedelta

import pytest
from amd import Amd
from nvidia import Nvidia
from published import PUBLISHED
from refusals import refusal

from phalanx.security.crypto import Identity
from phalanx.security.tee import issue_token, read_token
from phalanx.security.tee.formats.cbor import decode_cbor, encode_cbor
from phalanx.security.tee.formats.cose import to_be_signed

MINUTE = timedelta(minutes=1)


@pytest.fixture(scope="module")
def verifier():
    return Identity.without_certificate("verifier")


@pytest.fixture(scope="module")
def amd():
    return Amd()


def test_a_token_says_what_was_appraised(amd, verifier, binding):
    case = amd.case(binding)
    result = case.appraise()

    token = issue_token(result, verifier, case.now)
    read = read_token(token, verifier.public, binding, case.now + MINUTE)

    assert read.kind == "snp"
    assert read.measurements == dict(result.claims.measurements)
    assert read.binding == binding
    assert read.expires == case.now + 5 * MINUTE
    assert len(token) < 1200


def test_debug_is_claimed_to_be_off_only_where_the_evidence_proves_it(amd, verifier, binding):
    for case, claimed in ((amd.case(binding), True), (Nvidia().case(binding), False)):
        token = issue_token(case.appraise(), verifier, case.now)

        assert (263 in decode_cbor(decode_cbor(token, "token")[2], "claims")) == claimed
        assert read_token(token, verifier.public, binding, case.now)


def test_a_token_never_lives_longer_than_ten_minutes_or_its_certificates(verifier, binding):
    ending = Amd(leaf_form={"until": Amd().case(binding).now + 2 * MINUTE}).case(binding)
    long = Amd().case(binding)

    short = issue_token(ending.appraise(), verifier, ending.now, timedelta(hours=1))
    cut = issue_token(long.appraise(), verifier, long.now, timedelta(hours=1))

    assert read_token(short, verifier.public, binding, ending.now).expires == ending.now + 2 * MINUTE
    assert read_token(cut, verifier.public, binding, long.now).expires == long.now + 10 * MINUTE


def test_a_token_is_refused_before_and_after_its_time(amd, verifier, binding):
    case = amd.case(binding)
    token = issue_token(case.appraise(), verifier, case.now)

    for moment, reason in ((case.now - MINUTE, "not_yet_valid"), (case.now + 5 * MINUTE, "expired")):
        assert refusal(lambda moment=moment: read_token(token, verifier.public, binding, moment)) == reason


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("wrong_nonce", {"nonce": b"\x01" * 32}),
        ("wrong_key", {"tls_key": b"\x01" * 32}),
        ("wrong_run", {"run": b"\x01" * 32}),
        ("wrong_role", {"role": "client"}),
    ],
)
def test_a_token_about_another_peer_is_refused(amd, verifier, reason, change, binding):
    case = amd.case(binding)
    token = issue_token(case.appraise(), verifier, case.now)

    assert refusal(lambda: read_token(token, verifier.public, replace(binding, **change), case.now)) == reason


def test_a_token_of_another_verifier_is_refused(amd, verifier, binding):
    case = amd.case(binding)
    result = case.appraise()
    other, namesake = Identity.without_certificate("other"), Identity("other", verifier.signing_key)

    foreign = issue_token(result, other, case.now)
    misnamed = issue_token(result, namesake, case.now)

    assert refusal(lambda: read_token(foreign, verifier.public, binding, case.now)) == "bad_signature"
    assert refusal(lambda: read_token(misnamed, verifier.public, binding, case.now)) == "wrong_signer"


def test_evidence_that_is_bound_to_no_key_gives_no_token(verifier):
    case = PUBLISHED["snp"]()
    result = case.appraise()

    assert refusal(lambda: issue_token(result, verifier, case.now)) == "wrong_binding"


def test_no_byte_of_a_token_can_be_altered(amd, verifier, binding):
    case = amd.case(binding)
    token = issue_token(case.appraise(), verifier, case.now)

    for position in range(len(token)):
        altered = token[:position] + bytes([token[position] ^ 0x10]) + token[position + 1 :]
        assert refusal(lambda altered=altered: read_token(altered, verifier.public, binding, case.now))


@pytest.mark.parametrize(
    "change",
    [{4: 2**62}, {4: -(2**62)}, {10: b"short"}, {263: 0}, {265: "another"}, {99: 1}, {8: {}}, {1: 5}, {-70002: {1: 2}}],
    ids=str,
)
def test_a_signed_token_of_another_form_is_refused(amd, verifier, change, binding):
    case = amd.case(binding)
    protected, _, payload, _ = decode_cbor(issue_token(case.appraise(), verifier, case.now), "token")
    changed = encode_cbor({**decode_cbor(payload, "claims"), **change})
    token = encode_cbor([protected, {}, changed, verifier.sign_data(to_be_signed(protected, changed))])

    assert refusal(lambda: read_token(token, verifier.public, binding, case.now)) == "malformed"
