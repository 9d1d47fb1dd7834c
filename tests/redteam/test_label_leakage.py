"""Gradients in the clear give labels away; sealed and masked ones do not."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from phalanx.models import StageSpec, build_stage
from phalanx.redteam.inversion import WIRES, Front
from phalanx.redteam.inversion.label_leakage import LabelsByDirection, labels_of_logit_gradients
from privacy_lab import VOCAB, at_most, text, tiny_model

CLASSES, CUT, KNOWN = 4, 2, 64
IDS = text(320, seed=6)
LABELS = torch.randint(0, CLASSES, (len(IDS),), generator=torch.Generator().manual_seed(8))


@pytest.fixture(scope="session")
def gradients(tmp_path_factory):
    """Gradients of the logits and of the cut, for labels that have nothing to do with the text."""
    source = tiny_model(tmp_path_factory.mktemp("labels"))
    hidden = Front(source, (CUT,)).states_at_depth(IDS, CUT).requires_grad_()
    spec = StageSpec(1, 2, CUT, source.num_layers)
    back = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
    logits = back(hidden)[:, -1, :CLASSES]
    logits.retain_grad()
    cross_entropy(logits, LABELS).backward()
    return logits.grad, hidden.grad[:, -1]


def recovered_by_direction(seen):
    attacker = LabelsByDirection(CLASSES)
    attacker.fit_directions(seen[:KNOWN], LABELS[:KNOWN])
    return float((attacker.recover_labels(seen[KNOWN:]) == LABELS[KNOWN:]).double().mean())


def test_a_plaintext_gradient_of_the_logits_is_negative_at_the_label_alone(gradients):
    seen = WIRES["plaintext"]().host_view(gradients[0])

    assert torch.equal(labels_of_logit_gradients(seen), LABELS)


def test_a_plaintext_gradient_of_the_cut_points_away_from_its_label(gradients):
    assert recovered_by_direction(WIRES["plaintext"]().host_view(gradients[1])) >= 0.8


@pytest.mark.parametrize("guard", ["sealed", "masked"])
def test_sealed_and_masked_gradients_give_labels_away_as_guessing_does(guard, gradients):
    logits, cut = (WIRES[guard]().host_view(gradient) for gradient in gradients)
    guessing = 1 / CLASSES

    at_sight = float((labels_of_logit_gradients(logits) == LABELS).double().mean())

    # the labels are not quite even
    commonest = float(LABELS.bincount().max()) / len(LABELS)
    assert at_sight <= at_most(max(guessing, commonest), len(LABELS))
    assert recovered_by_direction(cut) <= at_most(max(guessing, commonest), len(LABELS) - KNOWN)


def test_next_tokens_are_read_off_the_gradient_of_a_language_model_head():
    logits = torch.randn((3, 5, VOCAB), generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = text(3, seed=9, seq=5)
    cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

    assert torch.equal(labels_of_logit_gradients(logits.grad), labels)
