"""An auditor that says what its stage committed to is an accomplice; one that says something else is not."""

import pytest

from phalanx.models import open_model
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol.messages import Commit, StepAudited
from phalanx.pipeline.protocol.signed import Statements
from phalanx.pipeline.verify.accomplices import vouched_for_gradient
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan

PLACE = {"epoch": 0, "step": 3, "stage": 1}
SHARE = (1, 0)


@pytest.fixture
def docket(model_cache):
    """Stage 1 of worker-1, shadowed by worker-2, has committed to a gradient that turned out to be made up."""
    run = tiny_run(guard=GuardConfig())
    plan = make_plan(run, open_model(run.model, model_cache, run.train.seed))
    found = StepFacts(plan, statements=Statements("run", lambda name: None), observe=lambda kind, body: None)
    found.assignment = Assignment(
        {0: "owner", 1: "worker-1", 2: "worker-2", 3: "owner"}, {1: "worker-2", 2: "worker-1"}
    )
    found.ledger.commits[SHARE] = Commit(**PLACE, received=(), sent=(), norm_squared=4.0, gradient="aa" * 32)
    return found


def audited(docket, gradient, norm_squared):
    docket.ledger.step_audits[(1, "worker-2")] = StepAudited(**PLACE, gradient=gradient, norm_squared=norm_squared)
    return vouched_for_gradient(docket, SHARE)


def test_who_vouches_for_a_made_up_gradient_is_named(docket):
    judgement = audited(docket, "aa" * 32, 4.0)

    assert (judgement.verdict.party, judgement.verdict.offence) == ("worker-2", "collusion")


@pytest.mark.parametrize(("gradient", "norm_squared"), [("bb" * 32, 4.0), ("aa" * 32, 1.0), ("aa" * 32, None)])
def test_who_found_another_gradient_or_norm_is_not(docket, gradient, norm_squared):
    # the stage lied about the norm alone: an auditor that reports the true one has found it out
    assert audited(docket, gradient, norm_squared) is None


def test_who_has_not_been_asked_is_not(docket):
    assert vouched_for_gradient(docket, SHARE) is None
