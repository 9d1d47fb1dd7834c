"""SGX and TDX beyond the samples: every quote version, every TCB status, and each thing that is refused."""

import json
import struct

import pytest
from authority import Form, issue, p256
from intel import Intel, Tables, raw_signature, sgx_body, tdx_body
from refusals import refusal

STATUSES = (
    "SWHardeningNeeded",
    "ConfigurationNeeded",
    "ConfigurationAndSWHardeningNeeded",
    "OutOfDate",
    "OutOfDateConfigurationNeeded",
)


@pytest.fixture(scope="module")
def intel():
    return Intel()


def tdx_case(intel, binding, tables=None, **body):
    return intel.case(binding, 4, tdx_body(binding.binding_digest(), **body), tables)


def sgx_case(intel, binding, tables=None, **body):
    return intel.case(binding, 3, sgx_body(binding.binding_digest(), **body), tables)


@pytest.mark.parametrize("version", [3, 4, 5])
def test_sgx_quotes_of_every_version_pass(intel, version, binding):
    assert (
        intel.case(binding, version, sgx_body(binding.binding_digest())).appraise().claims.tcb["status"] == "UpToDate"
    )


@pytest.mark.parametrize(("version", "version_15"), [(4, False), (5, False), (5, True)])
def test_tdx_quotes_of_every_version_pass(intel, version, version_15, binding):
    result = intel.case(binding, version, tdx_body(binding.binding_digest(), version_15=version_15)).appraise()

    assert result.binding == binding
    assert ("mrservicetd" in result.claims.measurements) == version_15


def test_zeros_may_follow_a_tdx_quote_and_nothing_else(intel, binding):
    case = tdx_case(intel, binding)

    assert case.with_data(case.evidence.data + bytes(100)).appraise()
    assert refusal(case.with_data(case.evidence.data + bytes(99) + b"\x01").appraise) == "malformed"


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_passes_only_where_the_policy_accepts_it(intel, status, binding):
    case = sgx_case(intel, binding, Tables(status=status, advisories=("INTEL-SA-00001",)))

    assert refusal(case.appraise) == "tcb_too_old"
    accepted = case.with_reference(accepted_tcb=(status,))
    assert accepted.appraise().claims.tcb["status"] == status
    assert refusal(accepted.with_reference(accepted_advisories=()).appraise) == "tcb_too_old"
    assert accepted.with_reference(accepted_advisories=("INTEL-SA-00001",)).appraise()


def test_a_revoked_level_never_passes(intel, binding):
    case = sgx_case(intel, binding, Tables(status="Revoked"))

    assert refusal(case.with_reference(accepted_tcb=("Revoked", "UpToDate")).appraise) == "revoked"


@pytest.mark.parametrize(
    ("tables", "status"),
    [
        (Tables(qe_status="OutOfDate"), "OutOfDate"),
        (Tables(status="ConfigurationNeeded", qe_status="OutOfDate"), "OutOfDateConfigurationNeeded"),
        (Tables(module_status="OutOfDate"), "OutOfDate"),
        (Tables(status="SWHardeningNeeded"), "SWHardeningNeeded"),
    ],
)
def test_the_worst_of_platform_module_and_quoting_enclave_counts(intel, tables, status, binding):
    case = tdx_case(intel, binding, tables)

    assert refusal(case.appraise) == "tcb_too_old"
    assert case.with_reference(accepted_tcb=(status,)).appraise().claims.tcb["status"] == status


@pytest.mark.parametrize(
    "tables",
    [
        Tables(svns=(3,) + (2,) * 15),
        Tables(svns=(2,) * 15 + (3,)),
        Tables(pce_svn=12),
        Tables(tdx_svns=(5, 0, 3) + (0,) * 13),
        Tables(qe_svn=5),
    ],
)
def test_a_platform_below_every_level_is_refused(intel, tables, binding):
    assert refusal(tdx_case(intel, binding, tables).appraise) == "tcb_too_old"


def test_the_modules_own_versions_count_by_its_identity_or_by_the_level(intel, binding):
    old = bytes([2, 1, 2]).ljust(16, b"\0")
    without_identity = bytes([4, 0, 2]).ljust(16, b"\0")

    assert refusal(tdx_case(intel, binding, tcb_svn=old).appraise) == "tcb_too_old"
    assert refusal(tdx_case(intel, binding, tcb_svn=without_identity).appraise) == "tcb_too_old"
    assert tdx_case(intel, binding, tcb_svn=bytes([5, 0, 2]).ljust(16, b"\0")).appraise()
    assert refusal(tdx_case(intel, binding, tcb_svn=bytes([5, 9, 2]).ljust(16, b"\0")).appraise) == "wrong_signer"


@pytest.mark.parametrize("attributes", [0x01, 0x10000001, 0x80])
def test_a_trust_domain_under_debug_is_refused(intel, attributes, binding):
    assert refusal(tdx_case(intel, binding, attributes=attributes).appraise) == "debug_enabled"


def test_a_service_domain_passes_only_where_the_policy_says_so(intel, binding):
    body = tdx_body(binding.binding_digest(), version_15=True, service_td=b"\x01" * 48)
    case = intel.case(binding, 5, body)

    assert refusal(case.appraise) == "forbidden_mode"
    assert case.with_reference(allow_service_td=True).appraise()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"attributes": 0x07}, "debug_enabled"),
        ({"attributes": 0x04}, "forbidden_mode"),
        ({"product": 2}, "wrong_measurement"),
        ({"svn": 4}, "tcb_too_old"),
    ],
)
def test_an_enclave_in_the_wrong_mode_or_version_is_refused(intel, body, reason, binding):
    assert refusal(sgx_case(intel, binding, **body).appraise) == reason


def test_a_revoked_pck_or_its_authority_is_refused(binding):
    assert refusal(sgx_case(Intel(revoked_pck=True), binding).appraise) == "revoked"
    assert refusal(sgx_case(Intel(revoked_ca=True), binding).appraise) == "revoked"


def test_another_quoting_enclave_is_refused(binding):
    assert refusal(sgx_case(Intel(qe_signer=b"\x01" * 32), binding).appraise) == "wrong_signer"
    assert refusal(sgx_case(Intel(qe_attributes=0x07), binding).appraise) == "debug_enabled"


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        (Tables(until="2026-05-31T23:59:59Z"), "expired"),
        (Tables(since="2026-06-01T00:00:01Z"), "not_yet_valid"),
        (Tables(fmspc=bytes(6)), "wrong_signer"),
    ],
)
def test_tables_of_another_time_or_platform_are_refused(intel, tables, reason, binding):
    assert refusal(sgx_case(intel, binding, tables).appraise) == reason


def test_old_tables_that_are_still_valid_are_refused_by_their_number(intel, binding):
    case = sgx_case(intel, binding)

    assert case.with_reference(min_evaluation=17).appraise()
    assert refusal(case.with_reference(min_evaluation=18).appraise) == "tcb_too_old"


def with_collateral(case, **changes):
    parts = {**json.loads(case.evidence.find_endorsement("collateral")), **changes}
    return case.with_endorsement("collateral", json.dumps(parts).encode())


def test_tables_for_another_tee_are_refused(intel, binding):
    foreign = tdx_case(intel, binding).evidence.find_endorsement("collateral")

    assert refusal(sgx_case(intel, binding).with_endorsement("collateral", foreign).appraise) == "wrong_signer"


def test_tables_signed_by_anybody_else_are_refused(intel, binding):
    case, parts = sgx_case(intel, binding), intel.collateral(Tables(tee="SGX"))
    other = issue("Intel SGX TCB Signing", p256(), issue("Intel SGX Root CA", p256()), Form())
    same_root = issue("Somebody", p256(), intel.root, Form())
    signed = parts["tcb_info"].encode()

    forged = {
        "tcb_info_issuer_chain": (other.pem + intel.root.pem).decode(),
        "tcb_info_signature": raw_signature(other.key, signed).hex(),
    }
    assert refusal(with_collateral(case, **forged).appraise) == "bad_chain"
    pck_signed = {
        "tcb_info_issuer_chain": (same_root.pem + intel.root.pem).decode(),
        "tcb_info_signature": raw_signature(same_root.key, signed).hex(),
    }
    assert refusal(with_collateral(case, **pck_signed).appraise) == "wrong_signer"
    better = parts["tcb_info"].replace('"pcesvn":11', '"pcesvn":1')
    assert refusal(with_collateral(case, tcb_info=better).appraise) == "bad_signature"


@pytest.mark.parametrize("name", ["root_ca_crl", "pck_crl", "tcb_info", "qe_identity_signature"])
def test_collateral_that_lacks_a_part_or_has_it_garbled_is_malformed(intel, name, binding):
    case = sgx_case(intel, binding)
    parts = json.loads(case.evidence.find_endorsement("collateral"))
    garbled = with_collateral(case, **{name: "zz"})
    del parts[name]

    assert refusal(garbled.appraise) in ("malformed", "bad_signature")
    assert refusal(case.with_endorsement("collateral", json.dumps(parts).encode()).appraise) == "malformed"


def test_a_revocation_list_of_somebody_else_does_not_count(intel, binding):
    case = sgx_case(intel, binding)
    other = issue("Intel SGX PCK Processor CA", p256(), intel.root, Form(is_authority=True))

    assert refusal(with_collateral(case, pck_crl=other.crl().hex()).appraise) == "missing_endorsement"


def test_collateral_with_a_key_twice_is_malformed(intel, binding):
    case = sgx_case(intel, binding)
    text = case.evidence.find_endorsement("collateral").decode()
    doubled = text[:-1] + ',"tcb_info":"{}"}'

    assert refusal(case.with_endorsement("collateral", doubled.encode()).appraise) == "malformed"


def test_a_quote_of_the_other_tee_is_refused(intel, binding):
    sgx, tdx = sgx_case(intel, binding), tdx_case(intel, binding)

    assert refusal(sgx.with_data(tdx.evidence.data).appraise) == "malformed"
    assert refusal(tdx.with_data(sgx.evidence.data).appraise) == "malformed"


@pytest.mark.parametrize(("offset", "value"), [(0, 2), (0, 6), (2, 3), (4, 1), (12, 0), (48, 4), (50, 1)], ids=str)
def test_a_header_that_is_not_understood_is_malformed(intel, offset, value, binding):
    case = intel.case(binding, 5, tdx_body(binding.binding_digest()))
    data = bytearray(case.evidence.data)
    struct.pack_into("<H", data, offset, value)

    assert refusal(case.with_data(bytes(data)).appraise) == "malformed"


def test_an_attestation_key_that_the_quoting_enclave_did_not_make_is_refused(binding):
    assert refusal(sgx_case(Intel(reported_key=p256()), binding).appraise) == "wrong_signer"
