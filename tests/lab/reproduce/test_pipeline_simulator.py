"""The simulator of the sweeps is the real pipeline, bit for bit."""

import pytest
import torch

from phalanx.lab.reproduce.arms.undefended import UndefendedArm
from phalanx.lab.reproduce.attacker import Attacker, LieSchedule
from phalanx.lab.reproduce.simulator import NoMessageCheck, Simulator
from phalanx.pipeline import GuardConfig
from phalanx.testing import MemoryCompany

STEPS = 4


def company_digest(tiny, cache, attacker=None):
    """What the real parties end with."""
    actors = {
        name: attacker.actor_for(number)
        for number, name in enumerate(tiny.run.pipeline.worker_names, start=1)
        if attacker is not None
    }
    with MemoryCompany(tiny.run, tiny.directory, actors, cache=cache) as company:
        company.run(STEPS)
        return company.weights_digest()


def simulated_digest(tiny, attacker=None, arm=UndefendedArm):
    setting = tiny.setting()
    setting.attacker.plan = None if attacker is None else attacker.plan
    with arm(setting) as arm:
        for step in range(STEPS):
            arm.step_arm(step, tiny.inputs(step))
        return arm.simulator.weights_digest(), setting.attacker


@pytest.mark.parametrize("mode", ["off", "phalanx"])
def test_a_clean_simulation_ends_with_the_bits_of_the_real_parties(make_tiny, model_cache, mode):
    tiny = make_tiny(4, GuardConfig(mode=mode))

    digest, _ = simulated_digest(tiny)

    assert digest == company_digest(tiny, model_cache)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_attacked_simulation_ends_with_the_bits_of_the_attacked_parties(make_tiny, model_cache, direction):
    tiny = make_tiny(4, GuardConfig(mode="off"))
    attacker = Attacker(LieSchedule(direction, 0.7, (1, 2), seed=3))

    digest, simulated = simulated_digest(tiny, attacker)

    assert digest == company_digest(tiny, model_cache, attacker)
    assert digest != simulated_digest(tiny)[0]
    order = [(lie.step, lie.party, lie.microbatch) for lie in simulated.lies]
    assert order == sorted((lie.step, lie.party, lie.microbatch) for lie in attacker.lies)
    assert 0 < len(simulated.attacked_steps) < STEPS


def test_every_message_of_a_step_is_in_the_list(tiny):
    attempt = Simulator(tiny.source, tiny.plan, Attacker(None)).run_attempt(0, tiny.inputs(0), NoMessageCheck())

    found = [(message.source, message.target, message.direction, message.microbatch) for message in attempt.messages]

    forward = [(stage, stage + 1, "forward", m) for m in range(4) for stage in range(5)]
    backward = [(stage, stage - 1, "backward", m) for m in range(4) for stage in (5, 4, 3, 2, 1)]
    assert found == forward + backward


def test_what_a_stage_got_is_what_the_one_before_it_sent(tiny):
    attempt = Simulator(tiny.source, tiny.plan, Attacker(None)).run_attempt(0, tiny.inputs(0), NoMessageCheck())
    sent = {(m.direction, m.target, m.microbatch): m.tensor for m in attempt.messages}

    checked = 0
    for message in attempt.messages:
        given = sent.get((message.direction, message.source, message.microbatch))
        if given is not None:
            assert torch.equal(message.cause, given)
            checked += 1
    assert checked == 2 * 4 * 4


def test_the_plan_names_one_middle_stage_in_about_its_share_of_steps():
    plan = LieSchedule("forward", 0.3, (1, 2, 3, 4), seed=5)

    liars = [plan.lying_stage(step) for step in range(2000)]

    assert {stage for stage in liars if stage is not None} == {1, 2, 3, 4}
    assert 0.25 < sum(stage is not None for stage in liars) / 2000 < 0.35
    assert liars != [LieSchedule("forward", 0.3, (1, 2, 3, 4), seed=6).lying_stage(step) for step in range(2000)]


def test_a_liar_that_was_removed_lies_no_more():
    attacker = Attacker(LieSchedule("forward", 1.0, (2,), seed=0))

    before = attacker.lying_stage_at(0)
    attacker.removed.add(2)

    assert (before, attacker.lying_stage_at(0)) == (2, None)


class Refusal:
    """Refuses one message."""

    def __init__(self, source, direction, microbatch):
        self.refused = (source, direction, microbatch)

    def accepts_message(self, message):
        return (message.source, message.direction, message.microbatch) != self.refused


@pytest.mark.parametrize(("direction", "reached"), [("forward", {0, 1, 2}), ("backward", {2, 3, 4, 5})])
def test_a_refused_message_stops_its_microbatch_and_no_other(tiny, direction, reached):
    simulator = Simulator(tiny.source, tiny.plan, Attacker(None))

    attempt = simulator.run_attempt(0, tiny.inputs(0), Refusal(2, direction, 1))

    sent = {m.source for m in attempt.messages if (m.direction, m.microbatch) == (direction, 1)}
    whole = range(2, 6) if direction == "backward" else ()
    assert sent == reached
    assert attempt.survivors == {stage: 4 if stage in whole else 3 for stage in range(6)}
