"""One class a text: known values, padding that has no part in it, and figures that are counted right."""

import math

import pytest
import torch
from jaxtyping import TypeCheckError

from phalanx.errors import DataError
from phalanx.objectives import IGNORE, ConfusionMatrix, classification_loss, mark_classes, pooled_logits


def made(batch=3, seq=5, classes=4):
    draw = torch.Generator().manual_seed(0)
    lengths = [1 + place % seq for place in range(batch)]
    labels = [place % classes for place in range(batch)]
    return torch.randn(batch, seq, classes, generator=draw), mark_classes(labels, lengths, seq)


def test_equal_logits_cost_the_log_of_the_classes():
    loss, texts = classification_loss(torch.zeros(2, 3, 5), mark_classes([4, 0], [3, 1], 3))

    assert texts == 2
    assert float(loss) == pytest.approx(2 * math.log(5))


def test_a_text_is_the_mean_of_its_tokens():
    logits = torch.tensor([[[2.0, 0.0], [0.0, 4.0], [100.0, 0.0]]])

    pooled, classes = pooled_logits(logits, mark_classes([1], [2], 3))

    assert pooled.tolist() == [[1.0, 2.0]]
    assert classes.tolist() == [1]
    assert float(classification_loss(logits, mark_classes([1], [2], 3))[0]) == pytest.approx(math.log1p(math.exp(-1)))


@pytest.mark.parametrize("padding", [1e9, float("nan"), float("inf")])
def test_padding_has_no_part_in_loss_and_gradient(padding):
    logits, labels = made()
    spoiled = logits.clone()
    spoiled[0, 1:] = padding
    gradients = []
    for values in (logits, spoiled):
        values.requires_grad_()
        loss, _ = classification_loss(values, labels)
        loss.backward()
        gradients.append((loss.detach(), values.grad))

    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


def test_a_bad_number_inside_a_text_shows_in_the_loss():
    logits, labels = made()
    logits[2, 1, 0] = float("nan")

    assert not torch.isfinite(classification_loss(logits, labels)[0])


def test_the_gradient_is_the_one_of_finite_differences():
    logits, labels = made()
    logits.requires_grad_()
    classification_loss(logits, labels)[0].backward()
    step = 1e-2
    for place in ((0, 0, 1), (1, 1, 2), (2, 2, 2), (1, 3, 0)):
        values = []
        for sign in (1, -1):
            moved = logits.detach().clone()
            moved[place] += sign * step
            values.append(float(classification_loss(moved, labels)[0]))
        assert float(logits.grad[place]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=2e-3)


@pytest.mark.parametrize("labels", [[[IGNORE] * 3], [[0, 1, IGNORE]]])
def test_a_text_needs_one_label(labels):
    with pytest.raises(DataError, match="no label or several"):
        classification_loss(torch.zeros(1, 3, 2), torch.tensor(labels))


@pytest.mark.parametrize("label", [2, -1, 2**40])
def test_a_label_outside_the_classes_is_refused(label):
    with pytest.raises(DataError, match=r"outside 0 \.\. 1"):
        classification_loss(torch.zeros(1, 3, 2), mark_classes([label], [2], 3))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises((DataError, TypeCheckError)):
        classification_loss(torch.zeros(1, 4, 2), mark_classes([0], [2], 3))
    with pytest.raises(DataError, match="expected 1 to 3"):
        mark_classes([0], [4], 3)
    with pytest.raises(DataError, match="expected 1 to 3"):
        mark_classes([0], [0], 3)


def test_accuracy_and_macro_f1_are_counted():
    # class 0: precision 2/3, recall 1; class 1: precision 1, recall 1/2; class 2: never right; class 3: does not occur
    found = ConfusionMatrix.count_answers([0, 0, 0, 1, 1], [0, 0, 1, 1, 2], 4)

    assert found.counts == ((2, 0, 0, 0), (1, 1, 0, 0), (0, 1, 0, 0), (0, 0, 0, 0))
    assert found.accuracy == pytest.approx(3 / 5)
    assert found.macro_f1 == pytest.approx((4 / 5 + 2 / 4 + 0) / 3)


@pytest.mark.parametrize(("predicted", "true"), [([], []), ([0], [0, 1]), ([2], [0]), ([0], [-1])])
def test_what_cannot_be_counted_is_refused(predicted, true):
    with pytest.raises(DataError, match="confusion"):
        ConfusionMatrix.count_answers(predicted, true, 2)
