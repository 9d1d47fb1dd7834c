"""A weight for each target: known values, the right gradient, masks that hold, and rows that do not fit refused."""

import pytest
import torch

from phalanx.errors import DataError
from phalanx.objectives import IGNORE, OBJECTIVES, causal_lm_loss, weighted_causal_lm_loss


def made(batch=3, seq=5, vocab=7):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, seq, vocab, generator=draw, requires_grad=True)
    labels = torch.randint(vocab, (batch, seq), generator=draw)
    return logits, labels, torch.randn(batch, seq, generator=draw)


def test_it_is_the_sum_of_weight_times_surprise():
    logits, labels, weights = made()
    surprise = -torch.log_softmax(logits.detach().to(torch.float64), -1).gather(2, labels.unsqueeze(2)).squeeze(2)

    loss, targets = weighted_causal_lm_loss(logits, labels, {"weights": weights})

    assert targets == 15
    assert float(loss.detach()) == pytest.approx(float((surprise * weights).sum()), rel=1e-5)


def test_the_gradient_of_a_token_is_its_weight_times_the_usual_one():
    logits, labels, weights = made()

    (usual,) = torch.autograd.grad(causal_lm_loss(logits, labels)[0], logits)
    (found,) = torch.autograd.grad(weighted_causal_lm_loss(logits, labels, {"weights": weights})[0], logits)

    torch.testing.assert_close(found, usual * weights.unsqueeze(2))


def test_weights_of_one_change_nothing_and_an_ignored_label_has_no_weight():
    logits, labels, weights = made()
    labels[0, :3] = IGNORE
    weights[0, :3] = torch.nan

    plain, targets = causal_lm_loss(logits, labels)
    ones, counted = weighted_causal_lm_loss(logits, labels, {"weights": torch.ones_like(weights)})

    assert (float(ones.detach()), counted) == (pytest.approx(float(plain.detach()), rel=1e-6), targets)
    assert torch.isfinite(weighted_causal_lm_loss(logits, labels, {"weights": weights})[0])
    weights[1, 0] = torch.nan
    assert torch.isnan(weighted_causal_lm_loss(logits, labels, {"weights": weights})[0])


@pytest.mark.parametrize(
    ("extras", "named"),
    [
        ({}, r"extras\.weights: the objective reads them, and the batch has none"),
        ({"weights": torch.ones(3, 4)}, r"extras\.weights: is float32 \[3, 4\], expected float32 \[3, 5\]"),
        ({"weights": torch.ones(3, 5, dtype=torch.float64)}, r"extras\.weights: is float64"),
        ({"weights": torch.ones(3, 5), "mask": torch.ones(3, 5)}, r"extras\.mask: the objective does not read them"),
    ],
)
def test_rows_that_the_objective_does_not_declare_are_refused_by_name(extras, named):
    logits, labels, _ = made()

    with pytest.raises(DataError, match=named):
        OBJECTIVES["weighted_causal_lm"](logits, labels, extras)


def test_an_objective_without_extra_rows_refuses_them():
    logits, labels, weights = made()

    assert torch.equal(OBJECTIVES["causal_lm"](logits, labels)[0], causal_lm_loss(logits, labels)[0])
    with pytest.raises(DataError, match=r"extras\.weights: the objective does not read them; remove them"):
        OBJECTIVES["causal_lm"](logits, labels, {"weights": weights})
