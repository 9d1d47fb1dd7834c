"""Two copies of a stage share its microbatches: gradients, norms and states that both cannot be right about."""

import json

import pytest
import torch
from leagues import league_of_gradients

from phalanx.optimizers import StageOptimizer
from phalanx.pipeline import GuardConfig, explain_evidence
from phalanx.pipeline.protocol.messages import Bulk, Commit, GradientHeld, UpdateReport
from phalanx.pipeline.protocol.tensor_stream import digest_of_parts
from phalanx.testing import Actor, only, tiny_run

FALSE = "3" * 64
both_copies = pytest.mark.parametrize("party", [1, 2])


def with_fields(kind, **changes):
    return Actor(rewrite=only(kind, lambda outgoing, message: [outgoing.with_fields(changes)]))


def doubled(payload):
    return (2 * torch.frombuffer(bytearray(payload), dtype=torch.float32)).numpy().tobytes()


def sending_bulk(purpose):
    def alter(outgoing, message):
        is_one = message.purpose == purpose
        return [type(outgoing)(outgoing.receiver, message, doubled(outgoing.payload))] if is_one else [outgoing]

    return Actor(rewrite=only(Bulk, alter))


def false_state(field):
    def falsify(outgoing, applied):
        lies = {name: state.model_copy(update={field: FALSE}) for name, state in applied.states.items()}
        return [outgoing.with_fields({"states": lies})]

    return Actor(rewrite=only(UpdateReport, falsify))


def showing_parts_of_the_step_before():
    """Claim that the server sent now what it did send, and sign, one step earlier."""
    earlier = {}

    def rewrite(outgoing, held):
        shown = earlier.get((held.stage, held.step - 1))
        earlier[(held.stage, held.step)] = held.parts
        if shown is None:
            return [outgoing]
        digest = digest_of_parts([json.loads(part.header)["payload_digest"] for part in shown])
        return [outgoing.with_fields({"gradient": digest, "parts": shown})]

    return Actor(rewrite=only(GradientHeld, rewrite))


LIES = {
    "a gradient that was not computed, with the norm of the true one": (sending_bulk("gradient"), "gradient"),
    "a commitment to another gradient": (with_fields(Commit, gradient=FALSE), "gradient"),
    "another gradient than was received": (with_fields(GradientHeld, gradient=FALSE), "gradient"),
    "no signed parts": (with_fields(GradientHeld, gradient=FALSE, parts=()), "gradient"),
    "parts of the step before": (showing_parts_of_the_step_before(), "gradient"),
    "a norm of the sum that is too small": (with_fields(GradientHeld, norm_squared=1e-9), "gradient"),
    "a norm that is not finite": (with_fields(GradientHeld, norm_squared=None), "gradient"),
    "other weights": (false_state("weights"), "state"),
    "other moments": (false_state("moments"), "state"),
}


@both_copies
@pytest.mark.parametrize("lie", LIES)
def test_whichever_copy_lies_about_the_update_is_named(make_company, shared_run, honest_digest, lie, party):
    run, (liar, offence) = shared_run(), LIES[lie]
    company = make_company(run, {party: liar})

    company.run(3)

    # the state after the last step is agreed on here
    assert company.weights_digest() == honest_digest(run, 3)
    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [(f"worker-{party}", offence)]
    assert company.lost == []
    for verdict in company.verdicts:
        explain_evidence(company.run_dir / str(verdict.evidence))


@both_copies
def test_a_lane_whose_norm_is_lied_about_names_its_server_when_the_lane_is_audited(
    make_company, shared_run, honest_digest, party
):
    run = shared_run(step_audit_rate=1.0)
    company = make_company(run, {party: with_fields(Commit, norm_squared=1e-9)})

    company.run(2)

    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [(f"worker-{party}", "gradient")]
    assert company.weights_digest() == honest_digest(run, 2)


def test_old_parts_frame_nobody(make_company, honest_digest):
    run = tiny_run()
    company = make_company(run, {2: showing_parts_of_the_step_before()})
    assert company.engine.shadows[1] == "worker-2"

    company.run(3)

    assert company.evicted == ["worker-2"]
    assert company.weights_digest() == honest_digest(run, 3)


def test_in_lockstep_a_stage_that_lies_about_its_norm_does_not_get_its_shadow_named(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(shadow="lockstep", owner_audit_rate=0.0))
    company = make_company(run, {1: with_fields(Commit, norm_squared=1e-9)})

    company.run(2)

    assert company.evicted == ["worker-1"]
    assert company.weights_digest() == honest_digest(run, 2)


@both_copies
def test_a_copy_that_brings_another_undo_copy_or_lane_than_it_has_does_not_get_the_other_named(
    make_company, shared_run, honest_digest, party
):
    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, UpdateReport):
            return false_state("weights").rewrite(outgoing)
        to_the_owner = isinstance(message, Bulk) and outgoing.receiver == "owner"
        return [type(outgoing)(outgoing.receiver, message, doubled(outgoing.payload))] if to_the_owner else [outgoing]

    run = shared_run()
    company = make_company(run, {party: Actor(rewrite=rewrite)})

    company.run(3)

    assert company.evicted == [f"worker-{party}"]
    assert company.weights_digest() == honest_digest(run, 3)


@both_copies
def test_a_league_about_a_made_up_lane_is_named_by_the_owners_audit(make_company, shared_run, honest_digest, party):
    other = 3 - party
    run = shared_run(step_audit_rate=1.0, owner_audit_rate=1.0)
    company = make_company(run, league_of_gradients(party, other))

    company.run(2)

    found = [(verdict.offence, verdict.party) for verdict in company.verdicts]
    assert found == [("gradient", f"worker-{party}"), ("collusion", f"worker-{other}")]
    assert company.weights_digest() == honest_digest(run, 2)


class _Stale(StageOptimizer):
    """Takes every update at a tenth of its learning rate, in the hands of both members of a league."""

    def step(self, gradients, lr, clip_coefficient):
        super().step(gradients, lr / 10, clip_coefficient)


def test_a_league_that_bends_the_update_is_named_by_the_owners_audit(make_company, shared_run):
    def bend(copy, held):
        if copy.spec.index == 1:
            copy.optimizer.__class__ = _Stale
        return copy

    seeing = make_company(shared_run(owner_audit_rate=1.0), {1: Actor(bend), 2: Actor(bend)})

    seeing.run(3)

    assert {(verdict.offence, verdict.party, verdict.stage) for verdict in seeing.verdicts} == {
        ("state", "worker-1", 1),
        ("state", "worker-2", 1),
    }
