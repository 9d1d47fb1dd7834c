"""The clipped sum of the gradients of single rows: against rows that are run one by one, and where they cannot be."""

import pytest
import torch
from torch import nn

from late_imports import need_module
from phalanx.errors import ConfigError
from phalanx.parallel.privacy import row_gradients
from phalanx.parallel.privacy.row_gradients import RowGradients
from phalanx.security.privacy import PrivacyConfig

need_module("opacus", "needs the extra `dp`")

ROWS, WIDTH, CLIP = 6, 5, 0.7
WAYS = pytest.mark.parametrize("clipping", ["hooks", "ghost"])


class Plain(nn.Module):
    """Two layers and a table, on rows of tokens."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(9, WIDTH), nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids):
        return self.outer(torch.tanh(self.inner(self.norm(self.table(ids)))))


class Tied(Plain):
    def forward(self, ids):
        hidden = self.inner(self.norm(self.table(ids)))
        return hidden @ self.table.weight.T


class RowMixture(Plain):
    """A layer that sees the mean of all rows."""

    def forward(self, ids):
        hidden = self.norm(self.table(ids))
        return self.outer(self.inner(hidden + hidden.mean(0, keepdim=True)))


def gradients_of(module, clipping):
    settings = PrivacyConfig(epsilon=1.0, delta=1e-5, clip_norm=CLIP, clipping=clipping)
    return RowGradients(module, settings)


def made(kind=Plain):
    torch.manual_seed(4)
    module = kind()
    ids = torch.randint(0, 9, (ROWS, 4))
    # loud and quiet rows: some are clipped, some are not
    scales = torch.tensor([0.01, 8.0, 0.3, 0.0, 2.0, 90.0])

    def losses(numbers):
        return (module(ids[numbers]) ** 2).mean((1, 2)) * scales[numbers]

    return module, losses


def one_by_one(module, losses, rows=range(ROWS)):
    parameters = list(module.parameters())
    total, norms = [torch.zeros_like(one) for one in parameters], []
    for row in rows:
        given = torch.autograd.grad(losses(torch.tensor([row])).sum(), parameters)
        norm = torch.stack([one.norm() for one in given]).norm()
        norms.append(float(norm))
        for place, one in zip(total, given, strict=True):
            place.add_(one * min(1.0, CLIP / (float(norm) + 1e-6)))
    return total, norms


@WAYS
def test_the_sum_is_that_of_rows_which_are_clipped_one_by_one(clipping):
    module, losses = made()
    expected, norms = one_by_one(module, losses)
    assert min(norms) < CLIP < max(norms)
    rows = gradients_of(module, clipping)
    total = rows.zero_total()

    for part in torch.arange(ROWS).chunk(2):
        rows.add_rows(losses, part, total)

    for found, one in zip(total, expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-7)
    rows.set_gradients(total)
    assert all(one.grad is place for one, place in zip(module.parameters(), total, strict=True))


def test_where_linear_layers_alone_are_trained_ghost_runs_the_backward_pass_once(monkeypatch):
    module, losses = made()
    module.table.requires_grad_(False)
    module.norm.requires_grad_(False)
    trained = [one for one in module.parameters() if one.requires_grad]
    expected = [torch.zeros_like(one) for one in trained]
    for row in range(ROWS):
        given = torch.autograd.grad(losses(torch.tensor([row])).sum(), trained)
        norm = float(torch.stack([one.norm() for one in given]).norm())
        for place, one in zip(expected, given, strict=True):
            place.add_(one * min(1.0, CLIP / (norm + 1e-6)))
    rows = gradients_of(module, "ghost")
    # the first two sums are checked, by passes of their own
    for _ in range(2):
        rows.add_rows(losses, torch.arange(ROWS), rows.zero_total())
        rows.set_gradients(rows.zero_total())
    passes, real = [], row_gradients._run_backward
    monkeypatch.setattr(
        row_gradients, "_run_backward", lambda loss, **given: passes.append(loss) or real(loss, **given)
    )
    total = rows.zero_total()

    rows.add_rows(losses, torch.arange(ROWS), total)

    assert len(passes) == 1
    for found, one in zip(total, expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-7)


@WAYS
def test_leaving_a_row_out_moves_the_sum_by_the_bound_at_most_and_not_without_clipping(clipping):
    module, losses = made()
    # the loud row moves a sum that is not clipped by far more
    assert one_by_one(module, losses, [ROWS - 1])[1][0] > 5 * CLIP
    rows = gradients_of(module, clipping)
    whole, without = rows.zero_total(), rows.zero_total()

    rows.add_rows(losses, torch.arange(ROWS), whole)
    rows.add_rows(losses, torch.arange(ROWS - 1), without)

    moved = torch.stack([(a - b).norm() for a, b in zip(whole, without, strict=True)]).norm()
    assert 0.99 * CLIP < float(moved) <= CLIP * (1 + 1e-5)


@WAYS
def test_a_row_with_a_gradient_that_is_not_finite_counts_for_nothing(clipping):
    module, losses = made()
    expected, _ = one_by_one(module, losses, [0, 1, 3, 4, 5])
    rows = gradients_of(module, clipping)
    total = rows.zero_total()

    def poisoned(numbers):
        found = losses(numbers)
        return found * torch.where(numbers == 2, torch.inf, 1.0)

    heard = rows.add_rows(poisoned, torch.arange(ROWS), total)

    assert len(heard) == ROWS - 1
    for found, one in zip(total, expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-7)


@WAYS
@pytest.mark.parametrize("kind", [Tied, RowMixture])
def test_a_model_of_which_rows_cannot_be_told_apart_is_refused_before_the_first_step(clipping, kind):
    module, losses = made(kind)
    rows = gradients_of(module, clipping)

    with pytest.raises(ConfigError, match="gradients of single rows of this model cannot be told apart"):
        rows.add_rows(losses, torch.arange(ROWS), rows.zero_total())
