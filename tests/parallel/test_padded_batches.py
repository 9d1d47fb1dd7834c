"""A batch of any size is shared out to copies: the rows that fill it up have no targets."""

import pytest
import torch

from phalanx.data import DOCUMENTS, IGNORE, Batch
from phalanx.parallel import Controller


class CountingController(Controller):
    """Counts targets instead of asking ranks; keeps the shapes that it was asked for."""

    def __init__(self):
        self.shapes = []

    def evaluate_on_ranks(self, ids, labels, extras=None):
        self.shapes.append((*ids.shape, *(tuple(rows.shape) for rows in (extras or {}).values())))
        targets = int((labels != IGNORE).sum())
        return 0.5 * targets, targets


def batch_of(rows, extras):
    ids = torch.ones(rows, 3, dtype=torch.int64)
    return Batch(ids, ids.clone(), tuple(range(rows)), extras=extras(rows))


@pytest.mark.parametrize(("copies", "padded"), [(1, 5), (2, 6), (4, 8), (5, 5)])
def test_every_copy_gets_as_many_rows_and_no_target_is_counted_twice(copies, padded):
    controller = CountingController()
    extras = {"weights": torch.ones(5, 3), DOCUMENTS: torch.zeros(5, 3, dtype=torch.int64)}

    total, count = controller.sum_losses([batch_of(5, lambda rows: extras)], copies)

    assert (total, count) == (7.5, 15)
    assert controller.shapes == [(padded, 3, (padded, 3))]


def test_batches_are_added_up_and_none_is_zero():
    controller = CountingController()

    assert controller.sum_losses([], 2) == (0.0, 0)
    assert controller.sum_losses([batch_of(rows, lambda rows: {}) for rows in (1, 4)], 2) == (7.5, 15)
