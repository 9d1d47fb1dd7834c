"""Several objectives at once: the gradient is the weighted sum of those of each alone, whatever the microbatches."""

import pytest
import torch
from pydantic import TypeAdapter

from phalanx.errors import DataError
from phalanx.objectives import IGNORE, OBJECTIVES, PART, SHARE, MixedSettings, ObjectiveChoice, objective_of

ROWS, SEQ, VOCAB = 2, 5, 7
KINDS = ("causal_lm", "weighted_causal_lm", "dpo")
WEIGHTS = (1.0, 0.5, 0.25)
PARTS = [number for number in range(3) for _ in range(2)]
"""Two microbatches of each."""


def step_rows(seed=0):
    """Features, labels and extra rows of each microbatch, with labels that are ignored here and there."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(len(PARTS), ROWS, SEQ, 3, generator=draw)
    labels = torch.randint(VOCAB, (len(PARTS), ROWS, SEQ), generator=draw)
    labels[0, 0, :3] = IGNORE
    labels[4, 1, 2:] = IGNORE
    own = {
        "weights": torch.rand(len(PARTS), ROWS, SEQ, generator=draw),
        "reference": -3 * torch.rand(len(PARTS), ROWS, generator=draw),
    }
    return features, labels, own


def shares_of(labels):
    """The weight of each part over its targets in the whole step."""
    parts = [objective_of(kind) for kind in KINDS]
    targets = [
        sum(parts[number].count_targets(labels[m]) for m, part in enumerate(PARTS) if part == number)
        for number in range(3)
    ]
    return [weight / count for weight, count in zip(WEIGHTS, targets, strict=True)], targets


def extras_of(m, own, shares, **changes):
    rows = {name: column[m] for name, column in own.items()}
    rows |= {PART: torch.full((ROWS,), PARTS[m]), SHARE: torch.full((ROWS,), shares[PARTS[m]])}
    return rows | changes


def test_the_gradient_of_a_step_is_the_weighted_sum_of_separately_computed_ones_bit_for_bit():
    features, labels, own = step_rows()
    shares, targets = shares_of(labels)
    mixed = objective_of(MixedSettings(parts=KINDS))
    head = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1), requires_grad=True)

    total = 0.0
    for m in range(len(PARTS)):
        loss, divisor = mixed(features[m] @ head, labels[m], extras_of(m, own, shares))
        assert divisor == 1 == mixed.count_targets(labels[m])
        torch.autograd.backward(loss)
        total += float(loss.detach())

    sums = torch.zeros_like(head)
    means = torch.zeros(3, 3, VOCAB, dtype=torch.float64)
    losses = [0.0, 0.0, 0.0]
    for m, number in enumerate(PARTS):
        alone = objective_of(KINDS[number])
        loss, _ = alone(features[m] @ head, labels[m], {name: own[name][m] for name in alone.extras})
        (gradient,) = torch.autograd.grad(loss * torch.tensor(shares[number]), head, retain_graph=True)
        sums += gradient
        (plain,) = torch.autograd.grad(loss, head)
        means[number] += plain.double() / targets[number]
        losses[number] += float(loss.detach()) / targets[number]
    assert torch.equal(head.grad, sums)
    by_hand = sum(weight * mean for weight, mean in zip(WEIGHTS, means, strict=True))
    torch.testing.assert_close(head.grad.double(), by_hand, rtol=1e-6, atol=1e-7)
    assert total == pytest.approx(sum(w * loss for w, loss in zip(WEIGHTS, losses, strict=True)), rel=1e-6)


def test_rows_of_other_objectives_are_not_read():
    _, labels, own = step_rows()
    shares, _ = shares_of(labels)
    mixed, logits = objective_of(MixedSettings(parts=KINDS)), torch.randn(ROWS, SEQ, VOCAB)
    plain = mixed(logits, labels[0], extras_of(0, own, shares))[0]

    zeros = {name: torch.zeros_like(column[0]) for name, column in own.items()}

    assert torch.equal(mixed(logits, labels[0], extras_of(0, own, shares, **zeros))[0], plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({PART: torch.tensor([0, 1])}, "give each microbatch one objective"),
        ({SHARE: torch.tensor([0.5, 0.25])}, "give each microbatch one objective"),
        ({PART: torch.tensor([3, 3])}, "has 3, but there are 3 objectives"),
        ({PART: torch.tensor([-1, -1])}, "has -1"),
        ({PART: torch.tensor([0.0, 0.0])}, "expected int64"),
        ({"reference": torch.zeros(ROWS, SEQ)}, r"expected float32 \[2\]"),
    ],
)
def test_a_microbatch_of_two_objectives_or_of_none_is_refused(changes, message):
    _, labels, own = step_rows()
    shares, _ = shares_of(labels)

    with pytest.raises(DataError, match=message):
        objective_of(MixedSettings(parts=KINDS))(
            torch.zeros(ROWS, SEQ, VOCAB), labels[0], extras_of(0, own, shares, **changes)
        )


def test_what_an_engine_is_told_of_several_objectives_survives_its_way_and_no_run_file_has_it():
    settings = MixedSettings(parts=("causal_lm", OBJECTIVES["dpo"].settings(beta=0.5)))
    choice = TypeAdapter(ObjectiveChoice)

    again = choice.validate_json(choice.dump_json(settings))

    assert again == settings
    assert again.parts[1].beta == 0.5
    assert "mixed" not in OBJECTIVES
    with pytest.raises(ValueError, match="dpoo"):
        choice.validate_json('{"kind": "mixed", "parts": ["causal_lm", "dpoo"]}')
