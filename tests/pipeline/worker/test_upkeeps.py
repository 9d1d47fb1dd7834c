"""Shadows that are kept fresh in other ways than by the weight gradient: what each one finds, and what it cannot."""

import pytest
import torch

from phalanx.errors import NoHolderError
from phalanx.lab.attacks import make_actor
from phalanx.models import LoraConfig, open_model
from phalanx.pipeline import AttackConfig, GuardConfig, StageCopy
from phalanx.pipeline.protocol.messages import Bulk, Commit
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.testing import Actor, rewrite_only, tiny_run
from phalanx.train.setup.layout import make_plan


@pytest.mark.quick_cases("wrong_learning_rate-state")
@pytest.mark.parametrize(("kind", "offence"), [("forward_sign_flip", "message"), ("wrong_learning_rate", "state")])
def test_a_liar_that_trains_adapters_is_named_and_its_shadow_takes_over(make_company, honest_digest, kind, offence):
    pytest.importorskip("peft")
    run = tiny_run(guard=GuardConfig(shadow="adapters", audit_rate=1.0), adapter=LoraConfig(rank=2))
    company = make_company(run, {1: make_actor(AttackConfig(kind=kind, from_step=1), "worker-1")})

    company.run(3)

    assert [(v.party, v.offence) for v in company.verdicts] == [("worker-1", offence)]
    assert company.engine.stage_holders[1] == "worker-2"
    assert company.weights_digest() == honest_digest(run, 3)


def saved_after(company, num_steps):
    company.run(num_steps)
    company.save_step()
    return company


def test_a_shadow_in_lockstep_finds_a_wrong_norm_in_the_stage_and_not_in_its_auditor(make_company):
    def lie(outgoing, commit):
        return [outgoing.with_fields({"norm_squared": 1e-9})] if commit.step == 1 else [outgoing]

    run = tiny_run(guard=GuardConfig(shadow="lockstep", step_audit_rate=1.0, owner_audit_rate=0.0))
    company = make_company(run, {1: Actor(rewrite=rewrite_only(Commit, lie))})

    company.run(2)

    assert [(v.party, v.offence) for v in company.verdicts] == [("worker-1", "gradient")]


def sending_an_unasked_gradient(run, cache):
    """Before it commits to a weight gradient of zeros in step 1, the stage sends its shadow the same."""
    copy = StageCopy.build_empty(make_plan(run, open_model(run.model, cache, run.train.seed)), 1)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in copy.module.trainable_parameters().items()}
    size = sum(tensor.nbytes for tensor in zeros.values())
    said = {"gradient": transfer_digest(zeros), "norm_squared": 0.0}

    def alter(outgoing, commit):
        if (commit.stage, commit.step) != (1, 1):
            return [outgoing]
        bulk = Bulk(epoch=commit.epoch, step=1, stage=1, purpose="gradient", offset=0, total=size)
        return [type(outgoing)("worker-2", bulk, bytes(size)), outgoing.with_fields(said)]

    return Actor(rewrite=rewrite_only(Commit, alter))


def test_a_shadow_in_lockstep_vouches_for_what_it_computed_and_not_for_what_it_was_sent(
    make_company, model_cache, honest_digest
):
    run = tiny_run(guard=GuardConfig(shadow="lockstep", owner_audit_rate=0.0))
    company = make_company(run, {1: sending_an_unasked_gradient(run, model_cache)})

    company.run(3)

    assert [(v.party, v.offence, v.step) for v in company.verdicts] == [("worker-1", "gradient", 1)]
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.slow
def test_both_holders_of_a_stage_that_are_lost_at_once_cost_the_steps_since_the_checkpoint(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(step_audit_rate=0.0, owner_audit_rate=0.0))
    company = saved_after(make_company(run), 2)
    company.run(2)
    company.kill_worker("worker-1")
    company.kill_worker("worker-2")

    with pytest.raises(NoHolderError):
        company.run(1)
        company.weights_digest()

    assert company.engine.next_step == 4
    assert company.fall_back() == 2
    assert set(company.engine.stage_holders.values()) == {"owner"}
    company.run(3)
    assert (sorted(company.lost), company.verdicts) == (["worker-1", "worker-2"], [])
    assert company.weights_digest() == honest_digest(run, 5)
