"""TPM quotes: what is checked, and each thing that is refused."""

import hashlib
from dataclasses import replace

import pytest
from authority import Form, issue, p256
from published import Case
from refusals import refusal
from tcg import AK_ATTRIBUTES, PCRS, Tpm, pcr_values

from phalanx.config import canonical_json


@pytest.fixture(scope="module")
def tpm():
    return Tpm()


def with_endorsements(case: Case, **endorsements: bytes) -> Case:
    return replace(case, evidence=replace(case.evidence, endorsements=endorsements))


@pytest.mark.parametrize("kind", ["ecc", "rsa"])
def test_a_quote_by_an_enrolled_key_passes(kind, binding):
    result = Tpm(kind).case(binding).appraise()

    assert result.binding == binding
    assert result.claims.measurements["sha256.7"] == PCRS[7].hex()
    assert result.to_json()["debug"] is None


def test_a_quote_by_a_certified_key_passes_without_enrolment(tpm, binding):
    case = tpm.case(binding).with_reference(ak_names=())
    parts = {"ak": tpm.public(), "pcrs": pcr_values(PCRS), "chain": tpm.root.pem}

    assert with_endorsements(case, **parts, ak_certificate=tpm.ak_certificate.der).appraise()
    assert refusal(with_endorsements(case, **parts, ak_certificate=tpm.ek.der).appraise) == "wrong_signer"
    assert refusal(with_endorsements(case, **parts).appraise) == "wrong_signer"


def test_a_certified_key_passes_without_its_public_area_and_the_result_says_so(tpm, binding):
    case = tpm.case(binding).with_reference(ak_names=())
    parts = {"pcrs": pcr_values(PCRS), "chain": tpm.root.pem, "ak_certificate": tpm.ak_certificate.der}

    assert any("issued its certificate" in note for note in with_endorsements(case, **parts).appraise().claims.notes)
    other = Tpm().ak_certificate.der
    assert refusal(with_endorsements(case, **{**parts, "ak_certificate": other}).appraise) == "bad_chain"


def test_a_key_that_somebody_else_enrolled_passes_by_its_digest_alone(tpm, binding):
    spki = tpm.ak_certificate.parsed.spki
    case = with_endorsements(tpm.case(binding), ak_key=spki, pcrs=pcr_values(PCRS)).with_policy(roots={})

    assert refusal(case.appraise) == "wrong_signer"
    known = case.with_reference(ak_keys=(hashlib.sha256(spki).hexdigest(),))
    assert any("who enrolled it" in note for note in known.appraise().claims.notes)
    assert refusal(known.with_endorsement("ak_key", Tpm().ak_certificate.parsed.spki).appraise) == "wrong_signer"


def test_an_unknown_key_is_refused_although_its_ek_is_genuine(tpm, binding):
    assert refusal(tpm.case(binding).with_reference(ak_names=(Tpm().ak_name,)).appraise) == "wrong_signer"


def test_an_ek_of_no_pinned_vendor_is_refused(tpm, binding):
    case = tpm.case(binding)
    stranger = issue("Test TPM Manufacturer CA", p256())

    assert refusal(case.with_policy(roots={"tpm": (stranger.parsed,)}).appraise) == "bad_chain"
    assert refusal(case.with_policy(roots={}).appraise) == "no_root"


def test_without_an_ek_certificate_the_enrolled_name_alone_counts_and_the_result_says_so(tpm, binding):
    case = with_endorsements(tpm.case(binding), ak=tpm.public(), pcrs=pcr_values(PCRS)).with_policy(roots={})

    assert any("enrolled name alone" in note for note in case.appraise().claims.notes)


@pytest.mark.parametrize(
    ("changes", "reason"), [({"magic": 0x12345678}, "malformed"), ({"kind": 0x8017}, "malformed")], ids=str
)
def test_what_was_not_made_in_a_tpm_or_is_no_quote_is_refused(tpm, changes, reason, binding):
    assert refusal(tpm.case(binding, **changes).appraise) == reason


@pytest.mark.parametrize("missing", [1 << 1, 1 << 4, 1 << 5, 1 << 16, 1 << 18])
def test_a_key_that_could_sign_anything_or_leave_its_tpm_is_refused(missing, binding):
    assert refusal(Tpm(attributes=AK_ATTRIBUTES & ~missing).case(binding).appraise) == "wrong_signer"


def test_a_key_that_also_decrypts_is_refused(binding):
    assert refusal(Tpm(attributes=AK_ATTRIBUTES | 1 << 17).case(binding).appraise) == "wrong_signer"


def test_pcrs_that_are_not_those_of_the_quote_are_refused(tpm, binding):
    case = tpm.case(binding)
    altered = {**PCRS, 7: b"\x08" * 32}

    assert refusal(case.with_endorsement("pcrs", pcr_values(altered)).appraise) == "wrong_measurement"
    assert refusal(case.with_endorsement("pcrs", pcr_values({0: PCRS[0]})).appraise) == "malformed"
    assert refusal(case.with_endorsement("pcrs", pcr_values({**PCRS, 9: PCRS[0]})).appraise) == "malformed"
    assert refusal(case.with_endorsement("pcrs", canonical_json({"sha256": {"0": 1}})).appraise) == "malformed"


def test_a_changed_pcr_is_refused(tpm, binding):
    assert refusal(tpm.case(binding, pcrs={**PCRS, 7: b"\x09" * 32}).appraise) == "wrong_measurement"
    assert refusal(tpm.case(binding, pcrs={0: PCRS[0]}).appraise) == "wrong_measurement"
    assert refusal(tpm.case(binding, pcrs={}).appraise) == "wrong_measurement"


def test_a_quote_by_another_key_is_refused(tpm, binding):
    case, other = tpm.case(binding), Tpm()
    rsa = Tpm("rsa")

    assert refusal(case.with_data(other.quote(binding.binding_digest())).appraise) == "bad_signature"
    assert refusal(case.with_data(rsa.quote(binding.binding_digest())).appraise) == "wrong_signer"


def test_old_extra_data_is_refused(tpm, binding):
    assert refusal(tpm.case(binding).with_data(tpm.quote(b"\x01" * 32)).appraise) == "wrong_binding"


def test_the_sha1_bank_is_not_relied_on_unless_the_policy_says_so(tpm, binding):
    case = tpm.case(binding).with_reference(measurements={"sha1.0": ("00" * 20,)})

    assert refusal(case.appraise) == "forbidden_mode"
    assert refusal(case.with_reference(accept_sha1_bank=True).appraise) == "wrong_measurement"


def test_an_ak_certificate_of_an_authority_is_refused(tpm, binding):
    authority = issue("AK", tpm.ak, tpm.root, Form(is_authority=True))
    case = tpm.case(binding).with_reference(ak_names=())
    parts = {"ak": tpm.public(), "pcrs": pcr_values(PCRS), "chain": tpm.root.pem}

    assert refusal(with_endorsements(case, **parts, ak_certificate=authority.der).appraise) == "bad_chain"
