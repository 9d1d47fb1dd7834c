"""Attacks of a pipeline's middle stage win on what arrives in the clear, and get chance from noise and seals."""

import pytest
import torch

from phalanx.errors import ModelError
from phalanx.redteam.inversion import (
    WIRES,
    Front,
    GradientSearch,
    LinearMap,
    TextProperty,
    chance_share,
    recover_tokens,
    share_of_tokens,
)
from privacy_lab import GPT2, LLAMA, SEQ, at_most, text, tiny_model

DEPTH = 2
PUBLIC, PRIVATE = text(192, seed=1), text(24, seed=2)
KINDS, EACH = 2, 64


@pytest.fixture(scope="session", params=[LLAMA, GPT2], ids=["llama", "gpt2"])
def front(request, tmp_path_factory):
    return Front(tiny_model(tmp_path_factory.mktemp("stages"), request.param), (0, DEPTH))


def viewed(guard, states):
    """What the stage reads of states that were sent under a guard."""
    if guard == "noise":
        generator = torch.Generator().manual_seed(5)
        return states + 30 * states.std() * torch.randn(states.shape, generator=generator)
    return WIRES[guard]().host_view(states)


def search(front, guard):
    """What the gradient search recovers, led by the linear map."""
    known, seen = (viewed(guard, front.states_at_depth(ids, DEPTH)) for ids in (PUBLIC, PRIVATE))
    proposer = LinearMap(front.embedding_table)
    proposer.fit_states(known, PUBLIC)
    attack = GradientSearch(front, DEPTH, proposer)
    attack.fit_states(known, PUBLIC)
    return (share_of_tokens(recover_tokens(one, seen), PRIVATE) for one in (attack, proposer))


def test_embeddings_that_give_the_observed_states_name_the_tokens(front):
    by_gradient, by_map = search(front, "plaintext")

    assert by_gradient >= 0.7
    assert by_gradient > by_map


@pytest.mark.quick_cases("llama-noise")
@pytest.mark.parametrize("guard", ["noise", "sealed"])
def test_noise_and_seals_leave_the_gradient_search_what_guessing_gets(front, guard):
    by_gradient, _ = search(front, guard)

    assert by_gradient <= at_most(chance_share(PUBLIC, PRIVATE), PRIVATE.numel())


def test_embeddings_in_the_place_of_tokens_give_the_states_of_the_tokens(front):
    embedded = front.embedding_table[PRIVATE]

    assert torch.allclose(front.states_of_embeddings(embedded, DEPTH), front.states_at_depth(PRIVATE, DEPTH), atol=1e-5)
    # the front is left as it was
    assert not torch.equal(front.states_at_depth(PRIVATE, DEPTH)[0], front.states_at_depth(PRIVATE, DEPTH)[1])


@pytest.mark.parametrize("depth", [0, 1])
def test_a_cut_that_is_none_behind_a_block_is_refused(front, depth):
    with pytest.raises(ModelError, match=f"cut {depth}: is not one of"):
        front.states_of_embeddings(front.embedding_table[PRIVATE], depth)


def kinds_of_text(seed):
    """Texts of two kinds, of which one has more of the rare tokens."""
    common = text(EACH, seed)
    rare = torch.where(torch.rand(common.shape, generator=torch.Generator().manual_seed(seed)) < 0.5, common, 200)
    return torch.cat([common, rare]), torch.arange(KINDS).repeat_interleave(EACH)


@pytest.mark.parametrize(("guard", "low", "high"), [("plaintext", 0.9, 1.0), ("sealed", 0.0, None)])
def test_the_kind_of_a_text_is_told_from_its_activations_in_the_clear_alone(front, guard, low, high):
    (known, answers), (hidden, truth) = kinds_of_text(3), kinds_of_text(4)
    probe = TextProperty(KINDS)

    probe.fit_texts(viewed(guard, front.states_at_depth(known, DEPTH)), answers)
    share = float((probe.recover_labels(viewed(guard, front.states_at_depth(hidden, DEPTH))) == truth).double().mean())

    assert low <= share <= (at_most(1 / KINDS, len(truth)) if high is None else high)


def test_positions_are_pooled_without_the_first_one():
    probe = TextProperty(2)
    states = torch.zeros((4, SEQ, 3))
    states[:, 0] = 1e9
    states[:2, 1:, 0] = 1.0
    states[:2, 2:, 0] = 2.0
    probe.fit_texts(states, torch.tensor([0, 0, 1, 1]))

    assert probe.recover_labels(states).tolist() == [0, 0, 1, 1]
