"""What others published appraises, at a clock of its time, and only as it is."""

from dataclasses import replace
from datetime import timedelta

import pytest
from authority import issue, p256
from published import PUBLISHED, moment, nitro_debug
from refusals import refusal

from phalanx.security.tee import Policy, RawReportData
from phalanx.security.tee.formats.x509 import read_certificates

KINDS = sorted(PUBLISHED)
# where the first certificate or table of each sample begins and ends
BEFORE = {"snp": "2023-01-01", "tdx": "2025-06-18", "sgx": "2025-06-18", "nitro": "2022-10-12", "nv-gpu": "2020-01-01"}
AFTER = {"snp": "2031-01-01", "tdx": "2025-08-01", "sgx": "2025-08-01", "nitro": "2022-10-14"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_sample_passes_at_a_clock_of_its_time(kind):
    case = PUBLISHED[kind]()

    result = case.appraise()

    assert result.claims.kind == kind
    assert result.claims.report_data == case.expected.data
    assert result.claims.expires > case.now
    assert result.binding is None


def test_what_the_samples_say_is_what_their_publishers_say():
    claims = {kind: case().appraise().claims for kind, case in PUBLISHED.items()}

    assert claims["snp"].tcb == {"product": "Milan", "bootloader": 3, "tee": 0, "snp": 8, "microcode": 115}
    assert claims["tdx"].tcb["status"] == "UpToDate"
    assert claims["sgx"].tcb["status"] == "ConfigurationAndSWHardeningNeeded"
    assert claims["sgx"].tcb["advisories"] == "INTEL-SA-00289 INTEL-SA-00615"
    assert claims["nitro"].device == "i-020b6af9246d90e92-enc0183d09086c24190"
    assert claims["nv-gpu"].tcb == {"driver": "550.90.07", "vbios": "96.00.9F.00.01"}


def test_an_enclave_in_debug_mode_is_refused():
    assert refusal(nitro_debug().appraise) == "debug_enabled"


@pytest.mark.parametrize("kind", sorted(BEFORE))
def test_before_its_time_a_sample_is_refused(kind):
    case = replace(PUBLISHED[kind](), now=moment(BEFORE[kind]))

    assert refusal(case.appraise) == "not_yet_valid"


@pytest.mark.parametrize("kind", sorted(AFTER))
def test_after_its_time_a_sample_is_refused(kind):
    case = replace(PUBLISHED[kind](), now=moment(AFTER[kind]))

    assert refusal(case.appraise) == "expired"


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_moment_still_passes_and_the_one_after_it_does_not(kind):
    case = PUBLISHED[kind]()
    end = case.appraise().claims.expires
    if end.year == 9999:
        pytest.skip("this vendor's certificates never end")

    assert replace(case, now=end).appraise()
    assert refusal(replace(case, now=end + timedelta(seconds=1)).appraise) == "expired"


@pytest.mark.parametrize("kind", KINDS)
def test_other_report_data_is_refused(kind):
    case = PUBLISHED[kind]()
    other = bytes([case.expected.data[0] ^ 1]) + case.expected.data[1:]

    assert refusal(replace(case, expected=RawReportData(other)).appraise) == "wrong_nonce"
    assert refusal(replace(case, expected=RawReportData(b"")).appraise) == "wrong_nonce"


@pytest.mark.parametrize("kind", KINDS)
def test_evidence_without_a_binding_never_stands_for_one(kind, binding):
    case = replace(PUBLISHED[kind](), expected=binding)

    assert refusal(case.appraise) == "wrong_binding"


@pytest.mark.parametrize("kind", KINDS)
def test_another_measurement_is_refused(kind):
    case = PUBLISHED[kind]()
    known = case.policy.references[kind].measurements
    name, (value,) = next(iter(known.items()))
    other = f"{int(value[:2], 16) ^ 1:02x}{value[2:]}"

    assert refusal(case.with_reference(measurements={**known, name: (other,)}).appraise) == "wrong_measurement"
    assert refusal(case.with_reference(measurements={**known, "absent": (value,)}).appraise) == ("wrong_measurement")
    assert case.with_reference(measurements={**known, name: (other, value)}).appraise()


@pytest.mark.parametrize("kind", KINDS)
def test_a_revoked_measurement_is_refused_although_it_is_a_reference_value(kind):
    case = PUBLISHED[kind]()
    (value,) = next(iter(case.policy.references[kind].measurements.values()))

    assert refusal(case.with_policy(revoked_measurements=frozenset([value])).appraise) == "revoked"


@pytest.mark.parametrize("kind", KINDS)
def test_below_another_root_nothing_passes(kind):
    case = PUBLISHED[kind]()
    stranger = issue("somebody else", p256())

    assert refusal(case.with_policy(roots={kind: (stranger.parsed,)}).appraise) == "bad_chain"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_without_reference_values_is_refused(kind):
    case = replace(PUBLISHED[kind](), policy=Policy({}))

    assert refusal(case.appraise) == "no_reference"


def test_a_certificate_that_the_policy_revokes_is_refused():
    case = PUBLISHED["nv-gpu"]()
    chain = read_certificates(case.evidence.find_endorsement("chain"), "chain")

    for certificate in chain:
        revoked = frozenset([certificate.sha256_hex])
        assert refusal(case.with_policy(revoked_certificates=revoked).appraise) == "revoked"


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_more_or_less_is_malformed(kind):
    case = PUBLISHED[kind]()

    assert refusal(case.with_data(case.evidence.data + b"\x01").appraise) == "malformed"
    assert refusal(case.with_data(case.evidence.data.rstrip(b"\0")[:-1]).appraise) in (
        "malformed",
        "bad_signature",
    )
    assert refusal(case.with_data(b"").appraise) == "malformed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_or_an_unknown_endorsement_is_named(kind):
    case = PUBLISHED[kind]()

    for name in case.evidence.endorsements:
        rest = {key: one for key, one in case.evidence.endorsements.items() if key != name}
        bare = replace(case, evidence=replace(case.evidence, endorsements=rest))
        assert refusal(bare.appraise) == "missing_endorsement"
    assert refusal(case.with_endorsement("other", b"").appraise) == "malformed"
