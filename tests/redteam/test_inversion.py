"""Attacks on hidden states win where they cross in the clear, and get what guessing gets where they do not."""

import pytest
import torch

from phalanx.errors import ModelError
from phalanx.models import StageSpec, build_stage
from phalanx.redteam.inversion import (
    WIRES,
    CandidateSearch,
    Front,
    LinearMap,
    NearestNeighbour,
    TrainedInverter,
    candidate_states,
    chance_share,
    opening_states,
    recover_tokens,
    share_of_tokens,
)
from phalanx.redteam.inversion.inverter import nearest_rows
from privacy_lab import GPT2, SEQ, VOCAB, at_most, text, tiny_model

DEPTHS = (0, 1, 3)
PUBLIC, PRIVATE = text(192, seed=1), text(96, seed=2)
KINDS = ("nearest_neighbour", "linear_map", "trained_inverter")


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("privacy"))


@pytest.fixture(scope="session")
def front(source):
    return Front(source, DEPTHS)


@pytest.fixture(scope="session")
def crossing(front):
    """Hidden states of both texts at each cut."""
    return front.hidden_states(PUBLIC), front.hidden_states(PRIVATE)


def inverter(kind, front, depth):
    if kind == "nearest_neighbour":
        everything = torch.arange(VOCAB)
        return NearestNeighbour(front, depth, everything, candidate_states(front, everything, 0, depth)[depth])
    return (
        LinearMap(front.embedding_table)
        if kind == "linear_map"
        else TrainedInverter(front.embedding_table, steps=40, width=64)
    )


def attack(kind, guard, front, crossing, depth):
    """Learn and recover under one guard."""
    wire = WIRES[guard]()
    known, seen = (wire.host_view(states[depth]) for states in crossing)
    attacker = inverter(kind, front, depth)
    attacker.fit_states(known, PUBLIC)
    return attacker, seen


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_read_off_a_plaintext_embedding(kind, front, crossing):
    attacker, seen = attack(kind, "plaintext", front, crossing, depth=0)

    assert share_of_tokens(recover_tokens(attacker, seen), PRIVATE) >= 0.8


@pytest.mark.quick_cases("0", "1")
@pytest.mark.parametrize("depth", DEPTHS)
def test_candidates_that_are_run_through_the_front_give_plaintext_away_at_any_depth(depth, front, crossing):
    proposer, seen = attack("linear_map", "plaintext", front, crossing, depth)
    search = CandidateSearch(front, depth, proposer, opening_states(front, VOCAB)[depth], widths=(16, VOCAB))
    search.fit_scale(WIRES["plaintext"]().host_view(crossing[0][depth]), PUBLIC)

    found = search.recover_tokens(seen[:12])

    assert share_of_tokens(found, PRIVATE[:12]) >= 0.95
    assert share_of_tokens(found, PRIVATE[:12]) >= share_of_tokens(recover_tokens(proposer, seen[:12]), PRIVATE[:12])


@pytest.mark.parametrize("guard", ["sealed", "masked"])
@pytest.mark.parametrize("kind", KINDS)
def test_from_sealed_frames_and_masked_integers_an_inverter_recovers_what_guessing_does(kind, guard, front, crossing):
    attacker, seen = attack(kind, guard, front, crossing, depth=0)

    share = share_of_tokens(recover_tokens(attacker, seen), PRIVATE)

    assert share <= at_most(chance_share(PUBLIC, PRIVATE), PRIVATE.numel())


@pytest.mark.parametrize("guard", ["sealed", "masked"])
def test_running_candidates_does_not_help_against_sealed_frames_and_masked_integers(guard, front, crossing):
    proposer, seen = attack("trained_inverter", guard, front, crossing, depth=1)
    search = CandidateSearch(front, 1, proposer, opening_states(front, VOCAB)[1])
    search.fit_scale(WIRES[guard]().host_view(crossing[0][1]), PUBLIC)

    found = search.recover_tokens(seen[:48])

    few = PRIVATE[:48]
    assert share_of_tokens(found, few) <= at_most(chance_share(PUBLIC, few), few.numel())


def test_learned_positions_do_not_hide_an_embedding(tmp_path):
    front = Front(tiny_model(tmp_path, GPT2), (0,))
    attacker = inverter("nearest_neighbour", front, 0)

    seen = WIRES["plaintext"]().host_view(front.states_at_depth(PRIVATE, 0))

    assert share_of_tokens(recover_tokens(attacker, seen), PRIVATE) >= 0.95


@pytest.mark.parametrize("guard", ["sealed", "masked"])
def test_the_same_states_look_different_each_time_and_like_nothing_that_was_sent(guard, crossing):
    states, wire = crossing[1][0], WIRES[guard]()

    once, again = wire.host_view(states), wire.host_view(states)

    assert torch.isfinite(once).all()
    assert once.shape == states.shape
    for other in (again, states):
        assert abs(float(torch.corrcoef(torch.stack([once.flatten(), other.flatten()]))[0, 1])) < 0.03


def test_a_plaintext_wire_shows_what_crosses(crossing):
    states = crossing[1][0]

    assert torch.allclose(WIRES["plaintext"]().host_view(states), states, rtol=2**-8)


def test_chance_is_always_saying_the_commonest_token_of_public_text():
    public, private = torch.tensor([[5, 5, 5, 1]]), torch.tensor([[5, 2, 5, 1], [0, 0, 0, 0]])

    assert chance_share(public, private) == 0.25


def test_nearest_rows_are_those_of_the_largest_cosine():
    table = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])

    found = nearest_rows(torch.tensor([[[0.1, 5.0], [-1.0, -0.1]]]), table, 2)

    assert found.tolist() == [[[1, 0], [2, 1]]]


def test_the_front_is_the_models_own(front, source):
    ids = PRIVATE[:2]
    states = front.hidden_states(ids)

    assert sorted(states) == list(DEPTHS)
    assert torch.equal(states[0], front.embedding_table[ids])
    assert torch.equal(front.states_at_depth(ids, 1), states[1])
    assert not torch.equal(states[1], states[3])
    assert states[3].shape == (2, SEQ, source.hidden_size)


def test_the_front_and_the_rest_say_what_the_whole_model_says(front, source):
    whole = build_stage(
        source, StageSpec(0, 1, 0, 4), adapter=None, activation_checkpointing=False, attention="sdpa", seed=0
    )
    ids = PRIVATE[0]

    assert torch.equal(front.next_tokens(ids, 5), whole.eval()(ids[None])[0, -1].topk(5).indices)


@pytest.mark.parametrize("depths", [(), (4,), (-1, 2)])
def test_a_cut_that_leaves_the_enclave_no_layer_is_refused(depths, source):
    with pytest.raises(ModelError, match="expected numbers from 0 to 3"):
        Front(source, depths)
