"""Attester and verifier as a run uses them: a nonce is good once, and only from the verifier that drew it."""

from datetime import timedelta

import pytest
from authority import NOW
from refusals import refusal

from phalanx.security.crypto import Identity
from phalanx.security.tee import Binding, Policy, SimAttester, Verifier
from phalanx.security.tee.sim import SimReference

CODE = b"\x0d" * 32
KEY, RUN = b"\x0b" * 32, b"\x0c" * 32


@pytest.fixture
def verifier():
    return Verifier(Policy({"sim": SimReference(measurements={"code": (CODE.hex(),)})}, allow_insecure_sim=True))


@pytest.fixture(scope="module")
def attester():
    return SimAttester(Identity.without_certificate("sim"), CODE)


def test_evidence_for_a_drawn_nonce_passes_once(verifier, attester):
    binding = Binding(verifier.new_nonce(NOW), KEY, RUN)
    evidence = attester.make_evidence(binding)

    assert verifier.appraise_evidence(evidence, binding, NOW).binding == binding
    assert refusal(lambda: verifier.appraise_evidence(evidence, binding, NOW)) == "wrong_nonce"


def test_a_nonce_that_the_attester_chose_is_refused(verifier, attester):
    binding = Binding(b"\x01" * 32, KEY, RUN)

    assert refusal(lambda: verifier.appraise_evidence(attester.make_evidence(binding), binding, NOW)) == "wrong_nonce"


def test_a_nonce_is_used_up_by_a_refusal_and_by_time(verifier, attester):
    refused = Binding(verifier.new_nonce(NOW), KEY, RUN)
    late = Binding(verifier.new_nonce(NOW), KEY, RUN)
    other = attester.make_evidence(Binding(refused.nonce, b"\x01" * 32, RUN))

    assert refusal(lambda: verifier.appraise_evidence(other, refused, NOW)) == "wrong_key"
    assert refusal(lambda: verifier.appraise_evidence(attester.make_evidence(refused), refused, NOW)) == "wrong_nonce"
    after = NOW + timedelta(seconds=121)
    assert refusal(lambda: verifier.appraise_evidence(attester.make_evidence(late), late, after)) == "wrong_nonce"


def test_no_two_nonces_are_equal_and_open_ones_are_bounded(verifier, attester):
    first = Binding(verifier.new_nonce(NOW), KEY, RUN)

    nonces = {verifier.new_nonce(NOW) for _ in range(4096)}

    assert len(nonces) == 4096
    assert refusal(lambda: verifier.appraise_evidence(attester.make_evidence(first), first, NOW)) == "wrong_nonce"
