"""Parties of different builds or devices: distances are compared, not digests."""

import pytest
import torch

from phalanx.pipeline import GuardConfig, StageRunner
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.messages import AuditReport, FetchReply
from phalanx.security.crypto import digest_hex
from phalanx.testing import Actor, tampering, tiny_run

TAU = 1e-5
NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "gradient_screen": False, "classes": "mixed"}
FULL = GuardConfig(audit_rate=1.0, tolerance=TAU, **NO_COIN)


def drifting(factor, direction="forward", numeric_class="another build"):
    """A party with kernels that round differently, or one that says so."""

    def drift(found, step, microbatch, tensor):
        return tensor * (1 + factor) if found == direction else tensor

    return Actor(tampering(drift), numeric_class=numeric_class)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_party_of_another_class_with_the_same_bits_is_never_blamed(make_company, honest_digest, stage):
    run = tiny_run(guard=FULL)
    company = make_company(run, {stage: Actor(numeric_class="another build")})

    company.run(2)

    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(run, 2)


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_rounding_within_the_tolerance_is_not_even_an_alarm(make_company, direction):
    company = make_company(tiny_run(guard=FULL), {1: drifting(1e-6, direction)})

    results = company.run(2)

    assert (company.verdicts, company.event_bodies("alarm")) == ([], [])
    assert [result.guard.attempts for result in results] == [1, 1]


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_drift_of_one_in_a_thousand_is_found_across_classes(make_company, honest_digest, direction):
    run = tiny_run(guard=FULL)
    company = make_company(run, {2: drifting(1e-3, direction)})

    company.run(2)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.direction, verdict.allowed) == ("worker-2", direction, TAU)
    assert verdict.distance == pytest.approx(1e-3, rel=0.2)
    assert company.weights_digest() == honest_digest(run, 2)


def test_beyond_tau_the_referee_decides(make_company):
    # token_distance puts the drift a little below its factor
    company = make_company(tiny_run(guard=FULL), {1: drifting(1.5 * TAU)})

    company.run(1)

    assert company.evicted == ["worker-1"]


class _Leaning(StageRunner):
    """An auditor with kernels that round the other way."""

    def __init__(self, honest, factor):
        self._honest, self._factor = honest, factor
        self.module, self.spec = honest.module, honest.spec

    def recompute_microbatch(self, step, microbatch, x, gradient):
        y, x_gradient = self._honest.recompute_microbatch(step, microbatch, x, gradient)
        return y * (1 + self._factor), x_gradient

    def abandon_step(self):
        self._honest.abandon_step()


def test_two_honest_parties_that_round_apart_are_both_acquitted(make_company):
    def round_down(copy, held):
        if not held:
            copy.runner = _Leaning(copy.runner, -0.8 * TAU)
        return copy

    auditor = Actor(round_down, numeric_class="a third build")
    company = make_company(tiny_run(guard=FULL), {1: drifting(0.8 * TAU), 2: auditor})

    company.run(1)

    assert company.verdicts == []
    assert {body["stage"] for body in company.event_bodies("alarm")} == {1}


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_tolerance_below_rounding_does_not_let_a_lie_through(make_company, direction):
    run = tiny_run(guard=FULL.model_copy(update={"tolerance": 1e-9}))
    company = make_company(run, {1: drifting(1e-4, direction)})

    company.run(1)

    (verdict,) = company.verdicts
    assert verdict.party == "worker-1"
    assert verdict.allowed is not None
    assert 1e-9 < verdict.allowed < 1e-5
    facts = explain_evidence(company.run_dir / str(verdict.evidence))
    assert str(facts["conclusion"]).startswith("holds: worker-1 signed")


@pytest.mark.slow
def test_a_small_drift_to_one_side_is_seen_in_the_long_run(make_company):
    # rounding noise of one millionth, and from the twentieth step on a bias below it
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(16, generator=generator)

    def lean(direction, step, microbatch, tensor):
        noise = 1e-7 * torch.randn(tensor.shape, generator=generator)
        return tensor + (noise + (1e-6 * bias if step >= 20 else 0)) if direction == "forward" else tensor

    leaning = Actor(tampering(lean), numeric_class="another build")
    company = make_company(tiny_run(guard=GuardConfig(audit_rate=0.5, **NO_COIN)), {1: leaning})

    results = company.run(40)

    assert company.verdicts == []
    drifts = company.event_bodies("drift")
    assert {(body["party"], body["direction"]) for body in drifts} == {("worker-1", "forward")}
    assert min(body["step"] for body in drifts) >= 20
    # looked at in full from then on: four microbatches instead of two
    assert (results[0].guard.num_audits, results[-1].guard.num_audits) == (4, 6)


def test_a_little_above_twice_tau_the_stage_is_named(make_company):
    company = make_company(tiny_run(guard=FULL), {1: drifting(3 * TAU)})

    company.run(1)

    assert company.evicted == ["worker-1"]


def test_inside_one_class_the_same_rounding_is_a_lie(make_company, honest_digest):
    run = tiny_run(guard=FULL.model_copy(update={"classes": "one"}))
    company = make_company(run, {1: drifting(1e-6, numeric_class=None)})

    company.run(2)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.allowed) == ("worker-1", 0.0)
    assert company.weights_digest() == honest_digest(run, 2)


def test_a_false_accuser_of_another_class_is_named_by_the_distance_of_its_claim(make_company, honest_digest):
    zeros = bytes(2 * 8 * 16 * 4)

    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, AuditReport):
            return [outgoing.with_fields({"digests": {**message.digests, "forward": digest_hex(zeros)}})]
        if isinstance(message, FetchReply) and message.claim:
            return [type(outgoing)(outgoing.receiver, message, zeros)]
        return [outgoing]

    run = tiny_run(guard=FULL)
    company = make_company(run, {2: Actor(rewrite=rewrite, numeric_class="another build")})

    company.run(2)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence, verdict.stage) == ("worker-2", "accusation", 1)
    assert verdict.distance == pytest.approx(1.0, abs=0.1)
    assert "worker-1" not in company.evicted
    assert company.weights_digest() == honest_digest(run, 2)
