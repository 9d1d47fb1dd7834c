"""An auditor that says what its stage committed to is an accomplice; one that says something else is not."""

import pytest
import torch
from hand_made import HOLDER, OWNER, SHADOW, STAGE, make_world

from phalanx.models import open_model
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.evidence.files import ComparedTensors
from phalanx.pipeline.protocol.messages import Commit, GradientHeld, StepAudited
from phalanx.pipeline.protocol.signed import StatementReader
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.verify.state_judgement import judge_accomplice, judge_gradient_accomplice
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan

PLACE = {"epoch": 0, "step": 3, "stage": 1}


@pytest.fixture
def facts(model_cache):
    """Stage 1 of worker-1, shadowed by worker-2, has committed to a gradient that turned out to be made up."""
    run = tiny_run(guard=GuardConfig())
    plan = make_plan(run, open_model(run.model, model_cache, run.train.seed))
    found = StepFacts(plan, statements=StatementReader("run", lambda name: None), observe=lambda kind, body: None)
    found.assignment = Assignment(
        {0: "owner", 1: "worker-1", 2: "worker-2", 3: "owner"}, {1: "worker-2", 2: "worker-1"}
    )
    found.ledger.commits[STAGE] = Commit(**PLACE, received=(), sent=(), norm_squared=4.0, gradient="aa" * 32)
    return found


def audited(facts, gradient, norm_squared):
    facts.ledger.step_audits[(1, "worker-2")] = StepAudited(
        **PLACE, order=1, gradient=gradient, norm_squared=norm_squared
    )
    return judge_gradient_accomplice(facts, STAGE)


def test_who_vouches_for_a_made_up_gradient_is_named(facts):
    judgement = audited(facts, "aa" * 32, 4.0)

    assert (judgement.verdict.party, judgement.verdict.offence) == ("worker-2", "collusion")


@pytest.mark.parametrize(("gradient", "norm_squared"), [("bb" * 32, 4.0), ("aa" * 32, 1.0), ("aa" * 32, None)])
def test_who_found_another_gradient_or_norm_is_not(facts, gradient, norm_squared):
    # the stage lied about the norm alone: an auditor that reports the true one has found it out
    assert audited(facts, gradient, norm_squared) is None


def test_who_has_not_been_asked_is_not(facts):
    assert judge_gradient_accomplice(facts, STAGE) is None


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.fixture
def found(model_cache):
    """A message of stage 1 was judged wrong; returns the world and the judgement of its author."""
    world = make_world(model_cache)
    world.lie(-world.truth("forward"))
    judgement = world.facts.make_judgement("message", HOLDER, STAGE, "made up", accuser=OWNER)
    judgement.verdict = judgement.verdict.model_copy(update={"microbatch": 0, "direction": "forward"})
    judgement.compared = ComparedTensors({"claimed": -world.truth("forward"), "recomputed": world.truth("forward")})
    return world, judgement


def reported(world, digest, auditor=SHADOW, microbatch=0):
    report = world.report(microbatch).model_copy(update={"digests": {"forward": digest}})
    world.facts.ledger.reports[(STAGE, microbatch, auditor)] = report


def test_an_auditor_that_reported_the_very_bytes_of_the_lie_is_named_with_them(found):
    world, judgement = found
    reported(world, world.facts.ledger.messages[(STAGE, "forward", 0)].digest)

    second = judge_accomplice(world.facts, judgement)

    assert (second.verdict.party, second.verdict.offence, second.verdict.microbatch) == (SHADOW, "collusion", 0)
    assert torch.equal(second.compared.tensors["accuser"], second.compared.tensors["claimed"])
    # the culprit's own tensors stay as they were
    assert "accuser" not in judgement.compared.tensors


def another_digest(world, judgement):
    reported(world, "ee" * 32)


def another_party(world, judgement):
    reported(world, world.facts.ledger.messages[(STAGE, "forward", 0)].digest, "worker-9")


def another_microbatch(world, judgement):
    reported(world, world.facts.ledger.messages[(STAGE, "forward", 0)].digest, microbatch=1)


def it_accused(world, judgement):
    another_digest(world, judgement)
    reported(world, world.facts.ledger.messages[(STAGE, "forward", 0)].digest)
    judgement.verdict = judgement.verdict.model_copy(update={"accuser": SHADOW})


def it_is_the_owner(world, judgement):
    assignment = world.facts.assignment
    world.facts.assignment = type(assignment)(assignment.holders, {STAGE: OWNER})
    reported(world, world.facts.ledger.messages[(STAGE, "forward", 0)].digest, OWNER)


def another_offence(world, judgement):
    reported(world, world.facts.ledger.messages[(STAGE, "forward", 0)].digest)
    judgement.verdict = judgement.verdict.model_copy(update={"offence": "accusation"})


def no_microbatch(world, judgement):
    reported(world, world.facts.ledger.messages[(STAGE, "forward", 0)].digest)
    judgement.verdict = judgement.verdict.model_copy(update={"microbatch": None})


def nothing(world, judgement):
    pass


NOT_VOUCHED = [nothing, another_digest, another_party, another_microbatch, it_accused, it_is_the_owner, another_offence]


@pytest.mark.parametrize("how", [*NOT_VOUCHED, no_microbatch])
def test_an_auditor_that_did_not_vouch_for_the_lie_is_no_accomplice(found, how):
    world, judgement = found
    how(world, judgement)

    assert judge_accomplice(world.facts, judgement) is None


@pytest.mark.parametrize("shadow", ["gradient", "lockstep"])
def test_in_lockstep_what_the_shadow_holds_is_what_it_computed(model_cache, shadow):
    world = make_world(model_cache, shadow=shadow)
    commit = world.facts.ledger.commits[STAGE]
    said = {"gradient": commit.gradient, "norm_squared": commit.norm_squared}
    world.facts.ledger.held[STAGE, SHADOW] = GradientHeld(epoch=2, step=0, stage=1, **said, parts=())

    judgement = judge_gradient_accomplice(world.facts, STAGE)

    # what it was sent, it has not vouched for
    assert (judgement and judgement.verdict.party) == (SHADOW if shadow == "lockstep" else None)


def test_an_owner_that_audits_is_no_accomplice(model_cache):
    world = make_world(model_cache, shadow="lockstep")
    assignment = world.facts.assignment
    world.facts.assignment = type(assignment)(assignment.holders, {STAGE: OWNER})
    commit = world.facts.ledger.commits[STAGE]
    said = {"gradient": commit.gradient, "norm_squared": commit.norm_squared}
    world.facts.ledger.held[STAGE, OWNER] = GradientHeld(epoch=2, step=0, stage=1, **said, parts=())

    assert judge_gradient_accomplice(world.facts, STAGE) is None
