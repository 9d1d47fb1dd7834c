"""From nonce to released key against a real TPM implementation, and everything that must stop on the way."""

import secrets
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from key_path import KEY, ROLE, RUN, Company, policy_for, whole_path
from refusals import refusal

from phalanx.security.crypto import Identity
from phalanx.security.tee import (
    AppraisalResult,
    Binding,
    Claims,
    KeyRelease,
    TpmAttester,
    appraise_evidence,
    issue_token,
)
from spent_cpu import spent_s

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture
def attester(device):
    with TpmAttester(device, (0, 7, 16)) as made:
        yield made


@pytest.fixture
def company(attester):
    return Company(policy_for(attester, fresh()))


def fresh(tls_key: bytes = b"\x0b" * 32) -> Binding:
    return Binding(secrets.token_bytes(32), tls_key, RUN, ROLE)


def test_the_key_is_released_to_the_enclave_that_was_appraised(company, attester):
    assert whole_path(company, attester) == KEY


@pytest.mark.slow
def test_the_whole_path_takes_fifty_milliseconds_at_most(company, attester):
    """Of a processor, ours and the TPM's, which take turns: a clock would count what else the machine does."""
    before_s = spent_s()
    for _ in range(50):
        whole_path(company, attester)

    assert 0.0 < (spent_s() - before_s) / 50 <= 0.050


def test_after_a_pcr_has_changed_no_key_is_released(company, attester, device):
    device.extend_pcr(16, b"\x01" * 32)

    assert refusal(lambda: whole_path(company, attester)) == "wrong_measurement"


def test_the_attestation_key_is_the_same_after_a_restart(bare_tpm):
    keys = []
    for _ in range(2):
        with bare_tpm.open() as device, TpmAttester(device) as attester:
            keys.append(attester.ak_public)
        bare_tpm.restart()

    assert keys[0] == keys[1]


def test_quotes_of_our_attester_are_bound(attester):
    binding = fresh()
    evidence, policy = attester.make_evidence(binding), policy_for(attester, binding)

    assert appraise_evidence(evidence, policy, binding, NOW).claims.kind == "tpm"
    for other, reason in (
        (replace(binding, nonce=b"\x01" * 32), "wrong_nonce"),
        (replace(binding, tls_key=b"\x01" * 32), "wrong_key"),
        (replace(binding, run=b"\x01" * 32), "wrong_run"),
        (replace(binding, role="client"), "wrong_role"),
    ):
        assert refusal(lambda other=other: appraise_evidence(evidence, policy, other, NOW)) == reason


def token_for(binding: Binding, verifier: Identity, kind: str = "tpm") -> bytes:
    claims = Claims(kind, {"sha256.0": "00" * 32}, binding.binding_digest(), datetime.max.replace(tzinfo=UTC))
    return issue_token(AppraisalResult(claims, binding, NOW, ""), verifier, NOW)


@pytest.fixture(scope="module")
def verifier():
    return Identity.without_certificate("verifier")


@pytest.fixture
def release(verifier):
    return KeyRelease(KEY, verifier.public, RUN, ROLE, ("tpm", "snp"))


def test_a_nonce_gets_the_key_once(release, verifier):
    binding = fresh()
    token = token_for(binding, verifier)

    assert release.release_key(token, binding.nonce, binding.tls_key, NOW) == KEY
    assert refusal(lambda: release.release_key(token, binding.nonce, binding.tls_key, NOW)) == "wrong_nonce"


def test_a_token_that_is_relayed_over_another_connection_gets_nothing(release, verifier):
    binding = fresh()
    token = token_for(binding, verifier)

    assert refusal(lambda: release.release_key(token, binding.nonce, b"\x01" * 32, NOW)) == "wrong_key"
    assert release.release_key(token, binding.nonce, binding.tls_key, NOW) == KEY


def test_a_token_of_another_run_role_or_verifier_gets_nothing(release, verifier):
    binding = fresh()
    for other, reason in (
        (replace(binding, run=b"\x01" * 32), "wrong_run"),
        (replace(binding, role="client"), "wrong_role"),
    ):
        token = token_for(other, verifier)
        assert refusal(lambda token=token: release.release_key(token, binding.nonce, binding.tls_key, NOW)) == reason
    forged = token_for(binding, Identity.without_certificate("verifier"))
    assert refusal(lambda: release.release_key(forged, binding.nonce, binding.tls_key, NOW)) == "bad_signature"


def test_simulated_evidence_gets_the_key_only_where_it_is_named(release, verifier):
    binding = fresh()
    token = token_for(binding, verifier, "sim")

    assert refusal(lambda: release.release_key(token, binding.nonce, binding.tls_key, NOW)) == "insecure_kind"
    lax = KeyRelease(KEY, verifier.public, RUN, ROLE, ("sim",))
    assert lax.release_key(token, binding.nonce, binding.tls_key, NOW) == KEY


def test_a_key_is_never_shown(release):
    assert KEY.hex() not in repr(release)
    assert "*" not in repr(release)
