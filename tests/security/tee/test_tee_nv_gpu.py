"""GPU reports beyond the sample, and each thing that is refused."""

from datetime import timedelta

import pytest
from authority import NOW
from nvidia import BLOCKS, Nvidia
from refusals import refusal


@pytest.fixture(scope="module")
def nvidia():
    return Nvidia()


def test_a_report_of_another_model_passes(nvidia, binding):
    result = nvidia.case(binding).appraise()

    assert result.binding == binding
    assert result.claims.tcb == {"driver": "575.01.02", "vbios": "96.00.9F.00.01"}
    assert result.to_json()["debug"] is None


def test_a_measurement_that_differs_or_is_absent_is_refused(nvidia, binding):
    assert refusal(nvidia.case(binding, blocks={**BLOCKS, 2: b"\x09" * 48}).appraise) == "wrong_measurement"
    assert refusal(nvidia.case(binding, blocks={1: BLOCKS[1]}).appraise) == "wrong_measurement"


def test_another_driver_or_firmware_is_refused(nvidia, binding):
    case = nvidia.case(binding)

    assert refusal(case.with_reference(driver_versions=("1.0",)).appraise) == "tcb_too_old"
    assert refusal(case.with_reference(vbios_versions=("1.0",)).appraise) == "tcb_too_old"
    assert case.with_reference(driver_versions=(), vbios_versions=()).appraise()


@pytest.mark.parametrize("newer", [False, True], ids=["hopper", "blackwell"])
def test_both_forms_of_the_firmwares_identity_are_read(newer, binding):
    assert Nvidia(newer=newer).case(binding).appraise()


@pytest.mark.parametrize("newer", [False, True], ids=["hopper", "blackwell"])
def test_a_key_that_was_made_for_other_firmware_is_refused(newer, binding):
    assert refusal(Nvidia(fwid=b"\x01" * 48, newer=newer).case(binding).appraise) == "wrong_signer"
    assert refusal(Nvidia(newer=newer).case(binding, fwid=bytes(48)).appraise) == "wrong_signer"


def test_a_later_spdm_version_is_refused_as_one_that_is_not_understood(nvidia, binding):
    assert refusal(nvidia.case(binding, version=0x12).appraise) == "malformed"


def test_no_measurement_at_all_is_malformed(nvidia, binding):
    assert refusal(nvidia.case(binding, blocks={}).appraise) == "malformed"


@pytest.mark.parametrize("more", [1, 3, 4096])
def test_zeros_behind_the_signature_are_padding_and_nothing_else_is(nvidia, binding, more):
    case = nvidia.case(binding)

    padded = case.with_data(case.evidence.data + bytes(more))

    assert padded.appraise().binding == binding
    assert refusal(case.with_data(case.evidence.data + bytes(more) + b"\x01").appraise) == "malformed"
    # the second number of the signature is 0: a last byte alone is 0 in one of 256 signatures
    assert refusal(case.with_data(case.evidence.data[:-48] + bytes(47 + more)).appraise) == "bad_signature"
    assert refusal(case.with_data(case.evidence.data + bytes(1 << 20)).appraise) == "malformed"


def test_a_report_with_anothers_chain_is_refused(nvidia, binding):
    other = Nvidia()
    case = nvidia.case(binding).with_endorsement("chain", other.leaf.pem + other.model.pem + other.root.pem)

    assert refusal(case.appraise) == "bad_chain"
    assert refusal(case.with_policy(roots={"nv-gpu": (other.root.parsed,)}).appraise) == "bad_signature"


def test_an_authority_of_the_chain_may_not_sign_reports(nvidia, binding):
    swapped = nvidia.model.pem + nvidia.root.pem

    assert refusal(nvidia.case(binding).with_endorsement("chain", swapped).appraise) == "bad_chain"


def test_a_certificate_that_has_ended_is_refused(binding):
    assert refusal(Nvidia(leaf_form={"until": NOW - timedelta(days=1)}).case(binding).appraise) == "expired"
