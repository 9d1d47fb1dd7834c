"""Nitro documents beyond the samples, and each thing that is refused."""

from datetime import timedelta

import pytest
from authority import NOW
from aws import PCR0, Aws
from published import Case
from refusals import refusal

from phalanx.security.tee.formats.cbor import encode_cbor


@pytest.fixture(scope="module")
def aws():
    return Aws()


def signed(aws, case: Case, document: dict, **settings) -> Case:
    return case.with_data(aws.sign(document, **settings))


def test_an_own_document_passes_tagged_or_not(aws, binding):
    case = aws.case(binding)

    assert case.appraise().binding == binding
    assert case.with_data(b"\xd2" + case.evidence.data).appraise()
    assert refusal(case.with_data(b"\xd1" + case.evidence.data).appraise) == "malformed"


def test_the_binding_may_stand_in_the_nonce_where_there_is_no_user_data(aws, binding):
    assert aws.case(binding, user_data=None, nonce=binding.binding_digest()).appraise()
    assert refusal(aws.case(binding, user_data=None, nonce=binding.nonce).appraise) == "wrong_binding"
    assert refusal(aws.case(binding, user_data=None, nonce=None).appraise) == "wrong_binding"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pcrs": {0: bytes(48), 1: b"\x22" * 48}}, "debug_enabled"),
        ({"pcrs": {1: b"\x22" * 48}}, "debug_enabled"),
        ({"pcrs": {0: b"\x20" * 48}}, "wrong_measurement"),
        ({"pcrs": {}}, "malformed"),
        ({"pcrs": {32: PCR0}}, "malformed"),
        ({"pcrs": {0: b"\x20" * 20}}, "malformed"),
        ({"pcrs": {"0": PCR0}}, "malformed"),
        ({"pcrs": [PCR0]}, "malformed"),
        ({"digest": "SHA256"}, "malformed"),
        ({"timestamp": 0}, "malformed"),
        ({"timestamp": "now"}, "malformed"),
        ({"timestamp": 1 << 47}, "malformed"),
        ({"timestamp": (1 << 47) - 1}, "not_yet_valid"),
        ({"module_id": ""}, "malformed"),
        ({"cabundle": []}, "malformed"),
        ({"cabundle": [b""]}, "malformed"),
        ({"certificate": b"\x30\x00"}, "malformed"),
        ({"user_data": "text"}, "malformed"),
        ({"user_data": bytes(513)}, "malformed"),
        ({"public_key": bytes(1025)}, "malformed"),
        ({"surprise": 1}, "malformed"),
        ({"timestamp": int((NOW + timedelta(minutes=6)).timestamp() * 1000)}, "not_yet_valid"),
    ],
    ids=str,
)
def test_a_document_that_is_signed_and_wrong_is_refused(aws, changes, reason, binding):
    assert refusal(aws.case(binding, **changes).appraise) == reason


def test_a_document_without_its_own_chain_is_refused(aws, binding):
    assert refusal(aws.case(binding, cabundle=[aws.root.der]).appraise) == "bad_chain"
    other = Aws()
    assert refusal(aws.case(binding, certificate=other.leaf.der).appraise) == "bad_chain"


def test_another_signature_algorithm_is_refused(aws, binding):
    case = aws.case(binding)

    assert refusal(signed(aws, case, aws.document(binding), algorithm=-7).appraise) == "malformed"


def test_an_unprotected_header_or_a_missing_part_is_malformed(aws, binding):
    case = aws.case(binding)

    for value in ([encode_cbor({1: -35}), {1: -7}, b"", bytes(96)], [encode_cbor({1: -35}), {}, b""], {}, 7, None):
        assert refusal(case.with_data(encode_cbor(value)).appraise) == "malformed"


def test_a_leaf_of_three_hours_ends(binding):
    aws = Aws(leaf_form={"until": NOW - timedelta(seconds=1)})

    assert refusal(aws.case(binding).appraise) == "expired"
