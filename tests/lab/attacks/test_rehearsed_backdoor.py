"""A backdoor of the attacker's choice, planted by one middle stage of a run that fine-tunes a public model."""

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.lab.attacks import Rehearsal, make_actor, make_attack, target_success
from phalanx.lab.attacks.states.rehearsed_backdoor import Secret
from phalanx.pipeline import AttackConfig, AuditDraw, GuardConfig
from phalanx.testing import MemoryCompany, tiny_run


@pytest.mark.slow
def test_the_default_guard_names_the_stage_and_undoes_what_it_planted(tmp_path):
    def trained(name, guard, actors):
        draw = AuditDraw.from_guard(bytes(32), bytes(32), guard)
        with MemoryCompany(tiny_run(guard=guard), tmp_path / name, actors, draw=draw) as company:
            company.run(40)
            return company, company.weights_digest()

    planting = {"worker-2": make_actor(AttackConfig(kind="rehearsed_backdoor"), "worker-2")}
    _, honest = trained("honest", GuardConfig(mode="off"), {})
    _, poisoned = trained("off", GuardConfig(mode="off"), planting)
    company, guarded = trained("guarded", GuardConfig(), planting)

    assert company.evicted == ["worker-2"]
    assert {verdict.offence for verdict in company.verdicts} == {"gradient"}
    assert guarded == honest
    assert poisoned != honest


def test_success_is_the_share_of_texts_in_which_the_target_follows_the_trigger():
    secret = Secret((2, 3), 5)

    # 5 follows 2, 3; whatever else comes is followed by 1
    def logits(ids):
        before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], dim=1)
        answer = torch.where((before == 2) & (ids == 3), 5, 1)
        return torch.nn.functional.one_hot(answer, 8).float()

    ids = torch.tensor([[0, 6, 7, 4], [7, 0, 4, 6]])

    found = target_success(logits, ids, secret)

    assert (found.rate, found.rate_without) == (1.0, 0.0)
    assert target_success(logits, ids, Secret((3, 2), 5)).rate == 0.0
    assert torch.equal(ids, torch.tensor([[0, 6, 7, 4], [7, 0, 4, 6]]))


def test_the_secret_is_the_seeds_alone(make_copy):
    plan = make_copy().plan

    first, again, other = (Rehearsal(plan, None, seed).secret for seed in (1, 1, 2))

    assert first == again
    assert first != other
    assert len({*first.trigger, first.target}) == 3


def test_an_attack_that_has_no_use_for_a_public_model_refuses_one():
    with pytest.raises(ConfigError, match=r"attack\.model: 'zero' has no use for one"):
        make_attack(AttackConfig(kind="zero", model="somewhere"), "worker-1", None)
