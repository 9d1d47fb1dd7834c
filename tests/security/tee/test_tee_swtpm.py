"""A real TPM implementation: enrolment, quote, token; a changed PCR and an old nonce are refused."""

import secrets
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from refusals import refusal
from swtpm_lab import SoftwareTpm, missing

from phalanx.errors import TpmError
from phalanx.security.crypto import Identity
from phalanx.security.tee import (
    Binding,
    Policy,
    TpmAttester,
    appraise_evidence,
    begin_enrolment,
    inspect_evidence,
    issue_token,
    open_tpm,
    read_token,
)
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.formats.x509 import read_certificates
from phalanx.security.tee.tpm.key import TpmReference

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")


@pytest.fixture(scope="module")
def now():
    # the local authority's certificates begin when the TPM is made
    return datetime.now(UTC) + timedelta(hours=1)


@pytest.fixture(scope="module")
def tpm(tmp_path_factory):
    made = SoftwareTpm(tmp_path_factory.mktemp("tpm"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def ak_name(tpm, now):
    """The AK's name, after the TPM has shown that it holds EK and AK."""
    trust = Trust(read_certificates(tpm.roots, "root"), now)
    begun = begin_enrolment(tpm.ek_certificate, tpm.chain, tpm.ak_public, trust)
    return begun.finish_enrolment(tpm.activate(begun))


def fresh() -> Binding:
    return Binding(secrets.token_bytes(32), b"\x0b" * 32, b"\x0c" * 32)


def policy_for(tpm, ak_name, evidence) -> Policy:
    found = inspect_evidence(evidence)
    reference = TpmReference(measurements={name: (value,) for name, value in found.items()}, ak_names=(ak_name,))
    return Policy({"tpm": reference}, {"tpm": read_certificates(tpm.roots, "root")})


def test_the_whole_way_from_nonce_to_token(tpm, ak_name, now):
    binding, verifier = fresh(), Identity.without_certificate("verifier")
    evidence = tpm.evidence(binding, ek_certificate=tpm.ek_certificate, chain=tpm.chain)
    policy = policy_for(tpm, ak_name, evidence)

    result = appraise_evidence(evidence, policy, binding, now)
    token = issue_token(result, verifier, now)

    assert read_token(token, verifier.public, binding, now).kind == "tpm"
    assert set(result.claims.measurements) == {"sha256.0", "sha256.7", "sha256.16"}


def test_an_old_nonce_and_another_key_are_refused(tpm, ak_name, now):
    binding = fresh()
    evidence = tpm.evidence(binding)
    policy = policy_for(tpm, ak_name, evidence)

    assert refusal(lambda: appraise_evidence(evidence, policy, fresh(), now)) == "wrong_nonce"
    other = replace(binding, tls_key=b"\x01" * 32)
    assert refusal(lambda: appraise_evidence(evidence, policy, other, now)) == "wrong_key"


def test_a_changed_pcr_is_refused(tpm, ak_name, now):
    before = tpm.evidence(fresh())
    policy = policy_for(tpm, ak_name, before)
    tpm.extend(16, secrets.token_bytes(32))
    binding = fresh()
    after = tpm.evidence(binding)
    hidden = replace(after, endorsements={**after.endorsements, "pcrs": before.endorsements["pcrs"]})

    assert refusal(lambda: appraise_evidence(after, policy, binding, now)) == "wrong_measurement"
    assert refusal(lambda: appraise_evidence(hidden, policy, binding, now)) == "wrong_measurement"


def test_no_byte_of_a_real_quote_can_be_altered(tpm, ak_name, now):
    binding = fresh()
    evidence = tpm.evidence(binding)
    policy = policy_for(tpm, ak_name, evidence)
    assert appraise_evidence(evidence, policy, binding, now)

    for position in range(len(evidence.data)):
        data = bytearray(evidence.data)
        data[position] ^= 1 << position % 8
        altered = replace(evidence, data=bytes(data))
        assert refusal(lambda altered=altered: appraise_evidence(altered, policy, binding, now))


def test_our_own_attester_is_enrolled_and_its_quotes_pass(tpm, now):
    trust = Trust(read_certificates(tpm.roots, "root"), now)
    with open_tpm(tpm.address) as device, TpmAttester(device, (0, 7, 16)) as attester:
        begun = begin_enrolment(attester.ek_certificate, tpm.chain, attester.ak_public, trust)
        name = begun.finish_enrolment(attester.activate_credential(begun))
        binding = fresh()
        evidence = attester.make_evidence(binding)

    result = appraise_evidence(evidence, policy_for(tpm, name, evidence), binding, now)

    assert result.claims.device == name


def test_a_secret_for_another_key_is_not_read(tpm, ak_name, now):
    trust = Trust(read_certificates(tpm.roots, "root"), now)
    begun = begin_enrolment(tpm.ek_certificate, tpm.chain, tpm.ak_public, trust)

    with (
        open_tpm(tpm.address) as device,
        TpmAttester(device) as attester,
        pytest.raises(TpmError, match="ACTIVATE_CREDENTIAL"),
    ):
        attester.activate_credential(begun)
