"""The paper's transports among real processes: what they find, what each brings, and what each cannot see."""

import pytest
from tiny_arms import Tiny

from phalanx.lab.reproduce.arms.skip_layer import SkipLayerArm
from phalanx.lab.reproduce.arms.undefended import UndefendedArm
from phalanx.lab.reproduce.attacker import LieSchedule
from phalanx.lab.reproduce.parties import PaperRun, PaperSettings, PartyProcesses, RealParties
from phalanx.models import open_model
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan

pytestmark = pytest.mark.slow  # six processes import torch

STAGES, STEPS, SEED = 5, 5, 7
CHECKED = ("duplicated_block", "jumping_connection", "central_server")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Play a defence against a lie once; all tests of the module read the same companies."""
    cache, outcomes = tmp_path_factory.mktemp("parties"), {}
    plain = tiny_run(STAGES)
    plain = plain.model_copy(update={"train": plain.train.model_copy(update={"seed": SEED})})
    source = open_model(plain.model, cache / "models", SEED)
    tiny = Tiny(plain, source, make_plan(plain, source), cache)

    def play(defence, lie="none"):
        if (defence, lie) not in outcomes:
            paper = PaperRun(paper=PaperSettings(defence=defence, lie=lie, rate=0.6), run=plain)
            parties = RealParties(processes, paper, cache / "models")
            for step in range(STEPS):
                parties.train_step(step, tiny.inputs(step))
            outcomes[defence, lie] = parties.weights_digest(), parties.counts, parties.measure_usage()
        return outcomes[defence, lie]

    def simulate(arm, direction=None):
        plan = None if direction is None else LieSchedule(direction, 0.6, tuple(range(1, STAGES - 1)), SEED)
        with arm(tiny.setting(plan)) as simulated:
            for step in range(STEPS):
                simulated.step_arm(step, tiny.inputs(step))
            return simulated.weights_digest()

    with PartyProcesses(STAGES, cache / "parties.log") as processes:
        yield play, simulate


@pytest.mark.parametrize("defence", ["none", *CHECKED])
def test_honest_parties_have_the_bits_of_the_simulator_and_raise_no_alarm(played, defence):
    play, simulate = played

    digest, counts, _ = play(defence)

    assert digest == simulate(UndefendedArm)
    assert counts.alarms == []


@pytest.mark.parametrize("lie", ["forward", "backward"])
def test_without_a_defence_the_papers_attack_wins(played, lie):
    play, simulate = played

    digest, counts, _ = play("none", lie)

    assert digest == simulate(UndefendedArm, lie) != simulate(UndefendedArm)
    assert counts.missed_steps == counts.attacked_steps > 0


@pytest.mark.parametrize("lie", ["forward", "backward"])
@pytest.mark.parametrize("defence", CHECKED)
def test_every_attacked_step_is_found_narrowed_to_two_stages_and_left_out(played, defence, lie):
    play, simulate = played

    digest, counts, _ = play(defence, lie)

    assert digest == simulate(SkipLayerArm, lie)
    assert len(counts.alarms) == counts.attacked_steps == counts.redone_passes > 0
    assert (counts.honest_accused, counts.missed_steps) == (0, 0)
    assert all(second == first + 1 for _, first, second in counts.alarms)


def test_a_stage_that_shows_its_input_itself_can_show_a_false_one(played):
    play, _ = played

    found = {defence: play(defence, "false_input")[1] for defence in CHECKED}

    assert found["duplicated_block"].alarms == []
    assert found["duplicated_block"].missed_steps == found["duplicated_block"].attacked_steps > 0
    assert found["jumping_connection"].missed_steps == found["central_server"].missed_steps == 0


def test_a_stage_with_two_links_can_have_an_honest_one_accused_and_one_with_a_server_cannot(played):
    play, simulate = played

    (jumped, by_jump, _), (digest, by_server, _) = (
        play(defence, "equivocation") for defence in ("jumping_connection", "central_server")
    )

    # the last stage's duplicate is nobody's: a liar just before it has nobody to frame
    assert by_jump.honest_accused == len(by_jump.alarms) > 0
    assert jumped != simulate(UndefendedArm)
    assert by_server.alarms == []
    assert digest == simulate(UndefendedArm)


def test_the_server_carries_three_tensors_a_hop_and_the_others_two(played):
    play, _ = played
    sent = {defence: play(defence)[2] for defence in ("none", *CHECKED)}

    def total(defence, kinds=("forward", "backward", "jump", "claim")):
        return sum(party["sent_bytes"].get(kind, 0) for party in sent[defence].values() for kind in kinds)

    hops, checked = STAGES - 1, STAGES - 2
    tensor = total("none") / (2 * hops)
    for defence in ("duplicated_block", "jumping_connection"):
        assert total(defence) / tensor == pytest.approx(2 * (hops + checked), rel=0.05)
    assert total("central_server") / tensor == pytest.approx(2 * (2 * hops + checked), rel=0.05)
    assert sum(sent["central_server"]["server"]["sent_bytes"].values()) > total("none")
    assert sum(party["duplicate_bytes"] for party in sent["none"].values()) == 0
    # weights and two moments of each middle stage once more
    assert all(sent["central_server"][name]["duplicate_bytes"] > 0 for name in ("worker-2", "worker-3", "owner"))
    assert sent["central_server"]["worker-1"]["duplicate_bytes"] == 0
