"""A sample for which a step has no room is cut to it, charged like any other, and never longer than the step."""

import pytest
import torch

from phalanx.data import IGNORE, Batch
from phalanx.train.batches.private import PoissonLoader


class Order:
    is_mixed = False


class Rows:
    """Thirty rows, each its own number."""

    num_train_sequences, digest = 30, "00"

    def sample_order(self, seed, batch_size):
        return Order()

    def train_batch(self, numbers):
        ids = torch.tensor(numbers)[:, None]
        return Batch(ids, ids.clone(), tuple(numbers))


class Ledger:
    epsilon_bound = 0.0

    def __init__(self):
        self.charges = 0

    def charge_batch(self):
        self.charges += 1
        return self.charges - 1


def learned(loader):
    batch = loader.next_batch()
    return len(batch.labels), batch.labels[batch.labels != IGNORE].tolist()


@pytest.mark.parametrize("places", [8, 12, 30])
def test_rows_beyond_the_places_are_left_out_and_missing_ones_filled_without_targets(places):
    ledgers = Ledger(), Ledger()
    whole = PoissonLoader(Rows(), 10, 1, b"k" * 32, ledgers[0])
    capped = PoissonLoader(Rows(), 10, places, b"k" * 32, ledgers[1], places)

    for _ in range(40):
        length, rows = learned(capped)
        assert length == places
        assert rows == learned(whole)[1][:places]
    assert [ledger.charges for ledger in ledgers] == [40, 40]
