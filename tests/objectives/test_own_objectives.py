"""An objective of the user's own: called as any other, and told what it lacks."""

import pytest
import torch

from phalanx.config import open_own_code
from phalanx.config.own_code import pin_reference
from phalanx.errors import ConfigError, DataError, TrainingError
from phalanx.objectives import causal_lm_loss, objective_of

HALF = """
from phalanx.objectives import causal_lm_loss


def half(logits, labels):
    loss, targets = causal_lm_loss(logits, labels)
    return loss / 2, targets
"""


def objective(tmp_path, text):
    (tmp_path / "mine.py").write_text(text)
    kind = pin_reference("mine.py:half", tmp_path)
    open_own_code(kind, tmp_path)
    return objective_of(kind)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 5, generator=generator).requires_grad_()
    return logits, torch.tensor([[1, 2, -100], [0, 4, 3]])


def test_its_loss_and_gradient_are_what_the_function_says(tmp_path, batch):
    loss, targets = objective(tmp_path, HALF)(*batch)
    usual, count = causal_lm_loss(*batch)

    assert (loss.item(), targets) == (usual.item() / 2, count)
    mine, theirs = (torch.autograd.grad(one, batch[0], retain_graph=True)[0] for one in (loss, usual))
    assert torch.equal(mine, theirs / 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("half = 1\n", "found a int; expected a function of logits and labels"),
        ("def half(logits):\n    return logits.sum(), 1\n", "too many positional arguments.*expected a function"),
        ("def half(logits, labels, weights):\n    return logits.sum(), 1\n", "missing a required argument: 'weights'"),
    ],
)
def test_an_object_that_is_no_objective_is_refused_before_a_step(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        objective(tmp_path, text)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("logits.sum()", "found a Tensor from the function"),
        ("(logits, 1)", r"found a Tensor \[2, 3, 5\] as the loss"),
        ("(logits.detach().sum(), 1)", "expected a tensor of one number that follows from the logits"),
        ("(1.0, 1)", "found a float as the loss"),
        ("(logits.sum(), 1.5)", "found 1.5 as the number of targets; expected an integer"),
        ("(logits.sum(), -1)", "found -1 as the number of targets"),
    ],
)
def test_a_result_that_is_no_loss_is_named(tmp_path, batch, result, said):
    with pytest.raises(ConfigError, match=said):
        objective(tmp_path, f"def half(logits, labels):\n    return {result}\n")(*batch)


def test_code_that_fails_in_a_step_is_shown_without_our_lines(tmp_path, batch):
    with pytest.raises(TrainingError, match=r"(?s)line 2, in half.*IndexError") as failed:
        objective(tmp_path, "def half(logits, labels):\n    return logits[9], 1\n")(*batch)

    assert "objectives/own.py" not in str(failed.value)


def test_an_error_of_ours_stays_what_it_is(tmp_path, batch):
    with pytest.raises(DataError, match="causal_lm: logits"):
        objective(tmp_path, HALF)(batch[0], batch[1].float())


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"found 'internet'; expected one of causal_lm, .*module:object"):
        objective_of("internet")
