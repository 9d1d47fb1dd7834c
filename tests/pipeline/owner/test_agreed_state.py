"""A stage's state as it is collected for a checkpoint: from either copy, if it is the one that both have signed."""

import pytest
import torch
from hand_made import HOLDER, OWNER, SHADOW, STAGE, STEP, make_world

from phalanx.errors import PeerLostError, VerificationError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.owner.engine import collect_agreed
from phalanx.pipeline.owner.step_log import StageState


@pytest.fixture
def world(model_cache):
    return make_world(model_cache)


def collect(world, purpose="state"):
    return world.judge_page(collect_agreed(world.facts, STAGE, purpose))


def altered(tensors):
    return {name: tensor + 1 for name, tensor in tensors.items()}


@pytest.mark.parametrize("purpose", ["state", "weights"])
def test_the_holder_brings_the_state_that_both_have_signed(world, purpose):
    found = collect(world, purpose)

    assert found.weights_digest() == world.state.weights
    assert [need.party for need in world.asked] == [HOLDER]


@pytest.mark.parametrize("purpose", ["state", "weights"])
@pytest.mark.parametrize("brings", [None, altered], ids=["nothing", "others"])
def test_where_the_holder_does_not_bring_it_the_shadow_does(world, purpose, brings):
    tensors, steps = world.bulks[(HOLDER, purpose)]
    world.bulks[(HOLDER, purpose)] = (brings(tensors), steps) if brings else None

    found = collect(world, purpose)

    assert found.weights_digest() == world.state.weights
    assert [need.party for need in world.asked] == [HOLDER, SHADOW]
    assert [(kind, body["party"]) for kind, body in world.events] == ([("refused", HOLDER)] if brings else [])


def test_a_state_of_another_step_is_not_used(world):
    for party in (HOLDER, SHADOW):
        world.bulks[(party, "state")] = (world.copy.state_tensors(), STEP + 1)

    with pytest.raises(VerificationError, match="worker-2 sent a state that differs from its signature"):
        collect(world)


def test_a_stage_without_a_shadow_has_its_holder_alone(world):
    world.facts.assignment = Assignment({0: OWNER, 1: HOLDER, 2: SHADOW, 3: OWNER}, {})
    world.bulks[(HOLDER, "state")] = None

    with pytest.raises(PeerLostError):
        collect(world)


def test_where_nothing_is_signed_what_comes_is_used(world):
    world.facts.agreed_states.clear()
    world.bulks[(HOLDER, "state")] = (altered(world.copy.state_tensors()), STEP)

    assert collect(world).compute_digest() != world.state


# --- a copy that came beside the training ----------------------------------------------------------------------------


def stage_state(world, tensors=None, num_steps=STEP, agreed=True):
    found = world.copy.optimizer.state_tensors() if tensors is None else tensors
    return StageState(STAGE, HOLDER, found, num_steps, world.state if agreed else None)


def test_a_copy_for_a_checkpoint_is_the_state_that_was_signed(world):
    stage_state(world).check_digest()


@pytest.mark.parametrize("letter", ["weight/", "exp_avg/", "exp_avg_sq/"])
def test_one_number_of_a_copy_that_differs_is_found(world, letter):
    tensors = {name: tensor.clone() for name, tensor in world.copy.optimizer.state_tensors().items()}
    name = next(name for name in sorted(tensors) if name.startswith(letter))
    tensors[name].view(-1)[0] += torch.tensor(1e-6)

    with pytest.raises(VerificationError, match="worker-1 sent a state that differs from its signature"):
        stage_state(world, tensors).check_digest()


def test_a_copy_of_another_step_is_found(world):
    with pytest.raises(VerificationError):
        stage_state(world, num_steps=STEP + 1).check_digest()


def test_the_owners_own_stages_have_nothing_to_be_compared_with(world):
    stage_state(world, {}, agreed=False).check_digest()
