"""The causal loss: known values, the right gradient, masks that hold, and NaN that shows."""

import importlib
import inspect
import math

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, Int64, TypeCheckError, jaxtyped

from phalanx.data import IGNORE as DATA_IGNORE
from phalanx.errors import DataError
from phalanx.objectives import IGNORE, OBJECTIVES, causal_lm_loss, mark_classes, objective_of


def made(batch=3, seq=5, vocab=7, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, seq, vocab, generator=draw).to(dtype)
    return logits, torch.randint(vocab, (batch, seq), generator=draw)


def test_equal_logits_cost_the_log_of_the_vocabulary():
    loss, num_tokens = causal_lm_loss(torch.zeros(2, 3, 11), torch.ones(2, 3, dtype=torch.int64))

    assert num_tokens == 6
    assert float(loss) == pytest.approx(6 * math.log(11))


def test_two_tokens_cost_what_the_logistic_function_says():
    logits = torch.tensor([[[0.0, 2.0], [1.0, 0.0]]])

    loss, _ = causal_lm_loss(logits, torch.tensor([[1, 1]]))

    assert float(loss) == pytest.approx(math.log1p(math.exp(-2)) + math.log1p(math.exp(1)))


def test_the_gradient_is_the_one_of_finite_differences():
    logits, labels = made(dtype=torch.float32)
    labels[1, 2] = IGNORE
    logits.requires_grad_()
    causal_lm_loss(logits, labels)[0].backward()

    expected = torch.softmax(logits.detach(), dim=-1)
    expected -= torch.nn.functional.one_hot(labels.clamp(min=0), 7)
    expected[1, 2] = 0
    step = torch.zeros_like(expected)
    step[0, 1, 3] = 1e-2
    with torch.no_grad():
        slope = (causal_lm_loss(logits + step, labels)[0] - causal_lm_loss(logits - step, labels)[0]) / 2e-2

    torch.testing.assert_close(logits.grad, expected)
    assert float(slope) == pytest.approx(float(expected[0, 1, 3]), abs=1e-4)


def test_microbatches_add_up_to_the_batch_however_targets_are_spread():
    logits, labels = made(batch=4)
    labels[0] = IGNORE
    labels[1, 1:] = IGNORE
    whole, parts = logits.clone().requires_grad_(), logits.clone().requires_grad_()

    loss, num_tokens = causal_lm_loss(whole, labels)
    (loss / num_tokens).backward()
    for row in range(4):
        part, _ = causal_lm_loss(parts[row : row + 1], labels[row : row + 1])
        (part / num_tokens).backward()

    assert num_tokens == 11
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-6, atol=0)


def test_a_masked_position_has_no_say():
    logits, labels = made()
    labels[0, 0] = IGNORE
    other = logits.clone()
    other[0, 0] = 1e4

    assert torch.equal(causal_lm_loss(logits, labels)[0], causal_lm_loss(other, labels)[0])


def test_a_batch_without_targets_costs_nothing():
    logits, labels = made()
    logits.requires_grad_()

    loss, num_tokens = causal_lm_loss(logits, torch.full_like(labels, IGNORE))
    loss.backward()

    assert (float(loss.detach()), num_tokens) == (0.0, 0)
    assert not logits.grad.any()


def test_half_precision_is_lossless_from_the_logits_on():
    logits, labels = made(dtype=torch.bfloat16)

    loss, _ = causal_lm_loss(logits, labels)

    assert loss.dtype == torch.float32
    assert torch.equal(loss, causal_lm_loss(logits.float(), labels)[0])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_number_shows_in_the_loss(poison):
    logits, labels = made()
    logits[1, 1, 1] = poison

    assert not torch.isfinite(causal_lm_loss(logits, labels)[0])


def test_a_bad_number_under_the_mask_shows_in_the_gradient():
    logits, labels = made()
    labels[1, 1] = IGNORE
    logits[1, 1, 1] = float("nan")
    logits.requires_grad_()

    causal_lm_loss(logits, labels)[0].backward()

    assert logits.grad.isnan().any()


@pytest.mark.parametrize("label", [7, -1, -101, 2**40])
def test_a_label_outside_the_vocabulary_is_refused(label):
    logits, labels = made()
    labels[2, 4] = label

    with pytest.raises(DataError, match=r"outside 0 \.\. 6"):
        causal_lm_loss(logits, labels)


@pytest.mark.parametrize("seq", [4, 6])
def test_shapes_that_do_not_fit_are_refused(seq):
    logits, _ = made()

    with pytest.raises((DataError, TypeCheckError)):
        causal_lm_loss(logits, torch.zeros(3, seq, dtype=torch.int64))
    with pytest.raises((DataError, TypeCheckError)):
        causal_lm_loss(logits[0], torch.zeros(3, 5, dtype=torch.int64))
    with pytest.raises((DataError, TypeCheckError)):
        causal_lm_loss(logits, torch.zeros(3, 5, dtype=torch.int32))


def test_the_signature_says_the_shapes(monkeypatch):
    module = importlib.import_module("phalanx.objectives.causal_lm")
    for name, value in (("Float", Float), ("Int64", Int64), ("Tensor", torch.Tensor)):
        monkeypatch.setattr(module, name, value, raising=False)
    checked = jaxtyped(typechecker=beartype)(inspect.unwrap(causal_lm_loss))
    logits, labels = made()

    checked(logits, labels)

    with pytest.raises(TypeCheckError):
        checked(logits, labels[:, :4])


def test_the_mask_is_the_one_that_the_data_uses():
    assert IGNORE == DATA_IGNORE


@pytest.mark.parametrize("name", [name for name, one in OBJECTIVES.items() if one.target == "label"])
def test_every_objective_is_a_sum_over_its_targets(name):
    objective, (logits, labels) = objective_of(name), made()
    if name == "classification":
        labels = mark_classes([0, 6, 3], [1, 5, 2], labels.shape[1])
    if name == "ppo":
        # the last column is the value
        labels = labels.clamp(max=logits.shape[-1] - 2)

    extras = {key: torch.linspace(-1, 2, labels.numel()).view_as(labels) for key in objective.extras}

    loss, num_tokens = objective(logits, labels, extras)
    first, first_tokens = objective(logits[:1], labels[:1], {key: rows[:1] for key, rows in extras.items()})
    rest, rest_tokens = objective(logits[1:], labels[1:], {key: rows[1:] for key, rows in extras.items()})

    assert loss.shape == ()
    assert num_tokens == first_tokens + rest_tokens
    torch.testing.assert_close(loss, first + rest)
