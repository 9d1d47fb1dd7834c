"""Preferences: values worked out by hand, right gradients, masks that hold, equal sides, and rows that are no pairs."""

import math

import pytest
import torch

from phalanx.errors import DataError
from phalanx.objectives import IGNORE, OBJECTIVES, objective_of
from phalanx.objectives.reward import row_scores

PAIRED = ("dpo", "ipo", "orpo", "simpo", "cpo", "kto", "reward")
ROWS, SEQ, VOCAB = 4, 6, 7


def made(kind, dtype=torch.float32, seed=0):
    """Logits, labels with answers of different lengths, and all extra rows that the objective reads."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, SEQ, 1 if kind == "reward" else VOCAB, generator=draw, dtype=dtype)
    labels = torch.randint(VOCAB, (ROWS, SEQ), generator=draw)
    for row, (begin, end) in enumerate(((2, 5), (2, 4), (1, 5), (3, 4))):
        labels[row, :begin] = IGNORE
        labels[row, end:] = IGNORE
    rows = {
        "reference": -3 * torch.rand(ROWS, generator=draw),
        "wanted": torch.tensor([1, 1, 0, 0]),
        "margin": torch.tensor([0.25, 0.25, 0.0, 0.0]),
    }
    return logits.requires_grad_(), labels, {name: rows[name] for name in OBJECTIVES[kind].extras}


def by_hand(kind, logits, labels, extras):
    """The same in plain numbers, one row after the other."""
    totals, counts, scores = [], [], []
    for row in range(ROWS):
        places = [place for place in range(SEQ) if labels[row, place] != IGNORE]
        scores.append(float(logits[row, places[-1] + 1, 0].detach()))
        if kind != "reward":
            spoken = torch.log_softmax(logits[row].detach().to(torch.float64), -1)
            totals.append(sum(float(spoken[place, labels[row, place]]) for place in places))
        counts.append(len(places))
    reference = extras.get("reference", torch.zeros(ROWS)).tolist()
    ratio = [total - known for total, known in zip(totals, reference, strict=False)]
    mean = [total / count for total, count in zip(totals, counts, strict=False)]

    moved = max(0.0, (ratio[1] + ratio[3]) / 2) if kind == "kto" else 0.0
    formulas = {
        "dpo": lambda c, r: lost(0.1 * (ratio[c] - ratio[r])),
        "ipo": lambda c, r: (ratio[c] / counts[c] - ratio[r] / counts[r] - 5.0) ** 2,
        "orpo": lambda c, r: -mean[c] + 0.1 * lost(odds(mean[c]) - odds(mean[r])),
        "simpo": lambda c, r: lost(2.0 * (mean[c] - mean[r]) - 1.0),
        "cpo": lambda c, r: lost(0.1 * (totals[c] - totals[r])) - mean[c],
        "kto": lambda c, r: 1 - 1 / (1 + math.exp(-0.1 * (2 * int(extras["wanted"][c]) - 1) * (ratio[c] - moved))),
        "reward": lambda c, r: lost(scores[c] - scores[r] - float(extras["margin"][c])),
    }
    return formulas[kind](0, 1) + formulas[kind](2, 3)


def lost(gap):
    return math.log1p(math.exp(-gap))


def odds(value):
    return value - math.log1p(-math.exp(value))


@pytest.mark.parametrize("kind", PAIRED)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_is_the_papers_formula_over_the_pairs(kind, seed):
    logits, labels, extras = made(kind, seed=seed)

    loss, pairs = objective_of(kind)(logits, labels, extras)

    assert pairs == 2 == OBJECTIVES[kind].count_targets(labels)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(by_hand(kind, logits, labels, extras), rel=1e-5)


@pytest.mark.parametrize("kind", PAIRED)
def test_the_gradient_is_that_of_finite_differences(kind):
    logits, labels, extras = made(kind)
    objective = objective_of(kind)
    (found,) = torch.autograd.grad(objective(logits, labels, extras)[0], logits)
    draw = torch.Generator().manual_seed(9)
    for _ in range(3):
        direction = torch.randn(logits.shape, generator=draw)
        if kind == "kto":
            # the divergence that companions estimate is a number to the gradient, and they have none
            direction[1::2] = 0
        step = 1e-2
        near = [logits.detach() + sign * step * direction for sign in (1, -1)]
        above, below = (float(objective(one, labels, extras)[0]) for one in near)
        assert float((found * direction).sum()) == pytest.approx((above - below) / (2 * step), rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("kind", PAIRED)
def test_what_stands_beside_ignored_labels_counts_nothing_and_a_nan_that_counts_shows(kind):
    logits, labels, extras = made(kind)
    objective = objective_of(kind)
    usual = float(objective(logits, labels, extras)[0].detach())
    dirty = logits.detach().clone()
    # behind the last token of every row, and before its answer
    for row in range(ROWS):
        end = int((labels[row] != IGNORE).nonzero().max())
        dirty[row, end + 2 :] = torch.nan
    assert float(objective(dirty, labels, extras)[0]) == usual

    dirty[0, 3:] = torch.nan

    assert torch.isnan(objective(dirty, labels, extras)[0])


@pytest.mark.parametrize(("kind", "expected"), [("dpo", math.log(2)), ("ipo", 25.0), ("reward", math.log(2))])
def test_equal_sides_give_the_loss_of_no_opinion_and_pull_both_rows_apart_alike(kind, expected):
    logits, labels, extras = made(kind)
    logits = logits.detach()[:1].repeat(2, 1, 1).requires_grad_()
    labels = labels[:1].repeat(2, 1)
    extras = {name: torch.zeros(2) if name == "margin" else rows[:1].repeat(2) for name, rows in extras.items()}

    loss, _ = objective_of(kind)(logits, labels, extras)
    (gradient,) = torch.autograd.grad(loss, logits)

    assert float(loss.detach()) == pytest.approx(expected)
    assert torch.equal(gradient[0], -gradient[1])


@pytest.mark.parametrize("kind", PAIRED)
def test_a_row_without_partner_or_without_answer_is_refused(kind):
    logits, labels, extras = made(kind)
    odd = {name: rows[:3] for name, rows in extras.items()}
    with pytest.raises(DataError, match=f"{kind}: a microbatch of 3 rows, and rows are pairs; make train.batch_size"):
        objective_of(kind)(logits[:3], labels[:3], odd)

    labels[2] = IGNORE

    with pytest.raises(DataError, match=f"{kind}: row 2 has no"):
        objective_of(kind)(logits, labels, extras)


@pytest.mark.parametrize("kind", sorted(set(PAIRED) - {"kto"}))
def test_the_losses_of_microbatches_add_up_to_that_of_the_batch(kind):
    logits, labels, extras = made(kind)
    objective = objective_of(kind)

    parts = [
        objective(logits[at : at + 2], labels[at : at + 2], {k: v[at : at + 2] for k, v in extras.items()})[0].detach()
        for at in (0, 2)
    ]

    assert float(sum(parts)) == pytest.approx(float(objective(logits, labels, extras)[0].detach()), rel=1e-6)


def test_smoothing_doubts_every_pair_a_little():
    logits, labels, extras = made("dpo")
    settings = OBJECTIVES["dpo"].settings(beta=0.5, label_smoothing=0.2)
    right = float(objective_of(OBJECTIVES["dpo"].settings(beta=0.5))(logits, labels, extras)[0].detach())
    turned = torch.tensor([1, 0, 3, 2])
    wrong = objective_of(OBJECTIVES["dpo"].settings(beta=0.5))(
        logits[turned], labels[turned], {"reference": extras["reference"][turned]}
    )[0]

    found = float(objective_of(settings)(logits, labels, extras)[0].detach())

    assert found == pytest.approx(0.8 * right + 0.2 * float(wrong.detach()), rel=1e-6)


def test_kto_takes_no_divergence_below_zero_and_no_other_label_than_wanted_or_not():
    logits, labels, extras = made("kto")
    near = {**extras, "reference": extras["reference"] + 100.0}
    ratios = by_hand("kto", logits, labels, near)
    assert float(objective_of("kto")(logits, labels, near)[0].detach()) == pytest.approx(ratios, rel=1e-5)
    (gradient,) = torch.autograd.grad(objective_of("kto")(logits, labels, extras)[0], logits)
    assert not gradient[1::2].any()

    extras["wanted"][0] = 2

    with pytest.raises(DataError, match=r"extras\.wanted: has another number than 0 and 1"):
        objective_of("kto")(logits, labels, extras)


def test_a_certain_answer_has_finite_odds():
    logits = torch.full((2, 3, 2), -60.0)
    logits[:, :, 0] = 60.0
    labels = torch.tensor([[0, 0, IGNORE], [0, 0, IGNORE]])
    logits.requires_grad_()

    loss, _ = objective_of("orpo")(logits, labels, {})
    (gradient,) = torch.autograd.grad(loss, logits)

    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


def test_a_score_is_that_of_a_rows_last_token_and_a_row_that_is_cut_off_has_none():
    logits, labels, _ = made("reward")
    assert torch.equal(row_scores(logits, labels), logits[range(ROWS), [5, 4, 5, 4], 0])

    labels[3, -1] = 0

    with pytest.raises(DataError, match="row 3 has no answer that ends in it"):
        row_scores(logits, labels)
    with pytest.raises(DataError, match=r'give the model one score with model\.head = "score"'):
        row_scores(torch.zeros(2, 3, 9), torch.zeros(2, 3, dtype=torch.int64))
